"""Step 3 of the paper: fit the parametric policy to the weighted actions, within a trust region.

Shapes: ``actions`` ``[N, B, D]`` sampled from the target (old) policy, ``weights`` ``[N, B]``, means
and standard deviations ``[B, D]``. Gradients flow to the online policy and, through the dual losses
alone, to the multipliers.

Paper: section 4.2 (decoupled fit) and equation 2 (its constraints).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rerpi_rllib.core.constraints import Constraint
from rerpi_rllib.core.policies import WHOLE_POLICY, Distribution
from rerpi_rllib.core.policies.gaussian import DiagonalGaussian


@dataclass(frozen=True)
class Fit:
    """The losses of a fit and its KLs.

    Args:
        policy_loss: the sum of the cross-entropies.
        scaled_loss: cross-entropies and penalties, each part with the scale of its constraint.
        penalties: alpha * KL by part, which moves the policy only.
        kls: the mean KL over states of each constraint by part, ``[D]`` if it is per dimension.
        dual_losses: alpha * (epsilon - KL) by part, which moves the multiplier only.
    """

    policy_loss: Tensor
    scaled_loss: Tensor
    penalties: Mapping[str, Tensor]
    kls: Mapping[str, Tensor]
    dual_losses: Mapping[str, Tensor]

    @property
    def penalty(self) -> Tensor:
        """The sum of the penalties."""
        return functools.reduce(
            torch.add, self.penalties.values(), torch.zeros_like(self.policy_loss)
        )


def _total(values: Tensor) -> Tensor:
    """Sum over dimensions, if there are any."""
    return values.sum() if values.dim() else values


def fit_policy(
    kind: str,
    online: Distribution,
    target: Distribution,
    summary: Sequence[Tensor],
    constraints: Sequence[tuple[Constraint, Tensor | float]],
) -> Fit:
    """Fit ``online`` to weighted actions of ``target``.

    Args:
        kind: "decoupled" (each part of the policy with the others held at the target's, and with its
            own bound), "coupled" (one likelihood and one bound) or "unconstrained".
        online, target: the policy to fit and the old one, which is constant.
        summary: what ``target.summarise`` has returned for the actions and their weights.
        constraints: a constraint with the value of its multiplier for each part of a decoupled fit,
            one for the whole policy of a coupled fit.
    """
    if kind == "decoupled":
        entropies = {
            part: hybrid.cross_entropy(target, summary)
            for part, hybrid in online.hybrids(target).items()
        }
        state_kls = online.part_kls(target)
    else:
        entropies = {WHOLE_POLICY.name: online.cross_entropy(target, summary)}
        state_kls = {WHOLE_POLICY.name: online.kl(target)} if constraints else {}
    totals = {part: _total(entropy) for part, entropy in entropies.items()}
    scaled, penalties, kls, dual_losses = dict(totals), {}, {}, {}
    for constraint, multiplier in constraints:
        part = constraint.part
        kl = state_kls[part].mean(dim=0)
        kl = kl if constraint.per_dimension else _total(kl)
        alpha = torch.as_tensor(multiplier, dtype=kl.dtype, device=kl.device)
        if alpha.numel() > kl.numel():
            raise ValueError(
                f"The multiplier of {part!r} has shape {tuple(alpha.shape)} and its KL "
                f"{tuple(kl.shape)}: one for each action dimension is for per_dimension=True."
            )
        fixed_alpha = alpha.detach()
        penalty = fixed_alpha * kl
        kls[part], penalties[part] = kl, _total(penalty)
        if entropies[part].dim() == kl.dim() == 1:
            # Each dimension has a loss and a multiplier of its own.
            scaled[part] = (constraint.scale(fixed_alpha) * (entropies[part] + penalty)).sum()
        else:
            largest = fixed_alpha.max() if fixed_alpha.dim() else fixed_alpha
            scaled[part] = constraint.scale(largest) * (totals[part] + penalties[part])
        dual_losses[part] = _total(alpha * (constraint.epsilon - kl.detach()))
    return Fit(
        functools.reduce(torch.add, totals.values()),
        functools.reduce(torch.add, scaled.values()),
        penalties,
        kls,
        dual_losses,
    )


# -- The same for a diagonal Gaussian given by its tensors. --


@dataclass(frozen=True)
class DecoupledFit:
    """The result of :func:`decoupled_fit`: scalars, except the KLs of a per-dimension fit."""

    policy_loss: Tensor
    kl_mu: Tensor
    kl_sigma: Tensor
    penalty: Tensor
    dual_loss: Tensor


@dataclass(frozen=True)
class CoupledFit:
    """The result of :func:`coupled_fit`: scalars."""

    policy_loss: Tensor
    kl: Tensor
    penalty: Tensor
    dual_loss: Tensor


def _bound(
    part: str, alpha: Tensor | float, epsilon: float, per_dimension: bool = False
) -> tuple[Constraint, Tensor | float]:
    constraint = Constraint(part, part, epsilon, f"alpha_{part}", per_dimension=per_dimension)
    return constraint, alpha


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
    """Fit mean and covariance separately, each with its own bound: the paper's method.

    The mean is fitted with the target's covariance and the covariance around the target's mean, so
    that moving the mean towards good actions no longer shrinks the covariance.

    Args:
        actions: ``[N, B, D]``, sampled from the target policy.
        weights: ``[N, B]``, constants.
        mean, stddev: ``[B, D]`` of the online policy.
        target_mean, target_stddev: ``[B, D]`` of the target policy, constants.
        alpha_mu, alpha_sigma: Lagrange multipliers: scalars, or ``[D]`` if ``per_dimension``.
        epsilon_mu, epsilon_sigma: bounds of the two KLs.
        per_dimension: whether to bound the KL of each action dimension instead of their sum. Divide a
            joint bound by D to compare.

    Returns:
        ``policy_loss`` (both cross-entropies), ``kl_mu`` and ``kl_sigma`` (means over states, ``[D]``
        if ``per_dimension``), ``penalty`` (moves the policy only), ``dual_loss`` (moves the
        multipliers only).
    """
    target = DiagonalGaussian(target_mean.detach(), target_stddev.detach())
    fit = fit_policy(
        "decoupled",
        DiagonalGaussian(mean, stddev),
        target,
        target.summarise(actions, weights),
        [
            _bound("mu", alpha_mu, epsilon_mu, per_dimension),
            _bound("sigma", alpha_sigma, epsilon_sigma, per_dimension),
        ],
    )
    dual_loss = fit.dual_losses["mu"] + fit.dual_losses["sigma"]
    return DecoupledFit(fit.policy_loss, fit.kls["mu"], fit.kls["sigma"], fit.penalty, dual_loss)


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
    """Fit with one likelihood and one bound, ``KL(pi_target || pi) < epsilon``: MPO's fit.

    The arguments are those of :func:`decoupled_fit`, with one multiplier.
    """
    target = DiagonalGaussian(target_mean.detach(), target_stddev.detach())
    fit = fit_policy(
        "coupled",
        DiagonalGaussian(mean, stddev),
        target,
        target.summarise(actions, weights),
        [_bound("pi", alpha, epsilon)],
    )
    return CoupledFit(fit.policy_loss, fit.kls["pi"], fit.penalty, fit.dual_losses["pi"])


def bandit_update(
    mean: Tensor,
    covariance: Tensor,
    actions: Tensor,
    weights: Tensor,
    step_mu: float,
    step_sigma: float,
) -> tuple[Tensor, Tensor]:
    """Solve the decoupled fit in closed form for one state and a free Gaussian (appendix C).

    With fixed multipliers alpha the optimum moves by the shares ``step = 1 / (1 + alpha)`` towards
    the weighted samples. CMA-ES's rank-mu update is ``step_mu = 1``, which leaves the mean
    unregulated.

    Args:
        mean: ``[D]`` of the old policy.
        covariance: ``[D, D]`` of the old policy.
        actions: ``[N, D]``, sampled from it.
        weights: ``[N]``, with a sum of one.
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
