"""Functions with a known optimum that take the place of Q: the paper's sphere and Rosenbrock.

Both are functions of ``y = a + s``. They map states ``[B, D]`` and actions ``[..., B, D]`` to values
``[..., B]``, which are zero at the optimum and negative elsewhere.
"""

from __future__ import annotations

from torch import Tensor


def sphere(states: Tensor, actions: Tensor) -> Tensor:
    """Return ``-sum y_i^2``; the best action is ``-s``."""
    return -(actions + states).square().sum(dim=-1)


def rosenbrock(states: Tensor, actions: Tensor) -> Tensor:
    """Return ``-sum 100 (y_{i+1} - y_i^2)^2 + (1 - y_i)^2``; the best action is ``1 - s``.

    The paper prints ``(1 - y_i^2)``, which is not bounded above.
    """
    y = actions + states
    valley = y[..., 1:] - y[..., :-1].square()
    return -(100.0 * valley.square() + (1.0 - y[..., :-1]).square()).sum(dim=-1)


FUNCTIONS = {"sphere": sphere, "rosenbrock": rosenbrock}
