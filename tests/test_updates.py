"""Updates: what each does depends on its number, and several threads give the same result as one."""

import threading
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import on_old_stack, tiny_config
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch

from rerpi_rllib import RERPIConfig
from rerpi_rllib.algorithm import process
from rerpi_rllib.algorithm.learner import RERPITorchLearner
from rerpi_rllib.algorithm.rl_module import RERPITorchRLModule
from rerpi_rllib.core import gradients as gradients_module
from rerpi_rllib.core import threads as threads_module
from rerpi_rllib.core import updates as updates_module
from rerpi_rllib.core.critics import Critic
from rerpi_rllib.core.gradients import critic_gradients, policy_gradients
from rerpi_rllib.core.optimizers import make_optimizer
from rerpi_rllib.core.peers import ALONE
from rerpi_rllib.core.plan import plan_update
from rerpi_rllib.core.settings import LearningSettings
from rerpi_rllib.core.updates import policy_step, run_updates


@pytest.fixture(autouse=True)
def one_thread_afterwards():
    yield
    threads_module.set_threads(1)


def test_work_is_shared_and_results_come_in_order():
    threads_module.set_threads(3)
    together = threading.Barrier(3, timeout=30)  # It breaks unless three threads arrive.

    def square(x):
        if x < 3:
            together.wait()
        assert not torch.is_grad_enabled()
        return x * x

    assert threads_module.in_threads(square, [(x,) for x in range(20)]) == [x * x for x in range(20)]


def test_an_error_in_another_thread_is_raised_here():
    threads_module.set_threads(2)
    together = threading.Barrier(2, timeout=30)
    here = threading.get_ident()

    def fail_elsewhere():
        together.wait()
        if threading.get_ident() != here:
            raise RuntimeError("elsewhere")

    with pytest.raises(RuntimeError, match="elsewhere"):
        threads_module.in_threads(fail_elsewhere, [(), ()])


@pytest.mark.parametrize("states", [7, 300, 1100])
def test_critic_has_the_same_values_in_any_number_of_threads(states):
    torch.manual_seed(0)
    critic = Critic(5, 2, (16, 16), clip_actions=True)
    observations, actions = torch.randn(states, 5), torch.randn(9, states, 2)
    at_once = critic(observations, actions).detach()
    for threads in (1, 2, 3):
        threads_module.set_threads(threads)
        with torch.no_grad():
            torch.testing.assert_close(critic(observations, actions), at_once)


SPACES = {
    "categorical": gym.spaces.Discrete(2),
    "gaussian": gym.spaces.Box(-1.0, 1.0, (2,), np.float32),
}


def _learner(num_env_runners: int, policy: str = "categorical", **settings) -> RERPITorchLearner:
    # With a categorical policy nothing in the updates is random: all actions are evaluated.
    config = tiny_config(policy=policy, target_update_period=6, policy_update_period=2)
    config.env_runners(num_env_runners=num_env_runners).learners(num_gpus_per_learner=0)
    config.update_from_dict(settings)
    torch.manual_seed(5)
    observations = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    return config.build_learner(spaces={DEFAULT_MODULE_ID: (observations, SPACES[policy])})


def _train(learner: RERPITorchLearner) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(0)
    rows = 32 * 20
    columns = {
        "obs": rng.standard_normal((rows, 4)).astype(np.float32),
        "new_obs": rng.standard_normal((rows, 4)).astype(np.float32),
        "actions": rng.integers(0, 2, (rows, 1)).astype(np.float32),
        "rewards": rng.standard_normal(rows).astype(np.float32),
        "terminateds": np.zeros(rows, np.float32),
        "action_logp": np.zeros(rows, np.float32),
    }
    data = MultiAgentBatch({DEFAULT_MODULE_ID: SampleBatch(columns)}, rows)
    learner.update(training_data=TrainingData(batch=data), minibatch_size=32)
    return learner.module[DEFAULT_MODULE_ID].unwrapped().nets.state_dict()


