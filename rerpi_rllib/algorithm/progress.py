"""What a synchronous run needs, beside networks, optimizers and replay, to go on exactly.

It is stored as one JSON file and one file of arrays.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

_STATE_FILE, _ARRAYS_FILE = "state.json", "arrays.safetensors"
_ARRAY, _NUMBER = "__array__", "__number__"


def random_states() -> dict[str, Any]:
    """Return the states of this process's random generators: torch's, numpy's and Python's."""
    version, numbers, next_gaussian = random.getstate()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "torch": torch.get_rng_state().numpy(),
        "cuda": [state.numpy() for state in cuda],
        "numpy": np.random.get_state(legacy=False),
        "python": [version, np.array(numbers, np.uint32), next_gaussian],
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Take over what :func:`random_states` has returned."""
    torch.set_rng_state(torch.from_numpy(states["torch"]))
    if torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([torch.from_numpy(state) for state in states["cuda"]])
    np.random.set_state(states["numpy"])
    version, numbers, next_gaussian = states["python"]
    random.setstate((version, tuple(numbers.tolist()), next_gaussian))


def is_storable(state: Any) -> bool:
    """Tell whether :func:`save` can write this as it is."""
    try:
        json.dumps(_pack(state, {}))
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def save(directory: Path, state: dict[str, Any]) -> None:
    """Write a state of numbers, strings, None, lists, dictionaries and arrays."""
    arrays: dict[str, np.ndarray] = {}
    packed = _pack(state, arrays)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(arrays, directory / _ARRAYS_FILE)
    (directory / _STATE_FILE).write_text(json.dumps(packed))


def load(directory: Path) -> dict[str, Any] | None:
    """Read what :func:`save` has written; None if there is nothing. Tuples come back as lists."""
    if not (directory / _STATE_FILE).exists():
        return None
    packed = json.loads((directory / _STATE_FILE).read_text())
    state: dict[str, Any] = _unpack(packed, load_file(directory / _ARRAYS_FILE))
    return state


def _pack(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Replace arrays by references to ``arrays``, where they are put."""
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError(f"The keys of {value} are not all strings.")
        return {key: _pack(item, arrays) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_pack(item, arrays) for item in value]
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value, order="C")
        if array.dtype.kind not in "biuf":
            raise TypeError(f"An array has the type {array.dtype}.")
        name = str(len(arrays))
        arrays[name] = array
        return {_ARRAY if isinstance(value, np.ndarray) else _NUMBER: name}
    return value


def _unpack(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_ARRAY}:
            return arrays[value[_ARRAY]]
        if value.keys() == {_NUMBER}:
            return arrays[value[_NUMBER]][()]
        return {key: _unpack(item, arrays) for key, item in value.items()}
    if isinstance(value, list):
        return [_unpack(item, arrays) for item in value]
    return value
