"""The settings of a run as a user writes them, and the checked ``RERPIConfig`` that they become."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ray.rllib.algorithms.algorithm_config import DEPRECATED_VALUE

from rerpi_rllib import DDPGConfig, MPOConfig, RERPIConfig, SVG0Config, envs
from rerpi_rllib.algorithm import checks
from rerpi_rllib.algorithm.checkpoint import versions
from rerpi_rllib.algorithm.config import PRESETS, setting_checks
from rerpi_rllib.algorithm.networks import streams_of
from rerpi_rllib.algorithm.spaces import check_spaces
from rerpi_rllib.runs.files import (
    CONFIGS,
    check_keys,
    did_you_mean,
    find_file,
    parse_value,
    read_yaml,
    write_json,
)
from rerpi_rllib.runs.machine import check_machine
from rerpi_rllib.runs.results import STOP_KEYS

ALGORITHMS: dict[str, type[RERPIConfig]] = {
    "RERPI": RERPIConfig,
    "MPO": MPOConfig,
    "SVG0": SVG0Config,
    "DDPG": DDPGConfig,
}
DEFAULT_ENV = "dm_control/cartpole-swingup-v0"
VERSIONS_FILE = "versions.json"


@dataclass
class RunSettings:
    """One training run as the user asked for it; saved beside its results as ``run.json``."""

    algo: str = "RERPI"
    env: str = DEFAULT_ENV
    preset: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    stop: dict[str, float] = field(default_factory=dict)
    seed: int | None = None

    FILE_NAME = "run.json"

    @classmethod
    def from_mapping(cls, given: Any, source: str) -> RunSettings:
        return cls(**check_keys(given, cls, source, mappings=("config", "stop")))

    @classmethod
    def from_file(cls, path: Path) -> RunSettings:
        """Read the run that a file describes, on the first task if the file lists several."""
        return Configuration.from_file(path).run

    def save(self, directory: Path) -> None:
        """Write ``run.json``, and beside it the versions of the packages that make the run."""
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / self.FILE_NAME, asdict(self))
        write_json(directory / VERSIONS_FILE, versions())

    def flat(self) -> dict[str, Any]:
        """Return all that was asked for except task and seed, as one flat mapping."""
        stop = {f"stop {key}": value for key, value in self.stop.items()}
        return {"algo": self.algo, "preset": self.preset, **self.config, **stop}

    def command(self) -> str:
        """Return the command that repeats the run."""
        words = ["rllib", "train", "--algo", self.algo, "--env", self.env]
        if self.preset is not None:
            words += ["--preset", self.preset]
        if self.seed is not None:
            words += ["--seed", str(self.seed)]
        for option, value in (("--config", self.config), ("--stop", self.stop)):
            if value:
                words += [option, json.dumps(value)]
        return shlex.join(words)

    def build_config(self, check_env: bool = True, accepted: Iterable[str] = ()) -> RERPIConfig:
        """Build and check the algorithm's configuration; raise ``ValueError`` if anything is wrong.

        Args:
            check_env: whether to build the environment too, and to check that its spaces are
                supported and that this machine has the memory and the GPUs for the run.
            accepted: keys of ``config`` that may be without effect, since the user did not set them
                for this run.
        """
        self._check_run()
        self._check_types(self.config)
        config = self.merged_config()
        config._accepted_settings = {key: getattr(config, key) for key in accepted}
        # Validation fills in what depends on the machine, so it works on a copy: the run may take
        # place on another machine.
        config.copy(copy_frozen=False).validate()
        if check_env:
            self._check_env(config)
        return config

    def merged_config(self) -> RERPIConfig:
        """Merge algorithm, preset and settings into a configuration whose values are not checked."""
        config = self._starting_config()
        known = _known_settings(config)
        values = {}
        for key, value in self.config.items():
            if key not in known:
                raise ValueError(
                    f"Unknown setting {key!r}.{did_you_mean(str(key), known)} "
                    "The README lists the settings of RERPI; RLlib's own work too."
                )
            values[key] = _parsed(value)
        config.update_from_dict(values)
        config.environment(self.env)
        if self.seed is not None:
            config.debugging(seed=self.seed)
        return config

    def _starting_config(self) -> RERPIConfig:
        """Return the configuration of the algorithm and its preset."""
        for what, value, allowed in (
            ("algorithm", self.algo, ALGORITHMS),
            ("preset", self.preset, PRESETS),
        ):
            if value not in allowed and not (what == "preset" and value is None):
                raise ValueError(
                    f"Unknown {what} {value!r}.{did_you_mean(str(value), allowed)} "
                    f"Allowed: {', '.join(allowed)}."
                )
        config_class = ALGORITHMS[self.algo]
        config: RERPIConfig = getattr(config_class, self.preset)() if self.preset else config_class()
        return config

    def _check_run(self) -> None:
        """Check what is not a setting of the algorithm."""
        texts = {"algo": self.algo, "env": self.env, "preset": self.preset}
        for key, value in texts.items():
            if not isinstance(value, str) and not (key == "preset" and value is None):
                raise ValueError(f"{key}={value!r} is not allowed: it must be a name.")
        check = checks.check_of(checks.Seed)
        if not check.holds(self.seed):
            raise ValueError(f"seed={self.seed!r} is not allowed: it must be {check.allowed}.")
        check_stop(self.stop)

    def _check_types(self, given: Mapping[str, Any]) -> None:
        """Check the values' types: RLlib accepts any, and fails where it uses them."""
        default = self._starting_config()
        own = setting_checks()
        for key in given.keys() & _known_settings(default):
            value = _parsed(given[key])
            stored = getattr(default, key)
            check = own.get(key) or checks.like(stored)
            if stored == DEPRECATED_VALUE and value != stored:
                raise ValueError(f"{key}={value!r} is not allowed: RLlib has dropped this setting.")
            if not check.holds(value):
                raise ValueError(f"{key}={value!r} is not allowed: it must be {check.allowed}.")
            if key == "evaluation_config" and value:
                if unknown := value.keys() - _known_settings(default):
                    raise ValueError(f"Unknown setting {min(unknown)!r} in evaluation_config.")
                self._check_types(value)

    def _check_env(self, config: RERPIConfig) -> None:
        env = envs.make(self.env, **config.env_config)
        spaces = env.observation_space, env.action_space
        env.close()
        try:
            check_spaces(*spaces, config.policy)
            streams_of(spaces[0], config.model_config)
        except ValueError as error:
            raise ValueError(f"{self.env}: {error}") from None
        check_machine(config, *spaces)


