"""The replay: how long it takes to sample a batch, and how much memory a full replay needs.

The time is compared with RLlib's EpisodeReplayBuffer, and with the time when fewer steps are stored.

python benchmarks/replay.py [--json]
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import common
import numpy as np
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.replay_buffers.episode_replay_buffer import EpisodeReplayBuffer

from rerpi_rllib import RERPIConfig
from rerpi_rllib.algorithm.replay import ReplayBuffer

EPISODE, SOME, MANY = 1000, 100_000, 2_000_000


def _episode(rng: np.random.Generator, observation: int, action: int) -> SingleAgentEpisode:
    return SingleAgentEpisode(
        observations=list(rng.standard_normal((EPISODE + 1, observation)).astype(np.float32)),
        actions=list(rng.standard_normal((EPISODE, action)).astype(np.float32)),
        rewards=list(rng.standard_normal(EPISODE).astype(np.float32)),
        extra_model_outputs={"action_logp": list(rng.standard_normal(EPISODE))},
        truncated=True,
        len_lookback_buffer=0,
    ).to_numpy()


def _filled(buffer, steps: int, observation: int = 17, action: int = 6):
    add: Callable = getattr(buffer, "add_episode", None) or buffer.add
    rng = np.random.default_rng(0)
    if isinstance(buffer, ReplayBuffer):  # Ours copies the data; RLlib's keeps the object itself.
        episode = _episode(rng, observation, action)
        for _ in range(steps // EPISODE):
            episode.id_ = str(rng.integers(2**62))
            add(episode)
    else:
        for _ in range(steps // EPISODE):
            add(_episode(rng, observation, action))
    return buffer


def _milliseconds(function: Callable[[], object], repeats: int) -> float:
    """Return the median time of ``repeats`` calls."""
    function()
    return 1e3 * float(np.median([common.seconds(function) for _ in range(repeats)]))


def _memory() -> float:
    """Return the resident memory of this process in megabytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _run_with_full_replay() -> tuple[float, int]:
    """Return how many megabytes a full replay adds to a new run, and how many steps it holds."""
    config = RERPIConfig().environment("dm_control/humanoid-run-v0")
    config.env_runners(num_env_runners=0).learners(num_gpus_per_learner=0)
    config.training(replay_capacity=MANY, train_batch_size=256, updates_per_env_step=0.01)
    algorithm = config.debugging(log_level="ERROR").build_algo()
    algorithm.train()
    before = _memory()
    _filled(algorithm.replay, MANY, 67, 21)
    algorithm._learn(10)
    added = _memory() - before
    algorithm.stop()
    return added, len(algorithm.replay)


def main() -> None:
    report = common.Report(__doc__)
    some = _filled(ReplayBuffer(SOME, 17, 6, seed=0), SOME)
    many = _filled(ReplayBuffer(MANY, 17, 6, seed=0), MANY)
    rllib = _filled(EpisodeReplayBuffer(capacity=SOME), SOME)
    for batch in (256, 3072):
        own, large = (_milliseconds(partial(b.sample, batch), 300) for b in (some, many))
        peer = _milliseconds(
            lambda size=batch: rllib.sample(num_items=size, batch_length_T=1, n_step=1), 5
        )
        stored = f"{SOME} steps of 17 + 6 floats stored"
        report.add(
            f"replay_sample_{batch}", own, peer, "ms", peer / own, stored, "EpisodeReplayBuffer"
        )
        report.add(
            f"replay_flat_{batch}", large, own, "ms", own / large, f"{MANY} steps stored", stored
        )
    added, steps = _run_with_full_replay()
    report.add(
        "replay_memory", added, 1200.0, "MB", 1200.0 / added,
        f"added to a run by {steps} steps of 67 + 21 floats", "the aim",
    )  # fmt: skip


if __name__ == "__main__":
    main()
