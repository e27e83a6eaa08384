"""Signals that end a run: Ctrl-C, and what Slurm, Kubernetes, `kill` and a closed terminal send."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def processes_survive_signals() -> Iterator[None]:
    """Let the processes that are started here, and all of theirs, pass over SIGTERM and SIGHUP.

    Slurm, systemd, `timeout` and a closed terminal send these to a whole group of processes. The one
    that handles them needs the others for a last checkpoint, and ends them itself.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, previous)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class EndSignals:
    """Handles the signals that ask a run to end: the first ends it in order, a second at once.

    Args:
        message: what to say when the first signal has come.
        on_first: called then, in the main thread.
    """

    def __init__(self, message: str, on_first: Callable[[signal.Signals], None]) -> None:
        self.received: signal.Signals | None = None
        self._message, self._on_first = message, on_first
        self._previous: dict[signal.Signals, Any] = {}
        self._leave_with_terminal: list[int] = []

    def __enter__(self) -> EndSignals:
        if threading.current_thread() is threading.main_thread():
            # `nohup` has SIGHUP ignored, which has to stay so.
            self._previous = {number: signal.getsignal(number) for number in _SIGNALS}
            if self._previous[signal.SIGHUP] == signal.SIG_IGN:
                del self._previous[signal.SIGHUP]
            self._leave_with_terminal = [n for n in (1, 2) if not stat.S_ISREG(os.fstat(n).st_mode)]
        self.install()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def install(self) -> None:
        """Set the handlers, once more when Ray has started: it sets handlers of its own."""
        for number in self._previous:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGHUP:
            # The terminal is gone, and programs behind a pipe with it: what is written to them would
            # fail, and the run with it.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for number in self._leave_with_terminal:
                os.dup2(nowhere, number)
        if self.received is not None:
            if os.isatty(1):
                os.write(1, b"\x1b[?25h\n")  # The live table hides the cursor.
            _say(f"Ended at once by a second signal ({name}).")
            os._exit(128 + number)  # Ray's processes end with this one.
        self.received = signal.Signals(number)
        _say(f"{name}: {self._message}")
        self._on_first(self.received)


def _say(text: str) -> None:
    """Write a line to stderr; unlike ``print`` this is allowed while another print is going on."""
    with contextlib.suppress(OSError):  # There may be nobody to read it.
        os.write(2, f"rllib: {text}\n".encode())
