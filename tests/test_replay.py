"""The replay: right neighbours, right flags, uniform, small, and the same after a restart."""

import numpy as np
import pytest
from conftest import resident_megabytes

from rerpi_rllib.algorithm.replay import ReplayBuffer


def _episode(start: float, length: int, observation_size=2, action_size=1):
    """Observations, actions, rewards and log-probabilities that all tell their time step."""
    times = start + np.arange(length + 1, dtype=np.float32)
    return {
        "observations": np.repeat(times[:, None], observation_size, axis=1),
        "actions": np.repeat(times[:-1, None] + 0.25, action_size, axis=1),
        "rewards": times[:-1] + 0.5,
        "log_probs": times[:-1] + 0.75,
    }


def _add(buffer, episode_id, start, length, *, terminated=False, done=True):
    buffer.add(episode_id, **_episode(start, length), terminated=terminated, done=done)


def _check(batch):
    """Every sampled row is one transition of one time step."""
    time = batch["obs"][:, 0]
    np.testing.assert_array_equal(batch["new_obs"][:, 0], time + 1)
    np.testing.assert_array_equal(batch["actions"][:, 0], time + 0.25)
    np.testing.assert_array_equal(batch["rewards"], time + 0.5)
    np.testing.assert_array_equal(batch["action_logp"], time + 0.75)


def test_transitions_and_terminations():
    buffer = ReplayBuffer(1000, 2, 1, seed=0)
    _add(buffer, "a", 0, 10, terminated=True)
    _add(buffer, "b", 100, 10)
    assert len(buffer) == 20
    batch = buffer.sample(2000)
    _check(batch)
    assert set(batch["obs"][:, 0]) == {*range(10), *range(100, 110)}
    # Only the last step of the terminated episode is terminal; the truncated one bootstraps.
    assert set(batch["obs"][batch["terminateds"] == 1, 0]) == {9}
    assert batch["obs"].dtype == np.float32


def test_sampling_is_uniform():
    buffer = ReplayBuffer(1000, 2, 1, num_lanes=2, seed=0)
    _add(buffer, "a", 0, 5)
    _add(buffer, "b", 100, 45)
    counts = np.unique(buffer.sample(100_000)["obs"][:, 0], return_counts=True)[1]
    assert len(counts) == 50
    assert abs(counts - 2000).max() < 6 * np.sqrt(2000)


def test_an_episode_in_pieces_is_one_episode():
    buffer = ReplayBuffer(1000, 2, 1, seed=0)
    _add(buffer, "a", 0, 4, done=False)
    _add(buffer, "a", 4, 3, done=False)
    _add(buffer, "a", 7, 3, terminated=True)
    assert len(buffer) == 10
    batch = buffer.sample(500)
    _check(batch)
    assert set(batch["obs"][:, 0]) == set(range(10))
    windows = buffer.sample_sequences(500, 10)
    whole = windows["obs"][:, 0, 0] == 0
    np.testing.assert_array_equal(windows["obs"][whole][0, :, 0], np.arange(11))


def test_interleaved_environments_keep_their_lanes():
    buffer = ReplayBuffer(1000, 2, 1, num_lanes=3, seed=0)
    for piece in range(10):
        for env in range(3):
            _add(buffer, f"env{env}", 1000 * env + 7 * piece, 7, done=piece == 9)
    assert len(buffer) == 210
    _check(buffer.sample(2000))
    # No row was spent on the seams between pieces.
    windows = buffer.sample_sequences(300, 70)
    assert windows["loss_mask"].sum(axis=1).max() == 70


def test_lost_and_surplus_environments():
    buffer = ReplayBuffer(1000, 2, 1, num_lanes=1, seed=0)
    _add(buffer, "lost", 0, 5, done=False)
    _add(buffer, "next", 100, 5, done=False)
    _add(buffer, "lost", 5, 5)
    assert len(buffer) == 15
    batch = buffer.sample(1000)
    _check(batch)
    assert len(set(batch["obs"][:, 0])) == 15


@pytest.mark.parametrize("capacity,lanes", [(50, 1), (64, 3)])
def test_old_steps_are_overwritten(capacity, lanes):
    buffer = ReplayBuffer(capacity, 2, 1, num_lanes=lanes, seed=0)
    rng = np.random.default_rng(0)
    start = 0
    for number in range(60):
        pieces = rng.integers(1, 13, size=rng.integers(1, 4))
        for index, length in enumerate(pieces):
            last = index == len(pieces) - 1
            _add(buffer, str(number), start, int(length), done=last, terminated=last)
            start += int(length)
        start += 100
        stored = set(buffer.sample(3000)["obs"][:, 0])
        assert len(buffer) <= capacity
        assert len(buffer) == len(stored)
        _check(buffer.sample(200))
    assert len(buffer) > capacity // 2


