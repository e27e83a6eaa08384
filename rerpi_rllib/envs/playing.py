"""Playing whole episodes: their returns, and a video of the first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np


def play(
    env: gym.Env[Any, Any],
    policy: Callable[[Any], Any],
    *,
    episodes: int,
    seed: int,
    video: Path | None = None,
) -> dict[str, Any]:
    """Play episodes and close the environment; return what is to be known of their returns.

    If the task tells in ``info["distance"]`` how far a body has come, the distances are returned too.

    Args:
        env: the environment, made for rendering if there is to be a video.
        policy: from an observation to an action in the environment's units.
        episodes: how many, one at least.
        seed: seeds the first episode; the others follow with the next numbers.
        video: where to write a video of the first episode.
    """
    returns, lengths, distances = [], [], []
    frames = None
    try:
        frames = _VideoWriter(video, env) if video else None
        for episode in range(episodes):
            observation, _ = env.reset(seed=seed + episode)
            total, length, done = 0.0, 0, False
            while not done:
                if frames and episode == 0:
                    frames.add(env.render())
                observation, reward, terminated, truncated, info = env.step(policy(observation))
                total, length, done = total + float(reward), length + 1, terminated or truncated
            returns.append(total)
            lengths.append(length)
            if "distance" in info:
                distances.append(float(info["distance"]))
    finally:
        if frames:
            frames.close()
        env.close()
    return {
        "return_mean": float(np.mean(returns)),
        "return_std": float(np.std(returns)),
        "returns": returns,
        "episode_lengths": lengths,
        **({"distances": distances} if distances else {}),
    }


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
