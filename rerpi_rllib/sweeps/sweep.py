"""Sweeps: a base configuration, a grid of settings and several seeds as one Ray Tune experiment.

Each trial's directory is that of a run: `rllib plot`, `evaluate`, `report`, `train --resume` take it.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune import Callback, CheckpointConfig, TuneError
from ray.tune.experiment import Trial
from ray.tune.schedulers import AsyncHyperBandScheduler, PopulationBasedTraining, TrialScheduler
from ray.tune.search import Searcher

from rerpi_rllib.experiments.display import SweepDisplay
from rerpi_rllib.experiments.runs import short_name, shown
from rerpi_rllib.experiments.settings import (
    CONFIGS,
    Configuration,
    RunSettings,
    check_keys,
    find_file,
    parse_value,
    read_yaml,
    write_json,
)
from rerpi_rllib.experiments.sweep_trial import METRICS, SweepTrial
from rerpi_rllib.experiments.training import (
    CheckpointByTime,
    RunFailed,
    StopRules,
    failure_reason,
    is_machine_without_gpu,
    running_ray,
)

SWEEPS = CONFIGS.parent / "tune_sweeps"
SCHEDULERS = ("asha", "pbt")
SEARCHES = ("optuna",)
_MAX_FAILURES = 2
# Keys of a grid that are not settings of the algorithm.
_OF_RUN = ("algo", "preset")
# What `--smoke` makes of a sweep: all its variants, for a moment.
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
        env: the tasks; by default those of the base.
        config: settings that differ from the base in all trials.
        seeds: runs of each variant and task.
        stop: when a run ends; by default as in the base.
        metric: what counts, "greedy_return" or "return".
        cpu: what is different on a machine without a GPU.
    """

    base: str
    grid: dict[str, list] = field(default_factory=dict)
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
        """The sweep that a directory holds."""
        asked = json.loads((directory / cls.FILE_NAME).read_text())
        return cls(**{field.name: asked[field.name] for field in fields(cls)})

    @classmethod
    def from_file(cls, path: Path, on_cpu: bool) -> Sweep:
        mappings = ("grid", "config", "stop", "cpu")
        given = check_keys(read_yaml(path), cls, str(path), mappings)
        if on_cpu:
            given |= check_keys(given.get("cpu", {}), cls, f"cpu in {path}", mappings)
        given.pop("cpu", None)
        if not isinstance(given.get("base"), str):
            raise ValueError(f"base={given.get('base')!r} in {path} must name a configuration.")
        env = given.get("env", [])
        given["env"] = env if isinstance(env, list) else [env]
        if not all(isinstance(task, str) for task in given["env"]):
            raise ValueError(f"env={env!r} in {path} must be a task or a list of tasks.")
        sweep = cls(**given)
        for key, values in sweep.grid.items():
            if not isinstance(values, list) or not values:
                raise ValueError(f"grid {key}={values!r} in {path} must be a list of values.")
            sweep.grid[key] = [_parsed(value) for value in values]
        sweep.stop = {key: _parsed(value) for key, value in sweep.stop.items()}
        return sweep

    def check(self) -> None:
        """Everything that can be wrong, before the first trial starts."""
        if self.metric not in METRICS:
            raise ValueError(
                f"metric={self.metric!r} is not allowed: it must be {' or '.join(METRICS)}."
            )
        if isinstance(self.seeds, bool) or not isinstance(self.seeds, int) or self.seeds < 1:
            raise ValueError(f"seeds={self.seeds!r} is not allowed: it must be 1 or more.")
        tasks, variants = set(), set()
        for settings in self.trials().values():
            variant = repr(settings.flat())
            if settings.env in tasks and variant in variants:
                continue
            config = settings.build_config(check_env=settings.env not in tasks)
            tasks.add(settings.env)
            variants.add(variant)
            if not set(settings.stop) - {"return"}:
                raise ValueError(
                    f"stop={settings.stop} may never be met: name env_steps, updates or time_s."
                )
            if self.metric == "greedy_return" and not config.evaluation_interval:
                raise ValueError("metric='greedy_return' needs evaluation_interval in the settings.")

    def shortened(self) -> Sweep:
        """One task, two seeds, tiny networks: whether it runs, in a minute or two."""
        return replace(
            self,
            env=self.env[:1] or self._base().tasks[:1],
            config={**self.config, **_SMOKE},
            seeds=min(2, self.seeds),
            stop={"env_steps": 1000},
        )

    def _base(self) -> Configuration:
        return Configuration.from_file(find_file(self.base, CONFIGS))

    def trials(self) -> dict[str, RunSettings]:
        """All runs, by the names of their directories."""
        base = self._base()
        found = {}
        for env in self.env or base.tasks:
            for variant in self.variants():
                for seed in range(self.seeds):
                    settings = self._settings(base.run, env, variant, seed)
                    name = _name(settings, list(self.grid))
                    if name in found:
                        raise ValueError(f"Two trials of the grid {self.grid} are called {name!r}.")
                    found[name] = settings
        return found

    def variants(self) -> list[dict[str, Any]]:
        """Every combination of the grid's values."""
        combinations = itertools.product(*self.grid.values())
        return [dict(zip(self.grid, values)) for values in combinations]

    def _settings(
        self, base: RunSettings, env: str, variant: Mapping[str, Any], seed: int | None
    ) -> RunSettings:
        return replace(
            base,
            env=env,
            seed=seed,
            stop=self.stop or base.stop,
            **{key: variant[key] for key in _OF_RUN if key in variant},
            config={
                **base.config,
                **self.config,
                **{key: value for key, value in variant.items() if key not in _OF_RUN},
            },
        )

    def search_space(self) -> dict[str, Any]:
        """One trial's settings with distributions where the grid has values."""
        base = self._base()
        drawn = {key: _range(values) or tune.choice(values) for key, values in self.grid.items()}
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
    """A sweep by its name or file, with what the user wants otherwise, checked; and its name.

    Args:
        on_cpu: whether to take the file's variant for CPUs; by default if there is no GPU.
        smoke: shorten it to see whether it runs.
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
        stop=dict(stop) if stop else sweep.stop,
    )
    sweep.check()
    return sweep, path.stem


def _parsed(value: Any) -> Any:
    return parse_value(value) if isinstance(value, str) else value


def _range(values: list) -> Any:
    """Between the smallest and the largest number, on a log scale if they are far apart; None if they
    are no real numbers.
    """
    if not all(isinstance(v, float) for v in values):
        return None
    low, high = min(values), max(values)
    return tune.loguniform(low, high) if low > 0 and high / low >= 10 else tune.uniform(low, high)


class _WriteSettings(Callback):
    """What each trial is, into its directory, which makes it a run's."""

    def on_trial_start(self, iteration, trials, trial, **info: Any) -> None:
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
    """Run what has not been run yet, as many trials at once as there are CPUs and GPUs for.

    Args:
        sweep: what to run; has to be the same when a sweep goes on.
        directory: its own; if it holds a part of the sweep, the rest is done, and what failed again.
        scheduler: "asha" stops trials that lag behind, "pbt" replaces their settings by better ones.
        search: "optuna" draws settings between the grid's values instead of trying them all.
        num_samples: trials of a search.
        command: what the user typed, for the report.

    Returns:
        What went wrong in the trials that failed in spite of several attempts, by their names.
    """
    for option, value, allowed in (
        ("--scheduler", scheduler, SCHEDULERS),
        ("--search", search, SEARCHES),
    ):
        if value is not None and value not in allowed:
            raise ValueError(f"{option} {value!r} is not allowed: it must be {' or '.join(allowed)}.")
    if num_samples < 1:
        raise ValueError(f"--num-samples {num_samples} is not allowed: it must be at least 1.")
    # Tune writes down where a sweep stands after as many checkpoints of a trial as are kept: with
    # one, as soon as a trial has ended. PBT copies checkpoints a little later than they are made.
    checkpoints_kept = 3 if scheduler == "pbt" else 1
    how = {"scheduler": scheduler, "search": search, "num_samples": num_samples if search else None}
    by_name = sweep.trials()
    trials = list(by_name.values())
    if (scheduler or search) and len({settings.env for settings in trials}) > 1:
        raise ValueError("--scheduler and --search compare returns: they need one task (--env).")
    tuning = {
        "scheduler": _scheduler(scheduler, sweep, trials[0].stop),
        "search_alg": _searcher(search),
    }
    asked = {**asdict(sweep), **how, "trials": {name: asdict(t) for name, t in by_name.items()}}
    resume = _goes_on(directory, asked, how, command)
    display = SweepDisplay(
        directory.name, num_samples if search else len(trials), trials[0].stop, quiet
    )
    try:
        with running_ray(trials[0].build_config(check_env=False)):
            analysis = tune.run(
                SweepTrial,
                name=directory.name,
                storage_path=str(directory.parent),
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
                **tuning,
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


def _goes_on(directory: Path, asked: Mapping[str, Any], how: Iterable[str], command: str) -> bool:
    """Whether the directory holds a part of this sweep; it must not hold another one."""
    path = directory / Sweep.FILE_NAME
    asked = json.loads(json.dumps(asked))
    if path.is_file():
        before = json.loads(path.read_text())
        # The trials say what the base was, too, which may have changed in its file.
        if any(before.get(key) != asked[key] for key in ("trials", "metric", *how)):
            other = [key for key in asked if before.get(key) != asked[key]]
            raise ValueError(f"{directory} has another sweep ({', '.join(other)}): choose a --name.")
    else:
        directory.mkdir(parents=True, exist_ok=True)
        write_json(path, {**asked, "command": command})
    return any(directory.glob("experiment_state-*.json"))


def _name(settings: RunSettings, grid: Sequence[str]) -> str:
    """What a trial's directory is called: its task, its values of the grid, its seed."""
    parts = [short_name(settings.env)]
    parts += [f"{key}={shown(settings.flat()[key])}" for key in grid]
    return re.sub(r"[^\w=.,+-]+", "-", "_".join([*parts, f"seed={settings.seed}"]))


def _directory_name(grid: Sequence[str], several: bool, trial: Trial) -> str:
    name = _name(RunSettings(**trial.config["settings"]), grid)
    # A search may come to the same values twice, and PBT changes them.
    return f"{name}_{trial.trial_id}" if several else name


def _scheduler(name: str | None, sweep: Sweep, stop: Mapping[str, float]) -> TrialScheduler | None:
    if name is None:
        return None
    if "env_steps" not in stop:
        raise ValueError(f"--scheduler {name} needs env_steps in stop, which is {stop}.")
    steps = int(stop["env_steps"])
    if name == "asha":
        return AsyncHyperBandScheduler(
            time_attr="env_steps", max_t=steps, grace_period=max(1, steps // 8), reduction_factor=2
        )
    if not sweep.grid or any(key in _OF_RUN for key in sweep.grid):
        raise ValueError(f"--scheduler pbt cannot change what is in the grid: {list(sweep.grid)}.")
    # Numbers are changed a little, or drawn anew; of other values a neighbour is taken.
    mutations = {key: _range(values) or values for key, values in sweep.grid.items()}
    return PopulationBasedTraining(
        time_attr="env_steps",
        perturbation_interval=max(1, steps // 8),
        hyperparam_mutations={"settings": {"config": mutations}},
    )


def _searcher(name: str | None) -> Searcher | None:
    if name is None:
        return None
    try:
        import optuna
        from ray.tune.search.optuna import OptunaSearch
    except ImportError:
        raise ValueError("--search optuna needs the package optuna: pip install optuna.") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return OptunaSearch(seed=0)
