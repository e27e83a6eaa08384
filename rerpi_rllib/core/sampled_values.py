"""The outputs of a critic for many actions by a C++ function, ``sampled_values.cpp``.

The function is compiled by the process that learns (``algorithm/process.py``), on a CPU and where
there is a compiler. Until then, and for networks with other layers, torch computes these outputs.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn
from torch.nn import functional

from rerpi_rllib.core.layers import ELU, Linear, ResidualBlock, Tanh
from rerpi_rllib.core.threads import in_threads

_ROWS_AT_ONCE = 1024
# The names of the steps in sampled_values.cpp, in the same order.
_KINDS = ("actions", "norm_tanh", "elu", "block_norm", "block_widen", "block_narrow", "last_norm")
_library: ctypes.CDLL | None = None

# What a step does, and the layer that has its weights.
_Steps = list[tuple[str, Linear | nn.LayerNorm]]


class _Step(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int),
        ("inputs", ctypes.c_int),
        ("outputs", ctypes.c_int),
        ("epsilon", ctypes.c_float),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


def use_library(path: str | None) -> None:
    """Let this process's critics use the compiled functions in this file, or none."""
    global _library
    library = ctypes.CDLL(path) if path else None
    if library is not None:
        library.scratch_size.restype = ctypes.c_long
        library.values.argtypes = (
            *(ctypes.c_void_p, ctypes.c_long, ctypes.c_void_p, ctypes.c_long, ctypes.POINTER(_Step)),
            *(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int),
            *(ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p),
        )
        library.values.restype = None
    _library = library


def steps_of(body: nn.Sequential) -> _Steps | None:
    """Return what the hidden layers do after the first linear one; None if some are unknown."""
    steps: _Steps = []
    layers = iter(body)
    for layer in layers:
        if type(layer) is ResidualBlock:
            steps += [("block_norm", layer.norm), ("block_widen", layer.widen)]
            steps += [("block_narrow", layer.narrow)]
        elif type(layer) is nn.LayerNorm:
            follower = next(layers, None)
            if follower is not None and type(follower) is not Tanh:
                return None
            steps.append(("last_norm" if follower is None else "norm_tanh", layer))
        elif type(layer) is not Linear or type(next(layers, None)) is not ELU:
            return None
        else:
            steps.append(("elu", layer))
    return steps


def can_compute(states: Tensor, actions: Tensor, first: Linear) -> bool:
    """Tell whether there is a function for tensors like these; see :func:`sampled_values`.

    What torch would refuse, or repeat to make shapes fit, is left to torch.
    """
    return (
        _library is not None
        and actions.device.type == "cpu"
        and states.dtype == actions.dtype == torch.float32
        and actions.shape[-2:] == (len(states), first.in_features)
    )


def sampled_values(
    states: Tensor, actions: Tensor, first: Linear, steps: _Steps, output: Linear
) -> Tensor:
    """Return a critic's outputs ``[..., B, size]`` for ``actions`` ``[..., B, D]``.

    Args:
        states: the first layer's result for the states alone, ``[B, H]``.
        actions: what :func:`can_compute`.
        first: the actions' part of the first layer.
        steps: of :func:`steps_of`.
        output: the last layer.
    """
    library = _library
    assert library is not None
    states, rows = states.contiguous(), actions.flatten(0, -2).contiguous()
    batch, num_actions = len(states), actions.shape[:-2].numel()
    panel, steps = library.panel(), [("actions", first), *steps]
    packed, kept = (_Step * len(steps))(), []  # The tensors whose addresses are in use.
    for step, (kind, layer) in zip(packed, steps):
        weight = layer.weight
        bias = weight.new_zeros(len(weight)) if layer.bias is None else layer.bias
        tensors = _packed(layer, panel), _pad(bias, panel)
        kept.append(tensors)
        step.kind, step.epsilon = _KINDS.index(kind), getattr(layer, "eps", 0.0)
        step.outputs, step.inputs = weight.shape[0], weight.shape[-1]
        step.weight, step.bias = (tensor.data_ptr() for tensor in tensors)
    widest = max(max(step.inputs, step.outputs) for step in packed)
    weight = _pad(output.weight, panel)
    size = len(weight)
    outcome = states.new_empty(len(rows), size)

    def compute(begin: int, end: int) -> None:
        scratch = states.new_empty(library.scratch_size(widest))
        library.values(
            *(states.data_ptr(), batch, rows.data_ptr(), num_actions, packed, len(packed)),
            *(widest, weight.data_ptr(), output.bias.data_ptr(), size, begin, end),
            *(scratch.data_ptr(), outcome.data_ptr()),
        )

    starts = range(0, len(rows), _ROWS_AT_ONCE)
    in_threads(compute, [(start, min(start + _ROWS_AT_ONCE, len(rows))) for start in starts])
    return outcome.view(*actions.shape[:-1], size)


def _pad(matrix: Tensor, panel: int) -> Tensor:
    """Fill the rows with zeros up to a multiple of the panel."""
    return functional.pad(matrix, (0, -matrix.shape[-1] % panel)).contiguous()


def _packed(layer: Linear | nn.LayerNorm, panel: int) -> Tensor:
    """Return the weight in the layout of the C++ function."""
    if isinstance(layer, nn.LayerNorm):
        return _pad(layer.weight, panel)
    columns = _pad(layer.weight.t(), panel)
    return columns.view(len(columns), -1, panel).transpose(0, 1).contiguous()
