"""What makes a checkpoint whole, and what can be known of it without unpickling anything.

The last file of a checkpoint is ``manifest.json``: what was trained, how far it is, and the size and
the checksum of every file. A checkpoint that was cut off, copied in part or changed does not agree
with its manifest. The manifest is signed with a key of the user's own, so that the pickles that RLlib
insists on can be told from those of a stranger, who could make them run any program.
"""

from __future__ import annotations

import functools
import getpass
import hashlib
import hmac
import json
import logging
import os
import platform
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

import gymnasium as gym
import numpy as np
import pyarrow.fs
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file

from rerpi_rllib.algorithm.networks import build_networks, model_settings
from rerpi_rllib.algorithm.spaces import parts_of
from rerpi_rllib.core.networks import ActorCritic
from rerpi_rllib.envs import Joined

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
NETWORKS = "networks.safetensors"
# Where the parts of a run keep the rows of their replay, as seen from one of its checkpoints.
SHARED_REPLAY = "../../replay"
_FORMAT = 1
# What every manifest holds.
_KEYS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("algo", "env", "api_stack"), str),
    **dict.fromkeys(("env_steps", "updates", "replay_size"), int),
    **dict.fromkeys(("settings", "spaces", "files"), dict),
    "env_config": (dict, type(None)),
    "time": float,
}
_BYTES_AT_ONCE = 2**20


class DamagedCheckpoint(ValueError):
    """A checkpoint that must not be used; the message says why, and begins with a file's name."""


def write_manifest(
    checkpoint: Path, description: Mapping[str, Any], shared: Mapping[str, Mapping[str, Any]]
) -> None:
    """Finish a checkpoint: flush all its files to the disk and write the manifest, whole or not.

    Args:
        checkpoint: the directory that holds all other files.
        description: what people and tools want to know of it.
        shared: size and checksum of each file that it needs from ``SHARED_REPLAY``, by its name.
    """
    files = {}
    for path in sorted(p for p in checkpoint.rglob("*") if p.is_file()):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            files[path.relative_to(checkpoint).as_posix()] = _measure(file)
    files |= {f"{SHARED_REPLAY}/{name}": dict(measures) for name, measures in shared.items()}
    manifest = {
        "format": _FORMAT,
        **description,
        "time": time.time(),
        "versions": versions(),
        "written_by": {"host": platform.node(), "user": _user()},
        "files": files,
    }
    key = _key()
    if key is None:
        logger.warning(
            "There is no place for a key of yours: resuming this checkpoint needs --trust."
        )
    manifest["signature"] = _sign(manifest, key) if key else None
    write_whole(checkpoint / MANIFEST, json.dumps(manifest, indent=1).encode())


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Read the manifest; raise :class:`DamagedCheckpoint` if there is none that can be read."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise DamagedCheckpoint(
            f"{MANIFEST} is missing: writing it was cut off, or an older version wrote it"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{MANIFEST} cannot be read: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise DamagedCheckpoint(f"{MANIFEST} is not of format {_FORMAT}, which this version reads")
    for key, kind in _KEYS.items():
        if key not in manifest or not isinstance(manifest[key], kind):
            raise DamagedCheckpoint(f"{MANIFEST} has no {key}")
    return manifest


def check_whole(checkpoint: Path, with_replay: bool = True) -> dict[str, Any]:
    """Compare all files of a checkpoint with its manifest, which is returned.

    Raises :class:`DamagedCheckpoint` if a file is missing, is not as it was written, or has been
    added: Ray might load it.

    Args:
        checkpoint: its directory.
        with_replay: whether to check also the rows that the checkpoints of a run share.
    """
    manifest = read_manifest(checkpoint)
    for path in sorted(checkpoint.rglob("*")):
        name = path.relative_to(checkpoint).as_posix()
        known = path.is_dir() or path.name.startswith(".") or name == MANIFEST
        if path.is_symlink() or not (known or name in manifest["files"]):
            raise DamagedCheckpoint(f"{name} was added to it later")
    checked = {}
    for name, measures in manifest["files"].items():
        is_shared = _is_shared(name)
        if is_shared and not with_replay:
            continue
        try:
            size = (checkpoint / name).stat().st_size
        except OSError:
            hint = " (a run's checkpoints share their replay: copy the whole run)" * is_shared
            raise DamagedCheckpoint(f"{name} is missing{hint}") from None
        if size != _bytes(measures):
            raise DamagedCheckpoint(f"{name} has {size} bytes instead of {_bytes(measures)}")
        checked[name] = measures
    for name, measures in checked.items():
        check_file(checkpoint, name, measures)
    return manifest


