"""Gaussian policies: with diagonal or full covariance, and with fixed exploration noise."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional

from rerpi_rllib.core.policies.base import Distribution, Part, Policy, PolicySettings, output_layer

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


def gaussian_kl_mean(mean: Tensor, target_mean: Tensor, target_stddev: Tensor) -> Tensor:
    """Return ``KL(target || N(mean, target_stddev))`` of each dimension."""
    return 0.5 * ((mean - target_mean) / target_stddev).square()


def gaussian_kl_stddev(stddev: Tensor, target_stddev: Tensor) -> Tensor:
    """Return ``KL(target || N(target_mean, stddev))`` of each dimension.

    It is written in the relative difference of the two, because bounds of 1e-5 and below are
    differences that the textbook form loses to cancellation in float32.
    """
    excess = (target_stddev - stddev) / stddev
    return excess + 0.5 * excess.square() - torch.log1p(excess)


@dataclass(frozen=True)
class Gaussian(Distribution):
    """A Gaussian with ``mean`` ``[B, D]``, whose covariance is the subclass's."""

    mean: Tensor

    @abstractmethod
    def displaced(self, noise: Tensor) -> Tensor:
        """Turn standard normal ``noise`` ``[..., B, D]`` into actions.

        Gradients flow to the mean and the covariance.
        """

    def reparameterized_sample(self, n: int) -> Tensor:
        """Draw ``n`` actions for each state; gradients flow as in :meth:`displaced`."""
        shape = (n, *self.mean.shape)
        return self.displaced(torch.randn(shape, dtype=self.mean.dtype, device=self.mean.device))

    def sample(self, n: int) -> Tensor:
        with torch.no_grad():
            return self.reparameterized_sample(n)

    @property
    def mode(self) -> Tensor:
        return self.mean

    def hybrids(self, target: Self) -> Mapping[str, Distribution]:
        return {"mu": replace(target, mean=self.mean), "sigma": replace(self, mean=target.mean)}


