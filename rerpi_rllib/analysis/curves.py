"""Runs on disk: finding them and reading their curves."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from ray.tune.utils import flatten_dict

from rerpi_rllib.core.constraints import Constraint
from rerpi_rllib.runs.settings import ALGORITHMS, VERSIONS_FILE, RunSettings, short_task_name

# The names of curves, and where a result has them.
COLUMNS = {
    "env_steps": "num_env_steps_sampled_lifetime",
    "updates": "num_updates_lifetime",
    "time_s": "time_total_s",
    "iterations": "training_iteration",
    "return": "env_runners/episode_return_mean",
    "greedy_return": "evaluation/env_runners/episode_return_mean",
}
# The learner's metrics that are curves: all of its constraints, whatever their names, and a few more.
_LEARNER_METRIC = re.compile(
    "learners/default_policy/"
    "(kl_\\w+|alpha_\\w+|\\w*temperature|q_mean|policy_stddev_mean|policy_entropy|weights_ess|"
    "critic_loss|policy_loss)"
)


@dataclass(frozen=True)
class Run:
    """One training run and its curves; ``settings`` is None for a directory of another origin."""

    directory: Path
    settings: RunSettings | None
    curves: pd.DataFrame

    @property
    def task(self) -> str:
        """The task's short name, e.g. "cheetah-run"."""
        return short_task_name(self.settings.env) if self.settings else self.directory.name

    @property
    def versions(self) -> dict[str, str]:
        """The versions of the packages that made the run."""
        path = self.directory / VERSIONS_FILE
        versions: dict[str, str] = json.loads(path.read_text()) if path.is_file() else {}
        return versions

    def constraints(self) -> tuple[Constraint, ...]:
        """Return the constraints of the run's configuration whose KLs are among its curves."""
        if self.settings is None:
            return ()
        config = self.settings.merged_config()
        return tuple(c for c in config.constraints if c.kl in self.curves)

    @property
    def is_complete(self) -> bool:
        """Whether it was stopped by a rule of its own, not by a failure or a scheduler."""
        columns = {"env_steps", "updates", "iterations", "time_s", "return"} & set(self.curves)
        stop = self.settings.stop if self.settings else {}
        return any(self.final(key) >= limit for key, limit in stop.items() if key in columns)

    def final(self, metric: str) -> float:
        """Return the last value of a curve; NaN if there is none."""
        values = self.curves[metric].dropna().tolist() if metric in self.curves else []
        return float(values[-1]) if values else float("nan")


def load_run(directory: Path) -> Run:
    path = directory / RunSettings.FILE_NAME
    settings = RunSettings.from_file(path) if path.is_file() else None
    if settings and settings.algo not in ALGORITHMS:  # It is of another library.
        settings = None
    return Run(directory, settings, _curves(directory))


def find_runs(directories: Sequence[Path]) -> list[Run]:
    """Load the runs at or below each directory: those with a ``run.json``, or the directory itself.

    Runs of a sweep that have no result yet are skipped.
    """
    runs = []
    for directory in directories:
        if not directory.is_dir():
            raise ValueError(f"There is no directory {str(directory)!r}.")
        paths = sorted(path.parent for path in directory.glob(f"**/{RunSettings.FILE_NAME}"))
        if len(paths) <= 1:
            runs.append(load_run(paths[0] if paths else directory))
            continue
        loaded = [load_run(path) for path in paths if _has_results(path)]
        if not loaded:
            raise ValueError(f"No run below {str(directory)!r} has a result yet.")
        runs += loaded
    return runs


def _has_results(directory: Path) -> bool:
    return any(path.stat().st_size for path in directory.glob("**/result.json"))


def _read_results(path: Path) -> list[dict[str, Any]]:
    results = []
    for line in path.read_text().splitlines():
        try:
            results.append(flatten_dict(json.loads(line)))
        except json.JSONDecodeError:
            continue  # The run was killed while it wrote this line.
    return results


def _row(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result's values of all curves."""
    row: dict[str, Any] = {name: result.get(column) for name, column in COLUMNS.items()}
    for key, value in result.items():
        if metric := _LEARNER_METRIC.fullmatch(key):
            row[metric[1]] = value
    if row["iterations"] % (result.get("config/evaluation_interval") or 1):
        row["greedy_return"] = None  # RLlib repeats the result of an evaluation once.
    return row


def _curves(directory: Path) -> pd.DataFrame:
    """Read a run's curves; the parts of a resumed run follow each other.

    They come from ``result.json``, since a ``progress.csv`` has only the columns of its first row,
    and evaluations come later.
    """
    parts = [results for path in directory.glob("**/result.json") if (results := _read_results(path))]
    # Ordered by the time in the results, since copied files have other times.
    parts.sort(key=lambda results: results[0].get("timestamp", 0))
    rows = [_row(result) for result in itertools.chain.from_iterable(parts)]
    if not rows:
        raise ValueError(f"There is no result.json with results at or below {str(directory)!r}.")
    table: pd.DataFrame = pd.DataFrame(rows).astype(float).dropna(axis="columns", how="all")
    # A part that was resumed from an older checkpoint repeats some steps; the later part counts.
    later_minimum = table["env_steps"][::-1].cummin()[::-1].shift(-1)
    kept: pd.DataFrame = table[~(table["env_steps"] > later_minimum)]
    return kept
