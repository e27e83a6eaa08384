"""What `rllib train` is to do: a file, options on top of it, or a run that is resumed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rerpi_rllib import RERPIConfig
from rerpi_rllib.runs.checkpoints import (
    Report,
    check_resumable,
    check_trusted,
    holds_replay,
    newest_checkpoint,
    run_of_checkpoint,
)
from rerpi_rllib.runs.files import named_directory
from rerpi_rllib.runs.ownership import refuse_owned
from rerpi_rllib.runs.settings import DEFAULT_ENV, Configuration, RunSettings


@dataclass(frozen=True)
class Options:
    """What the user typed on the command line; None where an option was left out."""

    algo: str | None = None
    env: str | None = None
    preset: str | None = None
    seed: int | None = None
    stop: Mapping[str, float] | None = None
    config: Mapping[str, Any] | None = None
    api_stack: str | None = None
    num_env_runners: int | None = None
    num_learners: int | None = None
    num_gpus: float | None = None
    checkpoint_replay: bool | None = None
    env_timeout: float | None = None

    def apply_to(self, settings: RunSettings) -> RunSettings:
        """Return the settings with these options on top; an option wins over a setting."""
        return replace(
            settings,
            algo=settings.algo if self.algo is None else self.algo,
            env=settings.env if self.env is None else self.env,
            preset=settings.preset if self.preset is None else self.preset,
            seed=self.seed if self.seed is not None else settings.seed,
            stop=dict(self.stop) if self.stop is not None else settings.stop,
            config={**settings.config, **(self.config or {}), **self._own_settings()},
        )

    def _own_settings(self) -> dict[str, Any]:
        """Return the settings of the algorithm that have an option of their own."""
        if self.api_stack not in (None, "new", "old"):
            raise ValueError(f"--api-stack {self.api_stack!r} is not allowed: it must be new or old.")
        new_stack = None if self.api_stack is None else self.api_stack == "new"
        settings = {
            "enable_rl_module_and_learner": new_stack,
            "enable_env_runner_and_connector_v2": new_stack,
            "num_env_runners": self.num_env_runners,
            "num_learners": self.num_learners,
            "num_gpus_per_learner": self.num_gpus,
            "checkpoint_replay": self.checkpoint_replay,
            "env_timeout_s": self.env_timeout,
        }
        return {key: value for key, value in settings.items() if value is not None}


@dataclass(frozen=True)
class PlannedRun:
    """A run whose settings have been checked and that can start.

    Args:
        settings: what was asked for.
        config: the configuration that ``settings`` gave.
        directory: the run's own directory.
        checkpoint: the checkpoint that the run resumes from, if it does.
    """

    settings: RunSettings
    config: RERPIConfig
    directory: Path
    checkpoint: Path | None = None


def plan_run(
    options: Options,
    *,
    file: str | None = None,
    resume: Path | None = None,
    storage_path: Path = Path("runs"),
    name: str | None = None,
    trust: bool = False,
    report: Report = print,
) -> PlannedRun:
    """Merge a file or the settings of a resumed run with the options, and check the result.

    Args:
        options: what the user typed; it wins over the file and over the resumed run.
        file: the path of a configuration, or the name of one in ``configs/``.
        resume: the directory of a run, or a checkpoint, to go on from.
        storage_path: where the directories of new runs are.
        name: the name of a new run's directory; by default one with algorithm, task and time.
        trust: whether to resume a run that somebody else may have written.
        report: called with what the user should know about choices made on the user's behalf.
    """
    if file is not None and resume is not None:
        raise ValueError("--resume goes on with the run's own settings: leave 'file FILE' out.")
    if trust and resume is None:
        raise ValueError("--trust is for --resume DIR: leave it out.")
    if resume is not None:
        checkpoint = newest_checkpoint(resume, report=report)
        if not trust:
            check_trusted(checkpoint)
        directory = run_of_checkpoint(checkpoint)
        refuse_owned(directory)
        before = RunSettings.from_file(directory / RunSettings.FILE_NAME)
        settings = options.apply_to(before)
        config = settings.build_config(accepted=before.config.keys() - (options.config or {}).keys())
        check_resumable(checkpoint, config)
        if not holds_replay(checkpoint):
            report(
                f"{checkpoint.name} holds no replay: learning goes on after "
                f"{config.num_steps_sampled_before_learning_starts} new steps."
            )
        return PlannedRun(settings, config, directory, checkpoint)
    settings = options.apply_to(_new_settings(options, file, report))
    config = settings.build_config()
    directory = _new_directory(settings, storage_path, name)
    return PlannedRun(settings, config, directory)


def _new_settings(options: Options, file: str | None, report: Report) -> RunSettings:
    if file is not None:
        configuration = Configuration.from_name(file)
        if options.env is None and len(configuration.tasks) > 1:
            report(
                f"{file} is for {len(configuration.tasks)} tasks: "
                f"training on {configuration.run.env} (--env)."
            )
        return configuration.run
    if options.algo is None:
        raise ValueError("Say what to train: --algo RERPI, file FILE or --resume DIR.")
    if options.env is None:
        report(f"No --env given: training on {DEFAULT_ENV}.")
    return RunSettings()


def _new_directory(settings: RunSettings, storage_path: Path, name: str | None) -> Path:
    """Return the directory of a new run; refuse one that is in use for something else."""
    if name is None:
        task = settings.env.split("/")[-1].replace(":", "-")
        name = f"{settings.algo}_{task}_{time.strftime('%Y%m%d-%H%M%S')}"
    directory = named_directory(storage_path, name)
    refuse_owned(directory)
    refuse_used(directory)
    return directory


def refuse_used(directory: Path) -> None:
    """Raise ``ValueError`` if a new run would write into what an earlier one left."""
    results = directory.glob("part-*/result.json")
    if any(directory.glob("part-*/checkpoint_*")) or any(path.stat().st_size for path in results):
        raise ValueError(f"{directory} holds a run already: --resume it, or choose a --name.")
    if (directory / "sweep.json").exists():
        raise ValueError(f"{directory} holds a sweep: choose another --name.")
