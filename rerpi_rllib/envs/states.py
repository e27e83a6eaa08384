"""The state of an environment in the middle of an episode, for another process to go on from it.

A state is made of numbers, strings, None, lists, dictionaries and numpy arrays: nothing in it is
code. An environment, or a wrapper around it, may offer its own with two methods::

    def get_state(self) -> dict[str, Any] | None: ...
    def set_state(self, state: dict[str, Any]) -> None: ...

The outermost one that has both speaks for all that it wraps; None says that there is no state at this
moment. ``set_state`` is called on an environment that was newly made and need not have been reset. It
also has to restore random generators: :func:`get_generator` and :func:`set_generator` help.

Without these methods the state of the control suite's tasks and of Gymnasium's classic control and
MuJoCo tasks is read from their attributes, down to all numbers of MuJoCo's model and data.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from rerpi_rllib.envs import ControlSuite, VectorObservations

_State: TypeAlias = dict[str, Any]

# What these wrappers remember from one step to the next.
_WRAPPERS: dict[type[gym.Env[Any, Any]], tuple[str, ...]] = {
    TimeLimit: ("_elapsed_steps",),
    OrderEnforcing: ("_has_reset",),
    PassiveEnvChecker: (),
    VectorObservations: (),
    ControlSuite: (),
}
_OF_GYMNASIUM = ("gymnasium.envs.classic_control.", "gymnasium.envs.mujoco.")
# No task changes these parts of a model, and they are large.
_ASSETS = ("mesh_", "skin_", "flex_", "oct_", "bvh_")


def get_state(env: gym.Env[Any, Any]) -> list[_State] | None:
    """Return the state of an environment with its wrappers; None if it cannot be had."""
    states = []
    for layer in _layers(env):
        state = layer.get_state() if _offers_states(layer) else _read(layer)
        if state is None:
            return None
        states.append(state)
    return states


def set_state(env: gym.Env[Any, Any], states: list[_State]) -> None:
    """Take over what :func:`get_state` has returned for an environment that was made alike."""
    for layer, state in zip(_layers(env), states, strict=True):
        if _offers_states(layer):
            layer.set_state(state)
        else:
            _write(layer, state)


def get_generator(generator: np.random.Generator | np.random.RandomState) -> _State:
    """Return the state of one of numpy's random generators."""
    if isinstance(generator, np.random.RandomState):
        return dict(generator.get_state(legacy=False))
    return dict(generator.bit_generator.state)


def set_generator(
    generator: np.random.Generator | np.random.RandomState, state: Mapping[str, Any]
) -> None:
    """Take over what :func:`get_generator` has returned for a generator of the same kind."""
    if isinstance(generator, np.random.RandomState):
        generator.set_state(dict(state))
    else:
        generator.bit_generator.state = dict(state)


def _layers(env: gym.Env[Any, Any]) -> Iterator[Any]:
    """Yield the wrappers from the outermost one on, and what they wrap; not what is spoken for."""
    yield env
    while isinstance(env, gym.Wrapper) and not _offers_states(env):
        env = env.env
        yield env


def _offers_states(layer: Any) -> bool:
    return hasattr(layer, "get_state") and hasattr(layer, "set_state")


def _read(layer: Any) -> _State | None:
    if type(layer) in _WRAPPERS:
        return {name: getattr(layer, name) for name in _WRAPPERS[type(layer)]}
    if type(layer).__module__.startswith(_OF_GYMNASIUM):
        generator = layer.np_random
        if not isinstance(generator, np.random.Generator):
            return None
        return {
            "numbers": _numbers_of(layer),
            "generator": get_generator(generator),
            **_read_simulation(layer),
        }
    if (suite := _suite_environment(layer)) is not None:
        return {
            "step_count": suite._step_count,
            "reset_next_step": suite._reset_next_step,
            "numbers": _numbers_of(suite.task),
            "generator": get_generator(suite.task.random),
            **_read_simulation(suite.physics),
        }
    return None


