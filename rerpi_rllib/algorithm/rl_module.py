"""RLlib's view of the networks: acting with the online policy, and the loss as ``forward_train``."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import InferenceOnlyAPI
from ray.rllib.core.rl_module.torch import TorchRLModule

from rerpi_rllib.core.losses import LossSettings, rerpi_loss
from rerpi_rllib.core.networks import ActorCritic

TOTAL_LOSS = "total_loss"
METRICS = "metrics"


class RERPITorchRLModule(TorchRLModule, InferenceOnlyAPI):
    """Online and target policy and critic and the Lagrange multipliers in one module.

    ``model_config`` holds ``networks`` (arguments of :class:`ActorCritic`) and ``loss`` (arguments of
    :class:`LossSettings`). Being parameters of the module, the multipliers are checkpointed with it
    and averaged over several learners.
    """

    def setup(self) -> None:
        check_spaces(self.observation_space, self.action_space)
        self.settings = LossSettings(**self.model_config["loss"])
        # Set by the learner before each update.
        self.improve_policy = self.move_multipliers = True
        self.nets = ActorCritic(
            int(np.prod(self.observation_space.shape)),
            int(np.prod(self.action_space.shape)),
            **self.model_config["networks"],
            clip_actions=bool(self.action_space.is_bounded()),
            inference_only=self.inference_only,
        )

    def get_non_inference_attributes(self) -> list[str]:
        return ["nets.critic", "nets.target_policy", "nets.target_critic", "nets.multipliers"]

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        policy = self.nets.policy(batch[Columns.OBS])
        # RLlib's diagonal Gaussian is parametrised by mean and log standard deviation.
        return {Columns.ACTION_DIST_INPUTS: torch.cat([policy.mean, policy.stddev.log()], dim=-1)}

    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        # The loss is computed here, inside the forward pass, because that is what data-parallel
        # learners synchronise gradients for.
        loss, metrics = rerpi_loss(
            self.nets, batch, self.settings, self.improve_policy, self.move_multipliers
        )
        return {TOTAL_LOSS: loss, METRICS: metrics}


def check_spaces(observation_space: gym.Space, action_space: gym.Space) -> None:
    """Raise ``ValueError`` unless both are vectors of real numbers."""
    for name, space, hint in (
        ("action", action_space, "RERPI needs continuous actions"),
        ("observation", observation_space, "RERPI needs vector observations"),
    ):
        if not isinstance(space, gym.spaces.Box):
            raise ValueError(f"The {name} space is {space}; {hint}, a Box of one dimension.")
        if len(space.shape) != 1 or space.shape[0] == 0:
            raise ValueError(
                f"The {name} space has shape {space.shape} (images and the like); "
                f"{hint}, a Box of one dimension."
            )
        if not np.issubdtype(space.dtype, np.floating):
            raise ValueError(f"The {name} space has dtype {space.dtype}; {hint}, float32 or float64.")
