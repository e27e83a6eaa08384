"""One owner of a run's directory: two processes must not write into it at the same time.

The owner holds a lock of the operating system (``flock``) on a file in the directory, which ends with
the process, however that ends; what stands in the file only says whose lock it is. Linux forwards
these locks to the servers of NFS and of most other shared file systems, so that they hold between
machines, too (not if mounted with ``nolock`` or ``local_lock``). On a file system without locks, what
stands in the file is compared with the processes that there are.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

FILE_NAME = ".owner"


def refuse_owned(directory: Path) -> None:
    """Raise ``ValueError`` if another process owns a directory; :func:`owned` looks once more."""
    path = _shared(directory) / FILE_NAME
    if path.is_file():
        with open(path) as file:
            _lock(file, path.parent)


def _shared(directory: Path) -> Path:
    """Return the directory that is owned as a whole: a sweep with its trials, otherwise this one."""
    is_trial = (directory.parent / "sweep.json").is_file()
    return directory.parent if is_trial else directory


@contextmanager
def owned(directory: Path, report: Callable[[str], None] = print) -> Iterator[None]:
    """Create a directory if there is none, and be its only owner.

    Raises ``ValueError`` if another process owns it.

    Args:
        directory: the directory of a run or of a sweep; that of a trial is owned with its sweep.
        report: called if the last owner has ended without giving the directory back.
    """
    directory = _shared(directory)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / FILE_NAME
    with open(path, "a+") as file:
        is_locked = _lock(file, directory)
        before = _read(file)
        if before and not is_locked and _may_run(before):
            raise ValueError(
                f"{_in_use(directory, before)} If that process has ended, delete {str(path)!r}."
            )
        if before:
            report(f"Taking over {directory} from {_name(before)}, which has ended.")
        _write(file, _this_process())
        try:
            yield
        finally:
            # The file stays: another process may have opened it already, to wait for its lock.
            _write(file, None)


def _lock(file: IO[str], directory: Path) -> bool:
    """Take the lock, and return whether the file system has locks at all."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(_in_use(directory, _read(file))) from None
    except OSError:
        return False
    return True


def _in_use(directory: Path, owner: dict[str, Any] | None) -> str:
    who = _name(owner) if owner else "another process"
    return f"{directory} is in use by {who}: wait until it has ended, or choose another --name."


def _name(owner: dict[str, Any]) -> str:
    return f"process {owner['pid']} on {owner['host']} (since {owner['since']})"


def _this_process() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "host": platform.node(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "started": _start_of(os.getpid()),
    }


def _may_run(owner: dict[str, Any]) -> bool:
    """Tell whether an owner may still be running; processes of other machines cannot be seen."""
    if owner["host"] != platform.node():
        return True
    start = _start_of(owner["pid"])
    return start is not None and start == str(owner["started"])


def _start_of(pid: int) -> str | None:
    """Return when a process was started, in ticks of the system's clock; None if there is none.

    A later process of the same number has another start.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]  # The name before may hold spaces and brackets.


def _read(file: IO[str]) -> dict[str, Any] | None:
    file.seek(0)
    try:
        owner: dict[str, Any] = json.loads(file.read())
        return owner if {"pid", "host", "since", "started"} <= owner.keys() else None
    except (ValueError, AttributeError):
        return None


def _write(file: IO[str], owner: dict[str, Any] | None) -> None:
    file.truncate(0)
    if owner:
        try:
            os.write(file.fileno(), json.dumps(owner).encode())  # A buffer would be written later.
        except OSError as error:
            raise OSError(error.errno, error.strerror, file.name) from error
