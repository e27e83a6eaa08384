"""Finding the checkpoints of runs, and what can be read of them without unpickling anything."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rerpi_rllib.algorithm import checkpoint as manifests
from rerpi_rllib.algorithm.checkpoint import DamagedCheckpoint
from rerpi_rllib.algorithm.config import RERPIConfig
from rerpi_rllib.algorithm.networks import model_settings, streams_of
from rerpi_rllib.core.networks import ActorCritic
from rerpi_rllib.core.settings import LearningSettings
from rerpi_rllib.runs.settings import RunSettings

Report = Callable[[str], None]

# What RLlib writes into a checkpoint of either API stack.
_WRITTEN_BY_RLLIB = "rllib_checkpoint.json"
_NAMED = 3  # So many damaged checkpoints are named where there is no whole one.


def is_checkpoint(path: Path) -> bool:
    """Return whether there is a checkpoint that is whole, without loading anything of it."""
    try:
        manifests.check_whole(path)
    except DamagedCheckpoint:
        return False
    return True


def newest_checkpoint(
    path: Path, *, with_replay: bool = True, report: Report = lambda line: None
) -> Path:
    """Find the newest whole checkpoint at or below ``path``; the result is an absolute path.

    Args:
        path: a checkpoint, or a directory that holds some.
        with_replay: whether the replay has to be whole, too. A run's checkpoints share its rows.
        report: called with a line about every newer checkpoint that is not whole.
    """
    path = path.expanduser().resolve()
    if not path.is_dir():
        raise ValueError(f"There is no directory {str(path)!r}.")
    if (path / manifests.MANIFEST).exists() or (path / _WRITTEN_BY_RLLIB).exists():
        try:
            manifests.check_whole(path, with_replay)
        except DamagedCheckpoint as error:
            raise ValueError(f"{path} is not a whole checkpoint: {error}.") from None
        return path
    damaged = []
    found = _newest_first(path)
    for checkpoint in found:
        try:
            manifests.check_whole(checkpoint, with_replay)
        except DamagedCheckpoint as error:
            damaged.append(f"{checkpoint.relative_to(path)}: {error}")
            continue
        for line in damaged:
            report(f"Skipped a checkpoint that is not whole, {line}.")
        return checkpoint
    if with_replay:
        # A run's checkpoints share their replay: what is damaged there may be missing in all of them.
        with suppress(ValueError):
            checkpoint = newest_checkpoint(path, with_replay=False, report=report)
            reason = damaged[found.index(checkpoint)].partition(": ")[2]
            report(
                f"The replay of {checkpoint.relative_to(path)} is lost ({reason}): learning goes on "
                "when it has been filled anew."
            )
            return checkpoint
    more = f" (and {len(damaged) - _NAMED} more)" if len(damaged) > _NAMED else ""
    reasons = f" {'; '.join(damaged[:_NAMED])}{more}." if damaged else ""
    raise ValueError(f"There is no whole checkpoint_* at or below {str(path)!r}.{reasons}")


def _newest_first(directory: Path) -> list[Path]:
    """Order the checkpoints by the time at which they were written, as far as it can be read."""

    def age(checkpoint: Path) -> tuple[float, str]:
        try:
            return float(manifests.read_manifest(checkpoint)["time"]), checkpoint.name
        except DamagedCheckpoint:
            with suppress(OSError):  # The run may have deleted it meanwhile.
                return checkpoint.stat().st_mtime, checkpoint.name
            return 0.0, checkpoint.name

    found = [path for path in directory.glob("**/checkpoint_*") if path.is_dir()]
    return sorted(found, key=age, reverse=True)


def prune(run: Path, newest: Path, keep: int, start: Path | None = None) -> None:
    """Delete what earlier parts of a run have left, as soon as it is not needed any more.

    Tune itself deletes old checkpoints, but only those of the part that runs.

    Args:
        run: the directory of the run.
        newest: the checkpoint that was just written.
        keep: how many checkpoints the run keeps in all.
        start: the checkpoint that the newest part went on from, which is kept before others.
    """
    part = newest.parent
    kept = [path for path in part.glob("checkpoint_*") if (path / manifests.MANIFEST).is_file()]
    others = [p for p in _newest_first(run) if p.parent != part and p.parent.parent == run]
    others.sort(key=lambda path: path != start)
    whole = [path for path in others if _is_whole(path)] if len(kept) < keep else []
    for checkpoint in set(others) - set(whole[: max(0, keep - len(kept))]):
        with suppress(OSError):
            (checkpoint / manifests.MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(checkpoint, ignore_errors=True)
    _prune_replay(run, newest)


def _is_whole(path: Path) -> bool:
    with suppress(DamagedCheckpoint):
        # The replay that is shared takes long to check, and the newest checkpoint needs it, too.
        manifests.check_whole(path, with_replay=False)
        return True
    return False


def _prune_replay(run: Path, newest: Path) -> None:
    """Delete rows of the replay that no checkpoint of the run needs."""
    needed = set()
    for checkpoint in run.glob("part-*/checkpoint_*"):
        with suppress(DamagedCheckpoint):
            needed |= manifests.shared_files(manifests.read_manifest(checkpoint))
    with suppress(OSError):
        # What is younger belongs to a checkpoint that is being written.
        finished = (newest / manifests.MANIFEST).stat().st_mtime
        for path in (newest / manifests.SHARED_REPLAY).iterdir():
            if path.name not in needed and path.stat().st_mtime < finished:
                path.unlink()


def run_of_checkpoint(checkpoint: Path) -> Path:
    """Return the directory of the run that wrote the checkpoint."""
    for directory in checkpoint.parents:
        if (directory / RunSettings.FILE_NAME).is_file():
            return directory
    raise ValueError(f"{checkpoint} does not belong to a run of `rllib train`: no run.json above it.")


def load_networks(checkpoint: Path) -> ActorCritic:
    """Load the networks of a checkpoint of either API stack, from tensors and JSON alone."""
    manifest = manifests.read_manifest(checkpoint)
    _check_version(checkpoint, manifest["settings"])
    return manifests.load_networks(checkpoint, manifest)


def holds_replay(checkpoint: Path) -> bool:
    return bool(manifests.read_manifest(checkpoint)["replay_size"])


def check_trusted(checkpoint: Path) -> None:
    """Raise ``ValueError`` unless this user wrote the checkpoint on this machine."""
    manifest = manifests.read_manifest(checkpoint)
    if manifests.is_own(manifest):
        return
    writer = manifest.get("written_by")
    names = writer if isinstance(writer, Mapping) else {}
    raise ValueError(
        f"{checkpoint} was not written by you on this machine, but, it says, by "
        f"{names.get('user')} on {names.get('host')}. Resuming it loads pickles, which can run any "
        "program with your rights. If you trust whoever wrote it, add --trust; evaluating it is "
        "safe without."
    )


# Those that changed what a checkpoint holds.
_NEWEST_SETTINGS = (
    *("covariance_layers", "multiplier_schedule", "normalize_observations"),
    "normalize_returns",
)


def _check_version(checkpoint: Path, settings: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if the settings in the checkpoint are not those that there are now."""
    missing = sorted(key for key in _NEWEST_SETTINGS if key not in settings)
    if missing:
        raise ValueError(
            f"{checkpoint} was written by an older version with other networks: it has no "
            f"{', '.join(missing)}. Evaluate or resume it with that version."
        )


