"""Policies outside of Ray: in folders of tensors and JSON, as ONNX, and the zoo."""

import json
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import on_old_stack, tiny_config

from rerpi_rllib import envs, load_policy
from rerpi_rllib.algorithm.checkpoint import describe_space
from rerpi_rllib.algorithm.env_runner import ToEnvUnits
from rerpi_rllib.algorithm.networks import act, build_networks, model_settings
from rerpi_rllib.analysis.export import export
from rerpi_rllib.core.policies import POLICIES, describe_policy
from rerpi_rllib.envs.playing import play
from rerpi_rllib.runs.evaluation import evaluate
from rerpi_rllib.runs.files import ZOO
from rerpi_rllib.runs.zoo import zoo_tasks
from rerpi_rllib.shipping import onnx_file
from rerpi_rllib.shipping.policy import save_policy

ROOT = Path(__file__).parents[1]
PARTS = envs.Joined(np.full(7, -np.inf), np.full(7, np.inf), {"place": 4, "speed": 3})
PLAIN = gym.spaces.Box(-np.inf, np.inf, (7,), np.float32)
UNEVEN = gym.spaces.Box(np.array([-2.0, 0.0, 5.0]), np.array([1.0, 0.1, 9.0]), dtype=np.float64)
NO_BOUNDS = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)


def _ship(directory, policy, network="paper", actions=UNEVEN, observations=PLAIN, **settings):
    """Write a policy whose weights and statistics are not those of an untrained one."""
    if POLICIES[policy].is_discrete:
        actions = gym.spaces.Discrete(3)
    config = tiny_config(policy=policy, network=network, normalize_observations=True, **settings)
    torch.manual_seed(1)
    nets = build_networks(observations, actions, model_settings(vars(config)))
    for parameter in nets.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=2.0 * parameter.shape[1] ** -0.5)
    nets.set_observation_moments(torch.randn(7), torch.rand(7) + 0.5)
    spaces = {"observation": describe_space(observations), "action": describe_space(actions)}
    save_policy(directory, nets.policy, {"network": describe_policy(nets.policy), "spaces": spaces})
    return nets, ToEnvUnits(actions)


def _observations(n=50):
    return np.random.default_rng(0).standard_normal((n, 7)).astype(np.float32)


