"""Training through RLlib: repeatable, at the given update ratio, in any arrangement of processes."""

import copy
import time

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import METRICS, SMALL, networks_of, tiny_config
from ray.tune.registry import get_trainable_cls, register_env

from rerpi_rllib import RERPI, DDPGConfig, MPOConfig, SVG0Config
from rerpi_rllib.algorithm.rate_limiter import RateLimiter

pytestmark = pytest.mark.usefixtures("ray_session")


def _learner_metrics(result):
    return result["learners"]["default_policy"]


def _run(config, iterations=2):
    algo = config.build_algo()
    try:
        return [algo.train() for _ in range(iterations)]
    finally:
        algo.stop()


def test_one_seed_one_run():
    first, second = (_run(tiny_config(), 3) for _ in range(2))
    for a, b in zip(first, second):
        for name in METRICS:
            assert _learner_metrics(a)[name] == _learner_metrics(b)[name], name
        returns = [r["env_runners"]["episode_return_mean"] for r in (a, b)]
        assert returns[0] == returns[1] or np.isnan(returns).all()
    other = _run(tiny_config().debugging(seed=4), 1)[0]
    assert _learner_metrics(other)["critic_loss"] != _learner_metrics(first[0])["critic_loss"]


@pytest.mark.parametrize("temperature_solver", ["exact", "adam"])
@pytest.mark.parametrize("per_dimension_kl", [False, True])
def test_metrics_are_there_and_finite(temperature_solver, per_dimension_kl):
    config = tiny_config(temperature_solver=temperature_solver, per_dimension_kl=per_dimension_kl)
    metrics = _learner_metrics(_run(config, 1)[0])
    assert all(np.isfinite(metrics[name]) for name in METRICS)


@pytest.mark.parametrize(
    "settings",
    [
        {"policy_evaluation": "nstep", "n_step": 3, "sequence_length": 4},
        {"policy_evaluation": "retrace", "sequence_length": 8, "weighting": "ranking"},
        {"fit": "coupled", "weighting": "identity"},
        {"fit": "unconstrained", "temperature_solver": "adam", "epsilon_penalty": 1e-3},
        {"policy": "full_gaussian", "critic": "categorical"},
        {"policy": "mixture", "critic": "quantile", "num_critics": 2},
        {"policy": "deterministic", "fit": "coupled"},
    ],
)
def test_other_ways_of_doing_the_three_steps(settings):
    metrics = _learner_metrics(_run(tiny_config(**settings), 1)[0])
    assert all(np.isfinite(metrics[name]) for name in ("critic_loss", "policy_loss", "kl_mu"))


@pytest.mark.parametrize("name", ["MPO", "SVG0", "DDPG"])
def test_baselines_by_name(name):
    """Build them as Tune does: from the name and the settings that differ."""
    algorithm = get_trainable_cls(name)
    config = algorithm.get_default_config().update_from_dict(
        {**SMALL, "env": "Pendulum-v1", "num_env_runners": 0}
    )
    assert config.algo_class is algorithm
    metrics = _learner_metrics(_run(config, 1)[0])
    assert all(np.isfinite(metrics[name]) for name in ("critic_loss", "policy_loss", "kl_mu"))
    assert ("alpha_pi" in metrics) == (name == "MPO")
    assert ("temperature" in metrics) == (name == "MPO")


def test_baselines_are_the_papers():
    mpo, svg, ddpg = MPOConfig(), SVG0Config(), DDPGConfig()
    assert mpo.fit == "coupled"
    assert svg.entropy_weight == 1e-3 and svg.tanh_mean and svg.min_stddev**2 == pytest.approx(0.1)
    assert ddpg.lr == 1e-4 and ddpg.tanh_mean and ddpg.tanh_observations
    assert ddpg.initial_stddev == 0.3 and ddpg.policy == "deterministic"
    for config in (mpo, svg, ddpg):
        config.copy().environment("Pendulum-v1").validate()
        type(config).compact().environment("Pendulum-v1").validate()


def test_discrete_actions():
    config = tiny_config(policy="categorical").environment("CartPole-v1")
    algo = config.build_algo()
    try:
        result = algo.train()
        metrics = _learner_metrics(result)
        assert np.isfinite(metrics["kl_pi"]) and 0.0 < metrics["policy_entropy"] <= np.log(2)
        actions = algo.replay.sample(64)["actions"]
        assert actions.shape == (64, 1) and set(np.unique(actions)) == {0.0, 1.0}
        module = algo.get_module()
        greedy = module.forward_inference({"obs": torch.zeros(3, 4)})["actions"]
        assert greedy.shape == (3,) and greedy.dtype == torch.int64
    finally:
        algo.stop()


