"""The losses of one learner update: Steps 1, 2 and 3 of the paper on one batch.

Every loss moves only its own parameters (the others are detached in it), so one backward pass of
their sum serves the critic, the policy and the multipliers, each with its own optimizer.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rerpi_rllib.core import evaluation, weights
from rerpi_rllib.core.constraints import Constraint
from rerpi_rllib.core.fitting import fit_policy
from rerpi_rllib.core.networks import ActorCritic
from rerpi_rllib.core.peers import ALONE
from rerpi_rllib.core.plan import Plan
from rerpi_rllib.core.policies import Distribution
from rerpi_rllib.core.settings import LearningSettings

# The columns of a batch, and under the keys below what an update adds to it.
Batch = Mapping[str, Any]
Metrics = dict[str, Tensor]
PLAN, TARGETS, CANDIDATES, WEIGHTED = "plan", "targets", "candidates", "weighted"
# The number of steps in a batch of windows, as a multiple of its mean over all learners.
SHARE = "share"


def rerpi_losses(
    nets: ActorCritic, batch: Batch, settings: LearningSettings
) -> tuple[dict[str, Tensor], Metrics]:
    """Compute the losses and the metrics of one update.

    Args:
        nets: online and target networks and multipliers.
        batch: for TD(0) transitions, ``obs`` ``[B, O]``, ``new_obs`` ``[B, O]``, ``actions``
            ``[B, D]`` (unclipped; ``[B, 1]`` if discrete), ``rewards`` ``[B]`` and ``terminateds``
            ``[B]`` (0 or 1); otherwise windows of K steps, ``obs`` ``[B, K + 1, O]``, the others
            ``[B, K, ...]``, with ``action_logp`` and ``loss_mask`` (False on rows that are no step:
            there may be some inside a window, between two episodes). ``plan`` says what the update
            does, by default everything. What :func:`prepare` has added is not computed again.
        settings: the algorithm's numbers.

    Returns:
        Scalar losses by what they move, "critic", "policy" and "dual" (the multipliers), and a
        dictionary of detached scalars.
    """
    loss, metrics = critic_loss(nets, batch, settings)
    losses = {"critic": loss}
    if batch.get(PLAN, Plan()).improve_policy:
        more_losses, more_metrics = policy_losses(nets, batch, settings)
        losses |= more_losses
        metrics |= more_metrics
    return losses, metrics


def critic_loss(
    nets: ActorCritic, batch: Batch, settings: LearningSettings
) -> tuple[Tensor, Metrics]:
    """Compute the loss of Step 1, which depends on the critic and the target networks."""
    targets = batch[TARGETS] if TARGETS in batch else critic_targets(nets, batch, settings)
    actions, is_step = nets.policy.encode_actions(batch["actions"]), None
    if settings.policy_evaluation != "td0":
        actions, targets = actions.flatten(0, 1), targets.flatten(0, 1)
        is_step = batch["loss_mask"].flatten().to(targets.dtype)
    loss = nets.critic.loss(_states(batch, settings), actions, targets, is_step)
    if SHARE in batch:
        loss = loss * batch[SHARE]
    shown = loss.detach()
    if nets.critic.head.squares_errors:
        shown = nets.to_reward_units(nets.to_reward_units(shown))
    return loss, {"critic_loss": shown}


def policy_losses(
    nets: ActorCritic, batch: Batch, settings: LearningSettings
) -> tuple[dict[str, Tensor], Metrics]:
    """Compute the losses of Steps 2 and 3.

    They depend on the policy, the multipliers and the target networks; value gradients depend on the
    critic, too.
    """
    states = _states(batch, settings)
    if settings.fit == "value_gradient":
        losses, metrics = _value_gradient_loss(nets, states, settings)
    else:
        dual_losses: dict[str, Tensor] = {}
        weighted = batch.get(WEIGHTED)
        if weighted is None:
            candidates = batch.get(CANDIDATES) or sample_candidates(nets, states, settings)
            weighted, dual_losses = weigh(nets, candidates, settings)
        plan = batch.get(PLAN, Plan())
        losses, metrics = _fit_losses(nets, states, weighted, dual_losses, settings, plan)
    return losses, {name: value.detach() for name, value in metrics.items()}


def _states(batch: Batch, settings: LearningSettings) -> Tensor:
    """Return the states of a batch, ``[M, O]``.

    In windows these are all states but the last one; some of them end an episode. The policy is
    improved at these, too, so that the number of states is the same in every batch.
    """
    states: Tensor = batch["obs"]
    return states if settings.policy_evaluation == "td0" else states[:, :-1].flatten(0, 1)


# The target networks do not change between two copies, so that they can be evaluated for many updates
# at once: with small batches it is the number of operations that counts, not their size.


def prepare(nets: ActorCritic, batches: Sequence[Batch], settings: LearningSettings) -> list[Batch]:
    """Add to the batches of several updates what their losses need of the target networks.

    Args:
        nets, settings: as for :func:`rerpi_losses`.
        batches: those of updates between which no copy is made.
    """
    prepared = prepare_critic(nets, batches, settings)
    improving = [batch.get(PLAN, Plan()).improve_policy for batch in batches]
    improved = prepare_policy(nets, list(itertools.compress(prepared, improving)), settings)
    remaining = iter(improved)
    return [next(remaining) if flag else batch for flag, batch in zip(improving, prepared)]


@torch.no_grad()
def prepare_critic(
    nets: ActorCritic, batches: Sequence[Batch], settings: LearningSettings
) -> list[Batch]:
    """Add the critic's targets to the batches of several updates; see :func:`prepare`."""
    joined = batches[0]
    if len(batches) > 1:
        columns = [key for key in joined if key != PLAN]
        joined = {key: torch.cat([batch[key] for batch in batches]) for key in columns}
    rows = [len(batch["rewards"]) for batch in batches]
    targets = critic_targets(nets, joined, settings).split(rows)
    prepared: list[Batch] = [{**batch, TARGETS: part} for batch, part in zip(batches, targets)]
    if settings.policy_evaluation == "td0" or nets.peers is ALONE:
        return prepared
    steps = torch.stack([batch["loss_mask"].sum().float() for batch in batches])
    shares = steps / nets.peers.mean(steps)[0]
    return [{**batch, SHARE: share} for batch, share in zip(prepared, shares)]


