"""Parkour: courses drawn from the seed, heights as they are, falls, time-outs and refusals."""

import os
import subprocess
import sys

import gymnasium as gym
import mujoco
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from rerpi_rllib import envs
from rerpi_rllib.envs.parkour_course import OBSTACLES, PIT, RUN_UP, draw_course
from rerpi_rllib.envs.playing import play
from rerpi_rllib.envs.rendering import rendering_backend

SIZES = {
    "parkour/walker2d-v0": (25, 95, 6),
    "parkour/humanoid-walls-v0": (88, 451, 21),
    "parkour/humanoid-gaps-v0": (88, 451, 21),
}
TASKS = pytest.mark.parametrize("env_id", SIZES)


def _make(env_id, **kwargs):
    envs.register()
    return gym.make(env_id, disable_env_checker=True, **kwargs).unwrapped


def _play(env, seed, steps=30):
    rng = np.random.default_rng(0)
    given = [*env.reset(seed=seed)[0].values()]
    for _ in range(steps):
        observation, *numbers, _ = env.step(rng.uniform(-1, 1, env.action_space.shape))
        given += [*observation.values(), *map(float, numbers)]
    return np.concatenate([np.ravel(part) for part in given])


@TASKS
@pytest.mark.filterwarnings("ignore:.*A Box observation space m:UserWarning")
def test_environments_are_as_gymnasium_expects_them(env_id):
    env = _make(env_id)
    proprioception, terrain, actions = SIZES[env_id]
    assert env.observation_space["proprioception"].shape == (proprioception,)
    assert env.observation_space["terrain"].shape == (terrain,)
    assert env.action_space == gym.spaces.Box(-1, 1, (actions,), np.float32)
    check_env(env, skip_render_check=True)
    assert env_id in envs.list_ids()


@TASKS
def test_the_same_seed_gives_the_same_course_and_episode(env_id):
    env, other = _make(env_id), _make(env_id)
    first = _play(env, 3)
    course = env._course.obstacles
    np.testing.assert_array_equal(first, _play(other, 3))
    np.testing.assert_array_equal(course, other._course.obstacles)
    np.testing.assert_array_equal(first, _play(env, 3))
    assert not np.array_equal(_play(env, 4), first)
    assert not np.array_equal(env._course.obstacles[:10], course[:10])


@TASKS
def test_heights_are_those_of_what_mujoco_simulates(env_id):
    """A ray from above each place of the terrain, which misses the body, ends at that height."""
    env = _make(env_id, curriculum=False)
    rng = np.random.default_rng(0)
    seen = set()
    for seed in range(3):
        env.reset(seed=seed)
        for _ in range(4):
            # Anywhere, in any direction.
            x, yaw = rng.uniform(0, 110), rng.uniform(-np.pi, np.pi)
            if env_id == "parkour/walker2d-v0":
                env.data.qpos[:2] = rng.uniform(0, 1), x
                y, aside, yaw = 0.0, np.zeros(95), 0.0
                ahead = np.linspace(-1, 8.4, 95)
            else:
                y = rng.uniform(-2.4, 2.4)
                env.data.qpos[:7] = x, y, 1.3, np.cos(yaw / 2), 0, 0, np.sin(yaw / 2)
                grid = np.meshgrid(
                    np.linspace(-1, 8.4, 41), np.linspace(-2.5, 2.5, 11), indexing="ij"
                )
                ahead, aside = map(np.ravel, grid)
            mujoco.mj_forward(env.model, env.data)
            places = np.stack(
                [
                    x + np.cos(yaw) * ahead - np.sin(yaw) * aside,
                    y + np.sin(yaw) * ahead + np.cos(yaw) * aside,
                    np.full(len(ahead), 50.0),
                ],
                axis=1,
            )
            # The ray does not see this group.
            env.model.geom_group[env.model.geom_bodyid > 0] = 5
            groups, geom = np.array([1, 1, 1, 1, 1, 0], np.uint8), np.zeros(1, np.int32)
            fall = [
                mujoco.mj_ray(env.model, env.data, place, [0, 0, -1.0], groups, 1, -1, geom)
                for place in places
            ]
            torso = env.data.body("torso").xpos[2]
            standing = {"parkour/walker2d-v0": 1.3}.get(env_id, 1.29)
            expected = 50.0 - np.array(fall) - torso + standing
            np.testing.assert_allclose(env._observe()["terrain"], expected, atol=1e-5)
            seen |= set(np.round(expected + torso - standing, 6))
    # There was more than flat ground.
    assert (PIT if "walls" not in env_id else 2.0) in seen and 0.0 in seen


@TASKS
def test_a_fall_terminates_and_a_time_out_truncates(env_id):
    env = _make(env_id)
    env.reset(seed=0)
    for _ in range(200):
        action = np.zeros(env.action_space.shape)
        action[env.model.actuator("right_knee").id] = -1.0
        _, _, terminated, truncated, info = env.step(action)
        assert not truncated
        if terminated:
            break
    assert terminated and info["distance"] < 3
    short = _make(env_id, episode_seconds=0.1)
    short.reset(seed=0)
    ends = [short.step(np.zeros(short.action_space.shape))[2:4] for _ in range(4)]
    assert ends == [(False, False)] * 3 + [(False, True)]


