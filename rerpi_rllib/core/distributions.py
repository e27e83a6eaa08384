"""The policies' distributions over actions, in normalised action units; not squashed, not clipped.

What Step 3 needs of a distribution, beside sampling and densities, is how it comes apart into
*parts* that are fitted and bounded one by one (the paper's section 4.2): mean and covariance of a
Gaussian, and the weights of its components if it is a mixture.

Shapes: B states, D action dimensions; ``actions`` ``[..., B, D]``. Discrete actions are one-hot, so D
is their number.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import Self

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


class Distribution(ABC):
    """A distribution over actions for each of B states."""

    # Names of the parts; each has a bound `epsilon_<part>` and a multiplier `alpha_<part>`.
    PARTS: ClassVar[tuple[str, ...]]

    @abstractmethod
    def sample(self, n: int) -> Tensor:
        """``n`` actions for each state, ``[n, B, D]``, without gradients."""

    @abstractmethod
    def log_prob(self, actions: Tensor) -> Tensor:
        """Log-density of ``actions`` ``[..., B, D]``: ``[..., B]``."""

    @property
    @abstractmethod
    def mode(self) -> Tensor:
        """The greedy action of each state, ``[B, D]``."""

    @abstractmethod
    def hybrids(self, target: Self) -> Mapping[str, Distribution]:
        """For each part: this distribution's part with all other parts of ``target``."""

    @abstractmethod
    def part_kls(self, target: Self) -> dict[str, Tensor]:
        """For each part ``KL(target || hybrid)``: ``[B, D]``, or ``[B]`` if it is one for all D."""

    @abstractmethod
    def kl(self, target: Self) -> Tensor:
        """``KL(target || self)``, ``[B]``."""

    @abstractmethod
    def metrics(self) -> dict[str, Tensor]:
        """What to watch: how wide the distribution is."""

    def split(self, sizes: list[int]) -> list[Self]:
        """The distributions of the first so many states, of the next, and so on."""
        tensors = [getattr(self, field.name).split(sizes) for field in fields(self)]  # type: ignore
        return [type(self)(*parts) for parts in zip(*tensors)]

    def candidates(self, n: int) -> tuple[Tensor, Tensor | None]:
        """Actions that stand for the policy ``[N, B, D]``; their log-probabilities if not sampled."""
        return self.sample(n), None

    def cross_entropy(self, actions: Tensor, weights: Tensor) -> Tensor:
        """``-sum_i w_i log p(a_i)``, mean over states; ``actions`` and ``weights`` are constants."""
        return -(weights * self.log_prob(actions)).sum(dim=0).mean()


def gaussian_kl_mean(mean: Tensor, target_mean: Tensor, target_stddev: Tensor) -> Tensor:
    """``KL(target || N(mean, target_stddev))`` of each dimension."""
    return 0.5 * ((mean - target_mean) / target_stddev).square()


def gaussian_kl_stddev(stddev: Tensor, target_stddev: Tensor) -> Tensor:
    """``KL(target || N(target_mean, stddev))`` of each dimension.

    Written in the relative difference of the two, because bounds of 1e-5 and below are differences
    that the textbook form loses to cancellation in float32.
    """
    excess = (target_stddev - stddev) / stddev
    return excess + 0.5 * excess.square() - torch.log1p(excess)


@dataclass(frozen=True)
class Gaussian(Distribution):
    """Mean ``[B, D]``; the covariance is the subclass's."""

    mean: Tensor

    PARTS: ClassVar[tuple[str, ...]] = ("mu", "sigma")

    @abstractmethod
    def reparameterized_sample(self, n: int) -> Tensor:
        """``n`` actions for each state through which gradients flow to mean and covariance."""

    def sample(self, n: int) -> Tensor:
        with torch.no_grad():
            return self.reparameterized_sample(n)

    def _noise(self, n: int) -> Tensor:
        return torch.randn((n, *self.mean.shape), dtype=self.mean.dtype, device=self.mean.device)

    @property
    def mode(self) -> Tensor:
        return self.mean

    def hybrids(self, target: Self) -> Mapping[str, Distribution]:
        return {"mu": replace(target, mean=self.mean), "sigma": replace(self, mean=target.mean)}

    @abstractmethod
    def entropy(self) -> Tensor:
        """``[B]``."""


@dataclass(frozen=True)
class DiagonalGaussian(Gaussian):
    """Mean and standard deviation, ``[B, D]`` each."""

    stddev: Tensor

    def reparameterized_sample(self, n: int) -> Tensor:
        return torch.addcmul(self.mean, self._noise(n), self.stddev)

    def log_prob(self, actions: Tensor) -> Tensor:
        standardised = (actions - self.mean) / self.stddev
        per_dimension = -0.5 * standardised.square() - self.stddev.log() - _HALF_LOG_TWO_PI
        return per_dimension.sum(dim=-1)

    def cross_entropy(self, actions: Tensor, weights: Tensor) -> Tensor:
        # Needs only the weighted moments of the actions, so that the [N, B, D] tensor takes no part
        # in the backward pass.
        center = self.mean.detach()
        with torch.no_grad():
            offsets = actions - center
            weighted = weights.unsqueeze(-1) * offsets
            total = weights.sum(dim=0).unsqueeze(-1)
            first, second = weighted.sum(dim=0), (weighted * offsets).sum(dim=0)
        shift = self.mean - center
        square = second - 2.0 * shift * first + total * shift.square()
        per_dimension = 0.5 * square / self.stddev.square() + total * (
            self.stddev.log() + _HALF_LOG_TWO_PI
        )
        return per_dimension.sum(dim=-1).mean()

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