@torch.no_grad()
def prepare_policy(
    nets: ActorCritic, batches: Sequence[Batch], settings: LearningSettings
) -> list[Batch]:
    """Add what the policy's losses need to the batches of several updates; see :func:`prepare`.

    The weights of the actions do not change between two copies, either, unless a temperature is
    learned; where it is solved for instead, it is solved for all these states together.
    """
    if not batches or settings.fit == "value_gradient":
        return list(batches)
    states = [_states(batch, settings) for batch in batches]
    candidates = sample_candidates(nets, torch.cat(states), settings)
    learned = any(c.learned and not c.is_trust_region for c in nets.constraints.values())
    key, done = (
        (CANDIDATES, candidates) if learned else (WEIGHTED, weigh(nets, candidates, settings)[0])
    )
    chunks = done.split([len(some) for some in states])
    return [{**batch, key: chunk} for batch, chunk in zip(batches, chunks)]


# -- Step 1: policy evaluation. --


@torch.no_grad()
def critic_targets(nets: ActorCritic, batch: Batch, settings: LearningSettings) -> Tensor:
    """Compute the critic's targets, ``[B]`` or ``[B, K]``.

    There is one more dimension for a critic that learns from T samples of the return.
    """
    if settings.policy_evaluation == "td0":
        return _td0_targets(nets, batch, settings)
    return _window_targets(nets, batch, settings)


def _values(nets: ActorCritic, obs: Tensor, settings: LearningSettings) -> Tensor:
    """Return what the target networks bootstrap from at each of M states ``[M, O]``.

    That is V, the mean of Q over the policy's actions, ``[M, 1]``. For a critic that learns the
    distribution of returns it is T samples of the return, ``[M, T]``.
    """
    policy = nets.target_policy(obs)
    if nets.target_critic.learns_from_atoms:
        actions = policy.sample(settings.num_bootstrap_samples)
        return nets.target_critic.atoms(obs, actions).transpose(0, 1).flatten(1)
    actions, log_probs = policy.candidates(settings.num_bootstrap_samples)
    q_values: Tensor = nets.target_critic(obs, actions)
    values = q_values.mean(dim=0) if log_probs is None else (log_probs.exp() * q_values).sum(dim=0)
    return values.unsqueeze(-1)


