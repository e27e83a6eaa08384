"""Q-functions: one network or two, each with a scalar or a distributional output."""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from rerpi_rllib.core.layers import (
    Linear,
    NetworkKind,
    NetworkSettings,
    StreamSettings,
    after_first_layer,
)
from rerpi_rllib.core.sampled_values import can_compute, sampled_values, steps_of
from rerpi_rllib.core.threads import in_threads

Aggregation = Literal["min", "mean"]

_ROWS_AT_ONCE = 512
_SMOOTHING = 0.75  # In distances between atoms.
_ATOMS_BEYOND = 3


class Head(nn.Module):
    """The meaning of a critic's outputs ``[..., size]`` and the loss that fits them to targets."""

    size: int
    # Whether targets are samples of the return instead of its expectation.
    learns_from_atoms = False
    # Whether outputs are in units of the return, and whether the loss is in squared ones.
    outputs_values = False
    squares_errors = False

    @abstractmethod
    def value(self, outputs: Tensor) -> Tensor:
        """Return the expected return, ``[...]``."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each row, ``[B]``.

        Args:
            outputs: ``[B, size]``.
            targets: ``[B]``, or ``[B, T]`` where ``learns_from_atoms``.
        """


class ScalarHead(Head):
    """The expected return itself, fitted by squared error, as in the paper."""

    size = 1
    outputs_values = squares_errors = True

    def value(self, outputs: Tensor) -> Tensor:
        return outputs.squeeze(-1)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.squeeze(-1) - targets).square()


