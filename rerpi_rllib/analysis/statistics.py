"""How the field reports runs with several seeds: mean, interquartile mean, intervals, comparisons.

Scores are arrays of shape [runs, tasks]. Intervals are stratified bootstraps: each task's runs are
drawn anew among themselves (Agarwal et al., 2021, "Deep Reinforcement Learning at the Edge of the
Statistical Precipice").
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy import stats

Statistic = Callable[..., float]


def interquartile_mean(scores: np.ndarray) -> float:
    """Mean of the middle half of all scores, whichever task they are of."""
    return float(stats.trim_mean(scores, 0.25, axis=None))


def probability_of_improvement(scores: np.ndarray, others: np.ndarray) -> float:
    """How likely a run is better than one of the others on a random task; ties count half."""
    above = scores[:, None, :] > others[None, :, :]
    equal = scores[:, None, :] == others[None, :, :]
    return float(np.mean(above + 0.5 * equal))


def bootstrap_interval(
    statistic: Statistic,
    *samples: np.ndarray,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile interval of a statistic of one or more arrays of scores."""
    rng = np.random.default_rng(seed)

    def redrawn(scores: np.ndarray) -> np.ndarray:
        rows = rng.integers(len(scores), size=scores.shape)
        return np.take_along_axis(scores, rows, axis=0)

    values = [statistic(*map(redrawn, samples)) for _ in range(resamples)]
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(values, [tail, 1.0 - tail])
    return float(low), float(high)


def normalised(scores: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Scores of each task as a share of the way from ``low`` to ``high``, which are [tasks]."""
    return (scores - low) / np.where(high > low, high - low, 1.0)
