"""The tasks: control suite, parkour, Gymnasium, and any other with vector observations.

:func:`make` builds an environment by its id; observations come as one float32 vector in a fixed
order. Actions stay in the environment's own units: RLlib rescales the policy's normalised actions.
"""

from __future__ import annotations

import difflib
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, SupportsFloat, TypeAlias

import gymnasium as gym
import numpy as np

from rerpi_rllib.envs.rendering import can_render, no_display_warning

# An observation, a reward, whether the episode is terminated or truncated, and more information.
_Step: TypeAlias = tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]

_PARKOUR: dict[str, dict[str, Any]] = {
    "walker2d": {"body": "walker2d", "obstacles": ("hurdle", "gap", "platform")},
    "humanoid-walls": {"body": "humanoid", "obstacles": ("wall",)},
    "humanoid-gaps": {"body": "humanoid", "obstacles": ("gap",)},
}


def register() -> None:
    """Make the control suite's tasks and those of this package known to Gymnasium."""
    with no_display_warning():
        import shimmy

    gym.register_envs(shimmy)
    for name, kwargs in _PARKOUR.items():
        if f"parkour/{name}-v0" not in gym.registry:
            entry_point = "rerpi_rllib.envs.parkour:Parkour"
            gym.register(f"parkour/{name}-v0", entry_point=entry_point, kwargs=kwargs)


def list_ids() -> list[str]:
    """Return the ids of all environments that can be built here, the control suite's first."""
    register()
    suite = sorted(i for i in gym.registry if i.startswith("dm_control/") and "compat" not in i)
    suite += sorted(i for i in gym.registry if i.startswith("parkour/"))
    others = sorted(i for i in gym.registry if "/" not in i)
    return suite + others


def _check_known(env_id: str) -> None:
    known = list_ids()
    if env_id in known or env_id in gym.registry or ":" in env_id:
        return
    near = difflib.get_close_matches(env_id, known, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"Unknown environment {env_id!r}.{hint} `rllib list envs` shows all.")


def make(env_id: str, *, render: bool = False, **kwargs: Any) -> gym.Env[Any, Any]:
    """Build an environment.

    Args:
        env_id: ``dm_control/<domain>-<task>-v0``, ``parkour/<task>-v0`` or any other id known to
            Gymnasium.
        render: whether ``env.render()`` has to return pictures.
        **kwargs: arguments of the environment itself.
    """
    _check_known(env_id)
    if render:
        kwargs["render_mode"] = "rgb_array"
    try:
        env = gym.make(env_id, disable_env_checker=True, **kwargs)
        if not can_render():
            env.reset()  # A task that renders its observations fails here and not in make.
    except Exception as error:  # An environment of the user's may raise anything.
        if isinstance(error, RuntimeError) and "OpenGL" in str(error):
            raise ValueError(
                f"{env_id} is rendered and MUJOCO_GL is {os.environ.get('MUJOCO_GL')!r}: set it to "
                "'egl' (Debian package libegl1) or 'osmesa' (libosmesa6)."
            ) from None
        raise ValueError(f"Could not make {env_id!r}: {type(error).__name__}: {error}") from error
    return ControlSuite(env) if ControlSuite.fits(env) else VectorObservations(env)


def register_with_tune(env_id: str) -> None:
    """Let Ray's workers build ``env_id`` with :func:`make`, unless the name is registered already."""
    from ray.tune.registry import ENV_CREATOR, _global_registry, register_env

    if not _global_registry.contains(ENV_CREATOR, env_id):
        register_env(env_id, partial(_create, env_id))


def _create(env_id: str, env_config: Mapping[str, Any]) -> Any:
    if "num_envs" in env_config:  # RLlib's request for gym_env_vectorize_mode="vector_entry_point".
        try:
            return gym.make_vec(env_id, vectorization_mode="vector_entry_point", **env_config)
        except gym.error.Error as error:
            raise ValueError(
                f"gym_env_vectorize_mode='vector_entry_point' is not allowed with {env_id!r}: it "
                f"must be 'sync' or 'async'. ({error})"
            ) from error
    return make(env_id, **env_config)


