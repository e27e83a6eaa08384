"""Step 2 of the paper: turn Q-values into weights over the sampled actions.

Everywhere ``q_values`` is ``[N, B]``: N actions sampled for each of B states. All functions work
with Q minus its maximum over the actions of a state. The weights do not depend on that offset, and
in float32 a large one would otherwise cost the digits that decide between the actions.

``log_prior`` ``[N, B]`` is for actions that are not samples but all the actions there are: their
log-probabilities under the old policy. Without it every action counts the same, as samples do.

Paper: Relative Entropy Regularized Policy Iteration (Abdolmaleki et al., 2018), section 4.1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rerpi_rllib.core.peers import ALONE, Alone

# Below this fraction of the range of Q the exponential weights are one-hot for every purpose, so it
# stands in for "temperature zero" where the dual has no minimum at a positive temperature.
_SMALLEST_RELATIVE_TEMPERATURE = 1e-12
_SMALLEST_TEMPERATURE = 1e-30
_STEPS_ON_DEVICES = 10


def _floating(q_values: Tensor) -> torch.dtype:
    return q_values.dtype if q_values.is_floating_point() else torch.get_default_dtype()


def _below_maximum(q_values: Tensor) -> Tensor:
    return q_values - q_values.amax(dim=0, keepdim=True)


def _log_prior(q_values: Tensor, log_prior: Tensor | None) -> Tensor | float:
    return -math.log(len(q_values)) if log_prior is None else log_prior


def exponential_weights(
    q_values: Tensor, temperature: Tensor | float, log_prior: Tensor | None = None
) -> Tensor:
    """Return ``softmax(Q / temperature + log prior)`` over the actions of each state.

    Args:
        q_values: ``[N, B]``.
        temperature: scalar, positive.
        log_prior: ``[N, B]`` if the actions are not samples.

    Returns:
        ``[N, B]``, positive; each column sums to one.
    """
    scaled = _below_maximum(q_values) / temperature
    return torch.softmax(scaled if log_prior is None else scaled + log_prior, dim=0)


def temperature_dual(
    q_values: Tensor,
    temperature: Tensor | float,
    epsilon: float,
    log_prior: Tensor | None = None,
) -> Tensor:
    """Evaluate the convex dual whose minimum holds the weights' KL at ``epsilon``.

    ``g(eta) = eta * epsilon + eta * mean_j log mean_i exp(Q_ij / eta)``

    Args:
        q_values: ``[N, B]``.
        temperature: scalar eta; gradients flow to it alone.
        epsilon: bound on the mean KL of the weights to the uniform ones, or to the prior.
        log_prior: ``[N, B]`` if the actions are not samples.

    Returns:
        Scalar.
    """
    q_values = q_values.detach()
    scaled = _below_maximum(q_values) / temperature
    log_mean_exp = torch.logsumexp(scaled + _log_prior(q_values, log_prior), dim=0)
    return temperature * (epsilon + log_mean_exp.mean()) + q_values.amax(dim=0).mean()


def _kl_and_slope(
    below: Tensor, log_prior: Tensor | float, log_temperature: Tensor, peers: Alone
) -> tuple[Tensor, ...]:
    """Return the weights' KL to the prior and minus its derivative by the log temperature."""
    scaled = below * torch.exp(-log_temperature)
    masses = torch.exp(scaled + log_prior)
    total = masses.sum(dim=0)
    first = masses * scaled
    mean = first.sum(dim=0) / total
    variance = (first * scaled).sum(dim=0) / total - mean.square()
    return peers.mean((mean - total.log()).mean(), variance.mean())


