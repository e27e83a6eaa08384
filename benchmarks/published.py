"""The presets beside published curves: a figure and a table of the runs in results/frontier.

The runs are made by ``learning.py run``. What others have published is in ``published.csv`` there:
mean return by task and environment steps, from the authors' own result files.

python benchmarks/published.py [--results results/frontier]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import learning
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

# Names in the CSV, and how the figure calls them.
SYSTEMS = {
    "tonic_MPO": "MPO (tonic)",
    "sony_sac": "SAC",
    "mrq": "MR.Q",
    "bro_utd2": "BRO, 2 updates",
    "simba_utd2": "SimBa",
    "bro_utd10": "BRO, 10 updates",
    "simbaV2_utd8": "SimbaV2, 8 updates",
}
METHODS = {"RERPI": "RERPI, `compact`", "strong": "RERPI, `strong`", "SB3-SAC": "SAC (SB3)"}
STEPS = (50_000, 100_000)


def read_published(results: Path) -> pd.DataFrame:
    """Return mean returns with a row for each task and number of steps, and a column for a system."""
    published = pd.read_csv(results / "published.csv")
    return published.pivot(index=["task", "env_steps"], columns="system", values="mean_return")


def own_returns(runs: learning.Runs, steps: int) -> dict[str, dict[str, tuple[float, int]]]:
    """Return mean return and number of seeds by method and task, of runs that got so far."""
    found: dict[str, dict[str, tuple[float, int]]] = {}
    for (method, task), by_seed in runs.items():
        curves = [curve for curve in by_seed.values() if curve["env_steps"].iloc[-1] >= steps]
        if curves:
            ends = [np.interp(steps, c["env_steps"], c["greedy_return"]) for c in curves]
            found.setdefault(method, {})[task] = float(np.mean(ends)), len(ends)
    return found


def table(runs: learning.Runs, published: pd.DataFrame, steps: int) -> str:
    """Format the returns at this number of steps; means are over the tasks that a method has."""
    own = {m: r for m, r in own_returns(runs, steps).items() if m in METHODS}
    at = published.xs(steps, level="env_steps").reindex(learning.PUBLISHED_TASKS)
    heads = [METHODS[method] for method in own] + list(SYSTEMS.values())
    lines = [f"| {steps:,} env steps | " + " | ".join(heads) + " |"]
    lines.append("|---" * (1 + len(heads)) + "|")

    def cell(value: float, seeds: int | None = None) -> str:
        return "" if np.isnan(value) else f"{value:.0f}" + (f" ({seeds})" if seeds else "")

    for task in learning.PUBLISHED_TASKS:
        cells = [cell(*returns.get(task, (np.nan,))) for returns in own.values()]
        cells += [cell(at.loc[task, system]) for system in SYSTEMS]
        lines.append(f"| {task} | " + " | ".join(cells) + " |")
    groups = {
        f"mean of all {len(at)}": list(at.index),
        f"mean of the {len(at) - len(learning.CHOSEN_ON)} that had no part in choosing": [
            task for task in at.index if task not in learning.CHOSEN_ON
        ],
    }
    for name, tasks in groups.items():
        cells = []
        for returns in own.values():
            known = [returns[task][0] for task in tasks if task in returns]
            missing = "" if len(known) == len(tasks) else f", {len(known)} tasks"
            cells.append(f"{np.mean(known):.0f}{missing}" if known else "")
        # The mean of a system that published only some of the tasks would not compare.
        cells += [cell(at.loc[tasks, system].mean(skipna=False)) for system in SYSTEMS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def figure(runs: learning.Runs, published: pd.DataFrame, path: Path) -> None:
    """Draw the curves of each task, a line for a seed, and the published means."""
    drawing, axes = plt.subplots(3, 5, figsize=(17, 10), layout="constrained")
    colours = {"RERPI": "k", "strong": "C3", "SB3-SAC": "0.6"}
    for axis, task in zip(axes.flat, learning.PUBLISHED_TASKS):
        for index, system in enumerate(SYSTEMS):
            if task in published.index.get_level_values("task"):
                points = published.loc[task, system].dropna()
                points = points[points.index <= max(STEPS)]
                marker = "osv^Dph"[index]
                axis.plot(points.index / 1_000, points, marker, color=f"C{index}", ms=5, alpha=0.8)
        for method, colour in colours.items():
            for curve in runs.get((method, task), {}).values():
                axis.plot(curve["env_steps"] / 1_000, curve["greedy_return"], color=colour, lw=1.2)
        starred = "" if task in learning.CHOSEN_ON else " *"
        axis.set(title=task + starred, xlabel="thousand environment steps", xlim=(0, 105))
        axis.set_ylim(0, None)
    rest = axes.flat[-1]
    for method, colour in colours.items():
        rest.plot([], [], color=colour, label=METHODS[method].replace("`", ""))
    for index, name in enumerate(SYSTEMS.values()):
        rest.plot([], [], "osv^Dph"[index], color=f"C{index}", label=f"{name}, published")
    rest.legend(frameon=False, loc="center")
    rest.set_title("* had no part in choosing the settings", fontsize=10)
    rest.axis("off")
    drawing.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=Path("results/frontier"))
    results = parser.parse_args().results
    runs, published = learning.read_runs(results), read_published(results)
    text = "\n".join(table(runs, published, steps) for steps in STEPS)
    (results / "table.md").write_text(text)
    print(text)
    figure(runs, published, results / "learning.png")


if __name__ == "__main__":
    main()
