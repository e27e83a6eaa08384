"""Compiled updates and this package's Adam: the same numbers as without them."""

import copy
import logging
import shutil
import sys
import threading
import time

import pytest
import torch
from conftest import needs_compiler, tiny_config
from test_networks import _batch, _family

from rerpi_rllib.algorithm.process import make_gradients
from rerpi_rllib.core import gradients as gradients_module
from rerpi_rllib.core import layers
from rerpi_rllib.core.gradients import Gradients, WhenCompiled, critic_gradients
from rerpi_rllib.core.losses import PLAN, prepare
from rerpi_rllib.core.optimizers import Adam, make_optimizers
from rerpi_rllib.core.plan import Plan
from rerpi_rllib.core.updates import run_updates


def _updated(gradients, **settings):
    """Return the state after several updates with these gradient functions."""
    torch.manual_seed(0)
    nets, settings = _family(target_update_period=4, policy_update_period=1, **settings)
    columns = _batch(6 * 32)
    how = {"optimizers": make_optimizers(nets), "gradients": gradients}
    metrics = run_updates(nets, settings, columns, 32, **how)
    return nets.state_dict(), metrics


def test_compiled_updates_are_the_same(caplog):
    settings = {"epsilon_penalty": 1e-2, "temperature_solver": "adam"}
    expected, expected_metrics = _updated(Gradients(), **settings)
    compiled = Gradients.when_compiled("at_start")
    with caplog.at_level(logging.INFO, logger=gradients_module.logger.name):
        found, metrics = _updated(compiled, **settings)
    # Where there is a compiler, it was used.
    words = "was compiled" if shutil.which("g++") else "not compiled"
    assert [words in record.getMessage() for record in caplog.records] == [True, True], caplog.text
    assert metrics.keys() == expected_metrics.keys()
    for name, value in expected_metrics.items():
        assert metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-6), name
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], msg=name, rtol=1e-4, atol=1e-5)
    # A batch of another size is no reason to fail or to compile again.
    nets, settings = _family(policy_update_period=1, **settings)
    columns = _batch(48)
    run_updates(nets, settings, columns, 24, optimizers=make_optimizers(nets), gradients=compiled)


# What was compiled by an earlier run of the tests would not be observed.
without_caches = torch.compiler.config.patch(force_disable_caches=True)


@without_caches
def test_compiled_products_by_onednn_are_the_same(monkeypatch, caplog):
    from rerpi_rllib.core import compiled_products
    from rerpi_rllib.core.compiled_products import UseOneDNN, _product

    graphs = []
    replace = UseOneDNN.__call__
    monkeypatch.setattr(compiled_products, "_FEW", 1)

    def observed(self, graph):
        replace(self, graph)
        graphs.append([node.target for node in graph.nodes])

    monkeypatch.setattr(UseOneDNN, "__call__", observed)
    monkeypatch.setattr(layers, "_uses_onednn", True)
    torch.manual_seed(0)
    nets, settings = _family()
    (batch,) = prepare(nets, [_batch(64) | {PLAN: Plan()}], settings)
    compiled, eager = Gradients.when_compiled("at_start"), Gradients()
    for part in ("critic", "policy"):
        parameters = list(getattr(nets, part).parameters())
        arguments = nets, batch, settings, parameters
        expected, expected_metrics = getattr(eager, part)(*arguments)
        found, metrics = getattr(compiled, part)(*arguments)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(metrics, expected_metrics, rtol=1e-4, atol=1e-6)
    if shutil.which("g++"):
        assert len(graphs) == 2 and "not compiled" not in caplog.text
        assert all(targets.count(_product) >= 4 for targets in graphs)


def test_compiled_updates_do_without_onednn(monkeypatch, caplog):
    monkeypatch.setattr(layers, "_uses_onednn", True)
    monkeypatch.setitem(sys.modules, "rerpi_rllib.core.compiled_products", None)
    assert gradients_module._faster_products(_batch(2)) == {}
    assert "multiply matrices with MKL" in caplog.text


