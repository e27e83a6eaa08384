"""The results of a sweep: a table, learning curves, and a bar chart if it has several tasks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rerpi_rllib.analysis import plots
from rerpi_rllib.analysis.curves import Run, find_runs
from rerpi_rllib.analysis.groups import group_runs, score_matrix, scores
from rerpi_rllib.analysis.statistics import (
    bootstrap_interval,
    interquartile_mean,
    probability_of_improvement,
)
from rerpi_rllib.sweeps.sweep import Sweep

_ALL_TASKS = "all, normalised"
# In a search every run is a group of its own; the best of them are drawn.
_MAX_LINES = 6


@dataclass(frozen=True)
class Summary:
    """A sweep's results: the scores of its complete runs, and a table of statistics of each group."""

    directory: Path
    metric: str
    groups: dict[str, list[Run]]
    left_out: list[str]
    scores: pd.DataFrame
    table: pd.DataFrame

    @property
    def markdown(self) -> str:
        text = to_markdown(self.table)
        if self.left_out:
            text += f"\n\nNot complete and left out: {', '.join(self.left_out)}."
        return text


def load_sweep(directory: Path) -> Summary:
    """Summarise a sweep's directory, whether the sweep has ended or not."""
    path = directory / Sweep.FILE_NAME
    if not path.is_file():
        raise ValueError(f"{str(directory)!r} is not a sweep's directory: it has no {path.name}.")
    sweep = json.loads(path.read_text())
    runs = find_runs([directory])
    left_out = []
    if not sweep["scheduler"]:  # A scheduler ends runs early on purpose.
        left_out = [run.directory.name for run in runs if not run.is_complete]
        runs = [run for run in runs if run.is_complete]
    if not runs:
        raise ValueError(f"No run of the sweep in {str(directory)!r} is complete yet.")
    groups = group_runs(sorted(runs, key=partial(_position, sweep["grid"], sweep.get("also", []))))
    metric = sweep["metric"]
    table = scores(groups, metric)
    return Summary(directory, metric, groups, left_out, table, _table(table))


def _position(
    grid: Mapping[str, list[Any]], also: Sequence[Mapping[str, Any]], run: Run
) -> list[int]:
    """Return the position of the run's values in the grid, and then in the further variants ``also``.

    What is not in the grid comes last: further variants, and values of a search or of PBT.
    """
    settings = run.settings.flat() if run.settings else {}
    in_grid = [
        values.index(settings[key]) if settings.get(key) in values else len(values)
        for key, values in grid.items()
    ]
    return [*in_grid, *(variant.items() <= settings.items() for variant in reversed(also))]


def summarise(directory: Path) -> tuple[Summary, Path]:
    """Write the figure (PNG, SVG), the curves behind it and the table (CSV, Markdown)."""
    summary = load_sweep(directory)
    output = directory / "curves.png"
    plots.save(curves_figure(summary), output)
    runs = [run for runs in summary.groups.values() for run in runs]
    plots.write_curves(runs, output.with_suffix(".csv"))
    plots.save_scores(summary.scores, summary.metric, directory / "scores.png")
    summary.table.to_csv(directory / "table.csv", index=False, float_format="%.6g")
    (directory / "table.md").write_text(summary.markdown + "\n")
    return summary, output


def curves_figure(summary: Summary) -> Figure:
    """Draw the learning curves of a sweep's best groups."""
    ranked = summary.scores.groupby("group")["normalised"].mean().sort_values(ascending=False)
    best = set(ranked.index[:_MAX_LINES])
    groups = {label: runs for label, runs in summary.groups.items() if label in best}
    title = f"{summary.directory.name}: mean over seeds, band: one standard deviation"
    return plots.panels_figure(plots.task_panels(groups), summary.metric, title)


def _table(scores: pd.DataFrame) -> pd.DataFrame:
    """Compute the statistics of each group on each task, and of each group over all tasks."""
    first = scores["group"].iloc[0]
    tasks = list(scores["task"].unique())
    rows = []
    selections = [(task, [task]) for task in tasks]
    if len(tasks) > 1:
        selections.append((_ALL_TASKS, tasks))
    for name, selected in selections:
        column = "normalised" if name == _ALL_TASKS else "score"
        reference = score_matrix(scores, column, first, selected)
        for group in scores["group"].unique():
            matrix = score_matrix(scores, column, group, selected)
            if not len(matrix):
                continue
            low, high = bootstrap_interval(interquartile_mean, matrix)
            row = {
                "task": name,
                "setting": group,
                "runs": len(matrix),
                "mean": np.mean(matrix),
                "std": np.std(matrix),
                "IQM": interquartile_mean(matrix),
                "IQM low": low,
                "IQM high": high,
            }
            if group != first and len(reference):
                both = matrix, reference
                low, high = bootstrap_interval(probability_of_improvement, *both)
                row |= {
                    f"P(better than {first})": probability_of_improvement(*both),
                    "P low": low,
                    "P high": high,
                }
            rows.append(row)
    table: pd.DataFrame = pd.DataFrame(rows)
    return table


def to_markdown(table: pd.DataFrame) -> str:
    """Format a table in Markdown."""

    def cell(value: object) -> str:
        if isinstance(value, float):
            return "" if np.isnan(value) else f"{value:.4g}"
        return str(value)

    lines = ["| " + " | ".join(table.columns) + " |", "|" + "---|" * len(table.columns)]
    lines += ["| " + " | ".join(map(cell, row)) + " |" for row in table.itertuples(index=False)]
    return "\n".join(lines)
