"""From settings and spaces to the networks, their constraints, and actions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from typing import Any, Literal

import gymnasium as gym
import torch
from torch import Tensor, nn

from rerpi_rllib.algorithm.faults import LARGEST_NUMBER
from rerpi_rllib.algorithm.moments import LARGEST_RETURN
from rerpi_rllib.algorithm.spaces import check_spaces, is_bounded, parts_of
from rerpi_rllib.core.layers import NetworkSettings, StreamSettings
from rerpi_rllib.core.networks import ActorCritic
from rerpi_rllib.core.policies import Distribution
from rerpi_rllib.core.policies.gaussian import Gaussian
from rerpi_rllib.core.recording import record
from rerpi_rllib.core.settings import LearningSettings

WhenStreams = Literal["auto", "always", "never"]

# The paper's hidden layers, which a Dict of these parts has streams in place of.
PAPER_POLICY_LAYERS = (200, 200, 200)
PAPER_CRITIC_LAYERS = (500, 500, 500)
_PAPER_PARTS = {"proprioception", "terrain"}
# The settings that say how streams are built.
STREAM_LAYERS = ("policy_stream_layers", "critic_stream_layers", "joint_layers")


def model_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Pick what modules and policies need out of all settings, in plain dictionaries.

    ``learning`` are the arguments of :class:`LearningSettings`, ``noise_correlation`` is that of
    :class:`ExplorationNoise`, ``streams`` are for :func:`build_networks`, which knows the spaces, and
    all others are the arguments of :class:`ActorCritic`.
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
        "streams": {
            # Checkpoints of earlier versions have none.
            "when": config.get("streams", "never"),
            **{key: tuple(config.get(key, ())) for key in STREAM_LAYERS},
        },
        "noise_correlation": config["noise_correlation"],
        "learning": asdict(LearningSettings.from_mapping(config)),
    }


def streams_of(
    observation_space: gym.Space[Any], model_config: Mapping[str, Any]
) -> dict[str, tuple[int, ...]]:
    """Return the ``sizes`` of an observation's parts and the layers of their streams, if any."""
    layers = dict(model_config["streams"])
    parts, when = parts_of(observation_space), layers.pop("when")
    if when == "always" and len(parts) < 2:
        raise ValueError(
            f"streams='always' is not allowed with the observation space {observation_space}: it "
            "must be a Dict of two or more vectors. Set streams='auto' or leave it out."
        )
    has_papers_layers = (
        model_config["networks"]["network"] == "paper"
        and model_config["policy"]["layers"] == PAPER_POLICY_LAYERS
        and model_config["critic"]["layers"] == PAPER_CRITIC_LAYERS
    )
    is_papers = has_papers_layers and set(parts) == _PAPER_PARTS
    if when == "always" or (when == "auto" and is_papers):
        return {"sizes": tuple(parts.values()), **layers}
    return {}


def build_networks(
    observation_space: gym.Space[Any],
    action_space: gym.Space[Any],
    model_config: Mapping[str, Any],
    inference_only: bool = False,
) -> ActorCritic:
    """Build the networks for these spaces, which are checked first."""
    check_spaces(observation_space, action_space, model_config["policy"]["kind"])
    bounded = is_bounded(action_space)
    policy, critic = dict(model_config["policy"]), dict(model_config["critic"])
    if streams := streams_of(observation_space, model_config):
        for settings, key in ((policy, "policy_stream_layers"), (critic, "critic_stream_layers")):
            settings["streams"] = StreamSettings(streams["sizes"], streams[key])
            settings["layers"] = streams["joint_layers"]
    return ActorCritic(
        gym.spaces.flatdim(observation_space),
        gym.spaces.flatdim(action_space),
        policy=policy,
        critic=critic,
        networks=model_config["networks"],
        clip_actions=bounded,
        normalize_returns=model_config["normalize_returns"],
        constraints=LearningSettings(**model_config["learning"]).constraints(bounded),
        inference_only=inference_only,
    )


class ExplorationNoise(nn.Module):
    """Standard normal noise ``[B, D]`` that stays similar from one step to the next.

    Each number is an autoregressive process of the first order. It goes on from one episode to the
    next.

    Args:
        correlation: of the noise at one step with that at the one before.
        size: D.
    """

    noise: Tensor

    def __init__(self, correlation: float, size: int) -> None:
        super().__init__()
        self._correlation, self._renewal = correlation, math.sqrt(1.0 - correlation**2)
        # It belongs to the process that acts, and not to what is learned.
        self.register_buffer("noise", torch.empty(0, size), persistent=False)

    def begin(self, observations: Tensor) -> None:
        """Draw noise for this number of states, unless there is some already."""
        if len(self.noise) != len(observations):
            shape = len(observations), self.noise.shape[-1]
            with torch.inference_mode(False):  # Otherwise it could be used in that mode only.
                self.noise = torch.randn(shape, device=observations.device)

    def forward(self) -> Tensor:
        fresh = torch.randn_like(self.noise)
        return self.noise.mul_(self._correlation).add_(fresh, alpha=self._renewal)


def make_noise(nets: ActorCritic, model_config: Mapping[str, Any]) -> ExplorationNoise | None:
    """Make the noise for exploration; None if that of each step is independent of all others."""
    correlation = model_config["noise_correlation"]
    if not correlation or not nets.policy.is_reparameterizable:
        return None
    return ExplorationNoise(correlation, nets.policy.action_size)


def act(
    nets: ActorCritic, observations: Tensor, explore: bool, noise: ExplorationNoise | None = None
) -> tuple[Tensor, Tensor, Distribution]:
    """Choose actions.

    Args:
        nets: the networks, of which the online policy acts.
        observations: ``[B, O]``.
        explore: whether to sample actions instead of taking the mode.
        noise: the samples' noise, if it is correlated in time.

    Returns:
        The actions as the environment has them, before scaling and clipping; the same as networks
        and distributions have them; and the policy at the observations.
    """
    policy: Distribution = nets.policy(observations)
    if not explore:
        actions = policy.mode
    elif noise is None:
        actions = policy.sample(1)[0]
    else:
        assert isinstance(policy, Gaussian)
        actions = policy.displaced(noise())
    return nets.policy.decode_actions(actions), actions, policy


def usable(observations: Tensor) -> Tensor:
    """Return observations that a policy can act on; broken ones are dropped after they have been."""
    return observations.nan_to_num(posinf=0.0, neginf=0.0).clamp(-LARGEST_NUMBER, LARGEST_NUMBER)


class _Acting(nn.Module):
    """:func:`act` as a module, which is what can be recorded with weights that change."""

    def __init__(self, nets: ActorCritic, explore: bool, noise: ExplorationNoise | None) -> None:
        super().__init__()
        self.nets, self.explore, self.noise = nets, explore, noise

    def forward(self, observations: Tensor) -> Tensor:
        return act(self.nets, observations, self.explore, self.noise)[0]


def record_act(
    nets: ActorCritic, observations: Tensor, explore: bool, noise: ExplorationNoise | None = None
) -> Callable[[Tensor], Tensor]:
    """Return what does the same as :func:`act` for observations of this shape, but faster.

    For a few observations, Python takes longer to call each layer than torch takes to compute it.
    """
    # Recording draws a sample, which must not change the ones that follow.
    with torch.random.fork_rng(devices=[]), _unchanged(noise):
        return record(_Acting(nets, explore, noise), observations)


@contextmanager
def _unchanged(noise: ExplorationNoise | None) -> Iterator[None]:
    if noise is None:
        yield
        return
    before = noise.noise.clone()
    yield
    noise.noise.copy_(before)
