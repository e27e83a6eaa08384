"""Relative Entropy Regularized Policy Iteration as a Ray RLlib algorithm.

Importing this package makes "RERPI" known to Ray Tune.
"""

from ray.tune.registry import register_trainable

from rerpi_rllib.algorithm.config import RERPIConfig
from rerpi_rllib.algorithm.rerpi import RERPI

__version__ = "0.1.0"
__all__ = ["RERPI", "RERPIConfig"]

register_trainable("RERPI", RERPI)
