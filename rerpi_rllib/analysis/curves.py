"""Runs on disk: finding them, reading their curves, and putting runs of one kind together."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from ray.tune.utils import flatten_dict

from rerpi_rllib.core.losses import LossSettings
from rerpi_rllib.experiments.settings import VERSIONS_FILE, RunSettings
from rerpi_rllib.experiments.statistics import normalised

_LEARNER = "learners/default_policy/"
# The parts of a policy that may have a bound.
PARTS = ("mu", "sigma", "mixture", "pi")
# Names of curves, and where a result has them.
COLUMNS = {
    "env_steps": "num_env_steps_sampled_lifetime",
    "updates": "num_updates_lifetime",
    "time_s": "time_total_s",
    "iterations": "training_iteration",
    "return": "env_runners/episode_return_mean",
    "greedy_return": "evaluation/env_runners/episode_return_mean",
    **{
        name: _LEARNER + name
        for name in (
            *(f"kl_{part}{when}" for part in PARTS for when in ("", "_at_target_update")),
            *(f"alpha_{part}" for part in PARTS),
            *("kl_nonparametric", "temperature", "q_mean", "policy_stddev_mean"),
            *("policy_entropy", "weights_ess", "critic_loss", "policy_loss"),
        )
    },
}


@dataclass(frozen=True)
class Run:
    """One training run and its curves; ``settings`` is None for a directory of another origin."""

    directory: Path
    settings: RunSettings | None
    curves: pd.DataFrame

    @property
    def task(self) -> str:
        """The task's short name, e.g. "cheetah-run"."""
        return short_name(self.settings.env) if self.settings else self.directory.name

    @property
    def versions(self) -> dict[str, str]:
        path = self.directory / VERSIONS_FILE
        return json.loads(path.read_text()) if path.is_file() else {}

    def bounds(self) -> dict[str, float]:
        """The bounds of Step 3, by the parts of the policy."""
        if self.settings is None:
            return {}
        config = self.settings.build_config(check_env=False)
        return LossSettings(**config.model_config["loss"]).epsilons

    @property
    def is_complete(self) -> bool:
        """Whether it was stopped by a rule of its own, not by a failure or a scheduler."""
        columns = {"env_steps", "updates", "iterations", "time_s", "return"} & set(self.curves)
        stop = self.settings.stop if self.settings else {}
        return any(self.final(key) >= limit for key, limit in stop.items() if key in columns)

    def final(self, metric: str) -> float:
        """The last value of a curve; NaN if there is none."""
        values = self.curves[metric].dropna().tolist() if metric in self.curves else []
        return values[-1] if values else float("nan")


def short_name(env: str) -> str:
    return env.removeprefix("dm_control/").removesuffix("-v0")


def load_run(directory: Path) -> Run:
    path = directory / RunSettings.FILE_NAME
    settings = RunSettings.from_file(path) if path.is_file() else None
    return Run(directory, settings, _curves(directory))


def find_runs(directories: Sequence[Path]) -> list[Run]:
    """The runs at or below each directory: those with a ``run.json``, or else the directory itself.

    A run of a sweep that has no result yet is passed over.
    """
    runs = []
    for directory in directories:
        if not directory.is_dir():
            raise ValueError(f"There is no directory {str(directory)!r}.")
        found = sorted(path.parent for path in directory.glob(f"**/{RunSettings.FILE_NAME}"))
        if len(found) <= 1:
            runs.append(load_run(found[0] if found else directory))
            continue
        loaded = [load_run(path) for path in found if _has_results(path)]
        if not loaded:
            raise ValueError(f"No run below {str(directory)!r} has a result yet.")
        runs += loaded
    return runs


def _has_results(directory: Path) -> bool:
    return any(path.stat().st_size for path in directory.glob("**/result.json"))


def _results(path: Path) -> list[Any]:
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(flatten_dict(json.loads(line)))
        except json.JSONDecodeError:
            continue  # The line that was being written when the run was killed.
    return found


