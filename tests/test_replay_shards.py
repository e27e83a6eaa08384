"""Replay in shards: the same steps, statistics and checkpoints as one replay, less what is lost."""

import time

import numpy as np
import pytest
import ray
from conftest import on_old_stack, tiny_config

from rerpi_rllib.algorithm.faults import Screening
from rerpi_rllib.algorithm.replay import ReplayBuffer
from rerpi_rllib.algorithm.replay_shards import ReplayShards, Report, join
from rerpi_rllib.algorithm.rerpi import RERPI, NoBatch

SIZES = {"observation_size": 2, "action_size": 1, "gamma": 0.9}


def _piece(first, length, episode, done=True, reward=1.0):
    """Make steps whose observations count up from ``first``, as an episode or a part of one."""
    return {
        "episode_id": episode,
        "observations": np.arange(first, first + length + 1, dtype=np.float32)[:, None].repeat(2, 1),
        "actions": np.zeros((length, 1), np.float32),
        "rewards": np.full(length, reward, np.float32),
        "log_probs": np.zeros(length, np.float32),
        "terminated": False,
        "done": done,
    }


def _make(num_shards):
    return ReplayShards(
        3000,
        num_shards=num_shards,
        num_env_runners=3,
        lanes_per_env_runner=2,
        length=None,
        num_learners=2,
        seed=0,
        **SIZES,
    )


@pytest.fixture(scope="module")
def two(ray_session):
    """Make two shards once, since processes take a while to start."""
    return _make(2)


@pytest.fixture
def shards(two):
    """Empty them."""
    two.set_state(ReplayBuffer(3000, **SIZES).get_state())
    two.screening = Screening()
    return two


def _fill(shards, lengths):
    """Give shards so many steps each, and return all of these, numbered from 0, as one replay."""
    one, first = ReplayBuffer(3000, **SIZES), 0
    for number, length in enumerate(lengths):
        piece = _piece(first, length, f"{number}")
        shards.take(ray.get(shards.actors[number % len(shards.actors)].add.remote([piece])))
        one.add(**piece)
        first += length
    return one


def _batches(shards, rows):
    """Draw the batches of all learners, and check that the caller got no rows of them."""
    data = shards.draw(rows, None)
    assert data.batch is None and all(isinstance(ref, ray.ObjectRef) for ref in data.batch_refs)
    per_learner = len(data.batch_refs) // shards._num_learners
    rng = np.random.default_rng(0)
    return [
        join(ray.get(data.batch_refs[start : start + per_learner]), rng)
        for start in range(0, len(data.batch_refs), per_learner)
    ]


def test_every_step_of_all_shards_is_equally_likely(shards):
    one = _fill(shards, [300, 60, 40])
    assert len(shards) == 400 and shards.sizes == [340, 60]
    first, second = _batches(shards, 80_000)
    assert len(first["rewards"]) == len(second["rewards"]) == 40_000
    assert not np.array_equal(first["obs"], second["obs"])
    counts = np.bincount(first["obs"][:, 0].astype(int), minlength=400)
    # The counts of one replay have a deviation of about the root of their mean, 10.
    assert len(counts) == 400 and abs(counts - 100).max() < 60
    assert counts[:300].mean() == pytest.approx(100, rel=0.03)
    # Updates that take a part of the batch see all shards, too.
    part = first["obs"][:500, 0]
    assert np.mean((part >= 300) & (part < 360)) == pytest.approx(0.15, abs=0.08)
    # What is known of all steps is what one replay knows.
    np.testing.assert_allclose(shards.moments.mean, one.moments.mean)
    np.testing.assert_allclose(shards.moments.stddev, one.moments.stddev)
    assert shards.moments.count == one.moments.count
    assert shards.returns.scale == pytest.approx(one.returns.scale)


