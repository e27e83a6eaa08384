"""What a sweep is: a base configuration, a grid of settings, tasks and seeds."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ray import tune

from rerpi_rllib.runs.files import SWEEPS, check_keys, find_file, parse_value, read_yaml
from rerpi_rllib.runs.machine import is_machine_without_gpu
from rerpi_rllib.runs.settings import Configuration, RunSettings, format_value, short_task_name
from rerpi_rllib.sweeps.trial import METRICS

# Keys of a grid that belong to the run and not to the algorithm's configuration.
RUN_KEYS = ("algo", "preset")
_MAX_TRIALS = 10_000
# The settings with which `--smoke` runs every variant for a moment.
_SMOKE = {
    "policy_layers": [16, 16],
    "critic_layers": [16, 16],
    "train_batch_size": 32,
    "replay_capacity": 10_000,
    "num_steps_sampled_before_learning_starts": 200,
    "updates_per_env_step": 0.2,
    "num_env_runners": 0,
    "evaluation_interval": 1,
    "evaluation_duration": 1,
    "evaluation_num_env_runners": 0,
    "evaluation_parallel_to_training": False,
    "min_sample_timesteps_per_iteration": 500,
}


@dataclass
class Sweep:
    """A file of ``tune_sweeps/``.

    Args:
        base: the configuration that all trials start from, by its name in ``configs/`` or its path.
        grid: values of settings (or of ``algo`` and ``preset``); every combination is a variant.
        also: further variants, such as ``{algo: SVG0}``, each with its values alone.
        env: the tasks; by default those of the base.
        config: settings that differ from the base in all trials.
        seeds: runs of each variant and task.
        stop: when a run ends; by default as in the base.
        metric: what counts, "greedy_return" or "return".
        cpu: what is different on a machine without a GPU.
    """

    base: str
    grid: dict[str, list[Any]] = field(default_factory=dict)
    also: list[dict[str, Any]] = field(default_factory=list)
    description: str = ""
    env: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    seeds: int = 5
    stop: dict[str, float] = field(default_factory=dict)
    metric: str = "greedy_return"
    cpu: dict[str, Any] = field(default_factory=dict)

    FILE_NAME = "sweep.json"

    @classmethod
    def from_directory(cls, directory: Path) -> Sweep:
        """Read the sweep that a directory holds the trials of."""
        path = directory / cls.FILE_NAME
        saved = read_yaml(path)
        names = {field.name for field in fields(cls)}
        # Sweeps of earlier versions have no further variants.
        if not isinstance(saved, dict) or not names - {"also"} <= saved.keys():
            raise ValueError(f"{path} is damaged: it does not describe a sweep.")
        return cls(**{name: saved[name] for name in names & saved.keys()})

    @classmethod
    def from_file(cls, path: Path, on_cpu: bool) -> Sweep:
        """Read a sweep; ``on_cpu`` applies the file's part for machines without a GPU."""
        mappings = ("grid", "config", "stop", "cpu")
        given = check_keys(read_yaml(path), cls, str(path), mappings)
        if on_cpu:
            given |= check_keys(given.get("cpu", {}), cls, f"cpu in {path}", mappings)
        given.pop("cpu", None)
        if not isinstance(given.get("base"), str):
            raise ValueError(f"base={given.get('base')!r} in {path} must name a configuration.")
        env = given.get("env", [])
        given["env"] = env if isinstance(env, list) else [env]
        if not all(isinstance(task, str) and task for task in given["env"]):
            raise ValueError(f"env={env!r} in {path} must be a task or a list of tasks.")
        sweep = cls(**given)
        for key, values in sweep.grid.items():
            if not isinstance(values, list) or not values:
                raise ValueError(f"grid {key}={values!r} in {path} must be a list of values.")
            sweep.grid[key] = [_parsed(value) for value in values]
        if not isinstance(sweep.also, list) or not all(isinstance(v, dict) and v for v in sweep.also):
            raise ValueError(f"also={sweep.also!r} in {path} must be a list of mappings of settings.")
        sweep.also = [{key: _parsed(value) for key, value in v.items()} for v in sweep.also]
        sweep.stop = {key: _parsed(value) for key, value in sweep.stop.items()}
        return sweep

    def check(self) -> None:
        """Raise ``ValueError`` if anything is wrong, before the first trial starts."""
        if not isinstance(self.metric, str) or self.metric not in METRICS:
            raise ValueError(
                f"metric={self.metric!r} is not allowed: it must be {' or '.join(METRICS)}."
            )
        if not isinstance(self.seeds, int) or not 1 <= self.seeds <= _MAX_TRIALS:
            raise ValueError(
                f"seeds={self.seeds!r} is not allowed: it must be a whole number from 1 to "
                f"{_MAX_TRIALS:,}."
            )
        tasks = len(self.env) or len(self._base().tasks)
        number = math.prod(map(len, self.grid.values())) + len(self.also)
        number *= self.seeds * tasks
        if number > _MAX_TRIALS:
            raise ValueError(
                f"The sweep has {number:,} trials, and at most {_MAX_TRIALS:,} can be run."
            )
        tasks_seen, variants = set(), set()
        unused = {key: ValueError() for key in self.config}
        for settings in self.trials().values():
            variant = repr(settings.flat())
            if settings.env in tasks_seen and variant in variants:
                continue
            common = settings.config.keys() - set(self.keys)
            config = settings.build_config(accepted=common)
            # A setting of all trials has to take effect in one of them.
            unused = {key: error for key in unused if (error := self._refusal(settings, key))}
            tasks_seen.add(settings.env)
            variants.add(variant)
            if not set(settings.stop) - {"return"}:
                raise ValueError(
                    f"stop={settings.stop} may never be met: name env_steps, updates or time_s."
                )
            if self.metric == "greedy_return" and not config.evaluation_interval:
                raise ValueError("metric='greedy_return' needs evaluation_interval in the settings.")
        for error in unused.values():
            raise error

    def _refusal(self, settings: RunSettings, key: str) -> ValueError | None:
        """Return the error that a setting of all trials causes in one of them, if it does."""
        try:
            settings.build_config(check_env=False, accepted=settings.config.keys() - {key})
        except ValueError as error:
            return error
        return None

    def shortened(self) -> Sweep:
        """Return the sweep on one task, with two seeds and tiny networks, for a minute or two."""
        return replace(
            self,
            env=self.env[:1] or self._base().tasks[:1],
            config={**self.config, **_SMOKE},
            seeds=min(2, self.seeds),
            stop={"env_steps": 1000},
        )

    def _base(self) -> Configuration:
        return Configuration.from_name(self.base)

    def trials(self) -> dict[str, RunSettings]:
        """Return the settings of all runs by the names of their directories."""
        base = self._base()
        trials: dict[str, RunSettings] = {}
        for env in self.env or base.tasks:
            for variant in self.variants():
                for seed in range(self.seeds):
                    settings = self._settings(base.run, env, variant, seed)
                    name = trial_name(settings, self.keys)
                    if name in trials:
                        raise ValueError(f"Two trials of the grid {self.grid} are called {name!r}.")
                    trials[name] = settings
        return trials

    @property
    def keys(self) -> list[str]:
        """The settings in which variants differ."""
        return list(dict.fromkeys(itertools.chain(self.grid, *self.also)))

    def variants(self) -> list[dict[str, Any]]:
        """Return every combination of the grid's values, and the variants beside them."""
        combinations = itertools.product(*self.grid.values())
        return [*(dict(zip(self.grid, values)) for values in combinations), *self.also]

    def _settings(
        self, base: RunSettings, env: str, variant: Mapping[str, Any], seed: int | None
    ) -> RunSettings:
        return replace(
            base,
            env=env,
            seed=seed,
            stop=self.stop or base.stop,
            **{key: variant[key] for key in RUN_KEYS if key in variant},
            config={
                **base.config,
                **self.config,
                **{key: value for key, value in variant.items() if key not in RUN_KEYS},
            },
        )

    def search_space(self) -> dict[str, Any]:
        """Return the settings of one trial, with distributions in the place of the grid's values."""
        base = self._base()
        drawn = {key: value_range(values) or tune.choice(values) for key, values in self.grid.items()}
        env = (self.env or base.tasks)[0]
        return asdict(self._settings(base.run, env, drawn, seed=0))


