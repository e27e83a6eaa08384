"""What a process of the command line sets up for itself before it does anything else."""

from __future__ import annotations

import logging
import os
import re
import sys

import gymnasium

import rerpi_rllib
from rerpi_rllib.envs.rendering import choose_backend


def choose_cluster(address: str | None) -> None:
    """Let Ray join the cluster at an address, in the first call of anything that uses Ray.

    Args:
        address: HOST:PORT of the head, or "auto" for the cluster that this machine belongs to. None
            leaves it to RAY_ADDRESS; without that, Ray is started on this machine.
    """
    if address is None:
        return
    if address != "auto" and not re.fullmatch(r"[^\s/:]+:\d+", address):
        raise ValueError(f"--address {address!r} is not allowed: it must be 'auto' or HOST:PORT.")
    os.environ["RAY_ADDRESS"] = address


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
