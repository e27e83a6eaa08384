"""What a sweep found: a table, learning curves, and a bar chart if it has several tasks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from rerpi_rllib.experiments import plots
from rerpi_rllib.experiments.runs import Run, find_runs, group_runs, scores
from rerpi_rllib.experiments.statistics import (
    bootstrap_interval,
    interquartile_mean,
    probability_of_improvement,
)
from rerpi_rllib.experiments.sweeps import Sweep

_ALL_TASKS = "all, normalised"
# A search has as many kinds of runs as runs: the best of them are drawn.
_MAX_LINES = 6


@dataclass(frozen=True)
class Summary:
    """A sweep's results: scores of its complete runs, and what they say about each group."""

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
    """Read a sweep's directory, whether it has ended or not."""
    path = directory / Sweep.FILE_NAME
    if not path.is_file():
        raise ValueError(f"{str(directory)!r} is not a sweep's directory: it has no {path.name}.")
    asked = json.loads(path.read_text())
    runs = find_runs([directory])
    left_out = []
    if not asked["scheduler"]:  # Which ends runs early on purpose.
        left_out = [run.directory.name for run in runs if not run.is_complete]
        runs = [run for run in runs if run.is_complete]
    if not runs:
        raise ValueError(f"No run of the sweep in {str(directory)!r} is complete yet.")
    groups = group_runs(sorted(runs, key=partial(_place, asked["grid"])))
    found = scores(groups, asked["metric"])
    return Summary(directory, asked["metric"], groups, left_out, found, _table(found))


def _place(grid: Mapping[str, list], run: Run) -> list[int]:
    """Where the run's values are in the grid; what a search or PBT found comes last."""
    asked = run.settings.flat() if run.settings else {}
    return [
        values.index(asked[key]) if asked.get(key) in values else len(values)
        for key, values in grid.items()
    ]


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


def curves_figure(summary: Summary):
    ranked = summary.scores.groupby("group")["normalised"].mean().sort_values(ascending=False)
    best = set(ranked.index[:_MAX_LINES])
    groups = {label: runs for label, runs in summary.groups.items() if label in best}
    title = f"{summary.directory.name}: mean over seeds, band: one standard deviation"
    return plots.panels_figure(plots.task_panels(groups), summary.metric, title)


def _table(found: pd.DataFrame) -> pd.DataFrame:
    """A row for each group and task, and for each group over all tasks."""
    first = found["group"].iloc[0]
    tasks = list(found["task"].unique())
    rows = []
    for name, of in [*((t, [t]) for t in tasks), *([(_ALL_TASKS, tasks)] if len(tasks) > 1 else [])]:
        column = "normalised" if name == _ALL_TASKS else "score"
        reference = plots.score_matrix(found, column, first, of)
        for group in found["group"].unique():
            matrix = plots.score_matrix(found, column, group, of)
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
    return pd.DataFrame(rows)


def to_markdown(table: pd.DataFrame) -> str:
    def cell(value: object) -> str:
        if isinstance(value, float):
            return "" if np.isnan(value) else f"{value:.4g}"
        return str(value)

    lines = ["| " + " | ".join(table.columns) + " |", "|" + "---|" * len(table.columns)]
    lines += ["| " + " | ".join(map(cell, row)) + " |" for row in table.itertuples(index=False)]
    return "\n".join(lines)
