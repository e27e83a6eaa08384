"""Step 3 of the paper: fit the parametric policy to the weighted actions, within a trust region.

Shapes: ``actions`` ``[N, B, D]`` sampled from the target (old) policy, ``weights`` ``[N, B]``, means
and standard deviations ``[B, D]``. Gradients flow to the online policy and, through ``dual_loss``
alone, to the multipliers.

Paper: section 4.2 (decoupled fit) and equation 2 (its constraints).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rerpi_rllib.core.distributions import DiagonalGaussian, Distribution


@dataclass(frozen=True)
class Fit:
    """A fit's loss and its constraints, for any policy; scalars but for KLs of each dimension."""

    policy_loss: Tensor
    kls: dict[str, Tensor]
    penalty: Tensor
    dual_loss: Tensor


def fit_policy(
    kind: str,
    online: Distribution,
    target: Distribution,
    actions: Tensor,
    weights: Tensor,
    alphas: Mapping[str, Tensor | float],
    epsilons: Mapping[str, float],
    per_dimension: bool = False,
) -> Fit:
    """Fit ``online`` to weighted ``actions`` of ``target``.

    Args:
        kind: "decoupled" (each part of the policy with the others held at the target's, and with its
            own bound), "coupled" (one likelihood and one bound, named "pi") or "unconstrained".
        online, target: the policy to fit and the old one, which is constant.
        actions: ``[N, B, D]``.
        weights: ``[N, B]``, constants.
        alphas, epsilons: multipliers and bounds by the names of the constraints.
        per_dimension: bound the KL of each action dimension instead of their sum.

    Returns:
        ``policy_loss`` (cross-entropies), ``kls`` (means over states, ``[D]`` if ``per_dimension``),
        ``penalty`` (alpha * KL, moves the policy only), ``dual_loss`` (alpha * (epsilon - KL), moves
        the multipliers only).
    """
    kls: dict[str, Tensor] = {}
    if kind == "decoupled":
        policy_loss = torch.stack(
            [hybrid.cross_entropy(actions, weights) for hybrid in online.hybrids(target).values()]
        ).sum()
        kls = {name: kl.mean(dim=0) for name, kl in online.part_kls(target).items()}
        if not per_dimension:
            kls = {name: kl.sum() for name, kl in kls.items()}
    else:
        policy_loss = online.cross_entropy(actions, weights)
        if kind == "coupled":
            kls = {"pi": online.kl(target).mean()}
    penalty, dual_loss = torch.zeros_like(policy_loss), torch.zeros_like(policy_loss)
    for name, kl in kls.items():
        alpha = torch.as_tensor(alphas[name], dtype=kl.dtype, device=kl.device)
        if alpha.numel() > kl.numel():
            raise ValueError(
                f"The multiplier {name!r} has shape {tuple(alpha.shape)}, its KL {tuple(kl.shape)}: "
                "one for each action dimension is for per_dimension=True."
            )
        penalty = penalty + (alpha.detach() * kl).sum()
        dual_loss = dual_loss + (alpha * (epsilons[name] - kl.detach())).sum()
    return Fit(policy_loss, kls, penalty, dual_loss)


# -- The same for a diagonal Gaussian given by its tensors. --


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
    fit = fit_policy(
        "decoupled",
        DiagonalGaussian(mean, stddev),
        DiagonalGaussian(target_mean.detach(), target_stddev.detach()),
        actions,
        weights,
        {"mu": alpha_mu, "sigma": alpha_sigma},
        {"mu": epsilon_mu, "sigma": epsilon_sigma},
        per_dimension,
    )
    return DecoupledFit(fit.policy_loss, fit.kls["mu"], fit.kls["sigma"], fit.penalty, fit.dual_loss)


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
    fit = fit_policy(
        "coupled",
        DiagonalGaussian(mean, stddev),
        DiagonalGaussian(target_mean.detach(), target_stddev.detach()),
        actions,
        weights,
        {"pi": alpha},
        {"pi": epsilon},
    )
    return CoupledFit(fit.policy_loss, fit.kls["pi"], fit.penalty, fit.dual_loss)


def bandit_update(
    mean: Tensor,
    covariance: Tensor,
    actions: Tensor,
    weights: Tensor,
    step_mu: float,
    step_sigma: float,
) -> tuple[Tensor, Tensor]:
    """The decoupled fit in closed form for one state and a free Gaussian (appendix C).

    With fixed multipliers alpha the optimum moves by the shares ``step = 1 / (1 + alpha)`` towards
    the weighted samples. CMA-ES's rank-mu update is ``step_mu = 1``, which leaves the mean
    unregulated.

    Args:
        mean: ``[D]`` of the old policy.
        covariance: ``[D, D]`` of the old policy.
        actions: ``[N, D]``, sampled from it.
        weights: ``[N]``, sum to one.
        step_mu, step_sigma: between 0 (stay) and 1 (take the samples' mean and covariance).

    Returns:
        The new mean and covariance. The covariance is taken around the old mean.
    """
    offsets = actions - mean
    sample_covariance = (weights.unsqueeze(-1) * offsets).T @ offsets
    return (
        mean + step_mu * (weights @ offsets),
        (1.0 - step_sigma) * covariance + step_sigma * sample_covariance,
    )
