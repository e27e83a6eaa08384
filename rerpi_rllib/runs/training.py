"""One training run through Ray Tune: results, checkpoints, resuming, failures, and a clean end."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import tune
from ray.exceptions import RayError
from ray.tune import Callback, Checkpoint, CheckpointConfig, Stopper, TuneError
from ray.tune.experiment import Trial
from ray.tune.result import SHOULD_CHECKPOINT

from rerpi_rllib import load_algorithms
from rerpi_rllib.algorithm.checkpoint import flush, read_manifest
from rerpi_rllib.algorithm.saving import SHARED_REPLAY_DIRECTORY
from rerpi_rllib.runs.checkpoints import newest_checkpoint, prune
from rerpi_rllib.runs.dashboard import where_to_watch
from rerpi_rllib.runs.display import TrainingDisplay
from rerpi_rllib.runs.errors import RunFailed, os_errors_fail_the_run
from rerpi_rllib.runs.machine import running_ray
from rerpi_rllib.runs.ownership import owned
from rerpi_rllib.runs.planning import PlannedRun, refuse_used
from rerpi_rllib.runs.results import STOP_KEYS
from rerpi_rllib.runs.signals import EndSignals
from rerpi_rllib.runs.watching import Watching

_SECONDS_TO_FIRST_CHECKPOINT = 20.0
_SECONDS_BETWEEN_CHECKPOINTS = 60.0
_SHARE_OF_TIME_FOR_CHECKPOINTS = 0.02
_CHECKPOINTS_KEPT = 2
MAX_FAILURES = 3
_BY_DEFAULT = Watching()


@dataclass(frozen=True)
class Outcome:
    """How a run ended; ``ended_by`` is the signal that ended it, if one did."""

    directory: Path
    checkpoint: Path
    episode_return: float | None
    ended_by: signal.Signals | None


class StopRules(Stopper):
    """Stops at the first of the rules that is met, or once ``interrupted`` has been set."""

    def __init__(self, rules: Mapping[str, float]) -> None:
        self._rules = rules
        self.interrupted = False

    def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        return self.interrupted or any(
            STOP_KEYS[key](result) >= limit for key, limit in self._rules.items()
        )

    def stop_all(self) -> bool:
        return False


@dataclass
class _Schedule:
    """When a trial's next checkpoint is due, and since when one is being written."""

    due: float
    saving_since: float | None = None


