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
from rerpi_rllib.figures.policy_improvement import Iteration, Problem, run_together

Array = npt.NDArray[np.float64]
Report = Callable[[str], None]
Curves = dict[Problem, list[list[Iteration]]]

_COLORS = {"decoupled": "k", "coupled": "0.55"}
# What the gradient steps of an iteration fit: the same batch, or each another one.
_DATA = {True: "one batch of actions", False: "a new batch each"}
_EPSILONS_PI = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
_NUMBERS_OF_ACTIONS = (10, 40)
# The panels of the landscape, as fractions of the run.
_SHARES = (0.0, 0.15, 0.3, 0.5)


def _run_all(
    problems: Iterable[Problem], seeds: int, iterations: int | None, report: Report
) -> Curves:
    """Run every problem with every seed: together where that is possible, otherwise on all CPUs."""
    groups: list[list[Problem]] = []
    for problem in (replace(p, iterations=iterations or p.iterations) for p in problems):
        for group in groups:
            if group[0].can_be_stacked_with(problem):
                group.append(problem)
                break
        else:
            groups.append([problem])
    with ProcessPoolExecutor(
        min(os.cpu_count() or 1, len(groups)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=torch.set_num_threads,
        initargs=(1,),
    ) as pool:
        runs = [[(problem, seed) for problem in group for seed in range(seeds)] for group in groups]
        curves: Curves = {}
        for together, results in zip(runs, pool.map(run_together, runs)):
            for (problem, _), curve in zip(together, results):
                curves.setdefault(problem, []).append(curve)
            for problem in dict.fromkeys(problem for problem, _ in together):
                last = [(curve[-1].value, curve[-1].stddev) for curve in curves[problem]]
                value, stddev = np.mean(last, axis=0)
                report(
                    f"{problem.description()}: {seeds} runs end with value {value:.3g}, "
                    f"stddev {stddev:.3g}"
                )
    return curves


def _rows(curves: Curves, every: int = 1) -> pd.DataFrame:
    """Return the data of a figure: rows for the iterations of each run, or some of them."""
    rows = []
    for problem, runs in curves.items():
        for seed, curve in enumerate(runs):
            for number in sorted({*range(0, len(curve), every), len(curve) - 1}):
                iteration = curve[number]
                rows.append(
                    {
                        "function": problem.function,
                        "dimensions": problem.dimensions,
                        "fit": problem.fit,
                        "initial_stddev": problem.initial_stddev,
                        "steps_per_iteration": problem.steps_per_iteration,
                        "batches_per_iteration": problem.batches_per_iteration,
                        "num_actions": problem.num_actions,
                        "epsilon_pi": problem.epsilon_pi if problem.fit == "coupled" else None,
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
    start = Problem(
        "sphere",
        2,
        "decoupled",
        0.1,
        initial_mean=1.5,
        iterations=120,
        batches_per_iteration=1,
    )
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
        Problem(function, 10, fit, 0.1, batches_per_iteration=batches)
        for function in ("sphere", "rosenbrock")
        for batches in (1, 20)
        for fit in ("decoupled", "coupled")
    ]
    curves = _run_all(problems, seeds, iterations, report)
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    axes = figure.subplots(2, 2)
    for problem, runs in curves.items():
        value_axis, stddev_axis = axes[:, list(FUNCTIONS).index(problem.function)]
        style = _COLORS[problem.fit], "-" if problem.batches_per_iteration == 1 else ":"
        label = f"{problem.fit}, {_DATA[problem.batches_per_iteration == 1]}"
        _draw_band(value_axis, np.array([[i.value for i in c] for c in runs]), label, *style)
        _draw_band(stddev_axis, np.array([[i.stddev for i in c] for c in runs]), label, *style)
        value_axis.set(title=f"{problem.function}, 10-D: mean value over states", yscale="symlog")
        stddev_axis.set(title="policy standard deviation", xlabel="iteration", ylim=(0, None))
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    axes[1, 0].legend(loc="lower left", fontsize="small")
    return figure, _rows(curves)


def premature_convergence_figure(
    seeds: int, iterations: int | None, report: Report
) -> tuple[Figure, pd.DataFrame]:
    """Draw a map of when the coupled fit converges prematurely on the 10-dimensional sphere."""
    start = Problem("sphere", 10, "coupled", 0.1, iterations=100)
    schedules = ((20, 20), (20, 4), (20, 1), (100, 1))
    problems = [
        replace(
            problem,
            steps_per_iteration=steps,
            batches_per_iteration=batches,
            num_actions=num_actions,
        )
        for steps, batches in schedules
        for num_actions in _NUMBERS_OF_ACTIONS
        for problem in (
            replace(start, fit="decoupled"),
            *(replace(start, epsilon_pi=epsilon) for epsilon in _EPSILONS_PI),
        )
    ]
    curves = _run_all(problems, seeds, iterations, report)
    figure = Figure(figsize=(15, 7), layout="constrained")
    axes = figure.subplots(2, len(schedules), sharex=True, sharey="row")
    for column, (steps, batches) in zip(axes.T, schedules):
        here = {
            problem: runs
            for problem, runs in curves.items()
            if (problem.steps_per_iteration, problem.batches_per_iteration) == (steps, batches)
        }
        for color, num_actions in zip(("C0", "C1"), _NUMBERS_OF_ACTIONS):
            ends = {
                (problem.fit, problem.epsilon_pi): np.array(
                    [(-c[-1].value, c[-1].stddev / c[0].stddev) for c in runs]
                )
                for problem, runs in here.items()
                if problem.num_actions == num_actions
            }
            coupled = np.array([ends["coupled", epsilon] for epsilon in _EPSILONS_PI])
            decoupled = ends["decoupled", start.epsilon_pi].mean(axis=0)
            for number, axis in enumerate(column):
                axis.plot(_EPSILONS_PI, coupled[..., number], ".", color=color, markersize=4)
                axis.plot(
                    _EPSILONS_PI,
                    coupled[..., number].mean(axis=1),
                    color=color,
                    label=f"coupled, {num_actions} actions",
                )
                axis.axhline(
                    decoupled[number],
                    color=color,
                    linestyle="--",
                    label=f"decoupled, {num_actions} actions",
                )
        batch = "batch" if batches == 1 else "batches"
        column[0].set(title=f"{steps} steps on {batches} {batch}", xscale="log", yscale="log")
        column[1].set(xlabel="epsilon_pi of the coupled fit", yscale="log")
    axes[0, 0].set_ylabel("regret at the end")
    axes[1, 0].set_ylabel("stddev at the end / at the start")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    axes[0, 0].legend(fontsize="small")
    start_regret = -np.mean([curve[0].value for runs in curves.values() for curve in runs])
    length = iterations or start.iterations
    figure.suptitle(
        f"10-D sphere after {length} iterations, from a regret of {start_regret:.3g}; above each "
        "panel the gradient steps of an iteration and how many batches of actions they fit"
    )
    return figure, _rows(curves, every=10)
