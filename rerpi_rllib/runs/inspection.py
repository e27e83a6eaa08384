"""What a checkpoint is, from its manifest, its tensors and the results of its run; no unpickling."""

from __future__ import annotations

import json
import math
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from rerpi_rllib.algorithm import checkpoint as manifests
from rerpi_rllib.algorithm.config import RERPIConfig
from rerpi_rllib.core.critics import Critic
from rerpi_rllib.core.networks import ActorCritic
from rerpi_rllib.core.policies import Policy
from rerpi_rllib.runs import results
from rerpi_rllib.runs.checkpoints import Report, load_networks, newest_checkpoint
from rerpi_rllib.runs.settings import ALGORITHMS

# Settings that say where a run takes place, which is shown by itself, and what RLlib fills in.
_NO_SETTINGS = ("env", "env_config", "gpus_were_auto", "simple_optimizer")

# RLlib's own counters among the learner's metrics.
_OF_RLLIB = ("num_", "module_", "weights_seq_no")


def inspect(checkpoint: Path, report: Report = lambda line: None) -> dict[str, Any]:
    """Return what `rllib inspect --json` prints.

    Args:
        checkpoint: a checkpoint, or the directory of a run, whose newest one is taken.
        report: called with a line about every newer checkpoint that is not whole.
    """
    checkpoint = newest_checkpoint(checkpoint, with_replay=False, report=report)
    manifest = manifests.read_manifest(checkpoint)
    counters = ("algo", "env", "env_config", "api_stack", "iteration", "env_steps", "updates")
    return {
        "checkpoint": str(checkpoint),
        **{key: manifest.get(key) for key in (*counters, "replay_size", "time")},
        "is_own": manifests.is_own(manifest),
        "settings": changed_settings(manifest),
        "spaces": manifest["spaces"],
        "networks": _networks(checkpoint, manifest),
        "metrics": _metrics(checkpoint, manifest),
        "versions": manifest.get("versions", {}),
        "files": {name: measures["bytes"] for name, measures in sorted(manifest["files"].items())},
    }


def changed_settings(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a checkpoint that are not the defaults of its algorithm."""
    given = manifest["settings"]
    config = ALGORITHMS.get(manifest["algo"], RERPIConfig)()
    default = manifests.describe_settings(config.to_dict())
    # What validation fills in is no choice of anybody's; it depends on these two.
    config.num_env_runners = given.get("num_env_runners", config.num_env_runners)
    if manifest["api_stack"] == "old":
        config.api_stack(enable_rl_module_and_learner=False, enable_env_runner_and_connector_v2=False)
    before = manifests.describe_settings(config.to_dict())
    config.validate()
    after = manifests.describe_settings(config.to_dict())
    filled_in = {key: value for key, value in after.items() if before.get(key) != value}
    left_out = {*_NO_SETTINGS, *(["num_gpus_per_learner"] if given.get("gpus_were_auto") else [])}
    return {
        key: value
        for key, value in given.items()
        if key in default.keys() - left_out
        and value != default[key]
        and not (key in filled_in and value == filled_in[key])
    }


def _networks(checkpoint: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the matrices and the number of parameters of each network, by name."""
    if manifests.NETWORKS not in manifest["files"]:
        return {}  # An RLModule of the user's own.
    nets = load_networks(checkpoint)
    return {name: _describe_network(module) for name, module in _online(nets)}


def _online(nets: ActorCritic) -> Iterator[tuple[str, nn.Module]]:
    for name, module in nets.named_children():
        if not name.startswith("target_") and isinstance(module, (Policy, Critic)):
            yield name, module


def _describe_network(module: nn.Module) -> dict[str, Any]:
    return {
        "kind": type(module).__name__,
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "matrices": {
            name.removesuffix(".weight"): [parameter.shape[1], parameter.shape[0]]
            for name, parameter in module.named_parameters()
            if parameter.dim() == 2
        },
    }


def _metrics(checkpoint: Path, manifest: Mapping[str, Any]) -> dict[str, float]:
    """Return what the run's last result up to the checkpoint says; empty without a run."""
    last = None
    with suppress(OSError):
        for line in (checkpoint.parent / "result.json").read_text().splitlines():
            with suppress(ValueError):  # The run may be writing this line.
                result = json.loads(line)
                if result["training_iteration"] <= manifest["iteration"]:
                    last = result
    if last is None:
        return {}
    numbers = {
        "return": results.episode_return(last),
        "greedy_return": results.greedy_return(last),
        "time_s": last["time_total_s"],
        **dict(sorted(results.learner_metrics(last).items())),
    }
    return {
        key: float(value)
        for key, value in numbers.items()
        if not key.startswith(_OF_RLLIB) and isinstance(value, (int, float)) and math.isfinite(value)
    }


def describe(found: Mapping[str, Any]) -> list[str]:
    """Format what :func:`inspect` has returned as lines for people."""
    stack = f"RLlib's {found['api_stack']} API stack"
    lines = [
        found["checkpoint"],
        f"{found['algo']} on {found['env']}, {stack}"
        + (f", env_config {json.dumps(found['env_config'])}" if found["env_config"] else ""),
        f"env steps {found['env_steps']:,}  updates {found['updates']:,}  "
        f"replay {found['replay_size']:,}  iteration {found['iteration']:,}",
        f"written {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(found['time']))}"
        + (" by you" if found["is_own"] else ", not by you here: resuming it needs --trust"),
    ]
    for name, network in found["networks"].items():
        lines.append(f"{name:<12}{network['kind']}, {network['parameters']:,} parameters")
        matrices = ", ".join(f"{m} {i}x{o}" for m, (i, o) in network["matrices"].items())
        lines += textwrap.wrap(matrices, 88, initial_indent=" " * 12, subsequent_indent=" " * 12)
    sections: dict[str, Mapping[str, str]] = {
        "settings that differ from the defaults": {
            key: json.dumps(value) for key, value in found["settings"].items()
        },
        "last metrics": {key: f"{value:.4g}" for key, value in found["metrics"].items()},
        "versions": found["versions"],
        "files (bytes)": {name: f"{size:,}" for name, size in found["files"].items()},
    }
    for title, pairs in sections.items():
        if pairs:
            width = max(map(len, pairs)) + 2
            lines += ["", f"{title}:", *(f"  {k:<{width}}{v}" for k, v in pairs.items())]
    return lines