def test_an_episode_longer_than_the_buffer():
    buffer = ReplayBuffer(20, 2, 1, seed=0)
    _add(buffer, "a", 0, 100, terminated=True)
    assert len(buffer) == 20
    batch = buffer.sample(500)
    _check(batch)
    assert set(batch["obs"][:, 0]) == set(range(80, 100))


def test_windows_end_with_their_episode():
    buffer = ReplayBuffer(500, 2, 1, num_lanes=2, seed=0)
    lengths = [1, 3, 8, 20, 5, 50]
    for number, length in enumerate(lengths):
        _add(buffer, str(number), 1000 * number, length, terminated=number % 2 == 0)
    windows = buffer.sample_sequences(3000, 8)
    mask, obs = windows["loss_mask"], windows["obs"][:, :, 0]
    assert mask[:, 0].all()
    assert len(set(obs[:, 0])) == sum(lengths)
    for row in range(len(mask)):
        steps = int(mask[row].sum())
        assert not mask[row, steps:].any()
        first = obs[row, 0]
        remaining = lengths[int(first // 1000)] - first % 1000
        assert steps == min(8, remaining)
        np.testing.assert_array_equal(obs[row, : steps + 1], first + np.arange(steps + 1))
        np.testing.assert_array_equal(windows["rewards"][row, :steps], obs[row, :steps] + 0.5)
        ends = remaining <= 8 and int(first // 1000) % 2 == 0
        assert windows["terminateds"][row, :steps].sum() == ends


def test_empty_buffer_says_so():
    with pytest.raises(ValueError, match="empty"):
        ReplayBuffer(10, 2, 1).sample(1)


def test_memory_is_small_and_committed_as_it_fills():
    before = resident_megabytes()
    buffer = ReplayBuffer(2_000_000, 67, 21, seed=0)
    assert resident_megabytes() - before < 20
    data = _episode(0, 1000, 67, 21)
    for number in range(100):
        buffer.add(str(number), **data, terminated=False, done=True)
    grown = (resident_megabytes() - before) * 2**20
    assert grown < 100_000 * 4 * (67 + 21 + 4) + 20 * 2**20
    per_step = sum(c.nbytes for c in buffer._columns.values()) / 2_000_000
    assert per_step <= 4 * (67 + 21 + 4)


def _filled(capacity, lanes):
    buffer = ReplayBuffer(capacity, 2, 1, num_lanes=lanes, seed=3)
    for number in range(30):
        _add(buffer, str(number), 100 * number, 5 + number, terminated=number % 3 == 0)
    _add(buffer, "open", 10_000, 4, done=False)
    return buffer


@pytest.mark.parametrize("way", ["file", "memory", "file from memory"])
@pytest.mark.parametrize("capacity", [100, 5000])
def test_restored_buffer_samples_the_same(tmp_path, capacity, way):
    buffer = _filled(capacity, 2)
    restored = ReplayBuffer(capacity, 2, 1, num_lanes=2, seed=99)
    for number in range(40):  # Nothing of this may stay.
        _add(restored, f"before-{number}", 50_000, 40)
    if way == "memory":
        restored.set_state(buffer.get_state())
    else:
        state = buffer.get_state() if way == "file from memory" else None
        buffer.save_to_path(tmp_path, state=state)
        restored.restore_from_path(tmp_path)
    for one in (buffer, restored):
        _add(one, "open", 10_004, 4)
    assert len(restored) == len(buffer)
    for expected, actual in zip(buffer.sample(200).items(), restored.sample(200).items()):
        np.testing.assert_array_equal(expected[1], actual[1])


def test_a_broken_state_changes_nothing(tmp_path):
    buffer = _filled(100, 2)
    before = buffer.get_state()
    _filled(100, 2).save_to_path(tmp_path)
    (tmp_path / "rewards.bin").write_bytes(b"cut")
    with pytest.raises(ValueError):
        buffer.restore_from_path(tmp_path)
    with pytest.raises(KeyError):
        buffer.set_state({key: value for key, value in before.items() if key != "stored"})
    assert buffer.get_state()["stored"] == before["stored"] and len(buffer) == before["size"]


@pytest.mark.parametrize("capacity,lanes", [(5000, 1), (5000, 4), (60, 2)])
def test_restored_into_another_shape(tmp_path, capacity, lanes):
    buffer = _filled(300, 2)
    buffer.save_to_path(tmp_path)
    restored = ReplayBuffer(capacity, 2, 1, num_lanes=lanes, seed=0)
    restored.restore_from_path(tmp_path)
    _check(restored.sample(500))
    stored = set(restored.sample(20_000)["obs"][:, 0])
    assert stored <= set(buffer.sample(20_000)["obs"][:, 0])
    if capacity == 5000:
        assert len(restored) == len(buffer) == len(stored)
    terminal = restored.sample(20_000)
    for last in terminal["obs"][terminal["terminateds"] == 1, 0]:
        number = int(last // 100)
        assert number % 3 == 0 and last % 100 == 4 + number