def _known_settings(config: RERPIConfig) -> set[str]:
    """Return the names that a file or an option may set."""
    known = {key for key in vars(config) if not key.startswith("_")}
    return known | {"train_batch_size_per_learner"}


def _parsed(value: Any) -> Any:
    return parse_value(value) if isinstance(value, str) else value


def check_stop(stop: Mapping[str, float]) -> None:
    """Raise ``ValueError`` if a rule of ``--stop`` is unknown or cannot be met."""
    for key, value in stop.items():
        if key not in STOP_KEYS:
            raise ValueError(
                f"Unknown stop key {key!r}.{did_you_mean(str(key), STOP_KEYS)} "
                f"Allowed: {', '.join(STOP_KEYS)}."
            )
        is_return = key == "return"
        if not checks.is_number(value) or not abs(value) <= checks.LARGEST:
            raise ValueError(f"stop {key}={value!r} is not allowed: it must be a finite number.")
        if value <= 0 and not is_return:
            raise ValueError(f"stop {key}={value!r} is not allowed: it must be above 0.")


@dataclass
class Configuration:
    """A file of ``configs/``: the settings of a run, for one task or for a group of tasks."""

    run: RunSettings
    tasks: list[str]
    description: str

    @classmethod
    def from_name(cls, name: str) -> Configuration:
        """Read a file by its path, or one of ``configs/`` by its name."""
        return cls.from_file(find_file(name, CONFIGS))

    @classmethod
    def from_file(cls, path: Path) -> Configuration:
        given = read_yaml(path)
        if not isinstance(given, dict):
            raise ValueError(f"{path} must be a mapping of settings, not {type(given).__name__}.")
        description = str(given.pop("description", ""))
        tasks = given.get("env")
        tasks = DEFAULT_ENV if tasks is None else tasks
        tasks = tasks if isinstance(tasks, list) else [tasks]
        if not tasks or not all(isinstance(task, str) for task in tasks):
            raise ValueError(f"env={given['env']!r} in {path} must be a task or a list of tasks.")
        run = RunSettings.from_mapping({**given, "env": tasks[0]}, str(path))
        return cls(run, tasks, description or f"{run.algo} on {run.env}")


def describe_configurations() -> list[str]:
    """Return one line about each file of ``configs/``."""
    paths = sorted(CONFIGS.glob("*.yaml"))
    return [f"configs/{path.name}: {Configuration.from_file(path).description}" for path in paths]


def short_task_name(env: str) -> str:
    """Shorten an environment's id for labels and directories: "cheetah-run"."""
    return env.removeprefix("dm_control/").removesuffix("-v0")


def format_value(value: Any) -> str:
    """Format a setting's value for labels and directories."""
    return f"{value:g}" if isinstance(value, float) else str(value)
