"""Replay in shards: actors that hold a part of it each, on any node of a cluster.

Steps and batches do not pass through the process of the algorithm. An EnvRunner hands its steps to a
shard and returns what the shard reports, a few numbers. For an update call each shard draws its part
of every learner's batch, and the learners fetch these by reference. What the algorithm keeps of a
shard is its last report.
"""

from __future__ import annotations

import itertools
import logging
import pathlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow.fs
import ray
from ray.exceptions import RayError, RayTaskError
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rerpi_rllib.algorithm.faults import Screening
from rerpi_rllib.algorithm.moments import Moments, ReturnScale
from rerpi_rllib.algorithm.replay import Array, Batch, Replay, ReplayBuffer, arguments_of
from rerpi_rllib.algorithm.replay_files import (
    SHARDS,
    RowFiles,
    Snapshot,
    directory_of_shard,
    locate,
    snapshot_of_state,
)

logger = logging.getLogger(__name__)

_PIECES_ON_THE_WAY = 4  # So much of a shard is in memory twice while it is saved.
_EPISODES_AT_ONCE = 100
_MAX_LOSSES_IN_A_ROW = 10


@dataclass(frozen=True)
class Report:
    """What a shard holds and has gathered.

    Args:
        shard: its name: its number, and which one of this number it is.
        serial: rises from report to report, which may arrive in another order.
        steps: of the samples that it was given just now.
        size: the number of stored steps.
        windows: how many different rows of a batch it can draw.
        moments, returns: of all that was ever added to it.
        found, bad: what its screening has handed over.
        lost: why other shards did not take these samples, by their names.
    """

    shard: tuple[int, int]
    serial: int = 0
    steps: int = 0
    size: int = 0
    windows: int = 0
    moments: dict[str, Any] | None = None
    returns: dict[str, Any] = field(default_factory=dict)
    found: Sequence[str] = ()
    bad: Sequence[bool] = ()
    lost: Sequence[tuple[tuple[int, int], str]] = ()


class ReplayShard:
    """The actor: a :class:`ReplayBuffer` with these arguments, for windows of ``length`` steps."""

    def __init__(
        self,
        name: tuple[int, int],
        arguments: dict[str, Any],
        length: int | None,
        shown_as: str,
    ) -> None:
        self._name, self._length, self._shown_as = name, length, shown_as
        self._serial = 0
        self._buffer = ReplayBuffer(**arguments)

    def __repr__(self) -> str:
        """Return the name of the actor; Ray asks for it."""
        return self._shown_as

    def add(self, pieces: Sequence[dict[str, Any]]) -> Report:
        """Store pieces of episodes, each the arguments of :meth:`ReplayBuffer.add`."""
        for piece in pieces:
            self._buffer.add(**piece)
        return self.report()

    def report(self) -> Report:
        found, bad = self._buffer.screening.hand_over()
        self._serial += 1
        return Report(
            self._name,
            self._serial,
            size=len(self._buffer),
            windows=self._buffer.num_windows(self._length),
            moments=self._buffer.moments.get_state(),
            returns=self._buffer.returns.get_state(),
            found=found,
            bad=bad,
        )

    def draw(self, rows: Sequence[int]) -> Batch | list[Batch]:
        """Return so many rows of the batch of each learner."""
        batches = [
            self._buffer.sample(count)
            if self._length is None
            else self._buffer.sample_sequences(count, self._length)
            for count in rows
        ]
        # Ray splits a list into as many objects as were asked for, unless that is one.
        return batches if len(batches) > 1 else batches[0]

    def know(self, report: Report | None) -> Report:
        """Take those of a report for the statistics of all steps that were ever added, or none."""
        self._buffer.know(*_statistics(self._buffer, report))
        return self.report()

    def get_state(self) -> dict[str, Any]:
        return self._buffer.get_state()

    def set_state(self, state: dict[str, Any]) -> Report:
        self._buffer.set_state(state)
        return self.report()

    def snapshot(self, heads: Sequence[int] | None, with_rows: bool) -> Iterator[Any]:
        """Yield the counters and the spans of a snapshot, and then its pieces.

        Nothing is added meanwhile: an actor does one thing after the other.
        """
        snapshot = self._buffer.snapshot(heads, with_rows)
        yield snapshot.counters, snapshot.spans
        yield from snapshot.pieces


