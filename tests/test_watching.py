"""Watching a run: dashboard, metrics, trackers and films, all of one short run."""

import json
import os
import re
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import pytest
import torch
import yaml
from browser import Browser
from conftest import SMALL, tiny_config
from tensorboardX.proto.event_pb2 import Event

from rerpi_rllib.algorithm.exporter import Measurements
from rerpi_rllib.algorithm.histograms import histograms
from rerpi_rllib.algorithm.networks import build_networks
from rerpi_rllib.cli import app, main
from rerpi_rllib.core.constraints import Constraint
from rerpi_rllib.core.settings import LearningSettings
from rerpi_rllib.runs import dashboard as module
from rerpi_rllib.runs.files import GRAFANA
from rerpi_rllib.runs.watching import Watching

ROOT = Path(__file__).parents[1]
RLLIB = [sys.executable, "-c", "from rerpi_rllib.cli import main; main()"]
NAME = "watched"
SECONDS = 300.0  # Nothing here takes a tenth of it, unless the machine is very busy.

# It checks what it is given, writes down where it found its files, and is healthy ever after.
FAKE_GRAFANA = f"""#!{sys.executable}
import configparser, http.server, pathlib, sys
ini = configparser.ConfigParser()
assert ini.read(sys.argv[sys.argv.index("--config") + 1])
(pathlib.Path(__file__).parent / "found.txt").write_text(ini["paths"]["provisioning"])
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
address = ini["server"]["http_addr"], int(ini["server"]["http_port"])
http.server.HTTPServer(address, Healthy).serve_forever()
"""


def _wait(for_what, *processes):
    """Return the first true value of a function, as long as these processes run."""
    deadline = time.monotonic() + SECONDS
    while not (value := for_what()):
        assert time.monotonic() < deadline and all(p.poll() is None for p in processes)
        time.sleep(0.2)
    return value


