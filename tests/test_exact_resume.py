"""A run that is resumed goes on as if it had never been interrupted, or with episodes of its own."""

import random
import subprocess
import sys
from itertools import chain

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import on_old_stack, tiny_config

from rerpi_rllib import RERPI, envs
from rerpi_rllib.algorithm import process, progress
from rerpi_rllib.algorithm.env_runner import RERPIEnvRunner
from rerpi_rllib.algorithm.networks import ExplorationNoise, record_act
from rerpi_rllib.core import layers
from rerpi_rllib.envs import states

EXACT = [
    "Pendulum-v1",
    "CartPole-v1",
    "dm_control/cartpole-swingup-v0",
    "dm_control/finger-turn_hard-v0",  # The target is a place in the model.
    "dm_control/lqr-lqr_2_1-v0",  # The model itself is drawn at random.
    "dm_control/walker-run-v0",  # It begins with contacts.
    "Ant-v5",  # Its reward needs positions from before the step.
    "Hopper-v5",
    "parkour/walker2d-v0",
    "parkour/humanoid-walls-v0",
]


def _steps(env, number, seed):
    """Act at random and return all that the environment gives; episodes begin anew now and then."""
    rng = np.random.default_rng(seed)
    given = []
    for step in range(number):
        space = env.action_space
        if isinstance(space, gym.spaces.Discrete):
            action = int(rng.integers(space.n))
        else:
            action = rng.uniform(space.low, space.high).astype(space.dtype)
        *numbers, terminated, truncated, _ = env.step(action)
        given += numbers
        if terminated or truncated or step % 15 == 14:
            given.append(env.reset()[0])
    return np.concatenate([np.ravel(numbers) for numbers in given])


@pytest.mark.parametrize("env_id", EXACT)
def test_an_episode_goes_on_in_another_environment(env_id, tmp_path):
    first = gym.wrappers.TimeLimit(envs.make(env_id), 10)
    first.reset(seed=1)
    _steps(first, 7, seed=0)
    progress.save(tmp_path, {"env": states.get_state(first)})
    second = gym.wrappers.TimeLimit(envs.make(env_id), 10)
    states.set_state(second, progress.load(tmp_path)["env"])
    np.testing.assert_array_equal(_steps(first, 40, seed=1), _steps(second, 40, seed=1))


