"""Lagrange multipliers as parameters that stay positive."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class Multiplier(nn.Module):
    """A positive number, or one for each action dimension, that is updated by factors.

    The solution of a constraint may lie anywhere between 0.01 and 1,000, so the logarithm is what is
    stored and stepped: Adam's steps are factors of about ``1 + lr`` wherever the multiplier is, and
    up to three times as far after updates that left it alone. The gradient is taken with respect to
    the multiplier itself (exponentiated gradient). With the chain rule's extra factor it would grow
    with the multiplier, faster than Adam's running averages follow, and a multiplier that has to rise
    quickly would run away.
    """

    def __init__(
        self, initial: float = 1.0, *, minimum: float = 1e-3, size: int | None = None
    ) -> None:
        super().__init__()
        # Without a floor, the logarithm of an inactive constraint's multiplier would fall for ever,
        # and it would take as long to come back when the constraint becomes active.
        self.log_minimum = math.log(minimum)
        shape = () if size is None else (size,)
        self.log_value = nn.Parameter(torch.full(shape, math.log(initial)))

    def forward(self) -> Tensor:
        """Return the multiplier's value."""
        with torch.no_grad():
            self.log_value.clamp_(min=self.log_minimum)
        fixed = self.log_value.detach()
        return fixed.exp() + (self.log_value - fixed)
