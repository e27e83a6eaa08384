"""What the machine or the cluster offers a run: GPUs, the speed of an update, a running Ray."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium as gym
import ray
import torch

from rerpi_rllib import RERPIConfig, envs
from rerpi_rllib.algorithm.networks import build_networks, streams_of
from rerpi_rllib.algorithm.process import set_up_learning
from rerpi_rllib.core.optimizers import make_optimizers
from rerpi_rllib.core.settings import LearningSettings
from rerpi_rllib.core.updates import run_updates
from rerpi_rllib.runs.errors import EndedBySignal, RunFailed
from rerpi_rllib.runs.signals import processes_survive_signals

logger = logging.getLogger(__name__)


def is_machine_without_gpu() -> bool:
    """Return whether runs take place on this machine and it has no GPU."""
    return "RAY_ADDRESS" not in os.environ and torch.cuda.device_count() == 0


def has_no_gpu(config: RERPIConfig) -> bool:
    """Return whether the learner will run on this machine's CPU, as far as can be known now."""
    if config.num_gpus_per_learner == "auto":
        return is_machine_without_gpu()
    return bool(config.num_gpus_per_learner == 0) and "RAY_ADDRESS" not in os.environ


def no_gpu_hint(config: RERPIConfig, preset: str | None) -> str | None:
    """Say what an update costs on the CPU; None if there is a GPU or the user chose a preset."""
    if preset is not None or not has_no_gpu(config):
        return None
    return (
        f"No GPU: one update with batch {config.total_train_batch_size} takes about "
        f"{update_seconds(config):.2g} s here. --preset compact is made for CPUs."
    )


