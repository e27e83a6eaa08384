"""The same policy as an ONNX graph, for runtimes without torch."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from rerpi_rllib.core import layers
from rerpi_rllib.shipping.policy import LoadedPolicy

_INPUT, _OUTPUT = "observation", "action"
_COMPARED = 1_000
_TOLERANCE = 1e-5
# So many of the compared actions may be another choice where two are equally good.
_TIES = 2


def check_onnx_installed() -> None:
    """Raise ``ValueError`` unless everything that :func:`write_onnx` needs is installed."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"--onnx needs {', '.join(missing)}: install them with pip install 'rerpi-rllib[onnx]'."
        )


def write_onnx(policy: LoadedPolicy, path: Path) -> float:
    """Write a policy's ONNX file and compare it with torch on 1,000 observations.

    The file's input is ``observation`` ``[B, O]`` for any B, its output ``action`` in the
    environment's units.

    Returns:
        The largest difference of an action, in units of half the range of actions.
    """
    example = torch.zeros(2, policy.actor.policy.observation_size)
    with _quiet(), _plain_layers(), torch.enable_grad():
        torch.onnx.export(
            policy.actor,
            (example,),
            path,
            input_names=[_INPUT],
            output_names=[_OUTPUT],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            external_data=False,
            verbose=False,
        )
    return _compare(policy, path)


def _compare(policy: LoadedPolicy, path: Path) -> float:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    observations = policy.made_up_observations(_COMPARED)
    (found,) = session.run([_OUTPUT], {_INPUT: observations})
    (single,) = session.run([_OUTPUT], {_INPUT: observations[:1]})
    expected = policy(observations)
    unit = 1.0 if policy.actor.half_range is None else policy.actor.half_range.numpy()
    differences = np.abs(np.concatenate([found, single]) - np.concatenate([expected, expected[:1]]))
    largest = (differences / unit).reshape(len(differences), -1).max(axis=1)
    # A policy that chooses the best of some may find two of them equally good, up to the last digit.
    ties = 0 if policy.actor.policy.is_reparameterizable else _TIES
    if not np.sort(largest)[-1 - ties] <= _TOLERANCE:
        raise RuntimeError(
            f"{path} differs from torch by {largest.max():.2g} on {_COMPARED:,} observations; at "
            f"most {_TOLERANCE:g} is allowed."
        )
    return float(np.sort(largest)[-1 - ties])


@contextmanager
def _plain_layers() -> Iterator[None]:
    """Let layers choose their operations by nothing but their own settings."""
    before = layers.get_choices()
    layers.set_choices(dict.fromkeys(before, False))
    try:
        yield
    finally:
        layers.set_choices(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what the exporter tells about packages that are not needed."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
