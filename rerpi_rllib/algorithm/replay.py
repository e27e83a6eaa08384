"""Replay in flat arrays: one copy of each observation, one memory copy from episode to batch.

A row holds an observation and what was done and received in it; the *next* observation is simply the
next row. The last observation of an episode has a row of its own, marked as no transition, so a
transition or a window of them never reaches into another episode.

The rows are divided into lanes, one for each environment that is stepped at the same time. A lane is
a ring: an episode that arrives in several pieces is continued where its last piece ended.
"""

from __future__ import annotations

import io
import itertools
import json
import logging
import mmap
import pathlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow.fs
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.policy.sample_batch import DEFAULT_POLICY_ID, MultiAgentBatch, SampleBatch
from ray.rllib.utils.checkpoints import Checkpointable

from rerpi_rllib.algorithm.checkpoint import DamagedCheckpoint, check_file
from rerpi_rllib.algorithm.faults import Screening
from rerpi_rllib.algorithm.moments import Moments, ReturnScale
from rerpi_rllib.algorithm.replay_files import (
    ROWS_FILE,
    SHARDS,
    SHARED,
    STATE_FILE,
    STORED,
    RowFiles,
    Snapshot,
    Spans,
    directories_of_parts,
    locate,
    snapshot_of_state,
)

logger = logging.getLogger(__name__)

Array: TypeAlias = npt.NDArray[Any]
IntArray: TypeAlias = npt.NDArray[np.int64]
Batch: TypeAlias = dict[str, Array]
Saved: TypeAlias = "Sequence[Callable[[], ReplayBuffer]]"

_ROWS_AT_ONCE = 2**16  # This many rows are saved and loaded at a time.
_TRANSITION, _TERMINATED = np.uint8(1), np.uint8(2)


def _reserve(shape: tuple[int, ...], dtype: type) -> Array:
    """Make an array of zeros that takes memory only where it is written, however malloc is set up."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, size), dtype).reshape(shape)


def arguments_of(episode: SingleAgentEpisode) -> dict[str, Any]:
    """Return the arguments of :meth:`ReplayBuffer.add` for an episode, or the next piece of one."""
    return {
        "episode_id": episode.id_,
        "observations": episode.get_observations(),
        "actions": np.reshape(episode.get_actions(), (len(episode), -1)),
        "rewards": episode.get_rewards(),
        "log_probs": episode.get_extra_model_outputs(Columns.ACTION_LOGP),
        "terminated": episode.is_terminated,
        "done": episode.is_done,
        "first_step": episode.t_started,
    }


def _open_rows(state: dict[str, Any], name: str) -> io.BytesIO:
    return io.BytesIO(state[STORED])


class Replay(Checkpointable):
    """What an algorithm asks of its replay, which is in its own process or in shards of it."""

    screening: Screening  # What was found in the episodes that were stored.
    moments: Moments  # Of all observations that were ever added, also those stored no longer.
    returns: ReturnScale

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of stored transitions."""

    @abstractmethod
    def store_for(self, env_runner: int) -> Callable[[Any], Any] | None:
        """Return what takes the samples of an EnvRunner where they are, if anything does."""

    @abstractmethod
    def take(self, samples: Any) -> int:
        """Take what an EnvRunner, or what has taken its samples, returned: so many steps."""

    @abstractmethod
    def draw(self, rows: int, length: int | None) -> TrainingData:
        """Draw the batch of an update call: single transitions, or windows of ``length`` steps."""

    def find_lost(self) -> None:
        """Look for shards that were lost, after a batch could not be fetched."""

    def replace_lost(self) -> int:
        """Replace the shards that were lost, and return how many."""
        return 0

    def stop(self) -> None:
        """End the processes of shards, which would live as long as somebody knows this object."""

    @property
    @abstractmethod
    def shared_files(self) -> dict[str, dict[str, Any]]:
        """Size and checksum of each file that the last checkpoint shares with others, by its name."""

    @abstractmethod
    def save_to_path(
        self,
        path: str | pathlib.Path | None = None,
        *,
        state: dict[str, Any] | None = None,
        filesystem: pyarrow.fs.FileSystem | None = None,
        shared: pathlib.Path | None = None,
        with_rows: bool = True,
        **kwargs: Any,
    ) -> str:
        """Write a state file and the rows.

        Args:
            path: the directory; by default a new one.
            state: what :meth:`get_state` has returned; by default what is stored now.
            filesystem: where the path is; by default this machine.
            shared: a directory of this machine that all checkpoints of a run share, to which only
                the rows are added that are new since the last one.
            with_rows: whether to write rows at all, or only what has been learned from them.
        """


