"""Environments: observations as one float32 vector, correct ends of episodes, clear refusals."""

import os
import subprocess
import sys

import gymnasium as gym
import mujoco
import numpy as np
import pytest

from rerpi_rllib import envs
from rerpi_rllib.algorithm.spaces import check_spaces


@pytest.mark.parametrize(
    "env_id,size",
    [
        ("dm_control/cartpole-swingup-v0", 5),
        ("dm_control/cheetah-run-v0", 17),
        ("dm_control/manipulator-bring_ball-v0", 44),
        ("dm_control/reach_site_features-v0", 45),
        ("Pendulum-v1", 3),
        ("HalfCheetah-v5", 17),
    ],
)
def test_observations_are_one_float32_vector(env_id, size):
    env = envs.make(env_id)
    check_spaces(env.observation_space, env.action_space, "gaussian")
    first, _ = env.reset(seed=1)
    again, _ = env.reset(seed=1)
    observation, *_ = env.step(env.action_space.sample())
    assert env.observation_space.shape == first.shape == observation.shape == (size,)
    assert first.dtype == observation.dtype == np.float32
    np.testing.assert_array_equal(first, again)
    env.close()


def test_parts_come_in_the_order_of_the_space():
    env = envs.make("dm_control/cartpole-swingup-v0")
    flat, _ = env.reset(seed=0)
    raw, _ = env.unwrapped.reset(seed=0)
    expected = np.concatenate([np.ravel(raw[key]) for key in env.unwrapped.observation_space])
    np.testing.assert_allclose(flat, expected.astype(np.float32))


def test_parts_within_parts():
    box = gym.spaces.Box(-np.inf, np.inf, (2, 2))
    scalar = gym.spaces.Box(0, 9, (), np.int64)
    inner = gym.spaces.Tuple([box, gym.spaces.Dict({"b": scalar, "a": scalar})])

    class Nested(gym.Env):
        observation_space = gym.spaces.Dict({"x": inner, "y": scalar})

    env = envs.VectorObservations(Nested())
    assert env.observation_space.shape == (7,)
    value = {"x": (np.arange(4.0).reshape(2, 2), {"a": 5, "b": np.int64(6)}), "y": np.array(7)}
    vector = env.observation(value)
    # Gymnasium sorts the keys.
    assert vector.dtype == np.float32 and vector.tolist() == [0, 1, 2, 3, 5, 6, 7]
    value["y"] = 8
    env.observation(value)
    assert vector[-1] == 7  # Each observation is an array of its own.


@pytest.mark.parametrize(
    "env_id,kwargs",
    [
        ("dm_control/cheetah-run-v0", {}),
        ("dm_control/manipulator-bring_ball-v0", {}),
        ("dm_control/reach_site_features-v0", {}),
        # These episodes end, the first truncated and the second terminated.
        ("dm_control/cartpole-swingup-v0", {"task_kwargs": {"time_limit": 0.1}}),
        ("dm_control/lqr-lqr_2_1-v0", {"task_kwargs": {"random": 0}}),
    ],
)
def test_control_suite_steps_as_its_wrappers_do(env_id, kwargs, monkeypatch):
    monkeypatch.setattr("dm_control.suite.lqr.LQRLevel._TERMINAL_TOL", 1e9)
    fast = envs.make(env_id, **kwargs)
    wrapped = envs.VectorObservations(gym.make(env_id, disable_env_checker=True, **kwargs))
    assert isinstance(fast, envs.ControlSuite)
    assert fast.observation_space == wrapped.observation_space
    assert fast.action_space == wrapped.action_space
    rng, ended = np.random.default_rng(0), False
    for seed in (7, None):
        (first, info), (expected, expected_info) = (env.reset(seed=seed) for env in (fast, wrapped))
        np.testing.assert_array_equal(first, expected)
        assert info == expected_info
        for _ in range(20):
            action = rng.uniform(-1, 1, fast.action_space.shape)
            (observation, *others), (expected, *rest) = (env.step(action) for env in (fast, wrapped))
            np.testing.assert_array_equal(observation, expected)
            assert observation.dtype == expected.dtype
            assert others == rest and list(map(type, others)) == list(map(type, rest))
            if ended := others[1] or others[2]:
                break
    assert ended == bool(kwargs)
    assert others[1] == ("lqr" in env_id)