class CategoricalHead(Head):
    """Probabilities of evenly spaced returns, fitted by cross-entropy to two-hot targets.

    A target is encoded by the two neighbouring atoms that average to it; beyond the range it counts
    as the last atom.
    """

    atoms: Tensor

    def __init__(self, value_range: Sequence[float], num_atoms: int) -> None:
        super().__init__()
        self.size = num_atoms
        low, high = value_range
        self.register_buffer("atoms", torch.linspace(low, high, num_atoms))

    def value(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(dim=-1) @ self.atoms

    def two_hot(self, targets: Tensor) -> Tensor:
        """Encode ``targets`` ``[B]`` as ``[B, size]``."""
        low, high = self.atoms[0], self.atoms[-1]
        position = (targets.clamp(low, high) - low) / (high - low) * (self.size - 1)
        lower = position.floor().clamp(max=self.size - 2)
        share = (position - lower).unsqueeze(-1)
        # A NaN survives in the share and is reported; as an index it would be an error of its own.
        index = lower.nan_to_num().long().unsqueeze(-1)
        encoded = torch.zeros((*targets.shape, self.size), dtype=targets.dtype, device=targets.device)
        return encoded.scatter(-1, index, 1.0 - share).scatter(-1, index + 1, share)

    encode = two_hot

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -(self.encode(targets) * outputs.log_softmax(dim=-1)).sum(dim=-1)


class SmoothedHead(CategoricalHead):
    """The same with a target's probability spread over several atoms, as by a Gaussian (HL-Gauss).

    Farebrother et al., 2024, Stop Regressing. The Gaussian's standard deviation is three quarters of
    the distance between two atoms, and each atom gets what lies nearer to it than to another one.
    There are three more atoms beyond each end of the range: without them a target near an end would
    be drawn inwards, and bootstrapping would add that up.
    """

    def __init__(self, value_range: Sequence[float], num_atoms: int) -> None:
        low, high = value_range
        beyond = _ATOMS_BEYOND * (high - low) / (num_atoms - 1)
        super().__init__((low - beyond, high + beyond), num_atoms + 2 * _ATOMS_BEYOND)

    def encode(self, targets: Tensor) -> Tensor:
        low, high = self.atoms[_ATOMS_BEYOND], self.atoms[-1 - _ATOMS_BEYOND]
        distance = self.atoms[1] - self.atoms[0]
        position = (targets.clamp(low, high) - self.atoms[0]) / distance
        edges = torch.arange(self.size + 1, dtype=targets.dtype, device=targets.device) - 0.5
        below = torch.special.ndtr((edges - position.unsqueeze(-1)) / _SMOOTHING)
        encoded: Tensor = below.diff(dim=-1) / (below[..., -1:] - below[..., :1])
        return encoded


class QuantileHead(Head):
    """Quantiles of the return at the midpoints of equal shares, fitted by the quantile Huber loss."""

    learns_from_atoms = True
    outputs_values = True
    levels: Tensor

    def __init__(self, num_atoms: int) -> None:
        super().__init__()
        self.size = num_atoms
        self.register_buffer("levels", (torch.arange(num_atoms) + 0.5) / num_atoms)

    def value(self, outputs: Tensor) -> Tensor:
        return outputs.mean(dim=-1)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if targets.dim() == 1:
            targets = targets.unsqueeze(-1)
        errors = targets.unsqueeze(-2) - outputs.unsqueeze(-1)  # [B, size, T]
        tilt = (self.levels.unsqueeze(-1) - (errors.detach() < 0.0).to(errors.dtype)).abs()
        huber = functional.huber_loss(errors, torch.zeros_like(errors), reduction="none")
        return (tilt * huber).mean(dim=-1).sum(dim=-1)


# The values of the setting `critic`, given its `num_atoms` and `value_range`.
HEADS: dict[str, Callable[[int, Sequence[float]], Head]] = {
    "scalar": lambda num_atoms, value_range: ScalarHead(),
    "categorical": lambda num_atoms, value_range: CategoricalHead(value_range, num_atoms),
    "hl_gauss": lambda num_atoms, value_range: SmoothedHead(value_range, num_atoms),
    "quantile": lambda num_atoms, value_range: QuantileHead(num_atoms),
}


class CriticNetwork(nn.Module):
    """A network from state and action to the outputs of a head.

    Actions enter where streams are joined, so that these are computed once for all of a state's
    actions.
    """

    def __init__(
        self,
        observation_size: int,
        action_size: int,
        layers: Sequence[int],
        outputs: int,
        network: NetworkKind = "paper",
        streams: StreamSettings | None = None,
    ) -> None:
        super().__init__()
        made = streams.make(network) if streams else []
        self.streams = nn.Sequential(*made)
        observation_size = made[0].output_size if made else observation_size
        # The first linear layer on (s, a) is kept in two parts and initialised as one.
        self.first_state = Linear(observation_size, layers[0])
        self.first_action = Linear(action_size, layers[0], bias=False)
        bound = 1.0 / math.sqrt(observation_size + action_size)
        for parameter in (*self.first_state.parameters(), *self.first_action.parameters()):
            nn.init.uniform_(parameter, -bound, bound)
        self.body = after_first_layer(layers, network, after_streams=bool(made))
        self.output = Linear(layers[-1], outputs)
        self._steps = steps_of(self.body)

    def forward(self, observations: Tensor, actions: Tensor) -> Tensor:
        # The state's half of the first layer is computed once for all of a state's actions.
        states = self.first_state(self.streams(observations))
        if (
            torch.is_grad_enabled()
            or actions.dim() < 3
            or actions.device.type != "cpu"
            or torch.compiler.is_dynamo_compiling()
        ):
            return self._from_first_layer(states, actions)
        # Most of an update's arithmetic is here, in the values of sampled actions [N, B, D].
        if self._steps is not None and can_compute(states, actions, self.first_action):
            return sampled_values(states, actions, self.first_action, self._steps, self.output)
        # They are computed a few hundred rows at a time, so that activations stay in the CPU's cache.
        pieces, pieces_per_block = [], []
        for some_states, some_actions in zip(
            states.split(_ROWS_AT_ONCE), actions.split(_ROWS_AT_ONCE, dim=-2)
        ):
            parts = some_actions.split(max(1, _ROWS_AT_ONCE // len(some_states)))
            pieces += [(some_states, part) for part in parts]
            pieces_per_block.append(len(parts))
        outputs = iter(in_threads(self._from_first_layer, pieces))
        blocks = [torch.cat(list(itertools.islice(outputs, count))) for count in pieces_per_block]
        return torch.cat(blocks, dim=-2)

    def _from_first_layer(self, states: Tensor, actions: Tensor) -> Tensor:
        # As rows, since a product of more dimensions is slower.
        first = self.first_action(actions.flatten(0, -2)).unflatten(0, actions.shape[:-1])
        # In place where no gradients are wanted: the product is a tensor of its own.
        first = states + first if torch.is_grad_enabled() else first.add_(states)
        outputs: Tensor = self.output(self.body(first))
        return outputs


class Critic(nn.Module):
    """Q(s, a), the smallest or the mean value of ``num_critics`` networks.

    It sees actions as the environment does: clipped to ``[-1, 1]`` if the action space is bounded.
    """

    def __init__(
        self,
        observation_size: int,
        action_size: int,
        layers: Sequence[int],
        *,
        clip_actions: bool,
        inputs: NetworkSettings | None = None,
        kind: str = "scalar",
        num_critics: int = 1,
        aggregation: Aggregation = "min",
        num_atoms: int = 51,
        value_range: Sequence[float] = (-150.0, 150.0),
        streams: StreamSettings | None = None,
    ) -> None:
        super().__init__()
        inputs = inputs or NetworkSettings()
        self.clip_actions, self.aggregation = clip_actions, aggregation
        self.inputs = nn.Sequential(*inputs.layers(observation_size))
        self.head = HEADS[kind](num_atoms, value_range)
        self.networks = nn.ModuleList(
            CriticNetwork(
                observation_size, action_size, layers, self.head.size, inputs.network, streams
            )
            for _ in range(num_critics)
        )

    @property
    def learns_from_atoms(self) -> bool:
        """Whether targets are samples of the return instead of its expectation."""
        return self.head.learns_from_atoms

    @torch.no_grad()
    def scale_values(self, factor: Tensor) -> None:
        """Multiply all values by a factor, where the outputs are values and not probabilities."""
        if self.head.outputs_values:
            for network in self.networks:
                assert isinstance(network, CriticNetwork)
                for parameter in network.output.parameters():
                    parameter.mul_(factor)

    def _outputs(self, observations: Tensor, actions: Tensor) -> list[Tensor]:
        if self.clip_actions:
            actions = actions.clamp(-1.0, 1.0)
        observations = self.inputs(observations)
        return [network(observations, actions) for network in self.networks]

    def forward(self, observations: Tensor, actions: Tensor) -> Tensor:
        """Evaluate ``actions`` ``[..., B, D]`` at ``observations`` ``[B, O]``: ``[..., B]``."""
        values = [self.head.value(outputs) for outputs in self._outputs(observations, actions)]
        if len(values) == 1:
            return values[0]
        together = torch.stack(values)
        return together.amin(dim=0) if self.aggregation == "min" else together.mean(dim=0)

    def atoms(self, observations: Tensor, actions: Tensor) -> Tensor:
        """Return the quantiles ``[..., B, size]`` of a pair's smaller network, or their means."""
        outputs = torch.stack(self._outputs(observations, actions))
        if self.aggregation == "mean":
            return outputs.mean(dim=0)
        smallest = self.head.value(outputs).argmin(dim=0, keepdim=True).unsqueeze(-1)
        return outputs.take_along_dim(smallest, dim=0).squeeze(0)

    def loss(
        self,
        observations: Tensor,
        actions: Tensor,
        targets: Tensor,
        row_weights: Tensor | None = None,
    ) -> Tensor:
        """Sum the losses of all networks against the same targets, averaged over the rows."""
        outputs = self._outputs(observations, actions)
        losses = [self.head.loss(output, targets) for output in outputs]
        by_row = losses[0] if len(losses) == 1 else torch.stack(losses).sum(dim=0)
        if row_weights is None:
            return by_row.mean()
        return (row_weights * by_row).sum() / row_weights.sum()
