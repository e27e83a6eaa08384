"""Draw the pictures of docs/parkour.md: a body in the middle of a hard course of each task.

MUJOCO_GL=egl python docs/scripts/parkour.py
"""

from __future__ import annotations

from pathlib import Path

import imageio
import mujoco

from rerpi_rllib import envs

PICTURES = Path(__file__).parents[1] / "pictures"
# The seed of the course, the distance along it, the distance from its middle, and the joints.
SCENES = {
    "walker2d": (38, 7.0, 0.0, {"rooty": 0.2, "right_hip": 1.1, "right_knee": -1.2, "left_hip": -0.2,
                               "left_knee": -0.5, "rootz": 0.25}),
    "humanoid-walls": (5, 3.2, -0.8, {}),
    "humanoid-gaps": (2, 8.0, 0.0, {}),
}  # fmt: skip
STRIDE = {
    "right_hip_y": -1.0, "right_knee": -1.1, "left_hip_y": 0.2, "left_knee": -0.6,
    "right_shoulder1": -0.6, "left_shoulder1": 0.4, "right_elbow": -0.8, "left_elbow": -0.8,
}  # fmt: skip


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for name, (seed, ahead, aside, joints) in SCENES.items():
        spacing = (1.4, 1.8) if name == "walker2d" else (3.0, 4.0)
        env = envs.make(
            f"parkour/{name}-v0", render=True, curriculum=False, spacing=spacing
        ).unwrapped
        env.reset(seed=seed)
        model, data = env.model, env.data
        data.qpos[:] = model.qpos0
        if name == "walker2d":
            data.joint("rootx").qpos = ahead
        else:
            data.qpos[:2] = ahead, aside
            joints = STRIDE
        for joint, angle in joints.items():
            data.joint(joint).qpos = angle
        mujoco.mj_forward(model, data)
        imageio.imwrite(PICTURES / f"parkour-{name}.png", env.render())
        env.close()


if __name__ == "__main__":
    main()
