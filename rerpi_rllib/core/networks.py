"""All that a learner holds: online and target networks, and the multipliers."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rerpi_rllib.core.critics import Critic
from rerpi_rllib.core.multipliers import Multiplier
from rerpi_rllib.core.policies import Policy


class ActorCritic(nn.Module):
    """Online and target policy and critic, and the multipliers: the whole state of learning.

    Args:
        observation_size, action_size: O and D.
        policy, critic: arguments of :class:`Policy` and :class:`Critic`.
        clip_actions: whether the environment clips actions to [-1, 1].
        multipliers: names of the multipliers to learn.
        per_dimension_kl: whether mean and covariance have a multiplier for each dimension.
        inference_only: hold the online policy alone, which is what acting needs.
    """

    def __init__(
        self,
        observation_size: int,
        action_size: int,
        *,
        policy: Mapping[str, Any],
        critic: Mapping[str, Any],
        clip_actions: bool,
        multipliers: Sequence[str],
        per_dimension_kl: bool = False,
        inference_only: bool = False,
    ) -> None:
        super().__init__()
        self.policy = Policy(observation_size, action_size, **policy)
        if inference_only:
            return
        self.critic = Critic(observation_size, action_size, clip_actions=clip_actions, **critic)
        self.target_policy = copy.deepcopy(self.policy).requires_grad_(False)
        self.target_critic = copy.deepcopy(self.critic).requires_grad_(False)
        self.multipliers = nn.ModuleDict()
        for name in multipliers:
            if "temperature" in name:
                self.multipliers[name] = Multiplier(minimum=1e-8)
            else:
                split = per_dimension_kl and name in ("alpha_mu", "alpha_sigma")
                self.multipliers[name] = Multiplier(size=action_size if split else None)

    @torch.no_grad()
    def update_targets(self) -> None:
        """Copy the online networks to the target ones."""
        self.target_policy.load_state_dict(self.policy.state_dict())
        self.target_critic.load_state_dict(self.critic.state_dict())
