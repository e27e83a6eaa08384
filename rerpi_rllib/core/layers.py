"""The layers that all networks share: linear, layer normalisation, tanh, then linear and ELU.

On the CPU, torch has two ways of computing some of them, and which is faster depends on the CPU:
:func:`choose_fastest` measures it. Matrices are multiplied by Intel's MKL or by oneDNN, which is
twice as fast on an AMD EPYC with AVX-512. The hyperbolic tangent is Intel's own on Intel's CPUs;
elsewhere torch computes it number by number, and the sigmoid is four times as fast.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

NetworkKind = Literal["paper", "residual"]

_SMALLEST_STDDEV, _LARGEST_NORMALIZED = 1e-6, 10.0
_WIDENING = 2  # Of the layer inside a residual block.
_FEW = 4096
_FEW_ROWS = 64
_uses_onednn = False
_uses_sigmoid = False


def _onednn_product(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return product


class _OneDNNLinear(torch.autograd.Function):
    """``F.linear`` and its gradients by oneDNN, for inputs of two dimensions."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.has_bias = bias is not None
        return _onednn_product(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        inputs, weight = ctx.saved_tensors
        return (
            _onednn_product(gradient, weight.t(), None) if ctx.needs_input_grad[0] else None,
            _onednn_product(gradient.t(), inputs.t(), None) if ctx.needs_input_grad[1] else None,
            gradient.sum(dim=0) if ctx.has_bias else None,
        )


def choose_fastest() -> None:
    """Let this process's layers compute in the fastest way; finding it takes a few milliseconds."""
    global _uses_onednn, _uses_sigmoid
    inputs, weight, bias = torch.zeros(512, 256), torch.zeros(256, 256), torch.zeros(256)
    products = _onednn_product, functional.linear
    _uses_onednn = _has_onednn() and _is_faster(*products, inputs, weight, bias)
    _uses_sigmoid = _is_faster(_tanh_by_sigmoid, torch.tanh, inputs)


def get_choices() -> dict[str, bool]:
    """Return what :func:`choose_fastest` has chosen. The last digits of all results depend on it."""
    return {"onednn": _uses_onednn, "sigmoid": _uses_sigmoid}


def set_choices(choices: dict[str, bool]) -> None:
    """Compute as another process did, for results that are the same to the last digit."""
    global _uses_onednn, _uses_sigmoid
    _uses_onednn = choices["onednn"] and _has_onednn()
    _uses_sigmoid = choices["sigmoid"]


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def uses_onednn() -> bool:
    """Tell whether matrices are multiplied by oneDNN in this process."""
    return _uses_onednn


def _is_faster(
    function: Callable[..., Tensor], other: Callable[..., Tensor], *arguments: Tensor
) -> bool:
    """Tell whether a function is clearly faster than another one, which computes the same."""

    def fastest(function: Callable[..., Tensor]) -> float:
        times = []
        for _ in range(8):
            started = time.perf_counter()
            function(*arguments)
            times.append(time.perf_counter() - started)
        return min(times)

    # A small gain is not worth two ways of computing the same.
    with torch.no_grad():
        return 1.2 * fastest(function) < fastest(other)


class Linear(nn.Linear):
    """A linear layer that uses the faster product where there are many rows."""

    def forward(self, inputs: Tensor) -> Tensor:
        if (
            not _uses_onednn
            or torch.compiler.is_dynamo_compiling()
            or inputs.device.type != "cpu"
            or inputs.dtype != torch.float32
            or inputs.numel() < _FEW_ROWS * self.in_features
        ):
            return functional.linear(inputs, self.weight, self.bias)
        rows = inputs.flatten(0, -2)
        product = _OneDNNLinear.apply if torch.is_grad_enabled() else _onednn_product
        outputs: Tensor = product(rows, self.weight, self.bias).unflatten(0, inputs.shape[:-1])
        return outputs


def _tanh_by_sigmoid(inputs: Tensor) -> Tensor:
    """Compute ``tanh(x)`` as ``2 sigmoid(2x) - 1``."""
    if torch.is_grad_enabled():
        return torch.sigmoid(2.0 * inputs) * 2.0 - 1.0
    return (2.0 * inputs).sigmoid_().mul_(2.0).sub_(1.0)


class Tanh(nn.Module):
    """The hyperbolic tangent, computed by the sigmoid where that is faster."""

    def forward(self, inputs: Tensor) -> Tensor:
        # While acting, the number of operations counts.
        if not _uses_sigmoid or inputs.numel() < _FEW:
            return inputs.tanh()
        return _tanh_by_sigmoid(inputs)


class ELU(nn.Module):
    """``x`` above zero and ``exp(x) - 1`` below, computed in place.

    torch's own version keeps the last digits of ``exp(x) - 1`` near zero. Values of sampled actions
    do not need them, and on some CPUs the plain exponential is much faster, on others as fast.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        # The number of inputs comes last: an export to ONNX must not depend on the batch.
        if torch.is_grad_enabled() or inputs.device.type != "cpu" or inputs.numel() < _FEW:
            return functional.elu(inputs, inplace=True)
        below = inputs.clamp(max=0.0).exp_().sub_(1.0)
        return torch.maximum(inputs, below, out=inputs)


class Normalize(nn.Module):
    """Observations minus their mean, divided by their standard deviation, at most ten of these.

    Both are of the observations gathered so far, and come from where those arrive. They are part of
    the state of each network, so that whatever acts or learns with it sees the same observations.
    """

    mean: Tensor
    stddev: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("stddev", torch.ones(size))

    def forward(self, inputs: Tensor) -> Tensor:
        return ((inputs - self.mean) / self.stddev).clamp(-_LARGEST_NORMALIZED, _LARGEST_NORMALIZED)

    @torch.no_grad()
    def set(self, mean: Tensor, stddev: Tensor) -> None:
        """Take over new statistics, each ``[size]``."""
        self.mean.copy_(mean)
        # What never changed keeps its unit.
        self.stddev.copy_(torch.where(stddev > _SMALLEST_STDDEV, stddev, 1.0))


class ResidualBlock(nn.Module):
    """Layer normalisation, linear, ReLU and linear, added to the input."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.widen = Linear(size, _WIDENING * size)
        self.narrow = Linear(_WIDENING * size, size)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = inputs + self.narrow(self.widen(self.norm(inputs)).relu())
        return outputs


def after_first_layer(
    sizes: Sequence[int], network: NetworkKind = "paper", *, after_streams: bool = False
) -> nn.Sequential:
    """Make the hidden layers without the linear map of the first one.

    Args:
        sizes: of the hidden layers; in a "residual" network, of its blocks, all the same.
        network: "paper" for layer normalisation and tanh, then linear layers and ELU; "residual" for
            blocks and layer normalisation, as in SimBa (Lee et al., 2025).
        after_streams: whether other layers come before, so that ELU follows the first one, too.
    """
    if network == "residual":
        return nn.Sequential(*map(ResidualBlock, sizes), nn.LayerNorm(sizes[0]))
    layers: list[nn.Module] = [ELU()] if after_streams else [nn.LayerNorm(sizes[0]), Tanh()]
    for before, after in itertools.pairwise(sizes):
        layers += [Linear(before, after), ELU()]
    return nn.Sequential(*layers)


class Streams(nn.Module):
    """Hidden layers of its own for each part of the observations; their outputs are joined.

    Args:
        sizes: of the parts, in the order in which observations ``[B, O]`` hold them.
        layers: sizes of the hidden layers of each stream.
        network: as for :func:`after_first_layer`.
    """

    def __init__(
        self, sizes: Sequence[int], layers: Sequence[int], network: NetworkKind = "paper"
    ) -> None:
        super().__init__()
        self._sizes = list(sizes)
        self.output_size = len(sizes) * layers[-1]
        self.streams = nn.ModuleList(
            nn.Sequential(Linear(size, layers[0]), *after_first_layer(layers, network))
            for size in sizes
        )

    def forward(self, inputs: Tensor) -> Tensor:
        parts = inputs.split(self._sizes, dim=-1)
        return torch.cat([stream(part) for stream, part in zip(self.streams, parts)], dim=-1)


@dataclass(frozen=True)
class NetworkSettings:
    """What policy and critic have in common; the names are those of the algorithm's settings.

    Args:
        normalize_observations: whether to subtract their mean and divide by their deviation.
        tanh_observations: whether to pass them through tanh.
        network: as for :func:`after_first_layer`.
    """

    normalize_observations: bool = False
    tanh_observations: bool = False
    network: NetworkKind = "paper"

    def layers(self, size: int) -> list[nn.Module]:
        """Make what observations pass through first."""
        normalize = [Normalize(size)] if self.normalize_observations else []
        return [*normalize, *([Tanh()] if self.tanh_observations else [])]


@dataclass(frozen=True)
class StreamSettings:
    """The streams before the hidden layers of a network, if there are any.

    Args:
        sizes: of the parts of the observations, each of which has a stream; empty for no streams.
        layers: sizes of the hidden layers of each stream.
    """

    sizes: Sequence[int] = ()
    layers: Sequence[int] = ()

    def make(self, network: NetworkKind) -> list[Streams]:
        """Make the streams, or nothing."""
        return [Streams(self.sizes, self.layers, network)] if self.sizes else []
