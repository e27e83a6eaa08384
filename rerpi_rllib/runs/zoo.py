"""The zoo: exported policies of tasks that were trained here, which any machine can play."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rerpi_rllib import envs
from rerpi_rllib.envs.playing import play
from rerpi_rllib.runs.files import ZOO, did_you_mean
from rerpi_rllib.shipping.policy import DESCRIPTION, load_policy, read_description


def zoo_tasks() -> list[str]:
    """Return the names of the tasks that the zoo has policies of."""
    return sorted(path.parent.name for path in ZOO.glob(f"*/{DESCRIPTION}"))


def describe_zoo() -> list[str]:
    """Return one line about each policy of the zoo."""
    lines = []
    for task in zoo_tasks():
        found = read_description(ZOO / task)
        played = found["evaluation"]["return_mean"]
        lines.append(f"{task}: {found['algo']}, {found['env_steps']:,} steps, return {played:.0f}")
    return lines


def find_policy(task: str) -> Path:
    """Return the directory of a policy: one of the zoo by its task, or any that was exported."""
    name = re.sub(r"[_/]", "-", task.removeprefix("dm_control/").removesuffix("-v0"))
    if name in zoo_tasks():
        return ZOO / name
    if (Path(task) / DESCRIPTION).is_file():
        return Path(task)
    raise ValueError(
        f"The zoo has no {task!r}, and it is no directory that `rllib export` has written."
        f"{did_you_mean(name, zoo_tasks())} Allowed: {', '.join(zoo_tasks())}."
    )


def enjoy(task: str, *, episodes: int, seed: int, video: Path | None) -> dict[str, Any]:
    """Play an exported policy; return what `rllib evaluate` returns of a checkpoint."""
    policy = load_policy(find_policy(task))
    env_id, env_config = policy.description["env"], policy.description["env_config"] or {}
    env = envs.make(env_id, render=video is not None, **env_config)
    played = play(env, policy, episodes=episodes, seed=seed, video=video)
    return {"env": env_id, "episodes": episodes, **played}
