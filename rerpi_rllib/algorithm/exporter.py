"""What a run tells Ray's metrics exporter, and through it the dashboard, Prometheus and Grafana.

Every metric is called ``rerpi_`` and the name that it has in the results. This is the only place that
names them; what the learner measures and what is bounded is listed nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
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

PREFIX = "rerpi_"
NUM_UPDATES_LIFETIME = "num_updates_lifetime"

_TAGS = ("algorithm", "task", "trial")
# RLlib counts under these names what is the same, or in other units, elsewhere.
_LEFT_OUT = ("num_", "module_", "weights_seq_no")
_MOST_POINTS = 512


class MetricsExporter:
    """Gives the numbers of each result to Ray.

    Args:
        config: the configuration of the algorithm.
        trial: the name of Tune's trial; None outside of Tune.
    """

    def __init__(self, config: RERPIConfig, trial: str | None) -> None:
        self._bounds = {f"{each.kl}_bound": each.epsilon for each in config.constraints}
        self._tags = {
            "algorithm": config.algo_class.__name__,
            "task": str(config.env),
            "trial": trial or "none",
        }
        self._gauges: dict[str, Gauge] = {}
        self._history: list[tuple[int, int]] = []

    def export(self, result: Mapping[str, Any], replay_size: int) -> None:
        """Set Ray's gauges to what a result says; those that it has no number for stay as they are.

        Args:
            result: of one iteration, as Tune gets it.
            replay_size: the number of steps that are stored.
        """
        for name, value in self._values(result, replay_size):
            if not isinstance(value, Real) or not math.isfinite(value):
                continue
            if name not in self._gauges:
                gauge = Gauge(f"{PREFIX}{name}", f"{name} in the results of a run.", _TAGS)
                self._gauges[name] = gauge.set_default_tags(self._tags)
            self._gauges[name].set(float(value))

    def _values(self, result: Mapping[str, Any], replay_size: int) -> Iterator[tuple[str, Any]]:
        episodes = result.get(ENV_RUNNER_RESULTS, {})
        for name in (EPISODE_RETURN_MEAN, EPISODE_RETURN_MIN, EPISODE_RETURN_MAX, EPISODE_LEN_MEAN):
            yield name, episodes.get(name)
        evaluation = (result.get(EVALUATION_RESULTS) or {}).get(ENV_RUNNER_RESULTS, {})
        yield "evaluation_return_mean", evaluation.get(EPISODE_RETURN_MEAN)

        steps = int(result.get(NUM_ENV_STEPS_SAMPLED_LIFETIME) or 0)
        updates = int(result.get(NUM_UPDATES_LIFETIME) or 0)
        yield "env_steps", steps
        yield "updates", updates
        if self._history:  # A resumed run has none at first.
            new_steps, new_updates = steps - self._history[-1][0], updates - self._history[-1][1]
            yield "env_steps_per_second", new_steps / result["time_this_iter_s"]
            yield "updates_per_second", new_updates / result["time_this_iter_s"]
        yield "update_ratio", updates / max(1, steps)
        yield "iteration_seconds", result["time_this_iter_s"]
        yield "replay_size", replay_size
        yield "sample_age_updates", self._age(steps, updates, replay_size)

        learned = result.get(LEARNER_RESULTS, {}).get(DEFAULT_MODULE_ID, {})
        for name, value in learned.items():
            if not name.startswith(_LEFT_OUT):
                yield name, value
        for name, bound in self._bounds.items():
            yield name, bound
        for name in FAULTS:
            yield name, result.get(name)

    def _age(self, steps: int, updates: int, replay_size: int) -> float:
        """Return how many updates have been made since the median stored step was gathered."""
        if len(self._history) >= _MOST_POINTS:
            self._history = self._history[::2]
        self._history.append((steps, updates))
        # What an earlier process has done took an even course, as far as can be known.
        known = np.array([(0, 0), *self._history])
        return float(updates - np.interp(steps - replay_size / 2, known[:, 0], known[:, 1]))
