"""What ends a run before its time: signals, failures, and other processes that want its directory."""

import errno
import fcntl
import json
import os
import platform
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from conftest import SMALL
from ray.tune import TuneError
from ray.tune.experiment import Trial
from test_cli import RLLIB

from rerpi_rllib.cli import main
from rerpi_rllib.runs import process, training
from rerpi_rllib.runs.errors import EndedBySignal, RunFailed
from rerpi_rllib.runs.ownership import FILE_NAME, owned, refuse_owned
from rerpi_rllib.runs.planning import PlannedRun
from rerpi_rllib.runs.settings import RunSettings
from rerpi_rllib.runs.signals import EndSignals

# An environment that kills its process once, and fails for good in the next process.
CRASHING_ENV = (
    "import gymnasium as gym, numpy as np, os, pathlib, signal\n"
    "class Crashing(gym.Env):\n"
    "    observation_space = gym.spaces.Box(-1, 1, (2,))\n"
    "    action_space = gym.spaces.Box(-1, 1, (1,))\n"
    "    steps = 0\n"
    "    def __init__(self, mark):\n"
    "        self.mark = pathlib.Path(mark)\n"
    "    def reset(self, *, seed=None, options=None):\n"
    "        return np.zeros(2, np.float32), {}\n"
    "    def step(self, action):\n"
    "        Crashing.steps += 1\n"
    "        if Crashing.steps == 700 and not self.mark.exists():\n"
    "            self.mark.touch()\n"
    "            os.kill(os.getpid(), signal.SIGKILL)\n"
    "        if Crashing.steps > 350 and self.mark.exists() and self.mark.stat().st_size < 3:\n"
    "            with self.mark.open('a') as file:\n"
    "                file.write('x')\n"
    "            raise OSError('it is broken')\n"
    "        return np.zeros(2, np.float32), 0.0, False, Crashing.steps % 50 == 0, {}\n"
    "gym.register('Crashing-v0', Crashing)\n"
)


def test_a_directory_has_one_owner(tmp_path):
    directory, said = tmp_path / "a" / "run", []
    with owned(directory, said.append):
        refused = rf"{directory} is in use by process {os.getpid()} on {platform.node()} "
        with pytest.raises(ValueError, match=refused), owned(directory):
            pass
        with pytest.raises(ValueError, match=refused):
            refuse_owned(directory)
    refuse_owned(directory)
    with owned(directory, said.append):
        pass
    assert said == []


def test_a_sweep_and_its_trials_have_one_owner(tmp_path):
    (tmp_path / "sweep.json").touch()
    (tmp_path / "trial").mkdir()
    with owned(tmp_path / "trial"), pytest.raises(ValueError, match="in use"), owned(tmp_path):
        pass


def _leave_owner(directory: Path, **owner) -> None:
    left = {"pid": os.getpid(), "host": platform.node(), "since": "noon", "started": "0", **owner}
    (directory / FILE_NAME).write_text(json.dumps(left))


def test_what_a_killed_process_owned_is_taken_over(tmp_path):
    said = []
    _leave_owner(tmp_path, pid=2**22 + 1, host="elsewhere")
    with owned(tmp_path, said.append):
        pass
    (line,) = said
    assert str(2**22 + 1) in line and "elsewhere" in line and "has ended" in line


