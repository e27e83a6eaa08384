"""Mixtures of Gaussians, for policies with several modes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from rerpi_rllib.core.policies.base import Distribution, Part, PolicySettings, output_layer
from rerpi_rllib.core.policies.categorical import Categorical, categorical_kl, draw
from rerpi_rllib.core.policies.gaussian import DiagonalGaussian, GaussianPolicy


@dataclass(frozen=True)
class GaussianMixture(Distribution):
    """M diagonal Gaussians: ``logits`` ``[B, M]``, ``mean`` and ``stddev`` ``[B, M, D]``.

    The KL of two mixtures has no closed form. What is bounded is the KL of the pairs (component,
    action), which is never smaller: the KL of the component's choice, plus the mean over the target's
    components of the KL between components of the same number.
    """

    logits: Tensor
    mean: Tensor
    stddev: Tensor

    @property
    def _components(self) -> DiagonalGaussian:
        return DiagonalGaussian(self.mean, self.stddev)

    def sample(self, n: int) -> Tensor:
        with torch.no_grad():
            batch, _, size = self.mean.shape
            chosen = draw(self.logits, n)
            index = chosen.unsqueeze(-1).expand(batch, n, size)
            mean, stddev = self.mean.gather(1, index), self.stddev.gather(1, index)
            return torch.addcmul(mean, torch.randn_like(mean), stddev).transpose(0, 1)

    def log_prob(self, actions: Tensor) -> Tensor:
        of_components = self._components.log_prob(actions.unsqueeze(-2))
        return torch.logsumexp(self.logits.log_softmax(dim=-1) + of_components, dim=-1)

    @property
    def mode(self) -> Tensor:
        """The mean of the heaviest component: the mean of all may lie where none of them is."""
        heaviest = self.logits.argmax(dim=-1)
        return self.mean[torch.arange(heaviest.shape[0], device=heaviest.device), heaviest]

    def hybrids(self, target: Self) -> dict[str, Distribution]:
        return {
            "mu": replace(target, mean=self.mean),
            "sigma": replace(target, stddev=self.stddev),
            "mixture": replace(target, logits=self.logits),
        }

    def part_kls(self, target: Self) -> dict[str, Tensor]:
        weights = target.logits.softmax(dim=-1).unsqueeze(-1)
        of_components = self._components.part_kls(target._components)
        kls = {part: (weights * kl).sum(dim=-2) for part, kl in of_components.items()}
        return kls | {"mixture": categorical_kl(self.logits, target.logits)}

    def kl(self, target: Self) -> Tensor:
        of_components = self._components.kl(target._components)
        weighted = (target.logits.softmax(dim=-1) * of_components).sum(dim=-1)
        return weighted + categorical_kl(self.logits, target.logits)

    def entropy(self) -> Tensor:
        """Return the entropy of the pairs (component, action), an upper bound."""
        of_components = (self.logits.softmax(dim=-1) * self._components.entropy()).sum(dim=-1)
        return of_components + Categorical(self.logits).entropy()

    def metrics(self) -> dict[str, Tensor]:
        return {
            "policy_stddev_mean": self.stddev.mean(),
            "mixture_entropy": Categorical(self.logits).entropy().mean(),
        }


class MixturePolicy(GaussianPolicy):
    """A policy with ``num_components`` diagonal Gaussians."""

    PARTS = (*GaussianPolicy.PARTS, Part("mixture", "mixture weights", 1e-4))
    is_reparameterizable = False

    def __init__(self, observation_size: int, action_size: int, settings: PolicySettings) -> None:
        components = settings.num_components
        super().__init__(observation_size, action_size, settings, components)
        # Components that start alike would stay alike.
        nn.init.normal_(self.mean.bias, std=settings.initial_stddev)
        layers = settings.covariance_layers
        self.mixture_body = self.make_body(layers) if layers else self.body
        self.logits = output_layer(self.covariance_hidden, components)

    def forward(self, observations: Tensor) -> Distribution:
        mean, stddev, _ = self.parameters_at(observations)
        shape = (self.settings.num_components, self.action_size)
        logits = self.logits(self.mixture_body(observations))
        return GaussianMixture(logits, mean.unflatten(-1, shape), stddev.unflatten(-1, shape))
