"""One learner update's loss: Steps 1, 2 and 3 of the paper on one batch.

Every loss moves only its own parameters (the others are detached in it), so one backward pass of
their sum serves the critic, the policy and the multipliers, each with its own optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rerpi_rllib.core import evaluation, weights
from rerpi_rllib.core.constraints import Constraint
from rerpi_rllib.core.distributions import Distribution
from rerpi_rllib.core.fitting import fit_policy
from rerpi_rllib.core.networks import ActorCritic
from rerpi_rllib.core.policies import POLICIES


_LABELS = {"mu": "mean", "sigma": "covariance", "mixture": "mixture weights", "pi": "policy"}


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
    policy: str
    fit: str
    epsilon_mu: float
    epsilon_sigma: float
    epsilon_mixture: float
    epsilon_pi: float
    per_dimension_kl: bool
    entropy_weight: float

    @property
    def epsilons(self) -> dict[str, float]:
        """The bounds of Step 3 by the part of the policy that each holds."""
        parts = {"decoupled": POLICIES[self.policy].PARTS, "coupled": ("pi",)}.get(self.fit, ())
        return {part: getattr(self, f"epsilon_{part}") for part in parts}

    @property
    def penalty(self) -> float | None:
        """The bound of the action penalty if there is one: discrete actions have no outside."""
        return None if self.policy == "categorical" else self.epsilon_penalty

    def constraints(self, bounded_actions: bool = True) -> tuple[Constraint, ...]:
        """The constraints of Steps 2 and 3, in the order in which they are shown.

        Args:
            bounded_actions: whether the action space has bounds; without them there is no penalty.
        """
        found = [
            Constraint(
                part,
                _LABELS[part],
                epsilon,
                f"alpha_{part}",
                per_dimension=self.per_dimension_kl and part in ("mu", "sigma"),
                schedule="late",
            )
            for part, epsilon in self.epsilons.items()
        ]
        if self.fit == "value_gradient":
            return tuple(found)
        learned = self.temperature_solver == "adam"
        if self.weighting == "exponential":
            found.append(
                Constraint(
                    *("nonparametric", "weights", self.epsilon, "temperature"),
                    learned=learned,
                    minimum=1e-8,
                )
            )
        if self.penalty is not None and bounded_actions:
            found.append(
                Constraint(
                    *("penalty", "action penalty", self.penalty, "penalty_temperature"),
                    learned=learned,
                    minimum=1e-8,
                )
            )
        return tuple(found)

    @property
    def multipliers(self) -> list[str]:
        """Names of the multipliers that these settings learn."""
        return [constraint.multiplier for constraint in self.constraints() if constraint.learned]


# What :func:`ask_targets` adds to a batch.
TARGETS, CANDIDATES = "targets", "candidates"


@torch.no_grad()
def ask_targets(
    nets: ActorCritic,
    batches: Sequence[Mapping[str, Any]],
    improve_policy: Sequence[bool],
    settings: LossSettings,
) -> list[dict[str, Any]]:
    """The batches of several updates, with all that their losses take from the target networks.

    Those do not change between two copies, so it can be had for many updates at once: with small
    batches the number of operations counts, not their size. The temperature is then the one of all
    these states together.

    Args:
        nets, settings: as for :func:`rerpi_losses`.
        batches: those of updates between which no copy is made.
        improve_policy: for each of them, whether it does Steps 2 and 3 too.
    """
    rows = [len(batch["rewards"]) for batch in batches]
    together = batches[0]
    if len(batches) > 1:
        together = {key: torch.cat([batch[key] for batch in batches]) for key in together}
    targets = critic_targets(nets, together, settings).split(rows)
    found = [{**batch, TARGETS: part} for batch, part in zip(batches, targets)]
    improving = [batch for batch, improves in zip(found, improve_policy) if improves]
    if improving and settings.fit != "value_gradient":
        states = [_states(batch, settings) for batch in improving]
        candidates = ask_candidates(nets, torch.cat(states), settings).split(list(map(len, states)))
        for batch, part in zip(improving, candidates):
            batch[CANDIDATES] = part
    return found


def rerpi_losses(
    nets: ActorCritic,
    batch: Mapping[str, Any],
    settings: LossSettings,
    improve_policy: bool = True,
    move_multipliers: bool = True,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The losses and the metrics of one update.

    Args:
        nets: online and target networks and multipliers.
        batch: for TD(0) transitions, ``obs`` ``[B, O]``, ``new_obs`` ``[B, O]``, ``actions``
            ``[B, D]`` (unclipped; ``[B, 1]`` if discrete), ``rewards`` ``[B]`` and ``terminateds``
            ``[B]`` (0 or 1); otherwise windows of K steps, ``obs`` ``[B, K + 1, O]``, the others
            ``[B, K, ...]``, with ``action_logp`` and ``loss_mask`` (False beyond the end of the
            episode). What :func:`ask_targets` has added is not computed again.
        settings: the algorithm's numbers.
        improve_policy: whether to do Steps 2 and 3 too, or the critic's Step 1 alone.
        move_multipliers: whether Step 3 moves its multipliers too, or the policy alone.

    Returns:
        Scalar losses by what they move, "critic", "policy" and "dual" (the multipliers), and a
        dictionary of detached scalars.
    """
    losses, metrics = critic_loss(nets, batch, settings)
    if improve_policy:
        found, found_metrics = policy_losses(nets, batch, settings, move_multipliers)
        losses |= found
        metrics |= found_metrics
    return losses, metrics