class CheckpointByTime(Callback):
    """Asks for a checkpoint within the first minute, and then every minute.

    The more time a checkpoint takes, the longer is the interval, so that saving takes two hundredths
    of the time at most.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._schedules: dict[str, _Schedule] = {}

    def on_trial_result(
        self,
        iteration: int,
        trials: list[Trial],
        trial: Trial,
        result: MutableMapping[str, Any],
        **info: Any,
    ) -> None:
        now = self._clock()
        # Trials do not begin with their first result, but most of the time before it is Ray's.
        schedule = self._schedules.setdefault(
            trial.trial_id, _Schedule(now + _SECONDS_TO_FIRST_CHECKPOINT)
        )
        if now >= schedule.due and schedule.saving_since is None:
            schedule.saving_since = now
            result[SHOULD_CHECKPOINT] = True

    def on_checkpoint(
        self, iteration: int, trials: list[Trial], trial: Trial, checkpoint: Any, **info: Any
    ) -> None:
        """Take the time that the checkpoint took, from its request until it was in its place."""
        schedule = self._schedules.get(trial.trial_id)
        if schedule is not None and schedule.saving_since is not None:
            now = self._clock()
            cost = now - schedule.saving_since
            share = _SHARE_OF_TIME_FOR_CHECKPOINTS
            schedule.due = now + max(_SECONDS_BETWEEN_CHECKPOINTS, cost * (1 - share) / share)
            schedule.saving_since = None


class PruneOldParts(Callback):
    """Deletes old checkpoints of all parts of a run, and the rows of the replay that they needed."""

    def __init__(self, run: Path, start: Path | None) -> None:
        self._run, self._start = run, start

    def on_checkpoint(
        self, iteration: int, trials: list[Trial], trial: Trial, checkpoint: Checkpoint, **info: Any
    ) -> None:
        flush(Path(checkpoint.path))  # Before older ones are deleted.
        prune(self._run, Path(checkpoint.path), _CHECKPOINTS_KEPT, self._start)


@dataclass
class _Part:
    """A directory ``part-N`` of a run: what one trial of Tune has written, from one start to an end.

    Args:
        directory: where it is.
        start: the checkpoint that it goes on from; None for a part from the beginning.
        failure: what has ended it, if that was an error.
        has_result: whether it has made an iteration.
    """

    directory: Path
    start: Path | None
    failure: str | None = None
    has_result: bool = False
    episode_return: float | None = None


def train(
    run: PlannedRun,
    *,
    watching: Watching = _BY_DEFAULT,
    max_failures: int = MAX_FAILURES,
    report: Callable[[str], None] = print,
) -> Outcome:
    """Train until a stopping rule is met or a signal asks for an end; always leave a checkpoint.

    A run that fails goes on from its newest checkpoint, in a part of its own.

    Args:
        run: what to train; a resumed run goes on in the directory it had.
        watching: what to show, and where else.
        max_failures: how often a failed run is tried again; it is given up before that if it fails
            twice in a row without a result.
        report: called with what the user should know: where to watch the run, and failures.
    """
    stop = StopRules(run.settings.stop)
    signals = EndSignals(
        "ending after this iteration, with a checkpoint; a second signal ends at once.",
        lambda received: setattr(stop, "interrupted", True),
    )
    with owned(run.directory, report), signals:
        if run.checkpoint is None:
            refuse_used(run.directory)  # Another process may have used it since it was planned.
        parts: list[_Part] = []
        while True:
            last = _next_part(run, parts)
            # Until the first part has begun, nothing has been run that could have failed.
            with os_errors_fail_the_run() if parts else nullcontext():
                parts.append(last)
                _train_part(run, last, stop, signals, watching, report)
            if last.failure is None:
                break
            start = _next_start(run, parts)
            if signals.received or not _may_try_again(parts, max_failures):
                raise RunFailed(_last_words(run, last, start))
            report(
                f"The run failed: {last.failure}. Going on from {_name(start)}: attempt "
                f"{len(parts)} of {max_failures}."
            )
        returns = [part.episode_return for part in parts if part.episode_return is not None]
        return Outcome(
            run.directory,
            newest_checkpoint(last.directory, with_replay=False),
            returns[-1] if returns else None,
            signals.received,
        )


def _next_part(run: PlannedRun, parts: list[_Part]) -> _Part:
    numbers = [0]
    for path in run.directory.glob("part-*"):
        with suppress(ValueError):
            numbers.append(int(path.name.removeprefix("part-")))
    return _Part(run.directory / f"part-{max(numbers) + 1}", _next_start(run, parts))


def _next_start(run: PlannedRun, parts: list[_Part]) -> Path | None:
    """Return the newest checkpoint of these parts, or the one that the run was resumed from."""
    for part in reversed(parts):
        with suppress(ValueError):  # It may have none.
            return newest_checkpoint(part.directory)
    return run.checkpoint


def _may_try_again(parts: list[_Part], max_failures: int) -> bool:
    """Tell whether another part may get further; what fails at once will most likely do so again."""
    fails_at_once = len(parts) > 1 and not any(part.has_result for part in parts[-2:])
    return len(parts) <= max_failures and not fails_at_once


def _name(start: Path | None) -> str:
    if start is None:
        return "the beginning, since there is no checkpoint yet"
    return f"{start.parent.name}/{start.name} (env step {read_manifest(start)['env_steps']:,})"


def _last_words(run: PlannedRun, last: _Part, start: Path | None) -> str:
    resume = f" `{resume_command(run.directory)}` goes on from {start}." if start else ""
    errors = last.directory / "error.txt"
    log = errors if errors.is_file() and errors.stat().st_size else last.directory
    if not log.exists():  # Ray did not even start.
        log = run.directory
    return f"The run failed: {last.failure}.{resume} Its log is {log}."


def resume_command(directory: Path) -> str:
    """Return the command that goes on with a run."""
    return shlex.join(["rllib", "train", "--resume", str(directory)])


def _train_part(
    run: PlannedRun,
    part: _Part,
    stop: StopRules,
    signals: EndSignals,
    watching: Watching,
    report: Callable[[str], None],
) -> None:
    """Train from the part's start until a stopping rule is met or an error ends it."""
    settings, config, directory = run.settings, run.config, run.directory
    display = TrainingDisplay(
        f"{settings.algo} on {settings.env}", settings.stop, config.constraints, watching.quiet
    )
    trackers = watching.callbacks(
        directory, f"{settings.algo} on {settings.env}", config.constraints, report
    )
    try:
        with running_ray(config, watching.dashboard) as address:
            signals.install()
            if not watching.quiet:
                for line in where_to_watch(directory, address, wanted=watching.dashboard):
                    report(line)
            load_algorithms()  # A Ray that was started anew does not know them.
            if run.checkpoint is None:
                settings.save(directory)
            with os_errors_fail_the_run():
                analysis = tune.run(
                    settings.algo,
                    name=directory.name,
                    storage_path=str(directory.parent),
                    config={
                        **config.to_dict(),
                        SHARED_REPLAY_DIRECTORY: str(directory / "replay"),
                    },
                    stop=stop,
                    callbacks=[
                        CheckpointByTime(),
                        PruneOldParts(directory, part.start),
                        _Recorder(run, part),
                        *trackers,
                        display,
                    ],
                    checkpoint_config=CheckpointConfig(
                        checkpoint_at_end=True, num_to_keep=_CHECKPOINTS_KEPT
                    ),
                    trial_name_creator=lambda trial: directory.name,
                    trial_dirname_creator=lambda trial: part.directory.name,
                    restore=str(part.start) if part.start else None,
                    log_to_file=True,
                    raise_on_failed_trial=False,
                    verbose=0,
                )
            (trial,) = analysis.trials
            if trial.status != Trial.TERMINATED:
                part.failure = failure_reason(trial)
    except (TuneError, RayError, RunFailed) as error:
        part.failure = _reason(str(error))
    finally:
        display.close()
        part.episode_return = display.last_return


