"""What is measured in a run, by names and groups, and how Ray's metrics exporter gets it.

TensorBoard and other trackers show the same numbers by the same names. In Ray's exporter, and so in
its dashboard, Prometheus and Grafana, they begin with ``rerpi_``. This is the only place that names
them; what the learner measures and what is bounded is listed nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    EPISODE_LEN_MEAN,
    EPISODE_RETURN_MAX,
    EPISODE_RETURN_MEAN,
    EPISODE_RETURN_MIN,
    EVALUATION_RESULTS,
    LEARNER_RESULTS,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
)
from ray.util.metrics import Gauge

from rerpi_rllib.algorithm.config import RERPIConfig
from rerpi_rllib.algorithm.faults import FAULTS
from rerpi_rllib.core.constraints import Constraint

PREFIX = "rerpi_"
NUM_UPDATES_LIFETIME = "num_updates_lifetime"

_LEARNING, _TRUST_REGION, _THROUGHPUT, _HEALTH = "learning", "trust_region", "throughput", "health"
# RLlib counts under these names what is the same, or in other units, elsewhere.
_LEFT_OUT = ("num_", "module_", "weights_seq_no")
_TAGS = ("algorithm", "task", "trial")
_MOST_POINTS = 512


class Measurements:
    """Reads the results of a run, one after another.

    Args:
        constraints: the constraints of the run.
    """

    def __init__(self, constraints: Sequence[Constraint]) -> None:
        self._constraints = constraints
        self._before: tuple[int, int] | None = None

    def of(self, result: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
        """Yield group, name and value of each number that the next result of the run has."""
        for group, name, value in self._all(result):
            if isinstance(value, Real) and math.isfinite(value):
                yield group, name, float(value)

    def _all(self, result: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
        episodes = result.get(ENV_RUNNER_RESULTS, {})
        for name in (EPISODE_RETURN_MEAN, EPISODE_RETURN_MIN, EPISODE_RETURN_MAX, EPISODE_LEN_MEAN):
            yield _LEARNING, name, episodes.get(name)
        evaluation = (result.get(EVALUATION_RESULTS) or {}).get(ENV_RUNNER_RESULTS, {})
        yield _LEARNING, "evaluation_return_mean", evaluation.get(EPISODE_RETURN_MEAN)

        learned = result.get(LEARNER_RESULTS, {}).get(DEFAULT_MODULE_ID, {})
        bounded = {
            name: value
            for each in self._constraints
            for name, value in (
                (each.kl, learned.get(each.kl)),
                (each.kl_at_copy, learned.get(each.kl_at_copy)),
                (f"{each.kl}_bound", each.epsilon),
                (each.multiplier, learned.get(each.multiplier)),
            )
        }
        for name, value in bounded.items():
            yield _TRUST_REGION, name, value
        for name, value in learned.items():
            if name not in bounded and not name.startswith(_LEFT_OUT):
                yield _LEARNING, name, value

        steps, updates = progress(result)
        yield _THROUGHPUT, "env_steps", steps
        yield _THROUGHPUT, "updates", updates
        yield _THROUGHPUT, "update_ratio", updates / max(1, steps)
        seconds = result["time_this_iter_s"]
        yield _THROUGHPUT, "iteration_seconds", seconds
        if self._before is not None:  # The first result of a resumed run has steps of earlier ones.
            yield _THROUGHPUT, "env_steps_per_second", (steps - self._before[0]) / seconds
            yield _THROUGHPUT, "updates_per_second", (updates - self._before[1]) / seconds
        self._before = steps, updates

        for name in FAULTS:
            yield _HEALTH, name, result.get(name)


def progress(result: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of environment steps and of updates of a whole run so far."""
    return (
        int(result.get(NUM_ENV_STEPS_SAMPLED_LIFETIME) or 0),
        int(result.get(NUM_UPDATES_LIFETIME) or 0),
    )


class MetricsExporter:
    """Gives what is measured to Ray.

    Args:
        config: the configuration of the algorithm.
        trial: the name of Tune's trial; None outside of Tune.
    """

    def __init__(self, config: RERPIConfig, trial: str | None) -> None:
        self._measurements = Measurements(config.constraints)
        self._tags = {
            "algorithm": config.algo_class.__name__,
            "task": str(config.env),
            "trial": trial or "none",
        }
        self._gauges: dict[str, Gauge] = {}
        self._known: dict[str, float] = {}
        self._history = [(0, 0)]

    def export(self, result: Mapping[str, Any], replay_size: int) -> None:
        """Set Ray's gauges to what this result says, or the last one that had the number.

        Ray forgets a gauge that is not set for a while, and not all results have a return.

        Args:
            result: of one iteration, as Tune gets it.
            replay_size: the number of steps that are stored.
        """
        self._known |= {name: value for _, name, value in self._measurements.of(result)}
        self._known["replay_size"] = replay_size
        self._known["sample_age_updates"] = self._age(*progress(result), replay_size)
        for name, value in self._known.items():
            self._set(name, value)

    def _set(self, name: str, value: float) -> None:
        if name not in self._gauges:
            gauge = Gauge(f"{PREFIX}{name}", f"{name} in the last result of a run.", _TAGS)
            self._gauges[name] = gauge.set_default_tags(self._tags)
        self._gauges[name].set(value)

    def _age(self, steps: int, updates: int, replay_size: int) -> float:
        """Return how many updates have been made since the median stored step was gathered."""
        if len(self._history) >= _MOST_POINTS:
            self._history = self._history[::2]
        # What an earlier process has done took an even course, as far as can be known.
        self._history.append((steps, updates))
        known = np.array(self._history)
        return float(updates - np.interp(steps - replay_size / 2, known[:, 0], known[:, 1]))
