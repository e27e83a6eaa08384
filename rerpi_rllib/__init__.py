"""Relative Entropy Regularized Policy Iteration as a Ray RLlib algorithm.

Importing this package makes "RERPI" and its relatives "MPO", "SVG0" and "DDPG" known to Ray Tune.
"""

import os

# MuJoCo's packages read this when they are imported, which RLlib does by itself. Training needs no
# pictures, and without a display their own choice fails with a warning.
if not os.environ.get("DISPLAY"):
    os.environ.setdefault("MUJOCO_GL", "disabled")

from ray.tune.registry import register_trainable

from rerpi_rllib.algorithm.baselines import DDPG, MPO, SVG0, DDPGConfig, MPOConfig, SVG0Config
from rerpi_rllib.algorithm.config import RERPIConfig
from rerpi_rllib.algorithm.rerpi import RERPI

__version__ = "0.1.0"
__all__ = ["DDPG", "MPO", "RERPI", "SVG0", "DDPGConfig", "MPOConfig", "RERPIConfig", "SVG0Config"]

for _algorithm in (RERPI, MPO, SVG0, DDPG):
    register_trainable(_algorithm.__name__, _algorithm)