class _Recorder(Callback):
    """Notes how far a part has come, and saves the settings of a resumed run at its first result.

    Until then it may fail because of what has been changed; what was there before worked.
    """

    def __init__(self, run: PlannedRun, part: _Part) -> None:
        self._run, self._part = run, part

    def on_trial_result(self, *args: Any, **info: Any) -> None:
        if self._run.checkpoint is not None and not self._part.has_result:
            self._run.settings.save(self._run.directory)
        self._part.has_result = True


def failure_reason(trial: Trial) -> str:
    """Return the error that made a trial fail, in one line, as long as Ray runs."""
    text = str(trial.get_error() or "")
    if not text.strip() and trial.error_file:
        # The copy in the run's directory is empty on a full disk.
        with suppress(OSError):
            text = Path(trial.error_file).read_text(errors="replace")
    if not text.strip():
        free = shutil.disk_usage(trial.storage.storage_fs_path).free
        text = "the disk is full" if free < 2**20 else "it ended without an error message"
    return _reason(text)


def _reason(traceback: str) -> str:
    """Return the first error in a chain of them that has a message: it caused the others."""
    lines = [line.strip() for line in traceback.splitlines()]
    lines = [line for line in lines if line and not re.match(r"Failure # \d+ \(occurred at ", line)]
    named = [
        line for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt): \S", line)
    ]
    if named:
        return named[0].rstrip(".")
    if any(line.startswith("Traceback ") for line in lines):
        return lines[-1].rstrip(".")  # An error without a message, or with an unusual name.
    if process := re.search(r"The actor died unexpectedly.*\bpid: (\d+)", traceback, re.DOTALL):
        return (
            f"the process that trains (pid {process[1]}) died: it was killed, for instance because "
            "memory ran out, or it crashed"
        )
    return (lines or ["it ended without an error message"])[0].rstrip(".")


def summary(outcome: Outcome) -> str:
    """Say in one sentence how a run ended."""
    ended = "Done"
    if outcome.ended_by is not None:
        by = "Ctrl-C" if outcome.ended_by == signal.SIGINT else outcome.ended_by.name
        ended = f"Stopped by {by}"
    if outcome.episode_return is None:
        return f"{ended}, before an episode had ended."
    return f"{ended}: return {outcome.episode_return:.1f} (mean of the last episodes)."
