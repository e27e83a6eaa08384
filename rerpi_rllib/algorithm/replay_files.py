"""The files of a replay in checkpoints: its counters as JSON, and its rows as they are in memory.

A checkpoint that stands alone has all rows in a file beside the counters. The checkpoints of a run
may share them instead: each adds a file with the rows that are new since the last one, which never
changes again and is named by its checksum.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow.fs

from rerpi_rllib.algorithm.checkpoint import SHARED_REPLAY, flush_directory

STATE_FILE, ROWS_FILE = "state.json", "rows.bin"
_SHARD = "shard-"  # Shards have a directory each.
# The keys of a replay's state for the rows, and for the states of its shards.
STORED, SHARDS = "stored", "shards"
SHARED = f"../{SHARED_REPLAY}/"  # As seen from the replay's directory in a checkpoint.

# For each lane, the first row and the one after the last, counted from the first ever written.
Spans: TypeAlias = list[list[int]]


@dataclass(frozen=True)
class Snapshot:
    """A buffer at one moment.

    Args:
        counters: all but the rows, as JSON can hold it, and where the rows would be: in one file.
        spans: the rows that ``pieces`` has, column by column.
        pieces: their bytes, which are copied when they are asked for.
    """

    counters: dict[str, Any]
    spans: Spans
    pieces: Iterable[Any]


class RowFiles:
    """Which files hold the rows of one buffer, as the last checkpoint of a run has left them.

    Args:
        segments: name, checksum, size and rows of each file, from old to new.
        heads: the newest row of each lane at that time, None before the first checkpoint.
    """

    def __init__(
        self,
        segments: Sequence[dict[str, Any]] = (),
        heads: Sequence[int] | None = None,
    ) -> None:
        self.segments, self.heads = list(segments), heads

    def save(
        self,
        directory: str,
        files: pyarrow.fs.FileSystem,
        take: Callable[[Sequence[int] | None], Snapshot],
        shared: pathlib.Path | None = None,
    ) -> None:
        """Write a buffer to a directory.

        Args:
            directory: a new one of ``files``.
            files: where it is.
            take: returns a snapshot, with the rows that are new since the heads it is given.
            shared: a directory of this machine to which only new rows are added, if there is one.
        """
        if shared is None:
            self.save_snapshot(directory, files, take(None))
        else:
            self._write_counters(directory, files, self._save_new_rows(shared, take))

    def save_snapshot(self, directory: str, files: pyarrow.fs.FileSystem, snapshot: Snapshot) -> None:
        """Write a snapshot of all rows, which other checkpoints do not share."""
        self._write_counters(directory, files, snapshot.counters)
        if snapshot.counters["segments"]:
            with files.open_output_stream(f"{directory}/{ROWS_FILE}", compression=None) as file:
                for piece in snapshot.pieces:
                    file.write(piece)

    def _write_counters(
        self, directory: str, files: pyarrow.fs.FileSystem, counters: dict[str, Any]
    ) -> None:
        files.create_dir(directory, recursive=True)
        with files.open_output_stream(f"{directory}/{STATE_FILE}") as file:
            file.write(json.dumps(counters).encode())

    @property
    def measures(self) -> dict[str, dict[str, Any]]:
        """Size and checksum of each file that the last checkpoint shares with others, by its name."""
        return {
            segment["file"].removeprefix(SHARED): {key: segment[key] for key in ("bytes", "sha256")}
            for segment in self.segments
        }

    def _save_new_rows(
        self, shared: pathlib.Path, take: Callable[[Sequence[int] | None], Snapshot]
    ) -> dict[str, Any]:
        shared.mkdir(parents=True, exist_ok=True)
        if not all(_has_size(shared / name, m["bytes"]) for name, m in self.measures.items()):
            self.segments, self.heads = [], None
        snapshot = take(self.heads)
        stored = snapshot.counters["segments"][0]["rows"]
        kept = [
            segment
            for segment in self.segments
            if any(a < b and b > first for (a, b), (first, _) in zip(segment["rows"], stored))
        ]
        if any(first < end for first, end in snapshot.spans):
            kept.append(_write_segment(shared, snapshot))
        self.segments, self.heads = kept, snapshot.counters["head"]
        return snapshot.counters | {"segments": self.segments}


def _write_segment(shared: pathlib.Path, snapshot: Snapshot) -> dict[str, Any]:
    """Write rows beside their place and move them to a name made of their checksum."""
    temporary = shared / f".{os.getpid()}.bin"
    digest, size = hashlib.sha256(), 0
    try:
        with open(temporary, "wb") as file:
            for piece in snapshot.pieces:
                file.write(piece)
                digest.update(piece)
                size += len(piece)
            file.flush()
            os.fsync(file.fileno())
        checksum = digest.hexdigest()
        os.replace(temporary, shared / f"{checksum[:32]}.bin")
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush_directory(shared)
    name = f"{SHARED}{checksum[:32]}.bin"
    return {"file": name, "bytes": size, "sha256": checksum, "rows": snapshot.spans}


def _has_size(path: pathlib.Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def locate(
    path: str | pathlib.Path | None, filesystem: pyarrow.fs.FileSystem | None
) -> tuple[str, pyarrow.fs.FileSystem]:
    """Return a directory, by default a new one, and where it is, by default on this machine."""
    directory = pathlib.Path(path or tempfile.mkdtemp()).as_posix()
    return directory, filesystem or pyarrow.fs.LocalFileSystem()


def snapshot_of_state(state: dict[str, Any]) -> Snapshot:
    """Return the snapshot that is in the state of a buffer."""
    counters = {key: value for key, value in state.items() if key != STORED}
    return Snapshot(counters, counters["segments"][0]["rows"], [state[STORED]])


def directory_of_shard(directory: str, number: int) -> str:
    return f"{directory}/{_SHARD}{number}"


def directories_of_parts(directory: str, files: pyarrow.fs.FileSystem) -> list[str]:
    """Return where the buffers of a replay were saved: one in the directory itself, or its shards."""
    entries = files.get_file_info(pyarrow.fs.FileSelector(directory))
    shards = [entry.path for entry in entries if entry.base_name.startswith(_SHARD)]
    by_number = sorted(shards, key=lambda path: int(path.rpartition(_SHARD)[2]))
    return by_number or [directory]
