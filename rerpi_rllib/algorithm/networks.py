"""From settings and spaces to the networks, their constraints, and actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn

from rerpi_rllib.algorithm.faults import LARGEST_NUMBER
from rerpi_rllib.algorithm.moments import LARGEST_RETURN
from rerpi_rllib.algorithm.spaces import check_spaces, is_bounded
from rerpi_rllib.core.layers import NetworkSettings
from rerpi_rllib.core.networks import ActorCritic
from rerpi_rllib.core.policies import Distribution
from rerpi_rllib.core.recording import record
from rerpi_rllib.core.settings import LearningSettings


def model_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Pick what modules and policies need out of all settings, in plain dictionaries.

    ``learning`` are the arguments of :class:`LearningSettings`, all others of :class:`ActorCritic`.
    """
    return {
        "policy": {
            "kind": config["policy"],
            "layers": tuple(config["policy_layers"]),
            "covariance_layers": config["covariance_layers"] and tuple(config["covariance_layers"]),
            "num_components": config["num_mixture_components"],
            **{key: config[key] for key in ("initial_stddev", "min_stddev", "tanh_mean")},
        },
        "critic": {
            "kind": config["critic"],
            "layers": tuple(config["critic_layers"]),
            "value_range": (
                (-LARGEST_RETURN, LARGEST_RETURN)
                if config["normalize_returns"]
                else tuple(config["value_range"])
            ),
            "aggregation": config["critic_aggregation"],
            **{key: config[key] for key in ("num_critics", "num_atoms")},
        },
        "normalize_returns": config["normalize_returns"],
        "networks": {field.name: config[field.name] for field in fields(NetworkSettings)},
        "learning": asdict(LearningSettings.from_mapping(config)),
    }


def build_networks(
    observation_space: gym.Space[Any],
    action_space: gym.Space[Any],
    model_config: Mapping[str, Any],
    inference_only: bool = False,
) -> ActorCritic:
    """Build the networks for these spaces, which are checked first."""
    check_spaces(observation_space, action_space, model_config["policy"]["kind"])
    bounded = is_bounded(action_space)
    return ActorCritic(
        gym.spaces.flatdim(observation_space),
        gym.spaces.flatdim(action_space),
        policy=model_config["policy"],
        critic=model_config["critic"],
        networks=model_config["networks"],
        clip_actions=bounded,
        normalize_returns=model_config["normalize_returns"],
        constraints=LearningSettings(**model_config["learning"]).constraints(bounded),
        inference_only=inference_only,
    )


def act(
    nets: ActorCritic, observations: Tensor, explore: bool
) -> tuple[Tensor, Tensor, Distribution]:
    """Choose actions.

    Returns:
        The actions as the environment has them, before scaling and clipping; the same as networks
        and distributions have them; and the policy at the observations.
    """
    policy: Distribution = nets.policy(observations)
    actions = policy.sample(1)[0] if explore else policy.mode
    return nets.policy.decode_actions(actions), actions, policy


def usable(observations: Tensor) -> Tensor:
    """Return observations that a policy can act on; broken ones are dropped after they have been."""
    return observations.nan_to_num(posinf=0.0, neginf=0.0).clamp(-LARGEST_NUMBER, LARGEST_NUMBER)


class _Acting(nn.Module):
    """:func:`act` as a module, which is what can be recorded with weights that change."""

    def __init__(self, nets: ActorCritic, explore: bool) -> None:
        super().__init__()
        self.nets, self.explore = nets, explore

    def forward(self, observations: Tensor) -> Tensor:
        return act(self.nets, observations, self.explore)[0]


def record_act(nets: ActorCritic, observations: Tensor, explore: bool) -> Callable[[Tensor], Tensor]:
    """Return what does the same as :func:`act` for observations of this shape, but faster.

    For a few observations, Python takes longer to call each layer than torch takes to compute it.
    """
    # Recording draws a sample, which must not change the ones that follow.
    with torch.random.fork_rng(devices=[]):
        return record(_Acting(nets, explore), observations)
