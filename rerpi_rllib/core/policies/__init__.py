"""Policies by name: each is a distribution over actions and the network that computes it.

A new one is a file beside these, with both in it, and a line in ``POLICIES``. Its parts bring their
bounds (the settings ``epsilon_<part>``), multipliers, metrics, curves and lines of the display.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any

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

__all__ = [
    "POLICIES",
    "WHOLE_POLICY",
    "Distribution",
    "Part",
    "Policy",
    "PolicySettings",
    "build_policy",
    "describe_policy",
]

# The values of the setting `policy`.
POLICIES: dict[str, type[Policy]] = {
    "gaussian": GaussianPolicy,
    "full_gaussian": FullGaussianPolicy,
    "mixture": MixturePolicy,
    "categorical": CategoricalPolicy,
    "deterministic": DeterministicPolicy,
}


def describe_policy(policy: Policy) -> dict[str, Any]:
    """Describe a policy's network, without its weights, in what JSON can hold."""
    return {
        "kind": next(name for name, kind in POLICIES.items() if type(policy) is kind),
        "observation_size": policy.observation_size,
        "action_size": policy.action_size,
        "settings": asdict(policy.settings),
    }


def build_policy(description: Mapping[str, Any]) -> Policy:
    """Build the network that :func:`describe_policy` has described, with new weights."""
    settings = dict(description["settings"])
    for field in fields(PolicySettings):
        if is_dataclass(field.default_factory):  # Settings of their own.
            settings[field.name] = field.default_factory(**settings.get(field.name, {}))
    return POLICIES[description["kind"]](
        description["observation_size"], description["action_size"], PolicySettings(**settings)
    )