def _td0_targets(nets: ActorCritic, batch: Batch, settings: LearningSettings) -> Tensor:
    """Compute TD(0) targets, ``[B]`` or ``[B, T]``."""
    discounts = settings.gamma * (1.0 - batch["terminateds"])
    next_values = _values(nets, batch["new_obs"], settings)
    targets = evaluation.td_targets(
        nets.to_critic_units(batch["rewards"]).unsqueeze(-1), discounts.unsqueeze(-1), next_values
    )
    return targets.squeeze(-1)


def _window_targets(nets: ActorCritic, batch: Batch, settings: LearningSettings) -> Tensor:
    """Compute n-step or Retrace targets of each step of each window: ``[B, K]`` or ``[B, K, T]``."""
    obs, mask = batch["obs"], batch["loss_mask"]
    next_values = _values(nets, obs[:, 1:].flatten(0, 1), settings).unflatten(0, mask.shape)
    rewards = nets.to_critic_units(batch["rewards"]).unsqueeze(-1)
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
    """Actions of the target policy and their values: all that Step 2 needs of the target networks.

    Args:
        target: the target policy at B states.
        actions: ``[N, B, D]``.
        values: ``[N, B]`` by the part of the constraint that turns them into weights: Q-values
            ("nonparametric"), and with an action penalty the costs of the actions ("penalty").
        log_prior: ``[N, B]``, if the actions are not samples.
    """

    target: Distribution
    actions: Tensor
    values: dict[str, Tensor]
    log_prior: Tensor | None

    def split(self, sizes: list[int]) -> list[Candidates]:
        """Split along the batch dimension into chunks of the given sizes."""

        def chunks(values: Tensor) -> list[Tensor]:
            # The same layout whatever the number of chunks, as compiled updates need it.
            return [chunk.contiguous() for chunk in values.split(sizes, dim=1)]

        priors = [None] * len(sizes) if self.log_prior is None else chunks(self.log_prior)
        values = zip(*map(chunks, self.values.values()))
        return [
            Candidates(target, actions, dict(zip(self.values, chunk)), prior)
            for target, actions, chunk, prior in zip(
                self.target.split(sizes), chunks(self.actions), values, priors
            )
        ]


@dataclass(frozen=True)
class WeightedActions:
    """The result of Step 2: all that Step 3 needs of the target networks.

    Args:
        target: the target policy at B states.
        summary: what its ``summarise`` returns for its actions and their weights.
        metrics: scalars.
    """

    target: Distribution
    summary: tuple[Tensor, ...]
    metrics: Metrics

    def split(self, sizes: list[int]) -> list[WeightedActions]:
        """Split along the batch dimension into chunks of the given sizes."""
        # Contiguous for the same reason as candidates.
        parts = [part.contiguous().split(sizes) for part in self.summary]
        chunks = zip(self.target.split(sizes), zip(*parts))
        return [WeightedActions(target, summary, self.metrics) for target, summary in chunks]


@torch.no_grad()
def sample_candidates(nets: ActorCritic, obs: Tensor, settings: LearningSettings) -> Candidates:
    """Draw candidates at the states ``obs`` ``[B, O]`` and evaluate them."""
    target = nets.target_policy(obs)
    actions, log_prior = target.candidates(settings.num_action_samples)
    values = {"nonparametric": nets.target_critic(obs, actions)}
    if "penalty" in nets.constraints:
        values["penalty"] = weights.out_of_bounds_cost(actions)
    return Candidates(target, actions, values, log_prior)


