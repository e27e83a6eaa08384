"""Updates from a batch to new parameters: plan, losses, steps, copies.

Both of RLlib's API stacks and the benchmarks make their updates with :func:`run_updates`. The figures
of functions that are known, which have no critic to learn, take the steps of :func:`policy_step`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from typing import Any

import torch
from torch import Tensor, nn

from rerpi_rllib.core.losses import (
    PLAN,
    Batch,
    Metrics,
    critic_loss,
    policy_losses,
    prepare,
)
from rerpi_rllib.core.networks import ActorCritic
from rerpi_rllib.core.plan import plan_update
from rerpi_rllib.core.settings import LearningSettings, all_parts

Optimizers = Mapping[str, torch.optim.Optimizer]
# Does all of an update but the copies, given the batch with its plan, and returns the metrics.
Step = Callable[[Batch], Metrics]

# The target networks are evaluated on at most this many steps at once: more would gain little and
# take memory.
_STEPS_PREPARED_AT_ONCE = 4096


def make_optimizers(
    nets: ActorCritic, lr: float = 1e-3, dual_lr: float = 1e-3, others: nn.Module | None = None
) -> dict[str, torch.optim.Adam]:
    """Make an Adam for each of critic, policy and multipliers that has parameters.

    Args:
        nets: the networks.
        lr, dual_lr: learning rates of the networks and of the multipliers.
        others: a module around ``nets``; an optimizer "others" has what is trainable in it beside
            them.
    """
    groups = {
        "critic": list(nets.critic.parameters()),
        "policy": list(nets.policy.parameters()),
        "dual": list(nets.multipliers.parameters()),
    }
    if others is not None:
        known = {id(parameter) for group in groups.values() for parameter in group}
        groups["others"] = [
            parameter
            for parameter in others.parameters()
            if parameter.requires_grad and id(parameter) not in known
        ]
    optimizers = {}
    for name, parameters in groups.items():
        if parameters:
            # Multipliers have a short memory: one large KL must not keep them slow for a thousand
            # updates. They have no momentum: it would carry them on through the updates that leave
            # them alone.
            rate, betas = (dual_lr, (0.0, 0.9)) if name == "dual" else (lr, (0.9, 0.999))
            # Capturable: on a GPU an update can be recorded in a graph.
            optimizers[name] = torch.optim.Adam(
                parameters, lr=rate, betas=betas, fused=True, capturable=True
            )
    return optimizers


def policy_step(
    nets: ActorCritic, batch: Batch, settings: LearningSettings, optimizers: Optimizers
) -> Metrics:
    """Take the steps of the policy and of the multipliers."""
    losses, metrics = policy_losses(nets, batch, settings)
    _step(list(losses.values()), optimizers, ("policy", "dual"))
    return metrics


def critic_step(
    nets: ActorCritic, batch: Batch, settings: LearningSettings, optimizers: Optimizers
) -> Metrics:
    """Take the critic's step."""
    loss, metrics = critic_loss(nets, batch, settings)
    _step([loss], optimizers, ("critic",))
    return metrics


def _step(losses: Sequence[Tensor], optimizers: Optimizers, names: tuple[str, ...]) -> None:
    moved = [optimizers[name] for name in names if name in optimizers]
    for optimizer in moved:
        optimizer.zero_grad()
    torch.autograd.backward(losses)
    for optimizer in moved:
        optimizer.step()


def run_updates(
    nets: ActorCritic,
    settings: LearningSettings,
    columns: Mapping[str, Tensor],
    minibatch_size: int,
    *,
    optimizers: Optimizers | None = None,
    policy_thread: Executor | None = None,
    step: Step | None = None,
    ahead: bool = True,
) -> dict[str, float]:
    """Make one update for every ``minibatch_size`` rows, in order.

    Args:
        nets, settings: what learns, and how.
        columns: the batch of all updates.
        minibatch_size: rows of one update.
        optimizers: of :func:`make_optimizers`, which take the steps.
        policy_thread: takes the policy's steps beside the critic's. Between two target copies neither
            depends on the other, except with value gradients, where it must not be given.
        step: takes the steps in place of ``optimizers``.
        ahead: whether to evaluate the target networks for several updates at once. Otherwise the
            losses of each update do.

    Returns:
        The mean of each metric over the updates.
    """
    logged: dict[str, list[Tensor]] = defaultdict(list)
    improving: list[Future[Metrics]] = []

    def log(metrics: Metrics) -> None:
        for name, value in metrics.items():
            logged[name].append(value)

    def wait_for_policy() -> None:
        while improving:
            log(improving.pop(0).result())

    def own_step(batch: Batch) -> Metrics:
        assert optimizers is not None
        metrics: Metrics = {}
        if batch[PLAN].improve_policy:
            # First, since value gradients are those of the critic before its step.
            arguments = (nets, batch, settings, optimizers)
            if policy_thread is not None:
                improving.append(policy_thread.submit(policy_step, *arguments))
            else:
                metrics = policy_step(*arguments)
        return metrics | critic_step(nets, batch, settings, optimizers)

    blocks = _blocks(columns, minibatch_size, int(nets.num_updates), settings)
    try:
        for block in blocks:
            for batch in prepare(nets, block, settings) if ahead else block:
                log((step or own_step)(batch))
                nets.num_updates += 1
            if block[-1][PLAN].copy_targets:
                wait_for_policy()
                nets.update_targets()
                _log_kls_at_copy(nets, logged)
        wait_for_policy()
    finally:  # After an error nothing keeps running.
        wait([future for future in improving if not future.cancel()])
    return _means(logged, int(nets.num_updates))


def _blocks(
    columns: Mapping[str, Tensor], minibatch_size: int, number: int, settings: LearningSettings
) -> list[list[dict[str, Any]]]:
    """Split a batch into those of single updates with their plans, in blocks without a copy inside.

    Args:
        columns, minibatch_size: as for :func:`run_updates`.
        number: the number of updates before these.
        settings: of the plans.
    """
    at_once = max(1, _STEPS_PREPARED_AT_ONCE // columns["rewards"][:minibatch_size].numel())
    blocks: list[list[dict[str, Any]]] = []
    for start in range(0, len(columns["rewards"]), minibatch_size):
        number += 1
        minibatch = {key: column[start : start + minibatch_size] for key, column in columns.items()}
        if not blocks or len(blocks[-1]) == at_once or blocks[-1][-1][PLAN].copy_targets:
            blocks.append([])
        blocks[-1].append({**minibatch, PLAN: plan_update(number, settings)})
    return blocks


def _log_kls_at_copy(nets: ActorCritic, logged: dict[str, list[Tensor]]) -> None:
    """Keep how far the policy has moved by itself: that is what the bounds are for."""
    for name in [f"kl_{part.name}" for part in all_parts()]:
        if name in logged:
            logged[f"{name}_at_target_update"] += logged[name][-1:]


def _means(logged: Mapping[str, list[Tensor]], number: int) -> dict[str, float]:
    values = torch.stack([torch.stack(series).mean() for series in logged.values()]).tolist()
    means = dict(zip(logged, values))
    if broken := [name for name, mean in means.items() if not math.isfinite(mean)]:
        raise FloatingPointError(
            f"{', '.join(broken)} became NaN or infinite by update {number}. Look for NaN in the "
            "environment's observations and rewards; otherwise a smaller lr or smaller bounds may "
            "help."
        )
    return means
