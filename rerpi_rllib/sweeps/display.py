"""What a sweep shows while it runs: the trials that are running and those that have ended."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from ray.tune import Callback
from ray.tune.experiment import Trial
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rerpi_rllib.runs.display import format_duration, is_live
from rerpi_rllib.runs.results import Result, env_steps, episode_return, fraction_done


class SweepDisplay(Callback):
    """A live table of the running trials on a terminal, a line for each ended trial elsewhere."""

    def __init__(
        self,
        name: str,
        total: int,
        stop: Mapping[str, float],
        quiet: bool = False,
        console: Console | None = None,
    ) -> None:
        self._name, self._total, self._stop, self._quiet = name, total, stop, quiet
        self._console = console or Console()
        self._live: Live | None = None
        self._results: dict[str, Result] = {}
        self._started = time.monotonic()
        self._done_before: float | None = None

    def setup(self, *args: Any, **kwargs: Any) -> None:
        if self._quiet:
            return
        if is_live(self._console):
            self._live = Live(Text(f"{self._name}: starting ..."), console=self._console)
            self._live.start()
        else:
            self._console.print(f"{self._name}: {self._total} trials")

    def on_step_begin(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        if self._done_before is None:
            # What a resumed sweep had done before says nothing about its pace now.
            self._done_before = self._done(trials)

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: Result, **info: Any
    ) -> None:
        self._results[trial.trial_id] = result
        if self._live:
            self._live.update(self._table(trials))

    def on_trial_complete(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        self._print(trial, f"score {trial.last_result.get('score', math.nan):.1f}")

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self._print(trial, "failed")

    def close(self) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def _print(self, trial: Trial, outcome: str) -> None:
        if not self._quiet:
            elapsed = format_duration(time.monotonic() - self._started)
            line = f"{elapsed}  {_trial_name(trial)}: {outcome}"
            self._console.print(line, soft_wrap=True, highlight=False)

    def _done(self, trials: list[Trial]) -> float:
        """Count the trials that have ended, and the finished fractions of those that run."""
        ended = sum(trial.status in ("TERMINATED", "ERROR") for trial in trials)
        running = [trial.last_result for trial in trials if trial.status == "RUNNING"]
        return ended + sum(fraction_done(self._stop, r) for r in running if "time_total_s" in r)

    def _table(self, trials: list[Trial]) -> Group:
        done, elapsed = self._done(trials), time.monotonic() - self._started
        failed = sum(trial.status == "ERROR" for trial in trials)
        pace = done - (self._done_before or 0.0)
        left = format_duration((self._total - done) * elapsed / pace) if pace > 0 else "?"
        table = Table(title_justify="left", box=None)
        for name in ("running", "env steps", "return", ""):
            table.add_column(name, style="dim" if not name else None)
        for trial in trials:
            result = self._results.get(trial.trial_id)
            if trial.status == "RUNNING" and result:
                table.add_row(
                    _trial_name(trial),
                    f"{env_steps(result):,}",
                    f"{episode_return(result):.1f}",
                    ProgressBar(total=1.0, completed=fraction_done(self._stop, result), width=20),
                )
        ended = sum(trial.status == "TERMINATED" for trial in trials)
        return Group(
            Text(
                f"{self._name}: {ended} of {self._total} done, {failed} failed, "
                f"elapsed {format_duration(elapsed)}, left {left}"
            ),
            table,
        )


def _trial_name(trial: Trial) -> str:
    return str(trial.path).rsplit("/", 1)[-1]
