"""The networks of the paper's appendix: policy, critic, and the set of all that a learner holds.

Both start with a linear layer, layer normalisation and tanh; ELU layers follow.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rerpi_rllib.core.distributions import DiagonalGaussian
from rerpi_rllib.core.multipliers import Multiplier


def _after_first_layer(sizes: Sequence[int]) -> nn.Sequential:
    """All of a network's hidden part but its first linear map: norm, tanh, then linear and ELU."""
    layers: list[nn.Module] = [nn.LayerNorm(sizes[0]), nn.Tanh()]
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ELU()]
    return nn.Sequential(*layers)


class GaussianPolicy(nn.Module):
    """State to :class:`DiagonalGaussian`: mean unbounded, stddev by softplus without limits."""

    def __init__(
        self, observation_size: int, action_size: int, layers: Sequence[int], initial_stddev: float
    ) -> None:
        super().__init__()
        self.first = nn.Linear(observation_size, layers[0])
        self.body = _after_first_layer(layers)
        self.mean = nn.Linear(layers[-1], action_size)
        self.stddev = nn.Linear(layers[-1], action_size)
        # Near-zero output weights: at the start every state has the same policy, zero mean and the
        # stddev asked for.
        for head in (self.mean, self.stddev):
            nn.init.normal_(head.weight, std=1e-2 / math.sqrt(layers[-1]))
            nn.init.zeros_(head.bias)
        nn.init.constant_(self.stddev.bias, math.log(math.expm1(initial_stddev)))

    def forward(self, observations: Tensor) -> DiagonalGaussian:
        hidden = self.body(self.first(observations))
        return DiagonalGaussian(self.mean(hidden), nn.functional.softplus(self.stddev(hidden)))


class Critic(nn.Module):
    """Q(s, a). Sees actions as the environment does: clipped to ``[-1, 1]`` if it has bounds."""

    def __init__(
        self, observation_size: int, action_size: int, layers: Sequence[int], clip_actions: bool
    ) -> None:
        super().__init__()
        # One linear layer on (s, a), kept in two parts and initialised as one.
        self.first_state = nn.Linear(observation_size, layers[0])
        self.first_action = nn.Linear(action_size, layers[0], bias=False)
        bound = 1.0 / math.sqrt(observation_size + action_size)
        for parameter in (*self.first_state.parameters(), *self.first_action.parameters()):
            nn.init.uniform_(parameter, -bound, bound)
        self.body = _after_first_layer(layers)
        self.value = nn.Linear(layers[-1], 1)
        self.clip_actions = clip_actions

    def forward(self, observations: Tensor, actions: Tensor) -> Tensor:
        """``observations`` ``[B, O]`` and ``actions`` ``[..., B, D]`` to ``[..., B]``.

        The state's half of the first layer is computed once for all of a state's actions.
        """
        if self.clip_actions:
            actions = actions.clamp(-1.0, 1.0)
        hidden = self.first_state(observations) + self.first_action(actions)
        return self.value(self.body(hidden)).squeeze(-1)


class ActorCritic(nn.Module):
    """Online and target policy and critic, and the multipliers: the whole state of learning.

    With ``inference_only`` it holds the online policy alone, which is what acting needs.
    """

    def __init__(
        self,
        observation_size: int,
        action_size: int,
        *,
        policy_layers: Sequence[int],
        critic_layers: Sequence[int],
        initial_stddev: float,
        clip_actions: bool,
        per_dimension_kl: bool = False,
        multipliers: Sequence[str] = ("alpha_mu", "alpha_sigma"),
        inference_only: bool = False,
    ) -> None:
        super().__init__()
        self.policy = GaussianPolicy(observation_size, action_size, policy_layers, initial_stddev)
        if inference_only:
            return
        self.critic = Critic(observation_size, action_size, critic_layers, clip_actions)
        self.target_policy = copy.deepcopy(self.policy).requires_grad_(False)
        self.target_critic = copy.deepcopy(self.critic).requires_grad_(False)
        size = action_size if per_dimension_kl else None
        self.multipliers = nn.ModuleDict(
            {
                name: Multiplier(size=size) if "alpha" in name else Multiplier(minimum=1e-8)
                for name in multipliers
            }
        )

    @torch.no_grad()
    def update_targets(self) -> None:
        """Copy the online networks to the target ones."""
        self.target_policy.load_state_dict(self.policy.state_dict())
        self.target_critic.load_state_dict(self.critic.state_dict())
