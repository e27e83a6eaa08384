"""Learning curves from what Tune wrote."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd

from rerpi_rllib.experiments.settings import RunSettings

_STEPS = "num_env_steps_sampled_lifetime"
_RETURN = "env_runners/episode_return_mean"
_EVALUATION = "evaluation/env_runners/episode_return_mean"
_LEARNER = "learners/default_policy/"


def load_run(directory: Path) -> pd.DataFrame:
    """A run's ``progress.csv``; the parts of a resumed run one after the other."""
    tables = []
    for path in sorted(directory.glob("**/progress.csv"), key=lambda p: p.stat().st_mtime):
        if path.stat().st_size:
            tables.append(pd.read_csv(path))
    if not tables:
        raise ValueError(f"There is no progress.csv with results at or below {str(directory)!r}.")
    table = pd.concat(tables, ignore_index=True)
    # A part that was resumed from an older checkpoint repeats some steps: the later part counts.
    later_minimum = table[_STEPS][::-1].cummin()[::-1].shift(-1)
    return table[~(table[_STEPS] >= later_minimum)]


def plot_run(directory: Path, output: Path | None = None) -> Path:
    """Return, KLs against their bounds, multipliers and temperature, and stddev of one run."""
    table = load_run(directory)
    settings = RunSettings.FILE_NAME
    found = [p / settings for p in (directory, *directory.parents) if (p / settings).is_file()]
    about = json.loads(found[0].read_text()) if found else {}
    figure, axes = plt.subplots(2, 2, figsize=(10, 6.5), sharex=True, layout="constrained")
    steps = table[_STEPS]

    def draw(axis, column: str, label: str, style: str, scale: float = 1.0) -> None:
        if column in table:
            known = table[column].notna()
            axis.plot(steps[known], table[column][known] / scale, style, label=label)

    draw(axes[0, 0], _RETURN, "training episodes", "k-")
    draw(axes[0, 0], _EVALUATION, "greedy evaluation", "ko--")
    axes[0, 0].set_title("return")
    bounds = _bounds(directory)
    for name, key, style in (
        ("kl_mu", "epsilon_mu", "k-"),
        ("kl_sigma", "epsilon_sigma", "k--"),
        ("kl_nonparametric", "epsilon", "k:"),
    ):
        if key in bounds:
            draw(axes[0, 1], _LEARNER + name, f"{name} / {key}", style, bounds[key])
    axes[0, 1].axhline(1.0, color="0.6", linewidth=1)
    axes[0, 1].set_title("KL divided by its bound")
    axes[0, 1].set_ylim(0, 3)
    for name, style in (("alpha_mu", "k-"), ("alpha_sigma", "k--"), ("temperature", "k:")):
        draw(axes[1, 0], _LEARNER + name, name, style)
    axes[1, 0].set_yscale("log")
    axes[1, 0].set_title("multipliers")
    draw(axes[1, 1], _LEARNER + "policy_stddev_mean", "policy stddev", "k-")
    axes[1, 1].set_title("policy standard deviation")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    for axis in axes[1]:
        axis.set_xlabel("environment steps")
    figure.suptitle(f"{about.get('algo', '')} {about.get('env', directory.name)}".strip())
    output = output or directory / "curves.png"
    figure.savefig(output, dpi=120)
    plt.close(figure)
    return output


def _bounds(directory: Path) -> dict[str, float]:
    for path in directory.glob("**/params.json"):
        params = json.loads(path.read_text())
        return {k: params[k] for k in ("epsilon", "epsilon_mu", "epsilon_sigma") if k in params}
    return {}
