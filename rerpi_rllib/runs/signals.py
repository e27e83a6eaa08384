"""Signals that end a run: Ctrl-C, and what Slurm, Kubernetes, `kill` and a closed terminal send."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
        self._terminals: list[int] = []

    def __enter__(self) -> EndSignals:
        if threading.current_thread() is threading.main_thread():
            # `nohup` has SIGHUP ignored, which has to stay so.
            self._previous = {number: signal.getsignal(number) for number in _SIGNALS}
            if self._previous[signal.SIGHUP] == signal.SIG_IGN:
                del self._previous[signal.SIGHUP]
            self._terminals = [number for number in (1, 2) if os.isatty(number)]
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
            # The terminal is gone: what is written to it would fail, and the run with it.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for terminal in self._terminals:
                os.dup2(nowhere, terminal)
        if self.received is not None:
            if 1 in self._terminals:
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
