"""The curves at the top of the README: docs/pictures/curves.png, from results/frontier.

python docs/scripts/curves.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import pandas as pd

matplotlib.use("Agg")
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
RESULTS, PICTURE = ROOT / "results" / "frontier", ROOT / "docs" / "pictures" / "curves.png"
# Names in published.csv: a part of them, which the table of results/frontier has in full.
PUBLISHED = {
    "tonic_MPO": ("MPO (tonic)", "o"),
    "sony_sac": ("SAC", "s"),
    "bro_utd2": ("BRO, 2 updates", "^"),
    "simbaV2_utd8": ("SimbaV2, 8 updates", "h"),
}
COLUMNS = 5


def curves() -> Figure:
    published = pd.read_csv(RESULTS / "published.csv")
    tasks = [task for task in published["task"].unique() if list(RESULTS.glob(f"RERPI-{task}-*.csv"))]
    columns = min(COLUMNS, len(tasks))
    rows = -(-len(tasks) // columns)
    figure = Figure(figsize=(2.6 * columns, 2.2 * rows + 0.4), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for axis, task in zip(axes, tasks):
        for path in sorted(RESULTS.glob(f"RERPI-{task}-*.csv")):
            curve = pd.read_csv(path)
            axis.plot(curve["env_steps"] / 1_000, curve["greedy_return"], color="#3949ab", lw=1.8)
        for number, (system, (_, marker)) in enumerate(PUBLISHED.items()):
            points = published[(published["task"] == task) & (published["system"] == system)]
            points = points[points["env_steps"] <= 100_000]
            style = {"color": f"C{number + 1}", "ms": 6, "alpha": 0.85, "clip_on": False}
            axis.plot(points["env_steps"] / 1_000, points["mean_return"], marker, **style)
        axis.set_title(task, fontsize=10)
        axis.set(xlim=(0, 100), ylim=(0, None))
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in list(axes):
        axis.axis("off")
    handles = [matplotlib.lines.Line2D([], [], color="#3949ab", lw=1.8, label="RERPI, compact")]
    for number, (label, marker) in enumerate(PUBLISHED.values()):
        style = {"color": f"C{number + 1}", "linestyle": "", "label": f"{label}, published"}
        handles.append(matplotlib.lines.Line2D([], [], marker=marker, **style))
    figure.supxlabel("thousand environment steps", fontsize=9)
    figure.legend(handles=handles, loc="outside upper center", ncols=5, fontsize=8, frameon=False)
    return figure


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    curves().savefig(PICTURE, dpi=90)
