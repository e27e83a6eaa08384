"""The policy's distribution: a Gaussian with diagonal covariance, in normalised action units."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DiagonalGaussian:
    """Mean and standard deviation, ``[..., D]`` each; not squashed and not clipped."""

    mean: Tensor
    stddev: Tensor

    def sample(self, n: int) -> Tensor:
        """``n`` actions for each state, ``[n, ..., D]``, without gradients."""
        with torch.no_grad():
            noise = torch.randn((n, *self.mean.shape), dtype=self.mean.dtype, device=self.mean.device)
            return torch.addcmul(self.mean, noise, self.stddev)

    def log_prob(self, actions: Tensor) -> Tensor:
        """Log-density of ``actions`` ``[..., D]``, summed over dimensions."""
        standardised = (actions - self.mean) / self.stddev
        per_dimension = -0.5 * standardised.square() - self.stddev.log()
        return per_dimension.sum(dim=-1) - 0.5 * math.log(2.0 * math.pi) * self.mean.shape[-1]
