"""Environment steps per second of this package's EnvRunner, of RLlib's, and of a loop of one's own.

RLlib's is its SingleAgentEnvRunner. The loop of one's own is what a user would write without RLlib:
it steps the bare environment of dm_control, calls the policy at each step as any torch module, and
keeps nothing but the sum of rewards. All are measured in one run, in turn, on cheetah-run with the
same policy network (256 x 2) and one torch thread. Seconds are those of the CPU, so that other
processes on the machine matter less.

python benchmarks/env_runner.py [--json]
"""

from __future__ import annotations

import time

import common
import numpy as np
import torch
from dm_control import suite
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

from rerpi_rllib import RERPIConfig
from rerpi_rllib.algorithm.env_runner import RERPIEnvRunner
from rerpi_rllib.core.policies import Policy

ENV, STEPS, ROUNDS = "dm_control/cheetah-run-v0", 1000, 15


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
    started, steps = time.process_time(), 0
    while steps < STEPS:
        steps += sum(map(len, runner.sample()))
        runner.get_metrics()
    return steps / (time.process_time() - started)


def _steps_per_second_of_bare_loop(policy: Policy, num_envs: int) -> float:
    envs = [suite.load("cheetah", "run") for _ in range(num_envs)]
    low, high = envs[0].action_spec().minimum, envs[0].action_spec().maximum
    steps = [env.reset() for env in envs]
    total_reward = 0.0
    started = time.process_time()
    with torch.inference_mode():
        for _ in range(0, STEPS, num_envs):
            observations = np.stack([np.concatenate([*step.observation.values()]) for step in steps])
            actions = policy(torch.as_tensor(observations, dtype=torch.float32)).sample(1)[0].numpy()
            steps = [env.step(a) for env, a in zip(envs, np.clip(actions, low, high))]
            total_reward += sum(step.reward or 0.0 for step in steps)
            steps = [env.reset() if step.last() else step for env, step in zip(envs, steps)]
    return STEPS / (time.process_time() - started)


def main() -> None:
    report = common.Report(__doc__)
    torch.set_num_threads(1)
    for num_envs in (1, 8):
        runners = [_runner(cls, num_envs) for cls in (RERPIEnvRunner, SingleAgentEnvRunner)]
        policy = runners[0].module.nets.policy
        speeds = np.array(
            [
                [
                    *map(_steps_per_second, runners),
                    _steps_per_second_of_bare_loop(policy, num_envs),
                ]
                for _ in range(ROUNDS)
            ]
        )
        setting = f"{ENV}, {num_envs} environments, policy 256 x 2, one thread"
        medians, ratios = np.median(speeds, axis=0), np.median(speeds[:, :1] / speeds, axis=0)
        peers = ("env_runner", "RLlib's SingleAgentEnvRunner"), ("bare_loop", "a loop without RLlib")
        for column, (name, peer) in enumerate(peers, start=1):
            report.add(
                f"{name}_{num_envs}", float(medians[0]), float(medians[column]), "env steps/s",
                float(ratios[column]), setting, peer,
            )  # fmt: skip


if __name__ == "__main__":
    main()
