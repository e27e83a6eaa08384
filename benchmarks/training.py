"""Whole training on cheetah-run with one update per environment step.

This measures the environment steps per second of RERPI, asynchronous and synchronous, of the preset
`compact`, and of three SACs with their defaults: RLlib's, stable-baselines3's, and SBX's, which is
compiled with JAX; the time of one update, including replay sampling, of RERPI and of RLlib's SAC; and
the time that `rllib train` needs until its first update. Each measurement has a process of its own,
and they take turns in one run. Each SAC uses one or two threads, whichever is faster; synchronous
RERPI uses one. What is compiled is compiled before the clock starts.

python benchmarks/training.py [--json]

It needs the SACs: pip install -c constraints.txt -e '.[benchmark]'
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch
from ray.rllib.algorithms.sac import SACConfig

from rerpi_rllib import RERPIConfig, envs

ENV, BATCH, WARM_UP, ROUNDS = "dm_control/cheetah-run-v0", 256, 400, 2
SECONDS = 10.0


def _prepared(config: RERPIConfig, num_env_runners: int) -> RERPIConfig:
    config = (
        config.environment(ENV)
        .training(num_steps_sampled_before_learning_starts=WARM_UP, compile_updates="at_start")
        .env_runners(num_env_runners=num_env_runners)
        .learners(num_gpus_per_learner=0)
        .reporting(min_sample_timesteps_per_iteration=100)
        .debugging(seed=0, log_level="ERROR")
    )
    config.replay_capacity = 100_000
    return config


def _rerpi(num_env_runners: int, **settings: Any) -> RERPIConfig:
    config = _prepared(RERPIConfig(), num_env_runners).training(updates_per_env_step=1.0)
    config.training(policy_layers=(256, 256), critic_layers=(256, 256), train_batch_size=BATCH)
    return config.training(**settings)


def _sac(batch: int = BATCH) -> SACConfig:
    envs.register_with_tune(ENV)
    return (
        SACConfig()
        .environment(ENV)
        .env_runners(num_env_runners=0)
        .training(num_steps_sampled_before_learning_starts=WARM_UP)
        .training(train_batch_size_per_learner=batch)
        .debugging(seed=0, log_level="ERROR")
    )


def _rate(algorithm: Any) -> float:
    """Return the environment steps per second once learning has started."""

    def steps() -> float:
        return algorithm.train()["num_env_steps_sampled_lifetime"]

    # RERPI first makes the updates that are due for the steps before learning started.
    while (before := steps()) < WARM_UP + 150:
        pass
    started = time.perf_counter()
    while time.perf_counter() - started < SECONDS:
        now = steps()
    rate = (now - before) / (time.perf_counter() - started)
    algorithm.stop()
    return rate


def rllib_sac(threads: int) -> float:
    torch.set_num_threads(threads)
    return _rate(_sac().build_algo())


def rerpi(num_env_runners: int, **settings: Any) -> float:
    return _rate(_rerpi(num_env_runners, **settings).build_algo())


def compact() -> float:
    return _rate(_prepared(RERPIConfig.compact(), num_env_runners=1).build_algo())


def stable_baselines_sac(threads: int) -> float:
    from stable_baselines3 import SAC

    torch.set_num_threads(threads)
    return _baselines_rate(SAC)


def sbx_sac(threads: int) -> float:
    # XLA reads this before its first computation. By default it uses all cores.
    if threads == 1:
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    from sbx import SAC

    return _baselines_rate(SAC)


def _baselines_rate(sac: Any) -> float:
    """Return the environment steps per second of a SAC with the interface of stable-baselines3."""
    model = sac("MlpPolicy", envs.make(ENV), seed=0, learning_starts=100)
    model.learn(300)
    started, before = time.perf_counter(), model.num_timesteps
    while time.perf_counter() - started < SECONDS:
        model.learn(100, reset_num_timesteps=False)
    return (model.num_timesteps - before) / (time.perf_counter() - started)


SACS = {"rllib": rllib_sac, "sb3": stable_baselines_sac, "sbx": sbx_sac}
PEER_NAMES = {"rllib": "RLlib's SAC", "sb3": "stable-baselines3's SAC", "sbx": "SBX's SAC"}


def rllib_sac_update(batch: int, threads: int) -> tuple[float, int]:
    """Return the seconds for replay sampling and an update, and the critics' number of parameters."""
    torch.set_num_threads(threads)
    config = _sac(batch)
    config.num_steps_sampled_before_learning_starts = 10**9  # Updates are made by hand.
    algorithm = config.build_algo()
    while algorithm.train()["num_env_steps_sampled_lifetime"] < WARM_UP:
        pass

    def update() -> None:
        episodes = algorithm.local_replay_buffer.sample(
            num_items=batch, n_step=1, batch_length_T=0, lookback=0, gamma=0.99, beta=0.4,
            sample_episodes=True,
        )  # fmt: skip
        algorithm.learner_group.update(episodes=episodes)

    update()
    found = statistics.median(common.seconds(update) for _ in range(5))
    module = algorithm.learner_group._learner.module["default_policy"]
    parameters = [p for name, p in module.named_parameters() if name.startswith("qf")]
    algorithm.stop()
    return found, sum(p.numel() for p in parameters)


