"""Categorical policies, for discrete actions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from rerpi_rllib.core.policies.base import (
    WHOLE_POLICY,
    Distribution,
    Policy,
    PolicySettings,
    output_layer,
)


def categorical_kl(logits: Tensor, target_logits: Tensor) -> Tensor:
    """Return ``KL(target || online)`` over the last dimension."""
    log_target = target_logits.log_softmax(dim=-1)
    return (log_target.exp() * (log_target - logits.log_softmax(dim=-1))).sum(dim=-1)


def draw(logits: Tensor, n: int) -> Tensor:
    """Draw ``n`` numbers for each state, ``[B, n]``; logits that are NaN do not matter.

    With them torch would raise an error, on a GPU one that ends the process. What follows from them
    becomes NaN anyway, and is found there.
    """
    return torch.multinomial(logits.nan_to_num().softmax(dim=-1), n, replacement=True)


@dataclass(frozen=True)
class Categorical(Distribution):
    """Probabilities of D discrete actions by their ``logits`` ``[B, D]``.

    Step 2 weights all of the actions instead of samples.
    """

    logits: Tensor

    def sample(self, n: int) -> Tensor:
        with torch.no_grad():
            chosen = draw(self.logits, n).T
            return functional.one_hot(chosen, self.logits.shape[-1]).to(self.logits.dtype)

    def candidates(self, n: int) -> tuple[Tensor, Tensor | None]:
        size = self.logits.shape[-1]
        every = torch.eye(size, dtype=self.logits.dtype, device=self.logits.device)
        actions = every.unsqueeze(1).expand(size, len(self.logits), size)
        return actions, self.logits.log_softmax(dim=-1).T

    def log_prob(self, actions: Tensor) -> Tensor:
        return (actions * self.logits.log_softmax(dim=-1)).sum(dim=-1)

    @property
    def mode(self) -> Tensor:
        best = self.logits.argmax(dim=-1)
        return functional.one_hot(best, self.logits.shape[-1]).to(self.logits.dtype)

    def entropy(self) -> Tensor:
        log_probs = self.logits.log_softmax(dim=-1)
        return -(log_probs.exp() * log_probs).sum(dim=-1)

    def hybrids(self, target: Self) -> dict[str, Distribution]:
        return {WHOLE_POLICY.name: self}

    def part_kls(self, target: Self) -> dict[str, Tensor]:
        return {WHOLE_POLICY.name: self.kl(target)}

    def kl(self, target: Self) -> Tensor:
        return categorical_kl(self.logits, target.logits)

    def metrics(self) -> dict[str, Tensor]:
        return {"policy_entropy": self.entropy().mean()}


class CategoricalPolicy(Policy):
    """A policy for discrete actions; outside of the networks they are numbers from 0 to D - 1."""

    PARTS = (WHOLE_POLICY,)
    is_discrete = True

    def __init__(self, observation_size: int, action_size: int, settings: PolicySettings) -> None:
        super().__init__(observation_size, action_size, settings)
        self.logits = output_layer(settings.layers[-1], action_size)

    def forward(self, observations: Tensor) -> Distribution:
        return Categorical(self.logits(self.body(observations)))

    def encode_actions(self, actions: Tensor) -> Tensor:
        return functional.one_hot(actions.squeeze(-1).long(), self.action_size).to(actions.dtype)

    def decode_actions(self, actions: Tensor) -> Tensor:
        return actions.argmax(dim=-1)