def test_retrace_on_two_learners():
    config = tiny_config(policy_evaluation="retrace").learners(num_learners=2)
    assert np.isfinite(_learner_metrics(_run(config, 1)[0])["critic_loss"])


def _ratio(result):
    return result["num_updates_lifetime"] / result["num_env_steps_sampled_lifetime"]


@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.5])
def test_ratio_of_updates_to_steps_synchronous(ratio):
    result = _run(tiny_config(updates_per_env_step=ratio))[-1]
    assert _ratio(result) == pytest.approx(ratio, rel=0.05)


def test_ratio_of_updates_to_steps_asynchronous():
    config = tiny_config(updates_per_env_step=0.5).env_runners(num_env_runners=1)
    config.reporting(min_sample_timesteps_per_iteration=2500)
    result = _run(config, 1)[-1]
    assert _ratio(result) == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("num_env_runners", [0, 1])
def test_free_running_learner_and_env_runner(num_env_runners):
    config = tiny_config(updates_per_env_step=None)
    config.env_runners(num_env_runners=num_env_runners)
    results = _run(config, 3)
    steps = [r["num_env_steps_sampled_lifetime"] for r in results]
    updates = [r["num_updates_lifetime"] for r in results]
    assert steps == sorted(set(steps)) and updates == sorted(set(updates))


@pytest.mark.parametrize("runners,envs,learners", [(1, 1, 1), (2, 2, 0), (0, 3, 0), (1, 1, 2)])
def test_other_arrangements(runners, envs, learners):
    config = (
        tiny_config(policy_update_period=2)
        .env_runners(num_env_runners=runners, num_envs_per_env_runner=envs)
        .learners(num_learners=learners)
    )
    algo = config.build_algo()
    try:
        for _ in range(100):  # Enough iterations even for a slow machine.
            result = algo.train()
            if result["num_updates_lifetime"] > 50:
                break
        assert result["num_updates_lifetime"] > 50
        assert np.isfinite(_learner_metrics(result)["critic_loss"])
        assert len(algo.replay) == result["num_env_steps_sampled_lifetime"]
        if learners == 2:
            weights = algo.learner_group.foreach_learner(
                lambda learner: learner.get_state(components="rl_module")["rl_module"]
            )
            a, b = (w.get()["default_policy"] for w in weights)
            assert all(np.array_equal(a[key], b[key]) for key in a)
    finally:
        algo.stop()


def test_targets_are_copied_by_the_count_of_updates():
    """This holds when a call makes several updates, and when it ends between two copies."""
    config = tiny_config(target_update_period=20, updates_per_env_step=1)
    algo = config.build_algo()
    try:
        copies = []
        learner = algo.learner_group._learner
        nets = learner.module["default_policy"].nets
        original = nets.update_targets
        nets.update_targets = lambda: (copies.append(int(nets.num_updates)), original())
        for _ in range(2):
            algo.train()
        assert copies == list(range(20, int(nets.num_updates) + 1, 20)) and len(copies) > 10
    finally:
        algo.stop()


