"""The paper's figures, each made from runs: a PNG and an SVG file, and a CSV file with the data."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from rerpi_rllib.analysis import plots
from rerpi_rllib.analysis.groups import scores as group_scores
from rerpi_rllib.analysis.summary import summarise
from rerpi_rllib.figures.improvement_plots import (
    landscape_figure,
    premature_convergence_figure,
    standard_functions_figure,
)
from rerpi_rllib.figures.sac import SAC, check_sac, run_sac
from rerpi_rllib.runs.errors import RunFailed
from rerpi_rllib.sweeps.running import run_sweep, sweep_directory
from rerpi_rllib.sweeps.sweep import Sweep, load

Report = Callable[[str], None]


def figure(
    name: str,
    directory: Path,
    *,
    seeds: int | None = None,
    iterations: int | None = None,
    smoke: bool = False,
    env: Sequence[str] | None = None,
    storage_path: Path = Path("runs"),
    report: Report = print,
) -> Path:
    """Make the runs that a figure shows, draw it, and return its path.

    Args:
        name: one of ``FIGURES``.
        directory: where the PNG, SVG and CSV files go.
        seeds: the number of runs of each kind; by default 5, or as many as the sweep's file says.
        iterations: the length of the runs on known functions.
        smoke: whether to shorten the sweeps.
        env: the tasks; by default those of the sweeps.
        storage_path: where the sweeps are. One that has begun is completed with its own settings.
        report: called with what has been done so far.
    """
    if name not in FIGURES:
        raise ValueError(f"Unknown figure {name!r}. Allowed: {', '.join(FIGURES)}.")
    for option, value, limit in (("--seeds", seeds, 1000), ("--iterations", iterations, 1_000_000)):
        if value is not None and not 1 <= value <= limit:
            raise ValueError(f"{option} {value} is not allowed: it must be from 1 to {limit:,}.")
    make = FIGURES[name]
    if env and callable(make):
        raise ValueError(f"--env is not for {name}, which is made of runs on known functions.")
    if name in _BESIDE_SAC:
        check_sac()
    if iterations is not None and not callable(make):
        raise ValueError(f"--iterations is not for {name}, which is made of sweeps: see --smoke.")
    directory.mkdir(parents=True, exist_ok=True)  # Before the runs, which take their time.
    output = directory / f"{name}.png"
    if callable(make):
        drawing, table = make(seeds or 5, iterations, report)
        plots.save(drawing, output)
    else:
        sweeps = {sweep: _load(sweep, seeds, smoke, env, storage_path) for sweep in make}
        table = _draw_sweeps(sweeps, output, smoke, storage_path, report, name in _BESIDE_SAC)
    table.to_csv(output.with_suffix(".csv"), index=False, float_format="%.5g")
    return output


def _load(
    name: str, seeds: int | None, smoke: bool, env: Sequence[str] | None, storage_path: Path
) -> Sweep:
    """Read the sweep that has begun, or else the sweep's file."""
    directory = sweep_directory(storage_path, name, smoke=smoke)
    if not (directory / Sweep.FILE_NAME).is_file():
        return load(name, seeds=seeds, smoke=smoke, env=env)[0]
    sweep = Sweep.from_directory(directory)
    if env and list(env) != sweep.env:
        raise ValueError(
            f"{directory} holds the sweep on {sweep.env or 'all tasks'}: choose another "
            f"--storage-path for {', '.join(env)}."
        )
    return sweep


def _draw_sweeps(
    sweeps: Mapping[str, Sweep],
    output: Path,
    smoke: bool,
    storage_path: Path,
    report: Report,
    beside_sac: bool,
) -> pd.DataFrame:
    """Run or complete sweeps; draw a panel for each of their tasks, and bars if there are several."""
    summaries = []
    failed: dict[str, str] = {}
    for name, sweep in sweeps.items():
        directory = sweep_directory(storage_path, name, smoke=smoke)
        command = ["rllib", "sweep", name, "--storage-path", str(storage_path)]
        command += ["--seeds", str(sweep.seeds), *(["--smoke"] if smoke else [])]
        failed |= run_sweep(sweep, directory, command=shlex.join(command))
        report(f"{name}: {directory}")
        summary = summarise(directory)[0]
        if beside_sac:
            of_sac = sweep_directory(storage_path, f"{name}-sac", smoke=smoke)
            runs, failed_too = run_sac(sweep, of_sac, shlex.join(command))
            failed |= failed_too
            report(f"{SAC}: {of_sac}")
            (ours,) = summary.groups.values()
            groups = {"RERPI": ours, SAC: runs}
            summary = replace(summary, groups=groups, scores=group_scores(groups, summary.metric))
        summaries.append(summary)
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
    table: pd.DataFrame = pd.concat(
        [summary.scores.assign(sweep=summary.directory.name) for summary in summaries]
    )
    return table


# Each figure is made by a function or from sweeps.
FIGURES: dict[
    str, Callable[[int, int | None, Report], tuple[Figure, pd.DataFrame]] | tuple[str, ...]
] = {
    "landscape": landscape_figure,
    "standard-functions": standard_functions_figure,
    "premature-convergence": premature_convergence_figure,
    "ablations": ("no_kl_bound", "epsilon_mu", "epsilon_mu_walls", "epsilon_sigma"),
    "control-suite": ("baselines",),
    "parkour": ("parkour",),
    "gym": ("gym",),
    "weighting": ("weighting",),
}
# The figures of sweeps with one variant that are compared with SAC.
_BESIDE_SAC = ("gym",)