@torch.no_grad()
def solve_temperature(
    q_values: Tensor, epsilon: float, log_prior: Tensor | None = None, peers: Alone = ALONE
) -> Tensor:
    """Find the temperature that minimises :func:`temperature_dual` for this batch.

    The dual's derivative is ``epsilon - KL(weights || prior)``, and that KL falls as the
    temperature rises, so this is a root search in one dimension: Newton steps on the logarithms of
    both, which are nearly proportional, kept inside a bracket. Three to eight steps are typical. On
    the CPU they end when the KL is reached. Elsewhere their number is fixed, since looking at a value
    would wait for the device.

    Where no temperature reaches ``epsilon`` the dual falls all the way to zero, and the smallest
    temperature considered is returned (1e-12 of the range of Q, or 1e-30 if all Q are equal). That
    happens when ``epsilon`` is at least the KL of the greedy weights, ``log N`` without ties: the
    weights are then one-hot on the best action, which satisfies the bound. It also happens when all
    actions of a state are equal (or N = 1), where every temperature gives uniform weights.

    Args:
        q_values: ``[N, B]``, finite.
        epsilon: the KL to reach, averaged over states.
        log_prior: ``[N, B]`` if the actions are not samples.
        peers: learners with as many other states; the temperature is that of all states.

    Returns:
        A positive scalar of the dtype and device of ``q_values``.
    """
    if epsilon <= 0.0:
        raise ValueError(f"epsilon={epsilon} is not allowed: it must be a number above 0.")
    if q_values.numel() == 0:
        raise ValueError(f"q_values has shape {tuple(q_values.shape)}: there is nothing to weight.")
    may_look = q_values.device.type == "cpu" and not torch.compiler.is_dynamo_compiling()
    below = _below_maximum(q_values.double())
    prior = _log_prior(below, None if log_prior is None else log_prior.double())
    widest = peers.maximum(-below.min())
    floor = (widest * _SMALLEST_RELATIVE_TEMPERATURE).clamp(min=_SMALLEST_TEMPERATURE).log()
    # d KL / d log eta = -variance(Q / eta) >= -(range / 2 eta)^2, hence KL <= range^2 / 8 eta^2.
    low, high = floor, torch.maximum((widest / math.sqrt(8.0 * epsilon)).log() + 1e-6, floor)
    # For nearly equal weights KL = variance(Q) / 2 eta^2.
    squares, squared_means = peers.mean(below.square().mean(), below.mean(dim=0).square().mean())
    guess = 0.5 * ((squares - squared_means) / (2.0 * epsilon)).log()
    log_temperature = torch.minimum(torch.maximum(guess, low), high)
    # At the lowest temperature only the best actions have a weight.
    best = (below > -floor.exp()) * torch.as_tensor(prior, device=below.device).exp()
    (greedy_kl,) = peers.mean(-best.sum(dim=0).log().mean())
    is_reachable = greedy_kl > epsilon
    for _ in range(100 if may_look else _STEPS_ON_DEVICES):
        kl, slope = _kl_and_slope(below, prior, log_temperature, peers)
        if may_look and (
            not is_reachable or (kl - epsilon).abs() <= 1e-10 * epsilon or high - low < 1e-13
        ):
            break
        is_low = kl > epsilon
        low = torch.where(is_low, log_temperature, low)
        high = torch.where(is_low, high, log_temperature)
        newton = log_temperature + (kl / epsilon).log() * kl / slope
        is_inside = (low <= newton) & (newton <= high)  # This is false where it is not a number.
        log_temperature = torch.where(is_inside, newton, 0.5 * (low + high))
    dtype = _floating(q_values)
    temperature = torch.where(is_reachable, log_temperature, floor).exp()
    return temperature.clamp(min=torch.finfo(dtype).tiny).to(dtype)


def ranking_weights(q_values: Tensor, eta: float = 10.0) -> Tensor:
    """Weight the i-th best action in proportion to ``ln((N + eta) / i)``.

    Equal Q-values share the mean of the weights of the ranks they occupy. ``eta = 0.5`` resembles
    CMA-ES; larger values are closer to uniform.

    Args:
        q_values: ``[N, B]``.
        eta: positive.

    Returns:
        ``[N, B]``, positive; each column sums to one.
    """
    n = len(q_values)
    # In double precision, since the differences of sums below would cost float32 its digits.
    ranks = torch.arange(1, n + 1, dtype=torch.float64, device=q_values.device)
    by_rank = torch.log((n + eta) / ranks)
    by_rank = by_rank / by_rank.sum()
    cumulative = torch.cat([by_rank.new_zeros(1), by_rank.cumsum(0)])

    descending = (-q_values).T.contiguous()
    in_order = descending.sort(dim=1).values
    first = torch.searchsorted(in_order, descending, right=False)
    last = torch.searchsorted(in_order, descending, right=True)
    shared = (cumulative[last] - cumulative[first]) / (last - first)
    return shared.T.to(_floating(q_values))


def identity_weights(q_values: Tensor) -> Tensor:
    """Return the Q-values themselves (appendix A): neither positive nor normalised; for study."""
    return q_values


def out_of_bounds_cost(actions: Tensor) -> Tensor:
    """Return minus the Euclidean distance of each action to the box ``[-1, 1]^D``.

    Used like Q-values, it gives a second set of weights that pulls the policy back into the box.

    Args:
        actions: ``[N, B, D]``.

    Returns:
        ``[N, B]``, zero inside the box and negative outside.
    """
    distances: Tensor = torch.linalg.vector_norm(actions - actions.clamp(-1.0, 1.0), dim=-1)
    return -distances


def kl_to_prior(weights: Tensor, log_prior: Tensor | None = None) -> Tensor:
    """Return the KL ``[B]`` of each state's weights ``[N, B]`` to the prior, by default uniform."""
    if log_prior is None:
        return torch.xlogy(weights, weights * len(weights)).sum(dim=0)
    return (torch.xlogy(weights, weights) - weights * log_prior).sum(dim=0)


def effective_sample_size(weights: Tensor) -> Tensor:
    """Return ``(sum of weights)^2 / sum of their squares``: from 1 (one-hot) to N (uniform)."""
    return weights.sum(dim=0).square() / weights.square().sum(dim=0)
