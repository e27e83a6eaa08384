"""Running statistics of what a run has gathered: observations and returns."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

LARGEST_RETURN = 5.0


class Moments:
    """Mean and variance of all rows that were ever added, in double precision.

    Args:
        size: numbers in a row.
    """

    def __init__(self, size: int) -> None:
        self.count = 0
        self.mean = np.zeros(size)
        self._squares = np.zeros(size)  # The sum of squared distances to the mean.

    def add(self, rows: Array) -> None:
        """Add rows ``[L, size]``."""
        if len(rows):
            mean = rows.mean(axis=0, dtype=np.float64)
            self._merge(len(rows), mean, np.square(rows - mean).sum(axis=0))

    def merge(self, other: Moments) -> None:
        """Add all rows that another one has seen."""
        if other.count:
            self._merge(other.count, other.mean, other._squares)

    def _merge(self, rows: int, mean: Array, squares: Array) -> None:
        """Merge two sets with the formula of Chan et al."""
        shift = mean - self.mean
        count = self.count + rows
        self._squares = self._squares + squares + np.square(shift) * (self.count * rows / count)
        self.mean = self.mean + shift * (rows / count)
        self.count = count

    @property
    def stddev(self) -> Array:
        """The standard deviation of each number, one where nothing is known."""
        if self.count == 0:
            return np.ones_like(self.mean)
        return np.asarray(np.sqrt(self._squares / self.count))

    def get_state(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        mean, squares = self.mean.tolist(), self._squares.tolist()
        return {"count": self.count, "mean": mean, "squares": squares}

    def set_state(self, state: dict[str, Any]) -> None:
        self.count, self.mean = state["count"], np.array(state["mean"])
        self._squares = np.array(state["squares"])


class ReturnScale:
    """The size of the returns of a run, for a critic that works in units of it.

    These are the discounted sums of the rewards up to each step, which are known without waiting for
    the end of an episode. The scale is their standard deviation, or a fifth of the largest one if
    that is more. Where an episode was cut off, values go on beyond it: if it had gone on in the same
    way for ever, its sum would have been larger by the factor ``1 / (1 - gamma^length)``.

    Args:
        gamma: the discount.
        num_lanes: environments that are stepped at the same time.
    """

    def __init__(self, gamma: float, num_lanes: int) -> None:
        self._gamma = gamma
        self._sums = np.zeros(num_lanes)
        self._lengths = np.zeros(num_lanes, np.int64)
        self._moments = Moments(1)
        self._largest = 0.0

    def add(self, lane: int, rewards: Array, *, continued: bool, truncated: bool) -> None:
        """Add the rewards of a piece of an episode.

        Args:
            lane: the environment's number.
            rewards: of at least one step.
            continued: whether there was a piece before.
            truncated: whether the episode was cut off after it.
        """
        total, length = (self._sums[lane], self._lengths[lane]) if continued else (0.0, 0)
        sums = np.empty((len(rewards), 1))
        for index, reward in enumerate(rewards.tolist()):
            sums[index] = total = self._gamma * total + reward
        self._sums[lane], self._lengths[lane] = total, length + len(rewards)
        self._moments.add(sums)
        self._largest = max(self._largest, float(np.abs(sums).max()))
        if truncated and self._gamma < 1.0:
            seen = 1.0 - self._gamma ** int(self._lengths[lane])
            self._largest = max(self._largest, abs(total) / seen)

    def merge(self, other: ReturnScale) -> None:
        """Add all returns that another one has seen."""
        self._moments.merge(other._moments)
        self._largest = max(self._largest, other._largest)

    def for_lanes(self, num_lanes: int) -> ReturnScale:
        """Return one for another number of environments, which begin new episodes."""
        other = ReturnScale(self._gamma, num_lanes)
        other._moments, other._largest = self._moments, self._largest
        return other

    @property
    def scale(self) -> float:
        """The unit of returns, one while all rewards were zero."""
        if self._largest == 0.0:
            return 1.0
        return max(float(self._moments.stddev[0]), self._largest / LARGEST_RETURN)

    def get_state(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        moments = self._moments.get_state()
        lanes = {"sums": self._sums.tolist(), "lengths": self._lengths.tolist()}
        return {**lanes, "largest": self._largest, "moments": moments}

    def set_state(self, state: dict[str, Any]) -> None:
        self._sums, self._lengths = np.array(state["sums"]), np.array(state["lengths"])
        self._largest = state["largest"]
        self._moments.set_state(state["moments"])
