"""The replay: transitions, flags, uniform sampling, memory, and restored checkpoints."""

import numpy as np
import pytest
import torch
from conftest import resident_megabytes

from rerpi_rllib import RERPIConfig
from rerpi_rllib.algorithm.moments import ReturnScale
from rerpi_rllib.algorithm.networks import model_settings
from rerpi_rllib.algorithm.replay import ReplayBuffer
from rerpi_rllib.core.losses import critic_targets
from rerpi_rllib.core.networks import ActorCritic
from rerpi_rllib.core.settings import LearningSettings


def _episode(start: float, length: int, observation_size=2, action_size=1):
    """Make observations, actions, rewards and log-probabilities that all encode their time step."""
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
    """Check that every sampled row is a transition of a single time step."""
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
    whole = windows["loss_mask"].all(axis=1)
    np.testing.assert_array_equal(windows["obs"][whole][0, :, 0], np.arange(11))


def test_interleaved_environments_keep_their_lanes():
    buffer = ReplayBuffer(1000, 2, 1, num_lanes=3, seed=0)
    for piece in range(10):
        for env in range(3):
            _add(buffer, f"env{env}", 1000 * env + 7 * piece, 7, done=piece == 9)
    assert len(buffer) == 210
    _check(buffer.sample(2000))
    # No row was wasted between the pieces of an episode.
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


def _times(windows):
    """Return the time steps of a batch of windows, with -1 where there is no step."""
    return np.where(windows["loss_mask"], windows["obs"][:, :-1, 0], -1.0)


