"""Relative Entropy Regularized Policy Iteration as a Ray RLlib algorithm.

Importing the package imports nothing else. The names below are loaded when they are first used; that
also registers "RERPI", "MPO", "SVG0" and "DDPG" with Ray Tune. ``load_policy`` does without Ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rerpi_rllib.algorithm.baselines import DDPG, MPO, SVG0, DDPGConfig, MPOConfig, SVG0Config
    from rerpi_rllib.algorithm.config import RERPIConfig
    from rerpi_rllib.algorithm.rerpi import RERPI
    from rerpi_rllib.shipping.policy import load_policy

__version__ = "0.1.0"
__all__ = [
    "DDPG",
    "MPO",
    "RERPI",
    "SVG0",
    "DDPGConfig",
    "MPOConfig",
    "RERPIConfig",
    "SVG0Config",
    "load_policy",
]

_MODULES = {
    "rerpi_rllib.algorithm.rerpi": ("RERPI",),
    "rerpi_rllib.algorithm.config": ("RERPIConfig",),
    "rerpi_rllib.algorithm.baselines": (
        *("MPO", "SVG0", "DDPG"),
        *("MPOConfig", "SVG0Config", "DDPGConfig"),
    ),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "load_policy":
        return import_module("rerpi_rllib.shipping.policy").load_policy
    load_algorithms()
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_algorithms() -> None:
    """Import the algorithms and register them with Ray Tune under their names."""
    for module, names in _MODULES.items():
        loaded = import_module(module)
        globals().update({name: getattr(loaded, name) for name in names})
    from ray.tune.registry import register_trainable

    for name in ("RERPI", "MPO", "SVG0", "DDPG"):
        register_trainable(name, globals()[name])
