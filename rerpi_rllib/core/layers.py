"""What all networks share: linear, layer normalisation, tanh, then linear and ELU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import nn


def after_first_layer(sizes: Sequence[int]) -> nn.Sequential:
    """All of a network's hidden part but its first linear map."""
    layers: list[nn.Module] = [nn.LayerNorm(sizes[0]), nn.Tanh()]
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ELU()]
    return nn.Sequential(*layers)