def test_owners_on_a_file_system_without_locks(tmp_path, monkeypatch):
    def no_locks(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    said = []
    with owned(tmp_path, said.append), pytest.raises(ValueError, match=FILE_NAME), owned(tmp_path):
        pass
    # The number of an ended process has come to another one.
    _leave_owner(tmp_path)
    with owned(tmp_path, said.append):
        pass
    assert len(said) == 1
    _leave_owner(tmp_path, host="elsewhere")
    with pytest.raises(ValueError, match=r"elsewhere.*delete"), owned(tmp_path):
        pass


def _checkpoint_times(cost: float, until: float, seconds_per_result: float = 5.0) -> list[float]:
    """Return when checkpoints were asked for in a run where each of them takes so many seconds."""
    now, asked = [0.0], []
    callback = training.CheckpointByTime(clock=lambda: now[0])
    trial = SimpleNamespace(trial_id="a")
    while now[0] < until:
        result = {}
        callback.on_trial_result(0, [trial], trial, result)
        if result:
            asked.append(now[0])
            now[0] += cost
            callback.on_checkpoint(0, [trial], trial, None)
        now[0] += seconds_per_result
    return asked


def test_checkpoints_come_early_and_every_minute():
    times = _checkpoint_times(0.1, 600)
    assert times[0] < 60
    assert all(60 <= b - a < 70 for a, b in pairwise(times)) and len(times) >= 9


def test_checkpoints_take_two_hundredths_of_the_time():
    times = _checkpoint_times(10.0, 20_000)
    assert times[0] < 60 and 30 <= len(times) <= 20_000 * 0.02 / 10 + 1
    assert len(_checkpoint_times(0.1, 600, seconds_per_result=100)) >= 5


@pytest.mark.parametrize(
    "log,reason",
    [
        (
            "Failure # 1 (occurred at 2026)\nray::RERPI\nOSError: on fire.\nRuntimeError: x",
            "OSError: on fire",
        ),
        (
            "Failure # 1 (occurred at 2026)\nTraceback (most recent call last):\n  f()\nNoArms",
            "NoArms",
        ),
        ("Failure # 1 (occurred at 2026)\nCannot allocate.", "Cannot allocate"),
        ("Failure # 1 (occurred at 2026)\n", "it ended without an error message"),
        (
            "Failure # 1 (occurred at 2026)\nThe actor died unexpectedly before finishing this task."
            "\n\tclass_name: RERPI\n\tpid: 77\n\tip: 1.2.3.4\nThe actor is dead because",
            "the process that trains (pid 77) died: it was killed, for instance because memory ran "
            "out, or it crashed",
        ),
    ],
)
def test_the_reason_of_a_failure(log, reason):
    assert training._reason(log) == reason


@pytest.fixture
def planned(tmp_path):
    """Return a run that is resumed with other settings."""
    RunSettings(env="Pendulum-v1", stop={"env_steps": 1}).save(tmp_path / "run")
    settings = RunSettings(env="Pendulum-v1", stop={"env_steps": 2})
    checkpoint = tmp_path / "run" / "part-1" / "checkpoint_000000"
    checkpoint.mkdir(parents=True)
    config = settings.build_config(check_env=False)
    return PlannedRun(settings, config, tmp_path / "run", checkpoint)


def _fail(monkeypatch, results):
    """Let the parts of a run fail, each with a result and a checkpoint or without; return them."""
    parts = []

    def train_part(run, part, stop, signals, watching, report):
        part.failure, part.has_result = "OSError: on fire", results[len(parts)]
        parts.append(part)
        if part.has_result:
            (part.directory / "checkpoint_000007").mkdir(parents=True)

    def newest(path):
        found = sorted(path.glob("checkpoint_*"))
        if not found:
            raise ValueError("none")
        return found[-1]

    monkeypatch.setattr(training, "_train_part", train_part)
    monkeypatch.setattr(training, "newest_checkpoint", newest)
    monkeypatch.setattr(training, "read_manifest", lambda path: {"env_steps": 12_000})
    return parts


def test_a_failed_run_goes_on_from_its_newest_checkpoint(planned, monkeypatch):
    parts, said = _fail(monkeypatch, [True, True, True]), []
    with pytest.raises(RunFailed, match=r"OSError: on fire\. `rllib train --resume .*Its log is "):
        training.train(planned, max_failures=2, report=said.append)
    assert [part.directory.name for part in parts] == ["part-2", "part-3", "part-4"]
    starts = [part.start.relative_to(planned.directory).as_posix() for part in parts]
    assert starts == [f"part-{n}/checkpoint_00000{i}" for n, i in ((1, 0), (2, 7), (3, 7))]
    assert said[0] == (
        "The run failed: OSError: on fire. Going on from part-2/checkpoint_000007 (env step 12,000): "
        "attempt 1 of 2."
    )
    assert len(said) == 2


def test_what_fails_at_once_is_tried_twice(planned, monkeypatch):
    parts = _fail(monkeypatch, [True, False, False, True])
    # The last part has not come to make its directory.
    with pytest.raises(RunFailed, match=rf"Its log is {planned.directory}\.$"):
        training.train(planned, max_failures=9, report=lambda text: None)
    assert len(parts) == 3
    parts = _fail(monkeypatch, [True])
    with pytest.raises(RunFailed):
        training.train(planned, max_failures=0)
    assert len(parts) == 1


def test_a_resumed_run_that_does_not_begin_keeps_its_settings(planned, monkeypatch):
    def run(*arguments, **options):
        raise TuneError("Traceback (most recent call last):\nOSError: on fire")

    monkeypatch.setattr(training.tune, "run", run)
    monkeypatch.setattr(training, "running_ray", lambda config, dashboard: nullcontext())
    monkeypatch.setattr(training, "load_algorithms", lambda: None)
    monkeypatch.setattr(training, "read_manifest", lambda path: {"env_steps": 1})
    before = (planned.directory / "run.json").read_text()
    with pytest.raises(RunFailed, match="on fire"):
        training.train(planned, report=lambda text: None)
    assert (planned.directory / "run.json").read_text() == before
    training._Recorder(planned, training._Part(planned.directory, None)).on_trial_result()
    assert RunSettings.from_file(planned.directory / "run.json").stop == {"env_steps": 2}


def test_the_reason_of_a_failure_is_read_while_ray_runs(planned, monkeypatch):
    """On a full disk it is only in the directory of Ray's session."""
    running = []

    @contextmanager
    def running_ray(config, dashboard):
        running.append(True)
        yield
        running.clear()

    class FailedTrial:
        status, get_error = Trial.ERROR, Mock(return_value=None)

        @property
        def error_file(self):
            assert running
            return planned.directory / "elsewhere.txt"

    (planned.directory / "elsewhere.txt").write_text("OSError: No space left on device")
    analysis = SimpleNamespace(trials=[FailedTrial()])
    monkeypatch.setattr(training.tune, "run", lambda *arguments, **options: analysis)
    monkeypatch.setattr(training, "running_ray", running_ray)
    monkeypatch.setattr(training, "load_algorithms", lambda: None)
    monkeypatch.setattr(training, "read_manifest", lambda path: {"env_steps": 1})
    with pytest.raises(RunFailed, match="No space left"):
        training.train(planned, report=lambda text: None)


def test_signals_come_back_to_what_they_were(capfd):
    received = []
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with EndSignals("bye", received.append):
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, "nohup has no effect"
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, ignored)
    assert received == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) == before
    assert capfd.readouterr().err == "rllib: SIGTERM: bye\n"


