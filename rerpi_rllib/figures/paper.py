"""The paper's figures, each from real runs: a PNG file, and a CSV file with what it shows."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.patches import Ellipse

from rerpi_rllib.envs.standard_functions import FUNCTIONS
from rerpi_rllib.experiments import plots
from rerpi_rllib.experiments.standard_functions import Iteration, Problem, run
from rerpi_rllib.experiments.summary import summarise
from rerpi_rllib.experiments.sweeps import Sweep, load, run_sweep
from rerpi_rllib.experiments.training import RunFailed

Report = Callable[[str], None]

_COLORS = {"decoupled": "k", "coupled": "0.55"}
# Panels of the landscape: the start, and after so many shares of the run.
_SHARES = (0.0, 0.15, 0.3, 0.5)


def figure(
    name: str,
    directory: Path,
    *,
    seeds: int | None = None,
    iterations: int | None = None,
    smoke: bool = False,
    storage_path: Path = Path("runs"),
    report: Report = print,
) -> Path:
    """Run what the figure shows and draw it.

    Args:
        directory: where the PNG, SVG and CSV files go.
        seeds: runs of each kind; by default 5, or what the sweep says.
        iterations: shortens the runs on known functions.
        smoke: shortens the sweeps.
        storage_path: where the sweeps are, or go; one that is there is completed as it was begun.
    """
    if name not in FIGURES:
        raise ValueError(f"Unknown figure {name!r}. Allowed: {', '.join(FIGURES)}.")
    for option, value in (("--seeds", seeds), ("--iterations", iterations)):
        if value is not None and value < 1:
            raise ValueError(f"{option} {value} is not allowed: it must be at least 1.")
    output = directory / f"{name}.png"
    make = FIGURES[name]
    if callable(make):
        drawn, table = make(seeds or 5, iterations, report)
        plots.save(drawn, output)
    elif iterations is not None:
        raise ValueError(f"--iterations is not for {name}, which is made of sweeps: see --smoke.")
    else:
        table = _sweeps(make, output, seeds, smoke, storage_path, report)
    table.to_csv(output.with_suffix(".csv"), index=False, float_format="%.5g")
    return output


def _sweeps(
    names: Sequence[str],
    output: Path,
    seeds: int | None,
    smoke: bool,
    storage_path: Path,
    report: Report,
) -> pd.DataFrame:
    """Run or complete sweeps: a panel for each of them and its tasks, bars if there are several."""
    summaries = []
    failed: dict[str, str] = {}
    for name in names:
        directory = (storage_path / (f"{name}-smoke" if smoke else name)).expanduser().resolve()
        if (directory / Sweep.FILE_NAME).is_file():
            sweep = Sweep.from_directory(directory)
        else:
            sweep, _ = load(name, seeds=seeds, smoke=smoke)
        command = f"rllib sweep {name} --storage-path {storage_path} --seeds {sweep.seeds}"
        failed |= run_sweep(sweep, directory, command=command + (" --smoke" if smoke else ""))
        report(f"{name}: {directory}")
        summaries.append(summarise(directory)[0])
    panels = {
        f"{summary.directory.name}: {task}": groups
        for summary in summaries
        for task, groups in plots.task_panels(summary.groups).items()
    }
    plots.save(plots.panels_figure(panels, summaries[0].metric), output)
    for summary in summaries:
        scores = output.with_name(f"{output.stem}-scores.png")
        plots.save_scores(summary.scores, summary.metric, scores)
    if failed:
        raise RunFailed(f"{output} is without the trials that failed: {', '.join(failed)}.")
    return pd.concat([s.scores.assign(sweep=s.directory.name) for s in summaries])


def _run_all(
    problems: Iterable[Problem], seeds: int, iterations: int | None, report: Report
) -> dict[Problem, list[list[Iteration]]]:
    """Every problem with every seed, as many at a time as there are CPUs."""
    problems = [replace(p, iterations=iterations or p.iterations) for p in problems]
    with ProcessPoolExecutor(
        min(os.cpu_count() or 1, len(problems) * seeds),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=torch.set_num_threads,
        initargs=(1,),
    ) as pool:
        started = {p: [pool.submit(run, p, seed) for seed in range(seeds)] for p in problems}
        found = {}
        for problem, runs in started.items():
            found[problem] = [future.result() for future in runs]
            value, stddev = np.mean(
                [(curve[-1].value, curve[-1].stddev) for curve in found[problem]], axis=0
            )
            report(
                f"{problem.function} {problem.dimensions}-D, {problem.fit}, initial stddev "
                f"{problem.initial_stddev}: {len(runs)} runs end with value {value:.3g}, "
                f"stddev {stddev:.3g}"
            )
    return found


def _rows(found: dict[Problem, list[list[Iteration]]]) -> pd.DataFrame:
    rows = []
    for problem, runs in found.items():
        for seed, curve in enumerate(runs):
            for number, iteration in enumerate(curve):
                rows.append(
                    {
                        "function": problem.function,
                        "dimensions": problem.dimensions,
                        "fit": problem.fit,
                        "initial_stddev": problem.initial_stddev,
                        "seed": seed,
                        "iteration": number,
                        "value": iteration.value,
                        "stddev": iteration.stddev,
                        "mean_at_zero_1": float(iteration.mean_at_zero[0]),
                        "mean_at_zero_2": float(iteration.mean_at_zero[1]),
                        "stddev_at_zero_1": float(iteration.stddev_at_zero[0]),
                        "stddev_at_zero_2": float(iteration.stddev_at_zero[1]),
                    }
                )
    return pd.DataFrame(rows)


def _band(axis: Axes, curves: np.ndarray, label: str, color: str, style: str = "-") -> None:
    """Mean over the first dimension, and a band of one standard deviation."""
    mean, std = curves.mean(axis=0), curves.std(axis=0)
    steps = np.arange(len(mean))
    axis.plot(steps, mean, style, color=color, label=label)
    axis.fill_between(steps, mean - std, mean + std, color=color, alpha=0.25, linewidth=0)


def _landscape(seeds: int, iterations: int | None, report: Report) -> tuple[plt.Figure, pd.DataFrame]:
    """Figures 1 and 8: where the policy of state zero goes, on a quadratic function."""
    start = Problem("sphere", 2, "decoupled", 0.1, initial_mean=1.5, iterations=120)
    problems = [
        start,
        replace(start, fit="coupled"),
        replace(start, fit="coupled", initial_stddev=0.3),
    ]
    found = _run_all(problems, seeds, iterations, report)
    drawn, axes = plt.subplots(len(found), len(_SHARES) + 1, figsize=(13, 7.5), layout="constrained")
    grid = torch.linspace(-1.0, 2.5, 100)
    actions = torch.stack(torch.meshgrid(grid, grid, indexing="xy"), dim=-1)
    values = FUNCTIONS["sphere"](torch.zeros(2), actions)
    for row, (problem, runs) in zip(axes, found.items()):
        row[0].set_ylabel(f"{problem.fit}\ninitial stddev {problem.initial_stddev}")
        for axis, share in zip(row, _SHARES):
            number = round(share * problem.iterations)
            axis.contour(grid, grid, values, levels=12, colors="0.8", linewidths=0.7)
            axis.plot(0, 0, "x", color="0.4", markersize=6)
            for curve in runs:
                mean, stddev = curve[number].mean_at_zero, curve[number].stddev_at_zero
                axis.add_patch(
                    Ellipse(
                        (float(mean[0]), float(mean[1])),
                        *(2.0 * stddev).tolist(),
                        fill=False,
                        color="k",
                        linewidth=0.8,
                    )
                )
            axis.set(aspect="equal", xticks=[], yticks=[], title=f"iteration {number}")
        stddevs = np.array([[float(i.stddev_at_zero.mean()) for i in curve] for curve in runs])
        _band(row[-1], stddevs, "", "k")
        row[-1].set(title="stddev at state 0", ylim=(0, None))
        row[-1].grid(alpha=0.3)
    axes[-1, -1].set_xlabel("iteration")
    drawn.suptitle("2-D quadratic: the policy of state [0, 0] (one stddev), each seed an ellipse")
    return drawn, _rows(found)


def _standard_functions(
    seeds: int, iterations: int | None, report: Report
) -> tuple[plt.Figure, pd.DataFrame]:
    """Figure 2: value and stddev on the 10-dimensional sphere and Rosenbrock functions."""
    problems = [
        Problem(function, 10, fit, 0.1, iterations=length)
        for function, length in (("sphere", 200), ("rosenbrock", 300))
        for fit in ("decoupled", "coupled")
    ]
    found = _run_all(problems, seeds, iterations, report)
    drawn, axes = plt.subplots(2, 2, figsize=(10, 6.5), layout="constrained")
    for problem, runs in found.items():
        value_axis, stddev_axis = axes[:, list(FUNCTIONS).index(problem.function)]
        color = _COLORS[problem.fit]
        _band(value_axis, np.array([[i.value for i in c] for c in runs]), problem.fit, color)
        _band(stddev_axis, np.array([[i.stddev for i in c] for c in runs]), problem.fit, color)
        value_axis.set(title=f"{problem.function}, 10-D: mean value over states", yscale="symlog")
        stddev_axis.set(title="policy standard deviation", xlabel="iteration")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.legend()
    return drawn, _rows(found)


# What makes each: a function, or sweeps.
FIGURES: dict[
    str, Callable[[int, int | None, Report], tuple[plt.Figure, pd.DataFrame]] | tuple[str, ...]
] = {
    "landscape": _landscape,
    "standard-functions": _standard_functions,
    "ablations": ("no_kl_bound", "epsilon_mu", "epsilon_sigma"),
    "control-suite": ("baselines",),
    "weighting": ("weighting",),
}
