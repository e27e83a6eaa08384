"""Finding checkpoints on disk, and reading their contents without starting Ray."""

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
from rerpi_rllib.runs.settings import RunSettings

_STATE = "algorithm_state.pkl"
# Where RLlib keeps the networks of the one agent, on its new API stack and on its old one.
_MODULE = Path("learner_group") / "learner" / "rl_module" / "default_policy"
_POLICY = Path("policies") / "default_policy"


def is_checkpoint(path: Path) -> bool:
    """Return whether a checkpoint is complete: a crash may have interrupted the copying of files."""
    if not (path / _STATE).exists() or not any((path / p).exists() for p in (_MODULE, _POLICY)):
        return False
    try:
        sizes = pickle.loads((path / "replay" / "state.pkl").read_bytes())["bytes"]
        return all((path / "replay" / name).stat().st_size == n for name, n in sizes.items())
    except (OSError, EOFError, KeyError, pickle.UnpicklingError):
        return False


def newest_checkpoint(path: Path) -> Path:
    """Find the newest complete checkpoint at or below ``path``; the result is an absolute path."""
    path = path.expanduser().resolve()
    if not path.is_dir():
        raise ValueError(f"There is no directory {str(path)!r}.")
    if is_checkpoint(path):
        return path
    checkpoints = [p for p in path.glob("**/checkpoint_*") if is_checkpoint(p)]
    if not checkpoints:
        raise ValueError(f"There is no complete checkpoint_* at or below {str(path)!r}.")
    return max(checkpoints, key=lambda p: ((p / _STATE).stat().st_mtime_ns, p.name))


def run_of_checkpoint(checkpoint: Path) -> Path:
    """Return the directory of the run that wrote the checkpoint."""
    for directory in checkpoint.parents:
        if (directory / RunSettings.FILE_NAME).is_file():
            return directory
    raise ValueError(f"{checkpoint} does not belong to a run of `rllib train`: no run.json above it.")


def load_networks(checkpoint: Path) -> ActorCritic:
    """Load the networks of a checkpoint of either API stack."""
    _check_version(checkpoint, config_state(checkpoint))
    if (checkpoint / _POLICY).exists():
        networks: ActorCritic = Policy.from_checkpoint(str(checkpoint / _POLICY)).model.nets.cpu()
    else:
        networks = RLModule.from_checkpoint(checkpoint / _MODULE).nets
    return networks


def config_state(checkpoint: Path) -> dict[str, Any]:
    """Load all settings of the algorithm that wrote the checkpoint."""
    if (checkpoint / _POLICY).exists():
        state: dict[str, Any] = pickle.loads((checkpoint / _STATE).read_bytes())["config"]
    else:
        with open(checkpoint / "class_and_ctor_args.pkl", "rb") as file:
            state = pickle.load(file)["ctor_args_and_kwargs"][0][0]
    return state


# Those that changed what a checkpoint holds.
_NEWEST_SETTINGS = (
    *("covariance_layers", "multiplier_schedule", "normalize_observations"),
    "normalize_returns",
)


def _check_version(checkpoint: Path, state: dict[str, Any]) -> None:
    """Raise ``ValueError`` if the settings in the checkpoint are not those that there are now."""
    missing = sorted(key for key in _NEWEST_SETTINGS if key not in state)
    if missing:
        raise ValueError(
            f"{checkpoint} was written by an older version with other networks: it has no "
            f"{', '.join(missing)}. Evaluate or resume it with that version."
        )


def check_resumable(checkpoint: Path, config: RERPIConfig) -> None:
    """Raise ``ValueError`` if the checkpoint has another task, API stack or other networks."""
    is_old = (checkpoint / _POLICY).exists()
    if is_old != config.uses_old_api_stack:
        stack = "old" if is_old else "new"
        raise ValueError(f"{checkpoint} is of RLlib's {stack} API stack: a run cannot change it.")
    state = config_state(checkpoint)
    _check_version(checkpoint, state)
    if state["env"] != config.env:
        raise ValueError(
            f"{checkpoint} is of env={state['env']} and not {config.env}. A run cannot change it."
        )
    before, after = model_settings(state), model_settings(vars(config))
    for name in ("policy", "critic", "networks", "normalize_returns"):
        if before[name] != after[name]:
            raise ValueError(
                f"{checkpoint} has other networks: {name} was {before[name]} and is {after[name]}. "
                "A run cannot change them."
            )
    old, new = (_multipliers(settings["learning"]) for settings in (before, after))
    if old != new:
        raise ValueError(
            f"{checkpoint} has other multipliers: they were {old} and are {new}. A run cannot change "
            "them."
        )


def _multipliers(learning: dict[str, Any]) -> list[str]:
    """Return the names of the multipliers that are learned, marked where there is one a dimension."""
    constraints = LearningSettings(**learning).constraints()
    return [f"{c.multiplier}{'[D]' * c.per_dimension}" for c in constraints if c.learned]
