"""The paper's figures, each made from runs: a PNG and an SVG file, and a CSV file with the data."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from rerpi_rllib.analysis import plots
from rerpi_rllib.analysis.summary import summarise
from rerpi_rllib.figures.improvement_plots import (
    landscape_figure,
    premature_convergence_figure,
    standard_functions_figure,
)
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
        storage_path: where the sweeps are. One that has begun is completed with its own settings.
        report: called with what has been done so far.
    """
    if name not in FIGURES:
        raise ValueError(f"Unknown figure {name!r}. Allowed: {', '.join(FIGURES)}.")
    for option, value, limit in (("--seeds", seeds, 1000), ("--iterations", iterations, 1_000_000)):
        if value is not None and not 1 <= value <= limit:
            raise ValueError(f"{option} {value} is not allowed: it must be from 1 to {limit:,}.")
    make = FIGURES[name]
    if iterations is not None and not callable(make):
        raise ValueError(f"--iterations is not for {name}, which is made of sweeps: see --smoke.")
    directory.mkdir(parents=True, exist_ok=True)  # Before the runs, which take their time.
    output = directory / f"{name}.png"
    if callable(make):
        drawing, table = make(seeds or 5, iterations, report)
        plots.save(drawing, output)
    else:
        table = _draw_sweeps(make, output, seeds, smoke, storage_path, report)
    table.to_csv(output.with_suffix(".csv"), index=False, float_format="%.5g")
    return output


def _draw_sweeps(
    names: Sequence[str],
    output: Path,
    seeds: int | None,
    smoke: bool,
    storage_path: Path,
    report: Report,
) -> pd.DataFrame:
    """Run or complete sweeps; draw a panel for each of their tasks, and bars if there are several."""
    summaries = []
    failed: dict[str, str] = {}
    for name in names:
        directory = sweep_directory(storage_path, name, smoke=smoke)
        if (directory / Sweep.FILE_NAME).is_file():
            sweep = Sweep.from_directory(directory)
        else:
            sweep, _ = load(name, seeds=seeds, smoke=smoke)
        command = ["rllib", "sweep", name, "--storage-path", str(storage_path)]
        command += ["--seeds", str(sweep.seeds), *(["--smoke"] if smoke else [])]
        failed |= run_sweep(sweep, directory, command=shlex.join(command))
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
    "ablations": ("no_kl_bound", "epsilon_mu", "epsilon_sigma"),
    "control-suite": ("baselines",),
    "weighting": ("weighting",),
}
