"""Sweeps: what they run, and that a crash or a broken trial does not affect other trials."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from dataclasses import fields
from functools import partial
from pathlib import Path

import pandas as pd
import pyarrow.fs
import pytest
import yaml
from conftest import SMALL
from test_cli import FAILING_ENV, RLLIB

from rerpi_rllib import RERPI
from rerpi_rllib.analysis.report import write_report
from rerpi_rllib.analysis.summary import load_sweep, summarise
from rerpi_rllib.figures.paper import figure
from rerpi_rllib.runs.errors import RunFailed
from rerpi_rllib.runs.files import SWEEPS
from rerpi_rllib.runs.ownership import owned
from rerpi_rllib.runs.planning import refuse_used
from rerpi_rllib.sweeps import running
from rerpi_rllib.sweeps.running import check_failures, num_trials, run_sweep
from rerpi_rllib.sweeps.storage import whole_files
from rerpi_rllib.sweeps.sweep import Sweep, load


def _write(directory: Path, **sweep) -> Path:
    """Write a sweep on Pendulum that takes moments."""
    base = {
        "env": "Pendulum-v1",
        "config": {
            **SMALL,
            "num_env_runners": 0,
            "evaluation_interval": 1,
            "evaluation_duration": 1,
            "min_sample_timesteps_per_iteration": 200,
        },
        "stop": {"env_steps": 400},
    }
    (directory / "base.yaml").write_text(yaml.safe_dump(base))
    path = directory / "tiny.yaml"
    path.write_text(yaml.safe_dump({"base": str(directory / "base.yaml"), "seeds": 2, **sweep}))
    return path


@pytest.mark.parametrize("on_cpu", [False, True], ids=["gpu", "cpu"])
@pytest.mark.parametrize("path", sorted(SWEEPS.glob("*.yaml")), ids=lambda p: p.stem)
def test_our_sweeps_are_complete(path, on_cpu):
    sweep, name = load(path.stem, on_cpu=on_cpu)
    assert name == path.stem and sweep.description and sweep.seeds == 5
    assert len(sweep.trials()) == len(sweep.variants()) * 5 * len(sweep.env or sweep._base().tasks)
    preset = {settings.preset for settings in sweep.trials().values()}
    assert preset == ({"compact"} if on_cpu else {None})


def test_every_combination_is_a_trial_with_a_name_of_its_own(tmp_path):
    grid = {"algo": ["RERPI", "DDPG"], "lr": ["1e-3", 1e-2]}
    sweep, _ = load(str(_write(tmp_path, grid=grid, env=["Pendulum-v1"])), config={"gamma": 0.9})
    trials = sweep.trials()
    assert len(trials) == 8
    settings = trials["Pendulum-v1_algo=DDPG_lr=0.01_seed=1"]
    assert (settings.algo, settings.seed, settings.env) == ("DDPG", 1, "Pendulum-v1")
    assert (settings.config["lr"], settings.config["gamma"]) == (0.01, 0.9)
    assert settings.stop == {"env_steps": 400}


def test_variants_beside_the_grid(tmp_path):
    grid, also = {"policy_evaluation": ["td0", "retrace"]}, [{"algo": "SVG0"}, {"lr": "1e-4"}]
    sweep, _ = load(str(_write(tmp_path, grid=grid, also=also, seeds=1)))
    trials = sweep.trials()
    assert list(trials) == [
        "Pendulum-v1_policy_evaluation=td0_algo=RERPI_seed=0",
        "Pendulum-v1_policy_evaluation=retrace_algo=RERPI_seed=0",
        "Pendulum-v1_algo=SVG0_seed=0",
        "Pendulum-v1_algo=RERPI_lr=0.0001_seed=0",
    ]
    last = list(trials.values())[-1]
    assert last.config["lr"] == 1e-4 and "policy_evaluation" not in last.config


@pytest.mark.parametrize(
    "given,words",
    [
        ({"grid": {"epsilon_moo": [1.0]}}, ["epsilon_moo", "epsilon_mu"]),
        ({"grid": {"epsilon_mu": [-1.0]}}, ["epsilon_mu", "-1"]),
        ({"grid": {"epsilon_mu": 1.0}}, ["epsilon_mu", "list"]),
        ({"grid": {"algo": ["RERPI", "PPO"]}}, ["PPO", "DDPG"]),
        ({"base": "control-suit"}, ["control-suit", "control-suite"]),
        ({"seeds": 0}, ["seeds", "0"]),
        ({"metric": "loss"}, ["loss", "greedy_return"]),
        ({"env": ["Pendulun-v1"]}, ["Pendulun-v1"]),
        ({"stop": {"return": 100}}, ["return", "env_steps"]),
        ({"gird": {}}, ["gird", "grid"]),
        ({"cpu": {"seed": 3}}, ["seed", "cpu"]),
        ({"base": 3}, ["base=3"]),
        ({"also": {"algo": "SVG0"}}, ["also={'algo': 'SVG0'}", "list of mappings"]),
        ({"also": [{"algo": "SVG1"}]}, ["SVG1", "SVG0"]),
        ({"env": [1]}, ["env=[1]"]),
        ({"grid": {"epsilon_mu": [1e-3, 1.0000001e-3]}}, ["epsilon_mu=0.001_seed=0"]),
        ({"grid": {"preset": [None, "compacd", "compact"]}}, ["compacd", "compact"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_wrong_is_said_before_anything_runs(given, words, tmp_path):
    with pytest.raises(ValueError) as error:
        load(str(_write(tmp_path, **given)), on_cpu=True)
    for word in words:
        assert word in str(error.value)


def _has_ended(trial: Path) -> bool:
    """Tell whether the state of a sweep in its directory says that a trial has ended."""
    for path in trial.parent.glob("experiment_state-*.json"):
        for text, _ in json.loads(path.read_text())["trial_data"]:
            state = json.loads(text)
            if (state["relative_logdir"], state["status"]) == (trial.name, "TERMINATED"):
                return True
    return False


def test_a_killed_sweep_goes_on_and_a_broken_trial_stops_no_other(tmp_path):
    (tmp_path / "failing.py").write_text(FAILING_ENV)
    path = _write(tmp_path, env=["Pendulum-v1", "InvertedPendulum-v5", "failing:Failing-v0"], seeds=1)
    command = [*RLLIB, "sweep", str(path), "--storage-path", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    for line in process.stdout:
        if ended := re.search(r"(\w*Pendulum-v\d_seed=0): score", line):
            break
    else:
        pytest.fail(f"no trial has ended: {process.wait()}")
    finished = tmp_path / "tiny" / ended[1]
    results = finished / "result.json"
    while not _has_ended(finished):
        time.sleep(0.1)  # Tune saves the state of a sweep soon after a trial has ended.
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = results.read_text()
    assert [json.loads(line)["env_steps"] for line in before.splitlines()] == [200, 400]

    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert "1 of the sweep's trials failed: failing-Failing_seed=0." in line
    assert "on fire" in done.stdout
    assert results.read_text() == before, "a finished trial was run again"
    runs = load_sweep(tmp_path / "tiny").groups["default"]
    assert [run.task for run in runs] == ["InvertedPendulum-v5", "Pendulum-v1"]
    assert all(run.curves["env_steps"].iloc[-1] == 400 for run in runs)
    assert "| Pendulum-v1 | default | 1 |" in done.stdout
    assert (tmp_path / "tiny" / "curves.png").stat().st_size > 5_000


def test_a_file_of_a_sweep_is_whole_or_not_there(tmp_path):
    path, files = tmp_path / "state.json", whole_files()
    path.write_text("old")
    stream = files.open_output_stream(str(path))
    stream.write(b"ne")
    stream.flush()
    assert path.read_text() == "old"
    stream.write(b"w")
    stream.close()
    assert path.read_text() == "new"
    pyarrow.fs.copy_files(str(path), str(tmp_path / "copy.json"), destination_filesystem=files)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {
        "state.json": "new",
        "copy.json": "new",
    }


def test_a_file_that_could_not_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "state.json"
    path.write_text("old")
    stream = whole_files().handler.fs.open(str(path), "wb")
    os.close(stream.fileno())  # Every write fails from now on, as on a full disk.
    with pytest.raises(OSError):
        stream.write(b"new")
    with contextlib.suppress(OSError):
        stream.close()
    assert path.read_text() == "old"


@pytest.fixture(scope="module")
def sweep_directory(tmp_path_factory, ray_session):
    """Return the directory of a finished sweep with two variants and two tasks."""
    directory = tmp_path_factory.mktemp("sweep")
    path = _write(
        directory,
        grid={"fit": ["decoupled", "coupled"]},
        env=["Pendulum-v1", "InvertedPendulum-v5"],
        seeds=1,
    )
    sweep, _ = load(str(path))
    assert run_sweep(sweep, directory / "tiny", command="rllib sweep tiny", quiet=True) == {}
    return directory / "tiny"


def test_figures_tables_and_report_of_a_sweep(sweep_directory):
    summary, _ = summarise(sweep_directory)
    assert list(summary.groups) == ["fit=decoupled", "fit=coupled"]
    assert set(summary.table["task"]) == {"Pendulum-v1", "InvertedPendulum-v5", "all, normalised"}
    assert (summary.table["runs"] == 1).all() and summary.table["IQM"].notna().all()
    for name in ("curves.png", "curves.svg", "curves.csv", "scores.png", "table.csv", "table.md"):
        assert (sweep_directory / name).stat().st_size > 100, name
    page = write_report(sweep_directory).read_text()
    for text in ("fit=coupled", "rllib sweep tiny", "data:image/svg+xml", "kl_mu / bound", "torch"):
        assert text in page
    assert "<th>grid</th>" in page and "<th>trials</th>" not in page
    assert "http" not in re.sub(r'src="data:[^"]*"', "", page), "not self-contained"


def test_a_trial_is_a_run(sweep_directory):
    trial = sweep_directory / "Pendulum-v1_fit=decoupled_seed=0"
    page = write_report(trial).read_text()
    assert "rllib train --algo RERPI --env Pendulum-v1 --seed 0" in page
    assert list(trial.glob("checkpoint_*"))


def test_a_damaged_state_is_refused(sweep_directory, tmp_path):
    directory = tmp_path / "tiny"
    shutil.copytree(sweep_directory, directory)
    (state,) = directory.glob("experiment_state-*.json")
    state.write_text(state.read_text()[:1000])
    results = {path: path.read_text() for path in directory.glob("*/result.json")}
    saved = json.loads((directory / Sweep.FILE_NAME).read_text())
    sweep = Sweep(**{field.name: saved[field.name] for field in fields(Sweep)})
    with pytest.raises(ValueError, match=rf"{state.name} is damaged .*run again"):
        run_sweep(sweep, directory)
    assert results == {path: path.read_text() for path in directory.glob("*/result.json")}


def _statuses(directory: Path) -> dict[str, str]:
    (path,) = directory.glob("experiment_state-*.json")
    trials = [json.loads(text) for text, _ in json.loads(path.read_text())["trial_data"]]
    return {trial["relative_logdir"]: trial["status"] for trial in trials}


def test_finished_trials_without_a_state_are_not_run_again(sweep_directory, tmp_path):
    directory = tmp_path / "tiny"
    shutil.copytree(sweep_directory, directory)
    (state,) = directory.glob("experiment_state-*.json")
    state.unlink()
    with pytest.raises(ValueError, match=r"finished trials \(Inverted.*run again.*--name"):
        run_sweep(Sweep.from_directory(directory), directory)


def test_a_state_that_is_behind_its_trials_is_brought_up_to_date(sweep_directory, tmp_path):
    directory = tmp_path / "tiny"
    shutil.copytree(sweep_directory, directory)
    (state,) = directory.glob("experiment_state-*.json")
    state.write_text(state.read_text().replace("TERMINATED", "RUNNING"))
    cut = directory / "Pendulum-v1_fit=coupled_seed=0"
    (cut / "result.json").write_text((cut / "result.json").read_text().splitlines()[0] + "\n")
    assert set(_statuses(directory).values()) == {"RUNNING"}
    assert running._has_state(directory, "")
    statuses = _statuses(directory)
    assert statuses.pop(cut.name) == "RUNNING"
    assert len(statuses) == 3 and set(statuses.values()) == {"TERMINATED"}


def test_a_sweep_and_a_run_keep_out_of_each_other_s_directories(sweep_directory, tmp_path):
    sweep = Sweep.from_directory(sweep_directory)
    with pytest.raises(ValueError, match="holds a run"):
        run_sweep(sweep, sweep_directory / "Pendulum-v1_fit=coupled_seed=0")
    with pytest.raises(ValueError, match="holds a sweep"):
        refuse_used(sweep_directory)
    with owned(sweep_directory), pytest.raises(ValueError, match="in use by process"):
        run_sweep(sweep, sweep_directory)


def test_a_directory_keeps_to_its_sweep(sweep_directory):
    asked = json.loads((sweep_directory / Sweep.FILE_NAME).read_text())
    asked = {key: asked[key] for key in ("base", "grid", "env", "stop")}
    with pytest.raises(ValueError, match=r"has another sweep \(.*seeds.*\).*--name"):
        run_sweep(Sweep(**asked, seeds=3), sweep_directory)


@pytest.mark.parametrize(
    "how", [{"scheduler": "asha"}, {"scheduler": "pbt"}, {"search": "optuna"}], ids=str
)
def test_tuning(how, tmp_path, ray_session):
    path = _write(tmp_path, grid={"epsilon_mu": [1e-4, 1e-2]}, seeds=1)
    sweep, _ = load(str(path))
    assert run_sweep(sweep, tmp_path / "tuned", num_samples=2, quiet=True, **how) == {}
    runs = [run for group in load_sweep(tmp_path / "tuned").groups.values() for run in group]
    values = {run.settings.config["epsilon_mu"] for run in runs}
    assert len(runs) == 2 and all(1e-4 * 0.8 <= value <= 1e-2 * 1.2 for value in values)
    summarise(tmp_path / "tuned")


def test_a_broken_run_does_not_count(sweep_directory, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(sweep_directory, copy)
    results = copy / "Pendulum-v1_fit=decoupled_seed=0" / "result.json"
    results.write_text(results.read_text().splitlines()[0] + "\n")
    summary = load_sweep(copy)
    assert summary.left_out == ["Pendulum-v1_fit=decoupled_seed=0"]
    assert "left out: Pendulum-v1_fit=decoupled_seed=0" in summary.markdown
    rows = summary.table.set_index(["task", "setting"])["runs"]
    assert ("Pendulum-v1", "fit=decoupled") not in rows and ("all, normalised", "fit=coupled") in rows


def test_a_figure_is_made_of_the_sweeps_that_are_there(sweep_directory, tmp_path):
    shutil.copytree(sweep_directory, tmp_path / "weighting")
    drawn = figure("weighting", tmp_path / "new", storage_path=tmp_path, report=lambda text: None)
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert len(pd.read_csv(drawn.with_suffix(".csv"))) == 4
    assert (tmp_path / "new" / "weighting-scores.svg").is_file()
    with pytest.raises(ValueError, match="--iterations"):
        figure("weighting", tmp_path, iterations=3)


def test_a_trial_s_checkpoint_is_an_algorithm_s(sweep_directory, ray_session):
    (checkpoint,) = (sweep_directory / "Pendulum-v1_fit=coupled_seed=0").glob("checkpoint_*")
    algo = RERPI.from_checkpoint(str(checkpoint))
    assert algo.config.fit == "coupled"
    algo.stop()


def test_what_tuning_refuses_leaves_nothing_behind(tmp_path):
    sweep, _ = load(str(_write(tmp_path, stop={"updates": 100})))
    with pytest.raises(ValueError, match="env_steps"):
        run_sweep(sweep, tmp_path / "x", scheduler="asha")
    assert not (tmp_path / "x").exists()


def test_tuning_needs_one_task(tmp_path):
    sweep, _ = load(str(_write(tmp_path, env=["Pendulum-v1", "InvertedPendulum-v5"])))
    with pytest.raises(ValueError, match="one task"):
        run_sweep(sweep, tmp_path / "x", scheduler="asha")


@pytest.mark.parametrize("how", [{"scheduler": "hyperband"}, {"search": "grid"}, {"num_samples": 0}])
def test_unknown_ways_of_tuning(how, tmp_path):
    sweep, _ = load(str(_write(tmp_path)))
    with pytest.raises(ValueError, match=re.escape(str(next(iter(how.values()))))):
        run_sweep(sweep, tmp_path / "x", **how)


def test_the_directory_of_a_sweep_says_what_it_is(tmp_path):
    directory = partial(running.sweep_directory, tmp_path, "seeds")
    assert directory() == tmp_path / "seeds"
    tuned = directory(scheduler="asha", search="optuna", smoke=True)
    assert tuned == tmp_path / "seeds-asha-optuna-smoke"
    assert directory(name="mine", smoke=True) == tmp_path / "mine"


def test_failed_trials_are_a_failed_run(tmp_path):
    check_failures({}, tmp_path)
    with pytest.raises(RunFailed, match=r"2 of the sweep's trials failed: a, b\. Logs are in /"):
        check_failures({"a": "x", "b": "y"}, tmp_path)
    sweep, _ = load(str(_write(tmp_path, grid={"gamma": [0.9, 0.99]})))
    assert num_trials(sweep, None, 20) == 4 and num_trials(sweep, "optuna", 20) == 20


def test_a_setting_of_all_trials_has_to_take_effect_in_one_of_them(tmp_path):
    path = _write(tmp_path, grid={"weighting": ["exponential", "ranking"]}, seeds=1)
    sweep, _ = load(str(path), config={"epsilon": 0.2, "ranking_eta": 0.5})
    for settings in sweep.trials().values():
        assert settings.config["epsilon"] == 0.2
    with pytest.raises(ValueError, match=r"n_step=3 has no effect with policy_evaluation='td0'"):
        load(str(path), config={"n_step": 3})
