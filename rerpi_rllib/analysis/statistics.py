"""How the field reports runs with several seeds: interquartile mean, intervals, comparisons.

Scores are arrays of shape [runs, tasks]. Intervals are stratified bootstraps, which resample the
runs of each task separately (Agarwal et al., 2021, "Deep Reinforcement Learning at the Edge of the
Statistical Precipice").
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy import stats

Array = npt.NDArray[np.float64]
Statistic = Callable[..., float]


def interquartile_mean(scores: Array) -> float:
    """Return the mean of the middle half of the scores of all tasks together."""
    return float(stats.trim_mean(scores, 0.25, axis=None))


def probability_of_improvement(scores: Array, others: Array) -> float:
    """Return how likely a run beats one of the others on a random task; ties count half."""
    above = scores[:, None, :] > others[None, :, :]
    equal = scores[:, None, :] == others[None, :, :]
    return float(np.mean(above + 0.5 * equal))


def bootstrap_interval(
    statistic: Statistic,
    *samples: Array,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the percentile interval of a statistic of one or more arrays of scores."""
    rng = np.random.default_rng(seed)

    def resample(scores: Array) -> Array:
        rows = rng.integers(len(scores), size=scores.shape)
        return np.take_along_axis(scores, rows, axis=0)

    values = [statistic(*map(resample, samples)) for _ in range(resamples)]
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(values, [tail, 1.0 - tail])
    return float(low), float(high)


def normalised(scores: Array, low: Array, high: Array) -> Array:
    """Map the scores of each task so that ``low`` becomes 0 and ``high`` 1; both are [tasks]."""
    shares: Array = (scores - low) / np.where(high > low, high - low, 1.0)
    return shares
