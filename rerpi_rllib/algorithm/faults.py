"""What a run survives: broken numbers from environments, environments that hang, lost learners."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError
from ray.rllib.core import COMPONENT_LEARNER
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.rllib.utils.metrics import WEIGHTS_SEQ_NO

from rerpi_rllib.algorithm.moments import Array

# Counts in the results, over the whole run, with their names for people.
NUM_BAD_EPISODES = "num_bad_episodes"
NUM_NONFINITE_UPDATES = "num_nonfinite_updates"
NUM_ENV_RUNNER_RESTARTS = "num_env_runner_restarts"
NUM_LEARNER_RESTARTS = "num_learner_restarts"
NUM_REPLAY_SHARD_RESTARTS = "num_replay_shard_restarts"
FAULTS = {
    NUM_BAD_EPISODES: "bad episodes",
    NUM_NONFINITE_UPDATES: "undone updates",
    NUM_ENV_RUNNER_RESTARTS: "EnvRunner restarts",
    NUM_LEARNER_RESTARTS: "learner restarts",
    NUM_REPLAY_SHARD_RESTARTS: "replay shard restarts",
}

# Nothing can be learned from numbers beyond this: their squares leave the range of float32.
LARGEST_NUMBER = 1e15

_EPISODES_COUNTED, _EPISODES_NEEDED = 100, 10
_EPISODES_REMEMBERED = 1000
_SECONDS_COUNTED_AT_ONCE = 1.0
_SECONDS_BETWEEN_BACKUPS = 60.0


def find_bad_number(columns: dict[str, Array], first_step: int = 0) -> str | None:
    """Say which of the columns, each ``[steps, ...]``, holds NaN, infinity or an absurd number."""
    for name, column in columns.items():
        # The largest of numbers with NaN among them is NaN.
        if not np.abs(column).max() <= LARGEST_NUMBER:
            numbers = np.reshape(column, (len(column), -1))
            row, place = np.argwhere(~(np.abs(numbers) <= LARGEST_NUMBER))[0]
            return f"{name} {numbers[row, place]:.3g} in step {first_step + row} of the episode"
    return None


class Screening:
    """Keeps bad numbers out: of each episode, all pieces from the first one that holds any."""

    def __init__(self) -> None:
        self.found: list[str] = []  # What was found since somebody took it from here.
        self._bad = deque[bool](maxlen=_EPISODES_COUNTED)
        self._unfinished: dict[str, None] = {}

    def passes(
        self, episode_id: str, columns: dict[str, Array], *, first_step: int, done: bool
    ) -> bool:
        """Tell whether the next piece of an episode may be stored, and count it.

        Args:
            episode_id: the same for all pieces of an episode.
            columns: what the piece consists of, by names for people.
            first_step: the number of its first step.
            done: whether the episode ends with it.
        """
        if episode_id in self._unfinished:
            if done:
                del self._unfinished[episode_id]
            return False
        bad = find_bad_number(columns, first_step)
        if done or bad:
            self._bad.append(bad is not None)
        if bad is None:
            return True
        self.found.append(bad)
        if not done:
            self._unfinished[episode_id] = None
            if len(self._unfinished) > _EPISODES_REMEMBERED:  # The oldest was never finished.
                del self._unfinished[next(iter(self._unfinished))]
        return False

    def hand_over(self) -> tuple[list[str], list[bool]]:
        """Return what was found, and which episodes were bad, since the last time."""
        news = self.found, list(self._bad)
        self.found = []
        self._bad.clear()
        return news

    def take_over(self, found: list[str], bad: list[bool]) -> None:
        """Count what another one has handed over."""
        self.found += found
        self._bad += bad

    @property
    def counted(self) -> tuple[int, int]:
        """The number of bad episodes among the last ones, and how many these are."""
        return sum(self._bad), len(self._bad)

    def exceeds(self, share: float) -> bool:
        """Tell whether more than this share of the last episodes is bad."""
        bad, episodes = self.counted
        return episodes >= _EPISODES_NEEDED and bad > share * episodes


class Waiting:
    """How long each EnvRunner has owed an answer while somebody was there to take it."""

    def __init__(self) -> None:
        self._owed: dict[int, int] = {}
        self._seconds: dict[int, float] = {}
        self._looked = time.monotonic()

    def asked(self, runner: int) -> None:
        self._owed[runner] = self._owed.get(runner, 0) + 1
        self._seconds.setdefault(runner, 0.0)

    def answered(self, runner: int) -> None:
        if self._owed.get(runner, 0) > 1:
            self._owed[runner] -= 1
            self._seconds[runner] = 0.0
        else:
            self.forget(runner)

    def forget(self, runner: int) -> None:
        """Expect no answers of an EnvRunner that was lost or has answered all."""
        self._owed.pop(runner, None)
        self._seconds.pop(runner, None)

    def longer_than(self, limit: float, healthy: Collection[int]) -> dict[int, float]:
        """Return the EnvRunners that have kept us waiting for so many seconds, and how many."""
        now = time.monotonic()
        # While the main process was busy elsewhere, or suspended, answers may have waited for it.
        passed = min(now - self._looked, _SECONDS_COUNTED_AT_ONCE)
        self._looked = now
        for runner in list(self._seconds):
            if runner in healthy:
                self._seconds[runner] += passed
            else:
                self.forget(runner)
        return {runner: seconds for runner, seconds in self._seconds.items() if seconds > limit}


class Revival:
    """Finds lost EnvRunners that have been started anew, without waiting for any.

    Where nodes come and go, one may have to wait for hours until there is a place for it.
    """

    def __init__(self) -> None:
        self._asked: dict[tuple[int, int], Any] = {}

    def look(self, manager: Any) -> None:
        """Mark those of RLlib's manager as healthy that have answered since the last time."""
        for number, actor in manager.actors().items():
            key = id(manager), number
            if manager.is_actor_healthy(number):
                self._asked.pop(key, None)
            elif key not in self._asked:
                self._asked[key] = actor.ping.remote()
            elif ray.wait([self._asked[key]], timeout=0)[0]:
                with suppress(RayError):  # Then it is asked again.
                    ray.get(self._asked.pop(key))
                    manager.set_actor_state(number, healthy=True)


