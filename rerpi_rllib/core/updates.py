"""Updates from a batch to new parameters: plan, losses, steps, copies.

Both of RLlib's API stacks and the benchmarks make their updates with :func:`run_updates`.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn

from rerpi_rllib.core.gradients import (
    GradientFunction,
    Gradients,
    critic_gradients,
    policy_gradients,
)
from rerpi_rllib.core.losses import PLAN, Batch, Metrics, prepare, prepare_critic, prepare_policy
from rerpi_rllib.core.networks import ActorCritic
from rerpi_rllib.core.optimizers import Optimizers
from rerpi_rllib.core.plan import plan_update
from rerpi_rllib.core.settings import LearningSettings, all_parts
from rerpi_rllib.core.snapshots import Snapshot
from rerpi_rllib.core.threads import Crew

# Does all of an update but the copies, given the batch with its plan, and returns the metrics.
Step = Callable[[Batch], Metrics]

# The target networks are evaluated on at most this many steps at once: more would gain little and
# take memory.
_STEPS_PREPARED_AT_ONCE = 4096


class NonFiniteUpdates(FloatingPointError):
    """Updates led to NaN or infinity and were undone; the message says what became of what."""


def policy_step(
    nets: ActorCritic,
    batch: Batch,
    settings: LearningSettings,
    optimizers: Optimizers,
    gradients: GradientFunction = policy_gradients,
) -> Metrics:
    """Take the steps of the policy and of the multipliers."""
    return _step(gradients, nets, batch, settings, _of_policy(optimizers))


def critic_step(
    nets: ActorCritic,
    batch: Batch,
    settings: LearningSettings,
    optimizers: Optimizers,
    gradients: GradientFunction = critic_gradients,
) -> Metrics:
    """Take the critic's step."""
    return _step(gradients, nets, batch, settings, _of_critic(optimizers))