@pytest.mark.parametrize("episode_length", [5, 40])
def test_shards_of_windows_have_the_weight_of_their_windows(episode_length):
    """A step of any shard is then in as many of the windows that are drawn as one of another."""
    replay = ReplayBuffer(1000, num_lanes=2, **SIZES)
    for first in range(0, 600, episode_length):
        replay.add(**_piece(first, episode_length, f"{first}"))
    windows = {tuple(rows) for rows in replay._sample_windows(50_000, 4)}
    assert replay.num_windows(4) == pytest.approx(len(windows), abs=2)
    assert replay.num_windows(None) == 600


def test_checkpoints_fit_any_number_of_shards(shards, tmp_path):
    _fill(shards, [300, 60, 40])
    shards.save_to_path(tmp_path / "alone")
    run = tmp_path / "run"
    names = []
    for number in range(2):  # The second one adds a file with the new rows of the first shard.
        shards.save_to_path(run / "part-1" / f"checkpoint_{number}" / "replay", shared=run / "replay")
        names.append(set(shards.shared_files))
        report = ray.get(shards.actors[0].add.remote([_piece(1000 * (number + 1), 50, "more")]))
        shards.take(report)
    shards.save_to_path(run / "part-1" / "checkpoint_2" / "replay", shared=run / "replay")
    assert len(names[0]) == 2 and len(names[1] - names[0]) == 1
    assert len(set(shards.shared_files) - names[1]) == 1
    state = shards.get_state()

    def steps(replay):
        if isinstance(replay, ReplayBuffer):
            return sorted(replay._columns["obs"][replay._flags > 0, 0])
        buffers = [read() for read in replay._empty.saved_in_state(replay.get_state())]
        return sorted(step for buffer in buffers for step in steps(buffer))

    expected = sorted([*range(400), *range(1000, 1050), *range(2000, 2050)])
    assert steps(shards) == expected
    count, mean, scale = shards.moments.count, shards.moments.mean, shards.returns.scale
    three = _make(3)
    for other in (three, ReplayBuffer(3000, **SIZES), shards):
        for source in ("files", "state"):
            if source == "files":
                other.restore_from_path(run / "part-1" / "checkpoint_2" / "replay")
            else:
                other.set_state(state)
            assert steps(other) == expected and len(other) == 500
            assert other.moments.count == count
            np.testing.assert_allclose(other.moments.mean, mean)
            assert other.returns.scale == pytest.approx(scale)
        other.restore_from_path(tmp_path / "alone")
        assert steps(other) == list(range(400))
    # From one replay to shards, and from a checkpoint without rows.
    one = _fill(shards, [30, 20, 10])
    one.save_to_path(tmp_path / "one")
    three.restore_from_path(tmp_path / "one")
    assert steps(three) == list(range(60)) and min(three.sizes) > 0
    three.save_to_path(tmp_path / "empty", with_rows=False)
    shards.restore_from_path(tmp_path / "empty")
    assert len(shards) == 0 and shards.moments.count == one.moments.count


def test_a_lost_shard_costs_its_share(shards, tmp_path):
    _fill(shards, [300, 60])
    known, scale = shards.moments, shards.returns.scale
    ray.kill(shards.actors[1])
    shards.find_lost()
    shards.save_to_path(tmp_path)  # In between, a checkpoint holds what is left.
    assert shards.replace_lost() == 1 and shards.replace_lost() == 0
    assert len(shards) == 300 and shards.sizes == [300, 0]
    assert {name[0] for name, _ in shards.store_for(2).shards} == {0}
    assert max(_batches(shards, 100)[0]["obs"][:, 0]) < 300
    # Nothing is forgotten of what the lost one knew.
    assert shards.moments.count == known.count and shards.returns.scale == scale
    while shards._starting:
        assert shards.replace_lost() == 0
        time.sleep(0.05)
    assert [name for name, _ in shards.store_for(2).shards] == [(1, 1), (0, 0)]
    # A report that was on its way when the shard was lost is of another one.
    shards.take(Report((1, 0), 1000, steps=5, size=60, windows=60, moments={}))
    assert len(shards) == 300
    shards.take(ray.get(shards.actors[1].add.remote([_piece(500, 20, "new")])))
    assert shards.sizes == [300, 20] and shards.moments.count == known.count + 21
    # So is one that was overtaken by a later one.
    shards.take(Report((1, 1), 1, steps=5, size=60, windows=60, moments={}))
    assert len(shards) == 320
    shards.restore_from_path(tmp_path)
    assert shards.sizes == [300, 0] and shards.moments.count == known.count