def _curves(directory: Path) -> pd.DataFrame:
    """A run's curves; the parts of a resumed run one after the other.

    From ``result.json``: a ``progress.csv`` has only the columns of its first row, and an evaluation
    comes later.
    """
    parts = [results for path in directory.glob("**/result.json") if (results := _results(path))]
    # By the time of their results: that of the files is another one in a copy.
    parts.sort(key=lambda results: results[0].get("timestamp", 0))
    rows = []
    for result in itertools.chain.from_iterable(parts):
        row = {name: result.get(column) for name, column in COLUMNS.items()}
        if row["iterations"] % (result.get("config/evaluation_interval") or 1):
            row["greedy_return"] = None  # RLlib repeats the result of an evaluation once.
        rows.append(row)
    if not rows:
        raise ValueError(f"There is no result.json with results at or below {str(directory)!r}.")
    table = pd.DataFrame(rows).astype(float).dropna(axis="columns", how="all")
    # A part that was resumed from an older checkpoint repeats some steps: the later part counts.
    later_minimum = table["env_steps"][::-1].cummin()[::-1].shift(-1)
    return table[~(table["env_steps"] > later_minimum)]


def group_runs(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs that differ in seed and task only go together, by what tells them from the others."""
    asked = [run.settings.flat() if run.settings else {"run": run.directory.name} for run in runs]
    keys = list(dict.fromkeys(key for settings in asked for key in settings))
    telling = [key for key in keys if len({repr(settings.get(key)) for settings in asked}) > 1]
    groups: dict[str, list[Run]] = {}
    for run, settings in zip(runs, asked):
        parts = [f"{key}={shown(settings[key])}" for key in telling if key in settings]
        label = parts[0].split("=", 1)[1] if telling == ["algo"] else ", ".join(parts)
        groups.setdefault(label or "default", []).append(run)
    return groups


def shown(value: Any) -> str:
    """A setting's value, short."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def by_task(runs: Sequence[Run]) -> dict[str, list[Run]]:
    tasks: dict[str, list[Run]] = {}
    for run in runs:
        tasks.setdefault(run.task, []).append(run)
    return tasks


def aligned(runs: Sequence[Run], metric: str) -> tuple[np.ndarray, np.ndarray]:
    """A curve of several runs at common env steps: [steps], [runs, steps]."""
    known = [run.curves[["env_steps", metric]].dropna() for run in runs if metric in run.curves]
    known = [table for table in known if len(table)]
    if not known:
        return np.empty(0), np.empty((0, 0))
    steps = np.unique(np.concatenate([table["env_steps"] for table in known]))
    first = max(table["env_steps"].iloc[0] for table in known)
    last = min(table["env_steps"].iloc[-1] for table in known)
    steps = steps[(steps >= first) & (steps <= last)]
    return steps, np.array([np.interp(steps, t["env_steps"], t[metric]) for t in known])


def scores(groups: Mapping[str, Sequence[Run]], metric: str) -> pd.DataFrame:
    """The last value of each run: columns group, task, seed, score and normalised.

    Normalised are shares of the control suite's 1000, elsewhere of the way from the worst run of the
    task to the best.
    """
    rows = []
    for label, runs in groups.items():
        for run in runs:
            env = run.settings.env if run.settings else ""
            rows.append(
                {
                    "group": label,
                    "task": run.task,
                    "seed": run.settings.seed if run.settings else None,
                    "score": run.final(metric),
                    "in_suite": env.startswith("dm_control/"),
                }
            )
    table = pd.DataFrame(rows)
    in_suite = table.pop("in_suite")
    of_task = table.groupby("task")["score"]
    low = of_task.transform("min").where(~in_suite, 0.0)
    high = of_task.transform("max").where(~in_suite, 1000.0)
    table["normalised"] = normalised(*(x.to_numpy() for x in (table["score"], low, high)))
    return table
