"""Finding checkpoints on disk and reading what is in them without starting Ray."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.policy.policy import Policy

from rerpi_rllib.algorithm.config import RERPIConfig
from rerpi_rllib.algorithm.networks import model_settings
from rerpi_rllib.core.networks import ActorCritic
from rerpi_rllib.core.settings import LearningSettings

_STATE = "algorithm_state.pkl"
# Where RLlib keeps the networks of the one agent, on its new API stack and on its old one.
_MODULE = Path("learner_group") / "learner" / "rl_module" / "default_policy"
_POLICY = Path("policies") / "default_policy"


def is_checkpoint(path: Path) -> bool:
    """Whether everything is there: copying to the run's directory may have been cut short."""
    if not (path / _STATE).exists() or not any((path / p).exists() for p in (_MODULE, _POLICY)):
        return False
    try:
        sizes = pickle.loads((path / "replay" / "state.pkl").read_bytes())["bytes"]
        return all((path / "replay" / name).stat().st_size == n for name, n in sizes.items())
    except (OSError, EOFError, KeyError, pickle.UnpicklingError):
        return False


def newest_checkpoint(path: Path) -> Path:
    """The newest complete checkpoint at or below ``path``, as an absolute path."""
    path = path.expanduser().resolve()
    if not path.is_dir():
        raise ValueError(f"There is no directory {str(path)!r}.")
    if is_checkpoint(path):
        return path
    found = [p for p in path.glob("**/checkpoint_*") if is_checkpoint(p)]
    if not found:
        raise ValueError(f"There is no complete checkpoint_* at or below {str(path)!r}.")
    return max(found, key=lambda p: ((p / _STATE).stat().st_mtime_ns, p.name))


def load_networks(checkpoint: Path) -> ActorCritic:
    """The networks of a checkpoint of either API stack."""
    if (checkpoint / _POLICY).exists():
        return Policy.from_checkpoint(str(checkpoint / _POLICY)).model.nets.cpu()
    return RLModule.from_checkpoint(checkpoint / _MODULE).nets


def config_state(checkpoint: Path) -> dict[str, Any]:
    """All settings of the algorithm that wrote the checkpoint."""
    if (checkpoint / _POLICY).exists():
        return pickle.loads((checkpoint / _STATE).read_bytes())["config"]
    with open(checkpoint / "class_and_ctor_args.pkl", "rb") as file:
        return pickle.load(file)["ctor_args_and_kwargs"][0][0]


def check_resumable(checkpoint: Path, config: RERPIConfig) -> None:
    """Raise ``ValueError`` if the checkpoint is of another task, networks or API stack."""
    is_old = (checkpoint / _POLICY).exists()
    if is_old != config.uses_old_api_stack:
        stack = "old" if is_old else "new"
        raise ValueError(f"{checkpoint} is of RLlib's {stack} API stack: a run cannot change it.")
    state = config_state(checkpoint)
    if state["env"] != config.env:
        raise ValueError(
            f"{checkpoint} is of env={state['env']} and not {config.env}. A run cannot change it."
        )
    before, after = model_settings(vars(RERPIConfig()) | state), model_settings(vars(config))
    for name in ("policy", "critic"):
        if before[name] != after[name]:
            raise ValueError(
                f"{checkpoint} has other networks: {name} was {before[name]} and is {after[name]}. "
                "A run cannot change them."
            )
    multipliers = [
        sorted(c.multiplier for c in LearningSettings(**found["learning"]).constraints() if c.learned)
        for found in (before, after)
    ]
    if multipliers[0] != multipliers[1]:
        raise ValueError(
            f"{checkpoint} has other multipliers: {multipliers[0]}, and now they are "
            f"{multipliers[1]}. A run cannot change them."
        )
