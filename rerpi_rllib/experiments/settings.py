"""From words and numbers a user typed to a checked ``RERPIConfig`` and stopping rule."""

from __future__ import annotations

import ast
import difflib
import json
import os
import platform
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    EPISODE_RETURN_MEAN,
    EVALUATION_RESULTS,
    LEARNER_RESULTS,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
)

from rerpi_rllib import DDPGConfig, MPOConfig, RERPIConfig, SVG0Config, envs
from rerpi_rllib.algorithm.rerpi import NUM_UPDATES_LIFETIME
from rerpi_rllib.algorithm.spaces import check_spaces

ALGORITHMS: dict[str, type[RERPIConfig]] = {
    "RERPI": RERPIConfig,
    "MPO": MPOConfig,
    "SVG0": SVG0Config,
    "DDPG": DDPGConfig,
}
PRESETS = ("compact",)
DEFAULT_ENV = "dm_control/cartpole-swingup-v0"
VERSIONS_FILE = "versions.json"
_PACKAGE = Path(__file__).resolve().parents[1]
_HOME = _PACKAGE if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent  # Installed, or a clone.
CONFIGS = _HOME / "configs"


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def env_steps(result: Mapping[str, Any]) -> int:
    return int(result.get(NUM_ENV_STEPS_SAMPLED_LIFETIME) or 0)


def updates(result: Mapping[str, Any]) -> int:
    return int(result.get(NUM_UPDATES_LIFETIME) or 0)


def episode_return(result: Mapping[str, Any]) -> float:
    """Mean return of the last episodes; NaN before the first one has ended."""
    return float(result.get(ENV_RUNNER_RESULTS, {}).get(EPISODE_RETURN_MEAN, float("nan")))


def greedy_return(result: Mapping[str, Any]) -> float:
    """Mean return of an evaluation; NaN where there was none."""
    return episode_return(result.get(EVALUATION_RESULTS) or {})


def learner_metrics(result: Mapping[str, Any]) -> Mapping[str, float]:
    return result.get(LEARNER_RESULTS, {}).get(DEFAULT_MODULE_ID, {})


# What `--stop` may name, and where a result holds it.
STOP_KEYS = {
    "env_steps": env_steps,
    "updates": updates,
    "iterations": lambda result: result["training_iteration"],
    "time_s": lambda result: result["time_total_s"],
    "return": episode_return,
}


@dataclass
class RunSettings:
    """One training run as the user asked for it; written beside its results as ``run.json``."""

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
        """The run that a file describes; if it lists several tasks, on the first."""
        return Configuration.from_file(path).run

    def save(self, directory: Path) -> None:
        """Write ``run.json``, and beside it with which versions the run is made."""
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / self.FILE_NAME, asdict(self))
        write_json(directory / VERSIONS_FILE, _versions())

    def flat(self) -> dict[str, Any]:
        """What was asked for, but for task and seed, by one name each."""
        stop = {f"stop {key}": value for key, value in self.stop.items()}
        return {"algo": self.algo, "preset": self.preset, **self.config, **stop}

    def command(self) -> str:
        """What to type to repeat the run."""
        words = ["rllib", "train", "--algo", self.algo, "--env", self.env]
        if self.preset is not None:
            words += ["--preset", self.preset]
        if self.seed is not None:
            words += ["--seed", str(self.seed)]
        for option, value in (("--config", self.config), ("--stop", self.stop)):
            if value:
                words += [option, json.dumps(value)]
        return shlex.join(words)

    def build_config(self, check_env: bool = True) -> RERPIConfig:
        """The algorithm's configuration, checked; raises ``ValueError`` on anything wrong.

        Args:
            check_env: also build the environment, to see whether its spaces are supported.
        """
        if self.algo not in ALGORITHMS:
            raise ValueError(
                f"Unknown algorithm {self.algo!r}.{_nearest(self.algo, ALGORITHMS)} "
                f"Allowed: {', '.join(ALGORITHMS)}."
            )
        if self.preset is not None and self.preset not in PRESETS:
            raise ValueError(
                f"Unknown preset {self.preset!r}.{_nearest(self.preset, PRESETS)} "
                f"Allowed: {', '.join(PRESETS)}."
            )
        config_class = ALGORITHMS[self.algo]
        config = config_class.compact() if self.preset == "compact" else config_class()
        known = {key for key in vars(config) if not key.startswith("_")}
        known.add("train_batch_size_per_learner")
        values = {}
        for key, value in self.config.items():
            if key not in known:
                raise ValueError(
                    f"Unknown setting {key!r}.{_nearest(key, known)} "
                    "The README lists the settings of RERPI; RLlib's own work too."
                )
            values[key] = parse_value(value) if isinstance(value, str) else value
        config.update_from_dict(values)
        config.environment(self.env)
        if self.seed is not None:
            config.debugging(seed=self.seed)
        # On a copy: what validation fills in from the machine is decided where the run takes place.
        config.copy(copy_frozen=False).validate()
        self._check_stop()
        if check_env:
            self._check_env(config)
        return config

    def _check_stop(self) -> None:
        for key, value in self.stop.items():
            if key not in STOP_KEYS:
                raise ValueError(
                    f"Unknown stop key {key!r}.{_nearest(key, STOP_KEYS)} "
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
    """A file of ``configs/``: what a run needs, for one task or for a group of them."""

    run: RunSettings
    tasks: list[str]
    description: str

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


def find_file(name: str, directory: Path) -> Path:
    """A file by its path, or one of ours by its name."""
    path = directory / f"{name}.yaml"
    if path.is_file():
        return path
    if Path(name).is_file():
        return Path(name)
    known = [path.stem for path in sorted(directory.glob("*.yaml"))]
    raise ValueError(
        f"There is no file {name!r} and no {directory.name}/{name}.yaml.{_nearest(name, known)} "
        f"Allowed: {', '.join(known)}."
    )


def check_keys(
    given: Any, settings: type, source: str, mappings: Sequence[str] = ()
) -> dict[str, Any]:
    """What was given for a dataclass of settings, without what was left empty."""
    if not isinstance(given, dict):
        raise ValueError(f"{source} must be a mapping of settings, not {type(given).__name__}.")
    known = [field.name for field in fields(settings)]
    for key in given:
        if key not in known:
            raise ValueError(
                f"Unknown key {key!r} in {source}.{_nearest(str(key), known)} "
                f"Allowed: {', '.join(sorted(known))}."
            )
    given = {key: value for key, value in given.items() if value is not None}
    for key in mappings:
        if not isinstance(given.get(key, {}), dict):
            raise ValueError(f"{key} in {source} must be a mapping, not {given[key]!r}.")
    return given


def read_yaml(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"There is no file {str(path)!r}.")
    if path.suffix == ".json":  # YAML takes 1e-05 for a word.
        return json.loads(path.read_text())
    try:
        return yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _versions() -> dict[str, str]:
    packages = ("rerpi-rllib", "ray", "torch", "gymnasium", "dm_control", "mujoco", "numpy")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
        "system": platform.platform(),
        "cpus": str(os.cpu_count()),
        "gpu": device,
    }


def parse_value(text: str) -> Any:
    """``1e-3``, ``[200, 200]``, ``true``, ``None`` as what they mean; all else as a string."""
    words = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def parse_assignment(text: str) -> tuple[str, Any]:
    """``key=value`` of the command line's ``--set``."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"--set {text!r} is not allowed: it must be key=value.")
    return key, parse_value(value)


def parse_json_object(text: str, option: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{option} is not valid JSON ({error}): {text!r}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{option} must be a JSON object like '{{\"key\": value}}', not {text!r}.")
    return value
