"""Environment steps per second of the parkour tasks on one core, and what their heights cost.

Actions are drawn at random, so that a body falls every 20 to 30 steps and the time of drawing a new
course is part of the result. The peer is the task of the control suite with the same body and as many
seconds to a step, which has no course and no heights. Seconds are those of the CPU.

python benchmarks/envs.py [--json]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import common
import gymnasium as gym
import numpy as np

from rerpi_rllib import envs

STEPS, ROUNDS = 1000, 7
PEERS = {
    "parkour/walker2d-v0": "dm_control/walker-run-v0",
    "parkour/humanoid-walls-v0": "dm_control/humanoid-run-v0",
    "parkour/humanoid-gaps-v0": "dm_control/humanoid-run-v0",
}


def _steps_per_second(env: gym.Env[Any, Any]) -> float:
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (STEPS, *env.action_space.shape)).astype(np.float32)
    env.reset(seed=0)

    def play() -> None:
        for action in actions:
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()

    return STEPS / _cpu_seconds(play)


def _seconds_of_heights(env: gym.Env[Any, Any]) -> float:
    def read() -> None:
        for _ in range(STEPS):
            env.unwrapped.terrain()

    return _cpu_seconds(read) / STEPS


def _cpu_seconds(function: Callable[[], None]) -> float:
    started = time.process_time()
    function()
    return time.process_time() - started


def main() -> None:
    report = common.Report(__doc__)
    for env_id, peer_id in PEERS.items():
        env, peer = envs.make(env_id), envs.make(peer_id)
        rates = np.array([[_steps_per_second(env), _steps_per_second(peer)] for _ in range(ROUNDS)])
        own, suite = np.median(rates, axis=0)
        name = env_id.split("/")[1].removesuffix("-v0")
        report.add(
            f"steps_{name}", own, suite, "env steps/s", np.median(rates[:, 0] / rates[:, 1]),
            f"{env_id}, random actions, one thread", peer_id,
        )  # fmt: skip
        heights, step = np.median([_seconds_of_heights(env) for _ in range(ROUNDS)]), 1 / own
        report.add(
            f"heights_{name}", heights * 1e6, step * 1e6, "us", step / heights,
            f"{env_id}, heights ahead, {heights / step:.1%} of a step", "a whole step",
        )  # fmt: skip


if __name__ == "__main__":
    main()