def test_a_body_in_a_gap_has_fallen():
    env = _make("parkour/walker2d-v0", obstacles=["gap"], curriculum=False)
    env.reset(seed=0)
    begin, end = env._course.obstacles[0, :2]
    env.data.qpos[:2] = 0.0, (begin + end) / 2
    assert not env.step(np.zeros(6))[2]
    env.data.qpos[0] = -1.0
    assert env.step(np.zeros(6))[2]


def test_faster_is_better_up_to_v_max_and_standing_is_little():
    env = _make("parkour/walker2d-v0", v_max=2.0)
    env.reset(seed=0)
    rewards = []
    for speed in (0.0, 1.0, 2.0, 3.0):
        env.data.qpos[:], env.data.qvel[:] = 0.0, 0.0
        env.data.qvel[1] = speed
        mujoco.mj_step1(env.model, env.data)
        rewards.append(env.step(np.zeros(6))[1])
    assert 0 < rewards[0] < 0.15
    assert rewards[1] == pytest.approx(rewards[0] + 0.5, abs=0.03)
    assert rewards[2] == pytest.approx(rewards[3], abs=0.03)


def _draw(seed, **kwargs):
    defaults = {"length": 100.0, "spacing": (3.0, 6.0), "difficulty": 1.0, "curriculum": True}
    return draw_course(np.random.default_rng(seed), **{"kinds": ["gap"], **defaults, **kwargs})


def test_a_curriculum_raises_the_difficulty_with_the_distance():
    courses = [_draw(seed).obstacles for seed in range(20)]
    begin, end = np.concatenate(courses)[:, :2].T
    easiest, hardest = OBSTACLES["gap"].length
    assert begin.min() == RUN_UP and begin.max() < 100
    thirds = [(end - begin)[(begin // 33).astype(int) == third].mean() for third in range(3)]
    assert easiest < thirds[0] < thirds[1] - 0.2 < thirds[2] - 0.4 < hardest
    everywhere = np.concatenate([_draw(seed, curriculum=False).obstacles for seed in range(20)])
    sizes = everywhere[:, 1] - everywhere[:, 0]
    assert sizes.min() > (easiest + hardest) / 2 - 0.1
    assert sizes[everywhere[:, 0] < 33].mean() == pytest.approx(sizes.mean(), abs=0.1)
    easy = _draw(0, difficulty=0.0).obstacles
    np.testing.assert_allclose(easy[:, 1] - easy[:, 0], easiest)


def test_the_difficulty_is_told_with_the_distance():
    env = _make("parkour/walker2d-v0", difficulty=0.8, length=50.0)
    env.reset(seed=0)
    env.data.qpos[1] = 25.0
    info = env.step(np.zeros(6))[4]
    assert info["distance"] == pytest.approx(25.0, abs=0.1)
    assert info["difficulty"] == pytest.approx(0.4, abs=0.01)


def test_playing_tells_how_far_each_episode_got():
    env = envs.make("parkour/walker2d-v0")
    played = play(env, lambda observation: np.ones(6), episodes=2, seed=0)
    expected = []
    for seed in range(2):
        env.reset(seed=seed)
        done = False
        while not done:
            *_, done, _, info = env.step(np.ones(6))
        expected.append(info["distance"])
    assert played["distances"] == expected and len(set(expected)) == 2


@pytest.mark.parametrize(
    "kwargs,words",
    [
        ({"body": "spider"}, "walker2d, humanoid"),
        ({"obstacles": ["wall"]}, "hurdle, gap, platform"),
        ({"obstacles": "gap"}, "list"),
        ({"difficulty": 1.5}, "from 0 to 1"),
        ({"difficulty": True}, "from 0 to 1"),
        ({"curriculum": "yes"}, "true or false"),
        ({"length": 1}, "from 10 to 1000"),
        ({"spacing": [6, 3]}, "two ascending numbers"),
        ({"v_max": 0}, "from 0.1 to 100"),
        ({"episode_seconds": float("nan")}, "from 0.025 to 1000"),
        ({"terrain_points": (41, 11)}, "a whole number from 2 to 1000"),
    ],
)
def test_arguments_that_are_not_allowed(kwargs, words):
    with pytest.raises(ValueError, match=words) as error:
        envs.make("parkour/walker2d-v0", **kwargs)
    assert repr(next(iter(kwargs.values()))) in str(error.value)


def test_other_numbers_of_heights():
    env = _make("parkour/humanoid-gaps-v0", terrain_points=[21, 5])
    assert env.reset(seed=0)[0]["terrain"].shape == (105,)
    env = _make("parkour/walker2d-v0", terrain_points=20)
    assert env.reset(seed=0)[0]["terrain"].shape == (20,)


def test_pictures_follow_the_body():
    try:
        backend = rendering_backend()
    except ValueError as error:
        pytest.skip(str(error))
    code = """
import mujoco, numpy as np
from rerpi_rllib import envs
env = envs.make("parkour/walker2d-v0", render=True, length=10.0).unwrapped
env.reset(seed=0)
bodies = []
for x in (0.0, 200.0):
    env.data.qpos[:] = 0.0, x, *[0.0] * 7
    mujoco.mj_forward(env.model, env.data)
    picture = env.render().astype(int)
    assert picture.shape == (352, 640, 3)
    # The body is browner than ground and sky.
    bodies.append(picture[..., 0] - picture[..., 2] > 60)
    bodies[-1][:, 400:] = False  # An obstacle may be there.
assert bodies[0].sum() > 500
assert (bodies[0] != bodies[1]).sum() < 0.1 * bodies[0].sum()
env.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "MUJOCO_GL": backend},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
