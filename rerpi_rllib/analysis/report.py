"""One self-contained HTML page about a run or a sweep, so that it can be mailed."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from rerpi_rllib.analysis import plots
from rerpi_rllib.analysis.curves import Run, find_runs
from rerpi_rllib.analysis.summary import Summary, curves_figure, load_sweep
from rerpi_rllib.runs.settings import RunSettings
from rerpi_rllib.sweeps.sweep import Sweep

# Keys of a sweep's file that the page shows outside of the list of settings.
_SHOWN_ELSEWHERE = ("description", "command", "trials")
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 62em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; margin: 0.5em 0; font-size: 90%; }
th, td { text-align: left; padding: 0.15em 0.8em 0.15em 0; border-bottom: 1px solid #ddd; }
pre { background: #f4f4f4; padding: 0.7em; white-space: pre-wrap; }
img { max-width: 100%; }
"""


def write_report(directory: Path, output: Path | None = None) -> Path:
    """Write the page about the run or the sweep in ``directory`` and return its path."""
    output = output or directory / "report.html"
    if (directory / Sweep.FILE_NAME).is_file():
        title, parts = directory.resolve().name, _sweep_sections(load_sweep(directory))
    else:
        runs = find_runs([directory])
        if len(runs) > 1:
            raise ValueError(f"{str(directory)!r} holds {len(runs)} runs: name one, or a sweep.")
        title, parts = runs[0].directory.resolve().name, _run_sections(runs[0])
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}'
        f"</title><style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1>\n"
        + "\n".join(parts)
        + "</body></html>\n"
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page)
    return output


def _run_sections(run: Run) -> list[str]:
    settings = run.settings or RunSettings()
    parts = []
    if run.settings:
        parts += [_heading("To repeat it"), _code(settings.command())]
    parts += [
        _heading("Where it ended"),
        _pairs(_last_values(run)),
        _heading("Curves"),
        _image(plots.run_figure(run)),
        _image(plots.speed_figure(run)),
    ]
    if run.settings:
        parts += [
            _heading("Settings"),
            _pairs({key: value for key, value in asdict(settings).items() if value != {}}),
            _details("all settings of the algorithm", _pairs(_all_settings(run))),
        ]
    return [*parts, _heading("Versions"), _pairs(run.versions)]


def _last_values(run: Run) -> dict[str, Any]:
    curves, last = run.curves, run.curves.iloc[-1]
    seconds = last["time_s"] or float("nan")
    values = {
        "env steps": f"{last['env_steps']:,.0f} ({last['env_steps'] / seconds:.0f}/s)",
        "updates": f"{last.get('updates', 0):,.0f} ({last.get('updates', 0) / seconds:.0f}/s)",
        "minutes": f"{seconds / 60:.1f}",
    }
    for metric in ("return", "greedy_return"):
        if metric in curves and curves[metric].notna().any():
            best = curves[metric].max()
            values[metric.replace("_", " ")] = f"{run.final(metric):.1f} (best {best:.1f})"
    for name, (share, bound) in _kl_shares(run).items():
        values[f"{name} at target copies, second half"] = f"{share:.2f} times its bound of {bound:g}"
    return values


def _all_settings(run: Run) -> dict[str, Any]:
    config = run.settings.merged_config() if run.settings else None
    known = vars(config) if config else {}
    return {
        key: value
        for key, value in sorted(known.items())
        if not key.startswith("_") and isinstance(value, (str, int, float, list, tuple, dict))
    }


def _sweep_sections(summary: Summary) -> list[str]:
    sweep = json.loads((summary.directory / Sweep.FILE_NAME).read_text())
    parts = [
        f"<p>{html.escape(sweep['description'])}</p>",
        _heading("Results"),
        f"<p>The last {summary.metric} of each run; interquartile mean with a 95 % interval.</p>",
        _frame(summary.table),
        _heading("Curves"),
        _image(curves_figure(summary)),
    ]
    if summary.scores["task"].nunique() > 1:
        parts.append(_image(plots.bar_figure(summary.scores, f"last {summary.metric}")))
    rows, commands = [], []
    for label, runs in summary.groups.items():
        rows += [_row(run, summary.metric) for run in runs]
        if runs[0].settings:
            commands.append(f"# {label}\n{runs[0].settings.command()}")
    if summary.left_out:
        parts.append(f"<p>Not complete and left out: {html.escape(', '.join(summary.left_out))}.</p>")
    return [
        *parts,
        _heading("Runs"),
        "<p>KLs at the target copies over their bounds: mean of the second half of the run.</p>",
        _frame(pd.DataFrame(rows)),
        _heading("To repeat it"),
        _code(sweep["command"]),
        _details("one run of each kind", _code("\n".join(commands))),
        _heading("Settings"),
        _pairs({k: v for k, v in sweep.items() if v and k not in _SHOWN_ELSEWHERE}),
        _heading("Versions"),
        _pairs(next(iter(summary.groups.values()))[0].versions),
    ]


def _row(run: Run, metric: str) -> dict[str, Any]:
    last = run.curves.iloc[-1]
    shares = {f"{name} / bound": share for name, (share, _) in _kl_shares(run).items()}
    return {
        "run": run.directory.name,
        metric: run.final(metric),
        "env steps": int(last["env_steps"]),
        "steps/s": last["env_steps"] / last["time_s"],
        **shares,
    }


def _kl_shares(run: Run) -> dict[str, tuple[float, float]]:
    """Return the mean KLs at the target copies over their bounds, and the bounds, by metric."""
    second_half = run.curves[run.curves["env_steps"] > run.curves["env_steps"].iloc[-1] / 2]
    return {
        c.kl: (second_half[c.kl_at_copy].mean() / c.epsilon, c.epsilon)
        for c in run.constraints()
        if c.kl_at_copy in second_half
    }


def _heading(text: str) -> str:
    return f"<h2>{html.escape(text)}</h2>"


def _code(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"


def _details(title: str, content: str) -> str:
    return f"<details><summary>{html.escape(title)}</summary>{content}</details>"


def _pairs(values: Mapping[str, Any]) -> str:
    rows = (
        f"<tr><th>{html.escape(str(key))}</th><td>{html.escape(str(value))}</td></tr>"
        for key, value in values.items()
        if value is not None
    )
    return f"<table>{''.join(rows)}</table>"


def _frame(table: pd.DataFrame) -> str:
    text: str = table.to_html(index=False, border=0, na_rep="", float_format="{:.4g}".format)
    return text


def _image(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg")
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="" src="data:image/svg+xml;base64,{data}">'
