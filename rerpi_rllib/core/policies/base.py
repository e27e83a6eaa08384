"""What every policy has: a distribution over actions and the network that computes it.

Actions are in normalised units and neither squashed nor clipped. Discrete actions are one-hot.

Shapes: B states, O observation features, D action dimensions (or the number of discrete actions);
``actions`` is ``[..., B, D]``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from rerpi_rllib.core.layers import Linear, NetworkSettings, StreamSettings, after_first_layer


@dataclass(frozen=True)
class Part:
    """A part of a policy that Step 3 fits and bounds by itself (section 4.2 of the paper).

    Args:
        name: names the setting ``epsilon_<name>`` and the metrics ``kl_<name>``, ``alpha_<name>``.
        label: the same in words, for people.
        epsilon: the default bound.
        per_dimension: whether there is a KL of each action dimension to bound.
    """

    name: str
    label: str
    epsilon: float
    per_dimension: bool = False


# The bound of a whole policy: of the coupled fit, and of distributions with a single part.
WHOLE_POLICY = Part("pi", "policy", 1e-3)


class Distribution(ABC):
    """A distribution over actions for each of B states; a frozen dataclass of tensors."""

    @abstractmethod
    def sample(self, n: int) -> Tensor:
        """Draw ``n`` actions for each state, ``[n, B, D]``, without gradients."""

    @abstractmethod
    def log_prob(self, actions: Tensor) -> Tensor:
        """Return the log-density ``[..., B]`` of ``actions`` ``[..., B, D]``."""

    @property
    @abstractmethod
    def mode(self) -> Tensor:
        """The greedy action of each state, ``[B, D]``."""

    @abstractmethod
    def hybrids(self, target: Self) -> Mapping[str, Distribution]:
        """Combine, for each part, this distribution's part with all other parts of ``target``."""

    @abstractmethod
    def part_kls(self, target: Self) -> dict[str, Tensor]:
        """Return ``KL(target || hybrid)`` for each part: ``[B, D]``, or ``[B]`` if it is joint."""

    @abstractmethod
    def kl(self, target: Self) -> Tensor:
        """Return ``KL(target || self)``, ``[B]``."""

    @abstractmethod
    def entropy(self) -> Tensor:
        """Return the entropy, ``[B]``, or a bound on it where there is no closed form."""

    @abstractmethod
    def metrics(self) -> dict[str, Tensor]:
        """Return what to watch: how wide the distribution is."""

    @property
    def tensors(self) -> list[Tensor]:
        """The parameters, each ``[B, ...]``."""
        return [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]

    def to_inputs(self) -> Tensor:
        """Join all parameters in one tensor, ``[B, K]``."""
        return torch.cat([tensor.flatten(1) for tensor in self.tensors], dim=-1)

    def from_inputs(self, inputs: Tensor) -> Self:
        """Invert :meth:`to_inputs` for a distribution with parameters like this one's."""
        sizes = [tensor[0].numel() for tensor in self.tensors]
        chunks = zip(torch.split(inputs, sizes, dim=-1), self.tensors)
        return type(self)(*(chunk.view(-1, *tensor.shape[1:]) for chunk, tensor in chunks))

    def split(self, sizes: list[int]) -> list[Self]:
        """Split along the batch dimension into chunks of the given sizes."""
        chunks = zip(*(torch.split(tensor, sizes) for tensor in self.tensors))
        return [type(self)(*tensors) for tensors in chunks]

    def candidates(self, n: int) -> tuple[Tensor, Tensor | None]:
        """Return actions ``[N, B, D]`` that represent the policy: by default ``n`` samples.

        The second result is their log-probabilities ``[N, B]`` where they are not samples.
        """
        return self.sample(n), None

    def summarise(self, actions: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        """Reduce weighted actions of this distribution to what :meth:`cross_entropy` needs of them.

        Args:
            actions: ``[N, B, D]``.
            weights: ``[N, B]``.

        Returns:
            Constant tensors with the batch as their first dimension; by default the actions
            ``[B, N, D]`` and the weights ``[B, N]`` themselves.
        """
        return actions.transpose(0, 1), weights.T

    def cross_entropy(self, target: Self, summary: Sequence[Tensor]) -> Tensor:
        """Return ``-sum_i w_i log p(a_i)``, averaged over states.

        It is a scalar, or ``[D]`` where it is a sum over action dimensions.

        Args:
            target: the distribution that the actions are from.
            summary: what its :meth:`summarise` has returned.
        """
        actions, weights = summary
        return -(weights.T * self.log_prob(actions.transpose(0, 1))).sum(dim=0).mean()


@dataclass(frozen=True)
class PolicySettings:
    """The shape of a policy's network; the names are those of the algorithm's settings.

    Args:
        layers: sizes of the hidden layers.
        covariance_layers: hidden layers of the network that computes the covariance (and the weights
            of a mixture). With a network of its own, a step of the mean leaves the covariance where
            it is. None computes all parts from the same hidden layers, as the paper does.
        initial_stddev: the standard deviation before training, or for ever if it is not learned.
        min_stddev: its square is added to the variance that the network computes.
        tanh_mean: whether to keep the mean inside [-1, 1].
        inputs: what happens to the observations first, and which network follows.
        streams: what comes before ``layers``; a covariance network of its own sees the observations.
        num_components: the number of Gaussians in a mixture.
    """

    layers: Sequence[int]
    covariance_layers: Sequence[int] | None = (64, 64)
    initial_stddev: float = 0.5
    min_stddev: float = 0.0
    tanh_mean: bool = False
    inputs: NetworkSettings = field(default_factory=NetworkSettings)
    streams: StreamSettings = field(default_factory=StreamSettings)
    num_components: int = 3


class Policy(nn.Module, ABC):
    """A network from states to a :class:`Distribution`."""

    PARTS: ClassVar[tuple[Part, ...]]
    # Whether actions are the choice of one out of D.
    is_discrete: ClassVar[bool] = False
    # Whether the policy learns how wide it is.
    learns_covariance: ClassVar[bool] = False
    # Whether `reparameterized_sample` passes gradients on to the parameters.
    is_reparameterizable: ClassVar[bool] = False

    def __init__(self, observation_size: int, action_size: int, settings: PolicySettings) -> None:
        super().__init__()
        self.observation_size, self.action_size = observation_size, action_size
        self.settings = settings
        self.body = self.make_body(settings.layers, settings.streams)

    def make_body(
        self, layers: Sequence[int], streams: StreamSettings | None = None
    ) -> nn.Sequential:
        """Make hidden layers on the observations, or on what streams make of these."""
        inputs = self.settings.inputs
        made = streams.make(inputs.network) if streams else []
        return nn.Sequential(
            *inputs.layers(self.observation_size),
            *made,
            Linear(made[0].output_size if made else self.observation_size, layers[0]),
            *after_first_layer(layers, inputs.network, after_streams=bool(made)),
        )

    @abstractmethod
    def forward(self, observations: Tensor) -> Distribution:
        """Return the distribution at ``observations`` ``[B, O]``."""

    def encode_actions(self, actions: Tensor) -> Tensor:
        """Convert the environment's actions to those that networks and distributions work with."""
        return actions

    def decode_actions(self, actions: Tensor) -> Tensor:
        """Invert :meth:`encode_actions`."""
        return actions


def output_layer(inputs: int, outputs: int, bias: float = 0.0) -> Linear:
    """Make a linear layer with near-zero weights: at the start every state has the same policy."""
    layer = Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=1e-2 / math.sqrt(inputs))
    nn.init.constant_(layer.bias, bias)
    return layer
