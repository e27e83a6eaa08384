"""Replay in flat arrays: one copy of each observation, one memory copy from episode to batch.

A row holds an observation and what was done and received in it; the *next* observation is simply the
next row. The last observation of an episode has a row of its own, marked as no transition, so a
transition or a window of them never reaches into another episode.

The rows are divided into lanes, one for each environment that is stepped at the same time. A lane is
a ring: an episode that arrives in several pieces is continued where its last piece ended.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import mmap
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow.fs
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.policy.sample_batch import SampleBatch
from ray.rllib.utils.checkpoints import Checkpointable

from rerpi_rllib.algorithm.checkpoint import (
    SHARED_REPLAY,
    DamagedCheckpoint,
    check_file,
    flush_directory,
)
from rerpi_rllib.algorithm.faults import Screening
from rerpi_rllib.algorithm.moments import Moments, ReturnScale

logger = logging.getLogger(__name__)

Array: TypeAlias = npt.NDArray[Any]
IntArray: TypeAlias = npt.NDArray[np.int64]
Batch: TypeAlias = dict[str, Array]
# For each lane, the first row and the one after the last, counted from the first ever written.
Spans: TypeAlias = list[list[int]]

_ROWS_AT_ONCE = 2**16  # This many rows are saved and loaded at a time.
_STORED = "stored"
_STATE_FILE, _ROWS_FILE = "state.json", "rows.bin"
_SHARED = f"../{SHARED_REPLAY}/"  # As seen from the replay's directory in a checkpoint.
_TRANSITION, _TERMINATED = np.uint8(1), np.uint8(2)


def _reserve(shape: tuple[int, ...], dtype: type) -> Array:
    """Make an array of zeros that takes memory only where it is written, however malloc is set up."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, size), dtype).reshape(shape)