def _statistics(like: ReplayBuffer, *reports: Report | None) -> tuple[Moments, ReturnScale]:
    """Return the statistics of all that is in reports."""
    merged = like.empty_statistics()
    for report in reports:
        if report is not None and report.moments is not None:
            moments, returns = like.empty_statistics()
            moments.set_state(report.moments)
            returns.set_state(report.returns)
            merged[0].merge(moments)
            merged[1].merge(returns)
    return merged


@dataclass(frozen=True)
class Store:
    """Takes the samples of an EnvRunner to a shard, in the EnvRunner's process.

    It waits until they are stored, so that a slow shard slows its EnvRunners down instead of filling
    the memory. If the shard is lost, the next one takes them.

    Args:
        shards: the names of the shards, and the actors.
    """

    shards: Sequence[tuple[tuple[int, int], Any]]

    def __call__(self, episodes: Sequence[SingleAgentEpisode]) -> Report:
        steps = sum(map(len, episodes))
        pieces = [arguments_of(episode) for episode in episodes]
        lost: list[tuple[tuple[int, int], str]] = []
        for name, actor in self.shards:
            try:
                report: Report = ray.get(actor.add.remote(pieces))
                return replace(report, steps=steps, lost=lost)
            except RayTaskError:
                raise
            except RayError as error:
                lost.append((name, str(error)))
        return Report((-1, 0), steps=steps, lost=lost)


