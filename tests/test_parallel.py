"""Updates in several threads do what they do in one."""

import threading

import numpy as np
import pytest
import torch
from conftest import tiny_config
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch

from rerpi_rllib.algorithm.learner import RERPITorchLearner, learner_threads
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


def _learner(num_env_runners: int, **settings) -> RERPITorchLearner:
    # Nothing random in the updates: the values of all actions are looked at.
    config = tiny_config(
        policy="categorical", target_update_period=6, policy_update_period=2, **settings
    )
    config.environment("CartPole-v1").env_runners(num_env_runners=num_env_runners)
    config.learners(num_gpus_per_learner=0)
    torch.manual_seed(5)
    return config.build_learner(env=None, spaces={DEFAULT_MODULE_ID: _spaces()})


def _spaces():
    import gymnasium as gym

    return gym.spaces.Box(-np.inf, np.inf, (4,), np.float32), gym.spaces.Discrete(2)


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
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    one_by_one, side_by_side = _learner(num_env_runners=0), _learner(num_env_runners=1)
    expected = _train(one_by_one)
    parallel.set_threads(2)
    assert side_by_side._takes_policy_steps_beside
    found = _train(side_by_side)
    assert expected.keys() == found.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], msg=name)


def test_a_learner_of_the_users_keeps_rllibs_steps(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)

    class Own(RERPITorchLearner):
        pass

    parallel.set_threads(2)
    assert _learner(1)._takes_policy_steps_beside
    for kept in (_learner(0), _learner(1, grad_clip=1.0), _learner(1, learner_class=Own)):
        parallel.set_threads(2)
        assert not kept._takes_policy_steps_beside


def test_threads_are_those_of_the_machine_and_of_env_runners_that_wait(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    config = tiny_config()
    assert learner_threads(config) == 1
    config.env_runners(num_env_runners=2)
    assert learner_threads(config) == 3
    config.training(updates_per_env_step=None)
    assert learner_threads(config) == 1
    config.resources(num_cpus_for_main_process=16)
    assert learner_threads(config) == 4