class _Starts(gym.Env):
    """Ends after five steps; observes the number that its generator gave at the start."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,))
    action_space = gym.spaces.Box(-1.0, 1.0, (1,))

    def __init__(self, config):
        self.start = self.count = 0.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.start, self.count = self.np_random.random(), 0.0
        return self._observe(), {}

    def step(self, action):
        self.count += 1.0
        return self._observe(), self.start, False, self.count >= 5.0, {}

    def _observe(self):
        return np.array([self.start, self.count], np.float32)


class _OffersItsState(_Starts):
    def get_state(self):
        return {
            "numbers": np.array([self.start, self.count]),
            "generator": states.get_generator(self.np_random),
        }

    def set_state(self, state):
        self.start, self.count = state["numbers"]
        states.set_generator(self.np_random, state["generator"])


def test_which_environments_have_a_state():
    assert states.get_state(_Starts({})) is None
    own = gym.wrappers.TimeLimit(_OffersItsState({}), 5)
    own.reset(seed=0)
    taken = states.get_state(own)
    other = gym.wrappers.TimeLimit(_OffersItsState({}), 5)
    states.set_state(other, taken)
    np.testing.assert_array_equal(_steps(own, 12, seed=0), _steps(other, 12, seed=0))
    # Nothing is known of what this wrapper remembers.
    assert states.get_state(gym.wrappers.NormalizeReward(own)) is None
    # A user's subclass may remember more than its base.
    kind = type("Own", (type(gym.make("Pendulum-v1").unwrapped),), {"__module__": "own"})
    assert states.get_state(kind()) is None


def _runner(env, num_env_steps=0, **env_runners):
    config = tiny_config(noise_correlation=0.5).environment(env)
    config.env_runners(rollout_fragment_length=7, num_envs_per_env_runner=2, **env_runners)
    runner = RERPIEnvRunner(config=config, worker_index=0)
    runner.num_env_steps_sampled_lifetime = num_env_steps
    return runner


def _starts(runner, calls):
    """Return the starts of the episodes, which these environments observe at every step."""
    pieces = [piece for _ in range(calls) for piece in runner.sample()]
    return list(dict.fromkeys(start for piece in pieces for start in piece.get_observations()[:, 0]))


def _resumed(runner, tmp_path):
    progress.save(tmp_path, runner.get_progress())
    other = _runner(runner.config.env)
    other.module.set_state(runner.module.get_state())
    other.set_progress(progress.load(tmp_path))
    return other


def test_an_env_runner_goes_on_in_the_middle_of_episodes(tmp_path):
    first = _runner(_OffersItsState)
    before = [piece for _ in range(2) for piece in first.sample()]
    second = _resumed(first, tmp_path)
    state = progress.random_states()
    sampled = []
    for runner in (first, second):
        progress.set_random_states(state)
        sampled.append([piece for _ in range(3) for piece in runner.sample()])
    for one, other in zip(*sampled, strict=True):
        for name in ("get_observations", "get_actions", "get_rewards"):
            np.testing.assert_array_equal(getattr(one, name)(), getattr(other, name)())
    # The pieces of an episode belong together, and its metrics count those from before.
    assert {piece.id_ for piece in before} & {piece.id_ for piece in sampled[1]}
    metrics = [runner.get_metrics() for runner in (first, second)]
    assert metrics[1]["episode_len_mean"].peek() == 5.0
    kept = sum(piece.is_done for piece in sampled[1])
    returns = [list(m["episode_return_mean"].values) for m in metrics]
    assert returns[0][-kept:] == returns[1][-kept:]


class _Refuses(_OffersItsState):
    def get_state(self):
        raise OSError("not now")


class _OffersTooMuch(_OffersItsState):
    def get_state(self):
        return {"space": self.action_space}


@pytest.mark.parametrize("env", [_Refuses, _OffersTooMuch])
def test_a_state_that_cannot_be_stored_does_not_prevent_a_checkpoint(env, caplog, tmp_path):
    runner = _runner(env)
    starts = _starts(runner, 2)
    resumed = _resumed(runner, tmp_path)
    assert "state" in caplog.text
    assert not set(starts) & set(_starts(resumed, 2))


def test_after_a_failure_within_a_call_episodes_begin_anew(tmp_path, monkeypatch):
    runner = _runner(_OffersItsState)
    starts = _starts(runner, 2)
    monkeypatch.setattr(runner._envs[1].unwrapped, "_observe", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        for _ in range(9):
            runner.sample()
    resumed = _resumed(runner, tmp_path)
    assert not set(starts) & set(_starts(resumed, 2))


def test_without_a_state_episodes_begin_anew_and_otherwise(tmp_path):
    first = _runner(_Starts)
    starts = [_starts(first, 4)]
    for part in range(3):  # Each part of the run is resumed from the one before.
        first = _resumed(first, tmp_path / str(part))
        starts.append(_starts(first, 4))
    assert len(set(chain.from_iterable(starts))) == sum(map(len, starts))


def test_starts_do_not_repeat_where_environments_begin_anew():
    # In actors, which know how many steps the restored run has, and of whose states nothing is saved.
    first, resumed = (_starts(_runner(_Starts, num_env_steps=n), 4) for n in (0, 300))
    assert not set(first) & set(resumed)
    # After a failure.
    runner = _runner(_Starts)
    starts = _starts(runner, 4)
    runner.make_env()
    assert not set(starts) & set(_starts(runner, 4))
    # In a run of complete episodes, each of which needs a reset of all environments.
    runner = _runner(_Starts, batch_mode="complete_episodes")
    starts = _starts(runner, 4)
    assert len(starts) == 8


def test_an_evaluation_begins_as_the_one_before():
    config = tiny_config().environment(_Starts).copy(copy_frozen=False)
    config.in_evaluation = True
    runner = RERPIEnvRunner(config=config, worker_index=0)
    starts = [runner.sample(num_episodes=1)[0].get_observations()[0, 0] for _ in range(2)]
    assert starts[0] == starts[1]


def test_recording_leaves_the_noise_alone():
    runner = _runner(_Starts)
    noise = runner.module.noise
    assert isinstance(noise, ExplorationNoise)
    torch.manual_seed(0)
    noise.begin(torch.zeros(2, 2))
    before = noise.noise.clone()
    record_act(runner.module.nets, torch.zeros(2, 2), True, noise)
    torch.testing.assert_close(noise.noise, before, rtol=0, atol=0)


def test_random_generators_of_the_process(tmp_path):
    def draw():
        python, numpy, of_torch = random.gauss(0, 1), np.random.normal(), float(torch.randn(()))
        return python, numpy, of_torch, random.random(), np.random.random()

    draw()  # Half of what a generator of normal numbers makes is kept for the next time.
    progress.save(tmp_path, progress.random_states())
    drawn = draw()
    assert draw() != drawn
    progress.set_random_states(progress.load(tmp_path))
    assert draw() == drawn


# -- The whole of it: training. --


def _config(env):
    """Make a run whose iterations end in the middle of episodes, with all that has a state."""
    return (
        tiny_config(
            noise_correlation=0.5,
            normalize_observations=True,
            normalize_returns=True,
            policy_evaluation="retrace",
            sequence_length=4,
        )
        .environment(env)
        .env_runners(num_envs_per_env_runner=2)
        .reporting(min_sample_timesteps_per_iteration=150)
    )


def _flat(value, path=""):
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _flat(item, f"{path}/{key}")
    else:
        yield path, value


def _same(one, other, ignored=()):
    one, other = dict(_flat(one)), dict(_flat(other))
    assert one.keys() == other.keys()
    different = [
        path
        for path in one
        if not any(word in path for word in ignored)
        and not np.array_equal(one[path], other[path], equal_nan=isinstance(one[path], float))
    ]
    assert not different


def _assert_same_run(one, other):
    """Compare two algorithms and their results: weights, optimizers, replay, generators, metrics."""
    (algo, results), (other_algo, other_results) = one, other
    states = [algorithm.get_state() for algorithm in (algo, other_algo)]
    assert states[0]["learner_group"]["learner"]["optimizer"]
    for part in ("learner_group", "replay", "rate_limiter"):
        _same(*[state[part] for state in states], ignored=("metrics_logger",))
    _same(*[state["progress"]["random"] for state in states])
    episodes = [state["progress"]["env_runner"]["episodes"] for state in states]
    assert len(episodes[0]["pieces"]) == 2
    _same(*[episode["environments"] for episode in episodes])
    for result, other_result in zip(results, other_results, strict=True):
        for part in ("learners", "env_runners"):
            _same(
                result[part],
                other_result[part],
                ignored=("throughput", "time", "sec", "sample", "timer", "connector"),
            )
        for count in ("num_env_steps_sampled_lifetime", "num_updates_lifetime", "training_iteration"):
            assert result[count] == other_result[count]


@pytest.fixture
def by_no_clock(monkeypatch):
    """Let the layers compute in the same way in all processes, and not in the fastest."""
    monkeypatch.setattr(process, "choose_fastest", lambda: None)
    before = layers.get_choices()
    layers.set_choices({"onednn": False, "sigmoid": False})
    yield
    layers.set_choices(before)


_KILLED = """
import os, sys
from rerpi_rllib.algorithm import process
from test_exact_resume import _config
process.choose_fastest = lambda: None
algo = _config("Pendulum-v1").build_algo()
for _ in range(3):
    algo.train()
