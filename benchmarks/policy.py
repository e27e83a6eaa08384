"""How long one action takes: an exported policy beside RLlib's way of acting with the same networks.

python benchmarks/policy.py [--json]

The peer is what RLlib's documentation does with an RLModule that was loaded from a checkpoint: a
call of ``forward_inference``, which also computes log-probabilities, and the action in the
environment's units. Both get one observation. What counts is the time of the CPU, so that other
programs on the machine matter little.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import common
import gymnasium as gym
import numpy as np
import torch
from ray.rllib.utils.spaces.space_utils import unsquash_action

from rerpi_rllib import RERPIConfig, load_policy
from rerpi_rllib.algorithm.checkpoint import describe_space
from rerpi_rllib.core.policies import POLICIES, describe_policy
from rerpi_rllib.shipping.policy import save_policy

ROUNDS, CALLS = 21, 300
OBSERVATIONS = gym.spaces.Box(-np.inf, np.inf, (24,), np.float32)  # Those of walker-walk.
BOX = gym.spaces.Box(-2.0, 3.0, (6,), np.float32)
PRESETS = {"paper's networks": RERPIConfig, "compact": RERPIConfig.compact}


def microseconds(function: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        started = time.process_time()
        for _ in range(CALLS):
            function()
        times.append((time.process_time() - started) / CALLS)
    return 1e6 * statistics.median(times[1:])


def compare(policy: str, config: RERPIConfig) -> tuple[float, float]:
    """Return the time of a call here and of RLlib's, in microseconds."""
    actions = gym.spaces.Discrete(6) if POLICIES[policy].is_discrete else BOX
    config.training(policy=policy)
    spec = config.get_default_rl_module_spec()
    spec.observation_space, spec.action_space = OBSERVATIONS, actions
    spec.model_config = config.model_config
    module = spec.build().eval()
    observation = np.random.default_rng(0).standard_normal(24).astype(np.float32)

    def rllib() -> object:
        batch = {"obs": torch.from_numpy(observation).unsqueeze(0)}
        with torch.no_grad():
            action = module.forward_inference(batch)["actions"][0].numpy()
        return unsquash_action(action, actions)

    with tempfile.TemporaryDirectory() as directory:
        spaces = {"observation": describe_space(OBSERVATIONS), "action": describe_space(actions)}
        network = module.nets.policy
        description = {"network": describe_policy(network), "spaces": spaces}
        save_policy(Path(directory), network, description)
        shipped = load_policy(directory)
    np.testing.assert_allclose(shipped(observation), rllib(), rtol=1e-4, atol=1e-5)
    return microseconds(lambda: shipped(observation)), microseconds(rllib)


def main() -> None:
    report = common.Report(__doc__)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    for preset, make in PRESETS.items():
        for policy in POLICIES:
            ours, peer = compare(policy, make())
            setting = f"{policy}, {preset}, 24 observed numbers, 6 actions, one core"
            report.add(f"act_{policy}", ours, peer, "us", peer / ours, setting, "RLlib's RLModule")


if __name__ == "__main__":
    main()