def _of_critic(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    return [optimizers["critic"]]


def _of_policy(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    return [optimizers[name] for name in ("policy", "dual") if name in optimizers]


def _parameters(optimizers: Sequence[torch.optim.Optimizer]) -> list[nn.Parameter]:
    return [
        p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
    ]


def _step(
    gradient_function: GradientFunction,
    nets: ActorCritic,
    batch: Batch,
    settings: LearningSettings,
    optimizers: Sequence[torch.optim.Optimizer],
) -> Metrics:
    parameters = _parameters(optimizers)
    gradients, metrics = gradient_function(nets, batch, settings, parameters)
    for parameter, gradient in zip(parameters, nets.peers.average(gradients)):
        # Fused Adam takes numbers as they follow in memory, whatever a gradient's strides say.
        parameter.grad = None if gradient is None else gradient.contiguous()
    for optimizer in optimizers:
        optimizer.step()
    return metrics


def run_updates(
    nets: ActorCritic,
    settings: LearningSettings,
    columns: Mapping[str, Tensor],
    minibatch_size: int,
    *,
    optimizers: Optimizers | None = None,
    gradients: Gradients | None = None,
    crew: Crew | None = None,
    step: Step | None = None,
    ahead: bool = True,
) -> dict[str, float]:
    """Make one update for every ``minibatch_size`` rows, in order, or none of them.

    If anything fails, or becomes NaN or infinite, all is as it was before the call.

    Args:
        nets, settings: what learns, and how.
        columns: the batch of all updates.
        minibatch_size: rows of one update.
        optimizers: of :func:`make_optimizers`; they take the steps, unless ``step`` does with them.
        gradients: what computes the gradients of these steps, if they are to be compiled.
        crew: does Steps 2 and 3 beside Step 1, and evaluates the target networks for the next updates
            beside both. Between two target copies neither depends on the other, except with value
            gradients, where it must not be given. Nor must it with several learners, which have to
            make the same calls in the same order.
        step: takes the steps, in a way of its own.
        ahead: whether to evaluate the target networks for several updates at once. Otherwise the
            losses of each update do.

    Returns:
        The mean of each metric over the updates.

    Raises:
        NonFiniteUpdates: if a metric, a weight or an optimizer's state became NaN or infinite.
    """
    before = Snapshot(nets, optimizers or {})
    logged: dict[str, list[Tensor]] = defaultdict(list)
    gradients = gradients or Gradients()

    def log(metrics: Metrics) -> None:
        for name, value in metrics.items():
            logged[name].append(value)

    def count(metrics: Metrics) -> None:
        log(metrics)
        nets.num_updates += 1

    def own_step(batch: Batch) -> Metrics:
        assert optimizers is not None
        metrics: Metrics = {}
        if batch[PLAN].improve_policy:
            # First, since value gradients are those of the critic before its step.
            metrics = policy_step(nets, batch, settings, optimizers, gradients.policy)
        return metrics | critic_step(nets, batch, settings, optimizers, gradients.critic)

    def side_by_side(blocks: Sequence[Sequence[Batch]], crew: Crew) -> None:
        """Make the updates of blocks between which no copy is made."""
        assert optimizers is not None
        improved = [[batch for batch in block if batch[PLAN].improve_policy] for block in blocks]
        stopped = threading.Event()

        def improve(blocks: Iterator[Sequence[Batch]]) -> list[Metrics]:
            return [
                policy_step(nets, batch, settings, optimizers, gradients.policy)
                for batch in chain.from_iterable(blocks)
                if not stopped.is_set()
            ]

        with (
            _prepared(crew, partial(prepare_critic, nets, settings=settings), blocks) as evaluating,
            _prepared(crew, partial(prepare_policy, nets, settings=settings), improved) as improving,
        ):
            policy = crew.policy.submit(improve, improving)
            try:
                for batch in chain.from_iterable(evaluating):
                    count(critic_step(nets, batch, settings, optimizers, gradients.critic))
            except BaseException:  # After an error nothing keeps running.
                stopped.set()
                wait([policy])
                raise
            for metrics in policy.result():
                log(metrics)

    try:
        for blocks in _periods(_blocks(columns, minibatch_size, int(nets.num_updates), settings)):
            if crew is not None and step is None:
                side_by_side(blocks, crew)
            else:
                for block in blocks:
                    for batch in prepare(nets, block, settings) if ahead else block:
                        count((step or own_step)(batch))
            if blocks[-1][-1][PLAN].copy_targets:
                nets.update_targets()
                _log_kls_at_copy(nets, logged)
    except Exception:
        before.restore()
        raise
    means, is_finite = _means(logged, before.total())
    if not nets.peers.agree(is_finite):
        reason = _diagnosis(nets, columns, logged)
        before.restore()
        raise NonFiniteUpdates(reason)
    return means


@contextmanager
def _prepared(
    crew: Crew,
    prepare_block: Callable[[Sequence[Batch]], Sequence[Batch]],
    blocks: Sequence[Sequence[Batch]],
) -> Iterator[Iterator[Sequence[Batch]]]:
    """Give an iterator over prepared blocks; each is prepared while the one before is in use."""
    remaining = filter(None, blocks)
    futures: deque[Future[Sequence[Batch]]] = deque()

    def start_next() -> None:
        for block in islice(remaining, 1):
            futures.append(crew.preparation.submit(prepare_block, block))

    def results() -> Iterator[Sequence[Batch]]:
        while futures:
            start_next()
            yield futures[0].result()
            futures.popleft()

    start_next()
    try:
        yield results()
    finally:
        wait([future for future in futures if not future.cancel()])


def _periods(blocks: Iterable[Sequence[Batch]]) -> Iterator[list[Sequence[Batch]]]:
    """Group blocks that come one after the other without a copy of the targets in between."""
    period: list[Sequence[Batch]] = []
    for block in blocks:
        period.append(block)
        if block[-1][PLAN].copy_targets:
            yield period
            period = []
    if period:
        yield period


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


def _means(logged: Mapping[str, list[Tensor]], total: Tensor) -> tuple[dict[str, float], bool]:
    """Return the mean of each metric, and whether all of them and ``total`` are finite.

    This is where the processor waits for the values of a GPU, once for all of them.
    """
    means = [torch.stack(series).mean() for series in logged.values()]
    *values, last = torch.stack([*means, total]).tolist()
    return dict(zip(logged, values)), all(map(math.isfinite, (*values, last)))


def _diagnosis(
    nets: ActorCritic, columns: Mapping[str, Tensor], logged: Mapping[str, list[Tensor]]
) -> str:
    """Say what became NaN or infinite, and what was known before it did."""
    broken = [name for name, series in logged.items() if not _is_finite(torch.stack(series))]
    weights = {name.partition(".")[0] for name, p in nets.named_parameters() if not _is_finite(p)}
    broken += [f"the weights of the {part.replace('_', ' ')}" for part in sorted(weights)]
    multipliers = [constraint.multiplier for constraint in nets.constraints.values()]
    known = []
    for name in ("q_mean", "policy_stddev_mean", *multipliers):
        finite = [value for value in map(float, logged.get(name, ())) if math.isfinite(value)]
        known += [f"{name} {finite[-1]:.3g}"] if finite else []
    largest = [
        f"{name} {float(column.abs().max()):.3g}"
        for name, column in columns.items()
        if column.is_floating_point()
    ]
    return (
        f"{', '.join(broken) or 'another learner'} became NaN or infinite by update "
        f"{int(nets.num_updates)}. Last finite values: {', '.join(known) or 'none'}. Largest "
        f"absolute values in the batch: {', '.join(largest)}."
    )


def _is_finite(values: Tensor) -> bool:
    return bool(values.isfinite().all())
