"""Keeping learning and acting in step."""

from __future__ import annotations

from typing import Any


class RateLimiter:
    """Counts environment steps and updates, and holds their ratio.

    With ``updates_per_env_step=None`` both run free. Steps taken before learning starts count too:
    their updates are made up in a burst when it starts, so the ratio holds over the whole run
    (``results/redesign`` compares this with leaving them out). A run that
    is restored with another ratio keeps the new one from there on.
    """

    def __init__(self, updates_per_env_step: float | None, learning_starts: int) -> None:
        self._ratio = updates_per_env_step
        self._learning_starts = learning_starts
        self.env_steps = 0
        self.updates = 0
        self._since = (0, 0)  # Steps and updates at the moment this ratio began.
        self._held_until = 0  # The step at which learning goes on with a replay that was refilled.

    def refill(self) -> None:
        """Let as many steps come in as before the first update; their updates are not made up."""
        self._held_until = self.env_steps + self._learning_starts
        self._since = (self._held_until, self.updates)

    def updates_due(self, limit: int) -> int:
        """Return how many updates to make now, at most ``limit``."""
        if self._is_filling:
            return 0
        if self._ratio is None:
            return limit
        # The small term keeps 0.1 * 10 from falling a hair short of one update.
        return max(0, min(limit, int(self._ratio * self._ahead(self._ratio) + 1e-6)))

    def may_sample(self, steps_in_flight: int, steps_per_request: int) -> bool:
        """Tell whether to request more steps: not while more than a request waits for its updates."""
        if self._ratio is None or self._is_filling:
            return True
        ahead = self._ahead(self._ratio) + steps_in_flight
        return ahead <= max(steps_per_request, 1.0 / self._ratio)

    @property
    def _is_filling(self) -> bool:
        return self.env_steps < max(self._learning_starts, self._held_until)

    def _ahead(self, ratio: float) -> float:
        """Return the number of steps whose updates are still to be made."""
        steps, updates = self._since
        return self.env_steps - steps - (self.updates - updates) / ratio

    def get_state(self) -> dict[str, Any]:
        return {
            "env_steps": self.env_steps,
            "updates": self.updates,
            "ratio": self._ratio,
            "since": self._since,
            "held_until": self._held_until,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self.env_steps, self.updates = state["env_steps"], state["updates"]
        self._held_until = state["held_until"]
        same = state["ratio"] == self._ratio
        self._since = tuple(state["since"]) if same else (self.env_steps, self.updates)