algo.save_checkpoint(sys.argv[1])
algo.train()  # This is lost.
os._exit(9)
"""


def test_a_killed_run_is_resumed_as_if_nothing_had_happened(ray_session, tmp_path, by_no_clock):
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], timeout=300)
    assert killed.returncode == 9
    straight = _config("Pendulum-v1").build_algo()
    results = [straight.train() for _ in range(6)]
    assert np.isfinite(results[-1]["env_runners"]["episode_return_mean"])
    resumed = RERPI.from_checkpoint(str(tmp_path))
    _assert_same_run((straight, results[3:]), (resumed, [resumed.train() for _ in range(3)]))
    # The same object goes back, too.
    resumed.restore(str(tmp_path))
    _assert_same_run((straight, results[3:]), (resumed, [resumed.train() for _ in range(3)]))
    straight.stop()
    resumed.stop()


def test_a_task_of_the_control_suite_is_resumed_exactly(ray_session, tmp_path, by_no_clock):
    layers.set_choices({"onednn": False, "sigmoid": True})
    straight = _config("dm_control/cartpole-swingup-v0").build_algo()
    for _ in range(2):
        straight.train()
    straight.save(str(tmp_path))
    results = [straight.train() for _ in range(2)]
    layers.set_choices({"onednn": False, "sigmoid": False})  # Another process chose otherwise.
    resumed = RERPI.from_checkpoint(str(tmp_path))
    assert layers.get_choices()["sigmoid"]
    _assert_same_run((straight, results), (resumed, [resumed.train() for _ in range(2)]))
    straight.stop()
    resumed.stop()


def _first_observations(replay):
    return {tuple(episode["observations"][0]) for episode in replay.pieces_of_episodes()}


@pytest.mark.parametrize("stack", ["new", "old"])
def test_env_runners_in_actors_begin_otherwise_after_a_resume(ray_session, tmp_path, stack):
    config = tiny_config().environment(_Starts)
    config.env_runners(num_env_runners=1, rollout_fragment_length=20)
    if stack == "old":
        on_old_stack(config)
    algo = config.build_algo()
    before = algo.train()
    algo.save(str(tmp_path))
    steps, updates = algo._limiter.env_steps, algo._limiter.updates
    starts = {start for start, _ in _first_observations(algo.replay)}
    algo.stop()
    resumed = RERPI.from_checkpoint(str(tmp_path))
    assert (resumed._limiter.env_steps, resumed._limiter.updates) == (steps, updates)
    assert len(resumed.replay) == steps
    after = resumed.train()
    later = {start for start, _ in _first_observations(resumed.replay)} - starts
    # Every episode that was sampled since then began where none has begun before.
    sampled = resumed._limiter.env_steps - steps
    assert len(later) >= sampled // 5 - 1
    # Updates are neither skipped nor made up for: they lag behind by a few requests at most.
    ahead = resumed._limiter.env_steps - resumed._limiter.updates / 0.5
    assert 0 <= ahead <= 3 * resumed.config.get_rollout_fragment_length()
    assert after["training_iteration"] == before["training_iteration"] + 1
    resumed.stop()
