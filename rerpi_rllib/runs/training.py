"""One training run through Ray Tune: results, checkpoints, resuming, and a clean end."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune import Callback, Checkpoint, CheckpointConfig, Stopper, TuneError
from ray.tune.experiment import Trial
from ray.tune.result import SHOULD_CHECKPOINT

from rerpi_rllib.algorithm.rerpi import SHARED_REPLAY_DIRECTORY
from rerpi_rllib.runs.checkpoints import newest_checkpoint, prune
from rerpi_rllib.runs.display import TrainingDisplay
from rerpi_rllib.runs.errors import RunFailed
from rerpi_rllib.runs.machine import running_ray
from rerpi_rllib.runs.planning import PlannedRun
from rerpi_rllib.runs.results import STOP_KEYS

_SECONDS_BETWEEN_CHECKPOINTS = 300.0
_CHECKPOINTS_KEPT = 2


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    directory: Path
    checkpoint: Path
    episode_return: float | None
    interrupted: bool


class StopRules(Stopper):
    """Stops at the first of the rules that is met, or once the user has pressed Ctrl-C."""

    def __init__(self, rules: Mapping[str, float]) -> None:
        self._rules = rules
        self.interrupted = False

    def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        return self.interrupted or any(
            STOP_KEYS[key](result) >= limit for key, limit in self._rules.items()
        )

    def stop_all(self) -> bool:
        return False


class CheckpointByTime(Callback):
    """Asks for a checkpoint every few minutes, however long an iteration takes."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def on_trial_result(
        self,
        iteration: int,
        trials: list[Trial],
        trial: Trial,
        result: MutableMapping[str, Any],
        **info: Any,
    ) -> None:
        now = time.monotonic()
        if now - self._last.setdefault(trial.trial_id, now) >= _SECONDS_BETWEEN_CHECKPOINTS:
            self._last[trial.trial_id] = now
            result[SHOULD_CHECKPOINT] = True


class PruneOldParts(Callback):
    """Deletes old checkpoints of all parts of a run, and the rows of the replay that they needed."""

    def __init__(self, run: Path) -> None:
        self._run = run

    def on_checkpoint(
        self, iteration: int, trials: list[Trial], trial: Trial, checkpoint: Checkpoint, **info: Any
    ) -> None:
        prune(self._run, Path(checkpoint.path), _CHECKPOINTS_KEPT)


def train(run: PlannedRun, *, quiet: bool = False) -> Outcome:
    """Train until a stopping rule is met or the user presses Ctrl-C; always leave a checkpoint.

    Args:
        run: what to train; a resumed run goes on in the directory it had.
        quiet: whether to leave out the progress display.
    """
    settings, config, directory = run.settings, run.config, run.directory
    settings.save(directory)
    part = 1 + sum(child.is_dir() for child in directory.glob("part-*"))
    stop = StopRules(settings.stop)
    display = TrainingDisplay(
        f"{settings.algo} on {settings.env}", settings.stop, config.constraints, quiet
    )

    def on_interrupt(signum: int, frame: Any) -> None:
        if stop.interrupted:
            raise KeyboardInterrupt
        stop.interrupted = True

    in_main_thread = threading.current_thread() is threading.main_thread()
    previous_handler = signal.signal(signal.SIGINT, on_interrupt) if in_main_thread else None
    try:
        with running_ray(config):
            analysis = tune.run(
                settings.algo,
                name=directory.name,
                storage_path=str(directory.parent),
                config={**config.to_dict(), SHARED_REPLAY_DIRECTORY: str(directory / "replay")},
                stop=stop,
                callbacks=[CheckpointByTime(), PruneOldParts(directory), display],
                checkpoint_config=CheckpointConfig(
                    checkpoint_at_end=True, num_to_keep=_CHECKPOINTS_KEPT
                ),
                trial_dirname_creator=lambda trial: f"part-{part}",
                restore=str(run.checkpoint) if run.checkpoint else None,
                log_to_file=True,
                raise_on_failed_trial=False,
                verbose=0,
            )
    except TuneError as error:
        raise RunFailed(f"{_reason(str(error))}. Its log is in {directory}.") from error
    finally:
        display.close()
        if in_main_thread:
            signal.signal(signal.SIGINT, previous_handler)

    (trial,) = analysis.trials
    logs = directory / f"part-{part}"
    if trial.status != Trial.TERMINATED:
        reason = failure_reason(trial)
        raise RunFailed(f"The run failed: {reason}. Its log is {logs / 'error.txt'}.")
    return Outcome(directory, newest_checkpoint(logs), display.last_return, stop.interrupted)


def failure_reason(trial: Trial) -> str:
    """Return the error that made a trial fail, in one line."""
    return _reason(str(trial.get_error() or trial.status))


def _reason(traceback: str) -> str:
    """Return the first error in a chain of them that has a message: it caused the others."""
    lines = traceback.strip().splitlines()
    named = [line for line in lines if re.match(r"[A-Za-z_.]+(Error|Exception): \S", line)]
    return (named or lines)[0].strip().rstrip(".")


def summary(outcome: Outcome) -> str:
    """Say in one sentence how a run ended."""
    ended = "Stopped by Ctrl-C" if outcome.interrupted else "Done"
    if outcome.episode_return is None:
        return f"{ended}, before an episode had ended."
    return f"{ended}: return {outcome.episode_return:.1f} (mean of the last episodes)."
