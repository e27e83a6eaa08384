"""From a checkpoint to a directory that can be shipped: the policy, and a card about it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from rerpi_rllib import envs
from rerpi_rllib.algorithm.checkpoint import read_manifest
from rerpi_rllib.algorithm.spaces import parts_of
from rerpi_rllib.analysis.curves import Run, load_run
from rerpi_rllib.analysis.statistics import bootstrap_interval
from rerpi_rllib.core.policies import describe_policy
from rerpi_rllib.envs.playing import play
from rerpi_rllib.runs.checkpoints import Report, load_networks, newest_checkpoint, run_of_checkpoint
from rerpi_rllib.runs.errors import RunFailed
from rerpi_rllib.runs.evaluation import MAX_EPISODES
from rerpi_rllib.runs.inspection import changed_settings
from rerpi_rllib.shipping.onnx_file import check_onnx_installed, write_onnx
from rerpi_rllib.shipping.policy import CARD, DESCRIPTION, ONNX, TENSORS, LoadedPolicy, save_policy

CURVE, VIDEO = "curve.png", "video.mp4"
_FILES = (DESCRIPTION, TENSORS, ONNX, CARD, CURVE, VIDEO)
# The fewest episodes that intervals are computed from.
_ENOUGH = 5
# The card says where the median return of a few more episodes is expected, and how surely.
_FEW, _CONFIDENCE = 3, 0.98


def export(
    checkpoint: Path,
    directory: Path,
    *,
    onnx: bool = False,
    episodes: int = 20,
    video: bool = False,
    report: Report = lambda line: None,
) -> dict[str, Any]:
    """Write a checkpoint's policy to a directory that :func:`rerpi_rllib.load_policy` reads.

    Nothing is unpickled, so that the checkpoint may be of somebody else. An earlier export in the
    same directory is replaced.

    Args:
        checkpoint: a checkpoint, or the directory of a run, whose newest one is taken.
        directory: where to write.
        onnx: whether to write the policy as ONNX, too.
        episodes: how many to play greedily for the card; 0 needs no environment.
        video: whether to film the first of them.
        report: called with a line about every newer checkpoint that is not whole.

    Returns:
        What ``policy.json`` holds.
    """
    if not 0 <= episodes <= MAX_EPISODES:
        raise ValueError(
            f"--episodes {episodes} is not allowed: it must be from 0 to {MAX_EPISODES:,}."
        )
    if video and not episodes:
        raise ValueError("--video films an episode: it is not allowed with --episodes 0.")
    if onnx:
        check_onnx_installed()
    checkpoint = newest_checkpoint(checkpoint, with_replay=False, report=report)
    directory = directory.expanduser()
    if directory.resolve().is_relative_to(checkpoint):
        raise ValueError(f"{directory} is in the checkpoint itself: export it somewhere else.")
    found = [name for name in _FILES if (directory / name).exists()]
    if found and DESCRIPTION not in found:
        raise ValueError(
            f"{directory} holds a {found[0]} that is not of an export: name another one."
        )
    manifest, policy = read_manifest(checkpoint), load_networks(checkpoint).policy
    run = _find_run(checkpoint)
    description: dict[str, Any] = {
        **{
            k: manifest[k] for k in ("algo", "env", "env_config", "api_stack", "env_steps", "updates")
        },
        "spaces": manifest["spaces"],
        "settings": changed_settings(manifest),
        "command": run.settings.command() if run and run.settings else None,
        "versions": manifest.get("versions", {}),
        "evaluation": None,
        "network": describe_policy(policy),
    }
    env = _make_env(manifest, video) if episodes else None
    if env is not None:  # Earlier versions did not write down the parts of the observation.
        description["spaces"]["observation"].setdefault("parts", parts_of(env.observation_space))
    loaded = LoadedPolicy(description, policy)
    # What an implementation of somebody's own has to return.
    examples = loaded.made_up_observations(3)
    description["examples"] = [
        {"observation": o.tolist(), "action": np.asarray(loaded(o)).tolist()} for o in examples
    ]
    directory.mkdir(parents=True, exist_ok=True)
    if env is not None:
        film = directory / VIDEO if video else None
        played = play(env, loaded, episodes=episodes, seed=0, video=film)
        description["evaluation"] = {"episodes": episodes, "seed": 0, **_summary(played)}
    for name in _FILES:  # The description is the first to go and the last to come.
        if not (video and name == VIDEO):
            (directory / name).unlink(missing_ok=True)
    if onnx:
        try:
            description["onnx_difference"] = write_onnx(loaded, directory / ONNX)
        except RuntimeError as error:  # It computes something else than torch.
            raise RunFailed(str(error)) from error
    if run is not None:
        _curve(run, description).savefig(directory / CURVE, dpi=80)
    (directory / CARD).write_text(_card(description, directory), encoding="utf-8")
    save_policy(directory, policy, description)
    return description


def _find_run(checkpoint: Path) -> Run | None:
    """Load the run that wrote the checkpoint; None for one that was saved from Python."""
    try:
        return load_run(run_of_checkpoint(checkpoint))
    except ValueError:
        return None


def _make_env(manifest: Mapping[str, Any], render: bool) -> Any:
    try:
        if not isinstance(manifest["env_config"], dict):
            raise ValueError("The env_config of the checkpoint holds objects.")
        return envs.make(manifest["env"], render=render, **manifest["env_config"])
    except ValueError as error:
        raise ValueError(f"{error} --episodes 0 exports without playing.") from None


def _summary(played: Mapping[str, Any]) -> dict[str, Any]:
    """Add to the returns the intervals of their mean and of the median of a few more.

    The median shows what a policy usually does if it fails now and then. Both intervals are
    bootstraps, which a handful of episodes is too few for.
    """
    returns = np.array(played["returns"])[:, None]
    if len(returns) < _ENOUGH:
        return {**played, "mean_interval": None, "median_interval": None}
    return {
        **played,
        "mean_interval": list(bootstrap_interval(np.mean, returns)),
        "median_interval": list(
            bootstrap_interval(
                lambda resampled: float(np.median(resampled[:_FEW])), returns, confidence=_CONFIDENCE
            )
        ),
    }


def _curve(run: Run, description: Mapping[str, Any]) -> Figure:
    """Draw the returns of the run that the policy is from."""
    figure = Figure(figsize=(6.0, 3.0), layout="constrained")
    axis = figure.subplots()
    for column, label, line in (
        ("return", "training episodes", {"color": "0.6"}),
        ("greedy_return", "greedy evaluation", {"color": "k", "marker": "o", "markersize": 3}),
    ):
        if column in run.curves:
            table = run.curves[["env_steps", column]].dropna()
            axis.plot(table["env_steps"], table[column], label=label, **line)
    if description["env_steps"] < run.final("env_steps"):
        axis.axvline(description["env_steps"], color="k", linestyle=":", label="this policy")
    axis.set(xlabel="environment steps", ylabel="return", title=run.task)
    axis.grid(alpha=0.3)
    if axis.lines:
        axis.legend(fontsize=7)
    return figure


def _card(description: Mapping[str, Any], directory: Path) -> str:
    """Write the model card in Markdown."""
    algo, env = description["algo"], description["env"]
    sections = [
        f"# {algo} on {env}",
        _result(description),
        *([f"![return over training]({CURVE})"] if (directory / CURVE).exists() else []),
        *([f"[Video of the first episode]({VIDEO})"] if (directory / VIDEO).exists() else []),
        "## Use",
        "```python\nfrom rerpi_rllib import load_policy\n\n"
        f'policy = load_policy("{directory.resolve().name}")\n'
        "action = policy(observation)\n```",
        _observation(description),
        _action(description["spaces"]["action"]),
        *([_onnx(description)] if (directory / ONNX).exists() else []),
        "## Where it came from",
        f"{algo} on RLlib's {description['api_stack']} API stack, {description['env_steps']:,} "
        f"environment steps, {description['updates']:,} updates.",
        *([f"```\n{description['command']}\n```"] if description["command"] else []),
        "Settings that differ from the defaults:",
        _table(
            ("setting", "value"),
            [(f"`{k}`", f"`{json.dumps(v)}`") for k, v in description["settings"].items()],
        ),
        "Versions: " + ", ".join(f"{k} {v}" for k, v in description["versions"].items()) + ".",
    ]
    return "\n\n".join(sections) + "\n"


def _result(description: Mapping[str, Any]) -> str:
    found = description["evaluation"]
    if found is None:
        return "It was exported without playing any episodes."
    first, last = found["seed"], found["seed"] + found["episodes"] - 1
    text = f"Mean greedy return **{found['return_mean']:.1f}** over "
    text += (
        f"{found['episodes']} episodes (seeds {first} to {last})" if last > first else "one episode"
    )
    if found["mean_interval"] is None:
        return f"{text}."
    low, high = found["mean_interval"]
    text += f", with a 95 % interval from {low:.1f} to {high:.1f} for the mean"
    low, high = found["median_interval"]
    return (
        f"{text}. Single episodes returned {min(found['returns']):.1f} to "
        f"{max(found['returns']):.1f}; the median of {_FEW} more is expected from {low:.1f} to "
        f"{high:.1f} ({100 * _CONFIDENCE:.0f} %)."
    )


def _observation(description: Mapping[str, Any]) -> str:
    size = description["network"]["observation_size"]
    parts = description["spaces"]["observation"].get("parts")
    if not parts:
        return f"The observation is a vector of {size} numbers."
    rows, start = [], 0
    for name, length in parts.items():
        last = start + length - 1
        rows.append((f"`{name}`", str(start) if last == start else f"{start} to {last}"))
        start += length
    return (
        f"The observation is a vector of {size} numbers, or a mapping with these parts, from which "
        "the vector is made:\n\n" + _table(("part", "its numbers in the vector"), rows)
    )


def _action(space: Mapping[str, Any]) -> str:
    if "n" in space:
        return f"The action is an integer from 0 to {space['n'] - 1}."
    low, high = (_numbers(space[side]) for side in ("low", "high"))
    return f"The action is a vector of {space['shape'][0]} numbers, from {low} to {high}."


def _numbers(values: Sequence[float | None]) -> str:
    texts = ["no bound" if value is None else f"{value:g}" for value in values]
    return texts[0] if len(set(texts)) == 1 else f"[{', '.join(texts)}]"


def _onnx(description: Mapping[str, Any]) -> str:
    return (
        f"`{ONNX}` is the same policy for runtimes without torch: input `observation` [batch, "
        f"{description['network']['observation_size']}] in float32, output `action`. It was compared "
        f"with torch on 1,000 observations; the largest difference is "
        f"{description['onnx_difference']:.1e} of half the range of actions."
    )


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
