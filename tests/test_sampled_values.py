"""The compiled function for the values of sampled actions agrees with torch."""

import copy
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gymnasium as gym
import pytest
import torch
from conftest import needs_compiler, tiny_config
from ray.rllib.core import DEFAULT_MODULE_ID
from torch import nn

from rerpi_rllib.algorithm import process
from rerpi_rllib.core import critics, sampled_values
from rerpi_rllib.core.critics import Critic
from rerpi_rllib.core.layers import ELU, Linear, NetworkSettings, ResidualBlock, Tanh
from rerpi_rllib.core.threads import set_threads

# What registers this machine's processor has.
_FLAGS = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""


@pytest.fixture(autouse=True)
def without_library():
    yield
    sampled_values.use_library(None)
    process.compile_sampled_values.cache_clear()


def _compile(directory, *options):
    library = str(directory / "sampled_values.so")
    source = Path(sampled_values.__file__).with_suffix(".cpp")
    options = [*options, "-std=c++17", "-shared", "-fPIC", "-o", library, source]
    subprocess.run(["c++", *options], check=True)
    return library


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return _compile(tmp_path_factory.mktemp("library"), "-O3", "-march=native")


def _both(library, critic, observations, actions):
    """Return the values by torch and by the compiled function."""
    calls = []

    def counted(*arguments):
        calls.append(arguments)
        return sampled_values.sampled_values(*arguments)

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(critics, "sampled_values", counted)
        sampled_values.use_library(None)
        expected = critic(observations, actions)
        assert not calls
        sampled_values.use_library(library)
        found = critic(observations, actions)
        assert len(calls) == len(critic.networks)
        return expected, found


def _critic(layers, network="paper", seed=0, **arguments):
    torch.manual_seed(seed)
    inputs = NetworkSettings(network=network)
    critic = Critic(7, 3, layers, clip_actions=True, inputs=inputs, **arguments)
    with torch.no_grad():
        for parameter in critic.parameters():  # Also those that are zero or one at the start.
            parameter.add_(0.1 * torch.randn_like(parameter))
    return critic


@needs_compiler
@pytest.mark.parametrize(
    "network,layers",
    [
        *(("paper", layers) for layers in ((5,), (16, 16), (37, 70), (100, 40, 200), (256, 256))),
        *(("residual", (width,) * blocks) for width, blocks in ((8, 1), (45, 2), (128, 2))),
    ],
)
@pytest.mark.parametrize("head", ["scalar", "categorical", "quantile"])
def test_it_agrees_with_torch(library, network, layers, head):
    critic = _critic(layers, network, kind=head, num_critics=2)
    for batch, shape in ((1, (1,)), (13, (20,)), (130, (17,)), (3, (2, 5))):
        observations, actions = torch.randn(batch, 7), 2.0 * torch.randn(*shape, batch, 3)
        expected, found = _both(library, critic, observations, actions)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@needs_compiler
def test_it_agrees_with_threads_and_with_a_transposed_batch(library):
    critic = _critic((64, 64))
    observations, actions = torch.randn(300, 7), torch.randn(300, 20, 3).transpose(0, 1)
    expected, _ = _both(library, critic, observations, actions)
    try:
        set_threads(3)
        with torch.no_grad():
            torch.testing.assert_close(critic(observations, actions), expected)
    finally:
        set_threads(1)


@needs_compiler
@pytest.mark.parametrize("network", ["paper", "residual"])
def test_it_agrees_at_the_edges_of_floating_point(library, network):
    critic = _critic((32, 32), network)
    observations = torch.randn(4, 7) * torch.tensor([[0.0], [1e-20], [1e4], [1e15]])
    expected, found = _both(library, critic, observations, torch.randn(6, 4, 3))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert found.isfinite().all()


@needs_compiler
@pytest.mark.parametrize("network", ["paper", "residual"])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_not_finite_does_not_get_lost(library, network, broken):
    """Otherwise a run with broken networks would go on."""
    critic = _critic((32, 32), network)
    observations = torch.randn(4, 7)
    observations[1, 2] = broken
    expected, found = _both(library, critic, observations, torch.randn(6, 4, 3))
    assert found[:, 1].isnan().all() and expected[:, 1].isnan().all()
    assert found[:, [0, 2, 3]].isfinite().all()
    last = [p for name, p in critic.named_parameters() if "body" in name][-1]
    with torch.no_grad():
        last[0] = float("nan")
        assert not critic(torch.randn(4, 7), torch.randn(6, 4, 3)).isfinite().any()


