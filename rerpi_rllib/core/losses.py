"""One learner update's loss: Steps 1, 2 and 3 of the paper on one batch.

Every term moves only its own parameters (the others are detached in it), so one backward pass of
their sum serves the critic, the policy and the multipliers, each with its own optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rerpi_rllib.core import evaluation, fitting, weights
from rerpi_rllib.core.networks import ActorCritic


@dataclass(frozen=True)
class LossSettings:
    """The numbers of the algorithm; names and defaults are documented with ``RERPIConfig``."""

    gamma: float
    epsilon: float
    epsilon_mu: float
    epsilon_sigma: float
    per_dimension_kl: bool
    temperature_solver: str
    num_action_samples: int
    num_bootstrap_samples: int


def rerpi_loss(
    nets: ActorCritic, batch: Mapping[str, Tensor], settings: LossSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """The total loss and the metrics of one update.

    Args:
        nets: online and target networks and multipliers.
        batch: ``obs`` ``[B, O]``, ``new_obs`` ``[B, O]``, ``actions`` ``[B, D]`` (unclipped),
            ``rewards`` ``[B]`` and ``terminateds`` ``[B]`` (0 or 1).
        settings: the algorithm's numbers.

    Returns:
        Scalar loss and a dictionary of detached scalars.
    """
    obs = batch["obs"]

    # Step 1: policy evaluation.
    with torch.no_grad():
        next_actions = nets.target_policy(batch["new_obs"]).sample(settings.num_bootstrap_samples)
        next_values = nets.target_critic(batch["new_obs"], next_actions).mean(dim=0)
        discounts = settings.gamma * (1.0 - batch["terminateds"])
        targets = evaluation.td_targets(batch["rewards"], discounts, next_values)
    critic_loss = (nets.critic(obs, batch["actions"]) - targets).square().mean()

    # Step 2: weights over actions of the target policy.
    with torch.no_grad():
        target = nets.target_policy(obs)
        actions = target.sample(settings.num_action_samples)
        q_values = nets.target_critic(obs, actions)
    if settings.temperature_solver == "exact":
        temperature = weights.solve_temperature(q_values, settings.epsilon)
        temperature_loss = torch.zeros_like(temperature)
    else:
        temperature = nets.multipliers["temperature"]()
        temperature_loss = weights.temperature_dual(q_values, temperature, settings.epsilon)
    action_weights = weights.exponential_weights(q_values, temperature.detach())

    # Step 3: fit the online policy to them.
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
    policy_objective = scale * (fit.policy_loss + fit.penalty)
    loss = critic_loss + policy_objective + fit.dual_loss + temperature_loss
    metrics = {
        "critic_loss": critic_loss,
        "policy_loss": fit.policy_loss,
        "kl_mu": fit.kl_mu.mean(),
        "kl_sigma": fit.kl_sigma.mean(),
        "alpha_mu": alpha_mu.mean(),
        "alpha_sigma": alpha_sigma.mean(),
        "temperature": temperature,
        "kl_nonparametric": weights.kl_to_uniform(action_weights).mean(),
        "q_mean": q_values.mean(),
        "policy_stddev_mean": online.stddev.mean(),
        "weights_ess": weights.effective_sample_size(action_weights).mean(),
    }
    return loss, {name: value.detach() for name, value in metrics.items()}
