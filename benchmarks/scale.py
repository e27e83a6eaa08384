"""What a run costs its main process, its shards and its learners: what decides how far it scales.

python benchmarks/scale.py [--json] [--output DIR]

Each arrangement first acts without learning and then learns, on an environment that costs next to
nothing and has the sizes of the control suite's humanoid. The learner is in a process of its own, so
that the main process does nothing but coordinate. CPU time is compared, which a busy machine changes
less than the clock. With --output, all numbers are written to that directory as measured.csv, from
which scale_model.py extrapolates.
"""

from __future__ import annotations

import os
import time
from typing import Any

import common
import gymnasium as gym
import numpy as np
import pandas as pd
import ray

from rerpi_rllib import RERPIConfig

OBSERVATIONS, ACTIONS, BATCH = 67, 21, 256
SECONDS = float(os.environ.get("SCALE_SECONDS", "10"))
# EnvRunners, environments of each, steps of each in a fragment, shards, learners.
ARRANGEMENTS = [
    (1, 1, 50, 0, 1),
    (2, 1, 50, 0, 1),
    (2, 1, 50, 2, 1),
    (4, 1, 50, 0, 1),
    (4, 1, 50, 2, 1),
    (4, 4, 50, 2, 1),
    (4, 1, 200, 2, 1),
    (2, 1, 50, 2, 2),
]


class Cheap(gym.Env[Any, Any]):
    """Gives observations that were drawn before."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (OBSERVATIONS,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (ACTIONS,), np.float32)

    def __init__(self, config: Any = None) -> None:
        self._all = np.random.default_rng(0).standard_normal((1000, OBSERVATIONS), np.float32)
        self._time = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._time = 0
        return self._all[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._time += 1
        return self._all[self._time % 1000], 1.0, False, self._time == 1000, {}


def _build(runners: int, envs: int, fragment: int, shards: int, learners: int) -> Any:
    config = RERPIConfig.compact().environment(Cheap)
    config.training(
        num_replay_shards=shards,
        replay_capacity=200_000,
        train_batch_size_per_learner=BATCH,
        updates_per_env_step=None,
        num_steps_sampled_before_learning_starts=1_000_000_000,
        compile_updates="never",
    )
    config.env_runners(
        num_env_runners=runners, num_envs_per_env_runner=envs, rollout_fragment_length=fragment
    )
    config.learners(num_learners=learners, num_gpus_per_learner=0)
    config.reporting(min_time_s_per_iteration=1)
    return config.build_algo()


def _cpu(algorithm: Any) -> dict[str, float]:
    """Return the CPU seconds of the processes: the main one's, and the sums of the others'."""
    group, replay = algorithm.env_runner_group, algorithm.replay
    runners = group.foreach_env_runner(lambda _: time.process_time(), local_env_runner=False)
    learners = algorithm.learner_group.foreach_learner(lambda _: time.process_time())
    shards = [
        actor.__ray_call__.remote(lambda _: time.process_time())
        for actor in getattr(replay, "actors", ())
    ]
    return {
        "main": time.process_time(),
        "env_runners": sum(runners),
        "learners": sum(result.get() for result in learners),
        "shards": sum(ray.get(shards)),
    }


def _train(algorithm: Any) -> dict[str, float]:
    """Train for a while and return what was done and used in that time."""

    def now() -> dict[str, float]:
        return {
            "s": time.perf_counter(),
            "steps": float(algorithm._limiter.env_steps),
            "updates": float(algorithm._limiter.updates),
            **_cpu(algorithm),
        }

    algorithm.train()
    before = now()
    while time.perf_counter() - before["s"] < SECONDS:
        algorithm.train()
    after = now()
    return {key: after[key] - before[key] for key in before}


def _bytes_of_a_batch(algorithm: Any) -> int:
    """Return how many bytes an update of one learner takes from the replay."""
    rows = BATCH * algorithm.replay._num_learners
    parts = ray.get(algorithm.replay.draw(rows, None).batch_refs)
    return sum(column.nbytes for part in parts for column in part.values()) * BATCH // rows


def measure(arrangement: tuple[int, int, int, int, int]) -> dict[str, float]:
    runners, envs, fragment, shards, learners = arrangement
    algorithm = _build(*arrangement)
    try:
        acting = _train(algorithm)
        algorithm._limiter._learning_starts = 0
        published, given = [0], algorithm._send_weights

        def send() -> None:
            published[0] += 1
            given()

        algorithm._send_weights = send
        learning = _train(algorithm)
        weights = ray.get(algorithm._weights.reference)["rl_module"]["default_policy"]
        steps = acting["main"] / acting["steps"]
        beside = steps * learning["steps"]  # The steps that came in while it learned cost as much.
        return {
            "env_runners": runners,
            "envs": envs,
            "fragment": fragment,
            "shards": shards,
            "learners": learners,
            "steps_per_s": acting["steps"] / acting["s"],
            "updates_per_s": learning["updates"] / learning["s"],
            "main_ms_per_1000_steps": 1e6 * steps,
            "main_ms_per_request": 1e3 * steps * envs * fragment,
            "main_ms_per_1000_updates": 1e6 * (learning["main"] - beside) / learning["updates"],
            "main_share_learning": learning["main"] / learning["s"],
            "shards_ms_per_1000_steps": 1e6 * acting["shards"] / acting["steps"],
            "env_runners_ms_per_1000_steps": 1e6 * acting["env_runners"] / acting["steps"],
            "learners_ms_per_update": 1e3 * learning["learners"] / learning["updates"] / learners,
            "bytes_per_update": _bytes_of_a_batch(algorithm) if shards else 0,
            "bytes_of_weights": sum(value.nbytes for value in weights.values()),
            "weights_per_s": published[0] / learning["s"],
        }
    finally:
        algorithm.stop()


def main() -> None:
    report = common.Report(__doc__, output=True)
    ray.init("local", num_cpus=16, include_dashboard=False, log_to_driver=False)
    rows = []
    for arrangement in ARRANGEMENTS:
        rows.append(measure(arrangement))
        if report.output is not None:  # One by one: the machine may have other work.
            report.output.mkdir(parents=True, exist_ok=True)
            table = pd.DataFrame(rows)
            table.to_csv(report.output / "measured.csv", index=False, float_format="%.4g")
    with_shards = {(r["env_runners"], r["envs"], r["fragment"]): r for r in rows if r["shards"]}
    for row in rows:
        key = row["env_runners"], row["envs"], row["fragment"]
        if row["shards"] or key not in with_shards:
            continue
        ours = with_shards[key]
        setting = f"{row['env_runners']} EnvRunners, fragments of {row['fragment']} steps, 2 shards"
        for name in ("main_ms_per_1000_steps", "main_ms_per_1000_updates"):
            ratio = row[name] / ours[name]
            report.add(f"scale_{name}", ours[name], row[name], "ms", ratio, setting, "without shards")


if __name__ == "__main__":
    main()
