"""What an update does beside its loss; the same on both of RLlib's API stacks."""

from __future__ import annotations

import ctypes
import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

import torch
from torch import Tensor

from rerpi_rllib.core.losses import LossSettings, ask_targets, critic_loss, policy_losses
from rerpi_rllib.core.networks import ActorCritic
from rerpi_rllib.core.parallel import one_torch_thread_each

_AT_TARGET_UPDATE = "_at_target_update"

# One update on a minibatch, given whether the policy learns and whether the multipliers do.
Update = Callable[[dict[str, Tensor], bool, bool], Mapping[str, Tensor]]
# The policy's part alone, given whether the multipliers learn.
PolicyStep = Callable[[dict[str, Tensor], bool], Mapping[str, Tensor]]
# The minibatches of several updates with what their losses take from the target networks, given for
# each whether the policy learns.
Prepare = Callable[[Sequence[dict[str, Tensor]], Sequence[bool]], list[dict[str, Any]]]

# At most so many steps at once: more would gain little and take memory.
_STEPS_PREPARED = 4096


def make_optimizers(
    nets: ActorCritic, lr: float = 1e-3, dual_lr: float = 1e-3
) -> dict[str, torch.optim.Adam]:
    """An Adam for each of critic, policy and multipliers; none for what has no parameters.

    The new API stack sets the rates itself, from its schedules.
    """
    optimizers = {}
    for name, part, rate, betas in (
        ("critic", nets.critic, lr, (0.9, 0.999)),
        ("policy", nets.policy, lr, (0.9, 0.999)),
        # A short memory: one large KL must not keep the multipliers slow for a thousand updates.
        # No momentum: it would carry them on through the updates that leave them alone.
        ("dual", nets.multipliers, dual_lr, (0.0, 0.9)),
    ):
        if parameters := list(part.parameters()):
            optimizers[name] = torch.optim.Adam(parameters, lr=rate, betas=betas, fused=True)
    return optimizers


def steps_apart(
    nets: ActorCritic, settings: LossSettings, optimizers: Mapping[str, torch.optim.Optimizer]
) -> dict[str, Callable]:
    """The steps of critic and policy by themselves, as :meth:`Updates.run` takes them."""

    def step(losses: Mapping[str, Tensor], names: Sequence[str]) -> None:
        moved = [optimizers[name] for name in names if name in optimizers]
        for optimizer in moved:
            optimizer.zero_grad()
        torch.stack(list(losses.values())).sum().backward()
        for optimizer in moved:
            optimizer.step()

    def update(minibatch: dict[str, Tensor], *_: bool) -> Mapping[str, Tensor]:
        losses, metrics = critic_loss(nets, minibatch, settings)
        step(losses, ["critic"])
        return metrics

    def improve(minibatch: dict[str, Tensor], move_multipliers: bool) -> Mapping[str, Tensor]:
        losses, metrics = policy_losses(nets, minibatch, settings, move_multipliers)
        step(losses, ["policy", "dual"])
        return metrics

    return {"update": update, "improve": improve, "prepare": preparation(nets, settings)}


def preparation(nets: ActorCritic, settings: LossSettings) -> Prepare:
    """As :meth:`Updates.run` takes it."""
    return lambda minibatches, improves: ask_targets(nets, minibatches, improves, settings)


class Updates:
    """Counts the updates, decides what each one moves, copies the targets, averages the metrics."""

    def __init__(self, target_update_period: int, policy_update_period: int) -> None:
        self.count = 0
        self._target_period, self._policy_period = target_update_period, policy_update_period
        self._policy_thread = one_torch_thread_each(1)

    def _improves(self, update: int) -> bool:
        return update % self._policy_period == 0

    def run(
        self,
        nets: ActorCritic,
        columns: Mapping[str, Tensor],
        minibatch_size: int,
        update: Update,
        improve: PolicyStep | None = None,
        prepare: Prepare | None = None,
    ) -> dict[str, float]:
        """One update for every ``minibatch_size`` rows, in order; the means of their metrics.

        Between two target copies critic and policy do not depend on each other. If the policy's steps
        are given as ``improve``, they are taken in a thread beside the critic's. ``prepare`` is
        called for several updates at once, with no copy between them.
        """
        logged: dict[str, list[Tensor]] = defaultdict(list)
        improving: list[Future] = []

        def log(metrics: Mapping[str, Tensor]) -> None:
            for key, value in metrics.items():
                logged[key].append(value)

        def wait_for_policy() -> None:
            while improving:
                log(improving.pop(0).result())

        minibatches = [
            {key: column[start : start + minibatch_size] for key, column in columns.items()}
            for start in range(0, len(columns["rewards"]), minibatch_size)
        ]
        at_once = max(1, _STEPS_PREPARED // minibatches[0]["rewards"].numel())
        prepared: deque[dict[str, Any]] = deque()
        try:
            for index, minibatch in enumerate(minibatches):
                if prepare is not None:
                    if not prepared:
                        until_copy = self._target_period - self.count % self._target_period
                        some = minibatches[index : index + min(at_once, until_copy)]
                        numbers = range(self.count + 1, self.count + 1 + len(some))
                        prepared.extend(prepare(some, [self._improves(n) for n in numbers]))
                    minibatch = prepared.popleft()
                self.count += 1
                # The bounds are for the policy that is copied. Earlier in a period the KL is smaller
                # whatever the multipliers are, and would pull them down.
                late = 4 * ((self.count - 1) % self._target_period + 1) > 3 * self._target_period
                improves = self._improves(self.count)
                if improves and improve is not None:
                    improving.append(self._policy_thread.submit(improve, minibatch, late))
                    improves = False
                log(update(minibatch, improves, late))
                if self.count % self._target_period == 0:
                    wait_for_policy()
                    nets.update_targets()
                    for key in [k for k in logged if k.startswith("kl_") and k != "kl_nonparametric"]:
                        if not key.endswith(_AT_TARGET_UPDATE):
                            logged[key + _AT_TARGET_UPDATE] += logged[key][-1:]
            wait_for_policy()
        finally:  # Nothing goes on after an error.
            wait([step for step in improving if not step.cancel()])
        names = list(logged)
        means = torch.stack([torch.stack(logged[name]).mean() for name in names]).tolist()
        found = dict(zip(names, means))
        if broken := [name for name, mean in found.items() if not math.isfinite(mean)]:
            raise FloatingPointError(
                f"{', '.join(broken)} became NaN or infinite by update {self.count}. Look for NaN in "
                "the environment's observations and rewards; otherwise a smaller lr or smaller "
                "bounds may help."
            )
        return found


def keep_freed_memory() -> None:
    """Ask glibc not to hand freed memory back to the system.

    Every update frees and takes the same few megabytes for activations; getting them back from the
    system page by page costs a fifth of an update on a CPU.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, top_pad, mmap_threshold, arena_max = -1, -2, -3, -8
        mallopt(mmap_threshold, 2**30)
        mallopt(trim_threshold, 2**30)
        mallopt(top_pad, 2**26)
        # One heap for all threads: the learner may run in one of its own.
        mallopt(arena_max, 1)
