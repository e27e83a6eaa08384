"""Short films of the policy while it learns, each made from a checkpoint by a process of its own."""

from __future__ import annotations

import math
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray.tune import Callback, Checkpoint
from ray.tune.experiment import Trial

from rerpi_rllib.algorithm.checkpoint import read_manifest
from rerpi_rllib.envs.rendering import rendering_backend

_SECONDS, _FRAMES_PER_SECOND, _WIDTH = 6.0, 12, 240
_NICENESS = 10
_SECONDS_TO_FINISH = 120.0


class Filming(Callback):
    """Films the policy of a checkpoint every so often, and the last one.

    Training goes on meanwhile. If the first film fails, for instance since there is no way to render,
    the reason is reported and there are no more.

    Args:
        directory: where the films go, with a file for TensorBoard.
        interval: seconds between two films.
        report: called with the reason why there are no films.
    """

    def __init__(
        self,
        directory: Path,
        interval: float,
        report: Callable[[str], None],
    ) -> None:
        self._directory, self._interval = directory, interval
        self._report = report
        self._due = -math.inf
        self._filming: tuple[Path, int, subprocess.Popen[str]] | None = None
        self._is_possible = True
        self._last: Path | None = None

    def on_checkpoint(
        self, iteration: int, trials: list[Trial], trial: Trial, checkpoint: Checkpoint, **info: Any
    ) -> None:
        self._last = Path(checkpoint.path)
        if time.monotonic() >= self._due and self._filming is None:
            self._start(self._last)

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        if self._filming is not None and self._filming[2].poll() is not None:
            self._finish()

    def on_experiment_end(self, trials: list[Trial], **info: Any) -> None:
        """Film the last policy."""
        self._finish()
        if self._last is not None:
            self._start(self._last)
            self._finish()

    def _start(self, checkpoint: Path) -> None:
        self._due = time.monotonic() + self._interval
        step = int(read_manifest(checkpoint)["env_steps"])
        film = self._directory / f"step-{step:09d}.gif"
        if not self._is_possible or film.exists():
            return
        command = [sys.executable, "-m", __name__, str(checkpoint), str(film)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        # A process that trains renders nothing, and has told MuJoCo so. It reads this when it is
        # imported, and RLlib imports it.
        if environment.get("MUJOCO_GL") == "disabled" and "DISPLAY" not in environment:
            try:
                environment["MUJOCO_GL"] = rendering_backend()
            except ValueError as error:
                self._give_up(str(error))
                return
        process = subprocess.Popen(
            ["nice", "-n", str(_NICENESS), *command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C ends the run, whose last film may be this one.
        )
        self._filming = film, step, process

    def _finish(self) -> None:
        """Wait for the film that is being made, and show it."""
        if self._filming is None:
            return
        (film, step, process), self._filming = self._filming, None
        try:
            output, _ = process.communicate(timeout=_SECONDS_TO_FINISH)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            output = f"{film.name} took more than {_SECONDS_TO_FINISH:g} s"
        if process.returncode == 0 and film.exists():
            _add_to_tensorboard(film, step)
        elif not any(self._directory.glob("*.gif")):
            lines = output.strip().splitlines() or ["it ended without an error message"]
            self._give_up(lines[-1])

    def _give_up(self, reason: str) -> None:
        self._is_possible = False
        self._report(f"There are no films of the policy: {reason}")


def _add_to_tensorboard(film: Path, step: int) -> None:
    """Put a film among TensorBoard's images, since its videos need one more package."""
    from tensorboardX import SummaryWriter
    from tensorboardX.proto.summary_pb2 import Summary

    content = film.read_bytes()
    width, height = struct.unpack("<HH", content[6:10])
    image = Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=content)
    # TensorBoard reads only the newest file of a directory: the run's own has to stay that.
    with SummaryWriter(str(film.parent)) as writer:
        writer.file_writer.add_summary(
            Summary(value=[Summary.Value(tag="policy", image=image)]), step
        )


def film(checkpoint: Path, path: Path) -> None:
    """Write a film of the first seconds of an episode; the file appears when it is whole."""
    import imageio
    import numpy as np
    import torch

    from rerpi_rllib import envs
    from rerpi_rllib.algorithm.env_runner import ToEnvUnits
    from rerpi_rllib.algorithm.networks import act
    from rerpi_rllib.runs.checkpoints import load_networks

    manifest, nets = read_manifest(checkpoint), load_networks(checkpoint)
    env = envs.make(manifest["env"], render=True, **manifest["env_config"])
    to_env_units = ToEnvUnits(env.action_space)
    seconds_per_step = getattr(env.unwrapped, "dt", None) or 1 / 30
    every = max(1, round(1 / (_FRAMES_PER_SECOND * seconds_per_step)))
    frames: list[Any] = []
    observation, _ = env.reset(seed=0)
    done, step = False, 0
    while not done and len(frames) < _SECONDS * _FRAMES_PER_SECOND:
        if step % every == 0:
            picture = np.asarray(env.render())
            stride = max(1, picture.shape[1] // _WIDTH)
            frames.append(picture[::stride, ::stride])
        with torch.no_grad():
            action = act(nets, torch.as_tensor(observation)[None], False)[0][0].numpy()
        observation, _, terminated, truncated, _ = env.step(to_env_units(action))
        done, step = terminated or truncated, step + 1
    env.close()
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new.gif")
    imageio.mimsave(new, frames, duration=1000 * every * seconds_per_step, loop=0)
    new.replace(path)


if __name__ == "__main__":
    film(Path(sys.argv[1]), Path(sys.argv[2]))
