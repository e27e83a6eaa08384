"""All that a learner holds: online and target networks, the multipliers and the count of updates."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rerpi_rllib.core.constraints import Constraint
from rerpi_rllib.core.critics import Critic
from rerpi_rllib.core.layers import NetworkSettings, Normalize
from rerpi_rllib.core.multipliers import Multiplier
from rerpi_rllib.core.peers import ALONE, Alone
from rerpi_rllib.core.policies import POLICIES, Policy, PolicySettings


class ActorCritic(nn.Module):
    """Online and target policy and critic, and the multipliers: the whole state of learning.

    Args:
        observation_size, action_size: O and D.
        policy: the ``kind`` of policy, a name in ``POLICIES``, and its :class:`PolicySettings`.
        critic: the arguments of :class:`Critic`.
        networks: the :class:`NetworkSettings` of both.
        clip_actions: whether the environment clips actions to [-1, 1].
        normalize_returns: whether the critic works with rewards in units of ``return_scale``.
        constraints: the constraints of Steps 2 and 3.
        inference_only: whether to hold the online policy alone, which is what acting needs.
    """

    # The learners of the same networks, if there are several.
    peers: Alone = ALONE
    num_updates: Tensor
    return_scale: Tensor | None
    policy: Policy
    target_policy: Policy

    def __init__(
        self,
        observation_size: int,
        action_size: int,
        *,
        policy: Mapping[str, Any],
        critic: Mapping[str, Any],
        networks: Mapping[str, Any] | None = None,
        clip_actions: bool,
        normalize_returns: bool = False,
        constraints: Sequence[Constraint] = (),
        inference_only: bool = False,
    ) -> None:
        super().__init__()
        settings = dict(policy)
        make_policy = POLICIES[settings.pop("kind", "gaussian")]
        shared = NetworkSettings(**(networks or {}))
        self.policy = make_policy(
            observation_size, action_size, PolicySettings(**settings, inputs=shared)
        )
        if inference_only:
            return
        self.critic = Critic(
            observation_size, action_size, clip_actions=clip_actions, inputs=shared, **critic
        )
        self.target_policy = copy.deepcopy(self.policy).requires_grad_(False)
        self.target_critic = copy.deepcopy(self.critic).requires_grad_(False)
        self.constraints = {constraint.part: constraint for constraint in constraints}
        self.multipliers = nn.ModuleDict(
            {
                constraint.multiplier: Multiplier(
                    minimum=constraint.minimum,
                    size=action_size if constraint.per_dimension else None,
                )
                for constraint in constraints
                if constraint.learned
            }
        )
        self.register_buffer("num_updates", torch.zeros((), dtype=torch.int64))
        self.register_buffer("return_scale", torch.ones(()) if normalize_returns else None)

    def set_observation_moments(self, mean: Tensor, stddev: Tensor) -> None:
        """Let all networks that normalize observations use these, each ``[O]``."""
        for module in self.modules():
            if isinstance(module, Normalize):
                module.set(mean, stddev)

    @torch.no_grad()
    def set_return_scale(self, scale: float) -> None:
        """Let the critic work with rewards in units of ``scale``, if returns are normalized.

        What it has learned stays the same in units of the rewards, unless it learns probabilities.
        """
        if self.return_scale is None:
            return
        new = torch.full_like(self.return_scale, scale)
        for critic in (self.critic, self.target_critic):
            critic.scale_values(self.return_scale / new)
        self.return_scale.copy_(new)

    def to_critic_units(self, rewards: Tensor) -> Tensor:
        """Convert rewards to the units in which the critic learns."""
        return rewards if self.return_scale is None else rewards / self.return_scale

    def to_reward_units(self, values: Tensor) -> Tensor:
        """Invert :meth:`to_critic_units`, for what people look at."""
        return values if self.return_scale is None else values * self.return_scale

    @torch.no_grad()
    def update_targets(self) -> None:
        """Copy the online networks to the target networks."""
        self.target_policy.load_state_dict(self.policy.state_dict())
        self.target_critic.load_state_dict(self.critic.state_dict())
