"""Step 1 of the paper: regression targets for the action-value function.

``discounts`` are gamma times one minus *terminated*: a terminated step does not bootstrap, a
truncated one does. ``next_values`` are the target networks' V(s'). Sequences are ``[B, K]``: K
consecutive transitions. Where an episode ends among them, a discount of zero separates it from what
follows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def td_targets(rewards: Tensor, discounts: Tensor, next_values: Tensor) -> Tensor:
    """Compute TD(0) targets, ``r + discount * V(s')``; all have one shape, usually ``[B]``."""
    if rewards.dim() != next_values.dim():  # ``[B]`` and ``[B, 1]`` would make ``[B, B]``.
        raise ValueError(
            f"rewards {tuple(rewards.shape)} and next_values {tuple(next_values.shape)} must have "
            "one shape."
        )
    return rewards + discounts * next_values


def nstep_targets(rewards: Tensor, discounts: Tensor, next_values: Tensor, n: int) -> Tensor:
    """Compute n-step returns.

    The sum stops where a discount is zero and at the end of the window, where it bootstraps from
    the last state that the window reaches.

    Args:
        rewards, discounts, next_values: ``[B, K]``.
        n: number of rewards in the sum, at least 1.

    Returns:
        ``[B, K]``.
    """
    if n < 1:
        raise ValueError(f"n={n} is not allowed: it must be a whole number of at least 1.")
    one_step = td_targets(rewards, discounts, next_values)
    targets = one_step
    for _ in range(min(n, rewards.shape[1]) - 1):
        targets = torch.cat(
            [rewards[:, :-1] + discounts[:, :-1] * targets[:, 1:], one_step[:, -1:]], dim=1
        )
    return targets


def retrace_targets(
    rewards: Tensor,
    discounts: Tensor,
    next_values: Tensor,
    next_q: Tensor,
    log_rhos: Tensor,
    lambda_: float,
) -> Tensor:
    """Compute Retrace targets (Munos et al., 2016) on K transitions through states s_0 to s_K.

    ``target_t = r_t + discount_t * (V(s_{t+1}) + c_{t+1} * (target_{t+1} - Q(s_{t+1}, a_{t+1})))``
    with ``c = lambda * min(1, pi / b)``; the last transition is a TD(0) target.

    Args:
        rewards, discounts: ``[B, K]``, of transitions 0 to K-1.
        next_values: ``[B, K]``, V of states s_1 to s_K.
        next_q: ``[B, K-1]``, Q of the recorded actions at s_1 to s_{K-1}.
        log_rhos: ``[B, K-1]``, log pi - log b of the same actions.
        lambda_: between 0 (TD(0)) and 1.

    Returns:
        ``[B, K]``.
    """
    batch, length = rewards.shape
    for name, tensor in (("next_q", next_q), ("log_rhos", log_rhos)):
        if tensor.shape != (batch, length - 1):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and must have {(batch, length - 1)}: one "
                "value less than rewards, from the second state of the window on."
            )
    traces = lambda_ * log_rhos.clamp(max=0.0).exp()
    targets = [td_targets(rewards[:, -1], discounts[:, -1], next_values[:, -1])]
    for t in range(length - 2, -1, -1):
        correction = traces[:, t] * (targets[-1] - next_q[:, t])
        targets.append(td_targets(rewards[:, t], discounts[:, t], next_values[:, t] + correction))
    return torch.stack(targets[::-1], dim=1)
