"""Keeps learning and acting in step: how many updates are due, and whether acting may run ahead."""

from __future__ import annotations


class RateLimiter:
    """Counts environment steps and updates and holds their ratio.

    With ``updates_per_env_step=None`` both run free. Steps taken before learning starts count too:
    their updates are made up once it has started, so the ratio holds over the whole run.
    """

    def __init__(self, updates_per_env_step: float | None, learning_starts: int) -> None:
        self._ratio = updates_per_env_step
        self._learning_starts = learning_starts
        self.env_steps = 0
        self.updates = 0

    def updates_due(self, limit: int) -> int:
        """Updates to make now, at most ``limit``."""
        if self.env_steps < self._learning_starts:
            return 0
        if self._ratio is None:
            return limit
        # The small term keeps 0.1 * 10 from being a hair below one update.
        return min(limit, int(self._ratio * self.env_steps - self.updates + 1e-6))

    def may_sample(self, steps_in_flight: int, steps_per_request: int) -> bool:
        """Whether to ask for more steps: not while updates for more than a request are due."""
        if self._ratio is None or self.env_steps < self._learning_starts:
            return True
        ahead = self.env_steps + steps_in_flight - self.updates / self._ratio
        return ahead <= max(steps_per_request, 1.0 / self._ratio)

    def get_state(self) -> dict[str, int]:
        return {"env_steps": self.env_steps, "updates": self.updates}

    def set_state(self, state: dict[str, int]) -> None:
        self.env_steps, self.updates = state["env_steps"], state["updates"]