def update_seconds(config: RERPIConfig) -> float:
    """Measure on random data how long one update takes on this machine's CPU."""
    env = envs.make(config.env, **config.env_config)
    sizes = gym.spaces.flatdim(env.observation_space), gym.spaces.flatdim(env.action_space)
    nets = build_networks(env.observation_space, env.action_space, config.model_config)
    env.close()
    settings = replace(LearningSettings(**config.model_config["learning"]), policy_update_period=1)
    size = config.total_train_batch_size
    length = () if config.policy_evaluation == "td0" else (config.sequence_length,)
    rows = (size // config.steps_per_row, *length)
    batch = {
        "obs": torch.randn(rows[0], *(n + 1 for n in length), sizes[0]),
        "new_obs": torch.randn(*rows, sizes[0]),
        "actions": torch.zeros(*rows, 1 if nets.policy.is_discrete else sizes[1]),
        "rewards": torch.randn(rows),
        "terminateds": torch.zeros(rows),
        "action_logp": torch.zeros(rows),
        "loss_mask": torch.ones(rows, dtype=torch.bool),
    }
    set_up_learning(config)
    optimizers, best = make_optimizers(nets), float("inf")
    for _ in range(2):
        started = time.perf_counter()
        run_updates(nets, settings, batch, rows[0], optimizers=optimizers)
        best = min(best, time.perf_counter() - started)
    return best


def check_machine(
    config: RERPIConfig, observation_space: gym.Space[Any], action_space: gym.Space[Any]
) -> None:
    """Raise ``ValueError`` if a run cannot take place on this machine; a cluster may be larger."""
    if "RAY_ADDRESS" in os.environ or ray.is_initialized():
        return
    gpus = torch.cuda.device_count()
    needed = config.num_gpus_per_learner
    needed = 0 if needed == "auto" else needed * max(1, config.num_learners)
    needed += config.num_gpus_per_env_runner * config.num_env_runners
    if max(needed, config.num_gpus) > gpus:
        raise ValueError(
            f"The run needs {max(needed, config.num_gpus):g} GPU and there are {gpus}: change "
            "num_env_runners, num_learners or --num-gpus."
        )
    parts = _memory(config, observation_space, action_space)
    total, available = sum(parts.values()), machine_memory()
    if total > available:
        largest = max(parts, key=lambda part: parts[part])
        raise ValueError(
            f"The run needs about {_gigabytes(total)} of memory and this machine has "
            f"{_gigabytes(available)}. Most of it, {_gigabytes(parts[largest])}, is for {largest}."
        )


def _gigabytes(size: float) -> str:
    return f"{size / 2**30:,.3g} GB"


_BYTES_PER_PROCESS = 2**28  # Python with torch, Ray and an environment, as far as it is not shared.


def _memory(
    config: RERPIConfig, observation_space: gym.Space[Any], action_space: gym.Space[Any]
) -> dict[str, float]:
    """Estimate the bytes that a run needs in the end, by the settings that need them."""
    observation = gym.spaces.flatdim(observation_space)
    action = gym.spaces.flatdim(action_space)
    network_sizes = {
        "policy_layers": _weights([observation, *config.policy_layers, 2 * action]),
        "covariance_layers": _weights([observation, *(config.covariance_layers or ()), 2 * action]),
        "critic_layers": config.num_critics
        * _weights([observation + action, *config.critic_layers, config.num_atoms]),
    }
    of_critic = [*config.critic_layers]
    if streams := streams_of(observation_space, config.model_config):
        del network_sizes["policy_layers"], network_sizes["critic_layers"]
        network_sizes["joint_layers"] = 0
        for network, number, outputs in (
            ("policy", 1, 2 * action),
            ("critic", config.num_critics, config.num_atoms),
        ):
            layers = streams[f"{network}_stream_layers"]
            weights = sum(_weights([size, *layers]) for size in streams["sizes"])
            network_sizes[f"{network}_stream_layers"] = number * weights
            joined = len(streams["sizes"]) * layers[-1] + action
            weights = _weights([joined, *streams["joint_layers"], outputs])
            network_sizes["joint_layers"] += number * weights
        of_critic = [*streams["critic_stream_layers"], *streams["joint_layers"]]
    if config.network == "residual":  # Blocks hold a layer of twice the width and one back.
        network_sizes = {key: 4 * weights for key, weights in network_sizes.items()}
    on_gpu = not has_no_gpu(config)
    states = config.total_train_batch_size
    widest = max(of_critic)
    # Online and target weights, their gradients and two moments; and the same in each learner.
    copies = 5 * max(1, config.num_learners)
    step = 4 * (observation + action + 2) + 1
    return {
        f"replay_capacity={config.replay_capacity:,}": step * config.replay_capacity,
        **{
            f"{key}={getattr(config, key)}": 4.0 * copies * weights
            for key, weights in network_sizes.items()
        },
        f"train_batch_size={states:,}": 4.0 * states * (2 * observation + action + 4)
        # Each layer of the critic keeps its outputs for the gradient.
        + (0 if on_gpu else 4.0 * states * sum(of_critic)),
        f"num_action_samples={config.num_action_samples}": 0
        if on_gpu
        else 4.0 * states * config.num_action_samples * (action + widest),
        f"num_env_runners={config.num_env_runners}": _BYTES_PER_PROCESS * config.num_env_runners,
        f"num_learners={config.num_learners}": _BYTES_PER_PROCESS * config.num_learners,
        f"num_replay_shards={config.num_replay_shards}": _BYTES_PER_PROCESS
        * config.num_replay_shards,
        f"evaluation_num_env_runners={config.evaluation_num_env_runners}": _BYTES_PER_PROCESS
        * config.evaluation_num_env_runners,
    }


def _weights(sizes: Sequence[int]) -> int:
    """Return the number of weights of layers of these sizes, one after another."""
    return sum(before * after for before, after in pairwise(sizes))


def machine_memory() -> int:
    """Return the bytes of memory that this process may use: the machine's, or a container's limit."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):  # Control groups 2 and 1.
        with contextlib.suppress(OSError, ValueError):  # Without a limit there is "max" instead.
            memory = min(memory, int((Path("/sys/fs/cgroup") / limit).read_text()))
    return memory


@contextmanager
def running_ray(config: RERPIConfig, dashboard: bool = False) -> Iterator[str | None]:
    """Start a Ray that is large enough for a run, and stop it; one that runs already is kept.

    Args:
        config: the configuration of the run.
        dashboard: whether to start Ray's dashboard too, which takes a second and 150 MB. A run goes
            on if it does not start.

    Yields:
        The address of the dashboard of a Ray that was started or connected to here, if it has one.
    """
    was_initialized = ray.is_initialized()
    _set_environment()
    try:
        address = None if was_initialized else _start_ray(config, dashboard)
        _check_resources(config)
        yield address
    finally:
        if not was_initialized:
            ray.shutdown()


def _set_environment() -> None:
    """Set the variables that Tune reads when it runs trials, and Ray when it starts workers."""
    # Tune would end a run on Ctrl-C without a last checkpoint; here a run stops after its iteration.
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
    # Workers without a GPU of their own keep CUDA_VISIBLE_DEVICES as it is.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Tune's newer output ignores verbose=0.
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")


def _start_ray(config: RERPIConfig, dashboard: bool) -> str | None:
    """Connect to the cluster that RAY_ADDRESS names, or start Ray on this machine.

    Returns:
        The address of its dashboard, if there is one.
    """
    options: dict[str, Any] = {"logging_level": logging.CRITICAL, "log_to_driver": False}
    if "RAY_ADDRESS" not in os.environ:
        # With fewer cores than processes they share: a run must not wait for ever for a CPU.
        processes = 1 + config.num_env_runners + config.num_learners
        cpus = (
            config.num_cpus_for_main_process - 1 + processes * max(1, config.num_cpus_per_env_runner)
        )
        options |= {
            "address": "local",
            "num_cpus": max(os.cpu_count() or 1, int(cpus) + 1),
            # With True, Ray would refuse to start without it. It takes the next free port.
            "include_dashboard": None if dashboard else False,
            "dashboard_host": "127.0.0.1",
        }
    try:
        with processes_survive_signals():
            url = ray.init(**options).dashboard_url
    except SystemExit as error:
        # While it starts, Ray ends the process with the number of the signal.
        raise EndedBySignal(int(error.code or signal.SIGTERM)) from None
    except Exception as error:
        is_time_out = isinstance(error, TimeoutError)
        if isinstance(error, (OSError, ValueError)) and not is_time_out:
            raise  # A directory or an address that cannot be used: the message says which.
        # On a machine that is too busy Ray gives up with an error of no class of its own.
        raise RunFailed(
            f"Ray could not be started or joined: {' '.join(str(error).split())}"
        ) from error
    return f"http://{url}" if url else None


def _check_resources(config: RERPIConfig) -> None:
    request = config.algo_class.default_resource_request(config.to_dict())
    for kind, amount in request.required_resources.items():
        available = ray.cluster_resources().get(kind, 0)
        if amount > available and "RAY_ADDRESS" in os.environ:
            logger.warning(
                "The run needs %g %s and the cluster has %g: it begins when there are as many.",
                amount,
                kind,
                available,
            )
        elif amount > available:
            raise ValueError(
                f"The run needs {amount:g} {kind} and there are {available:g}: "
                "change num_env_runners, num_learners or --num-gpus."
            )