def _write(layer: Any, state: _State) -> None:
    if type(layer) in _WRAPPERS:
        for name in _WRAPPERS[type(layer)]:
            setattr(layer, name, state[name])
        return
    suite = _suite_environment(layer)
    if suite is not None:
        suite._step_count = state["step_count"]
        suite._reset_next_step = state["reset_next_step"]
        owner, generator, physics = suite.task, suite.task.random, suite.physics
    else:
        owner, generator, physics = layer, layer.np_random, layer
    vars(owner).update(copy.deepcopy(state["numbers"]))
    set_generator(generator, state["generator"])
    _write_simulation(physics, state)


def _suite_environment(layer: Any) -> Any:
    """Return dm_control's environment in shimmy's wrapper, if it is one of the suite; else None."""
    if type(layer).__module__ != "shimmy.dm_control_compatibility":
        return None
    env = layer.get_wrapper_attr("_env")
    is_of_suite = type(env).__module__ == "dm_control.rl.control" and type(
        env.task
    ).__module__.startswith("dm_control.suite.")
    return env if is_of_suite else None


def _numbers_of(owner: Any) -> _State:
    """Return the attributes that are numbers or arrays, or None, which may become one."""
    kinds = (bool, int, float, np.generic, np.ndarray, type(None))
    return {
        name: copy.deepcopy(value)
        for name, value in vars(owner).items()
        if isinstance(value, kinds)
        or (isinstance(value, tuple) and all(isinstance(part, kinds) for part in value))
    }


# -- MuJoCo: what it integrates, and what it and the tasks keep beside that. --


def _simulation(owner: Any) -> tuple[Any, Any]:
    """Return MuJoCo's model and data of an environment of Gymnasium or of dm_control's physics."""
    return getattr(owner.model, "ptr", owner.model), getattr(owner.data, "ptr", owner.data)


def _read_simulation(owner: Any) -> _State:
    import mujoco

    if not hasattr(owner, "data"):
        return {}
    model, data = _simulation(owner)
    integrated = np.empty(mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_INTEGRATION))
    mujoco.mj_getState(model, data, integrated, mujoco.mjtState.mjSTATE_INTEGRATION)
    return {
        "integrated": integrated,
        "model": {name: array.copy() for name, array in _model_arrays(model)},
        "data": {name: array.copy() for name, array in _data_arrays(model, data)},
    }


def _write_simulation(owner: Any, state: _State) -> None:
    import mujoco

    if "integrated" not in state:
        return
    model, data = _simulation(owner)
    for name, array in _model_arrays(model):
        array[...] = state["model"][name]
    mujoco.mj_setState(model, data, state["integrated"], mujoco.mjtState.mjSTATE_INTEGRATION)
    # The control suite begins a step where this ends, with contacts and constraints already there.
    mujoco.mj_step1(model, data)
    # Gymnasium's environments also look at positions and forces of the step before.
    for name, array in _data_arrays(model, data):
        array[...] = state["data"][name]


def _model_arrays(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield all numbers of a model: tasks move targets in it, and some are drawn at random."""
    for name, array in _float_arrays(model):
        if not name.startswith(_ASSETS):
            yield name, array


def _data_arrays(model: Any, data: Any) -> Iterator[tuple[str, Any]]:
    """Yield the arrays of fixed sizes; those of contacts and constraints are empty at first."""
    import mujoco

    fixed = {name for name, array in _float_arrays(mujoco.MjData(model)) if array.size}
    for name, array in _float_arrays(data):
        if name in fixed:
            yield name, array


def _float_arrays(owner: Any) -> Iterator[tuple[str, Any]]:
    for name in dir(owner):
        if not name.startswith("_"):
            value = getattr(owner, name)
            if isinstance(value, np.ndarray) and value.dtype.kind == "f":
                yield name, value
