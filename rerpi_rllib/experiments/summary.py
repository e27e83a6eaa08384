"""What a sweep found: a table, learning curves, and a bar chart if it has several tasks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
    normalised,
    probability_of_improvement,
)
from rerpi_rllib.experiments.sweeps import Sweep

_ALL_TASKS = "all, normalised"
# A search has as many kinds of runs as runs: the best of them are drawn.
_MAX_LINES = 6


@dataclass(frozen=True)
class Summary:
    """A sweep's results: scores of runs, and what they say about each group."""

    directory: Path
    metric: str
    groups: dict[str, list[Run]]
    scores: pd.DataFrame
    table: pd.DataFrame

    @property
    def markdown(self) -> str:
        return to_markdown(self.table)


def load_sweep(directory: Path) -> Summary:
    """Read a sweep's directory, whether it has ended or not."""
    path = directory / Sweep.FILE_NAME
    if not path.is_file():
        raise ValueError(f"{str(directory)!r} is not a sweep's directory: it has no {path.name}.")
    asked = json.loads(path.read_text())
    runs = find_runs([directory])
    groups = group_runs(sorted(runs, key=partial(_place, asked["grid"])))
    found = scores(groups, asked["metric"])
    found["normalised"] = _normalised(groups, found)
    return Summary(directory, asked["metric"], groups, found, _table(found))


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
    if summary.scores["task"].nunique() > 1:
        drawn = plots.bar_figure(summary.scores, f"{directory.name}: last {summary.metric}")
        plots.save(drawn, directory / "scores.png")
    summary.table.to_csv(directory / "table.csv", index=False, float_format="%.6g")
    (directory / "table.md").write_text(summary.markdown + "\n")
    return summary, output


def curves_figure(summary: Summary):
    ranked = summary.scores.groupby("group")["normalised"].mean().sort_values(ascending=False)
    best = set(ranked.index[:_MAX_LINES])
    groups = {label: runs for label, runs in summary.groups.items() if label in best}
    title = f"{summary.directory.name}: mean over seeds, band: one standard deviation"
    return plots.panels_figure(plots.task_panels(groups), summary.metric, title)


def _normalised(groups: Mapping[str, Sequence[Run]], found: pd.DataFrame) -> pd.Series:
    """Shares of the control suite's 1000; elsewhere of the way from the worst run to the best."""
    suite = {
        run.task
        for runs in groups.values()
        for run in runs
        if run.settings and run.settings.env.startswith("dm_control/")
    }
    of_task = found.groupby("task")["score"]
    in_suite = found["task"].isin(suite)
    low = of_task.transform("min").where(~in_suite, 0.0)
    high = of_task.transform("max").where(~in_suite, 1000.0)
    return pd.Series(normalised(found["score"].to_numpy(), low.to_numpy(), high.to_numpy()))


def _table(found: pd.DataFrame) -> pd.DataFrame:
    """A row for each group and task, and for each group over all tasks."""
    first = found["group"].iloc[0]
    rows = []
    tasks = list(found["task"].unique())
    for task in [*tasks, _ALL_TASKS] if len(tasks) > 1 else tasks:
        of_task = found if task == _ALL_TASKS else found[found["task"] == task]
        column = "normalised" if task == _ALL_TASKS else "score"
        reference = plots.score_matrix(of_task[of_task["group"] == first], column)
        for group in of_task["group"].unique():
            matrix = plots.score_matrix(of_task[of_task["group"] == group], column)
            row = {"task": task, "setting": group, "runs": len(matrix)}
            rows.append(row)
            if not len(matrix):
                continue
            low, high = bootstrap_interval(interquartile_mean, matrix)
            row |= {
                "mean": np.mean(matrix),
                "std": np.std(matrix),
                "IQM": interquartile_mean(matrix),
                "IQM low": low,
                "IQM high": high,
            }
            if group != first and len(reference):
                row["P(better than first)"] = probability_of_improvement(matrix, reference)
    return pd.DataFrame(rows)


def to_markdown(table: pd.DataFrame) -> str:
    def cell(value: object) -> str:
        if isinstance(value, float):
            return "" if np.isnan(value) else f"{value:.4g}"
        return str(value)

    lines = ["| " + " | ".join(table.columns) + " |", "|" + "---|" * len(table.columns)]
    lines += ["| " + " | ".join(map(cell, row)) + " |" for row in table.itertuples(index=False)]
    return "\n".join(lines)
