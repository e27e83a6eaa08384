"""Lagrange multipliers as parameters that stay positive."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class Multiplier(nn.Module):
    """A positive number (or one for each action dimension) that is updated by factors.

    A constraint's solution may lie anywhere between 0.01 and 1,000, so what is stored and stepped is
    the logarithm: Adam's steps are factors of about ``1 + lr`` wherever the multiplier is, and up to
    three times as far after updates that left it alone. The gradient is the one by the multiplier
    itself (exponentiated gradient). With the chain rule's extra factor it would grow with the
    multiplier, faster than Adam's running averages follow, and a multiplier that has to rise quickly
    would run away.
    """

    def __init__(
        self, initial: float = 1.0, *, minimum: float = 1e-3, size: int | None = None
    ) -> None:
        super().__init__()
        # A constraint that is never active would let the logarithm fall for ever, and a later one
        # would have to wait until it is back.
        self.log_minimum = math.log(minimum)
        shape = () if size is None else (size,)
        self.log_value = nn.Parameter(torch.full(shape, math.log(initial)))

    def forward(self) -> Tensor:
        with torch.no_grad():
            self.log_value.clamp_(min=self.log_minimum)
        value = self.log_value.detach().exp()
        return value + (self.log_value - self.log_value.detach())