def _end(process, number=signal.SIGINT):
    if process.poll() is None:
        process.send_signal(number)
        try:
            process.wait(timeout=SECONDS)
        finally:
            process.kill()  # Nothing, if it has ended.


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train with a dashboard until the tests have seen enough."""
    storage = tmp_path_factory.mktemp("storage")
    token = secrets.token_hex(32)
    environment = {**os.environ, "RLLIB_DASHBOARD": "1", "RAY_AUTH_TOKEN": token}
    output = storage / "output.txt"
    command = [*RLLIB, "train", "--algo", "RERPI", "--env", "dm_control/cartpole-swingup-v0"]
    command += ["--config", json.dumps(SMALL | {"min_time_s_per_iteration": 1})]
    command += ["--name", NAME, "--storage-path", str(storage), "--stop", '{"time_s": 1800}']
    command += ["--mlflow", f"file:{storage / 'mlflow'}", "--video-every", "60"]
    with output.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
    try:
        shown = re.compile(r"dashboard   (http://\S+)/#/")
        address = _wait(lambda: shown.search(output.read_text()), process)
        yield SimpleNamespace(
            dashboard=address[1],
            token=token,
            directory=storage / NAME,
            storage=storage,
            output=output,
            process=process,
            environment=environment,
        )
    finally:
        _end(process)


def _results(run):
    text = "".join(path.read_text() for path in run.directory.glob("part-1/result.json"))
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


@pytest.fixture
def served(run, tmp_path):
    """Let `rllib dashboard --prometheus` run beside it, with something that looks like Grafana."""
    if shutil.which("prometheus") is None:
        pytest.skip("Debian's package prometheus is not installed")
    grafana = tmp_path / "bin" / "grafana-server"
    grafana.parent.mkdir()
    grafana.write_text(FAKE_GRAFANA)
    grafana.chmod(0o755)
    output = tmp_path / "output.txt"
    path = os.pathsep.join([str(grafana.parent), os.environ["PATH"]])
    with output.open("w") as file:
        process = subprocess.Popen(
            [*RLLIB, "dashboard", "--prometheus"],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**run.environment, "PATH": path},
        )
    try:
        _wait(lambda: "Ctrl-C" in output.read_text(), process)
        text = output.read_text()
        yield SimpleNamespace(
            text=text,
            prometheus=re.search(r"prometheus  (http://[^/]+)", text)[1],
            graphs=re.search(r"prometheus  (\S+)", text)[1],
            provisioning=Path((grafana.parent / "found.txt").read_text()),
            process=process,
        )
    finally:
        # Where the tests themselves run in the background, it ignores SIGINT.
        _end(process, signal.SIGTERM)


@pytest.mark.skipif(
    shutil.which("chromium") is None or shutil.which("chromedriver") is None,
    reason="Debian's packages chromium and chromium-driver are not installed",
)
def test_the_dashboard_shows_the_actors_by_name(run, tmp_path):
    _wait(lambda: _results(run), run.process)
    with Browser(tmp_path / "browser.log") as browser:
        browser.open(run.dashboard)
        # This is what its page for the token does.
        status = browser.run(
            "return fetch('/api/authenticate', {method: 'POST', headers: "
            "{Authorization: 'Bearer ' + arguments[0]}}).then(answer => answer.status)",
            run.token,
        )
        assert status == 200
        browser.open(f"{run.dashboard}/#/actors")
        browser.run("location.reload()")
        _wait(lambda: "RERPI env runner 1" in browser.text, run.process)
        assert "RERPI learner" in browser.text
        browser.screenshot(tmp_path / "actors.png")
    assert (tmp_path / "actors.png").stat().st_size > 10_000


def _query(url, expression):
    query = urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(f"{url}/api/v1/query?{query}", timeout=60) as answer:
        return json.load(answer)["data"]["result"]


def _expressions():
    """Return what the panels of the Grafana dashboard ask for, of the run of this test."""
    for panel in json.loads((GRAFANA / "rerpi.json").read_text())["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"].replace("$trial", NAME)
            yield re.sub(r"\$(algorithm|task)", ".*", expression)


def test_prometheus_has_data_for_every_panel_of_grafana(run, served):
    missing = list(_expressions())
    assert len(missing) >= 16

    def all_have_data():
        missing[:] = [each for each in missing if not _query(served.prometheus, each)]
        return not missing

    try:
        _wait(all_have_data, run.process, served.process)
    except AssertionError:
        raise AssertionError(f"no data for {missing}") from None
    (steps,) = _query(served.prometheus, f'ray_rerpi_env_steps{{trial="{NAME}"}}')
    assert steps["metric"]["algorithm"] == "RERPI"
    assert steps["metric"]["task"] == "dm_control/cartpole-swingup-v0"
    assert float(steps["value"][1]) > 0
    assert run.dashboard in served.text
    providers = yaml.safe_load((served.provisioning / "dashboards/dashboards.yml").read_text())
    ours, rays = (Path(each["options"]["path"]) for each in providers["providers"])
    assert ours == GRAFANA and list(rays.glob("*.json"))
    sources = yaml.safe_load((served.provisioning / "datasources/prometheus.yml").read_text())
    assert sources["datasources"][0]["url"] == served.prometheus


def _events(directory):
    """Read TensorBoard's files: records of a length, its checksum, an event, its checksum."""
    for path in directory.glob("events.out.tfevents.*"):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            yield Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]