def check_file(directory: Path, name: str, measures: Mapping[str, Any]) -> None:
    """Raise :class:`DamagedCheckpoint` unless a file has this size and checksum."""
    try:
        with open(directory / name, "rb") as file:
            is_same = _measure(file) == measures
    except OSError as error:
        raise DamagedCheckpoint(f"{name} cannot be read: {error.strerror}") from None
    if not is_same:
        raise DamagedCheckpoint(f"{name} has changed since it was written")


def flush(directory: Path) -> None:
    """Flush a directory with all that is in it to the disk."""
    for path in directory.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        elif path.is_dir():
            flush_directory(path)
    flush_directory(directory)
    flush_directory(directory.parent)


def shared_files(manifest: Mapping[str, Any]) -> set[str]:
    """Return the names of the files that a checkpoint needs from ``SHARED_REPLAY``."""
    return {PurePosixPath(name).name for name in manifest["files"] if _is_shared(name)}


def is_own(manifest: Mapping[str, Any]) -> bool:
    """Tell whether this user wrote a checkpoint, on this machine or with the same home directory."""
    signature, key = manifest.get("signature"), _key()
    return (
        key is not None
        and isinstance(signature, str)
        and hmac.compare_digest(signature.encode(), _sign(manifest, key).encode())
    )


def describe_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings that JSON can hold."""
    public = {key: value for key, value in config.items() if not key.startswith("_")}
    return {key: as_json(value) for key, value in sorted(public.items()) if is_json(value)}


def is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def as_json(value: Any) -> Any:
    """Return the value as it comes back from JSON: tuples are lists."""
    return json.loads(json.dumps(value))


def describe_space(space: gym.Space[Any]) -> dict[str, Any]:
    """Describe one of the spaces that are supported."""
    if isinstance(space, gym.spaces.Discrete):
        return {"n": int(space.n)}
    assert isinstance(space, gym.spaces.Box)
    # JSON knows no infinity.
    low, high = (
        [float(value) if np.isfinite(value) else None for value in bound.ravel()]
        for bound in (space.low, space.high)
    )
    box = {"low": low, "high": high, "shape": list(space.shape), "dtype": str(space.dtype)}
    return {**box, "parts": parts} if (parts := parts_of(space)) else box


def make_space(description: Mapping[str, Any]) -> gym.Space[Any]:
    """Invert :func:`describe_space`."""
    if "n" in description:
        return gym.spaces.Discrete(int(description["n"]))
    dtype = np.dtype(description["dtype"])
    low, high = (
        np.array([infinity if value is None else value for value in description[side]], dtype)
        for side, infinity in (("low", -np.inf), ("high", np.inf))
    )
    shape = tuple(description["shape"])
    if "parts" in description:
        return Joined(low, high, description["parts"])
    return gym.spaces.Box(low.reshape(shape), high.reshape(shape), dtype=dtype.type)


def save_networks(checkpoint: Path, state: Mapping[str, Any]) -> None:
    """Write the state of an :class:`ActorCritic`, arrays by name."""
    # This keeps scalars as they are, unlike numpy.ascontiguousarray.
    save_file(
        {key: np.asarray(value, order="C") for key, value in state.items()}, checkpoint / NETWORKS
    )


def load_networks(checkpoint: Path, manifest: Mapping[str, Any]) -> ActorCritic:
    """Build the networks that a manifest describes, and load their weights."""
    if NETWORKS not in manifest["files"]:
        raise ValueError(f"{checkpoint} has other networks: only RERPI.from_checkpoint reads them.")
    try:
        nets = build_networks(
            make_space(manifest["spaces"]["observation"]),
            make_space(manifest["spaces"]["action"]),
            model_settings(manifest["settings"]),
        )
        nets.load_state_dict(load_file(checkpoint / NETWORKS))
    except Exception as error:  # A stranger may have written anything.
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{checkpoint / NETWORKS} does not fit what its manifest says ({reason})."
        ) from error
    return nets


@contextmanager
def local_copy(path: Any, filesystem: pyarrow.fs.FileSystem | None) -> Iterator[Path]:
    """Give a checkpoint's directory on this machine, copied if it is elsewhere."""
    filesystem, path = _locate(path, filesystem)
    if isinstance(filesystem, pyarrow.fs.LocalFileSystem):
        yield Path(path)
        return
    with tempfile.TemporaryDirectory() as directory:
        pyarrow.fs.copy_files(path, directory, source_filesystem=filesystem)
        yield Path(directory)