class _Recorder(gym.Env):
    """Records its three-dimensional actions in [0, 10], and terminates after 30 steps."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Box(0.0, 10.0, (3,), np.float32)

    def __init__(self, config=None):
        self.actions, self.time, self.episode = [], 0, -1

    def _observation(self):
        return np.array([self.episode, self.time], np.float32)

    def reset(self, *, seed=None, options=None):
        self.time, self.episode = 0, self.episode + 1
        return self._observation(), {}

    def step(self, action):
        self.actions.append(np.array(action))
        self.time += 1
        return self._observation(), float(self.time), self.time == 30, False, {}


def test_what_the_environment_and_the_replay_get():
    register_env("recorder", _Recorder)
    config = tiny_config(initial_stddev=2.0).environment("recorder")
    algo = config.build_algo()
    try:
        algo.train()
        env = algo.env_runner.env.unwrapped.envs[0].unwrapped
        seen = np.array(env.actions)
        assert seen.min() == 0.0 and seen.max() == 10.0  # clipped, in the environment's units
        stored = algo.replay.sample(5000)
        assert abs(stored["actions"]).max() > 2.0  # unclipped, in normalised units
        episode, time = stored["obs"].T.astype(int)
        np.testing.assert_array_equal(stored["new_obs"][:, 0], episode)
        np.testing.assert_array_equal(stored["new_obs"][:, 1], time + 1)
        np.testing.assert_array_equal(stored["terminateds"], time == 29)
        np.testing.assert_array_equal(stored["rewards"], time + 1)
        sent = seen[(30 * episode + time)]
        np.testing.assert_allclose(5 * (stored["actions"].clip(-1, 1) + 1), sent, atol=1e-5)
        # Log-probabilities are those of the unclipped sample. The very first steps were taken with
        # the initial weights.
        fresh = config.copy(copy_frozen=False).build_algo()
        first = episode == 0
        with torch.no_grad():
            policy = fresh.get_module().nets.policy(torch.from_numpy(stored["obs"][first]))
            expected = policy.log_prob(torch.from_numpy(stored["actions"][first]))
        np.testing.assert_allclose(stored["action_logp"][first], expected, rtol=1e-4, atol=1e-4)
        fresh.stop()
    finally:
        algo.stop()


def test_checkpoint_holds_everything(tmp_path):
    algo = tiny_config().build_algo()
    algo.train()
    algo.train()
    path = str(tmp_path / "checkpoint")
    algo.save_to_path(path)
    state = copy.deepcopy(algo.get_state())
    before = algo.learner_group.get_state()["learner"]
    algo.stop()

    restored = RERPI.from_checkpoint(path)
    # The machine that restores a checkpoint looks for a GPU itself.
    assert restored.get_ctor_args_and_kwargs()[0][0]["num_gpus_per_learner"] == "auto"
    try:
        after = restored.learner_group.get_state()["learner"]
        weights = [s["rl_module"]["default_policy"] for s in (before, after)]
        assert weights[0].keys() == weights[1].keys()
        assert any("multipliers" in key for key in weights[0])
        for key in weights[0]:
            np.testing.assert_array_equal(weights[0][key], weights[1][key])
        assert int(weights[0]["nets.num_updates"]) == 200
        optimizers = [
            s["optimizer"]["default_policy_dual"]["state"]["state"] for s in (before, after)
        ]
        assert optimizers[0][0]["step"] == optimizers[1][0]["step"] == 200
        assert len(restored.replay) == 400
        assert restored.replay.get_state()["stored"] == state["replay"]["stored"]
        assert restored.iteration == 2
        result = restored.train()
        assert result["num_env_steps_sampled_lifetime"] == 600
        assert result["num_updates_lifetime"] == 300
        assert result["training_iteration"] == 3
        restored.set_state(state)
        assert restored.replay.get_state()["stored"] == state["replay"]["stored"]
    finally:
        restored.stop()


def test_a_lost_env_runner_is_replaced():
    import os
    import signal

    config = tiny_config().env_runners(num_env_runners=2)
    config.fault_tolerance(restart_failed_env_runners=True, delay_between_env_runner_restarts_s=0)
    algo = config.build_algo()
    try:
        algo.train()
        pids = algo.env_runner_group.foreach_env_runner(
            lambda runner: os.getpid(), local_env_runner=False
        )
        os.kill(pids[0], signal.SIGKILL)
        steps = algo.train()["num_env_steps_sampled_lifetime"]
        deadline = time.monotonic() + 300.0  # Training does not wait for it.
        while (result := algo.train()) and time.monotonic() < deadline:
            if algo.env_runner_group.num_healthy_remote_workers() == 2:
                break
        assert algo.env_runner_group.num_healthy_remote_workers() == 2
        assert result["num_env_steps_sampled_lifetime"] > steps
    finally:
        algo.stop()


@pytest.mark.parametrize("runners", [0, 1])
def test_an_environment_that_fails_now_and_then_is_survived(runners):
    class Flaky(_Recorder):
        def step(self, action):
            if self.episode == 2:
                raise OSError("a loose cable")
            return super().step(action)

    register_env("flaky", Flaky)
    result = _run(tiny_config().environment("flaky").env_runners(num_env_runners=runners), 2)[-1]
    assert result["num_env_steps_sampled_lifetime"] >= 400


@pytest.mark.parametrize("runners", [0, 1])
def test_an_environment_that_always_fails_ends_the_run(runners):
    class Dead(_Recorder):
        def step(self, action):
            raise OSError("the robot is on fire")

    register_env("dead", Dead)
    with pytest.raises(RuntimeError, match=r"dead.*3 times(.|\n)*on fire"):
        _run(tiny_config().environment("dead").env_runners(num_env_runners=runners), 1)


def test_an_environment_that_cannot_be_built_again_ends_the_run(tmp_path):
    marker = tmp_path / "unplugged"

    class Unplugged(_Recorder):
        def __init__(self, config):
            if marker.exists():
                raise OSError("no such device")
            super().__init__(config)

        def step(self, action):
            marker.touch()
            raise OSError("unplugged")

    register_env("unplugged", Unplugged)
    with pytest.raises(RuntimeError, match=r"unplugged.*3 times(.|\n)*no such device"):
        _run(tiny_config().environment("unplugged").env_runners(num_env_runners=1), 3)


def test_nan_rewards_in_all_episodes_stop_the_run_and_say_so():
    class Broken(_Recorder):
        def step(self, action):
            observation, _, *rest = super().step(action)
            return observation, float("nan"), *rest

    register_env("broken", Broken)
    with pytest.raises(RuntimeError, match=r"broken gave NaN.*50 of the last 50.*reward nan"):
        _run(tiny_config().environment("broken"), 1)


def test_wrong_spaces_are_refused_by_the_algorithm():
    with pytest.raises(ValueError, match="Discrete"):
        tiny_config().environment("CartPole-v1").build_algo()


def test_rate_limiter():
    limiter = RateLimiter(0.5, learning_starts=100)
    limiter.env_steps = 99
    assert limiter.updates_due(limit=1000) == 0 and limiter.may_sample(500, 50)
    limiter.env_steps = 100
    assert limiter.updates_due(limit=1000) == 50 and limiter.updates_due(limit=7) == 7
    assert not limiter.may_sample(0, 50)
    limiter.updates = 50
    assert limiter.updates_due(limit=1000) == 0
    assert limiter.may_sample(0, 50) and limiter.may_sample(50, 50)
    assert not limiter.may_sample(51, 50)
    # A new ratio holds from the restored state on: no updates are made up for, and none waited for.
    for ratio in (0.1, 5.0):
        other = RateLimiter(ratio, learning_starts=100)
        other.set_state(limiter.get_state())
        assert other.updates_due(limit=1000) == 0 and other.may_sample(0, 50)
        other.env_steps += 20
        assert other.updates_due(limit=1000) == 20 * ratio
        again = RateLimiter(ratio, learning_starts=100)
        again.set_state(other.get_state())
        assert again.updates_due(limit=1000) == 20 * ratio
    # With less than one update per request, sampling continues until an update is due.
    slow = RateLimiter(0.005, learning_starts=10)
    for _ in range(100):
        slow.updates += slow.updates_due(limit=1000)
        assert slow.may_sample(0, 50)
        slow.env_steps += 50
    assert slow.updates == pytest.approx(0.005 * 5000, abs=1)
    free = RateLimiter(None, learning_starts=10)
    free.env_steps = 10
    assert free.updates_due(limit=5) == 5 and free.may_sample(10**9, 1)


@pytest.mark.parametrize("new_stack", [True, False], ids=["new", "old"])
def test_networks_are_normalized_by_what_was_gathered(ray_session, tmp_path, new_stack):
    config = tiny_config(normalize_observations=True, normalize_returns=True)
    config.env_runners(num_env_runners=1)
    config.api_stack(
        enable_rl_module_and_learner=new_stack, enable_env_runner_and_connector_v2=new_stack
    )
    algorithm = config.build_algo()
    while not algorithm._limiter.updates:
        algorithm.train()

    def of_networks(algorithm):
        nets = networks_of(algorithm)
        names = ("body.0.mean", "body.0.stddev", "inputs.0.mean", "inputs.0.stddev", "return_scale")
        return {name: value for name, value in nets.state_dict().items() if name.endswith(names)}

    known = of_networks(algorithm)
    networks = {"policy", "target_policy", "critic", "target_critic", "return_scale"}
    assert {name.split(".")[0] for name in known} == networks
    # Its rewards are down to -16 a step.
    assert float(known["return_scale"]) > 10.0
    # Pendulum's third observation is a velocity of up to eight.
    assert all(float(value[2]) > 1.0 for name, value in known.items() if name.endswith("stddev"))
    algorithm.save(str(tmp_path))
    moments, scale = algorithm.replay.moments, algorithm.replay.returns.scale
    algorithm.stop()
    restored = type(algorithm).from_checkpoint(str(tmp_path))
    np.testing.assert_array_equal(restored.replay.moments.mean, moments.mean)
    assert restored.replay.returns.scale == scale
    for name, value in of_networks(restored).items():
        torch.testing.assert_close(value, known[name], msg=name)
    restored.stop()
