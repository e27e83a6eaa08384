"""The command line as a user types it; nearly every call is a process of its own."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import SMALL, SMALL_DISCRETE

from rerpi_rllib.cli import main

ROOT = Path(__file__).parents[1]
RLLIB = [sys.executable, "-c", "from rerpi_rllib.cli import main; main()"]
FAILING_ENV = (
    "import gymnasium as gym, numpy as np\n"
    "class Failing(gym.Env):\n"
    "    observation_space = gym.spaces.Box(-1, 1, (2,))\n"
    "    action_space = gym.spaces.Box(-1, 1, (1,))\n"
    "    def reset(self, *, seed=None, options=None):\n"
    "        return np.zeros(2, np.float32), {}\n"
    "    def step(self, action):\n"
    "        raise OSError('the robot is on fire')\n"
    "gym.register('Failing-v0', Failing)\n"
)


def _rllib(*arguments, cwd=ROOT, timeout=300):
    return subprocess.run(
        [*RLLIB, *map(str, arguments)], capture_output=True, text=True, cwd=cwd, timeout=timeout
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the directory of a finished training run and what the run printed."""
    storage = tmp_path_factory.mktemp("storage")
    done = _rllib(
        *("train", "--algo", "RERPI", "--env", "Pendulum-v1", "--seed", 1, "--name", "pendulum"),
        *("--config", json.dumps(SMALL), "--set", "epsilon_mu=1e-3", "--num-env-runners", 0),
        *("--stop", '{"env_steps": 1000}', "--storage-path", storage),
    )
    assert done.returncode == 0, done.stderr
    return storage / "pendulum", done.stdout


def _rows(run_directory: Path) -> list[dict]:
    files = sorted(run_directory.glob("**/result.json"), key=lambda p: p.stat().st_mtime)
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def test_a_run_leaves_results_checkpoint_plot_and_the_next_command(run):
    directory, output = run
    assert (directory / "curves.png").stat().st_size > 10_000
    for pattern in ("progress.csv", "result.json", "events.out.tfevents.*", "checkpoint_*"):
        assert list(directory.glob(f"*/{pattern}")), pattern
    (row,) = _rows(directory)
    assert row["num_env_steps_sampled_lifetime"] == 1000 and row["config"]["epsilon_mu"] == 1e-3
    assert "checkpoint" in output and "curves.png" in output and "rllib evaluate" in output


