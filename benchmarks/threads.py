"""Three ways to make updates cheaper, each added to the ones before and measured in one run, in turn.

First the target networks are evaluated for several updates at once instead of in each update, then
the evaluation of the target critic is split between two threads, and then the critic and the policy
take their steps concurrently.

python benchmarks/threads.py [--json]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import common
import torch
import update

from rerpi_rllib.algorithm.process import give_way, keep_freed_memory
from rerpi_rllib.core.optimizers import make_optimizers
from rerpi_rllib.core.threads import Crew, set_threads
from rerpi_rllib.core.updates import run_updates

ROUNDS = 5
# Sizes as in update.py, and the policy's update period.
CASES = (
    *((update.SIZES[0], 4), (update.SIZES[4], 1), (update.SIZES[4], 4)),
    *((update.SIZES[1], 1), (update.SIZES[3], 1)),
)
# Whether the target networks are evaluated for several updates at once, whether critic and policy
# step concurrently, and the number of threads.
KINDS = {
    "each": (False, False, 1),
    "ahead": (True, False, 1),
    "shared": (True, False, 2),
    "apart": (True, True, 2),
}


def _updates(
    size: tuple, policy_period: int, ahead: bool, apart: bool, threads: int
) -> Callable[[], None]:
    config = update.config_for(size).training(
        policy_update_period=policy_period, target_update_period=100
    )
    nets, settings = update.networks(size, config.environment("Pendulum-v1"))
    how = {
        "optimizers": make_optimizers(nets),
        "crew": Crew() if apart else None,
        "ahead": ahead,
    }
    batch = update.random_batch(size, _calls(size))
    columns = {name: torch.from_numpy(column) for name, column in batch.items()}

    def run() -> None:
        set_threads(threads, give_way)
        run_updates(nets, settings, columns, size[2], **how)

    return run


def _calls(size: tuple) -> int:
    return max(4, 10_240 // size[2])


def main() -> None:
    report = common.Report(__doc__)
    keep_freed_memory()
    for size, period in CASES:
        runs = {name: _updates(size, period, *kind) for name, kind in KINDS.items()}
        found: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(ROUNDS + 1):  # The first round is a warm-up.
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