class ReplayBuffer(Checkpointable):
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
        seed: int | None = None,
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
        # Of all steps that were ever added, also those that are stored no longer.
        self.moments = Moments(observation_size)
        self.returns = ReturnScale(gamma, num_lanes)
        self.screening = Screening()
        self._rng = np.random.default_rng(seed)
        # What checkpoints of a run have written: files with rows, and the heads at that time.
        self._segments: list[dict[str, Any]] = []
        self._saved_head = self._head.copy()
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

    def add_episode(self, episode: SingleAgentEpisode) -> None:
        """Store an episode, or the next piece of one, as the EnvRunner returns it."""
        self.add(
            episode.id_,
            observations=episode.get_observations(),
            actions=np.reshape(episode.get_actions(), (len(episode), -1)),
            rewards=episode.get_rewards(),
            log_probs=episode.get_extra_model_outputs(Columns.ACTION_LOGP),
            terminated=episode.is_terminated,
            done=episode.is_done,
            first_step=episode.t_started,
        )

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
        placements = np.minimum(self._filled + length - 1, self._lane_rows) * (self._filled > 0)
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
        file = io.BytesIO()
        self._write_rows(file, self._stored_spans())
        return self._counters() | {_STORED: file.getvalue()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._restore(state, lambda name: io.BytesIO(state[_STORED]))

    def _counters(self) -> dict[str, Any]:
        """Return all but the rows, as JSON can hold it, and where the rows are: in one file."""
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
            "segments": [{"file": _ROWS_FILE, "rows": self._stored_spans()}],
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
        """Write a state file and the rows.

        Args:
            path: the directory; by default a new one.
            state: what :meth:`get_state` has returned; by default what is stored now.
            filesystem: where the path is; by default this machine.
            shared: a directory of this machine that all checkpoints of a run share, to which only
                the rows are added that are new since the last one.
            with_rows: whether to write rows at all, or only what has been learned from them.
        """
        files = filesystem or pyarrow.fs.LocalFileSystem()
        directory = pathlib.Path(path or tempfile.mkdtemp()).as_posix()
        files.create_dir(directory, recursive=True)
        state = dict(state) if state is not None else None
        if not with_rows:
            state = self._counters_without_rows()
        elif shared is not None and state is None:
            self._save_new_rows(shared)
            state = self._counters() | {"segments": self._segments}
        else:
            with files.open_output_stream(f"{directory}/{_ROWS_FILE}", compression=None) as file:
                if state is None:
                    self._write_rows(file, self._stored_spans())
                else:
                    file.write(state.pop(_STORED))
        with files.open_output_stream(f"{directory}/{_STATE_FILE}") as file:
            file.write(json.dumps(state or self._counters()).encode())
        return directory

    @property
    def shared_files(self) -> dict[str, dict[str, Any]]:
        """Size and checksum of each file that the last checkpoint shares with others, by its name."""
        return {
            segment["file"].removeprefix(_SHARED): {key: segment[key] for key in ("bytes", "sha256")}
            for segment in self._segments
        }

    def _stored_spans(self) -> Spans:
        return [[int(h) + 1 - int(n), int(h) + 1] for h, n in zip(self._head, self._filled)]

    def _save_new_rows(self, shared: pathlib.Path) -> None:
        """Write the rows that are new since the last time to a file that never changes again."""
        shared.mkdir(parents=True, exist_ok=True)
        if not all(_has_size(shared / name, m["bytes"]) for name, m in self.shared_files.items()):
            self._segments, self._saved_head = [], np.full_like(self._head, -1)
        stored = self._stored_spans()
        # The row of the last observation belongs to both: what was done in it came later.
        new = [
            [max(first, int(saved)), end] if saved < end - 1 else [end, end]
            for (first, end), saved in zip(stored, self._saved_head)
        ]
        kept = [
            segment
            for segment in self._segments
            if any(a < b and b > first for (a, b), (first, _) in zip(segment["rows"], stored))
        ]
        if any(first < end for first, end in new):
            kept.append({**self._write_segment(shared, new), "rows": new})
        self._segments, self._saved_head = kept, self._head.copy()

    def _write_segment(self, shared: pathlib.Path, spans: Spans) -> dict[str, Any]:
        """Write rows beside their place and move them to a name made of their checksum."""
        temporary = shared / f".{os.getpid()}.bin"
        try:
            with open(temporary, "wb") as file:
                digest = _Digest(file)
                self._write_rows(digest, spans)
                file.flush()
                os.fsync(file.fileno())
            checksum = digest.hash.hexdigest()
            os.replace(temporary, shared / f"{checksum[:32]}.bin")
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        flush_directory(shared)
        name = f"{_SHARED}{checksum[:32]}.bin"
        return {"file": name, "bytes": digest.size, "sha256": checksum}

    def _pieces(self, column: Array, spans: Spans) -> Iterator[Array]:
        """Yield the rows of these spans as views of a column, some at a time."""
        for lane, (first, end) in enumerate(spans):
            for start in range(first, end, _ROWS_AT_ONCE):
                for rows, _ in self._ring_slices(lane, start, min(_ROWS_AT_ONCE, end - start)):
                    yield column[rows]

    def _write_rows(self, file: Any, spans: Spans) -> None:
        for column in self._columns.values():
            for piece in self._pieces(column, spans):
                file.write(piece.tobytes())

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
        files = filesystem or pyarrow.fs.LocalFileSystem()
        directory = pathlib.Path(path).as_posix()
        with files.open_input_stream(f"{directory}/{_STATE_FILE}") as file:
            state = json.loads(file.read())
        try:
            for segment in state["segments"]:
                if segment["file"].startswith(_SHARED):
                    measures = {key: segment[key] for key in ("bytes", "sha256")}
                    check_file(pathlib.Path(directory), segment["file"], measures)
        except DamagedCheckpoint as error:
            logger.warning("The replay of the checkpoint is lost: %s.", error)
            lanes = len(state["head"])
            empty = {"head": [-1] * lanes, "written": [0] * lanes, "size": 0, "additions": 0}
            state |= {**empty, "open": {}, "segments": []}
        self._restore(
            state, lambda name: files.open_input_stream(f"{directory}/{name}", compression=None)
        )

    def _restore(self, state: dict[str, Any], open_file: Callable[[str], Any]) -> None:
        """Take over what a state and its rows hold; if they are broken, change nothing."""
        lane_rows, lanes = state["lane_rows"], len(state["head"])
        same_shape = lane_rows == self._lane_rows and lanes == len(self._head)
        shape = {"capacity": (lane_rows - 1) * lanes, "num_lanes": lanes}
        restored = ReplayBuffer(**(self._arguments if same_shape else self._arguments | shape))
        for segment in state["segments"]:  # From old to new: later ones overwrite earlier ones.
            with open_file(segment["file"]) as file:
                restored._read_rows(file, segment["rows"])
        restored._set_counters(state)
        if all(segment["file"].startswith(_SHARED) for segment in state["segments"]):
            restored._segments, restored._saved_head = state["segments"], restored._head.copy()
        if not same_shape:  # The run goes on with another capacity or another number of environments.
            other, restored = restored, ReplayBuffer(**self._arguments)
            for episode in other._episodes():
                restored.add(**episode)
            restored.moments = other.moments
            restored.returns = other.returns.for_lanes(len(restored._head))
            restored._rng.bit_generator.state = state["rng"]
        self.__dict__.update(restored.__dict__)

    def _episodes(self) -> Iterator[dict[str, Any]]:
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


class _Digest:
    """Writes to a file, and computes size and checksum of what is written."""

    def __init__(self, file: Any) -> None:
        self._file, self.hash, self.size = file, hashlib.sha256(), 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.hash.update(data)
        self.size += len(data)


def _has_size(path: pathlib.Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False