@without_caches
@needs_compiler
def test_an_onednn_that_torch_does_not_know_is_left_out(monkeypatch, caplog):
    from rerpi_rllib.core.compiled_products import UseOneDNN

    def unknown(self, graph):
        raise TypeError("another signature")

    monkeypatch.setattr(UseOneDNN, "__call__", unknown)
    monkeypatch.setattr(layers, "_uses_onednn", True)
    nets, settings = _family()
    (batch,) = prepare(nets, [_batch(64) | {PLAN: Plan()}], settings)
    compiled = WhenCompiled(critic_gradients, "at_start")
    compiled(nets, batch, settings, list(nets.critic.parameters()))
    assert "multiply matrices with MKL" in caplog.text and "not compiled" not in caplog.text
    assert compiled._function is not critic_gradients


def test_what_cannot_be_compiled_stays_as_it_is(monkeypatch, caplog):
    def refuse(*args, **kwargs):
        raise RuntimeError("no compiler here\nand more lines")

    monkeypatch.setattr(gradients_module.torch, "compile", lambda function, **_: refuse)
    with caplog.at_level(logging.WARNING):
        found, _ = _updated(Gradients.when_compiled("at_start"))
    warnings = [record.getMessage() for record in caplog.records]
    assert sum("_gradients is not compiled" in warning for warning in warnings) == 2
    assert all(warning.endswith("no compiler here") for warning in warnings)
    assert "more lines" not in caplog.text
    for name, value in _updated(Gradients())[0].items():
        assert torch.equal(found[name], value), name


def test_an_error_of_a_compiled_function_is_survived(monkeypatch, caplog):
    calls = []

    def breaks(function, example, products):
        def call(*arguments):
            calls.append(function)
            if len(calls) > 2:
                raise RuntimeError("another layout")
            return function(*arguments)

        return call

    monkeypatch.setattr(gradients_module, "_compiled", breaks)
    found, _ = _updated(Gradients(WhenCompiled(critic_gradients, "at_start")))
    assert len(calls) == 3 and "another layout" in caplog.text
    for name, value in _updated(Gradients())[0].items():
        assert torch.equal(found[name], value), name


def test_the_learner_goes_on_while_a_thread_compiles(monkeypatch):
    monkeypatch.setattr(gradients_module, "_SECONDS_BEFORE_COMPILING", 0.0)
    may_compile, compiled, threads = threading.Event(), threading.Event(), []

    def slow(function, example, products):
        def call(*arguments):
            threads.append(threading.current_thread())
            if len(threads) == 1:
                assert may_compile.wait(30)
                compiled.set()
            return function(*arguments)

        return call

    monkeypatch.setattr(gradients_module, "_compiled", slow)
    nets, settings = _family()
    (batch,) = prepare(nets, [_batch(16) | {PLAN: Plan()}], settings)
    gradients = WhenCompiled(critic_gradients, "background")
    arguments = nets, batch, settings, list(nets.critic.parameters())
    expected, _ = gradients(*arguments)  # While the other thread has not compiled anything yet.
    may_compile.set()
    assert compiled.wait(30)
    while len(threads) < 2:
        found, _ = gradients(*arguments)
    assert threads[0] is not threading.current_thread() is threads[1]
    for value, other in zip(found, expected):
        torch.testing.assert_close(value, other)


