"""What makes several updates cheaper than one by one: the target networks asked for all of them at
once, then the pieces of the target critic shared between two threads, then critic and policy side by
side on top; in one run, in turn.

python benchmarks/threads.py [--json]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import common
import torch
import update
from rerpi_rllib.algorithm.updates import (
    Updates,
    keep_freed_memory,
    make_optimizers,
    preparation,
    steps_apart,
)
from rerpi_rllib.core.parallel import set_threads

from rerpi_rllib.core.losses import LossSettings, rerpi_losses
from rerpi_rllib.core.networks import ActorCritic

ROUNDS = 5
# Sizes as in update.py, and the policy's update period.
COMPACT = (17, 6, 128, (128,) * 2, (256,) * 2)
CASES = (
    *((COMPACT, 4), (update.SIZES[3], 1), (update.SIZES[3], 4)),
    *((update.SIZES[1], 1), (update.SIZES[2], 1)),
)
# Whether the target networks are asked ahead, whether critic and policy learn apart, threads.
KINDS = {
    "each": (False, False, 1),
    "ahead": (True, False, 1),
    "shared": (True, False, 2),
    "apart": (True, True, 2),
}


def _updates(
    size: tuple, policy_period: int, ahead: bool, apart: bool, threads: int
) -> Callable[[], None]:
    config = update.config_for(size).environment("Pendulum-v1")
    nets = ActorCritic(*size[:2], **config.model_config["networks"], clip_actions=True)
    settings = LossSettings(**config.model_config["loss"])
    optimizers = make_optimizers(nets)

    def one_by_one(minibatch: dict[str, torch.Tensor], improves: bool, late: bool):
        losses, metrics = rerpi_losses(nets, minibatch, settings, improves, late)
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        torch.stack(list(losses.values())).sum().backward()
        for name in losses:
            optimizers[name].step()
        return metrics

    steps = steps_apart(nets, settings, optimizers) if apart else {"update": one_by_one}
    if ahead:
        steps["prepare"] = preparation(nets, settings)
    batch = update.random_batch(size, _calls(size))
    columns = {name: torch.from_numpy(column) for name, column in batch.items()}
    updates = Updates(100, policy_period)

    def run() -> None:
        set_threads(threads)
        updates.run(nets, columns, size[2], **steps)

    return run


def _calls(size: tuple) -> int:
    return max(4, 10_240 // size[2])


def main() -> None:
    report = common.Report(__doc__)
    keep_freed_memory()
    for size, period in CASES:
        runs = {name: _updates(size, period, *kind) for name, kind in KINDS.items()}
        found: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(ROUNDS + 1):  # The first warms up.
            for name, run in runs.items():
                found[name].append(1e3 * common.seconds(run) / _calls(size))
        times = {name: statistics.median(values[1:]) for name, values in found.items()}
        setting = f"batch {size[2]}, critic {size[4]}, policy step in every {period}. update"
        name = f"{size[2]}_{size[4][0]}x{len(size[4])}_every_{period}"
        for ours, peer, peer_name in (
            ("ahead", "each", "update by update; here the target networks are asked for all at once"),
            ("shared", "ahead", "one thread; here the target critic's pieces shared between two"),
            ("apart", "shared", "pieces shared; here critic and policy side by side too"),
        ):
            ratio = times[peer] / times[ours]
            report.add(
                f"threads_{ours}_{name}", times[ours], times[peer], "ms", ratio, setting, peer_name
            )


if __name__ == "__main__":
    main()
