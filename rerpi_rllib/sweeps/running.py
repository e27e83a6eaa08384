"""Running a sweep with Ray Tune, or what is left of it after a crash.

Each trial's directory is that of a run: `rllib plot`, `evaluate`, `report`, `train --resume` take it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune import Callback, CheckpointConfig, TuneError
from ray.tune.experiment import Trial

from rerpi_rllib.runs.errors import RunFailed
from rerpi_rllib.runs.files import write_json
from rerpi_rllib.runs.machine import running_ray
from rerpi_rllib.runs.settings import RunSettings
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
    return (storage_path / (name or "-".join(filter(None, parts)))).expanduser().resolve()


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
    tune_options = {
        "scheduler": make_scheduler(scheduler, sweep, trials[0].stop),
        "search_alg": make_searcher(search),
    }
    description = {
        **asdict(sweep),
        **tuning,
        "trials": {name: asdict(settings) for name, settings in by_name.items()},
    }
    resume = _claim_directory(directory, description, tuning, command)
    total = num_trials(sweep, search, num_samples)
    display = SweepDisplay(directory.name, total, trials[0].stop, quiet)
    try:
        with running_ray(trials[0].build_config(check_env=False, accepted=trials[0].config)):
            analysis = tune.run(
                SweepTrial,
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
                trial_dirname_creator=partial(
                    _directory_name, list(sweep.grid), bool(scheduler or search)
                ),
                max_failures=_MAX_FAILURES,
                raise_on_failed_trial=False,
                resume="AUTO+ERRORED" if resume else None,
                log_to_file=True,
                verbose=0,
            )
    except TuneError as error:
        raise RunFailed(f"{error}. Its log is in {directory}.") from error
    finally:
        display.close()
    failed = [trial for trial in analysis.trials if trial.status == Trial.ERROR]
    return {Path(trial.path).name: failure_reason(trial) for trial in failed}


def _claim_directory(
    directory: Path, description: Mapping[str, Any], tuning: Iterable[str], command: str
) -> bool:
    """Save the sweep's description in its directory; return whether it holds trials of it already.

    Raises ``ValueError`` if the directory belongs to another sweep.
    """
    path = directory / Sweep.FILE_NAME
    wanted = json.loads(json.dumps(description))
    if path.is_file():
        saved = json.loads(path.read_text())
        # The trials include the settings of the base, whose file may have changed.
        if any(saved.get(key) != wanted[key] for key in ("trials", "metric", *tuning)):
            other = [key for key in wanted if saved.get(key) != wanted[key]]
            raise ValueError(f"{directory} has another sweep ({', '.join(other)}): choose a --name.")
    else:
        directory.mkdir(parents=True, exist_ok=True)
        write_json(path, {**wanted, "command": command})
    return _has_state(directory)


def _has_state(directory: Path) -> bool:
    """Tell whether a directory holds the state of a sweep; raise ``ValueError`` if it is damaged.

    Tune would take a damaged state for none, and run finished trials again.
    """
    # Tune itself takes the last one, too: the names end with the time.
    for path in sorted(directory.glob("experiment_state-*.json"))[-1:]:
        try:
            json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(
                f"{path} is damaged ({error}): without it, finished trials would be run again. "
                "Choose another --name; or delete the file to run what an older one leaves to do, or "
                "everything if there is none."
            ) from error
        return True
    return False


def _directory_name(grid: Sequence[str], add_id: bool, trial: Trial) -> str:
    """Name the directory of a trial as Tune asks for it."""
    name = trial_name(RunSettings(**trial.config["settings"]), grid)
    # A search may draw the same values twice, and PBT changes them.
    return f"{name}_{trial.trial_id}" if add_id else name