@dataclass(frozen=True)
class DeterministicWithNoise(DiagonalGaussian):
    """A deterministic policy, the mean, with exploration noise of a fixed standard deviation."""

    PARTS = ("mu",)

    def hybrids(self, target: Self) -> Mapping[str, Distribution]:
        return {"mu": self}

    def part_kls(self, target: Self) -> dict[str, Tensor]:
        return {"mu": gaussian_kl_mean(self.mean, target.mean, target.stddev)}


@dataclass(frozen=True)
class FullGaussian(Gaussian):
    """Mean ``[B, D]`` and the covariance's lower Cholesky factor ``[B, D, D]``."""

    cholesky: Tensor

    def reparameterized_sample(self, n: int) -> Tensor:
        return self.mean + (self.cholesky @ self._noise(n).unsqueeze(-1)).squeeze(-1)

    def _whiten(self, offsets: Tensor) -> Tensor:
        """``L^-1 offsets`` for ``offsets`` ``[..., B, D]``."""
        columns = offsets.reshape(-1, *offsets.shape[-2:]).permute(1, 2, 0)
        white = torch.linalg.solve_triangular(self.cholesky, columns, upper=False)
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
        """With A = L^-1 L_target, which is lower triangular: (|A|^2 - D) / 2 - log det A."""
        ratio = torch.linalg.solve_triangular(self.cholesky, target.cholesky, upper=False)
        off_diagonal = 0.5 * ratio.tril(-1).square().sum(dim=(-2, -1))
        # A's diagonal is that of the factors divided by each other: as for standard deviations.
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


@dataclass(frozen=True)
class GaussianMixture(Distribution):
    """M diagonal Gaussians: ``logits`` ``[B, M]``, ``mean`` and ``stddev`` ``[B, M, D]``.

    The KL of two mixtures has no closed form. What is bounded is the KL of the pairs (component,
    action), which is never smaller: that of the component's choice, plus the mean over the target's
    components of the KL between components of the same number.
    """

    logits: Tensor
    mean: Tensor
    stddev: Tensor

    PARTS = ("mu", "sigma", "mixture")

    @property
    def _log_weights(self) -> Tensor:
        return self.logits.log_softmax(dim=-1)

    def sample(self, n: int) -> Tensor:
        with torch.no_grad():
            batch, _, size = self.mean.shape
            chosen = torch.multinomial(self.logits.softmax(dim=-1), n, replacement=True)
            index = chosen.unsqueeze(-1).expand(batch, n, size)
            mean, stddev = self.mean.gather(1, index), self.stddev.gather(1, index)
            return torch.addcmul(mean, torch.randn_like(mean), stddev).transpose(0, 1)

    def log_prob(self, actions: Tensor) -> Tensor:
        components = DiagonalGaussian(self.mean, self.stddev).log_prob(actions.unsqueeze(-2))
        return torch.logsumexp(self._log_weights + components, dim=-1)

    @property
    def mode(self) -> Tensor:
        """The mean of the heaviest component: the mean of all may lie where none of them is."""
        heaviest = self.logits.argmax(dim=-1)
        return self.mean[torch.arange(len(heaviest), device=heaviest.device), heaviest]

    def hybrids(self, target: Self) -> dict[str, GaussianMixture]:
        return {
            "mu": replace(target, mean=self.mean),
            "sigma": replace(target, stddev=self.stddev),
            "mixture": replace(target, logits=self.logits),
        }

    def part_kls(self, target: Self) -> dict[str, Tensor]:
        weights = target.logits.softmax(dim=-1).unsqueeze(-1)
        components = DiagonalGaussian(self.mean, self.stddev).part_kls(
            DiagonalGaussian(target.mean, target.stddev)
        )
        kls = {part: (weights * kl).sum(dim=-2) for part, kl in components.items()}
        return kls | {"mixture": categorical_kl(self.logits, target.logits)}

    def kl(self, target: Self) -> Tensor:
        components = DiagonalGaussian(self.mean, self.stddev).kl(
            DiagonalGaussian(target.mean, target.stddev)
        )
        weighted = (target.logits.softmax(dim=-1) * components).sum(dim=-1)
        return weighted + categorical_kl(self.logits, target.logits)

    def metrics(self) -> dict[str, Tensor]:
        return {
            "policy_stddev_mean": self.stddev.mean(),
            "mixture_entropy": Categorical(self.logits).entropy().mean(),
        }


def categorical_kl(logits: Tensor, target_logits: Tensor) -> Tensor:
    """``KL(target || online)`` over the last dimension."""
    log_target = target_logits.log_softmax(dim=-1)
    return (log_target.exp() * (log_target - logits.log_softmax(dim=-1))).sum(dim=-1)


@dataclass(frozen=True)
class Categorical(Distribution):
    """Discrete actions: ``logits`` ``[B, D]``. All of them are weighted, instead of samples."""

    logits: Tensor

    PARTS = ("pi",)

    def sample(self, n: int) -> Tensor:
        with torch.no_grad():
            chosen = torch.multinomial(self.logits.softmax(dim=-1), n, replacement=True).T
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
        """``[B]``."""
        log_probs = self.logits.log_softmax(dim=-1)
        return -(log_probs.exp() * log_probs).sum(dim=-1)

    def hybrids(self, target: Self) -> dict[str, Categorical]:
        return {"pi": self}

    def part_kls(self, target: Self) -> dict[str, Tensor]:
        return {"pi": self.kl(target)}

    def kl(self, target: Self) -> Tensor:
        return categorical_kl(self.logits, target.logits)

    def metrics(self) -> dict[str, Tensor]:
        return {"policy_entropy": self.entropy().mean()}
