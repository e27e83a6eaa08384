"""Lagrange multipliers as parameters that stay positive."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class Multiplier(nn.Module):
    """A positive number (or one for each action dimension), optimised through its logarithm.

    A constraint's solution may lie anywhere between 0.01 and 1,000. In the logarithm an Adam step
    of size ``lr`` changes the multiplier by the factor ``1 + lr`` wherever it is, so that it neither
    crawls when it is large nor is thrown about when it is small.
    """

    def __init__(self, initial: float = 1.0, size: int | None = None) -> None:
        super().__init__()
        shape = () if size is None else (size,)
        self.log_value = nn.Parameter(torch.full(shape, math.log(initial)))

    def forward(self) -> Tensor:
        return self.log_value.exp()