@needs_compiler
def test_it_sees_changed_weights_and_a_copy_has_its_own(library):
    critic = _critic((16, 16))
    observations, actions = torch.randn(5, 7), torch.randn(4, 5, 3)
    _, before = _both(library, critic, observations, actions)
    copied = copy.deepcopy(critic)
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.mul_(2.0)
        torch.testing.assert_close(copied(observations, actions), before)
        assert not torch.allclose(critic(observations, actions), before)


@needs_compiler
def test_only_tensors_that_it_knows_are_given_to_it(library):
    sampled_values.use_library(library)
    states, actions, first = torch.zeros(4, 8), torch.zeros(5, 4, 3), Linear(3, 8)
    assert sampled_values.can_compute(states, actions, first)
    assert not sampled_values.can_compute(states.double(), actions.double(), first)
    assert not sampled_values.can_compute(states, actions.to("meta"), first)
    critic = _critic((8, 8))
    with torch.no_grad():
        for shape in ((4, 5, 4), (4, 5, 2), (4, 10, 3), (4, 3, 3)):
            with pytest.raises(RuntimeError):
                critic(torch.randn(5, 7), torch.randn(*shape))
        critic.double()
        assert critic(torch.randn(2, 7).double(), torch.randn(4, 2, 3).double()).dtype == torch.double


@pytest.mark.parametrize(
    "body",
    [
        nn.Sequential(nn.LayerNorm(4), nn.ReLU()),
        nn.Sequential(Linear(4, 4), Tanh()),
        nn.Sequential(nn.Dropout(0.1)),
        nn.Sequential(type("Own", (ResidualBlock,), {})(4)),
    ],
)
def test_other_layers_are_left_to_torch(body):
    assert sampled_values.steps_of(body) is None
    known = nn.Sequential(nn.LayerNorm(4), Tanh(), Linear(4, 4), ELU(), ResidualBlock(4))
    assert len(sampled_values.steps_of(known)) == 5


def test_without_a_compiler_torch_does_it(monkeypatch, caplog):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(process.shutil, "which", lambda name: None)
    process.compile_sampled_values.cache_clear()
    assert not process.compile_sampled_values()
    assert "no C++ compiler" in caplog.text
    assert sampled_values._library is None


def test_a_compiler_that_fails_is_named(monkeypatch, caplog, tmp_path):
    compiler = tmp_path / "broken-compiler"
    compiler.write_text("#!/bin/sh\necho unknown option >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    process.compile_sampled_values.cache_clear()
    assert not process.compile_sampled_values()
    assert "broken-compiler" in caplog.text and "unknown option" in caplog.text


@needs_compiler
@pytest.mark.parametrize(
    "architecture", ["native", *(("x86-64", "haswell") if "avx2" in _FLAGS else ())]
)
def test_it_agrees_with_narrower_registers(tmp_path, architecture):
    """Other machines have other registers, for which the file has constants of its own."""
    narrow = _compile(tmp_path, "-O1", f"-march={architecture}")
    for network in ("paper", "residual"):
        critic = _critic((40, 40), network)
        expected, found = _both(narrow, critic, torch.randn(70, 7), torch.randn(5, 70, 3))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("num_gpus", [0, 1])
@needs_compiler
def test_a_learner_on_a_cpu_compiles_it_once(monkeypatch, num_gpus):
    compiled = []
    monkeypatch.setattr(process, "use_library", compiled.append)
    config = tiny_config().learners(num_gpus_per_learner=num_gpus)
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(process.compile_for_learning, config) for _ in range(2)]:
            done.result()
    process.set_up_learning(config)
    assert len(compiled) == (num_gpus == 0)


@needs_compiler
def test_a_learner_uses_it(monkeypatch):
    calls = []

    def counted(*arguments):
        calls.append(arguments)
        return sampled_values.sampled_values(*arguments)

    monkeypatch.setattr(critics, "sampled_values", counted)
    config = tiny_config().learners(num_gpus_per_learner=0)
    observations, actions = gym.spaces.Box(-1.0, 1.0, (3,)), gym.spaces.Box(-1.0, 1.0, (2,))
    learner = config.build_learner(spaces={DEFAULT_MODULE_ID: (observations, actions)})
    nets = learner.module[DEFAULT_MODULE_ID].unwrapped().nets
    with torch.no_grad():
        nets.target_critic(torch.randn(4, 3), torch.randn(5, 4, 2))
    assert calls


def test_a_temporary_directory_that_cannot_be_used_is_survived(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(process.tempfile, "tempdir", str(tmp_path / "missing"))
    process.compile_sampled_values.cache_clear()
    assert not process.compile_sampled_values()
    assert "updates on a CPU take longer" in caplog.text
