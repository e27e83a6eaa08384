"""Obstacle courses: drawing one at random, its height anywhere, and the boxes that it is built of.

A course runs along the x axis on ground of height 0, and is a row of obstacles with flat ground
before, between and after them. Its height is constant within each obstacle, so that it can be read
from a table, without MuJoCo.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# The floor of all gaps, in metres.
PIT = -2.0
# Flat ground before the first obstacle, to start running on.
RUN_UP = 5.0


@dataclass(frozen=True)
class Obstacle:
    """A kind of obstacle: each size from the easiest to the hardest, in metres.

    Args:
        length: along the course.
        top: the height of its upper side.
        share: the share of the corridor's width that it takes, beginning at either side.
    """

    length: tuple[float, float]
    top: tuple[float, float]
    share: tuple[float, float] = (1.0, 1.0)


OBSTACLES = {
    "hurdle": Obstacle(length=(0.1, 0.3), top=(0.05, 0.4)),
    "gap": Obstacle(length=(0.2, 1.3), top=(PIT, PIT)),
    "platform": Obstacle(length=(4.0, 1.5), top=(0.05, 0.5)),
    # As thick as it is, it is never between two points of the humanoid's grid of heights.
    "wall": Obstacle(length=(0.5, 0.5), top=(2.0, 2.0), share=(0.25, 0.65)),
}


class Course:
    """A course, and its height at any place.

    Args:
        obstacles: an array of shape [number, 5] in ascending order of x: where each begins and ends
            in x, the height of its top, and where it begins and ends in y.
        width: the width of the corridor; infinite for a course without side walls.
        side_top: the height of the side walls.
    """

    def __init__(self, obstacles: np.ndarray, width: float = math.inf, side_top: float = 0.0) -> None:
        self.obstacles = obstacles
        self.width = width
        self.side_top = side_top
        self._edges = obstacles[:, :2].ravel()
        # Flat ground comes before each obstacle and after the last one.
        sections = np.zeros((2 * len(obstacles) + 1, 3))
        sections[:, 1:] = -math.inf, math.inf
        sections[1::2] = obstacles[:, 2:]
        self._tops, self._lows, self._highs = np.ascontiguousarray(sections.T)

    def heights(self, x: np.ndarray, y: np.ndarray | None = None) -> np.ndarray:
        """Return the height at each place; without ``y``, in the middle of a course without walls."""
        section = self._edges.searchsorted(x, side="right")
        tops: np.ndarray = self._tops[section]
        if y is None:
            return tops
        tops[(y < self._lows[section]) | (y > self._highs[section])] = 0.0
        tops[np.abs(y) > self.width / 2] = self.side_top
        return tops

    def boxes(self, begin: float, end: float, width: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the ground between the gaps, and what stands on it, as arrays of boxes.

        Args:
            begin: where the ground begins in x.
            end: where it ends.
            width: how wide to build what reaches from side to side.

        Returns:
            Two arrays of shape [number, 2, 3]: the lower and the upper corner of each box.
        """
        is_gap = self.obstacles[:, 2] < 0
        gaps, others = self.obstacles[is_gap], self.obstacles[~is_gap]
        ground = np.empty((len(gaps) + 1, 2, 3))
        ground[:, 0, 0], ground[:, 1, 0] = [begin, *gaps[:, 1]], [*gaps[:, 0], end]
        # A little wider than what stands on it, so that no two faces are drawn in the same place.
        ground[:, :, 1] = -width / 2 - 0.02, width / 2 + 0.02
        ground[:, :, 2] = PIT, 0.0
        standing = np.empty((len(others), 2, 3))
        standing[:, :, 0] = others[:, :2]
        standing[:, :, 1] = np.clip(others[:, 3:], -width / 2, width / 2)
        standing[:, 0, 2], standing[:, 1, 2] = -0.1, others[:, 2]
        return ground, standing


def most_obstacles(length: float, spacing: tuple[float, float]) -> int:
    """Return how many obstacles a course can have at most."""
    return max(0, math.ceil((length - RUN_UP) / spacing[0])) + 1


def difficulty_at(x: float, difficulty: float, length: float, curriculum: bool) -> float:
    """Return how difficult an obstacle at ``x`` is; with a curriculum it rises up to ``length``."""
    return difficulty * min(max(x / length, 0.0), 1.0) if curriculum else difficulty


def draw_course(
    rng: np.random.Generator,
    kinds: Sequence[str],
    *,
    length: float,
    spacing: tuple[float, float],
    difficulty: float,
    curriculum: bool,
    width: float = math.inf,
) -> Course:
    """Draw a course: obstacles of the given kinds, each as likely as another.

    Every size of an obstacle is drawn uniformly between what is half as difficult as the place and
    what is as difficult; 0 is the easiest and 1 the hardest size of its kind.
    """
    obstacles = []
    begin = RUN_UP
    while begin < length:
        kind = OBSTACLES[kinds[int(rng.integers(len(kinds)))]]
        here = difficulty_at(begin, difficulty, length, curriculum)
        extent, top, share = (
            easiest + (hardest - easiest) * rng.uniform(here / 2, here)
            for easiest, hardest in (kind.length, kind.top, kind.share)
        )
        low, high = -width / 2, width / 2
        if share < 1:
            low, high = (
                (low, low + share * width) if rng.integers(2) else (high - share * width, high)
            )
        obstacles.append((begin, begin + extent, top, low, high))
        begin += extent + rng.uniform(*spacing)
    side_top = OBSTACLES["wall"].top[1] if math.isfinite(width) else 0.0
    return Course(np.array(obstacles).reshape(-1, 5), width, side_top)
