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
from rerpi_rllib.core.distributions import DiagonalGaussian
from rerpi_rllib.core.networks import ActorCritic


@dataclass(frozen=True)
class LossSettings:
    """The numbers of the algorithm; names and defaults are documented with ``RERPIConfig``."""

    gamma: float
    policy_evaluation: str
    num_bootstrap_samples: int
    n_step: int
    retrace_lambda: float
    num_action_samples: int
    weighting: str
    epsilon: float
    temperature_solver: str
    ranking_eta: float
    epsilon_penalty: float | None
    fit: str
    epsilon_mu: float
    epsilon_sigma: float
    epsilon_pi: float
    per_dimension_kl: bool

    @property
    def multipliers(self) -> list[str]:
        """Names of the multipliers that these settings learn."""
        names = {"decoupled": ["alpha_mu", "alpha_sigma"], "coupled": ["alpha"], "unconstrained": []}
        found = list(names[self.fit])
        if self.temperature_solver == "adam":
            if self.weighting == "exponential":
                found.append("temperature")
            if self.epsilon_penalty is not None:
                found.append("penalty_temperature")
        return found


def rerpi_loss(
    nets: ActorCritic,
    batch: Mapping[str, Tensor],
    settings: LossSettings,
    improve_policy: bool = True,
    move_multipliers: bool = True,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The total loss and the metrics of one update.

    Args:
        nets: online and target networks and multipliers.
        batch: for TD(0) transitions, ``obs`` ``[B, O]``, ``new_obs`` ``[B, O]``, ``actions``
            ``[B, D]`` (unclipped), ``rewards`` ``[B]`` and ``terminateds`` ``[B]`` (0 or 1);
            otherwise windows of K steps, ``obs`` ``[B, K + 1, O]``, the others ``[B, K, ...]``, with
            ``action_logp`` and ``loss_mask`` (False beyond the end of the episode).
        settings: the algorithm's numbers.
        improve_policy: whether to do Steps 2 and 3 too, or the critic's Step 1 alone.
        move_multipliers: whether Step 3 moves its multipliers too, or the policy alone.

    Returns:
        Scalar loss and a dictionary of detached scalars.
    """
    if settings.policy_evaluation == "td0":
        states, actions = batch["obs"], batch["actions"]
        targets = _td0_targets(nets, batch, settings)
    else:
        steps = batch["loss_mask"]
        states, actions = batch["obs"][:, :-1][steps], batch["actions"][steps]
        targets = _window_targets(nets, batch, settings)[steps]
    critic_loss = (nets.critic(states, actions) - targets).square().mean()
    loss, metrics = critic_loss, {"critic_loss": critic_loss}
    if improve_policy:
        improvement_loss, improvement_metrics = _improvement_loss(
            nets, states, settings, move_multipliers
        )
        loss = loss + improvement_loss
        metrics |= improvement_metrics
    return loss, {name: value.detach() for name, value in metrics.items()}


# -- Step 1: policy evaluation. --


def _values(nets: ActorCritic, obs: Tensor, settings: LossSettings) -> Tensor:
    """V of the target networks: the mean of Q over sampled actions; ``[M, O]`` to ``[M]``."""
    actions = nets.target_policy(obs).sample(settings.num_bootstrap_samples)
    return nets.target_critic(obs, actions).mean(dim=0)


@torch.no_grad()
def _td0_targets(nets: ActorCritic, batch: Mapping[str, Tensor], settings: LossSettings) -> Tensor:
    discounts = settings.gamma * (1.0 - batch["terminateds"])
    next_values = _values(nets, batch["new_obs"], settings)
    return evaluation.td_targets(batch["rewards"], discounts, next_values)


@torch.no_grad()
def _window_targets(nets: ActorCritic, batch: Mapping[str, Tensor], settings: LossSettings) -> Tensor:
    """n-step or Retrace targets of each step of each window, ``[B, K]``."""
    obs, mask = batch["obs"], batch["loss_mask"]
    next_values = _values(nets, obs[:, 1:].flatten(0, 1), settings).view(mask.shape)
    rewards = batch["rewards"]
    discounts = settings.gamma * (1.0 - batch["terminateds"])
    # The last step of an episode that was cut off bootstraps from its final observation, and nothing
    # beyond it counts: that is a reward with the value in it, and a discount of zero.
    last = mask & ~torch.nn.functional.pad(mask[:, 1:], (0, 1), value=True)
    rewards = torch.where(last, rewards + discounts * next_values, rewards)
    discounts = torch.where(last, torch.zeros_like(discounts), discounts)
    if settings.policy_evaluation == "nstep":
        return evaluation.nstep_targets(rewards, discounts, next_values, settings.n_step)
    inner, actions = obs[:, 1:-1], batch["actions"][:, 1:]
    next_q = nets.target_critic(inner.flatten(0, 1), actions.flatten(0, 1)).view(actions.shape[:-1])
    log_rhos = nets.target_policy(inner).log_prob(actions) - batch["action_logp"][:, 1:]
    return evaluation.retrace_targets(
        rewards, discounts, next_values, next_q, log_rhos, settings.retrace_lambda
    )


# -- Steps 2 and 3: weight the target policy's actions and fit the online policy to them. --


def _improvement_loss(
    nets: ActorCritic, obs: Tensor, settings: LossSettings, move_multipliers: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    with torch.no_grad():
        target = nets.target_policy(obs)
        actions = target.sample(settings.num_action_samples)
        q_values = nets.target_critic(obs, actions)
    action_weights, temperature_loss, metrics = _weights(nets, q_values, settings)
    if settings.epsilon_penalty is not None:
        # The two sets of weights are added, so they sum to two; the multipliers absorb the factor.
        cost = weights.out_of_bounds_cost(actions)
        temperature, penalty_loss = _temperature(
            nets, "penalty_temperature", cost, settings.epsilon_penalty, settings
        )
        action_weights = action_weights + weights.exponential_weights(cost, temperature)
        temperature_loss = temperature_loss + penalty_loss
    online = nets.policy(obs)
    fit_loss, dual_loss, fit_metrics = _fit(nets, actions, action_weights, online, target, settings)
    metrics |= fit_metrics
    metrics |= {"q_mean": q_values.mean(), "policy_stddev_mean": online.stddev.mean()}
    # Zero, not left out: data-parallel learners expect a gradient for every parameter.
    return fit_loss + float(move_multipliers) * dual_loss + temperature_loss, metrics


def _temperature(
    nets: ActorCritic, name: str, values: Tensor, epsilon: float, settings: LossSettings
) -> tuple[Tensor, Tensor]:
    """The temperature of exponential weights, and the loss that moves it if it is learned."""
    if settings.temperature_solver == "exact":
        temperature = weights.solve_temperature(values, epsilon)
        return temperature, torch.zeros_like(temperature)
    temperature = nets.multipliers[name]()
    return temperature.detach(), weights.temperature_dual(values, temperature, epsilon)


def _weights(
    nets: ActorCritic, q_values: Tensor, settings: LossSettings
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Step 2: weights of the actions, the temperature's loss, metrics."""
    loss = q_values.new_zeros(())
    if settings.weighting == "identity":
        return weights.identity_weights(q_values), loss, {}
    metrics = {}
    if settings.weighting == "exponential":
        temperature, loss = _temperature(nets, "temperature", q_values, settings.epsilon, settings)
        found = weights.exponential_weights(q_values, temperature)
        metrics["temperature"] = temperature
    else:
        found = weights.ranking_weights(q_values, settings.ranking_eta)
    metrics["kl_nonparametric"] = weights.kl_to_uniform(found).mean()
    metrics["weights_ess"] = weights.effective_sample_size(found).mean()
    return found, loss, metrics


def _fit(
    nets: ActorCritic,
    actions: Tensor,
    action_weights: Tensor,
    online: DiagonalGaussian,
    target: DiagonalGaussian,
    settings: LossSettings,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Step 3: the fit's loss for the policy, that for the multipliers, metrics."""
    samples = (actions, action_weights, online.mean, online.stddev)
    alphas = {name: nets.multipliers[name]() for name in settings.multipliers if "alpha" in name}
    metrics = {name: alpha.mean() for name, alpha in alphas.items()}
    if settings.fit == "unconstrained":
        policy_loss = objective = fitting.unconstrained_fit(*samples).policy_loss
        dual_loss = torch.zeros_like(objective)
    else:
        fit: fitting.DecoupledFit | fitting.CoupledFit
        if settings.fit == "decoupled":
            fit = fitting.decoupled_fit(
                *samples,
                target.mean,
                target.stddev,
                alphas["alpha_mu"],
                alphas["alpha_sigma"],
                settings.epsilon_mu,
                settings.epsilon_sigma,
                settings.per_dimension_kl,
            )
        else:
            fit = fitting.coupled_fit(
                *samples, target.mean, target.stddev, alphas["alpha"], settings.epsilon_pi
            )
            metrics["kl"] = fit.kl
        # Adam does not see a constant scale, but a multiplier that rises or falls tenfold within a
        # few hundred updates would throw its running averages off, and the policy with them.
        scale = 1.0 / (1.0 + sum(alpha.detach().max() for alpha in alphas.values()))
        policy_loss, objective = fit.policy_loss, scale * (fit.policy_loss + fit.penalty)
        dual_loss = fit.dual_loss
    kl_mu = fitting.gaussian_kl_mean(online.mean, target.mean, target.stddev).mean(dim=0)
    kl_sigma = fitting.gaussian_kl_stddev(online.stddev, target.stddev).mean(dim=0)
    # Of each dimension where the bounds are: what is shown is what is bounded.
    shown = Tensor.mean if settings.per_dimension_kl else Tensor.sum
    metrics |= {"policy_loss": policy_loss, "kl_mu": shown(kl_mu), "kl_sigma": shown(kl_sigma)}
    return objective, dual_loss, metrics
