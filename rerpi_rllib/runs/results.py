"""How to read one result of RLlib: the numbers that displays, stopping rules and sweeps need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    EPISODE_RETURN_MEAN,
    EVALUATION_RESULTS,
    LEARNER_RESULTS,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
)

from rerpi_rllib.algorithm.exporter import NUM_UPDATES_LIFETIME
from rerpi_rllib.algorithm.faults import FAULTS

Result = Mapping[str, Any]


def env_steps(result: Result) -> int:
    return int(result.get(NUM_ENV_STEPS_SAMPLED_LIFETIME) or 0)


def updates(result: Result) -> int:
    return int(result.get(NUM_UPDATES_LIFETIME) or 0)


def episode_return(result: Result) -> float:
    """Return the mean return of the last episodes; NaN before the first one has ended."""
    return float(result.get(ENV_RUNNER_RESULTS, {}).get(EPISODE_RETURN_MEAN, float("nan")))


def greedy_return(result: Result) -> float:
    """Return the mean return of an evaluation; NaN if this iteration had none."""
    return episode_return(result.get(EVALUATION_RESULTS) or {})


def learner_metrics(result: Result) -> Mapping[str, float]:
    metrics: Mapping[str, float] = result.get(LEARNER_RESULTS, {}).get(DEFAULT_MODULE_ID, {})
    return metrics


def faults(result: Result) -> str:
    """Say what the run has survived so far, empty if there was nothing."""
    counts = {words: int(result.get(name) or 0) for name, words in FAULTS.items()}
    return ", ".join(f"{words} {count:,}" for words, count in counts.items() if count)


# The keys that `--stop` allows, and how to read the value that each of them limits.
STOP_KEYS: dict[str, Callable[[Result], float]] = {
    "env_steps": env_steps,
    "updates": updates,
    "iterations": lambda result: float(result["training_iteration"]),
    "time_s": lambda result: float(result["time_total_s"]),
    "return": episode_return,
}


def fraction_done(stop: Mapping[str, float], result: Result) -> float:
    """Return how far the run is, by the stopping rule that is nearest to its limit.

    A rule on the return does not count: it does not tell how much of the run is left.
    """
    fractions = [
        STOP_KEYS[key](result) / limit for key, limit in stop.items() if key != "return" and limit > 0
    ]
    return min(1.0, max(fractions, default=0.0))