class LearnerBackup:
    """The state of remote learners, kept in memory for the case that they are killed."""

    def __init__(self) -> None:
        self._state: dict[str, Any] | None = None
        self._updates, self._calls, self._kept = 0, 0, 0.0

    def forget(self) -> None:
        """Keep nothing, since the learners have got another state."""
        self._state = None

    def keep(self, group: LearnerGroup, updates: int) -> None:
        """Ask the learners for their state, once a minute. Call it before every update call.

        Args:
            group: the learners.
            updates: how many updates they have made.
        """
        self._calls += 1
        if self._state is None or time.monotonic() - self._kept > _SECONDS_BETWEEN_BACKUPS:
            self._state = group.get_state()
            self._updates, self._calls, self._kept = updates, 0, time.monotonic()

    def rebuild(self, group: LearnerGroup, updates: int) -> tuple[LearnerGroup, int]:
        """Replace learners of which some were lost by new ones with the newest state.

        Args:
            group: the learners.
            updates: how many they had made.

        Returns:
            The new ones, and how many updates their state has.
        """
        if self._state is None and updates:
            raise RuntimeError(
                "The learners were lost before their state was known: resume the run from its "
                "newest checkpoint."
            )
        group._worker_manager.clear()
        try:
            group.shutdown()
        except Exception:  # It talks to processes that are gone.
            group._is_shut_down = True
        _, arguments = group.get_ctor_args_and_kwargs()
        group = LearnerGroup(**arguments)
        if self._state is None:
            return group, 0
        learner = self._state[COMPONENT_LEARNER]
        # EnvRunners take only weights with a higher number than those they have.
        number = learner[WEIGHTS_SEQ_NO] + self._calls
        group.set_state({COMPONENT_LEARNER: {**learner, WEIGHTS_SEQ_NO: number}})
        return group, self._updates