def test_control_suite_with_other_wrappers_and_in_the_wrong_order():
    env = envs.make("dm_control/cartpole-swingup-v0", max_episode_steps=3)
    env.reset(seed=0)
    assert [env.step(np.zeros(1))[3] for _ in range(3)] == [False, False, True]
    with pytest.raises(gym.error.ResetNeeded):
        envs.ControlSuite(gym.make("dm_control/cartpole-swingup-v0")).step(np.zeros(1))


def test_every_state_based_control_suite_id_is_known():
    ids = [i for i in envs.list_ids() if i.startswith("dm_control/")]
    assert len(ids) == 85
    assert "dm_control/humanoid_CMU-stand-v0" in ids


def test_a_time_limit_is_a_truncation_and_a_fall_a_termination():
    env = envs.make("dm_control/cartpole-swingup-v0")
    env.reset(seed=0)
    for step in range(1000):
        _, _, terminated, truncated, _ = env.step(np.zeros(1))
        assert not terminated
        assert truncated == (step == 999)
    hopper = envs.make("Hopper-v5")
    hopper.reset(seed=0)
    for _ in range(200):
        _, _, terminated, truncated, _ = hopper.step(np.ones(3))
        assert not truncated
        if terminated:
            break
    assert terminated


def test_unknown_id_suggests_the_nearest():
    with pytest.raises(ValueError, match="dm_control/cheetah-run-v0"):
        envs.make("dm_control/cheeta-run-v0")


@pytest.mark.parametrize("task", ["walker-walk", "cheetah-run", "hopper-hop"])
def test_a_film_follows_what_walks_away(task):
    env = envs.make(f"dm_control/{task}-v0", render=True).unwrapped
    camera = env.render_kwargs["camera_id"]
    assert env._env.physics.model.cam_mode[camera] == mujoco.mjtCamLight.mjCAMLIGHT_TRACKCOM
    mine = envs.make(f"dm_control/{task}-v0", render=True, render_kwargs={"camera_id": 1})
    assert mine.unwrapped.render_kwargs == {"camera_id": 1}


def test_rendered_task_without_a_renderer_says_so():
    code = "from rerpi_rllib import envs; envs.make('dm_control/quadruped-escape-v0')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "MUJOCO_GL": "disabled"},
        capture_output=True,
        text=True,
    )
    assert "MUJOCO_GL" in done.stderr and "egl" in done.stderr


@pytest.mark.parametrize(
    "space,words",
    [
        (gym.spaces.Discrete(3), "Discrete"),
        (gym.spaces.Tuple([gym.spaces.Box(-1, 1, (2,))]), "Tuple"),
        (gym.spaces.Box(-1, 1, (2, 2)), r"\(2, 2\)"),
        (gym.spaces.Box(0, 5, (2,), dtype=np.int64), "int64"),
    ],
)
def test_action_spaces_that_do_not_work(space, words):
    with pytest.raises(ValueError, match=f"action space.*{words}"):
        check_spaces(gym.spaces.Box(-1, 1, (3,)), space, "gaussian")


@pytest.mark.parametrize("space", [gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(3, start=1)])
def test_action_spaces_that_a_categorical_policy_refuses(space):
    with pytest.raises(ValueError, match=r"action space is .*categorical.*Discrete that starts at 0"):
        check_spaces(gym.spaces.Box(-1, 1, (3,)), space, "categorical")
    check_spaces(gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(3), "categorical")


class _Camera(gym.Env):
    observation_space = gym.spaces.Dict({"eye": gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)})
    action_space = gym.spaces.Box(-1, 1, (1,))


def test_image_observations_are_refused():
    with pytest.raises(ValueError, match=r"image observations \(eye"):
        envs.VectorObservations(_Camera())
