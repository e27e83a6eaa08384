"""One learner update's loss: Steps 1, 2 and 3 of the paper on one batch.

Every term moves only its own parameters (the others are detached in it), so one backward pass of
their sum serves the critic, the policy and the multipliers, each with its own optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rerpi_rllib.core import evaluation, fitting, weights
from rerpi_rllib.core.networks import ActorCritic


@dataclass(frozen=True)
class LossSettings:
    """The numbers of the algorithm; names and defaults are documented with ``RERPIConfig``."""

    gamma: float
    epsilon: float
    epsilon_mu: float
    epsilon_sigma: float
    epsilon_penalty: float | None
    per_dimension_kl: bool
    temperature_solver: str
    num_action_samples: int
    num_bootstrap_samples: int


def _exponential_weights(
    values: Tensor, epsilon: float, multipliers: nn.ModuleDict, name: str, settings: LossSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, their temperature, and the loss that moves it if it is learned."""
    if settings.temperature_solver == "exact":
        temperature = weights.solve_temperature(values, epsilon)
        loss = torch.zeros_like(temperature)
    else:
        temperature = multipliers[name]()
        loss = weights.temperature_dual(values, temperature, epsilon)
    return weights.exponential_weights(values, temperature.detach()), temperature, loss


def rerpi_loss(
    nets: ActorCritic,
    batch: Mapping[str, Tensor],
    settings: LossSettings,
    improve_policy: bool = True,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The total loss and the metrics of one update.

    Args:
        nets: online and target networks and multipliers.
        batch: ``obs`` ``[B, O]``, ``new_obs`` ``[B, O]``, ``actions`` ``[B, D]`` (unclipped),
            ``rewards`` ``[B]`` and ``terminateds`` ``[B]`` (0 or 1).
        settings: the algorithm's numbers.
        improve_policy: whether to do Steps 2 and 3 too, or the critic's Step 1 alone.

    Returns:
        Scalar loss and a dictionary of detached scalars.
    """
    loss, metrics = _evaluation_loss(nets, batch, settings)
    if improve_policy:
        improvement_loss, improvement_metrics = _improvement_loss(nets, batch["obs"], settings)
        loss = loss + improvement_loss
        metrics |= improvement_metrics
    return loss, {name: value.detach() for name, value in metrics.items()}


def _evaluation_loss(
    nets: ActorCritic, batch: Mapping[str, Tensor], settings: LossSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """Step 1: squared error of the critic against targets from the target networks."""
    with torch.no_grad():
        next_actions = nets.target_policy(batch["new_obs"]).sample(settings.num_bootstrap_samples)
        next_values = nets.target_critic(batch["new_obs"], next_actions).mean(dim=0)
        discounts = settings.gamma * (1.0 - batch["terminateds"])
        targets = evaluation.td_targets(batch["rewards"], discounts, next_values)
    loss = (nets.critic(batch["obs"], batch["actions"]) - targets).square().mean()
    return loss, {"critic_loss": loss}


def _improvement_loss(
    nets: ActorCritic, obs: Tensor, settings: LossSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """Steps 2 and 3: weight the target policy's actions and fit the online policy to them."""
    with torch.no_grad():
        target = nets.target_policy(obs)
        actions = target.sample(settings.num_action_samples)
        q_values = nets.target_critic(obs, actions)
    action_weights, temperature, temperature_loss = _exponential_weights(
        q_values, settings.epsilon, nets.multipliers, "temperature", settings
    )
    kl_nonparametric = weights.kl_to_uniform(action_weights).mean()
    if settings.epsilon_penalty is not None:
        # The two sets of weights are added, so they sum to two; the multipliers absorb the factor.
        penalty_weights, _, penalty_loss = _exponential_weights(
            weights.out_of_bounds_cost(actions),
            settings.epsilon_penalty,
            nets.multipliers,
            "penalty_temperature",
            settings,
        )
        action_weights = action_weights + penalty_weights
        temperature_loss = temperature_loss + penalty_loss

    online = nets.policy(obs)
    alpha_mu, alpha_sigma = nets.multipliers["alpha_mu"](), nets.multipliers["alpha_sigma"]()
    fit = fitting.decoupled_fit(
        actions,
        action_weights,
        online.mean,
        online.stddev,
        target.mean,
        target.stddev,
        alpha_mu,
        alpha_sigma,
        settings.epsilon_mu,
        settings.epsilon_sigma,
        settings.per_dimension_kl,
    )
    # Adam does not see a constant scale, but a multiplier that rises or falls tenfold within a few
    # hundred updates would throw its running averages off, and the policy with them.
    scale = 1.0 / (1.0 + alpha_mu.detach().max() + alpha_sigma.detach().max())
    loss = scale * (fit.policy_loss + fit.penalty) + fit.dual_loss + temperature_loss
    return loss, {
        "policy_loss": fit.policy_loss,
        "kl_mu": fit.kl_mu.mean(),
        "kl_sigma": fit.kl_sigma.mean(),
        "alpha_mu": alpha_mu.mean(),
        "alpha_sigma": alpha_sigma.mean(),
        "temperature": temperature,
        "kl_nonparametric": kl_nonparametric,
        "q_mean": q_values.mean(),
        "policy_stddev_mean": online.stddev.mean(),
        "weights_ess": weights.effective_sample_size(action_weights).mean(),
    }
