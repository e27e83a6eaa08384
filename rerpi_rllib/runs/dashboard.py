"""Where a run can be watched: Ray's dashboard, Prometheus and Grafana, all on this machine."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from rerpi_rllib.runs.errors import EndedBySignal, RunFailed
from rerpi_rllib.runs.files import GRAFANA, short_path

# What is asked is on this machine, which a proxy knows nothing of.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
# Ray takes the first of these ports that is free.
_DASHBOARDS = tuple(f"http://127.0.0.1:{port}" for port in range(8265, 8275))
# Where Ray's dashboard looks for them, unless it was started with these variables.
_PORTS = {"RAY_PROMETHEUS_HOST": 9090, "RAY_GRAFANA_HOST": 3000}
_TOKEN = "it asks for the token that `ray get-auth-token` prints"
_SECONDS_TO_ANSWER = 5.0
_SECONDS_TO_START = 30.0
_SECONDS_BETWEEN_SAMPLES = 5
_SECONDS_TO_END = 30.0  # A Ray that runs writes its targets every five seconds.
_TARGETS = "targets.json"
_FIRST_GRAPHS = (
    "max by (trial) (ray_rerpi_episode_return_mean)",
    'max by (trial, __name__) ({__name__=~"ray_rerpi_kl_.*"})',
    'max by (trial, __name__) ({__name__=~"ray_rerpi_.*_per_second"})',
)


def where_to_watch(directory: Path, dashboard: str | None, *, wanted: bool = True) -> list[str]:
    """Return lines about where a run writes its results and how to look at them.

    Args:
        directory: the directory of the run.
        dashboard: the address of Ray's dashboard, if it has started.
        wanted: whether it should have.
    """
    missing = "did not start; the run goes on without it" if wanted else "none (--no-dashboard)"
    return [
        f"results     {short_path(directory)}",
        f"dashboard   {f'{dashboard}/#/actors ({_TOKEN})' if dashboard else missing}",
        f"tensorboard {shlex.join(['tensorboard', '--logdir', str(short_path(directory))])}",
    ]


def running_dashboards() -> list[str]:
    """Return the addresses of this machine at which a dashboard of Ray answers."""
    return [address for address in _DASHBOARDS if _is_dashboard(address)]


def _is_dashboard(address: str) -> bool:
    # Whoever listens there learns nothing: this is what a page asks before anybody has logged in.
    try:
        with _open(f"{address}/api/authentication_mode", timeout=_SECONDS_TO_ANSWER) as answer:
            return "authentication_mode" in json.load(answer)
    except (OSError, http.client.HTTPException, ValueError, TypeError):
        return False  # Something else listens there, or nothing.


def describe() -> list[str]:
    """Say where the dashboards of this machine are, and what else there is to look at."""
    lines = [f"dashboard   {address}/#/actors" for address in running_dashboards()]
    if lines:
        lines.append(f"            {_TOKEN}")
    else:
        lines.append("dashboard   none is running: `rllib train` starts one")
    return [
        *lines,
        "tensorboard tensorboard --logdir runs",
        f"grafana     {short_path(GRAFANA / 'rerpi.json')} is a dashboard to import",
    ]


class _Servers:
    """Processes that are ended with this one, and a directory for what they write."""

    def __init__(self) -> None:
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._directory = tempfile.TemporaryDirectory(prefix="rllib-dashboard-")
        self.directory = Path(self._directory.name)

    def __enter__(self) -> _Servers:
        return self

    def start(self, name: str, command: Sequence[str], ready: str) -> None:
        """Start a server, and wait until it answers at the address ``ready``."""
        log = self.directory / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        self._processes.append((name, process))
        deadline = time.monotonic() + _SECONDS_TO_START
        while time.monotonic() < deadline and process.poll() is None:
            try:
                with _open(ready, timeout=1.0):
                    return
            except OSError:
                time.sleep(0.1)
        raise RunFailed(f"{name} did not start: {_last_line(log)}")

    def check(self) -> None:
        """Raise ``RunFailed`` if one of them has ended, which it does not by itself."""
        for name, process in self._processes:
            if process.poll() is not None:
                raise RunFailed(f"{name} has ended: {_last_line(self.directory / f'{name}.log')}")

    def __exit__(self, *error: object) -> None:
        for _, process in self._processes:
            process.terminate()
        for _, process in self._processes:
            process.wait()
        self._directory.cleanup()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "it wrote nothing")


def serve(report: Callable[[str], None]) -> None:
    """Run Prometheus, and Grafana where it is installed, until a signal ends this process.

    They take in every Ray of this machine whose dashboard runs, also those that start later.

    Args:
        report: called with the lines that say where everything is.
    """
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        raise ValueError("--prometheus needs Prometheus: apt-get install prometheus.")
    previous = signal.signal(signal.SIGTERM, _end)
    try:
        with _Servers() as servers:
            url = _start_prometheus(servers, prometheus)
            for line in describe():
                report(line)
            report(f"prometheus  {_graphs(url)}")
            if grafana := _grafana_command():
                report(f"            {_start_grafana(servers, grafana, url)}/dashboards")
            else:
                report("            Grafana is not installed here: grafana.com/docs says how")
            report("Ctrl-C ends what was started here.")
            while True:
                servers.check()
                time.sleep(_SECONDS_BETWEEN_SAMPLES)
                _write_targets(servers.directory / _TARGETS)
    finally:
        signal.signal(signal.SIGTERM, previous)


def _end(number: int, frame: FrameType | None) -> None:
    raise EndedBySignal(number)


def _start_prometheus(servers: _Servers, program: str) -> str:
    every = f"{_SECONDS_BETWEEN_SAMPLES}s"
    discovery = {"files": [str(servers.directory / _TARGETS)], "refresh_interval": every}
    _write_targets(servers.directory / _TARGETS)
    _write_yaml(
        servers.directory / "prometheus.yml",
        {
            "global": {"scrape_interval": every, "scrape_timeout": every},
            "scrape_configs": [{"job_name": "ray", "file_sd_configs": [discovery]}],
        },
    )
    url = _address_for("RAY_PROMETHEUS_HOST")
    servers.start(
        "prometheus",
        [
            program,
            f"--config.file={servers.directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={servers.directory / 'prometheus'}",
            f"--web.listen-address={url.removeprefix('http://')}",
        ],
        f"{url}/-/ready",
    )
    return url


def _write_targets(path: Path) -> None:
    """Write down from where Prometheus reads metrics: from all Rays of this machine that run."""
    targets: list[Any] = []
    for file in _sessions("prom_metrics_service_discovery.json"):
        # It may be gone by now, or belong to somebody else.
        with contextlib.suppress(OSError, ValueError):
            if time.time() - file.stat().st_mtime < _SECONDS_TO_END:
                targets += json.loads(file.read_text())
    new = path.with_suffix(".new")
    new.write_text(json.dumps(targets))
    new.replace(path)


def _sessions(pattern: str) -> list[Path]:
    """Return files of the sessions of Ray on this machine that was started with our environment."""
    home = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    return [
        path
        for path in sorted(Path(home).glob(f"ray/session_*/{pattern}"))
        if not path.parents[len(Path(pattern).parts) - 1].is_symlink()  # The latest has two names.
    ]


def _grafana_command() -> list[str] | None:
    for command in (["grafana-server"], ["grafana", "server"]):
        if program := shutil.which(command[0]):
            return [program, *command[1:]]
    return None


def _start_grafana(servers: _Servers, command: Sequence[str], prometheus: str) -> str:
    """Start Grafana with our dashboard and Ray's, which the pages of Ray's dashboard embed."""
    url, home = _address_for("RAY_GRAFANA_HOST"), servers.directory / "grafana"
    provisioning = home / "provisioning"
    _write_yaml(
        provisioning / "datasources" / "prometheus.yml",
        {
            "apiVersion": 1,
            "datasources": [
                {
                    "name": "Prometheus",
                    "type": "prometheus",
                    "url": prometheus,
                    "isDefault": True,
                    "access": "proxy",
                }
            ],
        },
    )
    folders = {"RERPI": GRAFANA}
    if rays := _sessions("metrics/grafana/dashboards"):
        folders["Ray"] = rays[-1]  # Their names begin with the time.
    _write_yaml(
        provisioning / "dashboards" / "dashboards.yml",
        {
            "apiVersion": 1,
            "providers": [
                {"name": name, "folder": name, "type": "file", "options": {"path": str(path)}}
                for name, path in folders.items()
            ],
        },
    )
    host, port = url.removeprefix("http://").split(":")
    (home / "grafana.ini").write_text(
        f"""[server]
http_addr = {host}
http_port = {port}
[security]
allow_embedding = true
[auth.anonymous]
enabled = true
org_name = Main Org.
org_role = Viewer
[analytics]
reporting_enabled = false
check_for_updates = false
[paths]
data = {home / "data"}
logs = {home / "logs"}
provisioning = {provisioning}
"""
    )
    servers.start(
        "grafana",
        [*command, "--homepath", "/usr/share/grafana", "--config", str(home / "grafana.ini")],
        f"{url}/api/health",
    )
    return url


def _write_yaml(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content))


def _address_for(variable: str) -> str:
    """Return the address where Ray's dashboard looks for a server, or another if that is in use."""
    for port in (_PORTS[variable], 0):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return f"http://127.0.0.1:{probe.getsockname()[1]}"
    raise RunFailed("There is no free port on 127.0.0.1.")


def _graphs(prometheus: str) -> str:
    """Return the address of Prometheus's own page with the first graphs to look at."""
    query = {
        f"g{number}.{key}": value
        for number, expression in enumerate(_FIRST_GRAPHS)
        for key, value in (("expr", expression), ("tab", "0"), ("range_input", "15m"))
    }
    return f"{prometheus}/graph?{urllib.parse.urlencode(query)}"
