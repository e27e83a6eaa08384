"""How a process that learns is set up: its threads, its memory and what it compiles."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from rerpi_rllib import core
from rerpi_rllib.core.gradients import Gradients
from rerpi_rllib.core.layers import choose_fastest
from rerpi_rllib.core.sampled_values import use_library
from rerpi_rllib.core.threads import set_threads

logger = logging.getLogger(__name__)

_SECONDS_TO_COMPILE = 60.0  # It takes one.
_one_compiles = threading.Lock()
_NICENESS = 4  # Ray's workers have 15, and 19 is the most.


def set_up_learning(config: AlgorithmConfig) -> int:
    """Set up how this process computes, and return the number of its threads."""
    threads = learner_threads(config)
    set_threads(threads, give_way)
    keep_freed_memory()
    choose_fastest()
    compile_for_learning(config)
    return threads


def compile_for_learning(config: AlgorithmConfig) -> None:
    """Compile what a learner with these settings uses; a second call waits for the first one."""
    if config.num_gpus_per_learner == 0:
        with _one_compiles:
            compile_sampled_values()


def give_way() -> None:
    """Lower the priority of the thread that calls this, on systems where each has its own."""
    if sys.platform == "linux":
        os.nice(_NICENESS)


@functools.cache
def compile_sampled_values() -> bool:
    """Compile the values of sampled actions for this machine, which takes about a second.

    Returns:
        Whether there is a compiler that can do it. Without one they take up to twice as long.
    """
    source = Path(core.__file__).with_name("sampled_values.cpp")
    compilers = (os.environ.get("CXX"), "c++", "g++", "clang++")
    compiler = next(filter(None, map(shutil.which, filter(None, compilers))), None)
    if compiler is None:
        logger.warning("There is no C++ compiler, so that updates on a CPU take longer.")
        return False
    try:
        # Some file systems keep a file that is in use.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
            library = str(Path(directory) / "sampled_values.so")
            command = [compiler, "-O3", "-march=native", "-std=c++17", "-shared", "-fPIC"]
            command += ["-o", library, str(source)]
            subprocess.run(
                command, check=True, capture_output=True, text=True, timeout=_SECONDS_TO_COMPILE
            )
            use_library(library)
    except (OSError, subprocess.SubprocessError) as reason:
        message = getattr(reason, "stderr", None) or str(reason)
        logger.warning(
            "%s cannot compile %s, so that updates on a CPU take longer: %s",
            compiler,
            source.name,
            message.strip().partition("\n")[0],
        )
        return False
    return True


def make_gradients(config: Mapping[str, Any], device: torch.device) -> Gradients:
    """Make what computes the gradients of a learner's updates.

    Compiled functions round differently, so a synchronous run, which has to be the same for a seed,
    cannot switch to them whenever they are ready. On a GPU they are compiled if asked for.
    """
    when = config["compile_updates"]
    is_repeatable = config["num_env_runners"] == 0
    if when == "background" and (is_repeatable or device.type != "cpu"):
        when = "never"
    return Gradients.when_compiled(when)


def learner_threads(config: AlgorithmConfig) -> int:
    """Return as many threads as RLlib reserves CPUs for the learner.

    EnvRunners that are held to a ratio of updates to steps mostly wait for the learner, so a learner
    in the main process takes their CPUs too, as far as this machine has them.
    """
    cpus = config.num_cpus_per_learner if config.num_cpus_per_learner != "auto" else 1
    if config.num_learners == 0:
        cpus = max(cpus, config.num_cpus_for_main_process)
        if config.updates_per_env_step is not None:
            cpus += config.num_env_runners * config.num_cpus_per_env_runner
    return max(1, min(int(cpus), _available_cpus()))


def _available_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def keep_freed_memory() -> None:
    """Ask glibc not to hand freed memory back to the system.

    Every update frees and takes the same few megabytes for activations; getting them back from the
    system page by page costs a fifth of an update on a CPU.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, top_pad, mmap_threshold, arena_max = -1, -2, -3, -8
        mallopt(mmap_threshold, 2**30)
        mallopt(trim_threshold, 2**30)
        mallopt(top_pad, 2**26)
        # One heap for all threads: the learner may run in a thread of its own.
        mallopt(arena_max, 1)
