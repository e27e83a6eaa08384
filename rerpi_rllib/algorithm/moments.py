"""Running mean and variance of the observations that a run has gathered."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]


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
