"""What a run shows while it trains."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from ray.tune import Callback
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rerpi_rllib.experiments.settings import (
    STOP_KEYS,
    env_steps,
    episode_return,
    learner_metrics,
    updates,
)

# Each KL that may be bounded: its name on the display, and what is shown beside it.
_KLS = {
    "kl_mu": ("KL of mean", "multiplier", "alpha_mu"),
    "kl_sigma": ("KL of covariance", "multiplier", "alpha_sigma"),
    "kl_mixture": ("KL of mixture", "multiplier", "alpha_mixture"),
    "kl_pi": ("KL of policy", "multiplier", "alpha_pi"),
    "kl_nonparametric": ("KL of weights", "temperature", "temperature"),
}
_BARS = "▁▂▃▄▅▆▇█"
_SECONDS_BETWEEN_LINES = 30.0


def _clock(seconds: float) -> str:
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


def _fraction_done(stop: Mapping[str, float], result: Mapping[str, Any]) -> float:
    """The stopping rule that is nearest to its end; a return does not tell how far it is."""
    parts = [
        STOP_KEYS[key](result) / limit for key, limit in stop.items() if key != "return" and limit > 0
    ]
    return min(1.0, max(parts, default=0.0))


class TrainingDisplay(Callback):
    """A live table on a terminal, a line every half minute elsewhere, nothing if ``quiet``."""

    def __init__(
        self,
        title: str,
        stop: Mapping[str, float],
        bounds: Mapping[str, float],
        quiet: bool = False,
        console: Console | None = None,
    ) -> None:
        self._title, self._stop, self._bounds, self._quiet = title, stop, bounds, quiet
        self._console = console or Console()
        self._live: Live | None = None
        self._returns: list[float] = []
        self._history: list[tuple[float, int, int]] = []
        self._first: Mapping[str, Any] | None = None
        self._started = self._last_line = time.monotonic()

    def setup(self, *args: Any, **kwargs: Any) -> None:
        if self._quiet:
            return
        if self._console.is_terminal:
            self._live = Live(Text(f"{self._title}: starting ..."), console=self._console)
            self._live.start()
        else:
            self._console.print(f"{self._title}: starting ...")

    def on_trial_result(self, iteration, trials, trial, result, **info: Any) -> None:
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

    def _time_left(self, result: Mapping[str, Any]) -> str:
        now = _fraction_done(self._stop, result)
        then = _fraction_done(self._stop, self._first or result)
        if now <= then:
            return "?"
        return _clock((1.0 - now) * (time.monotonic() - self._started) / (now - then))

    @property
    def last_return(self) -> float | None:
        return self._returns[-1] if self._returns else None

    def _return(self) -> str:
        return f"{self._returns[-1]:.1f}" if self._returns else "(no episode has ended yet)"

    def _kl(self, metrics: Mapping[str, float], name: str, bound: float) -> str:
        return f"{metrics.get(name, math.nan):.2e} of {bound:.0e}"

    def _table(self, result: Mapping[str, Any]) -> Group:
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
        for name, bound in self._bounds.items():
            label, beside, beside_name = _KLS[name]
            table.add_row(dim(label), self._kl(metrics, name, bound), dim(beside), value(beside_name))
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
            _clock(result["time_total_s"]),
            dim("time left"),
            self._time_left(result) if self._stop else "until Ctrl-C",
        )
        return Group(
            table,
            Text.assemble(
                ("return ", "dim"), (self._return(), "bold"), "  ", _sparkline(self._returns)
            ),
            ProgressBar(total=1.0, completed=_fraction_done(self._stop, result), width=60),
        )

    def _line(self, result: Mapping[str, Any]) -> str:
        metrics = learner_metrics(result)
        steps_per_second, updates_per_second = self._speeds()
        return (
            f"{_clock(result['time_total_s'])}  env steps {env_steps(result):,} "
            f"({steps_per_second:.0f}/s)  updates {updates(result):,} "
            f"({updates_per_second:.0f}/s)  return {self._return()}  "
            + "".join(
                f"{name} {self._kl(metrics, name, bound)}  "
                for name, bound in self._bounds.items()
                if name != "kl_nonparametric"
            )
            + (f"temperature {metrics['temperature']:.3g}  " if "temperature" in metrics else "")
            + f"left {self._time_left(result) if self._stop else 'until Ctrl-C'}"
        )


class SweepDisplay(Callback):
    """The trials that run, live on a terminal; elsewhere a line for each that ends."""

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
        self._results: dict[str, Mapping[str, Any]] = {}
        self._started = time.monotonic()
        self._done_before: float | None = None

    def setup(self, *args: Any, **kwargs: Any) -> None:
        if self._quiet:
            return
        if self._console.is_terminal:
            self._live = Live(Text(f"{self._name}: starting ..."), console=self._console)
            self._live.start()
        else:
            self._console.print(f"{self._name}: {self._total} trials")

    def on_step_begin(self, iteration, trials, **info: Any) -> None:
        if self._done_before is None:
            # Of a sweep that goes on: what was done before says nothing about the pace now.
            self._done_before = self._done(trials)

    def on_trial_result(self, iteration, trials, trial, result, **info: Any) -> None:
        self._results[trial.trial_id] = result
        if self._live:
            self._live.update(self._table(trials))

    def on_trial_complete(self, iteration, trials, trial, **info: Any) -> None:
        self._say(trial, f"score {trial.last_result.get('score', math.nan):.1f}")

    def on_trial_error(self, iteration, trials, trial, **info: Any) -> None:
        self._say(trial, "failed")

    def close(self) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def _say(self, trial: Any, outcome: str) -> None:
        if not self._quiet:
            elapsed = _clock(time.monotonic() - self._started)
            line = f"{elapsed}  {_trial_name(trial)}: {outcome}"
            self._console.print(line, soft_wrap=True, highlight=False)

    def _done(self, trials: list[Any]) -> float:
        """Trials that have ended, and the share of those that run."""
        ended = sum(trial.status in ("TERMINATED", "ERROR") for trial in trials)
        running = [trial.last_result for trial in trials if trial.status == "RUNNING"]
        return ended + sum(_fraction_done(self._stop, r) for r in running if "time_total_s" in r)

    def _table(self, trials: list[Any]) -> Group:
        done, elapsed = self._done(trials), time.monotonic() - self._started
        failed = sum(trial.status == "ERROR" for trial in trials)
        pace = done - (self._done_before or 0.0)
        left = _clock((self._total - done) * elapsed / pace) if pace > 0 else "?"
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
                    ProgressBar(total=1.0, completed=_fraction_done(self._stop, result), width=20),
                )
        ended = sum(trial.status == "TERMINATED" for trial in trials)
        return Group(
            Text(
                f"{self._name}: {ended} of {self._total} done, {failed} failed, "
                f"elapsed {_clock(elapsed)}, left {left}"
            ),
            table,
        )


def _trial_name(trial: Any) -> str:
    return str(trial.path).rsplit("/", 1)[-1]
