"""Functions with a known optimum that stand for Q: the paper's sphere and Rosenbrock.

Both act on ``y = a + s``: states ``[B, D]`` and actions ``[..., B, D]`` give values ``[..., B]``,
zero at the optimum and negative elsewhere.
"""

from __future__ import annotations

from torch import Tensor


def sphere(states: Tensor, actions: Tensor) -> Tensor:
    """``-sum y_i^2``; the best action is ``-s``."""
    return -(actions + states).square().sum(dim=-1)


def rosenbrock(states: Tensor, actions: Tensor) -> Tensor:
    """``-sum 100 (y_{i+1} - y_i^2)^2 + (1 - y_i)^2``; the best action is ``1 - s``.

    The paper prints ``(1 - y_i^2)``, which is not bounded above.
    """
    y = actions + states
    valley = y[..., 1:] - y[..., :-1].square()
    return -(100.0 * valley.square() + (1.0 - y[..., :-1]).square()).sum(dim=-1)


FUNCTIONS = {"sphere": sphere, "rosenbrock": rosenbrock}