@pytest.mark.parametrize("network", ["paper", "residual"])
@pytest.mark.parametrize("policy", POLICIES)
def test_it_acts_as_the_networks_of_the_checkpoint(policy, network, tmp_path):
    nets, to_env_units = _ship(tmp_path, policy, network)
    shipped, observations = load_policy(tmp_path), _observations()
    with torch.no_grad():
        expected = to_env_units(act(nets, torch.from_numpy(observations), explore=False)[0].numpy())
    actions = shipped(observations)
    assert actions.dtype == expected.dtype and actions.shape == expected.shape
    np.testing.assert_allclose(actions, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose([shipped(o) for o in observations], expected, rtol=1e-5, atol=1e-5)
    assert len(np.unique(actions, axis=0)) > 1
    if POLICIES[policy].is_discrete:
        assert type(shipped(observations[0])) is int
    else:
        assert all(UNEVEN.contains(shipped(o)) for o in observations)
        assert (actions == UNEVEN.high).any() or (actions == UNEVEN.low).any()


def test_actions_without_bounds_stay_as_they_are(tmp_path):
    nets, _ = _ship(tmp_path, "gaussian", actions=NO_BOUNDS)
    observations = _observations()
    with torch.no_grad():
        expected = nets.policy(torch.from_numpy(observations)).mode.numpy()
    np.testing.assert_allclose(load_policy(tmp_path)(observations), expected, rtol=1e-5, atol=1e-5)
    assert np.abs(expected).max() > 1.0


def test_an_observation_may_come_in_its_parts(tmp_path):
    _ship(tmp_path, "gaussian", observations=PARTS, streams="always", policy_stream_layers=[8, 8])
    shipped, (observation,) = load_policy(tmp_path), _observations(1)
    parts = {"speed": observation[4:], "place": observation[:4].reshape(2, 2)}
    np.testing.assert_array_equal(shipped(parts), shipped(observation))
    with pytest.raises(ValueError, match="place has 3 numbers; it must have 4"):
        shipped({"place": np.zeros(3), "speed": np.zeros(3)})
    with pytest.raises(ValueError, match=r"parts place; .* parts place, speed"):
        shipped({"place": np.zeros(4)})


def test_stochastic_actions(tmp_path):
    _ship(tmp_path, "gaussian", actions=NO_BOUNDS)
    greedy, (observation,) = load_policy(tmp_path), _observations(1)
    torch.manual_seed(5)
    stochastic = load_policy(tmp_path, stochastic=True)
    drawn = [stochastic(observation) for _ in range(500)]
    torch.manual_seed(5)
    np.testing.assert_array_equal(stochastic(observation), drawn[0])
    spread = np.std(drawn, axis=0)
    assert (spread > 0.0).all()
    assert (np.abs(np.mean(drawn, axis=0) - greedy(observation)) < 0.25 * spread).all()


@pytest.mark.parametrize(
    "observation,words",
    [
        (np.zeros(6), ["(6,)", "(7,)"]),
        (np.zeros((7, 2)), ["(7, 2)", "(..., 7)"]),
        (0.0, ["()", "(7,)"]),
        ([0, 0, np.nan, 0, 0, 0, 0], ["nan", "[2]"]),
        (np.full((2, 7), np.inf), ["inf", "[0, 0]"]),
        ({}, ["parts none"]),
    ],
    ids=str,
)
def test_a_wrong_observation_is_refused(observation, words, tmp_path):
    _ship(tmp_path, "gaussian")
    with pytest.raises(ValueError) as refused:
        load_policy(tmp_path)(observation)
    assert all(word in str(refused.value) for word in words), refused.value


def test_what_cannot_be_loaded_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no policy\.json.*rllib export"):
        load_policy(tmp_path)
    _ship(tmp_path, "gaussian")
    tensors = tmp_path / "policy.safetensors"
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"not the file that policy\.json is about"):
        load_policy(tmp_path)
    tensors.write_bytes(whole)
    description = json.loads((tmp_path / "policy.json").read_text())
    for key, value in {"kind": "os.system", "observation_size": 8}.items():
        wrong = {**description, "network": {**description["network"], key: value}}
        (tmp_path / "policy.json").write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match="cannot be loaded"):
            load_policy(tmp_path)
    (tmp_path / "policy.json").write_text(json.dumps({**description, "format": 2}))
    with pytest.raises(ValueError, match="format 1"):
        load_policy(tmp_path)


# Lets a process import nothing but the standard library and what is named, and unpickle nothing.
ONLY = """
import importlib.abc, sys

class Only(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if top not in ALLOWED and top not in sys.stdlib_module_names:
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)

def refuse(event, arguments):
    if event == "pickle.find_class":
        raise RuntimeError(f"unpickled {arguments}")

sys.meta_path.insert(0, Only())
sys.addaudithook(refuse)
"""
# Torch itself needs the names after it.
OF_TORCH = "torch torchgen functorch typing_extensions sympy mpmath networkx jinja2 markupsafe"
OF_TORCH += " filelock fsspec setuptools _distutils_hack"


def _run_alone(code, allowed, *arguments, stdin=""):
    """Run code in a process where only some packages are installed; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", f"ALLOWED = {set(allowed.split())}\n{ONLY}\n{code}", *arguments],
        capture_output=True,
        text=True,
        input=stdin,
        cwd=ROOT,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_torch_numpy_and_safetensors_are_enough_and_nothing_is_unpickled(tmp_path):
    _ship(tmp_path, "mixture", "residual")
    code = """
