"""Statistics, compared with their definitions and with known values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from rerpi_rllib.analysis.statistics import (
    bootstrap_interval,
    interquartile_mean,
    normalised,
    probability_of_improvement,
)

SCORES = arrays(np.float64, (5, 3), elements=st.floats(-100, 100))


def test_interquartile_mean_leaves_out_the_best_and_the_worst_quarter():
    assert interquartile_mean(np.array([[1.0, 2.0, 3.0, 1000.0]])) == 2.5
    assert interquartile_mean(np.arange(8.0).reshape(4, 2)) == 3.5


@given(SCORES, SCORES)
def test_probability_of_improvement_is_the_mann_whitney_statistic(x, y):
    expected = np.mean([stats.mannwhitneyu(x[:, t], y[:, t]).statistic / 25 for t in range(3)])
    assert probability_of_improvement(x, y) == pytest.approx(expected)
    assert probability_of_improvement(y, x) == pytest.approx(1.0 - expected)


def test_the_interval_of_a_mean_is_the_known_one():
    scores = np.random.default_rng(1).normal(size=(400, 1))
    low, high = bootstrap_interval(lambda s: float(s.mean()), scores)
    half = 1.96 * scores.std() / 20
    assert (low, high) == pytest.approx((scores.mean() - half, scores.mean() + half), abs=0.015)


def test_resampling_stays_within_each_task():
    # All runs of a task have the same score, so resampling changes nothing.
    scores = np.tile([1.0, 5.0, 100.0, 7.0], (6, 1))
    assert bootstrap_interval(interquartile_mean, scores) == (6.0, 6.0)
    assert bootstrap_interval(probability_of_improvement, scores, scores + 1, resamples=50) == (0, 0)


def test_normalised():
    scores = np.array([[0.0, 5.0], [500.0, 10.0]])
    shares = normalised(scores, np.array([0.0, 5.0]), np.array([1000.0, 5.0]))
    assert shares == pytest.approx(np.array([[0.0, 0.0], [0.5, 5.0]]))
