"""Policies by name: each is a distribution over actions and the network that computes it.

A new one is a file beside these, with both in it, and a line in ``POLICIES``. Its parts bring their
bounds (the settings ``epsilon_<part>``), multipliers, metrics, curves and lines of the display.
"""

from __future__ import annotations

from rerpi_rllib.core.policies.base import (
    WHOLE_POLICY,
    Distribution,
    Part,
    Policy,
    PolicySettings,
)
from rerpi_rllib.core.policies.categorical import CategoricalPolicy
from rerpi_rllib.core.policies.gaussian import (
    DeterministicPolicy,
    FullGaussianPolicy,
    GaussianPolicy,
)
from rerpi_rllib.core.policies.mixture import MixturePolicy

__all__ = ["POLICIES", "WHOLE_POLICY", "Distribution", "Part", "Policy", "PolicySettings"]

# The values of the setting `policy`.
POLICIES: dict[str, type[Policy]] = {
    "gaussian": GaussianPolicy,
    "full_gaussian": FullGaussianPolicy,
    "mixture": MixturePolicy,
    "categorical": CategoricalPolicy,
    "deterministic": DeterministicPolicy,
}