def _steps_side_by_side(learner: RERPITorchLearner) -> bool:
    return learner._how_to_step(learner.config).get("crew") is not None


def _leaves_steps_to_rllib(learner: RERPITorchLearner) -> bool:
    return "step" in learner._how_to_step(learner.config)


def test_critic_and_policy_learn_the_same_side_by_side(monkeypatch):
    monkeypatch.setattr(process, "_available_cpus", lambda: 2)
    one_by_one, side_by_side = _learner(num_env_runners=0), _learner(num_env_runners=1)
    expected = _train(one_by_one)
    assert _steps_side_by_side(side_by_side) and not _steps_side_by_side(one_by_one)
    found = _train(side_by_side)
    assert expected.keys() == found.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], msg=name)


class _OwnLearner(RERPITorchLearner):
    """Uses other rewards in the steps that RLlib takes."""

    def _update(self, batch, **kwargs):
        columns = batch[DEFAULT_MODULE_ID]
        changed = {**columns, "rewards": torch.full_like(columns["rewards"], 100.0)}
        return super()._update({DEFAULT_MODULE_ID: changed}, **kwargs)


class _OwnModule(RERPITorchRLModule):
    pass


@pytest.mark.parametrize(
    "settings",
    [
        {"grad_clip": 1.0},
        {"torch_skip_nan_gradients": False},
        {"log_gradients": True},
        {"_learner_class": _OwnLearner},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_what_the_user_changed_keeps_rllibs_steps(monkeypatch, settings):
    monkeypatch.setattr(process, "_available_cpus", lambda: 2)
    assert not _leaves_steps_to_rllib(_learner(1))
    assert _leaves_steps_to_rllib(_learner(1, **settings))


def test_value_gradients_need_the_critic_and_are_not_taken_beside_its_steps(monkeypatch):
    monkeypatch.setattr(process, "_available_cpus", lambda: 2)
    learner = _learner(1, "gaussian", fit="value_gradient")
    assert not _steps_side_by_side(learner) and not _leaves_steps_to_rllib(learner)


def test_what_a_learner_of_the_users_does_with_a_minibatch_counts():
    expected, found = _train(_learner(0)), _train(_learner(0, _learner_class=_OwnLearner))
    difference = max(
        float((found[name] - expected[name]).abs().max()) for name in expected if "critic" in name
    )
    assert difference > 1e-3


def test_a_module_of_the_users_keeps_rllibs_steps(monkeypatch):
    monkeypatch.setattr(process, "_available_cpus", lambda: 2)
    learner = _learner(1)
    module = learner.module[DEFAULT_MODULE_ID]
    monkeypatch.setattr(module, "unwrapped", lambda: _OwnModule.__new__(_OwnModule))
    assert _leaves_steps_to_rllib(learner)


class _Nets(torch.nn.Module):
    """Counts how often its targets were copied."""

    def __init__(self):
        super().__init__()
        self.copies, self.constraints, self.peers = 0, {}, ALONE
        self.register_buffer("num_updates", torch.zeros((), dtype=torch.int64))

    def update_targets(self):
        self.copies += 1


def _settings(target_update_period, policy_update_period, schedule="late"):
    periods = {
        "target_update_period": target_update_period,
        "policy_update_period": policy_update_period,
        "multiplier_schedule": schedule,
    }
    return LearningSettings.from_mapping(vars(RERPIConfig()) | periods)


def _run_side_by_side(
    monkeypatch, crew, nets, settings, rows, critic_step, policy_step, prepares=True
):
    """Make updates of one row each, with the given functions as the steps."""
    monkeypatch.setattr(updates_module, "critic_step", lambda nets, batch, *_: critic_step(batch))
    monkeypatch.setattr(updates_module, "policy_step", lambda nets, batch, *_: policy_step(batch))
    for name in ("prepare_critic", "prepare_policy") if prepares else ():
        monkeypatch.setattr(updates_module, name, lambda nets, batches, settings: batches)
    how = {"optimizers": {}, "crew": crew}
    return run_updates(nets, settings, {"rewards": torch.zeros(rows)}, 1, **how)


def test_targets_are_copied_when_the_policy_is_through(monkeypatch):
    nets, seen = _Nets(), []
    first_updates_done = threading.Event()

    def critic_step(batch):
        seen.append(("critic", nets.copies))
        if len(seen) >= 4:  # The critic is through the first period.
            first_updates_done.set()
        return {"critic_loss": torch.zeros(())}

    def policy_step(batch):
        assert first_updates_done.wait(30)
        seen.append(("policy", nets.copies))
        return {"kl_mu": torch.tensor(float(len(seen)))}

    steps = (critic_step, policy_step)
    means = _run_side_by_side(monkeypatch, threads_module.Crew(), nets, _settings(4, 2), 8, *steps)
    assert sorted(seen) == [
        *[("critic", 0)] * 4,
        *[("critic", 1)] * 4,
        *[("policy", 0)] * 2,
        *[("policy", 1)] * 2,
    ]
    # The policy's steps of the first period were seen fifth and sixth.
    assert means["kl_mu_at_target_update"] >= (6 + 7) / 2


def test_what_is_prepared_together_has_no_copy_in_between(monkeypatch):
    monkeypatch.setattr(updates_module, "_STEPS_PREPARED_AT_ONCE", 6)
    nets, seen, prepared = _Nets(), [], []

    def note(nets, batches, settings):
        prepared.append([batch["plan"].improve_policy for batch in batches])
        return [{**batch, "copies": nets.copies} for batch in batches]

    def step(batch):
        assert batch["copies"] == nets.copies  # It was prepared after the last copy.
        seen.append((batch["rewards"].tolist(), batch["plan"].improve_policy))
        return {"critic_loss": torch.zeros(())}

    monkeypatch.setattr(updates_module, "prepare", note)
    for rows in (torch.arange(6.0), torch.arange(6.0, 22.0)):
        run_updates(nets, _settings(4, 2), {"rewards": rows}, 2, step=step)
    # At most three minibatches are prepared at once, in target periods of four.
    assert [len(flags) for flags in prepared] == [3, 1, 3, 1, 3]
    assert [flag for flags in prepared for flag in flags] == [flag for _, flag in seen]
    assert [row for rows, _ in seen for row in rows] == list(range(22))
    assert int(nets.num_updates) == 11


def test_the_next_block_is_prepared_beside_the_steps_of_one(monkeypatch):
    monkeypatch.setattr(updates_module, "_STEPS_PREPARED_AT_ONCE", 2)
    prepared = {"critic": threading.Semaphore(0), "policy": threading.Semaphore(0)}
    most, nets = [], _Nets()
    unused = {"critic": 0, "policy": 0}

    def prepare(who):
        def prepare_block(nets, batches, settings):
            unused[who] += len(batches)
            most.append(unused[who])
            for _ in batches:
                prepared[who].release()
            return batches

        return prepare_block

    def step(who):
        def take(batch):
            assert prepared[who].acquire(timeout=30)
            unused[who] -= 1
            return {}

        return take

    how = (nets, _settings(1000, 1), 12, step("critic"), step("policy"))
    monkeypatch.setattr(updates_module, "_means", lambda logged, total: ({}, True))
    for name, who in (("prepare_critic", "critic"), ("prepare_policy", "policy")):
        monkeypatch.setattr(updates_module, name, prepare(who))
    _run_side_by_side(monkeypatch, threads_module.Crew(), *how, prepares=False)
    assert unused == {"critic": 0, "policy": 0} and int(nets.num_updates) == 12
    assert max(most) <= 4  # The block in use and the one after it.


@pytest.mark.parametrize("period,expected", [(1, 8), (2, 4), (3, 2), (4, 2), (8, 2)])
def test_multipliers_learn_late_in_every_period(period, expected):
    moved = {}
    for schedule in ("late", "always"):
        settings = _settings(period, 1, schedule)
        plans = [plan_update(number, settings) for number in range(1, 9)]
        moved[schedule] = [plan.moves(settings.constraints()[0]) for plan in plans]
    assert sum(moved["late"]) == expected
    assert all(moved["late"][period - 1 :: period]) and all(moved["always"])


def test_gradients_may_have_any_layout_in_memory():
    gradient = torch.arange(12.0).view(4, 3).t() - 6.0
    learned = []
    for layout in (gradient, gradient.contiguous()):
        parameter, unused = (torch.nn.Parameter(torch.zeros(3, 4)) for _ in range(2))
        nets = SimpleNamespace(peers=ALONE)
        optimizers = {"policy": make_optimizer([parameter, unused], 0.1)}
        policy_step(nets, {}, None, optimizers, lambda *_, first=layout: ([first, None], {}))
        assert unused.grad is None and parameter.sign().equal(-gradient.sign())
        learned.append(parameter.detach())
    assert torch.equal(*learned)


@pytest.mark.parametrize("who", ["critic", "policy"])
def test_nothing_goes_on_after_an_error(monkeypatch, who):
    updated, improved = [], []
    all_are_waiting = threading.Event()

    def critic_step(batch):
        updated.append(batch)
        if len(updated) == 100:
            all_are_waiting.set()
            if who == "critic":
                raise ArithmeticError(who)
        return {}

    def policy_step(batch):
        assert all_are_waiting.wait(30)
        improved.append(batch)
        if who == "policy":
            raise ArithmeticError(who)
        return {}

    nets, crew = _Nets(), threads_module.Crew()
    steps = (critic_step, policy_step)
    with pytest.raises(ArithmeticError, match=who):
        _run_side_by_side(monkeypatch, crew, nets, _settings(1000, 1), 100, *steps)
    before = len(improved)
    crew.policy.submit(lambda: None).result()  # This runs after whatever still waits there.
    assert len(improved) == before and nets.copies == 0


def test_threads_are_those_of_the_machine_and_of_env_runners_that_wait(monkeypatch):
    monkeypatch.setattr(process, "_available_cpus", lambda: 4)
    config = tiny_config()
    assert process.learner_threads(config) == 1
    config.env_runners(num_env_runners=2)
    assert process.learner_threads(config) == 3
    config.training(updates_per_env_step=None)
    assert process.learner_threads(config) == 1
    config.resources(num_cpus_for_main_process=16)
    assert process.learner_threads(config) == 4


def test_compiled_gradients_reach_the_updates(monkeypatch):
    asked = []
    monkeypatch.setattr(
        gradients_module, "_compiled", lambda function, *_: asked.append(function) or function
    )
    _train(_learner(num_env_runners=0))
    assert asked == []
    _train(_learner(num_env_runners=0, compile_updates="at_start"))
    assert set(asked) == {critic_gradients, policy_gradients}
    asked.clear()
    algorithm = on_old_stack(tiny_config(compile_updates="at_start")).build_algo()
    while not algorithm._limiter.updates:
        algorithm.train()
    algorithm.stop()
    assert set(asked) == {critic_gradients, policy_gradients}


@pytest.mark.parametrize(
    "setting", [{"log_gradients": True}, {"grad_clip": 1.0}, {"torch_skip_nan_gradients": False}]
)
def test_compilation_is_refused_where_rllib_takes_the_steps(setting):
    config = tiny_config(compile_updates="at_start")
    config.update_from_dict(setting)
    with pytest.raises(ValueError, match="compile_updates='at_start' has no effect with"):
        config.validate()


@pytest.mark.parametrize("device,pinned", [("cpu", False), ("cuda", True)])
def test_batches_go_to_a_gpu_from_pinned_memory(monkeypatch, device, pinned):
    calls = []

    def convert(self, batch, to_device=True, pin_memory=False, use_stream=False):
        calls.append((batch, to_device, pin_memory))
        return batch

    learner = _learner(num_env_runners=0)
    monkeypatch.setattr(TorchLearner, "_convert_batch_type", convert)
    learner._device = torch.device(device)
    assert learner._convert_batch_type("a batch") == "a batch"
    assert calls == [("a batch", True, pinned)]
