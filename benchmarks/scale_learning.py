"""Whether many environments learn what one does in equally many steps: Pendulum-v1, `compact`.

python benchmarks/scale_learning.py [--json] [--output DIR]

One EnvRunner with one environment, and four with four each and two shards of the replay. With
--output, the mean return of the last ten episodes at each result is written to that directory as
learning.csv, and the greedy returns at the end as greedy.csv.
"""

from __future__ import annotations

import os

import common
import gymnasium as gym
import numpy as np
import pandas as pd
import ray
import torch
from ray.rllib.core.columns import Columns

from rerpi_rllib import RERPIConfig

STEPS = int(os.environ.get("SCALE_STEPS", "20000"))
EPISODES = 20
# EnvRunners, environments of each, shards.
ARRANGEMENTS = {"1 x 1": (1, 1, 0), "4 x 4": (4, 4, 2)}


def _greedy_return(module: torch.nn.Module) -> float:
    """Play some episodes with the policy's mean, the same ones for all."""
    env = gym.make("Pendulum-v1")
    returns = []
    for seed in range(EPISODES):
        observation, _ = env.reset(seed=seed)
        total, is_over = 0.0, False
        while not is_over:
            inputs = {Columns.OBS: torch.from_numpy(observation).unsqueeze(0)}
            action = module.forward_inference(inputs)[Columns.ACTIONS][0].numpy()
            # Pendulum's actions are from -2 to 2.
            observation, reward, terminated, truncated, _ = env.step(2.0 * action.clip(-1.0, 1.0))
            total, is_over = total + float(reward), terminated or truncated
        returns.append(total)
    return float(np.mean(returns))


def learn(name: str) -> tuple[list[dict[str, object]], float]:
    """Return the results of a run, and its greedy return at the end."""
    runners, envs, shards = ARRANGEMENTS[name]
    config = RERPIConfig.compact().environment("Pendulum-v1").debugging(seed=11)
    config.env_runners(
        num_env_runners=runners,
        num_envs_per_env_runner=envs,
        # A request brings as many steps in both.
        rollout_fragment_length=max(1, 50 // (runners * envs)),
    )
    config.training(num_replay_shards=shards).learners(num_gpus_per_learner=0)
    algorithm = config.build_algo()
    rows: list[dict[str, object]] = []
    try:
        while not rows or float(str(rows[-1]["env_steps"])) < STEPS:
            result = algorithm.train()
            rows.append(
                {
                    "arrangement": name,
                    "env_steps": int(result["num_env_steps_sampled_lifetime"]),
                    "updates": int(result["num_updates_lifetime"]),
                    "return_mean": result["env_runners"].get("episode_return_mean", float("nan")),
                    "time_s": result["time_total_s"],
                }
            )
        return rows, _greedy_return(algorithm.get_module())
    finally:
        algorithm.stop()


def main() -> None:
    report = common.Report(__doc__, output=True)
    ray.init("local", num_cpus=16, include_dashboard=False, log_to_driver=False)
    rows, greedy = [], {}
    for name in ARRANGEMENTS:
        more, greedy[name] = learn(name)
        rows += more
        if report.output is not None:
            report.output.mkdir(parents=True, exist_ok=True)
            table = pd.DataFrame(rows)
            table.to_csv(report.output / "learning.csv", index=False, float_format="%.5g")
            series = pd.Series(greedy, name="greedy_return")
            series.to_csv(report.output / "greedy.csv", index_label="arrangement")
    one, many = greedy["1 x 1"], greedy["4 x 4"]
    setting = f"Pendulum-v1, {STEPS:,} steps, mean of {EPISODES} greedy episodes, one seed"
    # Returns are negative: the one nearer to zero is better.
    report.add("scale_learning", many, one, "return", one / many, setting, "with 1 x 1")


if __name__ == "__main__":
    main()
