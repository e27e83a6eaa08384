"""Errors that end a command, in a module that imports nothing of this package."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class RunFailed(Exception):
    """A run ended with an error; the message names its log."""


class EndedBySignal(BaseException):
    """A signal ends the command as Ctrl-C does, so that this is no error to be handled either."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"Ended by {signal.Signals(signum).name}.")
        self.exit_code = 128 + signum


def describe_os_error(error: OSError) -> str:
    """Say in one line which file could not be used, and why."""
    path = error.filename2 or error.filename
    if isinstance(path, bytes):
        path = path.decode(errors="replace")
    reason = error.strerror or str(error)
    return f"{reason}: {str(path)!r}." if path else f"{reason}."


@contextmanager
def os_errors_fail_the_run() -> Iterator[None]:
    """Turn errors of the operating system into failures of a run that has begun."""
    try:
        yield
    except OSError as error:
        raise RunFailed(describe_os_error(error)) from error
