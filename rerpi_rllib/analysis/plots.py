"""Figures of runs as PNG and SVG, with a CSV file of their data; readable in black and white."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rerpi_rllib.analysis.curves import Run, find_runs
from rerpi_rllib.analysis.groups import aligned, by_task, group_runs, score_matrix, scores
from rerpi_rllib.analysis.statistics import bootstrap_interval, interquartile_mean

# Lines of the constraints of a run, in their order.
_CONSTRAINT_LINES: tuple[dict[str, Any], ...] = (
    {"color": "k"},
    {"color": "0.6"},
    {"color": "0.6", "linewidth": 0.8, "marker": "."},
    {"color": "k", "linestyle": "--"},
    {"color": "0.6", "linestyle": ":"},
)
_COLORS = ("k", "0.45", "0.65", "0.25")
_LINES = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)))
_MARKERS = "os^DvxP*"
_MARKS_PER_LINE = 6
_HATCHES = ("", "//", "..", "xx", "\\\\", "++")


def plot_runs(directories: Sequence[Path], output: Path | None = None) -> Path:
    """Draw runs and return the path of the figure.

    One run is drawn with its return, KLs, multipliers and stddev. Several runs are drawn with their
    returns, a panel for each task and a line with a band over the seeds for each group; if there are
    several tasks, a bar chart is written beside it.
    """
    output = output or directories[0] / "curves.png"
    runs = find_runs(directories)
    if len(runs) == 1:
        figure = run_figure(runs[0])
    else:
        groups, metric = group_runs(runs), best_metric(runs)
        figure = panels_figure(task_panels(groups), metric)
        save_scores(scores(groups, metric), metric, output.with_name(f"{output.stem}-scores.png"))
    save(figure, output)
    write_curves(runs, output.with_suffix(".csv"))
    return output


def save(figure: Figure, output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=120)
    figure.savefig(output.with_suffix(".svg"))


def save_scores(table: pd.DataFrame, metric: str, output: Path) -> None:
    """Draw a bar chart if there are several tasks."""
    if table["task"].nunique() > 1:
        save(bar_figure(table, f"last {metric}"), output)


def write_curves(runs: Sequence[Run], output: Path) -> None:
    tables = [
        run.curves.assign(
            run=run.directory.name,
            task=run.task,
            seed=run.settings.seed if run.settings else None,
        )
        for run in runs
    ]
    pd.concat(tables).to_csv(output, index=False, float_format="%.6g")


def best_metric(runs: Sequence[Run]) -> str:
    """Return the metric to compare runs by: greedy evaluations if every run has them."""
    return "greedy_return" if all("greedy_return" in run.curves for run in runs) else "return"


def run_figure(run: Run) -> Figure:
    """Draw the curves of one run: return, KLs over their bounds, multipliers, width of the policy."""
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True)

    def draw(axis: Axes, column: str, label: str, scale: float = 1.0, **line: Any) -> None:
        if column in run.curves:
            known = run.curves[column].notna()
            steps, values = run.curves["env_steps"][known], run.curves[column][known]
            axis.plot(steps, values / scale, label=label, **line)

    draw(axes[0, 0], "return", "training episodes", color="0.6")
    draw(axes[0, 0], "greedy_return", "greedy evaluation", color="k", marker="o", markersize=3)
    for constraint, line in zip(run.constraints(), itertools.cycle(_CONSTRAINT_LINES)):
        kl, bound = constraint.kl, constraint.epsilon
        draw(axes[0, 1], kl, f"{kl} / {bound:g}", bound, **line)
        draw(axes[1, 0], constraint.multiplier, constraint.multiplier, **line)
    draw(axes[1, 1], "policy_stddev_mean", "standard deviation", color="k")
    draw(axes[1, 1], "policy_entropy", "entropy", color="0.6")
    axes[0, 0].set_title("return")
    axes[0, 1].set_title("KL divided by its bound")
    axes[0, 1].axhline(1.0, color="0.8", linewidth=1)
    axes[0, 1].set_ylim(0, 3)
    axes[1, 0].set_title("multipliers")
    axes[1, 0].set_yscale("log")
    axes[1, 1].set_title("width of the policy")
    _finish(axes.flat)
    name = run.directory.name
    figure.suptitle(f"{run.settings.algo} on {run.settings.env}" if run.settings else name)
    return figure


def speed_figure(run: Run) -> Figure:
    """Draw the environment steps and updates per second over the run."""
    figure = Figure(figsize=(10, 2.6), layout="constrained")
    axis = figure.subplots()
    for column, style, label in (("env_steps", "k-", "env steps/s"), ("updates", "k--", "updates/s")):
        if column in run.curves:
            table = run.curves[["env_steps", "time_s", column]].set_axis([*"xty"], axis=1).diff()
            speed = table["y"] / table["t"].where(table["t"] > 0)
            axis.plot(run.curves["env_steps"], speed, style, label=label, linewidth=0.8)
    axis.set(title="speed", ylim=(0, None))
    _finish([axis])
    return figure


def _finish(axes: Iterable[Axes]) -> None:
    """Add grid, legend and the label of the steps."""
    for axis in axes:
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)
        position = axis.get_subplotspec()
        if position is not None and position.is_last_row():
            axis.set_xlabel("environment steps")


def task_panels(groups: Mapping[str, Sequence[Run]]) -> dict[str, dict[str, list[Run]]]:
    """Split groups of runs by task: a panel for each."""
    tasks = by_task([run for runs in groups.values() for run in runs])
    return {task: {g: by_task(runs).get(task, []) for g, runs in groups.items()} for task in tasks}


def panels_figure(
    panels: Mapping[str, Mapping[str, Sequence[Run]]], metric: str, title: str = ""
) -> Figure:
    """Draw learning curves: a panel for each title, with a line and a band for each group of runs."""
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(max(6.0, 4.2 * columns), 3.4 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, (panel, groups) in zip(axes.flat, panels.items()):
        _draw_groups(axis, groups, metric)
        axis.set(title=panel, xlabel="environment steps")
    axes[0, 0].set_ylabel(metric.replace("_", " "))
    figure.suptitle(title or "mean over seeds, band: one standard deviation", fontsize="medium")
    return figure


def _draw_groups(axis: Axes, groups: Mapping[str, Sequence[Run]], metric: str) -> None:
    """Draw the mean over the runs of each group, with a band of one standard deviation."""
    for number, (label, runs) in enumerate(groups.items()):
        steps, curves = aligned(runs, metric)
        if not len(steps):
            continue
        color = _COLORS[number % len(_COLORS)]
        mean, std = curves.mean(axis=0), curves.std(axis=0)
        every = max(1, len(steps) // _MARKS_PER_LINE)
        axis.plot(
            steps,
            mean,
            color=color,
            linestyle=_LINES[number % len(_LINES)],
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=4,
            markevery=(number % every, every),
            label=f"{label} ({len(curves)})",
        )
        axis.fill_between(steps, mean - std, mean + std, color=color, alpha=0.15, linewidth=0)
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7)


def bar_figure(table: pd.DataFrame, title: str) -> Figure:
    """Draw the last scores over a suite.

    There is a bar for each task and group, with its stddev as a whisker, and on the right the
    interquartile mean of the normalised scores over all tasks, with a 95 % interval.

    Args:
        table: the scores, as :func:`rerpi_rllib.analysis.groups.scores` returns them.
    """
    groups, tasks = list(table["group"].unique()), list(table["task"].unique())
    width = max(9.0, 0.45 * len(tasks) * len(groups) + 4.0)
    figure = Figure(figsize=(width, 4.5), layout="constrained")
    bars, total = figure.subplots(1, 2, width_ratios=(max(3, len(tasks)), 2))
    bar_width = 0.8 / len(groups)
    for number, group in enumerate(groups):
        style: dict[str, Any] = {
            "color": str(0.35 + 0.55 * number / max(1, len(groups) - 1)),
            "edgecolor": "k",
            "hatch": _HATCHES[number % len(_HATCHES)],
            "linewidth": 0.6,
        }
        of_group = table[table["group"] == group]
        by = of_group.groupby("task")["normalised"]
        mean, std = by.mean().reindex(tasks), by.std(ddof=0).reindex(tasks)
        offset = (number - (len(groups) - 1) / 2) * bar_width
        bars.bar(
            np.arange(len(tasks)) + offset, mean, bar_width, yerr=std, capsize=2, label=group, **style
        )
        matrix = score_matrix(table, "normalised", group, tasks)
        if not len(matrix):
            continue
        low, high = bootstrap_interval(interquartile_mean, matrix)
        middle = interquartile_mean(matrix)
        whisker = [[max(0.0, middle - low)], [max(0.0, high - middle)]]
        total.bar(number, middle, 0.8, yerr=whisker, capsize=3, **style)
    bars.set_xticks(range(len(tasks)), tasks, rotation=60 if len(tasks) > 4 else 0, fontsize=8)
    bars.set(ylabel="normalised score", title="each task: mean, stddev over seeds")
    figure.legend(*bars.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    total.set_xticks(range(len(groups)), groups, rotation=30, fontsize=8)
    total.set_title("all: IQM, 95 % interval")
    for axis in (bars, total):
        axis.grid(alpha=0.3, axis="y")
        axis.set_axisbelow(True)
    figure.suptitle(title)
    return figure