def _restored_from_python(directory: Path) -> str:
    """Restore a run in a new process that knows only its checkpoint; return what it prints."""
    (checkpoint,) = directory.glob("part-1/checkpoint_*")
    code = "import sys; from rerpi_rllib import RERPI; algo = RERPI.from_checkpoint(sys.argv[1]); "
    code += "print(algo.config.env, len(algo.replay))"
    done = subprocess.run(
        [sys.executable, "-c", code, checkpoint], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_a_checkpoint_of_a_run_is_restored_from_python(run):
    assert _restored_from_python(run[0]) == "Pendulum-v1 1000"


def test_evaluate(run):
    directory, _ = run
    done = _rllib("evaluate", directory, "--episodes", 2, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result) == {
        *("env", "episodes", "return_mean", "return_std", "returns", "episode_lengths")
    }
    assert result["env"] == "Pendulum-v1" and result["episode_lengths"] == [200, 200]
    again = json.loads(_rllib("evaluate", directory, "--episodes", 2, "--json").stdout)
    assert again == result
    other = _rllib("evaluate", directory, "--episodes", 2, "--stochastic", "--json")
    assert json.loads(other.stdout)["returns"] != result["returns"]
    table = _rllib("evaluate", directory, "--episodes", 1).stdout
    assert "episode   1" in table and "mean" in table


@pytest.mark.parametrize("video", ["/dev/null/x.mp4", "x.cats", ".", ""])
def test_a_video_that_cannot_be_written(run, video, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MUJOCO_GL", os.environ["MUJOCO_GL"])  # Making pictures changes it.
    monkeypatch.setattr(sys, "argv", ["rllib", "evaluate", str(run[0]), "--video", video])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    "broken,words",
    [
        ({}, ["File too large", ".owner"]),  # As on a full disk.
        ({"RAY_TMPDIR": "/dev/null/x"}, ["/dev/null"]),
        ({"HOME": "/dev/null/x"}, ["/dev/null/x"]),  # Ray needs it.
    ],
    ids=str,
)
def test_a_machine_that_cannot_be_written_to(broken, words, tmp_path):
    def limit():
        if not broken:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    done = subprocess.run(
        [
            *(*RLLIB, "train", "--algo", "RERPI", "--env", "Pendulum-v1", "--num-env-runners", "0"),
            *("--config", json.dumps(SMALL), "--stop", '{"iterations": 1}', "--name", "x"),
            *("--storage-path", str(tmp_path), "--quiet"),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        env={**os.environ, **broken},
        preexec_fn=limit,
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert all(word in line for word in words), line


def test_export_inspect_and_enjoy(run, tmp_path, monkeypatch, capsys):
    directory, _ = run

    def rllib(*arguments):  # In this process, which is quicker.
        monkeypatch.setattr(sys, "argv", ["rllib", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        return capsys.readouterr().out

    found = json.loads(rllib("inspect", directory, "--json"))
    counters = {"algo": "RERPI", "env": "Pendulum-v1", "env_steps": 1000, "updates": 500}
    assert counters | {"replay_size": 1000} == {k: found[k] for k in [*counters, "replay_size"]}
    assert found["settings"] == {**SMALL, "epsilon_mu": 1e-3, "seed": 1, "num_env_runners": 0}
    assert found["versions"]["ray"] and found["is_own"]
    assert found["networks"]["policy"]["matrices"]["body.0"] == [3, 16]
    assert found["metrics"]["kl_mu"] > 0.0 and found["files"]["networks.safetensors"] > 1000
    text = rllib("inspect", directory)
    assert "env steps 1,000" in text and "epsilon_mu" in text and "kl_mu" in text

    policy = tmp_path / "policy"
    assert "rllib enjoy" in rllib("export", directory, policy, "--episodes", 2)
    assert {p.name for p in policy.iterdir()} == {
        *("policy.safetensors", "policy.json", "README.md", "curve.png")
    }
    card = (policy / "README.md").read_text()
    assert "rllib train --algo RERPI --env Pendulum-v1" in card and "curve.png" in card
    played = json.loads(rllib("enjoy", policy, "--episodes", 2, "--json"))
    assert (
        played["returns"] == json.loads((policy / "policy.json").read_text())["evaluation"]["returns"]
    )
    again = json.loads(rllib("evaluate", directory, "--episodes", 2, "--json"))
    assert played["returns"] == pytest.approx(again["returns"], rel=1e-3)


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["enjoy", "walker-wlak"], ["walker-wlak", "Did you mean 'walker-walk'?"]),
        (["export", "missing", "x"], ["missing"]),
        (["export", ".", "x", "--episodes", "-1"], ["--episodes -1", "from 0 to"]),
        (["inspect", "missing"], ["missing"]),
    ],
    ids=str,
)
def test_wrong_use_of_what_reads_policies(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["rllib", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert all(word in line for word in words), line


def test_resume_goes_on_where_the_run_stopped(run):
    directory, _ = run
    done = _rllib("train", "--resume", directory, "--stop", '{"env_steps": 2000}', "--quiet")
    assert done.returncode == 0, done.stderr
    steps = [row["num_env_steps_sampled_lifetime"] for row in _rows(directory)]
    updates = [row["num_updates_lifetime"] for row in _rows(directory)]
    assert steps == [1000, 2000] and updates == [500, 1000]
    assert _rows(directory)[-1]["config"]["epsilon_mu"] == 1e-3
    figure = directory / "again.png"
    assert _rllib("plot", directory, "--output", figure).returncode == 0
    lines = figure.with_suffix(".csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["env_steps", "1000", "2000"]


def test_interrupt_ends_with_a_checkpoint(tmp_path):
    process = subprocess.Popen(
        [
            *(*RLLIB, "train", "--algo", "RERPI", "--env", "Pendulum-v1", "--name", "x"),
            *("--config", json.dumps(SMALL), "--storage-path", str(tmp_path)),
            *("--set", "min_time_s_per_iteration=1"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    results = tmp_path / "x" / "part-1" / "result.json"
    deadline = time.monotonic() + 120
    while not (results.exists() and results.read_text()) and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "Ctrl-C" in output and "checkpoint_" in output
    assert _rllib("evaluate", tmp_path / "x", "--episodes", 1).returncode == 0


def test_a_file_with_options_on_top(tmp_path):
    settings = tmp_path / "pendulum.yaml"
    settings.write_text(
        "algo: RERPI\nenv: Pendulum-v1\npreset: compact\nseed: 5\n"
        "stop: {env_steps: 100000}\n"
        "config: {num_env_runners: 0, epsilon_mu: 2e-3, epsilon: 0.2}\n"
    )
    done = _rllib(
        *("train", "file", settings, "--stop", '{"iterations": 1}', "--set", "epsilon=0.05"),
        *("--storage-path", tmp_path, "--name", "run"),
    )
    assert done.returncode == 0, done.stderr
    (row,) = _rows(tmp_path / "run")
    config = row["config"]
    assert (config["epsilon"], config["epsilon_mu"], config["seed"]) == (0.05, 0.002, 5)
    assert config["train_batch_size"] == 128


def test_a_failing_environment_is_a_failed_run(tmp_path):
    (tmp_path / "failing.py").write_text(FAILING_ENV)
    command = [
        *(*RLLIB, "train", "--algo", "RERPI", "--env", "failing:Failing-v0", "--name", "x"),
        *("--preset", "compact", "--storage-path", str(tmp_path)),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        timeout=300,
    )
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert "on fire" in line
    log = Path(line.split("Its log is ")[1].rstrip("."))
    assert "on fire" in log.read_text()


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["--algo", "RERPY"], ["RERPY", "RERPI"]),
        (["--env", "dm_control/cheetah-rum-v0"], ["cheetah-rum", "dm_control/cheetah-run-v0"]),
        (["--env", "CartPole-v1"], ["CartPole-v1", "Discrete(2)", "policy='categorical'"]),
        (["--algo", "SVG0", "--set", "policy=mixture"], ["fit='value_gradient'", "'mixture'"]),
        (["--set", "epsilon=0"], ["epsilon=0", "above 0"]),
        (["--set", "epsilon_nu=1"], ["epsilon_nu", "epsilon_mu"]),
        (["--set", "epsilon"], ["epsilon", "key=value"]),
        (["--config", "{epsilon: 1}"], ["--config", "JSON"]),
        (["--stop", '{"steps": 1}'], ["steps", "env_steps"]),
        (["--preset", "compct"], ["compct", "compact"]),
        (["--set", "replay_capacity=100"], ["3072", "replay_capacity=100"]),
        (["--set", "train_batch_size=abc"], ["train_batch_size='abc'"]),
        (["--set", "normalize_actions=false"], ["normalize_actions=False"]),
        (["--num-env-runners", "-1"], ["num_env_runners=-1"]),
        (["--num-gpus", "64"], ["64 GPU"]),
        (["--env", "Ant-v2"], ["Ant-v2"]),
        (["--env", "dm_control/reach_site_vision-v0"], ["reach_site_vision", "MUJOCO_GL"]),
        (["--set", 'env_config={"cats": 9}'], ["cats"]),
        (["--seed", "x"], ["--seed", "integer"]),
        (["--api-stack", "older"], ["older", "new or old"]),
        (["--nonsense"], ["--nonsense"]),
        (["file", "missing.yaml"], ["missing.yaml"]),
        (["--resume", "missing"], ["missing"]),
        (["file", "quickstart", "--resume", "missing"], ["--resume", "file FILE"]),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(arguments, words, tmp_path, monkeypatch, capsys):
    defaults = ["--env", "Pendulum-v1"] if "--env" not in arguments else []
    algo = ["--algo", "RERPI"] if "--algo" not in arguments else []
    command = ["rllib", "train", *algo, *defaults, *arguments, "--storage-path", tmp_path]
    # These run in this process: there are many of them, and starting a process takes seconds.
    monkeypatch.setattr(sys, "argv", [str(word) for word in command])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert all(word in line for word in words), line
    assert not list(tmp_path.glob("**/checkpoint_*"))


def test_baseline_with_discrete_actions(tmp_path):
    """Use another algorithm and another policy, from the command line to the evaluation."""
    done = _rllib(
        *("train", "--algo", "MPO", "--env", "CartPole-v1", "--name", "x", "--num-env-runners", 0),
        *("--config", json.dumps(SMALL_DISCRETE), "--set", "policy=categorical", "--quiet"),
        *("--stop", '{"env_steps": 500}', "--storage-path", tmp_path),
    )
    assert done.returncode == 0, done.stderr
    played = _rllib("evaluate", tmp_path / "x", "--episodes", 2, "--stochastic", "--json")
    result = json.loads(played.stdout)
    assert result["returns"] == [float(n) for n in result["episode_lengths"]]
    header = (tmp_path / "x" / "curves.csv").read_text().splitlines()[0].split(",")
    assert {"kl_pi", "alpha_pi", "policy_entropy"} <= set(header) and "kl_mu" not in header


def test_old_api_stack(tmp_path):
    done = _rllib(
        *("train", "--algo", "RERPI", "--env", "Pendulum-v1", "--name", "x", "--api-stack", "old"),
        *("--config", json.dumps(SMALL), "--num-env-runners", 0),
        *("--stop", '{"env_steps": 1000}', "--storage-path", tmp_path),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(_rllib("evaluate", tmp_path / "x", "--episodes", 1, "--json").stdout)
    assert result["env"] == "Pendulum-v1" and result["episode_lengths"] == [200]
    assert _restored_from_python(tmp_path / "x") == "Pendulum-v1 1000"
    done = _rllib("train", "--resume", tmp_path / "x", "--stop", '{"env_steps": 2000}', "--quiet")
    assert done.returncode == 0, done.stderr
    rows = _rows(tmp_path / "x")
    assert rows[-1]["num_env_steps_sampled_lifetime"] == 2000
    assert "learner_stats" in rows[-1]["info"]["learner"]["default_policy"]
    for changed in (
        ["--api-stack", "new"],
        ["--set", "policy_layers=[8, 8]"],
        ["--env", "MountainCarContinuous-v0"],
    ):
        done = _rllib("train", "--resume", tmp_path / "x", *changed)
        assert done.returncode == 2 and "a run cannot change" in done.stderr.lower()


def test_unknown_figure():
    done = _rllib("figure", "landscpe")
    assert done.returncode == 2
    assert "landscpe" in done.stderr and "standard-functions" in done.stderr


def _ray_processes() -> set[int]:
    found = subprocess.run(["pgrep", "-f", "raylet|gcs_server|ray::"], capture_output=True, text=True)
    return {int(pid) for pid in found.stdout.split()}


def test_nothing_is_left_running(tmp_path):
    before = _ray_processes()
    assert _rllib("train", "--algo", "RERPI", "--set", "epsilon=0").returncode == 2
    assert _rllib("train", "--algo", "RERPI", "--num-gpus", 64).returncode == 2
    deadline = time.monotonic() + 30
    while _ray_processes() - before and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not _ray_processes() - before


def test_help_and_seed_in_config(tmp_path):
    assert "train" in _rllib().stdout
    assert "--resume" in _rllib("train", "--help").stdout

    from rerpi_rllib.runs.settings import RunSettings

    settings = RunSettings(env="Pendulum-v1", config={"seed": 5})
    assert settings.build_config().seed == 5


def test_a_cut_checkpoint_is_passed_over(run, tmp_path):
    from rerpi_rllib.runs.checkpoints import newest_checkpoint

    whole = newest_checkpoint(run[0])
    good, cut = (tmp_path / "part-1" / f"checkpoint_{number:06d}" for number in (1, 2))
    shutil.copytree(whole.parents[1] / "replay", tmp_path / "replay")
    for copy in (good, cut):
        shutil.copytree(whole, copy)
    assert newest_checkpoint(tmp_path) == cut
    with open(cut / "algorithm_state.pkl", "r+b") as file:
        file.truncate(100)
    assert newest_checkpoint(tmp_path) == good


def test_list():
    assert _rllib("list", "algos").stdout.split() == ["RERPI", "MPO", "SVG0", "DDPG"]
    assert "dm_control/cheetah-run-v0" in _rllib("list", "envs").stdout.split()
    assert "quickstart.yaml" in _rllib("list", "configs").stdout
    everything = _rllib("list").stdout
    assert all(f"{kind}:" in everything for kind in ("algos", "envs", "configs", "figures"))
    assert _rllib("list", "cats").returncode == 2


def test_ray_of_a_local_run_listens_on_localhost():
    code = "from rerpi_rllib.runs.process import prepare_process; prepare_process()\n"
    code += "import ray; from rerpi_rllib.runs import machine; from rerpi_rllib import RERPIConfig\n"
    code += "with machine.running_ray(RERPIConfig()):\n"
    code += "    address = ray.get_runtime_context().gcs_address\n"
    code += "    print(ray.nodes()[0]['NodeManagerAddress'], address.split(':')[0])\n"
    code += "    port = int(address.split(':')[1])\n"
    code += "    lines = [*open('/proc/net/tcp'), *open('/proc/net/tcp6')][1:]\n"
    code += "    listening = [line.split()[1] for line in lines if line.split()[3] == '0A']\n"
    code += "    print({a.split(':')[0][-8:] for a in listening if a.endswith(f':{port:04X}')})\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["127.0.0.1", "127.0.0.1", "{'0100007F'}"]