def rerpi_loss(*args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum of :func:`rerpi_losses`, whose gradient is that of each, and the metrics."""
    losses, metrics = rerpi_losses(*args, **kwargs)
    return torch.stack(list(losses.values())).sum(), metrics


def critic_loss(
    nets: ActorCritic, batch: Mapping[str, Any], settings: LossSettings
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Step 1's share of :func:`rerpi_losses`: it depends on the critic and the target networks."""
    targets = batch[TARGETS] if TARGETS in batch else critic_targets(nets, batch, settings)
    actions = nets.policy.encode_actions(batch["actions"])
    if settings.policy_evaluation != "td0":
        steps = batch["loss_mask"]
        actions, targets = actions[steps], targets[steps]
    loss = nets.critic.loss(_states(batch, settings), actions, targets)
    return {"critic": loss}, {"critic_loss": loss.detach()}


def policy_losses(
    nets: ActorCritic,
    batch: Mapping[str, Any],
    settings: LossSettings,
    move_multipliers: bool = True,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The share of Steps 2 and 3: it depends on the policy, the multipliers and the target networks.

    Value gradients depend on the critic too.
    """
    states = _states(batch, settings)
    if settings.fit == "value_gradient":
        losses, metrics = _value_gradient_loss(nets, states, settings)
    else:
        candidates = batch.get(CANDIDATES) or ask_candidates(nets, states, settings)
        losses, metrics = improvement_losses(nets, states, candidates, settings, move_multipliers)
    return losses, {name: value.detach() for name, value in metrics.items()}


def _states(batch: Mapping[str, Any], settings: LossSettings) -> Tensor:
    """``[M, O]``: the states of a batch's transitions."""
    if settings.policy_evaluation == "td0":
        return batch["obs"]
    return batch["obs"][:, :-1][batch["loss_mask"]]


# -- Step 1: policy evaluation. --


@torch.no_grad()
def critic_targets(nets: ActorCritic, batch: Mapping[str, Tensor], settings: LossSettings) -> Tensor:
    """What the critic learns, ``[B]`` or ``[B, K]``; with T more for samples of the return."""
    if settings.policy_evaluation == "td0":
        return _td0_targets(nets, batch, settings)
    return _window_targets(nets, batch, settings)


def _values(nets: ActorCritic, obs: Tensor, settings: LossSettings) -> Tensor:
    """What to bootstrap from at each of M states, ``[M, O]``, by the target networks.

    V, the mean of Q over the policy's actions: ``[M, 1]``. For a critic that learns the distribution
    of returns, samples of it: ``[M, T]``.
    """
    policy = nets.target_policy(obs)
    if nets.target_critic.learns_from_atoms:
        actions = policy.sample(settings.num_bootstrap_samples)
        return nets.target_critic.atoms(obs, actions).transpose(0, 1).flatten(1)
    actions, log_probs = policy.candidates(settings.num_bootstrap_samples)
    q_values = nets.target_critic(obs, actions)
    values = q_values.mean(dim=0) if log_probs is None else (log_probs.exp() * q_values).sum(dim=0)
    return values.unsqueeze(-1)


def _td0_targets(nets: ActorCritic, batch: Mapping[str, Tensor], settings: LossSettings) -> Tensor:
    """``[B]``, or ``[B, T]``."""
    discounts = settings.gamma * (1.0 - batch["terminateds"])
    next_values = _values(nets, batch["new_obs"], settings)
    targets = evaluation.td_targets(
        batch["rewards"].unsqueeze(-1), discounts.unsqueeze(-1), next_values
    )
    return targets.squeeze(-1)


def _window_targets(nets: ActorCritic, batch: Mapping[str, Tensor], settings: LossSettings) -> Tensor:
    """n-step or Retrace targets of each step of each window: ``[B, K]``, or ``[B, K, T]``."""
    obs, mask = batch["obs"], batch["loss_mask"]
    next_values = _values(nets, obs[:, 1:].flatten(0, 1), settings).unflatten(0, mask.shape)
    rewards = batch["rewards"].unsqueeze(-1)
    discounts = settings.gamma * (1.0 - batch["terminateds"]).unsqueeze(-1)
    # The last step of an episode that was cut off bootstraps from its final observation, and nothing
    # beyond it counts: that is a reward with the value in it, and a discount of zero.
    last = mask & ~torch.nn.functional.pad(mask[:, 1:], (0, 1), value=True)
    last = last.unsqueeze(-1)
    rewards = torch.where(last, rewards + discounts * next_values, rewards)
    discounts = torch.where(last, torch.zeros_like(discounts), discounts)
    if settings.policy_evaluation == "nstep":
        targets = evaluation.nstep_targets(rewards, discounts, next_values, settings.n_step)
        return targets.squeeze(-1)
    actions = nets.policy.encode_actions(batch["actions"])
    inner, actions = obs[:, 1:-1].flatten(0, 1), actions[:, 1:].flatten(0, 1)
    shape = mask[:, 1:].shape
    next_q = nets.target_critic(inner, actions).view(shape)
    log_probs = nets.target_policy(inner).log_prob(actions).view(shape)
    return evaluation.retrace_targets(
        rewards.squeeze(-1),
        discounts.squeeze(-1),
        next_values.squeeze(-1),
        next_q,
        log_probs - batch["action_logp"][:, 1:],
        settings.retrace_lambda,
    )


# -- Steps 2 and 3: weight the target policy's actions and fit the online policy to them. --


@dataclass(frozen=True)
class Candidates:
    """Actions of the target policy and their values: all that Step 2 takes from the target networks.

    Args:
        target: the policy at B states.
        actions: ``[N, B, D]``.
        q_values: ``[N, B]``.
        log_prior: ``[N, B]``, if the actions are not samples.
        temperatures: those that are solved for and not learned, by name.
    """

    target: Distribution
    actions: Tensor
    q_values: Tensor
    log_prior: Tensor | None
    temperatures: dict[str, Tensor]

    def split(self, sizes: list[int]) -> list[Candidates]:
        """Those of the first so many states, of the next, and so on."""
        priors = [None] * len(sizes) if self.log_prior is None else self.log_prior.split(sizes, 1)
        parts = zip(
            self.target.split(sizes), self.actions.split(sizes, 1), self.q_values.split(sizes, 1)
        )
        return [Candidates(*part, prior, self.temperatures) for part, prior in zip(parts, priors)]


@torch.no_grad()
def ask_candidates(nets: ActorCritic, obs: Tensor, settings: LossSettings) -> Candidates:
    """The candidates at the states ``obs`` ``[B, O]``."""
    target = nets.target_policy(obs)
    actions, log_prior = target.candidates(settings.num_action_samples)
    q_values = nets.target_critic(obs, actions)
    temperatures = {}
    if settings.temperature_solver == "exact":
        if settings.weighting == "exponential":
            temperatures["temperature"] = weights.solve_temperature(
                q_values, settings.epsilon, log_prior
            )
        if (penalty := _penalty(nets, settings)) is not None:
            temperatures["penalty_temperature"] = weights.solve_temperature(
                weights.out_of_bounds_cost(actions), penalty
            )
    return Candidates(target, actions, q_values, log_prior, temperatures)


def _penalty(nets: ActorCritic, settings: LossSettings) -> float | None:
    """The bound of the action penalty; none for actions that have no bounds themselves."""
    if settings.penalty is None or not nets.critic.clip_actions:
        return None
    return settings.penalty


def improvement_losses(
    nets: ActorCritic,
    obs: Tensor,
    candidates: Candidates,
    settings: LossSettings,
    move_multipliers: bool = True,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Losses and metrics of Steps 2 and 3 at the states ``obs`` ``[B, O]``."""
    target, actions, q_values = candidates.target, candidates.actions, candidates.q_values
    action_weights, temperature_loss, metrics = _weights(nets, candidates, settings)
    if (penalty := _penalty(nets, settings)) is not None:
        # The two sets of weights are added, so they sum to two; the multipliers absorb the factor.
        cost = weights.out_of_bounds_cost(actions)
        temperature, penalty_loss = _temperature(
            nets, "penalty_temperature", cost, candidates, penalty
        )
        action_weights = action_weights + weights.exponential_weights(cost, temperature)
        temperature_loss = temperature_loss + penalty_loss
    online = nets.policy(obs)
    alphas = {part: nets.multipliers[f"alpha_{part}"]() for part in settings.epsilons}
    fit = fit_policy(
        settings.fit,
        online,
        target,
        actions,
        action_weights,
        alphas,
        settings.epsilons,
        settings.per_dimension_kl,
    )
    # Adam does not see a constant scale, but a multiplier that rises or falls tenfold within a few
    # hundred updates would throw its running averages off, and the policy with them.
    scale = 1.0 / (1.0 + sum(alpha.detach().max() for alpha in alphas.values()))
    losses = {"policy": scale * (fit.policy_loss + fit.penalty)}
    if settings.multipliers:
        # Zero, not left out: data-parallel learners expect a gradient for every parameter.
        losses["dual"] = float(move_multipliers) * fit.dual_loss + temperature_loss
    metrics |= {f"alpha_{part}": alpha.mean() for part, alpha in alphas.items()}
    if settings.fit != "decoupled":
        metrics |= _moved(online, target)
    # The mean of each dimension's where the bounds are: what is shown is what is bounded.
    metrics |= {f"kl_{part}": kl.mean() for part, kl in fit.kls.items()} | online.metrics()
    metrics |= {"policy_loss": fit.policy_loss, "q_mean": q_values.mean()}
    return losses, metrics


@torch.no_grad()
def _moved(online: Distribution, target: Distribution) -> dict[str, Tensor]:
    """KLs by which the policy's parts have moved since the last copy."""
    kls = online.part_kls(target)
    return {f"kl_{part}": kl.mean(dim=0).sum() for part, kl in kls.items()}


def _temperature(
    nets: ActorCritic, name: str, values: Tensor, candidates: Candidates, epsilon: float
) -> tuple[Tensor, Tensor]:
    """The temperature of exponential weights, and the loss that moves it if it is learned."""
    if name in candidates.temperatures:
        return candidates.temperatures[name], values.new_zeros(())
    temperature = nets.multipliers[name]()
    loss = weights.temperature_dual(values, temperature, epsilon, candidates.log_prior)
    return temperature.detach(), loss


def _weights(
    nets: ActorCritic, candidates: Candidates, settings: LossSettings
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Step 2: weights of the actions, the temperature's loss, metrics."""
    q_values, log_prior = candidates.q_values, candidates.log_prior
    loss, metrics = q_values.new_zeros(()), {}
    if settings.weighting == "exponential":
        temperature, loss = _temperature(nets, "temperature", q_values, candidates, settings.epsilon)
        found = weights.exponential_weights(q_values, temperature, log_prior)
        metrics["temperature"] = temperature
    else:
        if settings.weighting == "identity":
            found = weights.identity_weights(q_values)
        else:
            found = weights.ranking_weights(q_values, settings.ranking_eta)
        if log_prior is not None:
            # Of all actions; samples would come as often as they are likely.
            found = found * log_prior.exp()
        if settings.weighting == "identity":
            return found, loss, metrics
        found = found / found.sum(dim=0)
    metrics["kl_nonparametric"] = weights.kl_to_prior(found, log_prior).mean()
    metrics["weights_ess"] = weights.effective_sample_size(found).mean()
    return found, loss, metrics


# -- Instead of Steps 2 and 3: follow the critic's gradient (SVG(0), DDPG). --


def _value_gradient_loss(
    nets: ActorCritic, obs: Tensor, settings: LossSettings
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    online = nets.policy(obs)
    actions = online.reparameterized_sample(settings.num_action_samples)
    # Through the online critic, whose own parameters stay out of this.
    frozen = {name: parameter.detach() for name, parameter in nets.critic.named_parameters()}
    q_values = torch.func.functional_call(nets.critic, frozen, (obs, actions))
    loss = -q_values.mean() - settings.entropy_weight * online.entropy().mean()
    metrics = _moved(online, nets.target_policy(obs)) | online.metrics()
    return {"policy": loss}, {**metrics, "policy_loss": loss, "q_mean": q_values.mean()}
