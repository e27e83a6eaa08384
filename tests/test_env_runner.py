"""This package's EnvRunner does what RLlib's own does."""

import itertools

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import tiny_config
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

from rerpi_rllib import envs
from rerpi_rllib.algorithm.env_runner import RERPIEnvRunner, ToEnvUnits


class Counting(gym.Env):
    """Observes the number of its steps; ends after five, terminated or truncated as configured."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,))
    action_space = gym.spaces.Box(np.array([0.0, -2.0]), np.array([4.0, 2.0]), dtype=np.float32)

    def __init__(self, config):
        self.terminates, self.fails = config.get("terminates", True), config.get("fails", False)
        self.count = np.zeros(1, np.float32)
        self.received = []

    def reset(self, *, seed=None, options=None):
        self.count[0] = 0.0
        return self.count, {}  # Every step returns the same array.

    def step(self, action):
        if self.fails and self.count[0] == 3.0:
            raise OSError("broken")
        assert self.action_space.contains(action)
        self.received.append(action)
        self.count += 1.0
        ended = bool(self.count[0] == 5.0)
        return self.count, 1.0, ended and self.terminates, ended and not self.terminates, {}


def _runner(
    cls=RERPIEnvRunner,
    env=Counting,
    env_config=None,
    policy="gaussian",
    correlation=0.0,
    **env_runners,
):
    config = tiny_config(policy=policy).environment(env, env_config=env_config or {})
    config.training(noise_correlation=correlation)
    config.env_runners(rollout_fragment_length=7, **env_runners)
    if isinstance(env, str):
        envs.register_with_tune(env)
    torch.manual_seed(0)
    return cls(config=config, worker_index=0)


@pytest.mark.parametrize("explore", [True, False], ids=["exploring", "greedy"])
@pytest.mark.parametrize("env,policy", [("Pendulum-v1", "gaussian"), ("CartPole-v1", "categorical")])
def test_same_steps_as_rllib_s(explore, env, policy):
    found = []
    for cls in (RERPIEnvRunner, SingleAgentEnvRunner):
        runner = _runner(cls, env=env, policy=policy)
        torch.manual_seed(1)
        found.append([runner.sample(explore=explore)[0] for _ in range(3)])
    for ours, theirs in zip(*found):
        assert (len(ours), ours.t_started) == (len(theirs), theirs.t_started)
        for name in ("observations", "actions", "rewards"):
            np.testing.assert_allclose(
                getattr(ours, f"get_{name}")(), getattr(theirs, f"get_{name}")(), rtol=1e-5, atol=1e-6
            )
        log_probs = [e.get_extra_model_outputs(Columns.ACTION_LOGP) for e in (ours, theirs)]
        np.testing.assert_allclose(*log_probs, rtol=1e-4)


def _whitened(runner, episodes):
    """Return the noise of the actions in fragments that follow each other, ``[T, D]``."""
    noise = []
    for episode in episodes:
        observations = torch.from_numpy(episode.get_observations()[:-1])
        policy = runner.module.nets.policy(observations)
        actions = torch.from_numpy(episode.get_actions())
        noise.append((actions - policy.mean) / policy.stddev)
    return torch.cat(noise).detach()


@pytest.mark.parametrize("cls", [RERPIEnvRunner, SingleAgentEnvRunner])
@pytest.mark.parametrize("correlation", [0.0, 0.8])
def test_exploration_noise_is_as_similar_from_step_to_step_as_wanted(cls, correlation):
    runner = _runner(cls, correlation=correlation)
    noise = _whitened(runner, runner.sample(num_timesteps=4_000, explore=True))
    assert len(noise) == 4_000
    torch.testing.assert_close(noise.std(dim=0), torch.ones(2), atol=0.1, rtol=0)
    # It goes on from one episode of five steps to the next.
    similar = (noise[1:] * noise[:-1]).mean(dim=0) / noise.square().mean(dim=0)
    torch.testing.assert_close(similar, torch.full((2,), correlation), atol=0.07, rtol=0)
    greedy = _whitened(runner, runner.sample(num_timesteps=10, explore=False))
    torch.testing.assert_close(greedy, torch.zeros_like(greedy), atol=1e-5, rtol=0)


def test_each_environment_has_noise_of_its_own():
    runner = _runner(correlation=0.9, num_envs_per_env_runner=2)
    first, second = (
        _whitened(
            runner, [episode for episode in runner.sample(num_timesteps=2_000, explore=True)][i::2]
        )
        for i in (0, 1)
    )
    size = min(len(first), len(second))
    together = (first[:size] * second[:size]).mean() / first.square().mean()
    assert abs(float(together)) < 0.3


def test_policies_that_are_no_gaussian_sample_as_ever():
    runner = _runner(env="CartPole-v1", policy="categorical", correlation=0.0)
    config = tiny_config(policy="mixture").environment(Counting)
    config._accepted_settings = {"noise_correlation": 0.8}  # As a preset has it.
    config.training(noise_correlation=0.8)
    for each in (runner.config, config):
        assert len(RERPIEnvRunner(config=each).sample(num_timesteps=9, explore=True)) > 0


def test_noise_is_no_part_of_the_weights():
    runner, other = _runner(correlation=0.9), _runner()
    runner.sample(num_timesteps=10, explore=True)
    assert runner.module.state_dict().keys() == other.module.state_dict().keys()


def test_new_weights_act_at_once():
    runner = _runner()
    before = runner.sample(explore=False)[0]
    state = {key: value + 1.0 for key, value in runner.module.get_state().items()}
    runner.set_state({"rl_module": state})
    after = runner.sample(explore=False, force_reset=True)[0]
    with torch.no_grad():
        expected = runner.module.nets.policy(torch.as_tensor(after.get_observations()[:-1])).mode
    np.testing.assert_allclose(after.get_actions(), expected, rtol=1e-5)
    assert abs(after.get_actions() - before.get_actions()).min() > 0.1


@pytest.mark.parametrize("terminates", [True, False])
def test_pieces_continue_and_episodes_end(terminates):
    runner = _runner(env_config={"terminates": terminates}, num_envs_per_env_runner=2)
    pieces = [piece for _ in range(3) for piece in runner.sample()]
    assert sum(map(len, pieces)) == runner.get_metrics()["num_env_steps_sampled"].peek() == 42
    by_episode = {}
    for piece in pieces:
        by_episode.setdefault(piece.id_, []).append(piece)
    ended = [parts for parts in by_episode.values() if parts[-1].is_done]
    assert len(ended) == 8
    for parts in ended:
        counts = np.concatenate([[[0.0]], *(part.get_observations()[1:] for part in parts)])
        assert counts[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
        assert (parts[-1].is_terminated, parts[-1].is_truncated) == (terminates, not terminates)
        for before, after in itertools.pairwise(parts):
            assert after.get_observations(0) == before.get_observations(-1)


def test_metrics_of_episodes_over_several_pieces():
    runner = _runner()
    for _ in range(5):
        runner.sample()
    metrics = runner.get_metrics()
    assert metrics["episode_return_mean"].peek() == metrics["episode_len_mean"].peek() == 5.0


def test_whole_episodes_for_an_evaluation():
    runner = _runner(num_envs_per_env_runner=2)
    episodes = runner.sample(num_episodes=3, explore=False)
    assert [len(episode) for episode in episodes] == [5, 5, 5]
    assert runner.get_metrics()["num_episodes"].peek() == 3


def test_the_environment_gets_its_own_units():
    to_env_units = ToEnvUnits(Counting.action_space)
    actions = np.array([[-1.0, -1.0], [0.0, 0.5], [9.0, -9.0]], np.float32)
    assert to_env_units(actions).tolist() == [[0, -2], [2, 1], [4, -2]]
    assert ToEnvUnits(gym.spaces.Box(-np.inf, np.inf, (2,)))(actions) is actions


@pytest.mark.parametrize(
    "low,high", [([-1, -1], [1, np.inf]), ([-1, -np.inf], [1, np.inf]), ([0, 0], [np.inf, np.inf])]
)
def test_a_box_of_actions_with_bounds_on_some_sides_only_is_refused(low, high):
    space = gym.spaces.Box(np.float32(low), np.float32(high))

    class HalfBounded(Counting):
        action_space = space

    with pytest.raises(ValueError, match=r"ClipAction"):
        _runner(env=HalfBounded)
    # ClipAction gives the policy an unbounded space and keeps the environment's bounds.
    assert _runner(env=lambda config: gym.wrappers.ClipAction(HalfBounded(config))).sample()


def test_a_failing_environment():
    with pytest.raises(OSError, match="broken"):
        _runner(env_config={"fails": True}).sample()
    config = tiny_config().environment(Counting, env_config={"fails": True})
    config.fault_tolerance(restart_failed_sub_environments=True)
    config.env_runners(rollout_fragment_length=2)
    runner = RERPIEnvRunner(config=config, worker_index=0)
    assert sum(len(piece) for _ in range(4) for piece in runner.sample()) == 8


class FailingOnce(Counting):
    """Fails at one step, counted over all environments."""

    steps = 0

    def step(self, action):
        FailingOnce.steps += 1
        if FailingOnce.steps == self.failing_step:
            raise OSError("broken")
        return super().step(action)

    def __init__(self, config):
        super().__init__(config)
        self.failing_step = config["failing_step"]


@pytest.mark.parametrize("failing_step", [3, 8, 13])
def test_steps_are_counted_as_they_are_returned(failing_step):
    config = tiny_config().environment(FailingOnce, env_config={"failing_step": failing_step})
    config.fault_tolerance(restart_failed_sub_environments=True)
    config.env_runners(rollout_fragment_length=5, num_envs_per_env_runner=2)
    FailingOnce.steps = 0
    runner = RERPIEnvRunner(config=config, worker_index=0)
    pieces = [piece for _ in range(3) for piece in runner.sample()]
    assert FailingOnce.steps > failing_step
    metrics = runner.get_metrics()
    assert sum(map(len, pieces)) == metrics["num_env_steps_sampled"].peek() >= 30
    # All episodes have five steps, including the pieces that were returned before the failure.
    assert metrics["episode_len_mean"].peek() == 5.0


def test_a_failure_keeps_the_metrics_of_episodes_that_ended_before_it():
    # The episodes begin in the first call and end in the second; then an environment fails.
    config = tiny_config().environment(FailingOnce, env_config={"failing_step": 13})
    config.fault_tolerance(restart_failed_sub_environments=True)
    config.env_runners(rollout_fragment_length=3, num_envs_per_env_runner=2)
    FailingOnce.steps = 0
    runner = RERPIEnvRunner(config=config, worker_index=0)
    runner.sample(), runner.sample(num_timesteps=8)
    assert FailingOnce.steps > 13
    assert runner.get_metrics()["episode_len_min"].peek() == 5


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("mode", ["sync", "async", "vector_entry_point"])
def test_vectorised_environments_of_gymnasium(mode, num_envs):
    runner = _runner(
        env="CartPole-v1",
        policy="categorical",
        gym_env_vectorize_mode=mode,
        num_envs_per_env_runner=num_envs,
    )
    try:
        assert runner.is_lean == (mode == "sync")
        pieces = [piece for _ in range(20) for piece in runner.sample()]
        steps = sum(map(len, pieces))
        assert steps == runner.get_metrics()["num_env_steps_sampled"].peek()
        assert 20 * 7 * num_envs <= steps < 20 * (7 * num_envs + num_envs)
        by_episode = {}
        for piece in pieces:
            by_episode.setdefault(piece.id_, []).append(piece)
        ended = [parts for parts in by_episode.values() if parts[-1].is_done]
        assert ended
        for parts in ended:
            for before, after in itertools.pairwise(parts):
                np.testing.assert_array_equal(after.get_observations(0), before.get_observations(-1))
    finally:
        runner.stop()


def test_a_policy_that_fails_is_no_failing_environment(monkeypatch):
    config = tiny_config().environment(Counting)
    config.fault_tolerance(restart_failed_sub_environments=True)
    runner = RERPIEnvRunner(config=config, worker_index=0)
    monkeypatch.setattr("rerpi_rllib.algorithm.networks.act", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runner.sample()


def test_random_actions_in_between():
    runner = _runner()
    runner.sample()
    assert sum(map(len, runner.sample(random_actions=True))) == 7
    assert sum(map(len, runner.sample())) == 7


def test_rllib_s_loop_where_the_user_wants_more():
    assert _runner().is_lean

    class Mine(RLlibCallback):
        steps = 0

        def on_episode_step(self, **kwargs):
            Mine.steps += 1

    config = tiny_config().environment(Counting).callbacks(Mine)
    runner = RERPIEnvRunner(config=config, worker_index=0)
    assert not runner.is_lean
    runner.sample(num_timesteps=4)
    assert Mine.steps == 4
