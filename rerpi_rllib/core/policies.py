"""Policy networks: a state to a distribution over actions, one head for each kind of distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from rerpi_rllib.core.distributions import (
    Categorical,
    DeterministicWithNoise,
    DiagonalGaussian,
    Distribution,
    FullGaussian,
    GaussianMixture,
)
from rerpi_rllib.core.layers import after_first_layer

# What the setting `policy` may say.
POLICIES: dict[str, type[Distribution]] = {
    "gaussian": DiagonalGaussian,
    "full_gaussian": FullGaussian,
    "mixture": GaussianMixture,
    "categorical": Categorical,
    "deterministic": DeterministicWithNoise,
}


def _output(inputs: int, outputs: int, bias: float = 0.0) -> nn.Linear:
    """A linear layer with near-zero weights: at the start every state has the same policy."""
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=1e-2 / math.sqrt(inputs))
    nn.init.constant_(layer.bias, bias)
    return layer


class Policy(nn.Module):
    """State to :class:`Distribution`.

    Args:
        observation_size, action_size: O, and D (for "categorical" the number of actions).
        layers: sizes of the hidden layers.
        kind: a name in ``POLICIES``.
        initial_stddev: before training, for every state; with "deterministic" for ever.
        min_stddev: its square is added to the variance that the network gives.
        tanh_mean: keep the mean inside [-1, 1]; otherwise it is unbounded.
        tanh_observations: pass observations through tanh first.
        num_components: of "mixture".
    """

    fixed_stddev: Tensor
    _rows: Tensor
    _columns: Tensor

    def __init__(
        self,
        observation_size: int,
        action_size: int,
        layers: Sequence[int],
        *,
        kind: str = "gaussian",
        initial_stddev: float = 0.5,
        min_stddev: float = 0.0,
        tanh_mean: bool = False,
        tanh_observations: bool = False,
        num_components: int = 1,
    ) -> None:
        super().__init__()
        self.kind, self.action_size = kind, action_size
        self.min_stddev, self.tanh_mean = min_stddev, tanh_mean
        self.tanh_observations, self.num_components = tanh_observations, num_components
        self.first = nn.Linear(observation_size, layers[0])
        self.body = after_first_layer(layers)
        components = num_components if kind == "mixture" else 1
        size, hidden = components * action_size, layers[-1]
        if kind in ("mixture", "categorical"):
            self.logits = _output(hidden, action_size if kind == "categorical" else components)
        if kind != "categorical":
            self.mean = _output(hidden, size)
        if kind in ("gaussian", "full_gaussian", "mixture"):
            own = math.sqrt(initial_stddev**2 - min_stddev**2)
            self.stddev = _output(hidden, size, math.log(math.expm1(own)))
        if kind == "full_gaussian" and action_size > 1:
            self.below_diagonal = _output(hidden, action_size * (action_size - 1) // 2)
            rows, columns = torch.tril_indices(action_size, action_size, -1)
            self.register_buffer("_rows", rows, persistent=False)
            self.register_buffer("_columns", columns, persistent=False)
        if kind == "mixture":
            # Components that start alike would stay alike.
            nn.init.normal_(self.mean.bias, std=initial_stddev)
        if kind == "deterministic":
            self.register_buffer("fixed_stddev", torch.full((action_size,), initial_stddev))

    @property
    def is_discrete(self) -> bool:
        return self.kind == "categorical"

    def encode_actions(self, actions: Tensor) -> Tensor:
        """Actions as the environment has them to what networks and distributions work with."""
        if not self.is_discrete:
            return actions
        return functional.one_hot(actions.squeeze(-1).long(), self.action_size).to(actions.dtype)

    def decode_actions(self, actions: Tensor) -> Tensor:
        """The way back."""
        return actions.argmax(dim=-1) if self.is_discrete else actions

    def forward(self, observations: Tensor) -> Distribution:
        if self.tanh_observations:
            observations = observations.tanh()
        hidden = self.body(self.first(observations))
        if self.kind == "categorical":
            return Categorical(self.logits(hidden))
        mean = self.mean(hidden)
        if self.tanh_mean:
            mean = mean.tanh()
        if self.kind == "deterministic":
            return DeterministicWithNoise(mean, self.fixed_stddev.expand_as(mean))
        stddev = functional.softplus(self.stddev(hidden))
        if self.min_stddev:
            stddev = (stddev.square() + self.min_stddev**2).sqrt()
        if self.kind == "gaussian":
            return DiagonalGaussian(mean, stddev)
        if self.kind == "full_gaussian":
            cholesky = torch.diag_embed(stddev)
            if self.action_size > 1:
                cholesky[..., self._rows, self._columns] = self.below_diagonal(hidden)
            return FullGaussian(mean, cholesky)
        shape = (*mean.shape[:-1], self.num_components, self.action_size)
        return GaussianMixture(self.logits(hidden), mean.view(shape), stddev.view(shape))
