"""What an update does, as a function of its number."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rerpi_rllib.core.constraints import Constraint
from rerpi_rllib.core.settings import LearningSettings


@dataclass(frozen=True)
class Plan:
    """What an update does beside the critic's step, which is part of all of them.

    Args:
        improve_policy: whether Steps 2 and 3 are done.
        is_late: whether it is in the last quarter of a target period; a tensor in compiled updates.
        copy_targets: whether the target networks are replaced after it.
    """

    improve_policy: bool = True
    is_late: bool | Tensor = True
    copy_targets: bool = False

    def moves(self, constraint: Constraint) -> bool | Tensor:
        """Tell whether the constraint's multiplier takes a step.

        A trust region is for the policy that is copied. Earlier in a target period the KL is smaller
        whatever the multiplier is, and would pull it down.
        """
        return True if constraint.schedule == "always" else self.is_late


def plan_update(number: int, settings: LearningSettings) -> Plan:
    """Plan the update with this number; the first one has the number 1."""
    period = settings.target_update_period
    place = (number - 1) % period + 1
    return Plan(
        improve_policy=number % settings.policy_update_period == 0,
        is_late=4 * place > 3 * period,
        copy_targets=place == period,
    )
