"""Updates in several threads do what they do in one."""

import threading

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import tiny_config
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch

from rerpi_rllib.algorithm import learner as learner_module
from rerpi_rllib.algorithm import updates as updates_module
from rerpi_rllib.algorithm.learner import RERPITorchLearner, learner_threads
from rerpi_rllib.algorithm.rl_module import RERPITorchRLModule
from rerpi_rllib.algorithm.updates import Updates
from rerpi_rllib.core import parallel
from rerpi_rllib.core.critics import Critic


@pytest.fixture(autouse=True)
def one_thread_afterwards():
    yield
    parallel.set_threads(1)


def test_work_is_shared_and_results_come_in_order():
    parallel.set_threads(3)
    together = threading.Barrier(3, timeout=30)  # Breaks unless three threads come.

    def square(x):
        if x < 3:
            together.wait()
        assert not torch.is_grad_enabled()
        return x * x

    assert parallel.in_threads(square, [(x,) for x in range(20)]) == [x * x for x in range(20)]


def test_an_error_in_another_thread_is_raised_here():
    parallel.set_threads(2)
    together = threading.Barrier(2, timeout=30)
    here = threading.get_ident()

    def fail_elsewhere():
        together.wait()
        if threading.get_ident() != here:
            raise RuntimeError("elsewhere")

    with pytest.raises(RuntimeError, match="elsewhere"):
        parallel.in_threads(fail_elsewhere, [(), ()])


@pytest.mark.parametrize("states", [7, 300, 1100])
def test_critic_has_the_same_values_in_any_number_of_threads(states):
    torch.manual_seed(0)
    critic = Critic(5, 2, (16, 16), clip_actions=True)
    observations, actions = torch.randn(states, 5), torch.randn(9, states, 2)
    at_once = critic(observations, actions).detach()
    for threads in (1, 2, 3):
        parallel.set_threads(threads)
        with torch.no_grad():
            torch.testing.assert_close(critic(observations, actions), at_once)


SPACES = {
    "categorical": gym.spaces.Discrete(2),
    "gaussian": gym.spaces.Box(-1.0, 1.0, (2,), np.float32),
}


def _learner(num_env_runners: int, policy: str = "categorical", **settings) -> RERPITorchLearner:
    # With a categorical policy nothing in the updates is random: all actions are looked at.
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


def test_critic_and_policy_learn_the_same_side_by_side(monkeypatch):
    monkeypatch.setattr(learner_module, "_cpus_here", lambda: 2)
    one_by_one, side_by_side = _learner(num_env_runners=0), _learner(num_env_runners=1)
    expected = _train(one_by_one)
    assert side_by_side._takes_policy_steps_beside
    found = _train(side_by_side)
    assert expected.keys() == found.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], msg=name)


