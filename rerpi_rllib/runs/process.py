"""What a process of the command line sets up for itself before it does anything else."""

from __future__ import annotations

import logging
import os
import sys

import gymnasium

import rerpi_rllib
from rerpi_rllib.envs.rendering import choose_backend


def prepare_process(pictures: bool = False) -> None:
    """Choose how MuJoCo renders and where Ray listens, load the algorithms, silence the libraries.

    Errors are reported in one line, with the path of the log that holds the rest.

    Args:
        pictures: whether this process has to render.
    """
    choose_backend(pictures)
    if "RAY_ADDRESS" not in os.environ and "ray" not in sys.modules:
        # Then Ray listens on this machine's own address alone, as it does on Windows and macOS; it
        # reads the variable when it is imported.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    # Ray sets the levels of its loggers when it is imported, which has to come first.
    rerpi_rllib.load_algorithms()
    for name in ("ray", "ray.rllib", "ray.tune"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    gymnasium.logger.min_level = gymnasium.logger.ERROR
