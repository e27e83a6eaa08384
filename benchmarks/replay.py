"""Time to sample a batch: this package's replay against RLlib's EpisodeReplayBuffer, in one run.

python benchmarks/replay.py [--json] [--steps 100000]
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.replay_buffers.episode_replay_buffer import EpisodeReplayBuffer

from rerpi_rllib.algorithm.replay import ReplayBuffer

OBSERVATION, ACTION, EPISODE = 17, 6, 1000


def _episode(rng: np.random.Generator) -> SingleAgentEpisode:
    return SingleAgentEpisode(
        observations=list(rng.standard_normal((EPISODE + 1, OBSERVATION)).astype(np.float32)),
        actions=list(rng.standard_normal((EPISODE, ACTION)).astype(np.float32)),
        rewards=list(rng.standard_normal(EPISODE).astype(np.float32)),
        extra_model_outputs={"action_logp": list(rng.standard_normal(EPISODE))},
        truncated=True,
        len_lookback_buffer=0,
    ).to_numpy()


def _milliseconds(function, repeats: int) -> float:
    """Median over ``repeats`` calls."""
    function()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return 1e3 * float(np.median(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=100_000)
    arguments = parser.parse_args()

    rng = np.random.default_rng(0)
    ours = ReplayBuffer(arguments.steps, OBSERVATION, ACTION, seed=0)
    rllib = EpisodeReplayBuffer(capacity=arguments.steps)
    for _ in range(arguments.steps // EPISODE):
        episode = _episode(rng)
        ours.add_episode(episode)
        rllib.add(episode)
    for batch in (256, 3072):
        own = _milliseconds(lambda size=batch: ours.sample(size), 200)
        peer = _milliseconds(
            lambda size=batch: rllib.sample(num_items=size, batch_length_T=1, n_step=1), 5
        )
        row = {
            "name": f"replay_sample_{batch}",
            "ours": own,
            "peer": peer,
            "unit": "ms",
            "ratio": peer / own,
            "setting": f"{arguments.steps} steps stored, {OBSERVATION} + {ACTION} floats",
        }
        if arguments.json:
            print(json.dumps(row))
        else:
            print(
                f"batch {batch:5d}: {own:8.3f} ms here, {peer:8.2f} ms EpisodeReplayBuffer: "
                f"{peer / own:6.0f} times faster"
            )


if __name__ == "__main__":
    main()