def load(
    name: str,
    *,
    on_cpu: bool | None = None,
    smoke: bool = False,
    env: Sequence[str] | None = None,
    seeds: int | None = None,
    config: Mapping[str, Any] | None = None,
    stop: Mapping[str, float] | None = None,
) -> tuple[Sweep, str]:
    """Read a sweep by its name or path, apply the user's changes to it, and check it.

    Args:
        on_cpu: whether to take the file's variant for CPUs; by default if there is no GPU.
        smoke: whether to shorten it, to see if it runs.

    Returns:
        The sweep, and the name of its file without the suffix.
    """
    path = find_file(name, SWEEPS)
    sweep = Sweep.from_file(path, is_machine_without_gpu() if on_cpu is None else on_cpu)
    if smoke:
        sweep = sweep.shortened()
    sweep = replace(
        sweep,
        env=list(env) if env else sweep.env,
        seeds=sweep.seeds if seeds is None else seeds,
        config={**sweep.config, **(config or {})},
        stop=sweep.stop if stop is None else dict(stop),
    )
    sweep.check()
    return sweep, path.stem


def _parsed(value: Any) -> Any:
    return parse_value(value) if isinstance(value, str) else value


def describe_sweeps() -> list[str]:
    """Return one line about each file of ``tune_sweeps/``."""
    paths = sorted(SWEEPS.glob("*.yaml"))
    return [f"{path.stem}: {Sweep.from_file(path, on_cpu=False).description}" for path in paths]


def trial_name(settings: RunSettings, keys: Sequence[str]) -> str:
    """Name a trial's directory after its task, what it has of these settings, and its seed."""
    parts, flat = [short_task_name(settings.env)], settings.flat()
    parts += [f"{key}={format_value(flat[key])}" for key in keys if key in flat]
    return re.sub(r"[^\w=.,+-]+", "-", "_".join([*parts, f"seed={settings.seed}"]))


def value_range(values: list[Any]) -> Any:
    """Return a distribution between the smallest and the largest of the values.

    It is logarithmic if they are far apart, and None if they are not all floats.
    """
    if not all(isinstance(v, float) for v in values):
        return None
    low, high = min(values), max(values)
    return tune.loguniform(low, high) if low > 0 and high / low >= 10 else tune.uniform(low, high)