def test_windows_hold_neighbouring_steps():
    buffer = ReplayBuffer(500, 2, 1, num_lanes=2, seed=0)
    lengths = [1, 3, 8, 20, 5, 50]
    for number, length in enumerate(lengths):
        _add(buffer, str(number), 1000 * number, length, terminated=number % 2 == 0)
    windows = buffer.sample_sequences(3000, 8)
    mask, times = windows["loss_mask"], _times(windows)
    assert mask.any(axis=1).all()
    assert len(set(times[mask])) == sum(lengths)
    for column, offset in (("actions", 0.25), ("rewards", 0.5), ("action_logp", 0.75)):
        values = windows[column].reshape(mask.shape)
        np.testing.assert_array_equal(values[mask], times[mask] + offset)
    # The row after a step holds the observation that followed it.
    np.testing.assert_array_equal(windows["obs"][:, 1:, 0][mask], times[mask] + 1)
    number = (times // 1000).astype(int)
    last = times % 1000 == np.array(lengths)[number] - 1
    np.testing.assert_array_equal(windows["terminateds"][mask], (last & (number % 2 == 0))[mask])


def test_a_row_without_a_step_is_between_two_episodes_of_a_window():
    buffer = ReplayBuffer(60, 2, 1, num_lanes=2, seed=0)
    for number in range(40):  # The full rings have overwritten the beginnings of episodes.
        _add(buffer, str(number), 1000 * number, 1 + number % 9)
    windows = buffer.sample_sequences(5000, 8)
    mask, times = windows["loss_mask"], _times(windows)
    both = mask[:, :-1] & mask[:, 1:]
    assert both.any() and not mask.all()
    np.testing.assert_array_equal(times[:, 1:][both], times[:, :-1][both] + 1)


def _pieces(length, *, capacity=10_000, lanes=1, episodes=100):
    buffer = ReplayBuffer(capacity, 2, 1, num_lanes=lanes, seed=0)
    for number in range(episodes):
        _add(buffer, str(number), 1000 * number, length)
    _add(buffer, "open", 1000 * episodes, length, done=False)
    return buffer


@pytest.mark.parametrize(
    "capacity,lanes",
    [(10_000, 1), (10_000, 3), (100, 1), (205, 2)],
    ids=["filling", "filling lanes", "full", "full lanes"],
)
def test_every_stored_step_is_equally_likely_in_windows(capacity, lanes):
    buffer = _pieces(20, capacity=capacity, lanes=lanes, episodes=15)
    times = _times(buffer.sample_sequences(200_000 // 8, 8))
    _, counts = np.unique(times[times >= 0], return_counts=True)
    assert len(counts) == len(buffer)
    # The eight steps of a window come together, so a count varies like a count of whole windows.
    expected = counts.mean()
    assert abs(counts - expected).max() < 5 * np.sqrt(expected)
    assert np.square(counts - expected).sum() / expected / len(counts) < 1.5


@pytest.mark.parametrize("length", [8, 20, 1000])
def test_windows_have_hardly_any_padding(length):
    buffer = _pieces(length, capacity=200_000)
    mask = buffer.sample_sequences(20_000, 8)["loss_mask"]
    assert mask.mean() == pytest.approx(length / (length + 1), abs=0.01)
    # All positions in a window are padded equally often.
    np.testing.assert_allclose(mask.mean(axis=0), mask.mean(), atol=0.02)


def test_windows_shorter_or_longer_than_the_episodes():
    buffer = _pieces(1)
    windows = buffer.sample_sequences(1000, 8)
    assert windows["loss_mask"].any(axis=1).all()
    assert windows["loss_mask"].mean() == pytest.approx(0.5, abs=0.05)
    assert buffer.sample_sequences(1000, 1)["loss_mask"].all()


@pytest.mark.parametrize("policy_evaluation", ["nstep", "retrace"])
def test_targets_of_a_window_with_two_episodes_are_those_of_each(policy_evaluation):
    config = RERPIConfig().training(policy_evaluation=policy_evaluation, n_step=3)
    settings = model_settings(vars(config))
    networks = {key: settings[key] for key in ("policy", "critic")}
    nets = ActorCritic(2, 1, **networks, clip_actions=True)
    # With a narrow policy, values have hardly any noise, and actions near its mean are likely.
    for parameter in nets.target_policy.parameters():
        parameter.data.zero_()
    nets.target_policy.stddev.bias.data.fill_(-6.9)
    rng = np.random.default_rng(0)
    buffer = ReplayBuffer(100, 2, 1, seed=0)
    for number, (length, terminated) in enumerate([(5, True), (4, False), (6, True)]):
        buffer.add(
            str(number),
            observations=rng.normal(size=(length + 1, 2)).astype(np.float32),
            actions=rng.normal(scale=1e-3, size=(length, 1)).astype(np.float32),
            rewards=rng.normal(size=length).astype(np.float32),
            log_probs=np.full(length, 5.0, np.float32),
            terminated=terminated,
            done=True,
        )
    windows = buffer.sample_sequences(100, 8)
    batch = {key: torch.from_numpy(value) for key, value in windows.items()}
    targets = critic_targets(nets, batch, LearningSettings(**settings["learning"]))
    for row, mask in enumerate(windows["loss_mask"]):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
        for start, end in edges.reshape(-1, 2):
            alone = {key: value[row : row + 1, start:end] for key, value in batch.items()}
            alone["obs"] = batch["obs"][row : row + 1, start : end + 1]
            expected = critic_targets(nets, alone, LearningSettings(**settings["learning"]))
            torch.testing.assert_close(targets[row, start:end], expected[0], rtol=0.0, atol=1e-2)


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
    for number in range(40):  # None of this may remain.
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
    (tmp_path / "rows.bin").write_bytes(b"cut")
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


def test_moments_are_of_all_observations_ever_added():
    rng = np.random.default_rng(0)
    observations = 1e4 + rng.standard_normal((300, 2)) * [1.0, 1e3]

    def piece(start, end):
        length = end - start
        steps = {"rewards": np.zeros(length), "log_probs": np.zeros(length)}
        return {
            "observations": observations[start : end + 1],
            "actions": np.zeros((length, 1)),
            **steps,
        }

    # The replay holds 50 steps; the second piece begins with the last observation of the first.
    buffer = ReplayBuffer(50, 2, 1)
    assert (buffer.moments.stddev == 1.0).all()
    buffer.add("a", **piece(0, 100), terminated=False, done=False)
    buffer.add("a", **piece(100, 120), terminated=False, done=True)
    buffer.add("b", **piece(121, 299), terminated=False, done=False)
    for other in (ReplayBuffer(50, 2, 1), ReplayBuffer(80, 2, 1, num_lanes=2)):
        other.set_state(buffer.get_state())
        for restored in (buffer, other):
            np.testing.assert_allclose(restored.moments.mean, observations.mean(axis=0))
            np.testing.assert_allclose(restored.moments.stddev, observations.std(axis=0))


def _sums(rewards, gamma=0.9):
    total, found = 0.0, []
    for reward in rewards:
        total = gamma * total + reward
        found.append(total)
    return found


def test_the_scale_of_returns_is_that_of_all_discounted_sums():
    rng = np.random.default_rng(0)
    buffer = ReplayBuffer(50, 2, 1, num_lanes=2, gamma=0.9)
    assert buffer.returns.scale == 1.0

    def add(episode, rewards, done, terminated=True):
        size = len(rewards)
        buffer.add(
            episode,
            observations=np.zeros((size + 1, 2), np.float32),
            actions=np.zeros((size, 1), np.float32),
            rewards=rewards,
            log_probs=np.zeros(size, np.float32),
            terminated=done and terminated,
            done=done,
        )

    add("a", np.zeros(10, np.float32), True)
    assert buffer.returns.scale == 1.0  # Nothing is known yet.
    # Two environments in turn, in pieces; more steps than are stored.
    b, c, d = (rng.normal(3.0, 2.0, size=n).astype(np.float32) for n in (40, 60, 30))
    add("b", b[:10], False)
    add("c", c[:35], False)
    add("b", b[10:], True)
    add("d", d[:20], False)
    add("c", c[35:], True)
    add("d", d[20:], True)
    sums = np.concatenate([np.zeros(10), *map(_sums, (b, c, d))])
    expected = max(np.std(sums), np.abs(sums).max() / 5.0)
    assert buffer.returns.scale == pytest.approx(expected, rel=1e-6)
    # One huge reward: that is five units.
    add("e", np.array([1e6], np.float32), True)
    assert buffer.returns.scale == pytest.approx(2e5)


def test_values_beyond_the_end_of_an_episode_that_was_cut_off_are_in_the_scale():
    scales = {}
    for truncated in (False, True):
        returns = ReturnScale(0.99, 1)
        returns.add(0, np.full(20, -1.0), continued=False, truncated=False)
        returns.add(0, np.full(30, -1.0), continued=True, truncated=truncated)
        scales[truncated] = returns.scale
    # A reward of -1 for ever is a return of -100, of which 50 steps show 39.
    assert scales[True] == pytest.approx(20.0)
    assert scales[False] == pytest.approx(np.std(_sums(np.full(50, -1.0), 0.99)))


@pytest.mark.parametrize("lanes", [1, 3])
def test_the_scale_of_returns_survives(tmp_path, lanes):
    buffer = ReplayBuffer(40, 2, 1, num_lanes=1)
    for episode in range(3):
        buffer.add(
            f"{episode}",
            observations=np.zeros((11, 2), np.float32),
            actions=np.zeros((10, 1), np.float32),
            rewards=np.full(10, 7.0 * episode, np.float32),
            log_probs=np.zeros(10, np.float32),
            terminated=False,
            done=True,
        )
    buffer.save_to_path(tmp_path)
    restored = ReplayBuffer(40, 2, 1, num_lanes=lanes)
    restored.restore_from_path(tmp_path)
    assert restored.returns.scale == buffer.returns.scale > 7.0
