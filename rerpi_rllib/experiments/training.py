"""One training run through Ray Tune: results, checkpoints, resuming, and a clean end."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# Tune would end a run on Ctrl-C without a last checkpoint; here a run stops after its iteration.
os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# Tune's newer output ignores verbose=0.
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")

import gymnasium as gym
import ray
import torch
from ray import tune
from ray.tune import Callback, CheckpointConfig, Stopper, TuneError
from ray.tune.experiment import Trial
from ray.tune.result import SHOULD_CHECKPOINT

from rerpi_rllib import RERPIConfig, envs
from rerpi_rllib.algorithm.networks import build_networks
from rerpi_rllib.algorithm.process import set_up_learning
from rerpi_rllib.core.settings import LearningSettings
from rerpi_rllib.core.updates import make_optimizers, run_updates
from rerpi_rllib.experiments.checkpoints import newest_checkpoint
from rerpi_rllib.experiments.display import TrainingDisplay
from rerpi_rllib.experiments.settings import STOP_KEYS, RunSettings

_SECONDS_BETWEEN_CHECKPOINTS = 300.0
_CHECKPOINTS_KEPT = 2


class RunFailed(Exception):
    """A run that ended with an error; the message says where its log is."""


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
    """A checkpoint every few minutes, however long an iteration is and however large the replay."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def on_trial_result(self, iteration, trials, trial, result, **info: Any) -> None:
        now = time.monotonic()
        if now - self._last.setdefault(trial.trial_id, now) >= _SECONDS_BETWEEN_CHECKPOINTS:
            self._last[trial.trial_id] = now
            result[SHOULD_CHECKPOINT] = True


