"""How a run is to be watched: on the screen, in Ray's dashboard, and by trackers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Watching:
    """What the user asked for.

    Args:
        quiet: whether to leave out the progress display, and where to look for more.
        dashboard: whether to start Ray's dashboard, if Ray does not run yet.
    """

    quiet: bool = False
    dashboard: bool = False
