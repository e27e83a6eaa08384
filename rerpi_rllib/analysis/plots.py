"""Figures of runs: PNG and SVG, and a CSV file with what they show; readable in black and white."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from rerpi_rllib.experiments.runs import Run, aligned, by_task, find_runs, group_runs, scores
from rerpi_rllib.experiments.statistics import bootstrap_interval, interquartile_mean

_PART_COLORS = {"mu": "k", "sigma": "0.6", "mixture": "0.8", "pi": "k"}
_COLORS = ("k", "0.45", "0.65", "0.25")
_LINES = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)))
_MARKERS = "os^DvxP*"
_MARKS_PER_LINE = 6
_HATCHES = ("", "//", "..", "xx", "\\\\", "++")


def plot_runs(directories: Sequence[Path], output: Path | None = None) -> Path:
    """One run: return, KLs against their bounds, multipliers and stddev. Several: their returns,
    one panel for each task and one line for each kind of run, with a band over its seeds; and with
    several tasks a bar chart in a file of its own.
    """
    output = output or directories[0] / "curves.png"
    runs = find_runs(directories)
    if len(runs) == 1:
        drawn = run_figure(runs[0])
    else:
        groups, metric = group_runs(runs), best_metric(runs)
        drawn = panels_figure(task_panels(groups), metric)
        save_scores(scores(groups, metric), metric, output.with_name(f"{output.stem}-scores.png"))
    save(drawn, output)
    write_curves(runs, output.with_suffix(".csv"))
    return output


def save(drawn: plt.Figure, output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(output, dpi=120)
    drawn.savefig(output.with_suffix(".svg"))
    plt.close(drawn)


def save_scores(table: pd.DataFrame, metric: str, output: Path) -> None:
    """A bar chart, if there are several tasks."""
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
    """Greedy evaluations if every run has them."""
    return "greedy_return" if all("greedy_return" in run.curves for run in runs) else "return"


def run_figure(run: Run) -> plt.Figure:
    """What to look at in one run."""
    figure, axes = plt.subplots(2, 2, figsize=(10, 6.5), sharex=True, layout="constrained")

    def draw(axis: Axes, column: str, label: str, scale: float = 1.0, **line) -> None:
        if column in run.curves:
            known = run.curves[column].notna()
            steps, values = run.curves["env_steps"][known], run.curves[column][known]
            axis.plot(steps, values / scale, label=label, **line)

    draw(axes[0, 0], "return", "training episodes", color="0.6")
    draw(axes[0, 0], "greedy_return", "greedy evaluation", color="k", marker="o", markersize=3)
    for part, bound in run.bounds().items():
        color = _PART_COLORS[part]
        draw(axes[0, 1], f"kl_{part}", f"kl_{part} / {bound:g}", bound, color=color)
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
    _finish(axes.flat)
    name = run.directory.name
    figure.suptitle(f"{run.settings.algo} on {run.settings.env}" if run.settings else name)
    return figure


def speed_figure(run: Run) -> plt.Figure:
    """Steps and updates a second, over the run."""
    figure, axis = plt.subplots(figsize=(10, 2.6), layout="constrained")
    for column, style, label in (("env_steps", "k-", "env steps/s"), ("updates", "k--", "updates/s")):
        if column in run.curves:
            table = run.curves[["env_steps", "time_s", column]].set_axis([*"xty"], axis=1).diff()
            speed = table["y"] / table["t"].where(table["t"] > 0)
            axis.plot(run.curves["env_steps"], speed, style, label=label, linewidth=0.8)
    axis.set(title="speed", ylim=(0, None))
    _finish([axis])
    return figure


def _finish(axes) -> None:
    for axis in axes:
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)
        if axis.get_subplotspec().is_last_row():
            axis.set_xlabel("environment steps")


def task_panels(groups: Mapping[str, Sequence[Run]]) -> dict[str, dict[str, list[Run]]]:
    """Groups of runs, for each task."""
    tasks = by_task([run for runs in groups.values() for run in runs])
    return {task: {g: by_task(runs).get(task, []) for g, runs in groups.items()} for task in tasks}


def panels_figure(
    panels: Mapping[str, Mapping[str, Sequence[Run]]], metric: str, title: str = ""
) -> plt.Figure:
    """Learning curves: panels of groups of runs by their titles, a line and a band for each group."""
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(max(6.0, 4.2 * columns), 3.4 * rows),
        squeeze=False,
        layout="constrained",
    )
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, (panel, groups) in zip(axes.flat, panels.items()):
        _draw_groups(axis, groups, metric)
        axis.set(title=panel, xlabel="environment steps")
    axes[0, 0].set_ylabel(metric.replace("_", " "))
    figure.suptitle(title or "mean over seeds, band: one standard deviation", fontsize="medium")
    return figure


def _draw_groups(axis: Axes, groups: Mapping[str, Sequence[Run]], metric: str) -> None:
    """Mean over the runs of each group, and a band of one standard deviation."""
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


def bar_figure(table: pd.DataFrame, title: str) -> plt.Figure:
    """Last scores over a suite: a bar for each task and group, its stddev as a whisker; on the right
    the interquartile mean over all tasks of the normalised scores, with a 95 % interval.

    Args:
        table: of :func:`rerpi_rllib.experiments.runs.scores`.
    """
    groups, tasks = list(table["group"].unique()), list(table["task"].unique())
    figure, (bars, total) = plt.subplots(
        1,
        2,
        figsize=(max(9.0, 0.45 * len(tasks) * len(groups) + 4.0), 4.5),
        width_ratios=(max(3, len(tasks)), 2),
        layout="constrained",
    )
    width = 0.8 / len(groups)
    for number, group in enumerate(groups):
        look = {
            "color": str(0.35 + 0.55 * number / max(1, len(groups) - 1)),
            "edgecolor": "k",
            "hatch": _HATCHES[number % len(_HATCHES)],
            "linewidth": 0.6,
        }
        of_group = table[table["group"] == group]
        by = of_group.groupby("task")["normalised"]
        mean, std = by.mean().reindex(tasks), by.std(ddof=0).reindex(tasks)
        offset = (number - (len(groups) - 1) / 2) * width
        bars.bar(
            np.arange(len(tasks)) + offset, mean, width, yerr=std, capsize=2, label=group, **look
        )
        matrix = score_matrix(table, "normalised", group, tasks)
        if not len(matrix):
            continue
        low, high = bootstrap_interval(interquartile_mean, matrix)
        middle = interquartile_mean(matrix)
        whisker = [[max(0.0, middle - low)], [max(0.0, high - middle)]]
        total.bar(number, middle, 0.8, yerr=whisker, capsize=3, **look)
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


def score_matrix(table: pd.DataFrame, column: str, group: str, tasks: Sequence[str]) -> np.ndarray:
    """A group's [runs, tasks]: as many runs as it has of every task, none if it lacks a task."""
    of_group = table[table["group"] == group]
    values = [of_group[of_group["task"] == task][column].dropna().to_numpy() for task in tasks]
    runs = min(map(len, values))
    return np.stack([of_task[:runs] for of_task in values], axis=1)
