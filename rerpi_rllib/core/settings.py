"""The numbers and choices of the algorithm, as the core reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from rerpi_rllib.core.constraints import Constraint, MultiplierSchedule
from rerpi_rllib.core.policies import POLICIES, WHOLE_POLICY, Part

PolicyEvaluation = Literal["td0", "nstep", "retrace"]
Weighting = Literal["exponential", "ranking", "identity"]
TemperatureSolver = Literal["exact", "adam"]
FitKind = Literal["decoupled", "coupled", "unconstrained", "value_gradient"]


@dataclass(frozen=True)
class LearningSettings:
    """What an update does; names and defaults are documented with ``RERPIConfig``.

    ``bounds`` has the settings ``epsilon_<part>`` by part.
    """

    gamma: float
    policy_evaluation: PolicyEvaluation
    num_bootstrap_samples: int
    n_step: int
    retrace_lambda: float
    target_update_period: int
    policy_update_period: int
    num_action_samples: int
    weighting: Weighting
    epsilon: float
    temperature_solver: TemperatureSolver
    ranking_eta: float
    epsilon_penalty: float | None
    policy: str
    fit: FitKind
    per_dimension_kl: bool
    multiplier_schedule: MultiplierSchedule
    entropy_weight: float
    bounds: Mapping[str, float]

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any]) -> LearningSettings:
        """Pick the core's settings out of all settings of the algorithm."""
        names = {field.name for field in fields(cls)} - {"bounds"}
        bounds = {part.name: config[f"epsilon_{part.name}"] for part in all_parts()}
        return cls(**{name: config[name] for name in names}, bounds=bounds)

    def constraints(self, bounded_actions: bool = True) -> tuple[Constraint, ...]:
        """List the constraints of Steps 2 and 3, in the order in which they are shown.

        Args:
            bounded_actions: whether the action space has bounds; without them there is no penalty.
        """
        if self.fit == "value_gradient":
            return ()
        policy = POLICIES[self.policy]
        parts = {"decoupled": policy.PARTS, "coupled": (WHOLE_POLICY,)}.get(self.fit, ())
        constraints = [
            Constraint(
                part.name,
                part.label,
                self.bounds[part.name],
                f"alpha_{part.name}",
                per_dimension=self.per_dimension_kl and part.per_dimension,
                schedule=self.multiplier_schedule,
            )
            for part in parts
        ]
        penalty = self.epsilon_penalty if bounded_actions and not policy.is_discrete else None
        for part, label, epsilon, multiplier in (
            ("nonparametric", "weights", self.epsilon, "temperature"),
            ("penalty", "action penalty", penalty, "penalty_temperature"),
        ):
            if epsilon is not None and (part == "penalty" or self.weighting == "exponential"):
                learned = self.temperature_solver == "adam"
                constraints.append(
                    Constraint(part, label, epsilon, multiplier, False, learned=learned, minimum=1e-8)
                )
        return tuple(constraints)


def all_parts() -> list[Part]:
    """List the parts of all policies, each of which has a setting ``epsilon_<part>``."""
    parts = {part.name: part for policy in POLICIES.values() for part in policy.PARTS}
    return list((parts | {WHOLE_POLICY.name: WHOLE_POLICY}).values())
