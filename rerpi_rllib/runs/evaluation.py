"""Playing episodes with a checkpoint's policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from rerpi_rllib import envs
from rerpi_rllib.algorithm import checks
from rerpi_rllib.algorithm.checkpoint import read_manifest
from rerpi_rllib.algorithm.env_runner import ToEnvUnits
from rerpi_rllib.algorithm.networks import act
from rerpi_rllib.core.networks import ActorCritic
from rerpi_rllib.envs.playing import play
from rerpi_rllib.runs.checkpoints import Report, load_networks, newest_checkpoint

MAX_EPISODES = 1_000_000


def evaluate(
    checkpoint: Path,
    *,
    episodes: int = 10,
    stochastic: bool = False,
    video: Path | None = None,
    seed: int = 0,
    report: Report = lambda line: None,
) -> dict[str, Any]:
    """Play whole episodes and return what `rllib evaluate --json` prints.

    Nothing is unpickled, so that the checkpoint may be of somebody else.

    Args:
        checkpoint: a checkpoint, or the directory of a run, whose newest one is taken.
        stochastic: sample actions instead of taking the mean of the policy.
        video: where to write a video of the first episode.
        seed: seeds the first episode; the others follow with the next numbers.
        report: called with a line about every newer checkpoint that is not whole.
    """
    if not 1 <= episodes <= MAX_EPISODES:
        raise ValueError(
            f"--episodes {episodes} is not allowed: it must be from 1 to {MAX_EPISODES:,}."
        )
    if not checks.check_of(checks.Seed).holds(seed):
        raise ValueError(
            f"--seed {seed} is not allowed: it must be {checks.check_of(checks.Seed).allowed}."
        )
    checkpoint = newest_checkpoint(checkpoint, with_replay=False, report=report)
    manifest = read_manifest(checkpoint)
    if not isinstance(manifest["env_config"], dict):
        raise ValueError(
            f"The env_config of {checkpoint} holds objects: only RERPI.from_checkpoint reads them."
        )
    nets = load_networks(checkpoint)
    env = envs.make(manifest["env"], render=video is not None, **manifest["env_config"])
    to_env_units = ToEnvUnits(env.action_space)
    torch.manual_seed(seed)
    played = play(
        env,
        lambda observation: to_env_units(_act(nets, observation, stochastic)),
        episodes=episodes,
        seed=seed,
        video=video,
    )
    return {"env": manifest["env"], "episodes": episodes, **played}


@torch.no_grad()
def _act(nets: ActorCritic, observation: np.ndarray, stochastic: bool) -> np.ndarray:
    return act(nets, torch.as_tensor(observation)[None], stochastic)[0][0].numpy()