def check_resumable(checkpoint: Path, config: RERPIConfig) -> None:
    """Raise ``ValueError`` if the checkpoint has another task, API stack or other networks."""
    manifest = manifests.read_manifest(checkpoint)
    stack = manifest["api_stack"]
    if stack != ("old" if config.uses_old_api_stack else "new"):
        raise ValueError(f"{checkpoint} is of RLlib's {stack} API stack: a run cannot change it.")
    _check_version(checkpoint, manifest["settings"])
    if manifest["env"] != config.env:
        raise ValueError(
            f"{checkpoint} is of env={manifest['env']} and not {config.env}. A run cannot change it."
        )
    space = manifests.make_space(manifest["spaces"]["observation"])
    before, after = (
        manifests.as_json(model | {"streams": streams_of(space, model)})
        for model in (model_settings(manifest["settings"]), model_settings(vars(config)))
    )
    for name in ("policy", "critic", "networks", "normalize_returns", "streams"):
        if before[name] != after[name]:
            raise ValueError(
                f"{checkpoint} has other networks: {name} was {before[name]} and is {after[name]}. "
                "A run cannot change them."
            )
    old, new = (_multipliers(settings["learning"]) for settings in (before, after))
    if old != new:
        raise ValueError(
            f"{checkpoint} has other multipliers: they were {old} and are {new}. A run cannot change "
            "them."
        )


def _multipliers(learning: dict[str, Any]) -> list[str]:
    """Return the names of the multipliers that are learned, marked where there is one a dimension."""
    constraints = LearningSettings(**learning).constraints()
    return [f"{c.multiplier}{'[D]' * c.per_dimension}" for c in constraints if c.learned]
