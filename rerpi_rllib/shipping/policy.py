"""A trained policy as a folder of tensors and JSON, and as a function from observations to actions.

Reading one takes torch, numpy and safetensors alone: nothing is unpickled, and neither Ray nor
Gymnasium is imported.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from rerpi_rllib.core.layers import Normalize
from rerpi_rllib.core.policies import Policy, build_policy
from rerpi_rllib.core.recording import record

Array: TypeAlias = npt.NDArray[Any]

DESCRIPTION, TENSORS, ONNX, CARD = "policy.json", "policy.safetensors", "policy.onnx", "README.md"
_FORMAT = 1
# The first calls of recorded operations take longer, while torch still looks at them.
_WARM_UP_CALLS = 3


class Actor(nn.Module):
    """From a batch of observations ``[B, O]`` to actions in the environment's units.

    Args:
        policy: the network.
        action_space: the space as :func:`rerpi_rllib.algorithm.checkpoint.describe_space` describes
            it. Where it has bounds, the policy's actions in [-1, 1] are scaled to them and clipped.
        stochastic: whether to sample actions instead of taking the most likely ones.
    """

    low: Tensor | None
    high: Tensor | None
    half_range: Tensor | None

    def __init__(
        self, policy: Policy, action_space: Mapping[str, Any], stochastic: bool = False
    ) -> None:
        super().__init__()
        self.policy, self.stochastic = policy, stochastic
        low, high = (_bounds(action_space, side) for side in ("low", "high"))
        self.register_buffer("low", low)
        self.register_buffer("high", high)
        half_range = None if low is None or high is None else (high - low) / 2.0
        self.register_buffer("half_range", half_range)

    def forward(self, observations: Tensor) -> Tensor:
        distribution = self.policy(observations)
        actions = distribution.sample(1)[0] if self.stochastic else distribution.mode
        decoded = self.policy.decode_actions(actions)
        if self.low is None or self.high is None or self.half_range is None:
            return decoded
        scaled = self.low + (decoded + 1.0) * self.half_range
        return torch.minimum(torch.maximum(scaled, self.low), self.high)


def _bounds(action_space: Mapping[str, Any], side: str) -> Tensor | None:
    """Return one side of a box in its own precision; None for sides and spaces without bounds."""
    values = action_space.get(side)
    if values is None or any(value is None for value in values):
        return None
    return torch.from_numpy(np.array(values, np.dtype(action_space["dtype"])))


class LoadedPolicy:
    """A trained policy: called with an observation, it returns an action.

    Attributes:
        description: what ``policy.json`` holds: the network, the spaces, and where it came from.
        actor: the same as a torch module, for batches of tensors.
    """

    def __init__(
        self, description: Mapping[str, Any], policy: Policy, stochastic: bool = False
    ) -> None:
        self.description = description
        action_space = description["spaces"]["action"]
        self.actor = Actor(policy.eval().requires_grad_(False), action_space, stochastic).eval()
        self._size = policy.observation_size
        self._parts: dict[str, int] = description["spaces"]["observation"].get("parts", {})
        # Discrete actions keep the integers that they are.
        self._dtype = None if policy.is_discrete else np.dtype(action_space["dtype"])
        example = torch.zeros(1, self._size)
        # Recording draws a sample, which must not change the ones that follow.
        with torch.random.fork_rng(devices=[]):
            self._act = record(self.actor, example, frozen=True)
            for _ in range(_WARM_UP_CALLS):
                self._act(example)

    def __call__(self, observation: npt.ArrayLike | Mapping[str, npt.ArrayLike]) -> Any:
        """Return the action for one observation ``[O]``, or actions for a batch ``[..., O]``.

        Args:
            observation: one vector, a batch, or one observation's parts by name, where the
                environment's observations have parts.

        Returns:
            The action in the environment's units, as the environment takes it: an array of the
            action space's type, or an int for one discrete action.
        """
        if isinstance(observation, Mapping):
            observation = self._joined(observation)
        vector = np.array(observation, np.float32)
        if vector.ndim == 0 or vector.shape[-1] != self._size:
            raise ValueError(
                f"The observation has shape {vector.shape}; it must be ({self._size},), or "
                f"(..., {self._size}) for a batch."
            )
        if not np.isfinite(vector).all():
            where = np.argwhere(~np.isfinite(vector))[0].tolist()
            raise ValueError(
                f"The observation holds {vector[tuple(where)]} at {where}; all of its numbers must "
                "be finite."
            )
        if vector.ndim == 1:
            action = self._act(torch.from_numpy(vector).unsqueeze(0))[0]
            return action.item() if self._dtype is None else self._typed(action)
        with torch.no_grad():
            actions = self.actor(torch.from_numpy(vector.reshape(-1, self._size)))
        return self._typed(actions.unflatten(0, vector.shape[:-1]))

    def made_up_observations(self, n: int) -> Array:
        """Draw ``n`` observations for tests, of the size that the policy knows if it knows one."""
        draws = 2.0 * np.random.default_rng(0).standard_normal((n, self._size))
        for module in self.actor.modules():
            if isinstance(module, Normalize):
                draws = module.mean.numpy() + draws * module.stddev.numpy()
                break
        return draws.astype(np.float32)

    def _typed(self, actions: Tensor) -> Array:
        array: Array = actions.numpy()
        return array if self._dtype is None else array.astype(self._dtype, copy=False)

    def _joined(self, parts: Mapping[str, npt.ArrayLike]) -> Array:
        """Join the parts of one observation in the order of training."""
        if not parts or parts.keys() != self._parts.keys():
            raise ValueError(
                f"The observation has the parts {', '.join(map(str, parts)) or 'none'}; it must be "
                f"one vector, or have the parts {', '.join(self._parts) or 'none'}."
            )
        vectors = [np.ravel(np.asarray(parts[name], np.float32)) for name in self._parts]
        for (name, size), vector in zip(self._parts.items(), vectors):
            if len(vector) != size:
                raise ValueError(f"{name} has {len(vector)} numbers; it must have {size}.")
        return np.concatenate(vectors)


def save_policy(directory: Path, policy: Policy, description: Mapping[str, Any]) -> None:
    """Write ``policy.safetensors``, and last ``policy.json``, which is about it.

    Args:
        directory: where, an existing directory.
        policy: the network with its weights.
        description: ``network`` as :func:`describe_policy` gives it, ``spaces``, and what else
            is to be known.
    """
    # Layers that two parts of a network share are written twice.
    tensors = {name: tensor.cpu().clone() for name, tensor in policy.state_dict().items()}
    (directory / TENSORS).write_bytes(save(tensors))
    content = {"format": _FORMAT, **description, "sha256": _checksum(directory / TENSORS)}
    (directory / DESCRIPTION).write_text(json.dumps(content, indent=1) + "\n")


def read_description(directory: Path) -> dict[str, Any]:
    """Read ``policy.json``; raise ``ValueError`` if it cannot be used."""
    path = directory / DESCRIPTION
    if not path.is_file():
        raise ValueError(
            f"{str(directory)!r} holds no {DESCRIPTION}: it must be a directory that "
            "`rllib export CHECKPOINT DIR` has written."
        )
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(description, dict) or description.get("format") != _FORMAT:
        raise ValueError(f"{path} is not of format {_FORMAT}, which this version reads.")
    return description


def load_policy(directory: str | Path, *, stochastic: bool = False) -> LoadedPolicy:
    """Load a policy that ``rllib export`` has written, from tensors and JSON alone.

    Args:
        directory: where it was written to.
        stochastic: whether to sample actions, with torch's random numbers, instead of taking the most
            likely ones.
    """
    directory = Path(directory).expanduser()
    description = read_description(directory)
    try:
        if _checksum(directory / TENSORS) != description["sha256"]:
            raise ValueError(f"{TENSORS} is not the file that {DESCRIPTION} is about")
        with torch.random.fork_rng(devices=[]):  # Weights are drawn and then replaced.
            policy = build_policy(description["network"])
        policy.load_state_dict(load_file(directory / TENSORS))
        return LoadedPolicy(description, policy, stochastic)
    except Exception as error:  # A stranger may have written anything.
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"The policy in {str(directory)!r} cannot be loaded ({reason}).") from error


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
