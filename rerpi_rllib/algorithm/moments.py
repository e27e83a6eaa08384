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
        """Add rows ``[L, size]``, with the formula of Chan et al. for merging two sets."""
        if len(rows) == 0:
            return
        mean = rows.mean(axis=0, dtype=np.float64)
        shift = mean - self.mean
        count = self.count + len(rows)
        self._squares += np.square(rows - mean).sum(axis=0)
        self._squares += np.square(shift) * (self.count * len(rows) / count)
        self.mean = self.mean + shift * (len(rows) / count)
        self.count = count

    @property
    def stddev(self) -> Array:
        """The standard deviation of each number, one where nothing is known."""
        if self.count == 0:
            return np.ones_like(self.mean)
        return np.asarray(np.sqrt(self._squares / self.count))

    def get_state(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self.mean, "squares": self._squares.copy()}

    def set_state(self, state: dict[str, Any]) -> None:
        self.count, self.mean = state["count"], state["mean"]
        self._squares = state["squares"].copy()


class ReturnScale:
    """The size of the returns of a run, for a critic that works in units of it.

    These are the discounted sums of the rewards up to each step, which are known without waiting for
    the end of an episode. The scale is their standard deviation, or a fifth of the largest one if
    that is more, so that no return is beyond :data:`LARGEST_RETURN` of these units.

    Args:
        gamma: the discount.
        num_lanes: environments that are stepped at the same time.
    """

    def __init__(self, gamma: float, num_lanes: int) -> None:
        self._gamma = gamma
        self._sums = np.zeros(num_lanes)
        self._moments = Moments(1)
        self._largest = 0.0

    def add(self, lane: int, rewards: Array, continued: bool) -> None:
        """Add the rewards of a piece of an episode; ``continued`` if it is not the first one."""
        total = self._sums[lane] if continued else 0.0
        sums = np.empty((len(rewards), 1))
        for index, reward in enumerate(rewards.tolist()):
            sums[index] = total = self._gamma * total + reward
        self._sums[lane] = total
        self._moments.add(sums)
        self._largest = max(self._largest, float(np.abs(sums).max()))

    @property
    def scale(self) -> float:
        """The unit of returns, one while all rewards were zero."""
        if self._largest == 0.0:
            return 1.0
        return max(float(self._moments.stddev[0]), self._largest / LARGEST_RETURN)

    def get_state(self) -> dict[str, Any]:
        moments = self._moments.get_state()
        return {"sums": self._sums.copy(), "largest": self._largest, "moments": moments}

    def set_state(self, state: dict[str, Any]) -> None:
        self._sums, self._largest = state["sums"].copy(), state["largest"]
        self._moments.set_state(state["moments"])
