"""Learning curves from what Tune wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd
from ray.tune.utils import flatten_dict

from rerpi_rllib.core.losses import LossSettings
from rerpi_rllib.experiments.settings import RunSettings

_LEARNER = "learners/default_policy/"
# The parts of a policy that may have a bound, and their shades of grey.
_PARTS = {"mu": "k", "sigma": "0.6", "mixture": "0.8", "pi": "k"}
# Names in the CSV file, and where a result has them.
_COLUMNS = {
    "env_steps": "num_env_steps_sampled_lifetime",
    "updates": "num_updates_lifetime",
    "time_s": "time_total_s",
    "return": "env_runners/episode_return_mean",
    "greedy_return": "evaluation/env_runners/episode_return_mean",
    **{
        name: _LEARNER + name
        for name in (
            *(f"kl_{part}{when}" for part in _PARTS for when in ("", "_at_target_update")),
            *(f"alpha_{part}" for part in _PARTS),
            *("kl_nonparametric", "temperature", "q_mean", "policy_stddev_mean"),
            *("policy_entropy", "weights_ess", "critic_loss", "policy_loss"),
        )
    },
}
_STYLES = ("-", "--", ":", "-.")


def load_run(directory: Path) -> pd.DataFrame:
    """A run's curves; the parts of a resumed run one after the other.

    From ``result.json``: a ``progress.csv`` has only the columns of its first row, and an evaluation
    comes later.
    """
    rows = []
    for path in sorted(directory.glob("**/result.json"), key=lambda p: p.stat().st_mtime):
        for line in path.read_text().splitlines():
            result = flatten_dict(json.loads(line))
            rows.append({name: result.get(column) for name, column in _COLUMNS.items()})
    if not rows:
        raise ValueError(f"There is no result.json with results at or below {str(directory)!r}.")
    table = pd.DataFrame(rows).astype(float).dropna(axis="columns", how="all")
    if "greedy_return" in table:
        # After an evaluation RLlib repeats its result once, then gives NaN.
        table["greedy_return"] = table["greedy_return"].where(table["greedy_return"].diff() != 0)
    # A part that was resumed from an older checkpoint repeats some steps: the later part counts.
    later_minimum = table["env_steps"][::-1].cummin()[::-1].shift(-1)
    return table[~(table["env_steps"] >= later_minimum)]


def plot_runs(directories: Sequence[Path], output: Path | None = None) -> Path:
    """Return, KLs against their bounds, multipliers and stddev; a CSV file with them beside.

    Several runs go into one figure, told apart by the style of their lines.
    """
    output = output or directories[0] / "curves.png"
    runs = {directory.resolve().name: load_run(directory) for directory in directories}
    figure, axes = plt.subplots(2, 2, figsize=(10, 6.5), sharex=True, layout="constrained")
    for number, (name, table) in enumerate(runs.items()):
        run = f"{name}: " if len(runs) > 1 else ""
        style = _STYLES[number % len(_STYLES)]

        def draw(axis, column: str, label: str, scale: float = 1.0, **line) -> None:
            if column in table:  # noqa: B023
                known = table[column].notna()  # noqa: B023
                line = {"linestyle": style, "label": run + label, **line}  # noqa: B023
                axis.plot(table["env_steps"][known], table[column][known] / scale, **line)  # noqa: B023

        draw(axes[0, 0], "return", "training episodes", color="0.6")
        draw(axes[0, 0], "greedy_return", "greedy evaluation", color="k", marker="o", markersize=3)
        for part, bound in _bounds(directories[number]).items():
            color = _PARTS[part]
            draw(axes[0, 1], f"kl_{part}", f"kl_{part} / epsilon_{part}", bound, color=color)
            draw(axes[1, 0], f"alpha_{part}", f"alpha_{part}", color=color)
        draw(axes[1, 0], "temperature", "temperature", color="0.6", linewidth=0.8, marker=".")
        draw(axes[1, 1], "policy_stddev_mean", "standard deviation", color="k")
        draw(axes[1, 1], "policy_entropy", "entropy", color="0.6")
    axes[0, 0].set_title("return")
    axes[0, 1].set_title("KL divided by its bound")
    axes[0, 1].axhline(1.0, color="0.8", linewidth=1)
    axes[0, 1].set_ylim(0, 3)
    axes[1, 0].set_title("multipliers")
    axes[1, 0].set_yscale("log")
    axes[1, 1].set_title("width of the policy")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)
    for axis in axes[1]:
        axis.set_xlabel("environment steps")
    figure.suptitle(_title(directories[0]))
    figure.savefig(output, dpi=120)
    plt.close(figure)
    tables = [table.assign(run=name) for name, table in runs.items()]
    pd.concat(tables).to_csv(output.with_suffix(".csv"), index=False, float_format="%.6g")
    return output


def _title(directory: Path) -> str:
    path = directory / RunSettings.FILE_NAME
    if not path.is_file():
        return directory.name
    settings = RunSettings.from_file(path)
    return f"{settings.algo} on {settings.env}"


def _bounds(directory: Path) -> dict[str, float]:
    """The bounds of Step 3 in a run, by the parts of the policy."""
    names = [field.name for field in fields(LossSettings)]
    for path in directory.glob("**/params.json"):
        params = json.loads(path.read_text())
        if set(names) <= set(params):
            return LossSettings(**{name: params[name] for name in names}).epsilons
    return {}