@pytest.mark.parametrize(
    "error,code,words",
    [(KeyboardInterrupt(), 130, "Aborted"), (EndedBySignal(15), 143, "Ended by SIGTERM")],
)
def test_a_command_that_is_interrupted_says_so(error, code, words, monkeypatch, capsys):
    def interrupted(pictures=False):
        raise error

    monkeypatch.setattr(process, "prepare_process", interrupted)
    monkeypatch.setattr(sys, "argv", ["rllib", "list"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    assert capsys.readouterr().err == f"rllib: {words}.\n"


def _wait_for(condition, process):
    deadline = time.monotonic() + 120
    while not condition() and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.2)


def test_sigterm_ends_with_a_checkpoint_and_nobody_else_gets_in(tmp_path, monkeypatch, capsys):
    command = [
        *("train", "--algo", "RERPI", "--env", "Pendulum-v1", "--config", json.dumps(SMALL)),
        *("--set", "min_time_s_per_iteration=1", "--storage-path", str(tmp_path), "--name", "x"),
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*RLLIB, *command], start_new_session=True, **pipes)
    results = tmp_path / "x" / "part-1" / "result.json"
    _wait_for(lambda: results.exists() and results.read_text(), process)
    monkeypatch.setattr(sys, "argv", ["rllib", *command])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert f"in use by process {process.pid} on " in capsys.readouterr().err
    os.killpg(process.pid, signal.SIGTERM)  # Ray's processes get it, too.
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 143, errors
    (line,) = errors.splitlines()
    assert "SIGTERM" in line and "Stopped by SIGTERM" in output
    assert f"rllib train --resume {tmp_path / 'x'}" in output
    assert list(results.parent.glob("checkpoint_*"))
    with owned(tmp_path / "x", pytest.fail):
        pass


def test_a_killed_trial_goes_on_from_its_checkpoint_and_one_that_fails_from_there(tmp_path):
    (tmp_path / "crashing.py").write_text(CRASHING_ENV)
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    early = (  # As if the first checkpoint were due at once.
        "import rerpi_rllib.runs.training as t; t._SECONDS_TO_FIRST_CHECKPOINT = 0.0; "
        "from rerpi_rllib.cli import main; main()"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-c", early, "train", "--algo", "RERPI", "--num-env-runners", "0"),
            *("--env", "crashing:Crashing-v0", "--config", json.dumps(SMALL), "--name", "x"),
            *("--set", f"env_config={{'mark': {str(tmp_path / 'mark')!r}}}"),
            *("--set", "min_sample_timesteps_per_iteration=200"),
            *("--stop", '{"env_steps": 1200}', "--storage-path", str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "Going on from part-1/checkpoint_000000 (env step 200): attempt 1 of 3." in done.stdout
    assert " died: it was killed" in done.stdout
    # An error, unlike a kill, leaves a checkpoint of its moment.
    assert "failed 3 times in a row: OSError: it is broken. Going on from part-2/" in done.stdout
    assert "(env step 550): attempt 2 of 3." in done.stdout
    steps = {
        part: [
            json.loads(row)["num_env_steps_sampled_lifetime"]
            for row in (tmp_path / "x" / part / "result.json").read_text().splitlines()
        ]
        for part in ("part-2", "part-3")
    }
    assert steps["part-2"] == [400] and steps["part-3"][0] == 750 and steps["part-3"][-1] >= 1200
