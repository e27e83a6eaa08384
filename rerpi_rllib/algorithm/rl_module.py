"""RLlib's view of the networks: acting with the online policy, and the loss as ``forward_train``."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import InferenceOnlyAPI
from ray.rllib.core.rl_module.torch import TorchRLModule

from rerpi_rllib.core.distributions import Distribution
from rerpi_rllib.core.losses import LossSettings, rerpi_loss
from rerpi_rllib.core.networks import ActorCritic

TOTAL_LOSS = "total_loss"
METRICS = "metrics"


def build_networks(
    observation_space: gym.Space,
    action_space: gym.Space,
    model_config: dict[str, Any],
    inference_only: bool = False,
) -> ActorCritic:
    """The networks for these spaces, which are checked first."""
    check_spaces(observation_space, action_space, model_config["loss"]["policy"])
    bounded = isinstance(action_space, gym.spaces.Box) and action_space.is_bounded()
    return ActorCritic(
        gym.spaces.flatdim(observation_space),
        gym.spaces.flatdim(action_space),
        **model_config["networks"],
        clip_actions=bool(bounded),
        inference_only=inference_only,
    )


def choose(
    nets: ActorCritic, observations: torch.Tensor, explore: bool
) -> tuple[torch.Tensor, Distribution, torch.Tensor]:
    """Actions as the environment has them (before scaling and clipping); the policy, and the same
    actions as it has them.
    """
    policy = nets.policy(observations)
    actions = policy.sample(1)[0] if explore else policy.mode
    return nets.policy.decode_actions(actions), policy, actions


def act(
    nets: ActorCritic, observations: torch.Tensor, explore: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Actions as the environment has them, and their log-densities."""
    decoded, policy, actions = choose(nets, observations, explore)
    return decoded, policy.log_prob(actions)


class RERPITorchRLModule(TorchRLModule, InferenceOnlyAPI):
    """Online and target policy and critic and the Lagrange multipliers in one module.

    ``model_config`` holds ``networks`` (arguments of :class:`ActorCritic`) and ``loss`` (arguments of
    :class:`LossSettings`). Being parameters of the module, the multipliers are checkpointed with it
    and averaged over several learners.
    """

    def setup(self) -> None:
        self.settings = LossSettings(**self.model_config["loss"])
        # Set by the learner before each update.
        self.improve_policy = self.move_multipliers = True
        self.nets = build_networks(
            self.observation_space, self.action_space, self.model_config, self.inference_only
        )

    def get_non_inference_attributes(self) -> list[str]:
        return ["nets.critic", "nets.target_policy", "nets.target_critic", "nets.multipliers"]

    # Actions are drawn here, since not every distribution of ours is one that RLlib knows.

    def _forward_inference(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return self._act(batch, explore=False)

    def _forward_exploration(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return self._act(batch, explore=True)

    def _act(self, batch: dict[str, Any], explore: bool) -> dict[str, Any]:
        actions, log_probs = act(self.nets, batch[Columns.OBS], explore)
        return {Columns.ACTIONS: actions, Columns.ACTION_LOGP: log_probs}

    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        # The loss is computed here, inside the forward pass, because that is what data-parallel
        # learners synchronise gradients for.
        loss, metrics = rerpi_loss(
            self.nets, batch, self.settings, self.improve_policy, self.move_multipliers
        )
        return {TOTAL_LOSS: loss, METRICS: metrics}


def check_spaces(observation_space: gym.Space, action_space: gym.Space, policy: str) -> None:
    """Raise ``ValueError`` unless observations are vectors and actions suit the kind of policy."""
    _check_vector("observation", observation_space, "vector observations are needed")
    if policy != "categorical":
        hint = f"policy={policy!r} needs continuous actions"
        if isinstance(action_space, gym.spaces.Discrete):
            hint = f"policy='categorical' is for discrete actions, {hint}"
        _check_vector("action", action_space, hint)
    elif not isinstance(action_space, gym.spaces.Discrete) or action_space.start != 0:
        raise ValueError(
            f"The action space is {action_space}; policy='categorical' needs discrete actions, "
            "a Discrete that starts at 0."
        )


def _check_vector(name: str, space: gym.Space, hint: str) -> None:
    if not isinstance(space, gym.spaces.Box):
        raise ValueError(f"The {name} space is {space}; {hint}, a Box of one dimension.")
    if len(space.shape) != 1 or space.shape[0] == 0:
        raise ValueError(
            f"The {name} space has shape {space.shape} (images and the like); "
            f"{hint}, a Box of one dimension."
        )
    if not np.issubdtype(space.dtype, np.floating):
        raise ValueError(f"The {name} space has dtype {space.dtype}; {hint}, float32 or float64.")
