"""The settings of a run as a user writes them, and the checked ``RERPIConfig`` that they become."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rerpi_rllib import DDPGConfig, MPOConfig, RERPIConfig, SVG0Config, envs
from rerpi_rllib.algorithm.checkpoint import versions
from rerpi_rllib.algorithm.config import PRESETS
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
                supported.
            accepted: keys of ``config`` that may be without effect, since the user did not set them
                for this run.
        """
        config = self.merged_config()
        config._accepted_settings = {key: getattr(config, key) for key in accepted}
        # Validation fills in what depends on the machine, so it works on a copy: the run may take
        # place on another machine.
        config.copy(copy_frozen=False).validate()
        self._check_stop()
        if check_env:
            self._check_env(config)
        return config

    def merged_config(self) -> RERPIConfig:
        """Merge algorithm, preset and settings into a configuration whose values are not checked."""
        if self.algo not in ALGORITHMS:
            raise ValueError(
                f"Unknown algorithm {self.algo!r}.{did_you_mean(self.algo, ALGORITHMS)} "
                f"Allowed: {', '.join(ALGORITHMS)}."
            )
        if self.preset is not None and self.preset not in PRESETS:
            raise ValueError(
                f"Unknown preset {self.preset!r}.{did_you_mean(self.preset, PRESETS)} "
                f"Allowed: {', '.join(PRESETS)}."
            )
        config_class = ALGORITHMS[self.algo]
        config: RERPIConfig = getattr(config_class, self.preset)() if self.preset else config_class()
        known = {key for key in vars(config) if not key.startswith("_")}
        known.add("train_batch_size_per_learner")
        values = {}
        for key, value in self.config.items():
            if key not in known:
                raise ValueError(
                    f"Unknown setting {key!r}.{did_you_mean(key, known)} "
                    "The README lists the settings of RERPI; RLlib's own work too."
                )
            values[key] = parse_value(value) if isinstance(value, str) else value
        config.update_from_dict(values)
        config.environment(self.env)
        if self.seed is not None:
            config.debugging(seed=self.seed)
        return config

    def _check_stop(self) -> None:
        for key, value in self.stop.items():
            if key not in STOP_KEYS:
                raise ValueError(
                    f"Unknown stop key {key!r}.{did_you_mean(key, STOP_KEYS)} "
                    f"Allowed: {', '.join(STOP_KEYS)}."
                )
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"stop {key}={value!r} is not allowed: it must be a number.")

    def _check_env(self, config: RERPIConfig) -> None:
        env = envs.make(self.env, **config.env_config)
        try:
            check_spaces(env.observation_space, env.action_space, config.policy)
        except ValueError as error:
            raise ValueError(f"{self.env}: {error}") from None
        finally:
            env.close()


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
        tasks = given.get("env") or DEFAULT_ENV
        tasks = tasks if isinstance(tasks, list) else [tasks]
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
