"""Figures of policy improvement on functions with a known optimum (the paper's 1, 2 and 8)."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse

from rerpi_rllib.figures.known_functions import FUNCTIONS
from rerpi_rllib.figures.policy_improvement import Iteration, Problem, run

Array = npt.NDArray[np.float64]
Report = Callable[[str], None]
Curves = dict[Problem, list[list[Iteration]]]

_COLORS = {"decoupled": "k", "coupled": "0.55"}
# The panels of the landscape, as fractions of the run.
_SHARES = (0.0, 0.15, 0.3, 0.5)


def _run_all(
    problems: Iterable[Problem], seeds: int, iterations: int | None, report: Report
) -> Curves:
    """Run every problem with every seed, as many at a time as there are CPUs."""
    problems = [replace(p, iterations=iterations or p.iterations) for p in problems]
    with ProcessPoolExecutor(
        min(os.cpu_count() or 1, len(problems) * seeds),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=torch.set_num_threads,
        initargs=(1,),
    ) as pool:
        futures = {p: [pool.submit(run, p, seed) for seed in range(seeds)] for p in problems}
        curves = {}
        for problem, runs in futures.items():
            curves[problem] = [future.result() for future in runs]
            value, stddev = np.mean(
                [(curve[-1].value, curve[-1].stddev) for curve in curves[problem]], axis=0
            )
            report(
                f"{problem.function} {problem.dimensions}-D, {problem.fit}, initial stddev "
                f"{problem.initial_stddev}: {len(runs)} runs end with value {value:.3g}, "
                f"stddev {stddev:.3g}"
            )
    return curves


def _rows(curves: Curves) -> pd.DataFrame:
    """Return the data of a figure: a row for each iteration of each run."""
    rows = []
    for problem, runs in curves.items():
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
    table: pd.DataFrame = pd.DataFrame(rows)
    return table


def _draw_band(axis: Axes, curves: Array, label: str, color: str, style: str = "-") -> None:
    """Draw the mean over the first dimension, with a band of one standard deviation."""
    mean, std = curves.mean(axis=0), curves.std(axis=0)
    steps = np.arange(len(mean))
    axis.plot(steps, mean, style, color=color, label=label)
    axis.fill_between(steps, mean - std, mean + std, color=color, alpha=0.25, linewidth=0)


def landscape_figure(
    seeds: int, iterations: int | None, report: Report
) -> tuple[Figure, pd.DataFrame]:
    """Draw figures 1 and 8: how the policy at state zero moves on a quadratic function."""
    start = Problem("sphere", 2, "decoupled", 0.1, initial_mean=1.5, iterations=120)
    problems = [
        start,
        replace(start, fit="coupled"),
        replace(start, fit="coupled", initial_stddev=0.3),
    ]
    curves = _run_all(problems, seeds, iterations, report)
    figure = Figure(figsize=(13, 7.5), layout="constrained")
    axes = figure.subplots(len(curves), len(_SHARES) + 1)
    grid = torch.linspace(-1.0, 2.5, 100)
    actions = torch.stack(torch.meshgrid(grid, grid, indexing="xy"), dim=-1)
    values = FUNCTIONS["sphere"](torch.zeros(2), actions)
    for row, (problem, runs) in zip(axes, curves.items()):
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
        _draw_band(row[-1], stddevs, "", "k")
        row[-1].set(title="stddev at state 0", ylim=(0, None))
        row[-1].grid(alpha=0.3)
    axes[-1, -1].set_xlabel("iteration")
    figure.suptitle("2-D quadratic: the policy of state [0, 0] (one stddev), each seed an ellipse")
    return figure, _rows(curves)


def standard_functions_figure(
    seeds: int, iterations: int | None, report: Report
) -> tuple[Figure, pd.DataFrame]:
    """Draw figure 2: value and stddev on the 10-dimensional sphere and Rosenbrock functions."""
    problems = [
        Problem(function, 10, fit, 0.1, iterations=length)
        for function, length in (("sphere", 200), ("rosenbrock", 300))
        for fit in ("decoupled", "coupled")
    ]
    curves = _run_all(problems, seeds, iterations, report)
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    axes = figure.subplots(2, 2)
    for problem, runs in curves.items():
        value_axis, stddev_axis = axes[:, list(FUNCTIONS).index(problem.function)]
        color = _COLORS[problem.fit]
        _draw_band(value_axis, np.array([[i.value for i in c] for c in runs]), problem.fit, color)
        _draw_band(stddev_axis, np.array([[i.stddev for i in c] for c in runs]), problem.fit, color)
        value_axis.set(title=f"{problem.function}, 10-D: mean value over states", yscale="symlog")
        stddev_axis.set(title="policy standard deviation", xlabel="iteration")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.legend()
    return figure, _rows(curves)