class _OwnLearner(RERPITorchLearner):
    """Other rewards, seen by RLlib's steps."""

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
        {"fit": "value_gradient", "policy": "gaussian"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_what_the_user_changed_keeps_rllibs_steps(monkeypatch, settings):
    monkeypatch.setattr(learner_module, "_cpus_here", lambda: 2)
    assert _learner(1)._takes_policy_steps_beside
    assert not _learner(0)._takes_policy_steps_beside
    assert not _learner(1, **settings)._takes_policy_steps_beside


def test_what_a_learner_of_the_users_does_with_a_minibatch_counts():
    expected, found = _train(_learner(0)), _train(_learner(0, _learner_class=_OwnLearner))
    difference = max(
        float((found[name] - expected[name]).abs().max()) for name in expected if "critic" in name
    )
    assert difference > 1e-3


def test_a_module_of_the_users_keeps_rllibs_steps(monkeypatch):
    monkeypatch.setattr(learner_module, "_cpus_here", lambda: 2)
    learner = _learner(1)
    module = learner.module[DEFAULT_MODULE_ID]
    monkeypatch.setattr(module, "unwrapped", lambda: _OwnModule.__new__(_OwnModule))
    assert not learner._takes_policy_steps_beside


class _Nets:
    """Counts how often its targets were copied."""

    copies = 0

    def update_targets(self):
        self.copies += 1


def test_targets_are_copied_when_the_policy_is_through():
    nets, seen = _Nets(), []
    first_updates_done = threading.Event()

    def update(minibatch, improves, late):
        assert not improves
        seen.append(("critic", nets.copies))
        if len(seen) >= 4:  # The whole first period, before a step of the policy.
            first_updates_done.set()
        return {"critic_loss": torch.zeros(())}

    def improve(minibatch, late):
        assert first_updates_done.wait(30)
        seen.append(("policy", nets.copies))
        return {"kl_mu": torch.tensor(float(len(seen)))}

    columns = {"rewards": torch.zeros(8)}
    means = Updates(4, 2).run(nets, columns, 1, update, improve)
    assert sorted(seen) == [
        *[("critic", 0)] * 4,
        *[("critic", 1)] * 4,
        *[("policy", 0)] * 2,
        *[("policy", 1)] * 2,
    ]
    # The first period's steps were the fifth and sixth things to be seen.
    assert means["kl_mu_at_target_update"] >= (6 + 7) / 2


def test_what_is_prepared_together_has_no_copy_in_between(monkeypatch):
    monkeypatch.setattr(updates_module, "_STEPS_PREPARED", 6)
    nets, seen, prepared = _Nets(), [], []

    def prepare(minibatches, improves):
        prepared.append((len(minibatches), improves))
        return [{**minibatch, "copies": nets.copies} for minibatch in minibatches]

    def update(minibatch, improves, late):
        assert minibatch["copies"] == nets.copies  # Not older than the last copy.
        seen.append((minibatch["rewards"].tolist(), improves))
        return {"critic_loss": torch.zeros(())}

    updates = Updates(4, 2)
    for rows in (torch.arange(6.0), torch.arange(6.0, 22.0)):
        updates.run(nets, {"rewards": rows}, 2, update, prepare=prepare)
    # Three minibatches at once at most, in periods of four.
    assert [size for size, _ in prepared] == [3, 1, 3, 1, 3]
    assert [flag for _, flags in prepared for flag in flags] == [flag for _, flag in seen]
    assert [row for rows, _ in seen for row in rows] == list(range(22))


@pytest.mark.parametrize("period,expected", [(1, 8), (2, 4), (3, 2), (4, 2), (8, 2)])
def test_multipliers_learn_late_in_every_period(period, expected):
    seen = []

    def update(minibatch, improves, late):
        seen.append(late)
        return {"critic_loss": torch.zeros(())}

    Updates(period, 1).run(_Nets(), {"rewards": torch.zeros(8)}, 1, update)
    assert sum(seen) == expected
    assert all(seen[period - 1 :: period])


@pytest.mark.parametrize("who", ["critic", "policy"])
def test_nothing_goes_on_after_an_error(who):
    updated, improved = [], []
    all_are_waiting = threading.Event()

    def update(minibatch, improves, late):
        updated.append(minibatch)
        if len(updated) == 100:
            all_are_waiting.set()
            if who == "critic":
                raise ArithmeticError(who)
        return {}

    def improve(minibatch, late):
        assert all_are_waiting.wait(30)
        improved.append(minibatch)
        if who == "policy":
            raise ArithmeticError(who)
        return {}

    nets, updates = _Nets(), Updates(1000, 1)
    with pytest.raises(ArithmeticError, match=who):
        updates.run(nets, {"rewards": torch.zeros(100)}, 1, update, improve)
    before = len(improved)
    updates._policy_thread.submit(lambda: None).result()  # Comes after what is waiting there.
    assert len(improved) == before and nets.copies == 0


def test_threads_are_those_of_the_machine_and_of_env_runners_that_wait(monkeypatch):
    monkeypatch.setattr(learner_module, "_cpus_here", lambda: 4)
    config = tiny_config()
    assert learner_threads(config) == 1
    config.env_runners(num_env_runners=2)
    assert learner_threads(config) == 3
    config.training(updates_per_env_step=None)
    assert learner_threads(config) == 1
    config.resources(num_cpus_for_main_process=16)
    assert learner_threads(config) == 4
