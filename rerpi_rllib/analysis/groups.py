"""Putting runs together: groups that differ in seed and task only, common steps, tables of scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from rerpi_rllib.analysis.curves import Run
from rerpi_rllib.analysis.statistics import normalised
from rerpi_rllib.runs.settings import format_value

Array = npt.NDArray[np.float64]


def group_runs(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Group runs that differ only in seed and task; a label names what else tells a group apart."""
    flat = [run.settings.flat() if run.settings else {"run": run.directory.name} for run in runs]
    keys = list(dict.fromkeys(key for settings in flat for key in settings))
    differing = [key for key in keys if len({repr(settings.get(key)) for settings in flat}) > 1]
    groups: dict[str, list[Run]] = {}
    for run, settings in zip(runs, flat):
        parts = [f"{key}={format_value(settings[key])}" for key in differing if key in settings]
        label = parts[0].split("=", 1)[1] if differing == ["algo"] else ", ".join(parts)
        groups.setdefault(label or "default", []).append(run)
    return groups


def by_task(runs: Sequence[Run]) -> dict[str, list[Run]]:
    tasks: dict[str, list[Run]] = {}
    for run in runs:
        tasks.setdefault(run.task, []).append(run)
    return tasks


def aligned(runs: Sequence[Run], metric: str) -> tuple[Array, Array]:
    """Interpolate a curve of several runs at common env steps: [steps] and [runs, steps]."""
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
    """Return a table of the runs' last values, with columns group, task, seed, score and normalised.

    Scores of the control suite are normalised by its maximum, 1000; other scores are mapped to 0 for
    the worst run of the task and 1 for the best.
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
    table: pd.DataFrame = pd.DataFrame(rows)
    in_suite = table.pop("in_suite")
    of_task = table.groupby("task")["score"]
    low = of_task.transform("min").where(~in_suite, 0.0)
    high = of_task.transform("max").where(~in_suite, 1000.0)
    table["normalised"] = normalised(*(x.to_numpy() for x in (table["score"], low, high)))
    return table


def score_matrix(table: pd.DataFrame, column: str, group: str, tasks: Sequence[str]) -> Array:
    """Return a group's scores as [runs, tasks], with as many runs as its task with the fewest has."""
    of_group = table[table["group"] == group]
    values = [of_group[of_group["task"] == task][column].dropna().to_numpy() for task in tasks]
    runs = min(map(len, values))
    return np.stack([of_task[:runs] for of_task in values], axis=1)
