"""Running a sweep with Ray Tune, or what is left of it after a crash.

Each trial's directory is that of a run: `rllib plot`, `evaluate`, `report`, `train --resume` take it.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from ray import tune
from ray.exceptions import RayError
from ray.tune import Callback, CheckpointConfig, TuneError
from ray.tune.experiment import Trial

from rerpi_rllib import RERPIConfig
from rerpi_rllib.runs.dashboard import where_to_watch
from rerpi_rllib.runs.errors import EndedBySignal, RunFailed, os_errors_fail_the_run
from rerpi_rllib.runs.files import named_directory, read_yaml, write_json
from rerpi_rllib.runs.machine import running_ray
from rerpi_rllib.runs.ownership import owned
from rerpi_rllib.runs.settings import RunSettings
from rerpi_rllib.runs.signals import EndSignals
from rerpi_rllib.runs.training import CheckpointByTime, StopRules, failure_reason
from rerpi_rllib.sweeps.display import SweepDisplay
from rerpi_rllib.sweeps.storage import whole_files
from rerpi_rllib.sweeps.sweep import Sweep, trial_name
from rerpi_rllib.sweeps.trial import SweepTrial
from rerpi_rllib.sweeps.tuning import check_tuning, make_scheduler, make_searcher

_MAX_FAILURES = 2


def sweep_directory(
    storage_path: Path,
    file_name: str,
    *,
    name: str | None = None,
    scheduler: str | None = None,
    search: str | None = None,
    smoke: bool = False,
) -> Path:
    """Return the directory of a sweep: the name that the user chose, or one that says what it is."""
    parts = [file_name, scheduler, search, "smoke" if smoke else None]
    return named_directory(storage_path, "-".join(filter(None, parts)) if name is None else name)


def num_trials(sweep: Sweep, search: str | None, num_samples: int) -> int:
    return num_samples if search else len(sweep.trials())


def check_failures(failed: Mapping[str, str], directory: Path) -> None:
    """Raise ``RunFailed`` if trials of a sweep have failed."""
    if failed:
        raise RunFailed(
            f"{len(failed)} of the sweep's trials failed: {', '.join(failed)}. Logs are in "
            f"{directory}; the same command tries them again."
        )


class _WriteSettings(Callback):
    """Saves the settings of each trial in its directory, which makes it the directory of a run."""

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        RunSettings(**trial.config["settings"]).save(Path(trial.path))


def run_sweep(
    sweep: Sweep,
    directory: Path,
    *,
    scheduler: str | None = None,
    search: str | None = None,
    num_samples: int = 20,
    command: str = "",
    quiet: bool = False,
    dashboard: bool = False,
    report: Callable[[str], None] = print,
    trainable: type[tune.Trainable] = SweepTrial,
    needs: RERPIConfig | None = None,
) -> dict[str, str]:
    """Run the trials that have not been run yet, as many at once as there are CPUs and GPUs for.

    Args:
        sweep: what to run; it has to be the same when a sweep is resumed.
        directory: the sweep's own directory. If it holds a part of the sweep, the rest is run, and
            the trials that failed are run again.
        scheduler: "asha" stops trials that lag behind, "pbt" replaces their settings by better ones.
        search: "optuna" draws settings between the grid's values instead of trying them all.
        num_samples: the number of trials of a search.
        command: what the user typed, for the report.
        quiet: whether to leave out the progress display.
        dashboard: whether to start Ray's dashboard, if Ray does not run yet.
        report: called with where to watch the sweep, unless ``quiet``.
        trainable: what a trial is, which takes its settings.
        needs: a configuration that Ray is started for; by default that of the first trial.

    Returns:
        The errors of the trials that failed in spite of several attempts, by the trials' names.
    """
    check_tuning(scheduler, search, num_samples)
    # Tune saves the state of a sweep once a trial has written as many checkpoints as are kept: with
    # one, as soon as a trial has ended. PBT copies checkpoints a little later than they are made.
    checkpoints_kept = 3 if scheduler == "pbt" else 1
    tuning = {
        "scheduler": scheduler,
        "search": search,
        "num_samples": num_samples if search else None,
    }
    by_name = sweep.trials()
    trials = list(by_name.values())
    if (scheduler or search) and len({settings.env for settings in trials}) > 1:
        raise ValueError("--scheduler and --search compare returns: they need one task (--env).")
    name_trial = partial(_directory_name, sweep.keys, bool(scheduler or search))
    tune_options = {
        "scheduler": make_scheduler(scheduler, sweep, trials[0].stop),
        "search_alg": make_searcher(search),
    }
    description = {
        **asdict(sweep),
        **tuning,
        "trials": {name: asdict(settings) for name, settings in by_name.items()},
    }
    if (directory / RunSettings.FILE_NAME).exists():
        raise ValueError(f"{directory} holds a run: choose another --name.")
    config = needs or trials[0].build_config(check_env=False, accepted=trials[0].config)
    with (
        owned(directory),
        EndSignals("ending the sweep; a second signal ends at once.", _interrupt) as signals,
    ):
        total = num_trials(sweep, search, num_samples)
        display = SweepDisplay(directory.name, total, trials[0].stop, quiet)
        try:
            resume = _claim_directory(directory, description, tuning, command)
            with running_ray(config, dashboard) as address, os_errors_fail_the_run():
                signals.install()
                if not quiet:
                    for line in where_to_watch(directory, address, wanted=dashboard):
                        report(line)
                analysis = tune.run(
                    trainable,
                    name=directory.name,
                    storage_path=str(directory.parent),
                    storage_filesystem=whole_files(),
                    config={
                        "metric": sweep.metric,
                        "settings": sweep.search_space()
                        if search
                        else tune.grid_search([asdict(settings) for settings in trials]),
                    },
                    metric="score",
                    mode="max",
                    num_samples=num_samples if search else 1,
                    stop=StopRules(trials[0].stop),
                    **tune_options,
                    callbacks=[CheckpointByTime(), _WriteSettings(), display],
                    checkpoint_config=CheckpointConfig(
                        checkpoint_at_end=True, num_to_keep=checkpoints_kept
                    ),
                    trial_name_creator=name_trial,
                    trial_dirname_creator=name_trial,
                    max_failures=_MAX_FAILURES,
                    raise_on_failed_trial=False,
                    resume="AUTO+ERRORED" if resume else None,
                    log_to_file=True,
                    verbose=0,
                )
                failed = [trial for trial in analysis.trials if trial.status == Trial.ERROR]
                return {Path(trial.path).name: failure_reason(trial) for trial in failed}
        except KeyboardInterrupt:
            if signals.received in (None, signal.SIGINT):
                raise
            raise EndedBySignal(signals.received) from None
        except (TuneError, RayError) as error:
            raise RunFailed(f"{error}. Its log is in {directory}.") from error
        finally:
            display.close()


def _interrupt(received: signal.Signals) -> None:
    """End a sweep; what it has done is on the disk, and the same command goes on with it."""
    raise KeyboardInterrupt  # While Ray waits, it lets no other exception through.


def _claim_directory(
    directory: Path, description: Mapping[str, Any], tuning: Iterable[str], command: str
) -> bool:
    """Save the sweep's description in its directory; return whether it holds trials of it already.

    Raises ``ValueError`` if the directory belongs to another sweep.
    """
    path = directory / Sweep.FILE_NAME
    wanted = json.loads(json.dumps(description))
    if path.is_file():
        saved = read_yaml(path)
        if not isinstance(saved, dict):
            raise ValueError(f"{path} is damaged: it does not describe a sweep.")
        # The trials include the settings of the base, whose file may have changed.
        if any(saved.get(key) != wanted[key] for key in ("trials", "metric", *tuning)):
            other = [key for key in wanted if saved.get(key) != wanted[key]]
            raise ValueError(f"{directory} has another sweep ({', '.join(other)}): choose a --name.")
    else:
        directory.mkdir(parents=True, exist_ok=True)
        write_json(path, {**wanted, "command": command})
    names = ", ".join(sorted(trial.name for trial in _finished(directory)))
    return _has_state(directory, names)


def _finished(directory: Path) -> list[Path]:
    """Return the trials of a sweep that have met their stopping rules, by what they have written."""
    return [
        path.parent
        for path in directory.glob(f"*/{RunSettings.FILE_NAME}")
        if _is_finished(path.parent)
    ]


def _is_finished(trial: Path) -> bool:
    try:
        stop = RunSettings.from_file(trial / RunSettings.FILE_NAME).stop
        result = json.loads((trial / "result.json").read_text().splitlines()[-1])
        is_stopped = StopRules(stop)(trial.name, result)
    except (OSError, ValueError, LookupError, TypeError):
        return False  # Nothing has been written yet, or not all of it.
    return is_stopped and any(trial.glob("checkpoint_*"))


def _has_state(directory: Path, finished: str) -> bool:
    """Tell whether a directory holds the state of a sweep, and bring it up to date.

    Raises ``ValueError`` if it is damaged, or if there is none for the trials that have finished:
    Tune would run them again.

    Args:
        directory: the directory of the sweep.
        finished: the names of the trials that have finished.
    """
    # Tune itself takes the last one, too: the names end with the time.
    paths = sorted(directory.glob("experiment_state-*.json"))
    if not paths:
        if finished:
            raise ValueError(
                f"{directory} holds finished trials ({finished}) and no experiment_state-*.json that "
                "says so: they would be run again. Choose another --name."
            )
        return False
    try:
        state = json.loads(paths[-1].read_text())
        # A process that is killed may have finished a trial since it last wrote the state.
        trials = [_up_to_date(directory, *trial) for trial in state["trial_data"]]
    except (ValueError, LookupError, TypeError) as error:
        without = (
            f"the finished trials ({finished}) would be run again. Choose another --name"
            if finished
            else "everything would be run again. Choose another --name, or delete the file"
        )
        raise ValueError(f"{paths[-1]} is damaged ({error}): without it, {without}.") from error
    if trials != state["trial_data"]:
        write_json(paths[-1], {**state, "trial_data": trials})
    return True


def _up_to_date(directory: Path, text: str, metadata: str) -> list[str]:
    """Return Tune's state of a trial, which is TERMINATED if the trial has finished."""
    trial = json.loads(text)
    if trial["status"] != Trial.TERMINATED and _is_finished(directory / trial["relative_logdir"]):
        text = json.dumps({**trial, "status": Trial.TERMINATED})
    return [text, metadata]


def _directory_name(keys: Sequence[str], add_id: bool, trial: Trial) -> str:
    """Name a trial and its directory as Tune asks for it."""
    name = trial_name(RunSettings(**trial.config["settings"]), keys)
    # A search may draw the same values twice, and PBT changes them.
    return f"{name}_{trial.trial_id}" if add_id else name