@contextmanager
def local_target(path: Any, filesystem: pyarrow.fs.FileSystem | None) -> Iterator[Path]:
    """Give a directory on this machine to write to, which is copied if the path is elsewhere."""
    filesystem, path = _locate(path, filesystem)
    if isinstance(filesystem, pyarrow.fs.LocalFileSystem):
        Path(path).mkdir(parents=True, exist_ok=True)
        yield Path(path)
        return
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)
        filesystem.create_dir(path, recursive=True)
        pyarrow.fs.copy_files(directory, path, destination_filesystem=filesystem)


def _locate(path: Any, filesystem: pyarrow.fs.FileSystem | None) -> tuple[Any, str]:
    text = str(path)
    if filesystem is not None:
        return filesystem, text
    if "://" in text:
        found: tuple[Any, str] = pyarrow.fs.FileSystem.from_uri(text)
        return found
    return pyarrow.fs.LocalFileSystem(), str(Path(text).expanduser().absolute())


def write_whole(path: Path, content: bytes) -> None:
    """Write a file beside its place, flush it to the disk and move it there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
    flush_directory(path.parent)


def flush_directory(path: Path) -> None:
    """Flush the names in a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@functools.cache
def versions() -> dict[str, str]:
    """Return what results depend on: the versions of the packages, and the machine."""
    packages = ("rerpi-rllib", "ray", "torch", "gymnasium", "dm_control", "mujoco", "numpy")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
        "system": platform.platform(),
        "cpus": str(os.cpu_count()),
        "gpu": device,
    }


def _bytes(measures: Any) -> Any:
    return measures.get("bytes") if isinstance(measures, dict) else None


def _measure(file: Any) -> dict[str, Any]:
    """Return the size and the checksum of a file."""
    digest, size = hashlib.sha256(), 0
    while block := file.read(_BYTES_AT_ONCE):
        digest.update(block)
        size += len(block)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _is_shared(name: str) -> bool:
    """Tell whether a file is in ``SHARED_REPLAY``; a name that points elsewhere is refused."""
    path = PurePosixPath(name)
    if path.parent == PurePosixPath(SHARED_REPLAY) and path.name != "..":
        return True
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise DamagedCheckpoint(f"{MANIFEST} names {name!r}, which is not in the checkpoint")
    return False


def _sign(manifest: Mapping[str, Any], key: bytes) -> str:
    content = {name: value for name, value in manifest.items() if name != "signature"}
    text = json.dumps(as_json(content), sort_keys=True)
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _key() -> bytes | None:
    """Return this user's key, made when it is first needed; None if it has no place."""
    try:
        home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        path = Path(home) / "rerpi-rllib" / "key"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Another process may do the same now: a link is made for one of them, and whole.
            descriptor, temporary = tempfile.mkstemp(dir=path.parent)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(secrets.token_bytes(32))
                with suppress(FileExistsError):
                    os.link(temporary, path)
            finally:
                os.unlink(temporary)
        return path.read_bytes() or None
    except (OSError, RuntimeError):
        return None


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return str(os.getuid())