class Joined(gym.spaces.Box):
    """The space of vectors that hold the parts of a Dict one after another, in the Dict's order.

    Args:
        low, high: the bounds of all numbers, ``[O]``.
        parts: how many of them belong to each part, by its name; none if there are no parts.
    """

    def __init__(self, low: Any, high: Any, parts: Mapping[str, int]) -> None:
        super().__init__(np.float32(low), np.float32(high), dtype=np.float32)
        self.parts = dict(parts)


class VectorObservations(gym.ObservationWrapper[Any, Any, Any]):
    """Concatenates the parts of a Dict or Tuple observation into one float32 vector."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        parts = list(_parts(env.observation_space))
        for path, space in parts:
            if space.dtype == np.uint8 and len(space.shape) >= 2:
                raise ValueError(
                    f"{_name(env)} has image observations ({_join(path) or 'observation'}: "
                    f"{space.shape} {space.dtype}); RERPI needs vector observations."
                )
        sizes = [math.prod(space.shape) for _, space in parts]
        named = Counter[str]()
        for (path, _), size in zip(parts, sizes):
            if path:
                named[str(path[0])] += size
        self.observation_space = Joined(
            np.concatenate([np.ravel(space.low) for _, space in parts]),
            np.concatenate([np.ravel(space.high) for _, space in parts]),
            named,
        )
        # Each part is copied to its place in a vector, which is faster than to concatenate them.
        self._vector = np.zeros(sum(sizes), np.float32)
        ends = np.cumsum(sizes)
        self._places = [
            (path, place.reshape(space.shape))
            for (path, space), place in zip(parts, np.split(self._vector, ends))
        ]

    def observation(self, observation: Any) -> np.ndarray:
        for path, place in self._places:
            part = observation
            for key in path:
                part = part[key]
            place[...] = part
        return self._vector.copy()


class ControlSuite(VectorObservations):
    """Steps an environment of dm_control directly, with the results that its wrappers would give.

    They take a quarter of the time of a step in a small task. What else they do is left to them.
    """

    @staticmethod
    def fits(env: gym.Env[Any, Any]) -> bool:
        """Whether nothing but shimmy is between ``env`` and dm_control."""
        from shimmy import DmControlCompatibilityV0

        return (
            type(env) is gym.wrappers.OrderEnforcing
            and type(env.env) is DmControlCompatibilityV0
            and env.render_mode != "human"  # Shimmy then draws each step.
        )

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        from shimmy.utils.dm_env import dm_env_step2gym_step

        super().__init__(env)
        self._wrapper: Any = env
        self._dm_env = env.get_wrapper_attr("_env")
        self._to_gymnasium: Callable[[Any], _Step] = dm_env_step2gym_step
        physics = getattr(self._dm_env, "physics", None)
        if env.render_mode == "rgb_array" and physics is not None and physics.model.ncam:
            # The first camera of a task follows what walks away, unlike MuJoCo's own.
            env.get_wrapper_attr("render_kwargs").setdefault("camera_id", 0)

    def step(self, action: Any) -> _Step:
        if not self._wrapper.has_reset:
            return super().step(action)  # This raises Gymnasium's error.
        step = self._dm_env.step(action)
        return self._to_gymnasium(step._replace(observation=self.observation(step.observation)))


def _name(env: gym.Env[Any, Any]) -> str:
    return env.spec.id if env.spec else str(env)


def _join(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))


def _parts(
    space: gym.Space[Any], path: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], gym.spaces.Box]]:
    """Find the boxes in a space, each with the keys that lead to it."""
    if isinstance(space, (gym.spaces.Dict, gym.spaces.Tuple)):
        children = space.items() if isinstance(space, gym.spaces.Dict) else enumerate(space)
        for key, child in children:
            yield from _parts(child, (*path, key))
    elif isinstance(space, gym.spaces.Box):
        yield path, space
    else:
        raise ValueError(
            f"The observation space {_join(path)} is {space}; RERPI needs vector observations, "
            "a Box or a Dict of them."
        )
