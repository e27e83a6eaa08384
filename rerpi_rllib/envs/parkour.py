"""Parkour: a planar walker or a humanoid of the control suite runs along an obstacle course.

The observation has two parts: ``proprioception``, what the body feels of itself, and ``terrain``, the
height of the course ahead of it. docs/parkour.md has the formulas of the reward and their source.

This module imports MuJoCo, which then knows how to render: Gymnasium imports it to make a task.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import mujoco
import numpy as np
from dm_control import suite

from rerpi_rllib.envs.parkour_course import (
    OBSTACLES,
    PIT,
    Course,
    difficulty_at,
    draw_course,
    most_obstacles,
)
from rerpi_rllib.envs.rendering import can_render
from rerpi_rllib.envs.states import get_generator, set_generator

_CONTROL_STEP = 0.025  # Seconds, as in the control suite's tasks with these bodies.
# The body has fallen if its torso is lower than this above the ground, or leans more than this: the
# cosine of the angle between its axis and the vertical.
_FALLEN_HEIGHT, _FALLEN_UPRIGHT = 0.7, 0.4
# Where the outermost heights are, in metres ahead of the torso and to its sides.
_AHEAD, _ASIDE = (-1.0, 8.4), 2.5
_PICTURE = (352, 640)
_FEET = ("right_foot", "left_foot")
# The ground goes on for as far as a body comes at this speed, in m/s. A plane has no width, but the
# ground of a planar body has to.
_REACH, _BUILT_WIDTH = 20.0, 2.0
_SIDES = 12.0  # How thick the corridor's walls are: heights are not read further away.


@dataclass(frozen=True)
class _Body:
    """A body, and what differs between the tasks because of it.

    Args:
        domain: the domain of the control suite that the body is from.
        root: how many numbers of the positions and of the velocities are the root's.
        start: the height of the torso at the start.
        width: the width of the corridor.
        terrain: the number of heights ahead, and to the sides if there is a third dimension.
        ends: the bodies whose positions, as seen from the torso, are part of the observation.
        crouch: the weight of the cost of a torso that is not 1.2 m above the lower foot.
        aside: the weight of the cost of the squared distance from the corridor's middle.
        effort: the weight of the cost of the squared action.
        camera: where the camera is and what it looks at, as seen from the torso.
    """

    domain: str
    root: tuple[int, int]
    start: float
    width: float
    terrain: tuple[int, ...]
    ends: tuple[str, ...]
    crouch: float
    aside: float
    effort: float
    camera: tuple[tuple[float, float, float], tuple[float, float, float]]


BODIES = {
    "walker2d": _Body(
        domain="walker",
        root=(3, 3),
        start=1.3,
        width=math.inf,
        terrain=(95,),
        ends=_FEET,
        crouch=0.025,
        aside=0.0,
        effort=0.0025,
        camera=((1.2, -5.0, 1.0), (1.6, 0.0, -0.3)),
    ),
    "humanoid": _Body(
        domain="humanoid",
        root=(7, 6),
        start=1.29,
        width=5.0,
        terrain=(41, 11),
        ends=(*_FEET, "right_hand", "left_hand"),
        crouch=0.0,
        aside=0.0125,
        effort=0.005,
        camera=((-4.5, -1.5, 3.0), (3.0, 0.3, -1.0)),
    ),
}


class Parkour(gym.Env[dict[str, np.ndarray], np.ndarray]):
    """A body that runs along a course, which is drawn anew from the seed for each episode.

    Args:
        body: "walker2d" or "humanoid".
        obstacles: the kinds of obstacles: "hurdle", "gap", "platform", and "wall" for the humanoid.
        difficulty: the sizes of the obstacles, from 0 for the easiest to 1 for the hardest.
        curriculum: whether the difficulty rises from 0 at the start to ``difficulty`` at the end of
            the course; otherwise it is the same everywhere.
        length: where the last obstacle begins at the latest, in metres. Flat ground follows.
        spacing: the least and the greatest length of flat ground between two obstacles, in metres.
        v_max: the speed in m/s above which running faster is not rewarded.
        episode_seconds: after which the episode is truncated.
        terrain_points: the number of heights ahead, a pair (ahead, to the sides) for the humanoid;
            by default 95 or (41, 11).
        render_mode: "rgb_array" for pictures by a camera that follows the body.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": round(1 / _CONTROL_STEP)}  # noqa: RUF012

    def __init__(
        self,
        body: str,
        obstacles: Sequence[str],
        *,
        difficulty: float = 1.0,
        curriculum: bool = True,
        length: float = 100.0,
        spacing: tuple[float, float] = (3.0, 6.0),
        v_max: float = 4.0,
        episode_seconds: float = 25.0,
        terrain_points: int | tuple[int, int] | None = None,
        render_mode: str | None = None,
    ) -> None:
        if body not in BODIES:
            raise ValueError(f"body={body!r} is not allowed: it must be one of {', '.join(BODIES)}.")
        self._body = BODIES[body]
        is_planar = math.isinf(self._body.width)
        _check_kinds(obstacles, is_planar)
        if not isinstance(curriculum, bool):
            raise ValueError(f"curriculum={curriculum!r} is not allowed: it must be true or false.")
        if render_mode and not can_render():
            raise ValueError(
                "Pictures need MUJOCO_GL: set it to 'egl' (Debian package libegl1) or 'osmesa' "
                "(libosmesa6)."
            )
        self.render_mode = render_mode
        self._kinds = tuple(obstacles)
        self._difficulty = _number("difficulty", difficulty, 0, 1)
        self._curriculum = curriculum
        self._length = _number("length", length, 10, 1000)
        self._spacing = _check_spacing(spacing)
        self._v_max = _number("v_max", v_max, 0.1, 100)
        self._max_steps = round(
            _number("episode_seconds", episode_seconds, _CONTROL_STEP, 1000) / _CONTROL_STEP
        )
        shape = _check_points(terrain_points, self._body.terrain)
        ahead = np.linspace(*_AHEAD, shape[0])
        if not is_planar:
            aside = np.linspace(-_ASIDE, _ASIDE, shape[1])
            ahead, self._aside = (grid.ravel() for grid in np.meshgrid(ahead, aside, indexing="ij"))
        self._ahead, self._is_planar = ahead, is_planar
        self._steps = 0
        self._renderer: Any = None
        self._build()
        boxes = {"proprioception": self._proprioception().size, "terrain": ahead.size}
        self.observation_space = gym.spaces.Dict(
            {
                name: gym.spaces.Box(-np.inf, np.inf, (size,), np.float32)
                for name, size in boxes.items()
            }
        )
        self.action_space = gym.spaces.Box(-1.0, 1.0, (self.model.nu,), np.float32)

    @property
    def dt(self) -> float:
        """The seconds of a step, which make a video as fast as the body was."""
        return _CONTROL_STEP

    # -- Gymnasium's interface. --

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._set_course(
            draw_course(
                self.np_random,
                self._kinds,
                length=self._length,
                spacing=self._spacing,
                difficulty=self._difficulty,
                curriculum=self._curriculum,
                width=self._body.width,
            )
        )
        self._steps = 0
        mujoco.mj_resetData(self.model, self.data)
        self._joints += self.np_random.uniform(-0.05, 0.05, self._joints.shape)
        self._joint_speeds += self.np_random.uniform(-0.05, 0.05, self._joint_speeds.shape)
        mujoco.mj_step1(self.model, self.data)
        return self._observe(), self._info()

    def step(
        self, action: np.ndarray
    ) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        before = self._torso[0]
        self.data.ctrl[:] = np.clip(action, -1.0, 1.0)
        # As in the control suite: afterwards, all that depends on positions is up to date.
        mujoco.mj_step2(self.model, self.data)
        mujoco.mj_step(self.model, self.data, self._substeps - 1)
        mujoco.mj_step1(self.model, self.data)
        self._steps += 1
        speed = (self._torso[0] - before) / _CONTROL_STEP
        truncated = self._steps >= self._max_steps
        return self._observe(), self._reward(speed), self._has_fallen(), truncated, self._info()

    def render(self) -> np.ndarray | None:  # type: ignore[override]
        if self.render_mode is None:
            return None
        if self._renderer is None:
            self._renderer = mujoco.Renderer(self.model, *_PICTURE)
        self._renderer.update_scene(self.data, camera="follow")
        picture: np.ndarray = self._renderer.render()
        return picture

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None

    # -- What is seen, rewarded and called a fall. --

    def _observe(self) -> dict[str, np.ndarray]:
        return {
            "proprioception": self._proprioception().astype(np.float32),
            "terrain": self.terrain().astype(np.float32),
        }

    def _proprioception(self) -> np.ndarray:
        sensors = self._sensors.copy()
        # Forces and accelerations have peaks at every contact, hundreds of times what is usual.
        sensors[self._peaks] = np.arcsinh(sensors[self._peaks])
        parts = (self._joints, self._joint_speeds, self._frame, sensors, self._torso[1:2])
        felt: np.ndarray = np.concatenate(parts)[self._kept]
        return felt

    def terrain(self) -> np.ndarray:
        """Return the heights ahead: 0 for the ground on which the body stands at the start."""
        x, y, z = self._torso
        if self._is_planar:
            heights = self._course.heights(x + self._ahead)
        else:
            forward, left = self._frame[0], self._frame[3]
            norm = max(math.hypot(forward, left), 1e-6)
            cosine, sine = forward / norm, left / norm
            heights = self._course.heights(
                x + cosine * self._ahead - sine * self._aside,
                y + sine * self._ahead + cosine * self._aside,
            )
        heights += self._body.start - z
        return heights

    def _reward(self, speed: float) -> float:
        body, action = self._body, self.data.ctrl
        over_feet = self._torso[2] - min(foot[2] for foot in self._feet)
        return float(
            min(speed, self._v_max) / self._v_max
            + 0.1 * self._frame[8]
            - body.crouch * abs(over_feet - 1.2)
            - body.aside * self._torso[1] ** 2
            - body.effort * action.dot(action)
        )

    def _has_fallen(self) -> bool:
        x, y, z = self._torso[:1], self._torso[1:2], self._torso[2]
        ground = self._course.heights(x, None if self._is_planar else y)
        # A body in a gap has fallen; above one it has not.
        return bool(z - max(ground[0], 0.0) < _FALLEN_HEIGHT or self._frame[8] < _FALLEN_UPRIGHT)

    def _info(self) -> dict[str, Any]:
        distance = float(self._torso[0])
        args = self._difficulty, self._length, self._curriculum
        return {"distance": distance, "difficulty": difficulty_at(distance, *args)}

    # -- The state in the middle of an episode; see envs/states.py. --

    def get_state(self) -> dict[str, Any] | None:
        kind = mujoco.mjtState.mjSTATE_INTEGRATION
        integrated = np.empty(mujoco.mj_stateSize(self.model, kind))
        mujoco.mj_getState(self.model, self.data, integrated, kind)
        return {
            "course": self._course.obstacles.copy(),
            "steps": self._steps,
            "generator": get_generator(self.np_random),
            "integrated": integrated,
            "sensors": self._sensors.copy(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self._set_course(Course(state["course"].copy(), self._course.width, self._course.side_top))
        self._steps = state["steps"]
        set_generator(self.np_random, state["generator"])
        kind = mujoco.mjtState.mjSTATE_INTEGRATION
        mujoco.mj_setState(self.model, self.data, state["integrated"], kind)
        mujoco.mj_step1(self.model, self.data)
        # Forces and accelerations are those of the step before.
        self._sensors[:] = state["sensors"]

    # -- The model. --

    def _build(self) -> None:
        """Compile the model once, with as many boxes as a course can need."""
        body = self._body
        boxes = most_obstacles(self._length, self._spacing)
        self.model = model = _specify(body, boxes + 1, boxes).compile()
        self.data = data = mujoco.MjData(model)
        self._substeps = round(_CONTROL_STEP / model.opt.timestep)
        first = model.geom("ground_0").id, model.geom("obstacle_0").id
        self._pools = slice(first[0], first[1]), slice(first[1], first[1] + boxes)
        # These are views: they always show MuJoCo's present numbers.
        torso = model.body("torso").id
        self._torso, self._frame = data.xpos[torso], data.xmat[torso]
        self._feet = [data.xpos[model.body(name).id] for name in _FEET]
        self._joints, self._joint_speeds = data.qpos[body.root[0] :], data.qvel[body.root[1] :]
        self._sensors = data.sensordata
        self._peaks, self._kept = self._choose_proprioception()
        self._set_course(Course(np.empty((0, 5)), body.width))
        mujoco.mj_step1(model, data)

    def _choose_proprioception(self) -> tuple[np.ndarray, np.ndarray]:
        """Return which sensors have peaks, and which numbers of all that is felt are kept."""
        model = self.model
        joints, speeds = (np.ones(part.size, bool) for part in (self._joints, self._joint_speeds))
        peaks, felt = np.zeros((2, self._sensors.size), bool)
        for sensor in map(model.sensor, range(model.nsensor)):
            place = slice(sensor.adr[0], sensor.adr[0] + sensor.dim[0])
            peaks[place] = sensor.name == "acceleration" or sensor.dim[0] == 1
            # A plane has two directions and one axis to turn about.
            felt[place] = True
            if self._is_planar and sensor.dim[0] == 3:
                felt[place] = (0, 1, 0) if sensor.name == "turning" else (1, 0, 1)
        # The world's directions forward and up, as seen from the torso.
        frame = np.zeros((3, 3), bool)
        frame[0], frame[2] = not self._is_planar, (True, not self._is_planar, True)
        aside = np.array([not self._is_planar])
        return peaks, np.concatenate([joints, speeds, frame.ravel(), felt, aside])

    def _set_course(self, course: Course) -> None:
        self._course = course
        width = _BUILT_WIDTH if self._is_planar else course.width
        reach = _REACH * self._max_steps * _CONTROL_STEP
        boxes = course.boxes(-reach, self._length + reach, width)
        for pool, corners in zip(self._pools, boxes):
            self._move(pool, corners)
        if not self._is_planar:
            sides = np.empty((2, 2, 3))
            sides[:, :, 0] = -reach, self._length + reach
            sides[:, :, 1] = [[-width / 2 - _SIDES, -width / 2], [width / 2, width / 2 + _SIDES]]
            sides[:, :, 2] = PIT, course.side_top
            first = self.model.geom("side_0").id
            self._move(slice(first, first + 2), sides)

    def _move(self, pool: slice, corners: np.ndarray) -> None:
        """Give the first geoms of a pool these corners, and put the rest out of reach."""
        model, number = self.model, len(corners)
        model.geom_pos[pool] = 0.0, 0.0, 10 * PIT
        model.geom_size[pool] = 0.01
        used = slice(pool.start, pool.start + number)
        model.geom_pos[used] = corners.mean(axis=1)
        model.geom_size[used] = (corners[:, 1] - corners[:, 0]) / 2
        # The collision detection's own measures of a geom.
        model.geom_aabb[pool, 3:] = model.geom_size[pool]
        model.geom_rbound[pool] = np.linalg.norm(model.geom_size[pool], axis=1)


def _specify(body: _Body, grounds: int, obstacles: int) -> Any:
    """Return the specification of a model: a body, its senses, a camera, and boxes for the course."""
    xml, assets = getattr(suite, body.domain).get_model_and_assets()
    spec = mujoco.MjSpec.from_string(xml.decode(), include=assets)
    # The boxes are moved at each reset; the middle phase would look for them where they were. And
    # numbers that are broken are for the EnvRunner to see, not to be replaced by those of the start.
    flags = mujoco.mjtDisableBit
    spec.option.disableflags |= flags.mjDSBL_MIDPHASE | flags.mjDSBL_AUTORESET
    _add_senses(spec, body)
    torso = spec.body("torso")
    torso.pos[2] = body.start
    torso.add_camera(
        name="follow", mode=mujoco.mjtCamLight.mjCAMLIGHT_TRACK, pos=body.camera[0],
        xyaxes=_look_at(*body.camera),
    )  # fmt: skip

    sky, grid = spec.texture("skybox"), spec.texture("grid")
    sky.rgb1, sky.rgb2, sky.mark = (0.85, 0.9, 0.95), (0.5, 0.65, 0.8), mujoco.mjtMark.mjMARK_NONE
    sky.width, sky.height = 64, 64
    grid.rgb1, grid.rgb2, grid.markrgb = (0.45, 0.5, 0.55), (0.52, 0.57, 0.62), (0.4, 0.45, 0.5)
    spec.material("grid").reflectance = 0.0
    spec.worldbody.add_light(
        type=mujoco.mjtLightType.mjLIGHT_DIRECTIONAL, dir=(0.3, 0.4, -1), diffuse=(0.5, 0.5, 0.5),
        castshadow=False,
    )  # fmt: skip
    floor = spec.geom("floor")
    floor.pos, floor.material, floor.rgba = (0, 0, PIT), "", (0.12, 0.14, 0.17, 1)
    colors = {
        "ground": (grounds, (1, 1, 1, 1), "grid"),
        "obstacle": (obstacles, (0.75, 0.25, 0.2, 1), ""),
        "side": (0 if math.isinf(body.width) else 2, (0.7, 0.72, 0.75, 1), ""),
    }
    for name, (number, rgba, material) in colors.items():
        for index in range(number):
            # No geom may be where its body is: MuJoCo would not look at its position again.
            spec.worldbody.add_geom(
                name=f"{name}_{index}", type=mujoco.mjtGeom.mjGEOM_BOX, size=(1, 1, 1),
                pos=(0, 0, 10 * PIT), contype=1, conaffinity=1, rgba=rgba, material=material,
            )  # fmt: skip
    return spec


def _add_senses(spec: Any, body: _Body) -> None:
    """Replace the suite's sensors, except those of touch, by the ones of the observation."""
    kinds, bodies = mujoco.mjtSensor, mujoco.mjtObj.mjOBJ_BODY
    for sensor in list(spec.sensors):
        if sensor.type != kinds.mjSENS_TOUCH:
            spec.delete(sensor)
    if not list(spec.sensors):
        for name in _FEET:
            foot = spec.geom(name)
            spec.body(name).add_site(
                name=name, type=mujoco.mjtGeom.mjGEOM_CAPSULE, size=foot.size * 1.1,
                zaxis=(1, 0, 0), rgba=(0, 0, 0, 0),
            )  # fmt: skip
            spec.add_sensor(
                name=f"{name}_touch", type=kinds.mjSENS_TOUCH, objtype=mujoco.mjtObj.mjOBJ_SITE,
                objname=name,
            )  # fmt: skip
    spec.body("torso").add_site(name="senses", rgba=(0, 0, 0, 0))
    for name, kind in (
        ("velocity", kinds.mjSENS_VELOCIMETER),
        ("turning", kinds.mjSENS_GYRO),
        ("acceleration", kinds.mjSENS_ACCELEROMETER),
    ):
        spec.add_sensor(name=name, type=kind, objtype=mujoco.mjtObj.mjOBJ_SITE, objname="senses")
    for name in body.ends:
        spec.add_sensor(
            name=f"{name}_position", type=kinds.mjSENS_FRAMEPOS, objtype=bodies, objname=name,
            reftype=bodies, refname="torso",
        )  # fmt: skip


def _look_at(camera: Sequence[float], target: Sequence[float]) -> np.ndarray:
    """Return the axes of a picture that has a target in its middle, and the horizon level."""
    back = np.subtract(camera, target)
    right = np.cross((0, 0, 1), back)
    return np.concatenate([right, np.cross(back, right)])


# -- Arguments. --


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(name: str, value: Any, least: float, most: float) -> float:
    if not _is_number(value) or not least <= value <= most:
        raise ValueError(
            f"{name}={value!r} is not allowed: it must be a number from {least:g} to {most:g}."
        )
    return float(value)


def _check_kinds(kinds: Any, is_planar: bool) -> None:
    allowed = [name for name in OBSTACLES if name != "wall" or not is_planar]
    if (
        isinstance(kinds, str)
        or not isinstance(kinds, Sequence)
        or not kinds
        or not all(kind in allowed for kind in kinds)
    ):
        raise ValueError(
            f"obstacles={kinds!r} is not allowed: it must be a list of one or more of "
            f"{', '.join(allowed)}."
        )


def _check_spacing(value: Any) -> tuple[float, float]:
    if (
        not isinstance(value, Sequence)
        or len(value) != 2
        or not all(map(_is_number, value))
        or not 0.5 <= value[0] <= value[1] <= 1000
    ):
        raise ValueError(
            f"spacing={value!r} is not allowed: it must be two ascending numbers from 0.5 to 1000."
        )
    return float(value[0]), float(value[1])


def _check_points(value: Any, default: tuple[int, ...]) -> tuple[int, ...]:
    points = default if value is None else (value,) if isinstance(value, int) else value
    if (
        not isinstance(points, Sequence)
        or len(points) != len(default)
        or not all(type(number) is int and 2 <= number <= 1000 for number in points)
    ):
        words = "a whole number" if len(default) == 1 else "two whole numbers, each"
        raise ValueError(
            f"terrain_points={value!r} is not allowed: it must be {words} from 2 to 1000."
        )
    return tuple(points)
