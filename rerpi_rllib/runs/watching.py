"""How a run is to be watched: on the screen, in Ray's dashboard, and by trackers."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ray.tune import Callback
from ray.tune.experiment import Trial
from ray.tune.logger import TBXLoggerCallback
from ray.tune.result import TIMESTEPS_TOTAL, TRAINING_ITERATION
from tensorboardX import SummaryWriter

from rerpi_rllib.algorithm.exporter import Measurements, progress
from rerpi_rllib.algorithm.histograms import HISTOGRAMS
from rerpi_rllib.core.constraints import Constraint
from rerpi_rllib.runs.errors import RunFailed

# The module that a tracker needs, and how to install it. Aim is no extra: it refuses pinned packages.
_TRACKERS = {
    "wandb": ("wandb", "pip install 'rerpi-rllib[wandb]'"),
    "mlflow": ("mlflow", "pip install 'rerpi-rllib[mlflow]'"),
    "aim": ("aim", "pip install aim"),
}


@dataclass(frozen=True)
class Watching:
    """What the user asked for; it is checked when it is made.

    Args:
        quiet: whether to leave out the progress display, and where to look for more.
        dashboard: whether to start Ray's dashboard, if Ray does not run yet.
        wandb: a project of Weights & Biases that is to have the run.
        mlflow: the address of MLflow's server, or a directory for its files.
        aim: the directory of Aim's repository.
        video_every: how many minutes to wait between two films of the policy; None for no films.
    """

    quiet: bool = False
    dashboard: bool = False
    wandb: str | None = None
    mlflow: str | None = None
    aim: str | None = None
    video_every: float | None = None

    def __post_init__(self) -> None:
        for option, (module, command) in _TRACKERS.items():
            given = getattr(self, option)
            if given is not None and not given.strip():
                raise ValueError(f"--{option} {given!r} is not allowed: it must not be empty.")
            if given is not None and importlib.util.find_spec(module) is None:
                raise ValueError(f"--{option} needs a package that is not installed: {command}.")
        minutes = self.video_every
        if minutes is not None and not (math.isfinite(minutes) and minutes > 0):
            raise ValueError(
                f"--video-every {minutes:g} is not allowed: it must be a number of minutes above 0."
            )

    def callbacks(
        self,
        directory: Path,
        experiment: str,
        constraints: Sequence[Constraint],
        report: Callable[[str], None],
    ) -> list[Callback]:
        """Make what Tune calls with the results of a run.

        Args:
            directory: the directory of the run.
            experiment: the name that runs of the same task have in common.
            constraints: the constraints of the run.
            report: called with what a tracker or a film has failed with.
        """
        made: list[Callback] = [TensorBoard(constraints)]
        if self.wandb is not None:
            from ray.air.integrations.wandb import WandbLoggerCallback

            made.append(_tracker(WandbLoggerCallback, constraints, report)(project=self.wandb))
        if self.mlflow is not None:
            from ray.air.integrations.mlflow import MLflowLoggerCallback

            # Without it, newer versions refuse directories.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            made.append(
                _tracker(MLflowLoggerCallback, constraints, report)(
                    tracking_uri=self.mlflow, experiment_name=experiment
                )
            )
        if self.aim is not None:
            from ray.tune.logger.aim import AimLoggerCallback

            made.append(
                _tracker(AimLoggerCallback, constraints, report)(
                    repo=self.aim, experiment_name=experiment
                )
            )
        if self.video_every is not None:
            from rerpi_rllib.runs.filming import Filming

            made.append(Filming(directory / "videos", 60.0 * self.video_every, report))
        return made


class TensorBoard(TBXLoggerCallback):
    """Takes the place of Tune's writer: names for people, and environment steps as x-axis."""

    def __init__(self, constraints: Sequence[Constraint]) -> None:
        super().__init__()
        self._measurements = Measurements(constraints)
        self._writers: dict[Trial, SummaryWriter] = {}

    def log_trial_start(self, trial: Trial) -> None:
        self.log_trial_end(trial)
        trial.init_local_path()
        self._writers[trial] = SummaryWriter(trial.local_path)

    def log_trial_result(self, iteration: int, trial: Trial, result: Mapping[str, Any]) -> None:
        if trial not in self._writers:
            self.log_trial_start(trial)
        writer, (step, _) = self._writers[trial], progress(result)
        for group, name, value in self._measurements.of(result):
            writer.add_scalar(f"{group}/{name}", value, global_step=step)
        for name, quantiles in result.get(HISTOGRAMS, {}).items():
            writer.add_histogram(f"histograms/{name}", np.array(quantiles), global_step=step)
        writer.flush()

    def log_trial_end(self, trial: Trial, failed: bool = False) -> None:
        if trial in self._writers:
            self._writers.pop(trial).close()


def _tracker(
    logger: type[Any], constraints: Sequence[Constraint], report: Callable[[str], None]
) -> type[Any]:
    """Return a logger that gets the same numbers as TensorBoard, by the same names.

    A run does not start if its tracker cannot be reached, and goes on if that happens later.
    """

    class Tracker(logger):
        _measurements = Measurements(constraints)
        _has_failed = False

        def setup(self, *args: Any, **info: Any) -> None:
            try:
                super().setup(*args, **info)
            except Exception as error:
                raise RunFailed(f"{logger.__name__}: {error}") from error

        def log_trial_result(self, iteration: int, trial: Trial, result: Mapping[str, Any]) -> None:
            values = {f"{group}/{name}": v for group, name, v in self._measurements.of(result)}
            step, _ = progress(result)
            at = {TIMESTEPS_TOTAL: step, TRAINING_ITERATION: result[TRAINING_ITERATION]}
            try:
                super().log_trial_result(iteration, trial, values | at)
            except Exception as error:
                if not self._has_failed:
                    self._has_failed = True
                    report(f"{logger.__name__} misses results of env step {step} and later: {error}")

    return Tracker