def test_bad_numbers_are_found_in_the_shards(shards):
    good, bad = _piece(0, 10, "good"), _piece(0, 10, "bad", reward=np.nan)
    assert shards.take(ray.get(shards.actors[0].add.remote([good, bad]))) == 0
    assert len(shards) == 10 and shards.screening.counted == (1, 2)
    assert len(shards.screening.found) == 1 and "reward nan" in shards.screening.found[0]


def test_training_with_shards(ray_session):
    config = tiny_config(
        num_replay_shards=2,
        policy_evaluation="retrace",
        normalize_observations=True,
        normalize_returns=True,
    )
    config.env_runners(num_env_runners=3, num_envs_per_env_runner=2, rollout_fragment_length=10)
    config.reporting(min_time_s_per_iteration=1)
    algorithm = config.build_algo()
    try:

        def train_until(steps):
            while (result := algorithm.train())["num_env_steps_sampled_lifetime"] < steps:
                pass
            return result

        result = train_until(600)
        assert sum(algorithm.replay.sizes) == result["num_env_steps_sampled_lifetime"]
        assert algorithm.replay.sizes[0] > algorithm.replay.sizes[1] > 0
        networks = algorithm.learner_group._learner.module["default_policy"].unwrapped().nets
        assert networks.policy.body[0].mean.abs().sum() > 0 and networks.return_scale != 1.0
        ray.kill(algorithm.replay.actors[0])
        result = train_until(algorithm._limiter.env_steps + 600)
        assert result["num_replay_shard_restarts"] == 1
        updates, steps = result["num_updates_lifetime"], result["num_env_steps_sampled_lifetime"]
        # However slow the learner is, at most two requests to all EnvRunners, of 60 steps each, wait
        # for their updates.
        assert 0 <= steps - updates / 0.5 <= 150
        assert algorithm._limiter.env_steps == steps
    finally:
        algorithm.stop()
    with pytest.raises(ray.exceptions.RayActorError):
        for _ in range(600):  # It ends a moment later.
            ray.get(algorithm.replay.actors[1].report.remote())
            time.sleep(0.1)


def test_batches_that_never_arrive_end_the_run():
    class Lost:
        replay, _lost_batches_in_a_row = ReplayBuffer(10, **SIZES), 0

    for _ in range(10):  # Shards may be lost one after the other.
        RERPI._note_lost_batch(Lost, NoBatch("out of memory"))
    with pytest.raises(RuntimeError, match=r"11 times in a row.*out of memory"):
        RERPI._note_lost_batch(Lost, NoBatch("out of memory"))


def test_shards_that_cannot_work_are_refused():
    config = tiny_config(num_replay_shards=2)
    with pytest.raises(ValueError, match=r"num_replay_shards=2.*num_env_runners=0"):
        config.validate()
    config.env_runners(num_env_runners=1)
    with pytest.raises(ValueError, match=r"num_replay_shards=2.*num_env_runners=1"):
        config.validate()
    config.env_runners(num_env_runners=2)
    config.validate()
    with pytest.raises(ValueError, match=r"num_replay_shards=2.*old API stack: it must be 0"):
        on_old_stack(config).validate()
    with pytest.raises(ValueError, match="num_replay_shards=-1"):
        tiny_config(num_replay_shards=-1).validate()
