"""Playing episodes with a checkpoint's policy: their returns, and a video of the first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rerpi_rllib import envs
from rerpi_rllib.algorithm import checks
from rerpi_rllib.algorithm.checkpoint import read_manifest
from rerpi_rllib.algorithm.env_runner import ToEnvUnits
from rerpi_rllib.algorithm.networks import act
from rerpi_rllib.core.networks import ActorCritic
from rerpi_rllib.runs.checkpoints import Report, load_networks, newest_checkpoint

_MAX_EPISODES = 1_000_000


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
    if not 1 <= episodes <= _MAX_EPISODES:
        raise ValueError(
            f"--episodes {episodes} is not allowed: it must be from 1 to {_MAX_EPISODES:,}."
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
    returns, lengths = [], []
    frames = _VideoWriter(video, env) if video else None
    try:
        for episode in range(episodes):
            observation, _ = env.reset(seed=seed + episode)
            total, length, done = 0.0, 0, False
            while not done:
                if frames and episode == 0:
                    frames.add(env.render())
                action = _act(nets, observation, stochastic)
                observation, reward, terminated, truncated, _ = env.step(to_env_units(action))
                total, length, done = total + float(reward), length + 1, terminated or truncated
            returns.append(total)
            lengths.append(length)
    finally:
        if frames:
            frames.close()
        env.close()
    return {
        "env": manifest["env"],
        "episodes": episodes,
        "return_mean": float(np.mean(returns)),
        "return_std": float(np.std(returns)),
        "returns": returns,
        "episode_lengths": lengths,
    }


@torch.no_grad()
def _act(nets: ActorCritic, observation: np.ndarray, stochastic: bool) -> np.ndarray:
    return act(nets, torch.as_tensor(observation)[None], stochastic)[0][0].numpy()


class _VideoWriter:
    """Writes frames to a file whose suffix gives the format (.mp4, .gif)."""

    def __init__(self, path: Path, env: gym.Env[Any, Any]) -> None:
        import imageio

        seconds_per_step = getattr(env.unwrapped, "dt", None)
        fps = round(1.0 / seconds_per_step) if seconds_per_step else 30
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = imageio.get_writer(path, fps=min(fps, 60))
        except (ValueError, OSError) as error:
            raise ValueError(f"Cannot write a video to {str(path)!r}: {error}") from error

    def add(self, frame: Any) -> None:
        self._writer.append_data(frame)

    def close(self) -> None:
        self._writer.close()