class ReplayShards(Replay):
    """The algorithm's side of the shards.

    An EnvRunner always hands its steps to the same shard, in which its environments have their lanes.
    Every stored step of all shards is equally likely in a batch. A shard that is lost is replaced by
    an empty one, which still knows the statistics of what the lost one has gathered.

    Args:
        capacity: steps of all shards together.
        num_shards: how many there are, at most as many as EnvRunners.
        num_env_runners, lanes_per_env_runner: who hands in steps.
        length: steps in the windows of a batch, None for single transitions.
        num_learners: for how many learners a batch is.
        shown_as: what Ray's dashboard and logs call a shard, given its number.
        seed: of all shards.
        arguments: those of :class:`ReplayBuffer` that are the same for all of them.
    """

    def __init__(
        self,
        capacity: int,
        *,
        num_shards: int,
        num_env_runners: int,
        lanes_per_env_runner: int,
        length: int | None,
        num_learners: int,
        seed: int | None,
        shown_as: Callable[[int], str] = "replay shard {}".format,
        **arguments: Any,
    ) -> None:
        self._length, self._num_learners = length, max(1, num_learners)
        self._arguments = []
        for number in range(num_shards):
            # Each has as large a share of the capacity as of the environments.
            env_runners = len(range(number, num_env_runners, num_shards))
            self._arguments.append(
                {
                    **arguments,
                    "capacity": capacity * env_runners // num_env_runners,
                    "num_lanes": env_runners * lanes_per_env_runner,
                    "seed": None if seed is None else [seed, number],
                }
            )
        self._shown_as = shown_as
        self._rng = np.random.default_rng(seed)
        self._empty = ReplayBuffer(**arguments, capacity=1)
        self.screening = Screening()
        self._files = [RowFiles() for _ in range(num_shards)]
        self._lost: set[int] = set()
        self._losses_in_a_row = 0
        self._starting: dict[int, Any] = {}
        self._nodes: dict[int, str] = {}
        self._reports = [Report((number, 0)) for number in range(num_shards)]
        self._actors = [self._start(number, 0) for number in range(num_shards)]
        for report in ray.get([actor.report.remote() for actor in self._actors]):
            self._note(report)

    def _start(self, number: int, generation: int) -> Any:
        """Start an actor on the node that has the fewest. Beside its memory it needs little."""
        alive = [node for node in ray.nodes() if node["Alive"]]
        with_cpus = [node for node in alive if node["Resources"].get("CPU")]
        nodes = [node["NodeID"] for node in with_cpus or alive]
        others = [node for other, node in self._nodes.items() if other != number]
        self._nodes[number] = min(nodes, key=others.count)
        # Ray's own strategy for spreading actors leaves those without a CPU of their own together.
        strategy = NodeAffinitySchedulingStrategy(self._nodes[number], soft=True)
        actor = ray.remote(num_cpus=0, max_restarts=0, scheduling_strategy=strategy)(ReplayShard)
        return actor.remote(
            (number, generation), self._arguments[number], self._length, self._shown_as(number)
        )

    def __len__(self) -> int:
        return sum(report.size for report in self._reports)

    @property
    def sizes(self) -> list[int]:
        """The number of steps in each shard."""
        return [report.size for report in self._reports]

    @property
    def actors(self) -> list[Any]:
        return self._actors

    @property
    def moments(self) -> Moments:  # type: ignore[override]
        return _statistics(self._empty, *self._reports)[0]

    @property
    def returns(self) -> ReturnScale:  # type: ignore[override]
        return _statistics(self._empty, *self._reports)[1]

    def store_for(self, env_runner: int) -> Store:
        """Return what takes samples to the EnvRunner's shard, or to another one while that starts."""
        number = (env_runner - 1) % len(self._actors)
        order = [*range(number, len(self._actors)), *range(number)]
        ready = [n for n in order if n not in self._starting and n not in self._lost]
        # If the first one is lost, the second one takes the samples. Those that start can wait.
        return Store([(self._reports[n].shard, self._actors[n]) for n in ready[:2] or order[:1]])

    def take(self, samples: Report) -> int:
        for (number, generation), reason in samples.lost:
            self._note_lost(number, generation, reason)
        if samples.moments is not None:
            self._losses_in_a_row = 0
            self._note(samples)
        return samples.steps

    def _note(self, report: Report) -> None:
        known = self._reports[report.shard[0]]
        if known.shard == report.shard and known.serial < report.serial:
            self._reports[report.shard[0]] = report
        self.screening.take_over(list(report.found), list(report.bad))

    def draw(self, rows: int, length: int | None) -> TrainingData:
        """Let each shard draw its part of the batch of every learner, and return references.

        A shard's part is drawn at random in proportion to what it holds, so that the batch is what
        one replay of all steps would give.
        """
        windows = np.array([report.windows for report in self._reports], np.float64)
        rows_per_learner = rows // self._num_learners
        counts = self._rng.multinomial(
            rows_per_learner, windows / windows.sum(), size=self._num_learners
        )
        parts: list[list[Any]] = [[] for _ in range(self._num_learners)]
        for number in np.flatnonzero(counts.sum(axis=0)):
            actor = self._actors[number]
            drawn = actor.draw.options(num_returns=self._num_learners).remote(
                counts[:, number].tolist()
            )
            for part, reference in zip(parts, drawn if self._num_learners > 1 else [drawn]):
                part.append(reference)
        return TrainingData(batch_refs=[reference for part in parts for reference in part])

    def find_lost(self) -> None:
        """Look which shards do not answer, after a learner could not fetch its batch."""
        for number, actor in enumerate(self._actors):
            if number not in self._starting:
                try:
                    self._note(ray.get(actor.report.remote()))
                except RayTaskError:
                    raise
                except RayError as error:
                    self._note_lost(*self._reports[number].shard, str(error))

    def _note_lost(self, number: int, generation: int, reason: str) -> None:
        if self._reports[number].shard == (number, generation) and number not in self._lost:
            self._lost.add(number)
            logger.warning(
                "Replay shard %d was lost, and with it %d steps: %s",
                number,
                self._reports[number].size,
                reason.strip().partition("\n")[0],
            )

    def replace_lost(self) -> int:
        for number, known in list(self._starting.items()):
            if ray.wait([known], timeout=0)[0]:
                del self._starting[number]
                try:
                    self._note(ray.get(known))
                except RayError as error:
                    self._note_lost(*self._reports[number].shard, str(error))
        lost, self._lost = self._lost, set()
        for number in lost:
            self._losses_in_a_row += 1
            if self._losses_in_a_row > _MAX_LOSSES_IN_A_ROW:
                raise RuntimeError(
                    f"Shards of the replay were lost {self._losses_in_a_row} times in a row, before "
                    "one of them had stored anything: their logs, or the system's (memory), say why."
                )
            before = self._reports[number]
            name = (number, before.shard[1] + 1)
            self._reports[number] = replace(before, shard=name, serial=0, size=0, windows=0)
            self._files[number] = RowFiles()
            self._actors[number] = self._start(*name)
            self._starting[number] = self._actors[number].know.remote(before)
        return len(lost)

    def stop(self) -> None:
        for actor in self._actors:
            ray.kill(actor)

    # -- Checkpoints: each shard has the directory of a buffer. --

    def get_state(
        self, components: Any = None, *, not_components: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        return {SHARDS: ray.get([actor.get_state.remote() for actor in self._actors])}

    def set_state(self, state: dict[str, Any]) -> None:
        self._take_over(self._empty.saved_in_state(state))

    def get_ctor_args_and_kwargs(self) -> tuple[tuple[()], dict[str, Any]]:
        return (), {}

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
        for number in range(len(self._actors)):
            part = directory_of_shard(directory, number)
            if state is not None and with_rows:
                snapshot = snapshot_of_state(state[SHARDS][number])
                RowFiles().save_snapshot(part, files, snapshot)
                continue
            row_files = self._files[number]
            take = partial(self._snapshot, number, with_rows)
            try:
                row_files.save(part, files, take, shared if with_rows else None)
            except RayError as error:
                self._note_lost(*self._reports[number].shard, str(error))
                # The checkpoint holds what is left: what was learned of its steps.
                empty = ReplayBuffer(**self._arguments[number])
                empty.know(*_statistics(empty, self._reports[number]))
                row_files.save_snapshot(part, files, empty.snapshot(with_rows=False))
        return directory

    def _snapshot(self, number: int, with_rows: bool, heads: Sequence[int] | None) -> Snapshot:
        """Let a shard send its snapshot piece by piece."""
        options = {
            "num_returns": "streaming",
            "_generator_backpressure_num_objects": _PIECES_ON_THE_WAY,
        }
        stream = self._actors[number].snapshot.options(**options).remote(heads, with_rows)
        counters, spans = ray.get(next(stream))
        return Snapshot(counters, spans, map(ray.get, stream))

    @property
    def shared_files(self) -> dict[str, dict[str, Any]]:
        return {name: m for files in self._files for name, m in files.measures.items()}

    def restore_from_path(
        self,
        path: str | pathlib.Path,
        *,
        component: str | None = None,
        filesystem: pyarrow.fs.FileSystem | None = None,
        **kwargs: Any,
    ) -> None:
        self._take_over(self._empty.saved_in_path(path, filesystem))

    def _take_over(self, saved: Sequence[Callable[[], ReplayBuffer]]) -> None:
        """Take the place of other buffers, which may be more or fewer."""
        if len(saved) == len(self._actors):
            for number, read in enumerate(saved):
                buffer = read()
                ray.get(self._actors[number].set_state.remote(buffer.get_state()))
                has_same_shape = ReplayBuffer(**self._arguments[number]).has_shape_of(buffer)
                self._files[number] = buffer.files if has_same_shape else RowFiles()
        else:
            self._deal_out([read() for read in saved])
        self._reports = ray.get([actor.report.remote() for actor in self._actors])

    def _deal_out(self, buffers: Sequence[ReplayBuffer]) -> None:
        """Give episodes of other buffers to the shards in turn, and what is known of all to one."""
        empty = [ReplayBuffer(**arguments).get_state() for arguments in self._arguments]
        ray.get([actor.set_state.remote(state) for actor, state in zip(self._actors, empty)])
        self._files = [RowFiles() for _ in self._actors]
        moments, returns = self._empty.empty_statistics()
        for buffer in buffers:
            pieces = buffer.pieces_of_episodes()
            while some := list(itertools.islice(pieces, _EPISODES_AT_ONCE)):
                dealt = [some[number :: len(self._actors)] for number in range(len(self._actors))]
                ray.get([actor.add.remote(part) for actor, part in zip(self._actors, dealt)])
            moments.merge(buffer.moments)
            returns.merge(buffer.returns)
        known = Report((0, 0), moments=moments.get_state(), returns=returns.get_state())
        first, *others = self._actors
        ray.get([first.know.remote(known), *(actor.know.remote(None) for actor in others)])


def join(parts: Sequence[Batch], rng: np.random.Generator) -> Batch:
    """Mix the parts that shards have drawn, so that each of its rows may come from any of them."""
    order = rng.permutation(sum(len(part["rewards"]) for part in parts))
    ends = np.cumsum([len(part["rewards"]) for part in parts])
    places = np.split(order, ends[:-1])

    def mixed(name: str) -> Array:
        first = parts[0][name]
        column = np.empty((len(order), *first.shape[1:]), first.dtype)
        for part, rows in zip(parts, places):
            column[rows] = part[name]
        return column

    return {name: mixed(name) for name in parts[0]}