def test_one_thread_compiles_at_a_time(monkeypatch):
    inside, most = [], []

    def slow(function, example, products):
        def call(*arguments):
            inside.append(function)
            most.append(len(inside))
            time.sleep(0.05)
            most.append(len(inside))
            inside.remove(function)
            return function(*arguments)

        return call

    monkeypatch.setattr(gradients_module, "_compiled", slow)
    nets, settings = _family()
    (batch,) = prepare(nets, [_batch(16) | {PLAN: Plan()}], settings)
    arguments = nets, batch, settings, list(nets.critic.parameters())
    functions = [WhenCompiled(critic_gradients, "at_start") for _ in range(3)]
    threads = [threading.Thread(target=function._compile, args=arguments) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1 and len(most) == 6


@pytest.mark.parametrize(
    "when,num_env_runners,device,expected",
    [
        ("background", 1, "cpu", "background"),
        # Switching at any moment would make two runs of a seed different.
        ("background", 0, "cpu", "never"),
        ("background", 1, "cuda", "never"),
        ("at_start", 0, "cpu", "at_start"),
        ("at_start", 1, "cuda", "at_start"),
        ("never", 1, "cpu", "never"),
    ],
)
def test_when_an_update_is_compiled(when, num_env_runners, device, expected):
    config = tiny_config().env_runners(num_env_runners=num_env_runners)
    config.training(compile_updates=when)
    made = make_gradients(vars(config), torch.device(device))
    assert {made.critic._when, made.policy._when} == {expected}


def test_adam_takes_the_steps_of_torch(tmp_path):
    torch.manual_seed(0)
    own = [torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(4))]
    other = copy.deepcopy(own)
    options = {"lr": 1e-2, "betas": (0.8, 0.99), "fused": True, "capturable": True}
    optimizers = [Adam(own, **options), torch.optim.Adam(other, **options)]
    for step in range(6):
        if step == 3:  # The state survives being saved, and goes on in another optimizer.
            torch.save(optimizers[0].state_dict(), tmp_path / "adam.pt")
            optimizers[0] = Adam(own, **options)
            optimizers[0].load_state_dict(torch.load(tmp_path / "adam.pt"))
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
        for parameter, twin in zip(own, other):
            parameter.grad = torch.randn_like(parameter)
            twin.grad = parameter.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for parameter, twin in zip(own, other):
        torch.testing.assert_close(parameter, twin)
    for parameter in own:
        parameter.grad = None
    optimizers[0].step()  # There is nothing to do.
    _compare(*optimizers)


def _compare(own, other):
    for group, twins in zip(own.param_groups, other.param_groups):
        for parameter, twin in zip(group["params"], twins["params"]):
            torch.testing.assert_close(parameter, twin)
            if other.state[twin]:
                assert float(own.state[parameter]["step"]) == float(other.state[twin]["step"])


def _pair_of_optimizers():
    torch.manual_seed(0)
    own = [torch.nn.Parameter(torch.randn(4)) for _ in range(3)]
    options = {"lr": 1e-2, "fused": True, "capturable": True}
    return Adam(own, **options), torch.optim.Adam(copy.deepcopy(own), **options)


def _set_gradients(optimizers, numbers):
    for number in numbers:
        gradient = torch.randn(4)
        for optimizer in optimizers:
            optimizer.param_groups[0]["params"][number].grad = gradient.clone()


@pytest.mark.parametrize(
    "steps", [[(0, 1), (0, 1), (0, 1, 2), (1, 2), (0, 1, 2)], [(0, 1, 2), (0, 1, 2), (1,), (0, 1, 2)]]
)
def test_adam_counts_the_steps_of_parameters_that_are_sometimes_left_out(steps):
    optimizers = _pair_of_optimizers()
    for numbers in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        _set_gradients(optimizers, numbers)
        for optimizer in optimizers:
            optimizer.step()
        _compare(*optimizers)


def test_adam_begins_anew_with_an_empty_state():
    optimizers = _pair_of_optimizers()
    for step in range(4):
        _set_gradients(optimizers, (0, 1, 2))
        for optimizer in optimizers:
            if step == 2:
                optimizer.state.clear()
            optimizer.step()
        _compare(*optimizers)


def test_adam_leaves_out_the_steps_that_a_gradient_scaler_refuses():
    optimizers = _pair_of_optimizers()
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in optimizers]
    for step in range(5):
        for optimizer, scaler in zip(optimizers, scalers):
            optimizer.zero_grad()
            factor = float("inf") if step == 2 else 1.0 + step
            loss = sum(p.square().sum() for p in optimizer.param_groups[0]["params"]) * factor
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        _compare(*optimizers)
