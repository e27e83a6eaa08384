"""How `rllib train` decides what to run: files, options, resumed runs."""

import os

import pytest

from rerpi_rllib import RERPIConfig
from rerpi_rllib.algorithm.checkpoint import describe_settings, describe_space
from rerpi_rllib.envs import Joined, rendering
from rerpi_rllib.runs import checkpoints, machine, planning
from rerpi_rllib.runs.errors import RunFailed
from rerpi_rllib.runs.files import parse_assignments, parse_json_object
from rerpi_rllib.runs.planning import Options, plan_run
from rerpi_rllib.runs.settings import RunSettings

FILE = """
algo: MPO
env: [Pendulum-v1, MountainCarContinuous-v0]
preset: compact
seed: 5
stop: {env_steps: 1000}
config: {epsilon: 0.2, gamma: 0.9}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file.yaml"
    path.write_text(FILE)
    return str(path)


def test_a_file_alone(file, tmp_path):
    said = []
    run = plan_run(Options(), file=file, storage_path=tmp_path, name="x", report=said.append)
    assert run.settings == RunSettings(
        *("MPO", "Pendulum-v1", "compact", {"epsilon": 0.2, "gamma": 0.9}, {"env_steps": 1000}, 5)
    )
    assert run.config.epsilon == 0.2 and run.config.fit == "coupled" and run.config.seed == 5
    assert run.directory == tmp_path / "x" and run.checkpoint is None
    assert said == [f"{file} is for 2 tasks: training on Pendulum-v1 (--env)."]


def test_options_win_over_the_file(file, tmp_path):
    said = []
    options = Options(
        algo="RERPI",
        env="MountainCarContinuous-v0",
        seed=0,
        stop={"updates": 3},
        config={"epsilon": 0.05, "num_env_runners": 3},
        num_env_runners=1,
        env_timeout=60.0,
        api_stack="old",
    )
    settings = plan_run(options, file=file, storage_path=tmp_path, report=said.append).settings
    assert (settings.algo, settings.env, settings.seed) == ("RERPI", "MountainCarContinuous-v0", 0)
    assert settings.preset == "compact" and settings.stop == {"updates": 3}
    assert settings.config == {
        "epsilon": 0.05,
        "gamma": 0.9,
        "num_env_runners": 1,
        "env_timeout_s": 60.0,
        "enable_rl_module_and_learner": False,
        "enable_env_runner_and_connector_v2": False,
    }
    assert said == []


def test_an_algorithm_alone_trains_on_the_default_task(tmp_path):
    said = []
    run = plan_run(Options(algo="RERPI"), storage_path=tmp_path, report=said.append)
    assert run.settings.env == "dm_control/cartpole-swingup-v0"
    assert run.directory.name.startswith("RERPI_cartpole-swingup-v0_2")
    assert said == ["No --env given: training on dm_control/cartpole-swingup-v0."]


def test_what_is_refused(file, tmp_path):
    with pytest.raises(ValueError, match="Say what to train"):
        plan_run(Options())
    with pytest.raises(ValueError, match="leave 'file FILE' out"):
        plan_run(Options(), file=file, resume=tmp_path)
    with pytest.raises(ValueError, match="'older' is not allowed: it must be new or old"):
        plan_run(Options(algo="RERPI", api_stack="older"))
    (tmp_path / "x" / "part-1" / "checkpoint_000000").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"holds a run already: --resume it, or choose a --name"):
        plan_run(Options(env="Pendulum-v1"), file=file, storage_path=tmp_path, name="x")


def _resume_from(monkeypatch, checkpoint):
    """Let every run be resumed from this checkpoint, whatever is in it."""
    monkeypatch.setattr(planning, "newest_checkpoint", lambda path, report: checkpoint)
    monkeypatch.setattr(planning, "check_resumable", lambda *given: None)
    monkeypatch.setattr(planning, "check_trusted", lambda checkpoint: None)
    monkeypatch.setattr(planning, "holds_replay", lambda checkpoint: True)


def test_a_resumed_run_keeps_its_settings_and_its_directory(tmp_path, monkeypatch):
    saved = RunSettings(env="Pendulum-v1", config={"epsilon": 0.2}, stop={"env_steps": 1000}, seed=7)
    saved.save(tmp_path / "run")
    checkpoint = tmp_path / "run" / "part-1" / "checkpoint_000000"
    checkpoint.mkdir(parents=True)
    checked = []
    _resume_from(monkeypatch, checkpoint)
    monkeypatch.setattr(planning, "check_resumable", lambda *given: checked.append(given))
    options = Options(stop={"env_steps": 2000}, config={"gamma": 0.9})
    run = plan_run(options, resume=tmp_path / "run")
    assert (run.directory, run.checkpoint) == (tmp_path / "run", checkpoint)
    assert run.settings.stop == {"env_steps": 2000} and run.settings.seed == 7
    assert run.settings.config == {"epsilon": 0.2, "gamma": 0.9}
    assert checked == [(checkpoint, run.config)]


def test_a_checkpoint_without_a_run_is_refused(tmp_path, monkeypatch):
    _resume_from(monkeypatch, tmp_path / "checkpoint_000000")
    with pytest.raises(ValueError, match=r"no run\.json above it"):
        plan_run(Options(), resume=tmp_path)


def test_the_hint_on_a_machine_without_a_gpu(monkeypatch):
    monkeypatch.setattr(machine, "update_seconds", lambda config: 0.123)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = RunSettings(env="Pendulum-v1").build_config(check_env=False)
    config.num_gpus_per_learner = 0
    hint = machine.no_gpu_hint(config, None)
    assert hint == (
        "No GPU: one update with batch 3072 takes about 0.12 s here. "
        "--preset compact is made for CPUs."
    )
    assert machine.no_gpu_hint(config, "compact") is None
    config.num_gpus_per_learner = 1
    assert machine.no_gpu_hint(config, None) is None


def test_what_a_user_types():
    assert parse_assignments(["a=1e-3", "b=[1, 2]", "c=true", "d=none", "e=x=y"]) == {
        **{"a": 1e-3, "b": [1, 2], "c": True, "d": None, "e": "x=y"}
    }
    assert parse_assignments(None) == {}
    for text in ("a", "=1"):
        with pytest.raises(ValueError, match="key=value"):
            parse_assignments([text])
    with pytest.raises(ValueError, match="--stop must be a JSON object"):
        parse_json_object("[1]", "--stop")


@pytest.mark.parametrize(
    "given,display,pictures,chosen",
    [
        (None, None, False, "disabled"),
        (None, None, True, "osmesa"),
        (None, ":0", False, None),
        (None, ":0", True, None),
        ("egl", None, False, "egl"),
        ("egl", None, True, "egl"),
        ("disabled", None, True, "osmesa"),
    ],
)
def test_how_mujoco_renders(given, display, pictures, chosen, monkeypatch):
    monkeypatch.setattr(
        rendering.ctypes.util, "find_library", lambda name: name if name == "OSMesa" else None
    )
    for name, value in (("MUJOCO_GL", given), ("DISPLAY", display)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    rendering.choose_backend(pictures)
    assert os.environ.get("MUJOCO_GL") == chosen


def test_a_resumed_run_may_change_a_choice_that_other_settings_belong_to(tmp_path, monkeypatch):
    before = {"policy_evaluation": "nstep", "n_step": 3}
    RunSettings(env="Pendulum-v1", config=before).save(tmp_path)
    checkpoint = tmp_path / "part-1" / "checkpoint_000001"
    checkpoint.mkdir(parents=True)
    _resume_from(monkeypatch, checkpoint)
    run = plan_run(Options(config={"policy_evaluation": "td0"}), resume=tmp_path)
    assert run.config.policy_evaluation == "td0" and run.config.n_step == 3
    with pytest.raises(ValueError, match="n_step=4 has no effect"):
        plan_run(Options(config={"policy_evaluation": "td0", "n_step": 4}), resume=tmp_path)


def _manifest(monkeypatch, **manifest):
    manifest |= {"env": "Pendulum-v1", "api_stack": "new"}
    monkeypatch.setattr(checkpoints.manifests, "read_manifest", lambda checkpoint: manifest)


def test_a_checkpoint_of_an_older_version_is_refused_in_one_line(tmp_path, monkeypatch):
    _manifest(monkeypatch, settings={})
    for use in (
        lambda: checkpoints.load_networks(tmp_path),
        lambda: checkpoints.check_resumable(tmp_path, RERPIConfig().environment("Pendulum-v1")),
    ):
        with pytest.raises(ValueError, match="older version"):
            use()


@pytest.mark.parametrize(
    "changed",
    [
        {"policy_layers": (8, 8)},
        {"critic_aggregation": "mean", "num_critics": 2},
        {"tanh_observations": True},
        {"normalize_observations": True},
        {"normalize_returns": True},
        {"network": "residual"},
        {"streams": "never"},
    ],
    ids=str,
)
def test_a_resumed_run_may_not_change_its_networks(tmp_path, monkeypatch, changed):
    config = RERPIConfig().environment("Pendulum-v1")
    space = Joined([-1.0, -1.0], [1.0, 1.0], {"proprioception": 1, "terrain": 1})
    spaces = {"observation": describe_space(space)}
    _manifest(monkeypatch, settings=describe_settings(config.to_dict()), spaces=spaces)
    checkpoints.check_resumable(tmp_path, config.copy())
    with pytest.raises(ValueError, match="A run cannot change them"):
        checkpoints.check_resumable(tmp_path, config.copy().training(**changed))


@pytest.mark.parametrize(
    "error,expected",
    [
        (Exception("The node timed out\nduring startup."), RunFailed),
        (TimeoutError("Timed out."), RunFailed),
        (ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:1"), ConnectionError),
    ],
    ids=repr,
)
def test_a_ray_that_does_not_start_fails_the_run(error, expected, monkeypatch):
    def init(**options):
        raise error

    monkeypatch.setattr(machine.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(machine.ray, "init", init)
    monkeypatch.setattr(machine.ray, "shutdown", lambda: None)
    monkeypatch.setattr(machine, "_set_environment", lambda: None)
    with pytest.raises(expected) as failed, machine.running_ray(RERPIConfig()):
        pass
    assert "\n" not in str(failed.value) and str(error).split("\n")[0] in str(failed.value)