@dataclass(frozen=True)
class DiagonalGaussian(Gaussian):
    """A Gaussian with ``mean`` and ``stddev``, ``[B, D]`` each."""

    stddev: Tensor

    def displaced(self, noise: Tensor) -> Tensor:
        return torch.addcmul(self.mean, noise, self.stddev)

    def log_prob(self, actions: Tensor) -> Tensor:
        standardised = (actions - self.mean) / self.stddev
        per_dimension = -0.5 * standardised.square() - self.stddev.log() - _HALF_LOG_TWO_PI
        return per_dimension.sum(dim=-1)

    def summarise(self, actions: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        """Return the sum of the weights and the weighted moments of the actions around the mean."""
        with torch.no_grad():
            offsets = actions - self.mean
            weighted = weights.unsqueeze(-1) * offsets
            total = weights.sum(dim=0).unsqueeze(-1)
            return total, weighted.sum(dim=0), (weighted * offsets).sum(dim=0)

    def cross_entropy(self, target: Self, summary: Sequence[Tensor]) -> Tensor:
        total, first, square = summary
        if self.mean is not target.mean:
            shift = self.mean - target.mean
            square = square + shift * (total * shift - 2.0 * first)
        per_dimension = 0.5 * square / self.stddev.square() + total * (
            self.stddev.log() + _HALF_LOG_TWO_PI
        )
        return per_dimension.mean(dim=0)

    def entropy(self) -> Tensor:
        return (self.stddev.log() + _HALF_LOG_TWO_PI + 0.5).sum(dim=-1)

    def part_kls(self, target: Self) -> dict[str, Tensor]:
        return {
            "mu": gaussian_kl_mean(self.mean, target.mean, target.stddev),
            "sigma": gaussian_kl_stddev(self.stddev, target.stddev),
        }

    def kl(self, target: Self) -> Tensor:
        per_dimension = gaussian_kl_stddev(self.stddev, target.stddev) + gaussian_kl_mean(
            target.mean, self.mean, self.stddev
        )
        return per_dimension.sum(dim=-1)

    def metrics(self) -> dict[str, Tensor]:
        return {"policy_stddev_mean": self.stddev.mean()}

    def to_inputs(self) -> Tensor:
        """Join mean and log stddev, which is RLlib's order for a diagonal Gaussian."""
        return torch.cat([self.mean, self.stddev.log()], dim=-1)

    def from_inputs(self, inputs: Tensor) -> Self:
        mean, log_stddev = torch.chunk(inputs, 2, dim=-1)
        return type(self)(mean, log_stddev.exp())


@dataclass(frozen=True)
class DeterministicWithNoise(DiagonalGaussian):
    """A deterministic policy, the mean, with exploration noise of a fixed standard deviation."""

    def hybrids(self, target: Self) -> Mapping[str, Distribution]:
        return {"mu": self}

    def part_kls(self, target: Self) -> dict[str, Tensor]:
        return {"mu": gaussian_kl_mean(self.mean, target.mean, target.stddev)}


@dataclass(frozen=True)
class FullGaussian(Gaussian):
    """A Gaussian with ``mean`` ``[B, D]`` and the lower Cholesky factor ``[B, D, D]``."""

    cholesky: Tensor

    def displaced(self, noise: Tensor) -> Tensor:
        return self.mean + (self.cholesky @ noise.unsqueeze(-1)).squeeze(-1)

    def _whiten(self, offsets: Tensor) -> Tensor:
        """Return ``L^-1 offsets`` for ``offsets`` ``[..., B, D]``."""
        columns = offsets.reshape(-1, *offsets.shape[-2:]).permute(1, 2, 0)
        white: Tensor = torch.linalg.solve_triangular(self.cholesky, columns, upper=False)
        return white.permute(2, 0, 1).reshape(offsets.shape)

    def _log_diagonal(self) -> Tensor:
        return self.cholesky.diagonal(dim1=-2, dim2=-1).log()

    def log_prob(self, actions: Tensor) -> Tensor:
        square = self._whiten(actions - self.mean).square()
        return -(0.5 * square + self._log_diagonal() + _HALF_LOG_TWO_PI).sum(dim=-1)

    def entropy(self) -> Tensor:
        return (self._log_diagonal() + _HALF_LOG_TWO_PI + 0.5).sum(dim=-1)

    def part_kls(self, target: Self) -> dict[str, Tensor]:
        return {
            "mu": 0.5 * target._whiten(self.mean - target.mean).square().sum(dim=-1),
            "sigma": self._kl_covariance(target),
        }

    def _kl_covariance(self, target: Self) -> Tensor:
        """Return (|A|^2 - D) / 2 - log det A for A = L^-1 L_target, which is lower triangular."""
        ratio: Tensor = torch.linalg.solve_triangular(self.cholesky, target.cholesky, upper=False)
        off_diagonal = 0.5 * ratio.tril(-1).square().sum(dim=(-2, -1))
        # The diagonal of A is the ratio of the factors' diagonals: as for standard deviations.
        diagonal = gaussian_kl_stddev(
            self.cholesky.diagonal(dim1=-2, dim2=-1), target.cholesky.diagonal(dim1=-2, dim2=-1)
        )
        return off_diagonal + diagonal.sum(dim=-1)

    def kl(self, target: Self) -> Tensor:
        shift = 0.5 * self._whiten(self.mean - target.mean).square().sum(dim=-1)
        return self._kl_covariance(target) + shift

    def metrics(self) -> dict[str, Tensor]:
        # The square root of the covariance's diagonal is the length of the factor's rows.
        return {"policy_stddev_mean": torch.linalg.vector_norm(self.cholesky, dim=-1).mean()}


class GaussianPolicy(Policy):
    """The paper's policy: mean and standard deviation of each action dimension."""

    PARTS: ClassVar[tuple[Part, ...]] = (
        Part("mu", "mean", 5e-4, per_dimension=True),
        Part("sigma", "covariance", 1e-5, per_dimension=True),
    )
    learns_covariance = True
    is_reparameterizable = True

    def __init__(
        self, observation_size: int, action_size: int, settings: PolicySettings, components: int = 1
    ) -> None:
        super().__init__(observation_size, action_size, settings)
        hidden, layers = settings.layers[-1], settings.covariance_layers
        self.mean = output_layer(hidden, components * action_size)
        self.covariance_body = self.make_body(layers) if layers else None
        self.covariance_hidden = layers[-1] if layers else hidden
        learned = math.sqrt(settings.initial_stddev**2 - settings.min_stddev**2)
        self.stddev = output_layer(
            self.covariance_hidden, components * action_size, math.log(math.expm1(learned))
        )

    def parameters_at(self, observations: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean, standard deviation and the hidden layer behind the latter."""
        hidden = self.body(observations)
        mean = self.mean(hidden)
        if self.settings.tanh_mean:
            mean = mean.tanh()
        if self.covariance_body is not None:
            hidden = self.covariance_body(observations)
        stddev = functional.softplus(self.stddev(hidden))
        if self.settings.min_stddev:
            stddev = (stddev.square() + self.settings.min_stddev**2).sqrt()
        return mean, stddev, hidden

    def forward(self, observations: Tensor) -> Distribution:
        mean, stddev, _ = self.parameters_at(observations)
        return DiagonalGaussian(mean, stddev)


class FullGaussianPolicy(GaussianPolicy):
    """A Gaussian policy whose action dimensions are correlated."""

    PARTS = (Part("mu", "mean", 5e-4), Part("sigma", "covariance", 1e-5))

    _rows: Tensor
    _columns: Tensor

    def __init__(self, observation_size: int, action_size: int, settings: PolicySettings) -> None:
        super().__init__(observation_size, action_size, settings)
        rows, columns = torch.tril_indices(action_size, action_size, -1)
        self.register_buffer("_rows", rows, persistent=False)
        self.register_buffer("_columns", columns, persistent=False)
        if action_size > 1:
            self.below_diagonal = output_layer(self.covariance_hidden, len(rows))

    def forward(self, observations: Tensor) -> Distribution:
        mean, stddev, hidden = self.parameters_at(observations)
        cholesky = torch.diag_embed(stddev)
        if self.action_size > 1:
            cholesky[..., self._rows, self._columns] = self.below_diagonal(hidden)
        return FullGaussian(mean, cholesky)


class DeterministicPolicy(Policy):
    """A mean with exploration noise of a fixed standard deviation."""

    PARTS = (Part("mu", "mean", 5e-4, per_dimension=True),)
    is_reparameterizable = True

    fixed_stddev: Tensor

    def __init__(self, observation_size: int, action_size: int, settings: PolicySettings) -> None:
        super().__init__(observation_size, action_size, settings)
        self.mean = output_layer(settings.layers[-1], action_size)
        self.register_buffer("fixed_stddev", torch.full((action_size,), settings.initial_stddev))

    def forward(self, observations: Tensor) -> Distribution:
        mean = self.mean(self.body(observations))
        if self.settings.tanh_mean:
            mean = mean.tanh()
        return DeterministicWithNoise(mean, self.fixed_stddev.expand_as(mean))
