"""Step 3 of the paper: fit the parametric policy to the weighted actions, within a trust region.

Shapes: ``actions`` ``[N, B, D]`` sampled from the target (old) policy, ``weights`` ``[N, B]``, means
and standard deviations ``[B, D]``. Gradients flow to the online ``mean`` and ``stddev`` and, through
``dual_loss`` alone, to the multipliers.

The cross-entropies need only the weighted first and second moments of the actions around the target
mean, so the ``[N, B, D]`` tensor is read once and takes no part in the backward pass.

Paper: section 4.2 (decoupled fit) and equation 2 (its constraints).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


@dataclass(frozen=True)
class DecoupledFit:
    """What :func:`decoupled_fit` gives; all scalars but the KLs of a per-dimension fit."""

    policy_loss: Tensor
    kl_mu: Tensor
    kl_sigma: Tensor
    penalty: Tensor
    dual_loss: Tensor


@dataclass(frozen=True)
class CoupledFit:
    """What :func:`coupled_fit` gives; all scalars."""

    policy_loss: Tensor
    kl: Tensor
    penalty: Tensor
    dual_loss: Tensor


@dataclass(frozen=True)
class UnconstrainedFit:
    """What :func:`unconstrained_fit` gives; a scalar."""

    policy_loss: Tensor


@dataclass(frozen=True)
class _Moments:
    """Weighted sums over the actions: of one, of their offset to the target mean, of its square."""

    total: Tensor  # [B, 1]
    first: Tensor  # [B, D]
    second: Tensor  # [B, D]

    @classmethod
    def of(cls, actions: Tensor, weights: Tensor, center: Tensor) -> _Moments:
        with torch.no_grad():
            offsets = actions - center
            weighted = weights.unsqueeze(-1) * offsets
            return cls(
                weights.sum(dim=0).unsqueeze(-1),
                weighted.sum(dim=0),
                (weighted * offsets).sum(dim=0),
            )

    def cross_entropy(self, shift: Tensor | float, stddev: Tensor) -> Tensor:
        """``-sum_i w_i log N(a_i; center + shift, stddev)``, summed over D, mean over states."""
        square = self.second - 2.0 * shift * self.first + self.total * shift**2
        per_dimension = 0.5 * square / stddev.square() + self.total * (
            stddev.log() + _HALF_LOG_TWO_PI
        )
        return per_dimension.sum(dim=-1).mean()


def gaussian_kl_mean(mean: Tensor, target_mean: Tensor, target_stddev: Tensor) -> Tensor:
    """``KL(target || N(mean, target_stddev))`` of each dimension, ``[B, D]``."""
    return 0.5 * ((mean - target_mean) / target_stddev).square()


def gaussian_kl_stddev(stddev: Tensor, target_stddev: Tensor) -> Tensor:
    """``KL(target || N(target_mean, stddev))`` of each dimension, ``[B, D]``.

    Written in the relative difference of the two, because bounds of 1e-5 and below are differences
    that the textbook form loses to cancellation in float32.
    """
    excess = (target_stddev - stddev) / stddev
    return excess + 0.5 * excess.square() - torch.log1p(excess)


def _constraint(kl: Tensor, alpha: Tensor | float, epsilon: float) -> tuple[Tensor, Tensor]:
    """The Lagrangian's two halves: alpha * KL for the policy, alpha * (epsilon - KL) for alpha."""
    alpha = torch.as_tensor(alpha, dtype=kl.dtype, device=kl.device)
    return (alpha.detach() * kl).sum(), (alpha * (epsilon - kl.detach())).sum()


def decoupled_fit(
    actions: Tensor,
    weights: Tensor,
    mean: Tensor,
    stddev: Tensor,
    target_mean: Tensor,
    target_stddev: Tensor,
    alpha_mu: Tensor | float,
    alpha_sigma: Tensor | float,
    epsilon_mu: float,
    epsilon_sigma: float,
    per_dimension: bool = False,
) -> DecoupledFit:
    """The paper's method: mean and covariance are fitted separately, each with its own bound.

    The mean is fitted with the target's covariance and the covariance around the target's mean, so
    that moving the mean towards good actions no longer shrinks the covariance.

    Args:
        actions: ``[N, B, D]``, sampled from the target policy.
        weights: ``[N, B]``, constants.
        mean, stddev: ``[B, D]`` of the online policy.
        target_mean, target_stddev: ``[B, D]`` of the target policy, constants.
        alpha_mu, alpha_sigma: Lagrange multipliers: scalars, or ``[D]`` if ``per_dimension``.
        epsilon_mu, epsilon_sigma: bounds of the two KLs.
        per_dimension: bound the KL of each action dimension instead of their sum. Divide a joint
            bound by D to compare.

    Returns:
        ``policy_loss`` (both cross-entropies), ``kl_mu`` and ``kl_sigma`` (means over states, ``[D]``
        if ``per_dimension``), ``penalty`` (moves the policy only), ``dual_loss`` (moves the
        multipliers only).
    """
    moments = _Moments.of(actions, weights, target_mean)
    policy_loss = moments.cross_entropy(mean - target_mean, target_stddev) + moments.cross_entropy(
        0.0, stddev
    )
    kl_mu = gaussian_kl_mean(mean, target_mean, target_stddev).mean(dim=0)
    kl_sigma = gaussian_kl_stddev(stddev, target_stddev).mean(dim=0)
    if not per_dimension:
        kl_mu, kl_sigma = kl_mu.sum(), kl_sigma.sum()
    penalty_mu, dual_mu = _constraint(kl_mu, alpha_mu, epsilon_mu)
    penalty_sigma, dual_sigma = _constraint(kl_sigma, alpha_sigma, epsilon_sigma)
    return DecoupledFit(
        policy_loss, kl_mu, kl_sigma, penalty_mu + penalty_sigma, dual_mu + dual_sigma
    )


def coupled_fit(
    actions: Tensor,
    weights: Tensor,
    mean: Tensor,
    stddev: Tensor,
    target_mean: Tensor,
    target_stddev: Tensor,
    alpha: Tensor | float,
    epsilon: float,
) -> CoupledFit:
    """MPO's fit: one likelihood and one bound, ``KL(pi_target || pi) < epsilon``.

    Arguments as in :func:`decoupled_fit`, with one multiplier.
    """
    policy_loss = unconstrained_fit(actions, weights, mean, stddev).policy_loss
    # KL(N(m, s) || N(m', s')) = KL of the stddevs + (m - m')^2 / 2 s'^2.
    kl = (
        (gaussian_kl_stddev(stddev, target_stddev) + gaussian_kl_mean(target_mean, mean, stddev))
        .sum(dim=-1)
        .mean()
    )
    penalty, dual_loss = _constraint(kl, alpha, epsilon)
    return CoupledFit(policy_loss, kl, penalty, dual_loss)


def unconstrained_fit(
    actions: Tensor, weights: Tensor, mean: Tensor, stddev: Tensor
) -> UnconstrainedFit:
    """Plain weighted maximum likelihood, without a bound ("No KL bound" in the ablations).

    Arguments as in :func:`decoupled_fit`.
    """
    center = mean.detach()
    moments = _Moments.of(actions, weights, center)
    return UnconstrainedFit(moments.cross_entropy(mean - center, stddev))