def test_trackers_have_readable_names_and_the_run_is_filmed(run, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    _wait(lambda: any("histograms" in result for result in _results(run)), run.process)
    _end(run.process)
    output = run.output.read_text()
    assert run.process.returncode == 0, output
    assert f"results     {run.directory}" in output and "tensorboard --logdir" in output
    values = [value for event in _events(run.directory / "part-1") for value in event.summary.value]
    tags = {value.tag for value in values}
    names = {"learning/episode_return_mean", "trust_region/kl_mu", "trust_region/kl_mu_bound"}
    names |= {"throughput/env_steps_per_second", "health/num_bad_episodes"}
    assert names <= tags and not any(tag.startswith("ray/tune") for tag in tags)
    assert {"histograms/policy_stddev", "histograms/weights_ess"} <= tags

    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"file:{run.storage / 'mlflow'}")
    (experiment,) = (e for e in client.search_experiments() if e.name.startswith("RERPI on "))
    (logged,) = client.search_runs([experiment.experiment_id])
    assert logged.info.run_name == NAME and names <= logged.data.metrics.keys()

    films = list((run.directory / "videos").glob("step-*.gif"))
    if "There are no films" not in output:
        assert films and films[0].read_bytes().startswith(b"GIF89a")
        images = [v.image for e in _events(run.directory / "videos") for v in e.summary.value]
        assert images[0].width > 100 and images[0].encoded_image_string.startswith(b"GIF89a")


def test_histograms_change_nothing_of_what_is_drawn_later():
    config = tiny_config()
    spaces = gym.spaces.Box(-1, 1, (3,)), gym.spaces.Box(-1, 1, (2,))
    nets = build_networks(*spaces, config.model_config)
    settings = LearningSettings(**config.model_config["learning"])
    states = torch.randn(50, 3)
    before = torch.get_rng_state()
    found = histograms(nets, settings, states)
    assert torch.equal(torch.get_rng_state(), before)
    assert found["policy_stddev"] == sorted(found["policy_stddev"])
    smallest = nets.policy(states).stddev.min().item()
    assert found["policy_stddev"][0] == pytest.approx(smallest, rel=1e-3)
    assert 1 <= found["weights_ess"][0] <= found["weights_ess"][-1] <= settings.num_action_samples


def test_speeds_are_those_of_an_iteration():
    measurements = Measurements([Constraint("mu", "mean", 1e-3, "alpha_mu")])
    result = {
        "time_this_iter_s": 2.0,
        "num_env_steps_sampled_lifetime": 1000,
        "num_updates_lifetime": 500,
        "learners": {"default_policy": {"kl_mu": 0.5, "num_things": 3, "q_mean": float("nan")}},
    }
    first = {name: (group, value) for group, name, value in measurements.of(result)}
    assert first["kl_mu"] == ("trust_region", 0.5) and first["kl_mu_bound"][1] == 1e-3
    assert not {"num_things", "q_mean", "env_steps_per_second"} & first.keys()
    later = {"num_env_steps_sampled_lifetime": 1300, "num_updates_lifetime": 600}
    second = {name: value for _, name, value in measurements.of(result | later)}
    assert second["env_steps_per_second"] == 150 and second["updates_per_second"] == 50


def test_a_tracker_that_is_missing_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"--wandb needs .* pip install 'rerpi-rllib\[wandb\]'"):
        Watching(wandb="project")
    with pytest.raises(ValueError, match=r"--video-every 0 is not allowed"):
        Watching(video_every=0.0)


def test_prometheus_that_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["rllib", "dashboard", "--prometheus"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and "apt-get install prometheus" in capsys.readouterr().err


def test_where_to_watch_without_a_run(monkeypatch):
    monkeypatch.setattr(module, "_DASHBOARDS", ())
    text = "\n".join(module.describe())
    assert "none is running" in text and "tensorboard" in text and "rerpi.json" in text


def test_what_listens_at_the_port_of_a_dashboard_may_be_anything(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # It is not asked.
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            client, _ = server.accept()
            with client:
                client.recv(10_000)
                client.sendall(b"SSH-2.0-no-dashboard\r\n")

        answering = threading.Thread(target=answer)
        answering.start()
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(module, "_DASHBOARDS", (address,))
        assert module.running_dashboards() == []
        answering.join(SECONDS)
        assert not answering.is_alive()


def test_every_command_has_an_example():
    for command in app.registered_commands:
        name = command.name or command.callback.__name__
        assert f"rllib {name}" in (command.epilog or ""), name
