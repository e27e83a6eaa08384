"""Which observation and action spaces are supported, and which parts observations have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from rerpi_rllib.core.policies import POLICIES
from rerpi_rllib.envs import Joined


def check_spaces(
    observation_space: gym.Space[object], action_space: gym.Space[object], policy: str
) -> None:
    """Raise ``ValueError`` unless observations are vectors and actions suit the kind of policy."""
    _check_vector("observation", observation_space, "vector observations are needed")
    if not POLICIES[policy].is_discrete:
        hint = f"policy={policy!r} needs continuous actions"
        if isinstance(action_space, gym.spaces.Discrete):
            hint = f"policy='categorical' is for discrete actions, {hint}"
        _check_vector("action", action_space, hint)
        _check_bounds(action_space)
    elif not isinstance(action_space, gym.spaces.Discrete) or action_space.start != 0:
        raise ValueError(
            f"The action space is {action_space}; policy={policy!r} needs discrete actions, "
            "a Discrete that starts at 0."
        )


def parts_of(observation_space: gym.Space[Any]) -> dict[str, int]:
    """Return the sizes of a Dict's parts in the vector that they were joined to; none of others."""
    if isinstance(observation_space, Joined):
        return observation_space.parts
    # On the old API stack RLlib joins those that nobody else has.
    original = getattr(observation_space, "original_space", None)
    if not isinstance(original, gym.spaces.Dict):
        return {}
    return {str(name): gym.spaces.flatdim(part) for name, part in original.items()}


def join_parts(
    observation_space: gym.Space[Any], observations: Tensor | Mapping[str, Tensor]
) -> Tensor:
    """Join the parts ``[B, ...]`` of a Dict to ``[B, O]``; observations that are joined stay so."""
    if not isinstance(observations, Mapping):
        return observations
    parts = [observations[name].flatten(1).float() for name in parts_of(observation_space)]
    return torch.cat(parts, dim=-1)


def is_bounded(action_space: gym.Space[object]) -> bool:
    """Tell whether actions have bounds, to which they are scaled and clipped."""
    return isinstance(action_space, gym.spaces.Box) and bool(action_space.is_bounded())


def _check_bounds(action_space: gym.Space[object]) -> None:
    """Raise ``ValueError`` if some sides of a box have bounds and others have none.

    The policy works in [-1, 1] where there are bounds and in the environment's units where there are
    none; a box that is in between would let actions out.
    """
    if not isinstance(action_space, gym.spaces.Box) or action_space.is_bounded():
        return
    if action_space.bounded_below.any() or action_space.bounded_above.any():
        raise ValueError(
            f"The action space is {action_space}, with bounds on some sides only; actions need "
            "finite bounds on all sides or on none. Wrap the environment with "
            "gymnasium.wrappers.ClipAction, or with TransformAction to a Box with finite bounds."
        )


def _check_vector(name: str, space: gym.Space[object], hint: str) -> None:
    if isinstance(space, gym.spaces.Dict) and name == "observation":
        hint = (
            "a Dict is joined to one vector unless env_to_module_connector is set: let RLlib's "
            "FlattenObservations be one of these connectors, since " + hint
        )
    if not isinstance(space, gym.spaces.Box):
        raise ValueError(f"The {name} space is {space}; {hint}, a Box of one dimension.")
    if len(space.shape) != 1 or space.shape[0] == 0:
        raise ValueError(
            f"The {name} space has shape {space.shape} (images and the like); "
            f"{hint}, a Box of one dimension."
        )
    if not np.issubdtype(space.dtype, np.floating):
        raise ValueError(f"The {name} space has dtype {space.dtype}; {hint}, float32 or float64.")
