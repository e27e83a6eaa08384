"""A bound on a KL divergence and its Lagrange multiplier, described by one value.

Everything that deals with constraints reads these values: the fit, the multipliers that are learned,
the plan of an update, the live display, the plots and the reports. None of them has a list of the
constraints there are; only Step 2 knows its two by their parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

MultiplierSchedule = Literal["late", "always"]


@dataclass(frozen=True)
class Constraint:
    """``KL < epsilon``, held by a multiplier.

    Args:
        part: what is bounded: a part of the policy ("mu", "sigma", ...) for Step 3, the action
            weights ("nonparametric") or the weights of the action penalty ("penalty") for Step 2.
        label: the same in words, for people ("mean").
        epsilon: the bound.
        multiplier: the name of the multiplier, in the learner's state and among its metrics.
        is_trust_region: whether it bounds how far the policy moves (Step 3), and not the action
            weights (Step 2).
        per_dimension: whether the KL of each action dimension has a bound and a multiplier.
        learned: whether the multiplier takes gradient steps. A temperature may instead be solved for.
        schedule: whether the multiplier learns in every update, or only late in each target period,
            when the KL has grown to what it will be at the copy.
        minimum: the smallest value that a learned multiplier takes.
    """

    part: str
    label: str
    epsilon: float
    multiplier: str
    is_trust_region: bool = True
    per_dimension: bool = False
    learned: bool = True
    schedule: MultiplierSchedule = "always"
    minimum: float = 1e-3

    @property
    def kl(self) -> str:
        """The name of the metric that holds the KL."""
        return f"kl_{self.part}"

    @property
    def kl_at_copy(self) -> str:
        """The name of the metric that holds the KL at the moment of a target copy."""
        return f"{self.kl}_at_target_update"

    def scale(self, alpha: Tensor) -> Tensor:
        """Return the factor of its part of the policy's loss, given the multiplier.

        Adam does not see a constant scale, but a multiplier that rises or falls tenfold within a few
        hundred updates would throw its running averages off. One scale for all constraints would let
        the covariance's multiplier set the size of the mean's steps.
        """
        return 1.0 / (1.0 + alpha)

    @property
    def multiplier_label(self) -> str:
        """What people call the multiplier."""
        return "multiplier" if self.is_trust_region else "temperature"
