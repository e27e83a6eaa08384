"""Environment steps per second of this package's EnvRunner and of RLlib's SingleAgentEnvRunner.

Both are measured in one run, in turn, on cheetah-run with the same policy network (256 x 2) and one
torch thread.

python benchmarks/env_runner.py [--json]
"""

from __future__ import annotations

import time

import common
import numpy as np
import torch
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

from rerpi_rllib import RERPIConfig
from rerpi_rllib.algorithm.env_runner import RERPIEnvRunner

ENV, STEPS, ROUNDS = "dm_control/cheetah-run-v0", 2000, 7


def _runner(cls: type, num_envs: int) -> SingleAgentEnvRunner:
    config = (
        RERPIConfig()
        .environment(ENV)
        .env_runners(num_env_runners=0, num_envs_per_env_runner=num_envs)
        .training(policy_layers=(256, 256))
        .debugging(seed=0)
    )
    config.validate()
    return cls(config=config, worker_index=0)


def _steps_per_second(runner: SingleAgentEnvRunner) -> float:
    started, steps = time.perf_counter(), 0
    while steps < STEPS:
        steps += sum(map(len, runner.sample()))
        runner.get_metrics()
    return steps / (time.perf_counter() - started)


def main() -> None:
    report = common.Report(__doc__)
    torch.set_num_threads(1)
    for num_envs in (1, 8):
        runners = [_runner(cls, num_envs) for cls in (RERPIEnvRunner, SingleAgentEnvRunner)]
        speeds = [[_steps_per_second(runner) for runner in runners] for _ in range(ROUNDS)]
        ratio = float(np.median([own / other for own, other in speeds]))
        setting = f"{ENV}, {num_envs} environments, policy 256 x 2, one thread"
        report.add(
            f"env_runner_{num_envs}", *np.median(speeds, axis=0).tolist(), "env steps/s", ratio,
            setting, "RLlib's SingleAgentEnvRunner",
        )  # fmt: skip


if __name__ == "__main__":
    main()
