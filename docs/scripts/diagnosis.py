"""The runs and the pictures of docs/diagnosis.md: a healthy run on Pendulum-v1, and sick ones.

python docs/scripts/diagnosis.py run [NAME ...]
    makes the runs that have no CSV in results/diagnosis yet, each in a minute or two
python docs/scripts/diagnosis.py draw
    draws docs/pictures/diagnosis-NAME.png from these files
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym
import matplotlib
import numpy as np
import pandas as pd

matplotlib.use("Agg")
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
RESULTS, PICTURES = ROOT / "results" / "diagnosis", ROOT / "docs" / "pictures"
STEPS_PER_POINT, SEED = 250, 1


@dataclass(frozen=True)
class Case:
    """A run with the preset `compact`, and what is done to it."""

    title: str
    settings: dict[str, Any] = field(default_factory=dict)
    reward_scale: float = 1.0
    steps: int = 8_000


CASES = {
    "healthy": Case("healthy: the preset compact as it is"),
    "mean-free": Case("epsilon_mu=10 instead of 1e-2", {"epsilon_mu": 10.0}),
    "mean-held": Case("epsilon_mu=1e-6 instead of 1e-2", {"epsilon_mu": 1e-6}, steps=5_000),
    "covariance-free": Case("epsilon_sigma=1 instead of 3e-5", {"epsilon_sigma": 1.0}),
    "multipliers-slow": Case("dual_lr=1e-6 instead of 3e-2", {"dual_lr": 1e-6}, steps=5_000),
    "rewards-large": Case("rewards times 1,000, scalar critic", {}, 1_000.0),
    "rewards-large-normalized": Case(
        "rewards times 1,000, normalize_returns=True",
        {"normalize_returns": True},
        1_000.0,
        steps=5_000,
    ),
}


def run(name: str) -> None:
    """Train one case and write its curves."""
    import torch

    from rerpi_rllib import RERPIConfig

    case = CASES[name]

    def make(**arguments: Any) -> gym.Env[Any, Any]:
        env = gym.make("Pendulum-v1", **arguments)
        return gym.wrappers.TransformReward(env, lambda reward: case.reward_scale * reward)

    torch.set_num_threads(1)
    logging.getLogger("ray").setLevel(logging.ERROR)
    env_id = f"Diagnosis-{name}-v0"
    gym.register(env_id, make)
    config = RERPIConfig.compact().environment(env_id).env_runners(num_env_runners=0)
    config.training(**case.settings).debugging(seed=SEED, log_level="ERROR")
    config.reporting(min_sample_timesteps_per_iteration=STEPS_PER_POINT)
    algo = config.build_algo()
    rows = []
    steps = 0
    while steps < case.steps:
        result = algo.train()
        steps = result["num_env_steps_sampled_lifetime"]
        learned = result.get("learners", {}).get("default_policy", {})
        acted = result["env_runners"]
        row = {"env_steps": steps, "updates": result.get("num_updates_lifetime", 0)}
        row["return"] = acted.get("episode_return_mean", np.nan) / case.reward_scale
        row["episode_length"] = acted.get("episode_len_mean", np.nan)
        for key in METRICS:
            row[key] = float(learned.get(key, np.nan))
        for key in ("q_mean", "temperature"):
            row[key] /= case.reward_scale
        rows.append(row)
        print(f"{name}: {steps:,} steps, return {row['return']:.1f}", flush=True)
    algo.stop()
    # The bounds are kept beside the curves, so that drawing needs nothing else.
    table = pd.DataFrame(rows).assign(
        epsilon_mu=config.epsilon_mu, epsilon_sigma=config.epsilon_sigma, gamma=config.gamma
    )
    RESULTS.mkdir(parents=True, exist_ok=True)
    table.to_csv(RESULTS / f"{name}.csv", index=False, float_format="%.6g")


METRICS = (
    *("kl_mu_at_target_update", "kl_sigma_at_target_update", "alpha_mu", "alpha_sigma"),
    *("temperature", "kl_nonparametric", "weights_ess", "policy_stddev_mean", "q_mean"),
    "critic_loss",
)


def _smoothed(values: pd.Series) -> pd.Series:
    """Average over a thousand steps, which are five episodes."""
    mean: pd.Series = values.rolling(1_000 // STEPS_PER_POINT, min_periods=1).mean()
    return mean


def draw(name: str, table: pd.DataFrame, healthy: pd.DataFrame) -> Figure:
    """Draw the six things to look at; the healthy run is the thin grey line."""
    figure = Figure(figsize=(11.0, 5.2), layout="constrained")
    axes = dict(zip(_PANELS, figure.subplots(2, 3).flat))
    for axis, (title, _) in zip(axes.values(), _PANELS.values()):
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.25)
        axis.tick_params(labelsize=8)
        axis.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}k")
    if table is not healthy:
        _lines(axes, healthy, is_background=True)
    _lines(axes, table)
    for key in ("kl", "multipliers", "q"):
        axes[key].legend(fontsize=8)
    for axis in list(axes.values())[3:]:
        axis.set_xlabel("environment steps", fontsize=8)
    figure.suptitle(CASES[name].title, fontsize=12, fontweight="bold")
    return figure


def _lines(axes: dict[str, Axes], table: pd.DataFrame, is_background: bool = False) -> None:
    steps = table["env_steps"]
    for key, (_, curves) in _PANELS.items():
        for label, color, values in curves(table):
            style: dict[str, Any] = {"color": color, "linewidth": 1.8, "label": label}
            if is_background:
                style = {"color": "0.75", "linewidth": 1.0, "zorder": 0}
            axes[key].plot(steps, values, "--" if label == _REWARDS else "-", **style)
    if is_background:
        return
    axes["kl"].axhline(1.0, color="k", linewidth=0.8)
    for key in ("kl", "multipliers", "temperature"):
        axes[key].set_yscale("log")
    axes["stddev"].set_ylim(bottom=0.0)


_MEAN, _COVARIANCE = "#3949ab", "#e65100"
_REWARDS = "reward / (1 - gamma)"
_PANELS = {
    "return": ("return", lambda t: [("", "#00695c", _smoothed(t["return"]))]),
    "kl": (
        "KL at the target copies, divided by its bound",
        lambda t: [
            ("mean", _MEAN, t["kl_mu_at_target_update"] / t["epsilon_mu"]),
            ("covariance", _COVARIANCE, t["kl_sigma_at_target_update"] / t["epsilon_sigma"]),
        ],
    ),
    "multipliers": (
        "multipliers",
        lambda t: [
            ("alpha_mu", _MEAN, t["alpha_mu"]),
            ("alpha_sigma", _COVARIANCE, t["alpha_sigma"]),
        ],
    ),
    "temperature": ("temperature", lambda t: [("", "#6a1b9a", t["temperature"])]),
    "stddev": ("standard deviation of the policy", lambda t: [("", "k", t["policy_stddev_mean"])]),
    "q": (
        "Q against the rewards",
        lambda t: [
            ("mean Q", "#6d4c41", t["q_mean"]),
            # What Q is if every step gives the mean reward.
            (_REWARDS, "#00695c", _smoothed(t["return"] / t["episode_length"]) / (1.0 - t["gamma"])),
        ],
    ),
}


def main() -> None:
    command, *names = sys.argv[1:] or [""]
    if command == "run" and set(names) <= set(CASES):
        for name in names or CASES:
            if not (RESULTS / f"{name}.csv").is_file():
                run(name)
    elif command == "draw" and not names:
        files = {name: RESULTS / f"{name}.csv" for name in CASES}
        tables = {name: pd.read_csv(path) for name, path in files.items() if path.is_file()}
        PICTURES.mkdir(parents=True, exist_ok=True)
        for name, table in tables.items():
            figure = draw(name, table, tables["healthy"])
            figure.savefig(PICTURES / f"diagnosis-{name}.png", dpi=100)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