def rerpi_update(batch: int) -> tuple[float, int]:
    algorithm = _rerpi(1, train_batch_size=batch).build_algo()
    while len(algorithm.replay) < WARM_UP:
        algorithm._collect(wait=0.1)
    updates = 40 if batch == BATCH else 4
    algorithm._learn(updates)
    found = statistics.median(common.seconds(lambda: algorithm._learn(updates)) for _ in range(3))
    nets = algorithm.learner_group._learner.module["default_policy"].unwrapped().nets
    parameters = sum(p.numel() for p in nets.critic.parameters())
    algorithm.stop()
    return found / updates, parameters


def _without_jax() -> dict[str, str]:
    """Return variables with which RLlib does not import JAX, which only the benchmarks install."""
    return {**os.environ, "RLLIB_TEST_NO_JAX_IMPORT": "1"}


def first_update() -> float:
    """Return the seconds from the start of the command to the first result with an update."""
    with tempfile.TemporaryDirectory() as storage:
        command = [Path(sys.executable).with_name("rllib"), "train", "--quiet", "--algo", "RERPI"]
        command += ["--preset", "compact", "--env", ENV, "--storage-path", storage, "--name", "run"]
        command += ["--stop", json.dumps({"updates": 1}), "--num-env-runners", "0"]
        command += ["--no-dashboard"]
        command += ["--set", "min_sample_timesteps_per_iteration=1"]
        # Otherwise all updates due for the first 1,000 steps would be included in the time.
        command += ["--set", "num_steps_sampled_before_learning_starts=50"]
        started = time.time()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=_without_jax())
        (results,) = Path(storage).glob("run/part-1/result.json")
        return results.stat().st_mtime - started


def _silence() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def main() -> None:
    report = common.Report(__doc__)

    def alone(function: Callable, *arguments: Any, **settings: Any) -> Any:
        context = multiprocessing.get_context("spawn")
        with context.Pool(1, initializer=_silence) as process:
            return process.apply(function, arguments, settings)

    threads = {
        name: max((1, 2), key=lambda count, function=function: alone(function, count))
        for name, function in SACS.items()
    }
    rates: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name, function, arguments, settings in (
            ("async", rerpi, (1,), {}),
            ("sync", rerpi, (0,), {}),
            ("async4", rerpi, (1,), {"policy_update_period": 4}),
            ("sync4", rerpi, (0,), {"policy_update_period": 4}),
            ("compact", compact, (), {}),
            *((name, function, (threads[name],), {}) for name, function in SACS.items()),
        ):
            rates.setdefault(name, []).append(alone(function, *arguments, **settings))

    def compare(name: str, ours: str, peer: str, setting: str, peer_name: str) -> None:
        ratio = statistics.median(a / b for a, b in zip(rates[ours], rates[peer]))
        medians = (statistics.median(rates[which]) for which in (ours, peer))
        report.add(name, *medians, "env steps/s", ratio, setting, peer_name)

    base = f"{ENV}, one update per step, 256 x 2, batch {BATCH}, N = 20, asynchronous, two cores"
    preset = f"{ENV}, preset compact (two updates per step, batch 128), asynchronous, two cores"
    settings = {
        "1": ("async", "sync", f"{base}, policy step in every update"),
        "4": ("async4", "sync4", f"{base}, in every 4th"),
        "compact": ("compact", None, preset),
    }
    for which, (ours, synchronous, setting) in settings.items():
        for peer, count in threads.items():
            peer_name = f"{PEER_NAMES[peer]}, defaults, {count} threads"
            compare(f"training_{peer}_{which}", ours, peer, setting, peer_name)
        if synchronous:
            name = f"training_async_{which}"
            compare(name, ours, synchronous, setting, "synchronous, one thread")
    for batch in (BATCH, 3072):
        ours, own_size = alone(rerpi_update, batch)
        peer, size = alone(rllib_sac_update, batch, threads["rllib"])
        setting = f"batch {batch}, replay sampling included, critic 256 x 2, {own_size} parameters"
        report.add(
            f"sac_update_{batch}", 1e3 * ours, 1e3 * peer, "ms", peer / ours, setting,
            f"RLlib's SAC, defaults, critics of {size} parameters, {threads['rllib']} torch threads",
        )  # fmt: skip
    start = "ray.init(include_dashboard=False, log_to_driver=False)"
    bare = [sys.executable, "-c", f"import ray, ray.rllib, torch; {start}"]
    peer = statistics.median(
        common.seconds(
            lambda: subprocess.run(bare, check=True, stderr=subprocess.DEVNULL, env=_without_jax())
        )
        for _ in range(3)
    )
    ours = statistics.median(first_update() for _ in range(3))
    report.add(
        "first_update", ours, peer, "s", peer / ours, "from `rllib train --preset compact` to the "
        "first result, after 50 steps and updates", "importing RLlib and torch and starting Ray",
    )  # fmt: skip


if __name__ == "__main__":
    main()