def update_seconds(config: RERPIConfig) -> float:
    """How long one update takes on this machine's CPU, measured on random data."""
    env = envs.make(config.env, **config.env_config)
    sizes = gym.spaces.flatdim(env.observation_space), gym.spaces.flatdim(env.action_space)
    nets = build_networks(env.observation_space, env.action_space, config.model_config)
    env.close()
    settings = replace(LearningSettings(**config.model_config["learning"]), policy_update_period=1)
    size = config.total_train_batch_size
    length = () if config.policy_evaluation == "td0" else (config.sequence_length,)
    rows = (size // config.steps_per_row, *length)
    batch = {
        "obs": torch.randn(rows[0], *(n + 1 for n in length), sizes[0]),
        "new_obs": torch.randn(*rows, sizes[0]),
        "actions": torch.zeros(*rows, 1 if config.policy == "categorical" else sizes[1]),
        "rewards": torch.randn(rows),
        "terminateds": torch.zeros(rows),
        "action_logp": torch.zeros(rows),
        "loss_mask": torch.ones(rows, dtype=torch.bool),
    }
    set_up_learning(config)
    optimizers = make_optimizers(nets)
    best = float("inf")
    for _ in range(2):
        started = time.perf_counter()
        run_updates(nets, settings, batch, rows[0], optimizers=optimizers)
        best = min(best, time.perf_counter() - started)
    return best


def _bounds(config: RERPIConfig) -> dict[str, float]:
    """The KLs that this configuration bounds, by the names of their metrics."""
    return {c.kl: c.epsilon for c in config.constraints if c.part != "penalty"}


def is_machine_without_gpu() -> bool:
    """Whether runs take place on this machine and it has no GPU."""
    return "RAY_ADDRESS" not in os.environ and torch.cuda.device_count() == 0


def has_no_gpu(config: RERPIConfig) -> bool:
    """Whether the learner will run on this machine's CPU, as far as can be told before the start."""
    if config.num_gpus_per_learner == "auto":
        return is_machine_without_gpu()
    return config.num_gpus_per_learner == 0 and "RAY_ADDRESS" not in os.environ


@contextmanager
def running_ray(config: RERPIConfig) -> Iterator[None]:
    """Ray with enough for a run; one that this process uses already stays as it is."""
    was_there = ray.is_initialized()
    try:
        if not was_there:
            _start_ray(config)
        _check_resources(config)
        yield
    finally:
        if not was_there:
            ray.shutdown()


def _start_ray(config: RERPIConfig) -> None:
    """Connect to the cluster that RAY_ADDRESS names, or start Ray on this machine."""
    options: dict[str, Any] = {"logging_level": logging.CRITICAL, "log_to_driver": False}
    if "RAY_ADDRESS" not in os.environ:
        # With fewer cores than processes they share: a run must not wait for ever for a CPU.
        processes = 1 + config.num_env_runners + config.num_learners
        cpus = (
            config.num_cpus_for_main_process - 1 + processes * max(1, config.num_cpus_per_env_runner)
        )
        options |= {"address": "local", "num_cpus": max(os.cpu_count() or 1, int(cpus) + 1)}
    ray.init(**options)


def _check_resources(config: RERPIConfig) -> None:
    request = config.algo_class.default_resource_request(config.to_dict())
    for kind, amount in request.required_resources.items():
        available = ray.cluster_resources().get(kind, 0)
        if amount > available:
            raise ValueError(
                f"The run needs {amount:g} {kind} and there are {available:g}: "
                "change num_env_runners, num_learners or --num-gpus."
            )


def run_directory(settings: RunSettings, storage_path: Path, name: str | None) -> Path:
    """Where a new run goes: ``STORAGE/NAME``."""
    name = name or f"{settings.algo}_{settings.env.split('/')[-1]}_{time.strftime('%Y%m%d-%H%M%S')}"
    return (storage_path / name).expanduser().resolve()


def train(
    settings: RunSettings,
    config: RERPIConfig,
    directory: Path,
    *,
    resume_from: Path | None = None,
    quiet: bool = False,
) -> Outcome:
    """Train until a stopping rule is met or the user presses Ctrl-C; always leaves a checkpoint.

    Args:
        settings: what was asked for; ``settings.build_config()`` gave ``config``.
        directory: the run's own directory; a resumed run goes on in the one it had.
        resume_from: a checkpoint to go on from.
    """
    settings.save(directory)
    part = 1 + sum(child.is_dir() for child in directory.glob("part-*"))
    stop = StopRules(settings.stop)
    display = TrainingDisplay(
        f"{settings.algo} on {settings.env}",
        settings.stop,
        _bounds(config),
        quiet,
    )

    def on_interrupt(signum: int, frame: Any) -> None:
        if stop.interrupted:
            raise KeyboardInterrupt
        stop.interrupted = True

    in_main_thread = threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGINT, on_interrupt) if in_main_thread else None
    try:
        with running_ray(config):
            analysis = tune.run(
                settings.algo,
                name=directory.name,
                storage_path=str(directory.parent),
                config=config.to_dict(),
                stop=stop,
                callbacks=[CheckpointByTime(), display],
                checkpoint_config=CheckpointConfig(
                    checkpoint_at_end=True, num_to_keep=_CHECKPOINTS_KEPT
                ),
                trial_dirname_creator=lambda trial: f"part-{part}",
                restore=str(resume_from) if resume_from else None,
                log_to_file=True,
                raise_on_failed_trial=False,
                verbose=0,
            )
    except TuneError as error:
        raise RunFailed(f"{_reason(str(error))}. Its log is in {directory}.") from error
    finally:
        display.close()
        if in_main_thread:
            signal.signal(signal.SIGINT, previous)

    (trial,) = analysis.trials
    logs = directory / f"part-{part}"
    if trial.status != Trial.TERMINATED:
        reason = failure_reason(trial)
        raise RunFailed(f"The run failed: {reason}. Its log is {logs / 'error.txt'}.")
    return Outcome(directory, newest_checkpoint(logs), display.last_return, stop.interrupted)


def failure_reason(trial: Trial) -> str:
    return _reason(str(trial.get_error() or trial.status))


def _reason(traceback: str) -> str:
    """The first error in a chain of them that says something: what the others were raised for."""
    lines = traceback.strip().splitlines()
    named = [line for line in lines if re.match(r"[A-Za-z_.]+(Error|Exception): \S", line)]
    return (named or lines)[0].strip().rstrip(".")


def summary(outcome: Outcome) -> str:
    ended = "Stopped by Ctrl-C" if outcome.interrupted else "Done"
    if outcome.episode_return is None:
        return f"{ended}, before an episode had ended."
    return f"{ended}: return {outcome.episode_return:.1f} (mean of the last episodes)."
