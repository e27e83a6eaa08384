"""Faults are survived: broken numbers, environments that hang, learners that are killed."""

import os
import signal
import time

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import in_a_cluster_of_its_own, networks_of, on_old_stack, tiny_config
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.tune.registry import register_env

from rerpi_rllib.algorithm.faults import Screening, Waiting
from rerpi_rllib.algorithm.replay import ReplayBuffer

LENGTH = 20
START, MIDDLE, END = 0, 11, LENGTH


class Glitching(gym.Env):
    """Observes the number of its episode and of its steps; breaks in some episodes.

    ``bad`` in its configuration is the quantity and the number that it gives in step ``step`` of each
    episode in ``episodes``.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, config):
        self.quantity, self.number = config.get("bad", ("none", 0.0))
        self.step_of_it, self.episodes = config.get("step", 0), config.get("episodes", ())
        self.time, self.episode = 0, -1

    def _give(self, quantity, value):
        is_bad = self.time == self.step_of_it and self.episode in self.episodes
        return self.number if is_bad and quantity == self.quantity else value

    def _observation(self):
        last = self._give("observation", float(self.time))
        return np.array([self.episode, last]).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        self.time, self.episode = 0, self.episode + 1
        return self._observation(), {}

    def step(self, action):
        assert np.isfinite(action).all()
        self.time += 1
        return self._observation(), self._give("reward", 1.0), self.time == LENGTH, False, {}


class Counting(RLlibCallback):
    """Makes the EnvRunner leave its lean loop."""

    def on_episode_step(self, **kwargs):
        pass


register_env("glitching", Glitching)


def _config(loop="lean", policy="gaussian", **env_config):
    config = tiny_config(policy=policy).environment("glitching", env_config=env_config)
    config.env_runners(rollout_fragment_length=7)
    config.reporting(min_sample_timesteps_per_iteration=400)
    if loop == "rllib":
        config.callbacks(Counting)
    if loop == "old":
        on_old_stack(config)
    return config


PLACES = [("observation", START), ("observation", MIDDLE), ("observation", END)]
PLACES += [("reward", START + 1), ("reward", MIDDLE), ("reward", END)]
NUMBERS = [np.nan, -np.inf, 1e30]


# Each kind of number is in each loop and place, if not in each of their combinations.
@pytest.mark.parametrize(
    "loop,quantity,step,number",
    [
        (loop, *place, NUMBERS[(i + j) % 3])
        for i, loop in enumerate(["lean", "rllib", "old"])
        for j, place in enumerate(PLACES)
    ],
)
def test_bad_numbers_never_get_in(ray_session, loop, quantity, step, number, caplog):
    algorithm = _config(loop, bad=(quantity, number), step=step, episodes=[3]).build_algo()
    try:
        result = algorithm.train()
        assert result["num_bad_episodes"] == 1
        assert result["num_env_steps_sampled_lifetime"] >= 400
        assert result["num_updates_lifetime"] >= 150
        replay = algorithm.replay
        stored = replay.sample(5000)
        for column in ("obs", "new_obs", "rewards", "actions", "action_logp"):
            assert np.abs(stored[column]).max() < 100.0, column
        assert np.abs(replay.moments.mean).max() < 100.0 and replay.returns.scale < 100.0
        # Of the episode there is what came in whole pieces before, and it does not terminate.
        of_it = stored["obs"][:, 0] == 3
        assert (stored["new_obs"][of_it, 1] <= max(step - 1, 0)).all()
        assert not stored["terminateds"][of_it].any()
        # The others are there from start to end, also those after it.
        for episode in (2, 5):
            assert set(stored["obs"][stored["obs"][:, 0] == episode, 1]) == set(range(LENGTH))
        assert all(parameter.isfinite().all() for parameter in networks_of(algorithm).parameters())
        assert result["env_runners"]["episode_return_mean"] == LENGTH or loop == "old"
        named = [record.message for record in caplog.records if "glitching" in record.message]
        assert len(named) == 1 and f"{quantity} {number:.3g}" in named[0], named
        assert f"step {step if quantity == 'observation' else step - 1} " in named[0]
    finally:
        algorithm.stop()


@pytest.mark.parametrize("policy", ["mixture", "full_gaussian"])
@pytest.mark.parametrize("loop", ["lean", "rllib"])
def test_no_policy_stumbles_over_bad_observations(ray_session, loop, policy):
    config = _config(loop, policy, bad=("observation", np.nan), step=START, episodes=[1, 3])
    config.reporting(min_sample_timesteps_per_iteration=150)
    algorithm = config.build_algo()
    assert algorithm.train()["num_bad_episodes"] == 2
    algorithm.stop()


@pytest.mark.parametrize("loop", ["lean", "rllib", "old"])
def test_too_many_bad_episodes_end_the_run(ray_session, loop):
    episodes = range(0, 1000, 4)
    bad = {"bad": ("reward", np.nan), "step": MIDDLE, "episodes": episodes}
    algorithm = _config(loop, **bad).build_algo()
    with pytest.raises(RuntimeError, match=r"glitching gave NaN.*max_bad_episode_share=0.1.*reward"):
        algorithm.train()
    assert len(algorithm.replay) and np.isfinite(algorithm.replay.sample(1000)["rewards"]).all()
    algorithm.stop()
    config = _config(loop, **bad).training(max_bad_episode_share=0.5)
    algorithm = config.build_algo()
    assert algorithm.train()["num_bad_episodes"] > 3
    algorithm.stop()


def test_the_share_is_that_of_the_last_episodes():
    screening = Screening()

    def give(reward, times, pieces=1):
        for _ in range(times):
            give.episode += 1
            for piece in range(pieces):
                columns = {"reward": np.array([reward], np.float32)}
                done = piece == pieces - 1
                screening.passes(str(give.episode), columns, first_step=piece, done=done)

    give.episode = 0
    give(np.nan, 2)
    assert not screening.exceeds(0.1)  # There are too few to tell.
    give(1.0, 8, pieces=3)
    assert screening.counted == (2, 10) and screening.exceeds(0.1) and not screening.exceeds(0.2)
    give(1.0, 90)
    assert screening.counted == (2, 100)
    give(1.0, 10)
    assert screening.counted == (0, 100)
    give(np.inf, 10, pieces=3)  # Each counts once.
    assert screening.counted == (10, 100) and not screening.exceeds(0.1)
    assert len(screening.found) == 12


@pytest.mark.parametrize("number", NUMBERS, ids=str)
@pytest.mark.parametrize("column", ["observations", "actions", "rewards", "log_probs"])
def test_the_rest_of_an_episode_is_dropped_and_its_beginning_stays(column, number):
    replay = ReplayBuffer(100, 2, 1)

    def add(episode, first_step, bad=False, done=False):
        piece = {
            "observations": np.ones((6, 2), np.float32),
            "actions": np.ones((5, 1), np.float32),
            "rewards": np.ones(5, np.float32),
            "log_probs": np.ones(5, np.float32),
        }
        if bad:
            piece[column][3] = number
        replay.add(episode, **piece, terminated=done, done=done, first_step=first_step)

    add("a", 0)
    known, scale = replay.moments.count, replay.returns.scale
    add("a", 5, bad=True)
    add("a", 10)
    add("a", 15, done=True)
    assert len(replay) == 5 and replay.moments.count == known and replay.returns.scale == scale
    assert len(replay.screening.found) == 1 and "step 8 " in replay.screening.found[0]
    assert not replay.sample(100)["terminateds"].any()
    add("b", 0, done=True)
    assert len(replay) == 10 and np.abs(replay.sample(1000)["rewards"]).max() == 1.0


def _poison(replay):
    """Put bad numbers into the replay behind the back of whoever checks them."""
    replay._columns["rewards"][:] = np.nan


@pytest.mark.parametrize("stack", ["new", "old", "rllib's steps"])
def test_updates_that_become_nan_are_undone(ray_session, stack):
    config = _config("old" if stack == "old" else "lean")
    if stack == "rllib's steps":
        config.training(grad_clip=10.0)
    algorithm = config.build_algo()
    before_any = {k: v.clone() for k, v in networks_of(algorithm).state_dict().items()}
    good = algorithm.train()
    assert good["num_nonfinite_updates"] == 0

    def state():
        state = algorithm.get_policy().get_state() if stack == "old" else algorithm.learner_group
        state = state if stack == "old" else state.get_state()["learner"]
        nets = {key: value.clone() for key, value in networks_of(algorithm).state_dict().items()}
        optimizers = state["_optimizer_variables" if stack == "old" else "optimizer"]
        return nets, repr(optimizers)

    nets, optimizers = state()
    assert not torch.equal(nets["num_updates"], before_any["num_updates"])
    rewards = algorithm.replay._columns["rewards"].copy()
    _poison(algorithm.replay)
    updates = algorithm._limiter.updates
    algorithm._learn(7)
    after = state()
    assert after[0].keys() == nets.keys() and after[1] == optimizers
    for name, value in nets.items():
        assert torch.equal(after[0][name], value), name
    assert algorithm._limiter.updates == updates
    # With good numbers it goes on as if nothing had been.
    algorithm.replay._columns["rewards"][:] = rewards
    result = algorithm.train()
    assert result["num_nonfinite_updates"] == 7
    assert result["num_updates_lifetime"] == int(networks_of(algorithm).num_updates) > updates
    nets, optimizers = state()
    _poison(algorithm.replay)
    with pytest.raises(FloatingPointError, match=r"3 times in a row.*critic_loss.*rewards nan"):
        algorithm.train()
    for name, value in state()[0].items():
        assert torch.equal(value, nets[name]), name
    algorithm.stop()


def test_first_updates_that_become_nan_are_undone(ray_session):
    """Then the optimizers have no state yet."""
    algorithm = _config().build_algo()
    nets = {key: value.clone() for key, value in networks_of(algorithm).state_dict().items()}
    algorithm.replay.add(
        "a",
        observations=np.ones((41, 2), np.float32),
        actions=np.ones((40, 1), np.float32),
        rewards=np.ones(40, np.float32),
        log_probs=np.ones(40, np.float32),
        terminated=False,
        done=True,
    )
    _poison(algorithm.replay)
    algorithm._learn(3)
    for name, value in networks_of(algorithm).state_dict().items():
        assert torch.equal(value, nets[name]), name
    optimizers = algorithm.learner_group._learner.get_optimizers_for_module("default_policy")
    assert all(not optimizer.state for _, optimizer in optimizers)
    algorithm.replay._columns["rewards"][:] = 0.0
    algorithm._learn(3)
    assert int(networks_of(algorithm).num_updates) == algorithm._limiter.updates == 3
    algorithm.stop()


def test_an_environment_that_hangs_is_started_anew(ray_session, tmp_path, caplog, monkeypatch):
    marker = tmp_path / "hung"

    class Hanging(Glitching):
        def step(self, action):
            if self.episode == 5 and not marker.exists():
                marker.touch()
                time.sleep(1e6)
            return super().step(action)

    register_env("hanging", Hanging)
    config = _config().environment("hanging").training(env_timeout_s=5.0)
    config.env_runners(num_env_runners=1).reporting(min_time_s_per_iteration=1)
    config.fault_tolerance(delay_between_env_runner_restarts_s=0)
    algorithm = config.build_algo()
    try:
        while not algorithm.train()["num_env_runner_restarts"]:
            pass
        assert marker.exists()
        steps, updates = algorithm._limiter.env_steps, algorithm._limiter.updates
        while (result := algorithm.train())["num_env_steps_sampled_lifetime"] < steps + 500:
            pass
        assert result["num_env_runner_restarts"] == 1
        assert result["num_updates_lifetime"] > updates
        assert any("EnvRunner 1" in r.message and "hangs" in r.message for r in caplog.records)
        # It takes the newest weights with the next request, for which there is no learning here.
        monkeypatch.setattr(algorithm, "_updates_due", lambda: 0)
        algorithm._limiter._ratio = None
        algorithm.train()
        (acting,) = algorithm.env_runner_group.foreach_env_runner(
            lambda runner: runner.get_state()["rl_module"], local_env_runner=False
        )
        newest = algorithm.learner_group.get_state()["learner"]["rl_module"]["default_policy"]
        assert all(np.allclose(acting[key], newest[key]) for key in acting)
    finally:
        algorithm.stop()


def test_waiting_is_not_what_passes_while_nobody_looks(monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    waiting = Waiting()
    waiting.asked(1), waiting.asked(1), waiting.asked(2)
    now = 1000.0  # The main process was busy.
    assert waiting.longer_than(3.0, [1, 2]) == {}
    for _ in range(4):
        now += 0.5
        waiting.longer_than(3.0, [1, 2])
    waiting.answered(1)
    for _ in range(4):
        now += 0.5
        hanging = waiting.longer_than(3.0, [1, 2])
    assert hanging == {2: 5.0}
    waiting.answered(1)  # Now nothing is expected of it.
    now += 1.0
    assert waiting.longer_than(0.5, [1]) == {}


def _kill_learner(algorithm):
    (result,) = algorithm.learner_group.foreach_learner(lambda learner: os.getpid())
    os.kill(result.get(), signal.SIGKILL)


def test_a_killed_learner_is_replaced(ray_session, caplog):
    config = _config().learners(num_learners=1)
    algorithm = config.build_algo()
    try:
        before = algorithm.train()["num_updates_lifetime"]
        algorithm._backup._kept = 0.0  # A minute later.
        algorithm._learn(5)
        known = algorithm._limiter.updates
        algorithm._learn(5)
        _kill_learner(algorithm)
        result = algorithm.train()
        assert result["num_learner_restarts"] == 1
        for _ in range(2):
            result = algorithm.train()
        state = algorithm.learner_group.get_state()["learner"]
        made = int(state["rl_module"]["default_policy"]["nets.num_updates"])
        assert made == result["num_updates_lifetime"] == algorithm._limiter.updates > known > before
        assert made / result["num_env_steps_sampled_lifetime"] == pytest.approx(0.5, rel=0.05)
        # The EnvRunner takes the weights of the new learner.
        acting = algorithm.env_runner.get_state()["rl_module"]
        newest = state["rl_module"]["default_policy"]
        assert all(np.allclose(acting[key], newest[key]) for key in acting)
        assert any("10 updates are lost" in record.message for record in caplog.records)
    finally:
        algorithm.stop()


LOSES_A_NODE = """
import ray
from conftest import tiny_config
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
away = {"num_cpus": 1, "resources": {"away": 1}}
node = cluster.add_node(**away)
config = tiny_config().reporting(min_time_s_per_iteration=1)
config.env_runners(num_env_runners=1, custom_resources_per_env_runner={"away": 1})
config.fault_tolerance(env_runner_health_probe_timeout_s=5)
algorithm = config.build_algo()

def train_until(steps):
    result = {}
    while result.get("num_env_steps_sampled_lifetime", 0) < steps:
        result = algorithm.train()
    return result

train_until(400)
cluster.remove_node(node, allow_graceful=False)
cluster.add_node(**away)
result = train_until(algorithm._limiter.env_steps + 400)
assert result["num_env_runner_restarts"] >= 1
assert len(algorithm.replay) == result["num_env_steps_sampled_lifetime"]
algorithm.stop()
ray.shutdown()
cluster.shutdown()
print("survived", flush=True)
"""


def test_a_node_of_the_cluster_is_lost():
    in_a_cluster_of_its_own(LOSES_A_NODE)
