"""What a run shows while it trains: steps, return, speed, and every constraint."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ray.tune import Callback
from ray.tune.experiment import Trial
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rerpi_rllib.core.constraints import Constraint
from rerpi_rllib.runs.results import (
    Result,
    env_steps,
    episode_return,
    faults,
    fraction_done,
    learner_metrics,
    updates,
)

_BARS = "▁▂▃▄▅▆▇█"
_SECONDS_BETWEEN_LINES = 5.0


def is_live(console: Console) -> bool:
    """Tell whether somebody watches, and not a file or the log of continuous integration."""
    return console.is_terminal and not os.environ.get("CI")


def format_duration(seconds: float) -> str:
    """Format seconds as ``H:MM:SS``, or ``M:SS`` if they are less than an hour."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _sparkline(values: list[float], width: int = 40) -> str:
    if not values:
        return ""
    step = max(1.0, len(values) / width)
    picked = [values[min(len(values) - 1, int(i * step))] for i in range(min(width, len(values)))]
    low, high = min(picked), max(picked)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((v - low) * scale)] for v in picked)


def _kl_and_bound(constraint: Constraint, metrics: Mapping[str, float]) -> str:
    return f"{metrics[constraint.kl]:.2e} of {constraint.epsilon:.0e}"


class TrainingDisplay(Callback):
    """A live table on a terminal, a line every few seconds elsewhere, nothing if ``quiet``.

    Args:
        title: what is trained.
        stop: the stopping rules.
        constraints: the constraints of the run; each is shown once the results have its KL.
    """

    def __init__(
        self,
        title: str,
        stop: Mapping[str, float],
        constraints: Sequence[Constraint],
        quiet: bool = False,
        console: Console | None = None,
    ) -> None:
        self._title, self._stop, self._quiet = title, stop, quiet
        self._constraints = constraints
        self._console = console or Console()
        self._live: Live | None = None
        self._returns: list[float] = []
        self._history: list[tuple[float, int, int]] = []
        self._first: Result | None = None
        self._started = self._last_line = time.monotonic()

    def setup(self, *args: Any, **kwargs: Any) -> None:
        if self._quiet:
            return
        if is_live(self._console):
            self._live = Live(Text(f"{self._title}: starting ..."), console=self._console)
            self._live.start()
        else:
            self._console.print(f"{self._title}: starting ...")

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: Result, **info: Any
    ) -> None:
        self._first = self._first or result
        self._history = [
            *self._history[-9:],
            (time.monotonic(), env_steps(result), updates(result)),
        ]
        if not math.isnan(episode_return(result)):
            self._returns.append(episode_return(result))
        if self._live:
            self._live.update(self._table(result))
        elif not self._quiet and time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self._console.print(self._line(result), soft_wrap=True)

    def close(self) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def _speeds(self) -> tuple[float, float]:
        (t0, s0, u0), (t1, s1, u1) = self._history[0], self._history[-1]
        seconds = max(t1 - t0, 1e-9)
        return ((s1 - s0) / seconds, (u1 - u0) / seconds) if len(self._history) > 1 else (0.0, 0.0)

    def _time_left(self, result: Result) -> str:
        now = fraction_done(self._stop, result)
        then = fraction_done(self._stop, self._first or result)
        if now <= then:
            return "?"
        return format_duration((1.0 - now) * (time.monotonic() - self._started) / (now - then))

    @property
    def last_return(self) -> float | None:
        """The return in the last result that had one."""
        return self._returns[-1] if self._returns else None

    def _return(self) -> str:
        return f"{self._returns[-1]:.1f}" if self._returns else "(no episode has ended yet)"

    def _known_constraints(self, metrics: Mapping[str, float]) -> list[Constraint]:
        return [constraint for constraint in self._constraints if constraint.kl in metrics]

    def _table(self, result: Result) -> Group:
        metrics = learner_metrics(result)
        steps_per_second, updates_per_second = self._speeds()

        def value(key: str) -> str:
            return f"{metrics[key]:.3g}" if key in metrics else ""

        table = Table(title=self._title, title_justify="left", show_header=False, box=None)
        for _ in range(4):
            table.add_column()
        dim = "[dim]{}[/dim]".format
        table.add_row(
            dim("env steps"), f"{env_steps(result):,}", dim("speed"), f"{steps_per_second:.0f}/s"
        )
        table.add_row(
            dim("updates"), f"{updates(result):,}", dim("speed"), f"{updates_per_second:.0f}/s"
        )
        for constraint in self._known_constraints(metrics):
            table.add_row(
                dim(f"KL of {constraint.label}"),
                _kl_and_bound(constraint, metrics),
                dim(constraint.multiplier_label),
                value(constraint.multiplier),
            )
        table.add_row(
            *(
                (dim("entropy"), value("policy_entropy"))
                if "policy_entropy" in metrics
                else (dim("stddev"), value("policy_stddev_mean"))
            ),
            dim("Q"),
            value("q_mean"),
        )
        table.add_row(
            dim("elapsed"),
            format_duration(result["time_total_s"]),
            dim("time left"),
            self._time_left(result) if self._stop else "until Ctrl-C",
        )
        counted = faults(result)
        return Group(
            table,
            *([Text(counted, style="yellow")] if counted else []),
            Text.assemble(
                ("return ", "dim"), (self._return(), "bold"), "  ", _sparkline(self._returns)
            ),
            ProgressBar(total=1.0, completed=fraction_done(self._stop, result), width=60),
        )

    def _line(self, result: Result) -> str:
        metrics = learner_metrics(result)
        steps_per_second, updates_per_second = self._speeds()
        return (
            f"{format_duration(result['time_total_s'])}  env steps {env_steps(result):,} "
            f"({steps_per_second:.0f}/s)  updates {updates(result):,} "
            f"({updates_per_second:.0f}/s)  return {self._return()}  "
            + "".join(
                f"{constraint.kl} {_kl_and_bound(constraint, metrics)}  "
                for constraint in self._known_constraints(metrics)
                if constraint.is_trust_region  # A line has no room for all of them.
            )
            + (f"temperature {metrics['temperature']:.3g}  " if "temperature" in metrics else "")
            + (f"{counted}  " if (counted := faults(result)) else "")
            + f"left {self._time_left(result) if self._stop else 'until Ctrl-C'}"
        )