import json, rerpi_rllib
policy = rerpi_rllib.load_policy(sys.argv[1])
print(json.dumps([policy(line).tolist() for line in json.load(sys.stdin)]))
"""
    observations = _observations(3)
    given = json.dumps(observations.tolist())
    printed = _run_alone(
        code, f"rerpi_rllib numpy safetensors packaging {OF_TORCH}", tmp_path, stdin=given
    )
    expected = load_policy(tmp_path)(observations)
    np.testing.assert_allclose(json.loads(printed), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "policy,network,streams",
    [
        ("gaussian", "paper", "always"),
        ("mixture", "residual", "never"),
        ("categorical", "paper", "never"),
    ],
)
def test_onnx_gives_the_same_actions_without_torch(policy, network, streams, tmp_path):
    _ship(tmp_path, policy, network, observations=PARTS, streams=streams)
    shipped, path, observations = (
        load_policy(tmp_path),
        tmp_path / "policy.onnx",
        _observations(1_000),
    )
    onnx_file.write_onnx(shipped, path)
    lines = "".join(json.dumps(o.tolist()) + "\n" for o in [*observations, observations])
    code = "import runpy; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
    printed = _run_alone(
        code,
        "numpy onnxruntime google flatbuffers packaging",
        ROOT / "examples" / "onnx_policy.py",
        path,
        stdin=lines,
    )
    *single, batch = map(json.loads, printed.splitlines())
    np.testing.assert_allclose(single, shipped(observations), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(batch, shipped(observations), rtol=1e-5, atol=1e-5)
    if policy == "gaussian":  # The comparison finds another policy's file.
        (tmp_path / "other").mkdir()
        _ship(tmp_path / "other", "gaussian", "residual")
        with pytest.raises(RuntimeError, match="differs from torch by"):
            onnx_file._compare(load_policy(tmp_path / "other"), path)


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("stack", ["new", "old"])
def test_an_algorithm_saved_from_python_is_exported(stack, tmp_path):
    config = tiny_config(normalize_observations=True)
    algo = (on_old_stack(config) if stack == "old" else config).build_algo()
    algo.train()
    algo.save(tmp_path / "checkpoint")
    algo.stop()
    written = export(tmp_path / "checkpoint", tmp_path / "shipped", episodes=2)
    assert written["api_stack"] == stack and written["env_steps"] == 200
    played = evaluate(tmp_path / "checkpoint", episodes=2)
    assert written["evaluation"]["returns"] == pytest.approx(played["returns"], rel=1e-3)
    assert load_policy(tmp_path / "shipped").description["evaluation"] == written["evaluation"]
    card = (tmp_path / "shipped" / "README.md").read_text()
    assert f"{played['return_mean']:.1f}" in card and "`normalize_observations` | `true`" in card
    # An earlier export is replaced, and what it had beside the policy goes with it.
    (tmp_path / "shipped" / "policy.onnx").write_bytes(b"old")
    again = export(tmp_path / "checkpoint", tmp_path / "shipped", episodes=0)
    assert again["evaluation"] is None and not (tmp_path / "shipped" / "policy.onnx").exists()
    (tmp_path / "shipped" / "policy.json").unlink()
    with pytest.raises(ValueError, match="that is not of an export"):
        export(tmp_path / "checkpoint", tmp_path / "shipped")
    with pytest.raises(ValueError, match="in the checkpoint itself"):
        export(tmp_path / "checkpoint", tmp_path / "checkpoint" / "shipped")


@pytest.mark.parametrize("task", zoo_tasks())
def test_the_zoo_returns_what_its_cards_say(task):
    policy = load_policy(ZOO / task)
    for example in policy.description["examples"]:
        np.testing.assert_allclose(policy(example["observation"]), example["action"], atol=1e-4)
    found = policy.description["evaluation"]
    low, high = found["median_interval"]
    played = play(envs.make(policy.description["env"]), policy, episodes=3, seed=found["seed"])
    # Another machine rounds otherwise, which makes another episode of the same seed.
    margin = 0.02 * abs(found["return_mean"])
    assert low - margin <= np.median(played["returns"]) <= high + margin
    assert (
        f"{policy.description['evaluation']['return_mean']:.1f}"
        in (ZOO / task / "README.md").read_text()
    )
    assert sum(path.stat().st_size for path in (ZOO / task).iterdir()) < 400_000


def test_the_zoo_is_a_part_of_the_package():
    assert zoo_tasks()