class ReplayBuffer(Replay):
    """Replay that samples transitions, or windows of them, uniformly.

    A step needs ``4 * (observation + action + 2) + 1`` bytes, and each episode one row more. The
    arrays are reserved at once, but the operating system commits them only as they fill.
    """

    def __init__(
        self,
        capacity: int,
        observation_size: int,
        action_size: int,
        *,
        num_lanes: int = 1,
        gamma: float = 0.99,
        seed: int | Sequence[int] | None = None,
    ) -> None:
        self._lane_rows = max(1, capacity // num_lanes) + 1
        rows = self._lane_rows * num_lanes
        self._columns = {
            Columns.OBS: _reserve((rows, observation_size), np.float32),
            Columns.ACTIONS: _reserve((rows, action_size), np.float32),
            Columns.REWARDS: _reserve((rows,), np.float32),
            Columns.ACTION_LOGP: _reserve((rows,), np.float32),
            "flags": _reserve((rows,), np.uint8),
        }
        self._flags = self._columns["flags"]
        # Each lane has the row of its newest observation (-1 while it has none) as if there were no
        # ring, the number of rows that were ever used, and the number of the addition that last wrote
        # to it.
        self._head = np.full(num_lanes, -1, np.int64)
        self._filled = np.zeros(num_lanes, np.int64)
        self._written = np.zeros(num_lanes, np.int64)
        self._open: dict[str, int] = {}
        self._additions = 0
        self._size = 0
        self.moments = Moments(observation_size)
        self.returns = ReturnScale(gamma, num_lanes)
        self.screening = Screening()
        self._rng = np.random.default_rng(seed)
        self.files = RowFiles()
        self._arguments: dict[str, Any] = {
            "capacity": capacity,
            "observation_size": observation_size,
            "action_size": action_size,
            "num_lanes": num_lanes,
            "gamma": gamma,
            "seed": seed,
        }

    def __len__(self) -> int:
        """Return the number of stored transitions."""
        return self._size

    def store_for(self, env_runner: int) -> None:
        """EnvRunners return their samples."""

    def take(self, samples: Any) -> int:
        if not isinstance(samples, list):  # Of the old API stack.
            self.add_batch(samples.as_multi_agent().policy_batches[DEFAULT_POLICY_ID])
            return int(samples.count)
        for episode in samples:
            self.add_episode(episode)
        return sum(map(len, samples))

    def draw(self, rows: int, length: int | None) -> TrainingData:
        columns = self.sample(rows) if length is None else self.sample_sequences(rows, length)
        batch = MultiAgentBatch({DEFAULT_MODULE_ID: SampleBatch(columns)}, rows)
        return TrainingData(batch=batch)

    def add_episode(self, episode: SingleAgentEpisode) -> None:
        """Store an episode, or the next piece of one, as the EnvRunner returns it."""
        self.add(**arguments_of(episode))

    def add_batch(self, batch: SampleBatch) -> None:
        """Store what a worker of the old API stack returns: pieces of episodes, one after another."""
        for piece in batch.split_by_episode():
            terminated = bool(piece[SampleBatch.TERMINATEDS][-1])
            self.add(
                str(piece[SampleBatch.EPS_ID][0]),
                observations=np.concatenate(
                    [piece[SampleBatch.OBS], piece[SampleBatch.NEXT_OBS][-1:]]
                ),
                actions=np.reshape(piece[SampleBatch.ACTIONS], (len(piece), -1)),
                rewards=piece[SampleBatch.REWARDS],
                log_probs=piece[SampleBatch.ACTION_LOGP],
                terminated=terminated,
                done=terminated or bool(piece[SampleBatch.TRUNCATEDS][-1]),
                first_step=int(piece[SampleBatch.T][0]),
            )

    def add(
        self,
        episode_id: str,
        *,
        observations: Array,
        actions: Array,
        rewards: Array,
        log_probs: Array,
        terminated: bool,
        done: bool,
        first_step: int = 0,
    ) -> None:
        """Store L steps of an episode, unless there are numbers that nothing can be learned from.

        Args:
            episode_id: the same for all pieces of one episode.
            observations: ``[L + 1, O]``; the first is the last one of the episode's previous piece.
            actions, rewards, log_probs: ``[L, D]``, ``[L]`` and ``[L]``.
            terminated: whether the last step ended in a terminal state.
            done: whether the episode ends here, terminated or truncated.
            first_step: the number of the first of these steps in its episode.
        """
        length = len(rewards)
        if length == 0:
            return
        columns = {
            "observation": observations,
            "reward": rewards,
            "action": actions,
            "log-probability": log_probs,
        }
        if not self.screening.passes(episode_id, columns, first_step=first_step, done=done):
            self._open.pop(episode_id, None)  # What is stored of it stays valid.
            return
        self.moments.add(observations[episode_id in self._open :])
        lane, continued = self._lane_for(episode_id)
        truncated = done and not terminated
        self.returns.add(lane, rewards, continued=continued, truncated=truncated)
        keep = self._lane_rows - 1
        if length > keep:  # Only the newest part of an episode longer than the lane would remain.
            cut = length - keep
            observations, actions = observations[cut:], actions[cut:]
            rewards, log_probs, length = rewards[cut:], log_probs[cut:], keep

        first = int(self._head[lane]) if continued else int(self._head[lane]) + 1
        flags = np.full(length + 1, _TRANSITION, np.uint8)
        flags[-1] = 0
        if terminated:
            flags[-2] |= _TERMINATED

        rows = self._ring_slices(lane, first, length + 1)
        self._size += length - sum(int((self._flags[r] & _TRANSITION).sum()) for r, _ in rows)
        for row, source in rows:
            self._columns[Columns.OBS][row] = observations[source]
            self._flags[row] = flags[source]
        for row, source in self._ring_slices(lane, first, length):
            self._columns[Columns.ACTIONS][row] = actions[source]
            self._columns[Columns.REWARDS][row] = rewards[source]
            self._columns[Columns.ACTION_LOGP][row] = log_probs[source]

        end = first + length
        self._filled[lane] = min(self._lane_rows, end + 1)
        self._head[lane] = end
        self._additions += 1
        self._written[lane] = self._additions
        if done:
            self._open.pop(episode_id, None)

    def sample(self, size: int) -> Batch:
        """Sample ``size`` transitions with replacement; every stored one is equally likely."""
        rows, next_rows = self._sample_windows(size, 1).T
        return {
            Columns.NEXT_OBS: self._columns[Columns.OBS].take(next_rows, axis=0),
            **self._steps(rows, rows, self._flags.take(rows)),
        }

    def sample_sequences(self, size: int, length: int) -> Batch:
        """Sample ``size`` windows of ``length`` steps, in which every stored step is equally likely.

        A window is ``length`` neighbouring rows of a lane. It may hold the end of one episode and the
        beginning of the next: the row between them, which holds a final observation and no step, has
        ``loss_mask`` False, and so has a row that was never written. A step whose successor has
        ``loss_mask`` False is the last one of its episode as far as it is stored, and targets must
        not reach beyond it.

        Every placement of a window is equally likely, so that a stored step has the same probability
        for each of the ``length`` places in a window. One row for each episode is not a step: with
        episodes of L steps the share ``1 / (L + 1)`` of a batch is padding.

        Returns:
            ``obs`` ``[size, length + 1, O]``; all else ``[size, length, ...]``.
        """
        rows = self._sample_windows(size, length)
        steps = rows[:, :-1]
        flags = self._flags.take(steps)
        # In place of rows that were never written there is the first observation of their lane: the
        # policy is improved at all observations of a batch.
        lanes, places = np.divmod(rows, self._lane_rows)
        observed = rows - places * (places >= self._filled[lanes])
        return {**self._steps(observed, steps, flags), Columns.LOSS_MASK: flags != 0}

    def _steps(self, observed: IntArray, steps: IntArray, flags: Array) -> Batch:
        """Copy observations from the rows ``observed`` and all else from the rows ``steps``."""
        return {
            Columns.OBS: self._columns[Columns.OBS].take(observed, axis=0),
            Columns.ACTIONS: self._columns[Columns.ACTIONS].take(steps, axis=0),
            Columns.REWARDS: self._columns[Columns.REWARDS].take(steps),
            Columns.ACTION_LOGP: self._columns[Columns.ACTION_LOGP].take(steps),
            Columns.TERMINATEDS: (flags == _TRANSITION | _TERMINATED).astype(np.float32),
        }

    def _sample_windows(self, size: int, length: int) -> IntArray:
        """Draw windows: ``length`` rows and the one after them, ``[size, length + 1]``.

        A window may be placed anywhere on the ring of a lane. Where a lane is not full yet, it may
        begin before the first row or end after the newest one, so that the steps there are covered
        by as many placements as all others. A window without any step is drawn again.
        """
        if self._size == 0:
            raise ValueError("The replay is empty: there is nothing to sample yet.")
        placements = self._placements(length)
        ends = np.cumsum(placements)
        windows = np.empty((0, length + 1), np.int64)
        while len(windows) < size:
            drawn = self._rng.integers(ends[-1], size=size - len(windows))
            lanes = np.searchsorted(ends, drawn, side="right")
            first = drawn - (ends - placements)[lanes] - (length - 1)
            rows = (first[:, None] + np.arange(length + 1)) % self._lane_rows
            rows += (lanes * self._lane_rows)[:, None]
            has_steps = self._flags.take(rows[:, :-1]).any(axis=1)
            windows = np.concatenate([windows, rows[has_steps]])
        return windows

    def _placements(self, length: int) -> IntArray:
        """Return in how many places of each lane a window can be."""
        places: IntArray = np.minimum(self._filled + length - 1, self._lane_rows)
        return places * (self._filled > 0)

    def num_windows(self, length: int | None) -> int:
        """Return how many different windows there are to draw, or single transitions."""
        return self._size if length is None else int(self._placements(length).sum())

    def _lane_for(self, episode_id: str) -> tuple[int, bool]:
        """Return the lane to write to, and whether its newest row belongs to the same episode."""
        if episode_id in self._open:
            return self._open[episode_id], True
        busy = set(self._open.values())
        free = [lane for lane in range(len(self._head)) if lane not in busy]
        # If no lane is free, an environment was lost or there are more of them than lanes. The
        # episode that has waited longest gives way; what is stored of it stays valid.
        lane = min(free or range(len(self._head)), key=lambda lane: (self._written[lane], lane))
        self._open = {key: value for key, value in self._open.items() if value != lane}
        self._open[episode_id] = lane
        return lane, False

    def _ring_slices(self, lane: int, first: int, count: int) -> list[tuple[slice, slice]]:
        """Return pairs of target and source slices for ``count`` rows of a lane from ``first`` on."""
        base, first = lane * self._lane_rows, first % self._lane_rows
        before_wrap = min(count, self._lane_rows - first)
        parts = [(slice(base + first, base + first + before_wrap), slice(0, before_wrap))]
        if before_wrap < count:
            parts.append((slice(base, base + count - before_wrap), slice(before_wrap, count)))
        return parts

    # -- Checkpoints are raw rows beside a small JSON file, written piece by piece. --

    def get_state(
        self, components: Any = None, *, not_components: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the counters and a copy of what is stored; :meth:`save_to_path` copies nothing."""
        snapshot = self.snapshot()
        return snapshot.counters | {STORED: b"".join(snapshot.pieces)}

    def set_state(self, state: dict[str, Any]) -> None:
        self._take_over(self.saved_in_state(state))

    def snapshot(self, heads: Sequence[int] | None = None, with_rows: bool = True) -> Snapshot:
        """Return the counters, and views of the rows that are new since the heads were these.

        Args:
            heads: by default, all rows are.
            with_rows: whether to return rows at all, or only what has been learned from them.
        """
        if not with_rows:
            return Snapshot(self._counters_without_rows(), [], ())
        counters = self._counters()
        spans: Spans = counters["segments"][0]["rows"]
        if heads is not None:
            # The row of the last observation belongs to both: what was done in it came later.
            spans = [
                [max(first, head), end] if head < end - 1 else [end, end]
                for (first, end), head in zip(spans, heads)
            ]
        columns = self._columns.values()
        views = (piece for column in columns for piece in self._pieces(column, spans))
        return Snapshot(counters, spans, (view.reshape(-1).view(np.uint8) for view in views))

    def _counters(self) -> dict[str, Any]:
        """Return all but the rows, as JSON can hold it, and where the rows are: in one file."""
        stored = [[int(h) + 1 - int(n), int(h) + 1] for h, n in zip(self._head, self._filled)]
        return {
            "head": self._head.tolist(),
            "written": self._written.tolist(),
            "open": dict(self._open),
            "additions": self._additions,
            "size": self._size,
            "lane_rows": self._lane_rows,
            "moments": self.moments.get_state(),
            "returns": self.returns.get_state(),
            "rng": self._rng.bit_generator.state,
            "segments": [{"file": ROWS_FILE, "rows": stored}],
        }

    def _counters_without_rows(self) -> dict[str, Any]:
        """Return the counters of an empty replay that knows what this one has gathered."""
        empty = ReplayBuffer(**self._arguments)
        empty.moments, empty._rng = self.moments, self._rng
        empty.returns = self.returns.for_lanes(len(self._head))
        return empty._counters() | {"segments": []}

    def _set_counters(self, state: dict[str, Any]) -> None:
        self._head = np.array(state["head"], np.int64)
        self._filled = np.minimum(self._head + 1, self._lane_rows)
        self._written = np.array(state["written"], np.int64)
        self._open = dict(state["open"])
        self._additions = state["additions"]
        self._size = state["size"]
        self.moments.set_state(state["moments"])
        self.returns.set_state(state["returns"])
        self._rng.bit_generator.state = state["rng"]

    def get_ctor_args_and_kwargs(self) -> tuple[tuple[()], dict[str, Any]]:
        return (), self._arguments

    def save_to_path(
        self,
        path: str | pathlib.Path | None = None,
        *,
        state: dict[str, Any] | None = None,
        filesystem: pyarrow.fs.FileSystem | None = None,
        shared: pathlib.Path | None = None,
        with_rows: bool = True,
        **kwargs: Any,
    ) -> str:
        directory, files = locate(path, filesystem)
        if state is not None and with_rows:
            self.files.save_snapshot(directory, files, snapshot_of_state(state))
        else:
            self.files.save(
                directory,
                files,
                lambda heads: self.snapshot(heads, with_rows),
                shared if with_rows else None,
            )
        return directory

    @property
    def shared_files(self) -> dict[str, dict[str, Any]]:
        return self.files.measures

    def _pieces(self, column: Array, spans: Spans) -> Iterator[Array]:
        """Yield the rows of these spans as views of a column, some at a time."""
        for lane, (first, end) in enumerate(spans):
            for start in range(first, end, _ROWS_AT_ONCE):
                for rows, _ in self._ring_slices(lane, start, min(_ROWS_AT_ONCE, end - start)):
                    yield column[rows]

    def _read_rows(self, file: Any, spans: Spans) -> None:
        for column in self._columns.values():
            for piece in self._pieces(column, spans):
                read = np.frombuffer(file.read(piece.nbytes), column.dtype)
                piece[:] = read.reshape(piece.shape)

    def restore_from_path(
        self,
        path: str | pathlib.Path,
        *,
        component: str | None = None,
        filesystem: pyarrow.fs.FileSystem | None = None,
        **kwargs: Any,
    ) -> None:
        self._take_over(self.saved_in_path(path, filesystem))

    def saved_in_state(self, state: dict[str, Any]) -> Saved:
        """Return what reads the buffers in the state of a replay, each in its own shape."""
        return [
            partial(self._read, part, partial(_open_rows, part))
            for part in state.get(SHARDS, [state])
        ]

    def saved_in_path(self, path: Any, filesystem: pyarrow.fs.FileSystem | None = None) -> Saved:
        """Return what reads the buffers that a replay has saved, each in its own shape."""
        directory, files = locate(path, filesystem)
        return [
            partial(self._read_part, directory, part, files)
            for part in directories_of_parts(directory, files)
        ]

    def _read_part(self, directory: str, part: str, files: pyarrow.fs.FileSystem) -> ReplayBuffer:
        with files.open_input_stream(f"{part}/{STATE_FILE}") as file:
            state = json.loads(file.read())
        try:
            for segment in state["segments"]:
                if segment["file"].startswith(SHARED):
                    measures = {key: segment[key] for key in ("bytes", "sha256")}
                    check_file(pathlib.Path(directory), segment["file"], measures)
        except DamagedCheckpoint as error:
            logger.warning("The replay of the checkpoint is lost: %s.", error)
            lanes = len(state["head"])
            empty = {"head": [-1] * lanes, "written": [0] * lanes, "size": 0, "additions": 0}
            state |= {**empty, "open": {}, "segments": []}

        def open_file(name: str) -> Any:
            place = directory if name.startswith(SHARED) else part
            return files.open_input_stream(f"{place}/{name}", compression=None)

        return self._read(state, open_file)

    def _read(self, state: dict[str, Any], open_file: Callable[[str], Any]) -> ReplayBuffer:
        lane_rows, lanes = state["lane_rows"], len(state["head"])
        same_shape = lane_rows == self._lane_rows and lanes == len(self._head)
        shape = {"capacity": (lane_rows - 1) * lanes, "num_lanes": lanes}
        saved = ReplayBuffer(**(self._arguments if same_shape else self._arguments | shape))
        for segment in state["segments"]:  # From old to new: later ones overwrite earlier ones.
            with open_file(segment["file"]) as file:
                saved._read_rows(file, segment["rows"])
        saved._set_counters(state)
        if all(segment["file"].startswith(SHARED) for segment in state["segments"]):
            saved.files = RowFiles(state["segments"], state["head"])
        return saved

    def _take_over(self, saved: Saved) -> None:
        """Take the place of other buffers; if one of them is broken, change nothing."""
        buffers = (read() for read in saved)
        restored = first = next(buffers)
        if len(saved) > 1 or not self.has_shape_of(first):
            # The run goes on with another capacity, or another number of environments or shards.
            restored = ReplayBuffer(**self._arguments)
            moments, returns = self.empty_statistics()
            for other in itertools.chain([first], buffers):
                for piece in other.pieces_of_episodes():
                    restored.add(**piece)
                moments.merge(other.moments)
                returns.merge(other.returns)
            restored.know(moments, returns)
            restored._rng = first._rng
        self.__dict__.update(restored.__dict__)

    def has_shape_of(self, other: ReplayBuffer) -> bool:
        return other._lane_rows == self._lane_rows and len(other._head) == len(self._head)

    def empty_statistics(self) -> tuple[Moments, ReturnScale]:
        return Moments(len(self.moments.mean)), ReturnScale(self._arguments["gamma"], 0)

    def know(self, moments: Moments, returns: ReturnScale) -> None:
        """Take these for the statistics of all steps that were ever added."""
        self.moments = moments
        self.returns = returns.for_lanes(len(self._head))

    def pieces_of_episodes(self) -> Iterator[dict[str, Any]]:
        """Yield what is stored as arguments of :meth:`add`, the oldest first within each lane."""
        for lane, (head, filled) in enumerate(zip(self._head, self._filled)):
            if filled == 0:
                continue
            order = (head + 1 + np.arange(self._lane_rows)) % self._lane_rows
            rows = lane * self._lane_rows + order[order < filled]
            flags = self._flags[rows]
            start = 0
            for end in np.flatnonzero(flags == 0):
                if end > start:
                    piece, steps = rows[start : end + 1], rows[start:end]
                    yield {
                        "episode_id": f"restored-{lane}-{start}",
                        "observations": self._columns[Columns.OBS][piece],
                        "actions": self._columns[Columns.ACTIONS][steps],
                        "rewards": self._columns[Columns.REWARDS][steps],
                        "log_probs": self._columns[Columns.ACTION_LOGP][steps],
                        "terminated": bool(flags[end - 1] & _TERMINATED),
                        "done": True,
                    }
                start = int(end) + 1