def weigh(
    nets: ActorCritic, candidates: Candidates, settings: LearningSettings
) -> tuple[WeightedActions, dict[str, Tensor]]:
    """Do Step 2; the second result are the losses of the temperatures that are learned."""
    q_values, log_prior = candidates.values["nonparametric"], candidates.log_prior
    losses: dict[str, Tensor] = {}
    metrics: Metrics = {"q_mean": nets.to_reward_units(q_values.mean())}

    def exponential(constraint: Constraint) -> Tensor:
        values = candidates.values[constraint.part]
        if constraint.learned:
            learned = nets.multipliers[constraint.multiplier]()
            losses[constraint.part] = weights.temperature_dual(
                values, learned, constraint.epsilon, log_prior
            )
            temperature = learned.detach()
        else:
            temperature = weights.solve_temperature(values, constraint.epsilon, log_prior, nets.peers)
        result = weights.exponential_weights(values, temperature, log_prior)
        is_value = constraint.part == "nonparametric"  # The other part are distances.
        metrics[constraint.multiplier] = (
            nets.to_reward_units(temperature) if is_value else temperature
        )
        metrics[constraint.kl] = weights.kl_to_prior(result, log_prior).mean()
        return result

    if settings.weighting == "exponential":
        action_weights = exponential(nets.constraints["nonparametric"])
    else:
        if settings.weighting == "identity":
            action_weights = weights.identity_weights(q_values)
        else:
            action_weights = weights.ranking_weights(q_values, settings.ranking_eta)
        if log_prior is not None:
            # These are all the actions there are; samples would come as often as they are likely.
            action_weights = action_weights * log_prior.exp()
        if settings.weighting == "ranking":
            action_weights = action_weights / action_weights.sum(dim=0)
            metrics["kl_nonparametric"] = weights.kl_to_prior(action_weights, log_prior).mean()
    if settings.weighting != "identity":
        metrics["weights_ess"] = weights.effective_sample_size(action_weights).mean()
    if "penalty" in nets.constraints:
        # The two sets of weights are added, so they sum to two; the multipliers absorb the factor.
        action_weights = action_weights + exponential(nets.constraints["penalty"])
    target = candidates.target
    summary = target.summarise(candidates.actions, action_weights)
    return WeightedActions(target, summary, metrics), losses


def _fit_losses(
    nets: ActorCritic,
    obs: Tensor,
    weighted: WeightedActions,
    dual_losses: dict[str, Tensor],
    settings: LearningSettings,
    plan: Plan,
) -> tuple[dict[str, Tensor], Metrics]:
    """Compute the losses of Step 3, and with the given ones of Step 2 that of all multipliers."""
    online, target = nets.policy(obs), weighted.target
    alphas = [
        (constraint, nets.multipliers[constraint.multiplier]())
        for constraint in nets.constraints.values()
        if constraint.is_trust_region
    ]
    fit = fit_policy(settings.fit, online, target, weighted.summary, alphas)
    losses = {"policy": fit.scaled_loss}
    dual_losses = {**dual_losses, **fit.dual_losses}
    if dual_losses:
        # Zero instead of left out: data-parallel learners expect a gradient for every parameter.
        losses["dual"] = functools.reduce(
            torch.add,
            [plan.moves(nets.constraints[part]) * loss for part, loss in dual_losses.items()],
        )
    metrics = weighted.metrics | {"policy_loss": fit.policy_loss} | online.metrics()
    if settings.fit != "decoupled":
        metrics |= _moved(online, target)
    for constraint, alpha in alphas:
        # The mean over dimensions where these are bounded: what is shown is what is bounded.
        kl = fit.kls[constraint.part]
        metrics[constraint.kl] = kl.mean() if kl.dim() else kl
        metrics[constraint.multiplier] = alpha.mean() if alpha.dim() else alpha
    return losses, metrics


@torch.no_grad()
def _moved(online: Distribution, target: Distribution) -> Metrics:
    """Return the KLs by which the policy's parts have moved since the last copy."""
    kls = online.part_kls(target)
    return {f"kl_{part}": kl.mean(dim=0).sum() for part, kl in kls.items()}


# -- Instead of Steps 2 and 3: follow the critic's gradient (SVG(0), DDPG). --


def _value_gradient_loss(
    nets: ActorCritic, obs: Tensor, settings: LearningSettings
) -> tuple[dict[str, Tensor], Metrics]:
    online = nets.policy(obs)
    actions = online.reparameterized_sample(settings.num_action_samples)
    # The gradient flows through the online critic, whose own parameters stay as they are.
    frozen = {name: parameter.detach() for name, parameter in nets.critic.named_parameters()}
    q_values = torch.func.functional_call(nets.critic, frozen, (obs, actions))
    loss = -q_values.mean() - settings.entropy_weight * online.entropy().mean()
    metrics = _moved(online, nets.target_policy(obs)) | online.metrics()
    q_mean = nets.to_reward_units(q_values.mean())
    metrics = {**metrics, "policy_loss": nets.to_reward_units(loss), "q_mean": q_mean}
    return {"policy": loss}, metrics
