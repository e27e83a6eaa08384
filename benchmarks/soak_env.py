"""The environment of `benchmarks/soak.py`: Pendulum with numbered steps, which misbehaves.

Each environment that is built has a number, its life, and counts its steps. Both are in its
observations, so small that no network learns from them and exact in float32: what a replay holds can
be compared step by step with what was sampled. Where the environment variable ``SOAK_DIRECTORY`` is
set, the steps of each life are counted in a file there, which outlives a killed process, and there
are faults.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.envs.classic_control.pendulum import PendulumEnv

DIRECTORY, SEED = "SOAK_DIRECTORY", "SOAK_SEED"
HANG = "hang"  # Whoever makes this file there wants an environment to hang.
BAD = "bad.txt"  # A line for each bad number: the life, the number of the step, and what it was.
EPISODE_STEPS = 100
_LIFE_UNIT, _STEP_UNIT = 2.0**-20, 2.0**-32
_EPISODES_BETWEEN_BAD_ONES = (3, 10)
_BAD_NUMBERS = (np.nan, np.inf, -np.inf, 1e30)
_OBSERVATION_SIZE = 5


class Soak(gym.Env[Any, Any]):
    """Observes Pendulum's three numbers, the number of its life and that of the step."""

    def __init__(self) -> None:
        self._pendulum = PendulumEnv()
        self.action_space = self._pendulum.action_space
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (_OBSERVATION_SIZE,), np.float32)
        self._directory = Path(os.environ[DIRECTORY]) if DIRECTORY in os.environ else None
        self._life = 0
        self._steps = np.zeros(1, np.int64)
        self._time = 0

    def _begin_life(self) -> None:
        assert self._directory is not None
        self._life, file = _new_life(self._directory)
        self._steps = np.memmap(file, np.int64, "w+", shape=(1,))
        self._rng = np.random.default_rng([int(os.environ.get(SEED, 0)), self._life])
        self._plan_bad_number()

    def _plan_bad_number(self) -> None:
        episodes = self._rng.integers(*_EPISODES_BETWEEN_BAD_ONES)
        self._bad_step = int(self._steps[0] + episodes * EPISODE_STEPS)
        self._bad_step += int(self._rng.integers(EPISODE_STEPS))

    def _observation(self, observed: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        number = [self._life * _LIFE_UNIT, int(self._steps[0]) * _STEP_UNIT]
        return np.concatenate([observed, number]).astype(np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        if self._directory and not self._life:
            self._begin_life()
        self._time = 0
        return self._observation(self._pendulum.reset(seed=seed)[0]), {}

    def step(self, action: Any) -> tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        assert np.isfinite(action).all()
        step = int(self._steps[0])
        self._steps[0] += 1
        self._time += 1
        observed, reward, *_ = self._pendulum.step(action)
        observation, reward = self._observation(observed), float(reward)
        if self._directory:
            self._hang_if_wanted()
            if step == self._bad_step:
                number = self._rng.choice(_BAD_NUMBERS)
                if self._rng.random() < 0.5:
                    reward = float(number)
                else:
                    observation[self._rng.integers(3)] = number
                with open(self._directory / BAD, "a") as file:
                    file.write(f"{self._life} {step} {number}\n")
                self._plan_bad_number()
        return observation, reward, False, self._time >= EPISODE_STEPS, {}

    def _hang_if_wanted(self) -> None:
        assert self._directory is not None
        if (self._directory / HANG).exists():
            with contextlib.suppress(FileNotFoundError):  # Another one may have been quicker.
                (self._directory / HANG).unlink()
                while True:
                    time.sleep(3600.0)


def _new_life(directory: Path) -> tuple[int, Path]:
    """Take the next free number, in competition with other processes."""
    life = 1
    while True:
        path = directory / f"life-{life:04d}"
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            life += 1
            continue
        return life, path


def steps_of_lives(directory: Path) -> dict[int, int]:
    """Return how many steps each life has made, by its number."""
    return {
        int(path.name.removeprefix("life-")): int(np.fromfile(path, np.int64, 1).sum())
        for path in directory.glob("life-*")
    }


def bad_steps(directory: Path) -> dict[int, set[int]]:
    """Return the steps with bad numbers by the number of their life."""
    found: dict[int, set[int]] = {}
    if (directory / BAD).exists():
        for line in (directory / BAD).read_text().splitlines():
            life, step, _ = line.split()
            found.setdefault(int(life), set()).add(int(step))
    return found


def numbers_of(observations: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int64], ...]:
    """Return the lives and the steps that observations ``[N, 5]`` belong to."""
    wide = np.asarray(observations, np.float64)
    lives, steps = np.rint(wide[:, 3] / _LIFE_UNIT), np.rint(wide[:, 4] / _STEP_UNIT)
    return lives.astype(np.int64), steps.astype(np.int64)


gym.register("Soak-v0", Soak)
