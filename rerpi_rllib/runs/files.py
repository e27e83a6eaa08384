"""Reading what a user wrote, in YAML and JSON files and on the command line, with clear refusals."""

from __future__ import annotations

import ast
import contextlib
import difflib
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

_PACKAGE = Path(__file__).resolve().parents[1]
# An installed package holds the files itself; in a clone they are beside it.
_HOME = _PACKAGE if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent
CONFIGS = _HOME / "configs"
SWEEPS = _HOME / "tune_sweeps"
GRAFANA = _HOME / "deploy" / "grafana"
ZOO = _HOME / "zoo"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a sentence that names the known word nearest to ``word``, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def find_file(name: str, directory: Path) -> Path:
    """Find a file by its path, or one of the package's own files by its name."""
    path = directory / f"{name}.yaml"
    with contextlib.suppress(OSError, ValueError):  # Of names that cannot be files.
        if path.is_file():
            return path
        if Path(name).is_file():
            return Path(name)
    known = [path.stem for path in sorted(directory.glob("*.yaml"))]
    raise ValueError(
        f"There is no file {name!r} and no {directory.name}/{name}.yaml.{did_you_mean(name, known)} "
        f"Allowed: {', '.join(known)}."
    )


def short_path(path: Path) -> Path:
    """Return the path relative to the current directory if it is below it."""
    path, here = path.resolve(), Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def named_directory(storage_path: Path, name: str) -> Path:
    """Return the absolute path of a directory in ``storage_path``; refuse a name that leaves it."""
    if re.match(r"\w+:/", str(storage_path)):
        raise ValueError(
            f"--storage-path {str(storage_path)!r} is not allowed: it must be a directory of this "
            "machine, or one that is mounted."
        )
    is_name = name.isprintable() and not {"/", "\\"} & set(name) and name.strip(". ")
    if not is_name or len(name.encode()) > 200:
        raise ValueError(
            f"--name {name!r} is not allowed: it must be the name of one directory below "
            "--storage-path, without slashes and at most 200 characters long."
        )
    directory = (storage_path / name).expanduser().resolve()
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        problem = "not writable" if existing.is_dir() else "no directory"
        raise ValueError(f"{directory} cannot be written: {str(existing)!r} is {problem}.")
    return directory


def check_keys(
    given: Any, settings: type, source: str, mappings: Sequence[str] = ()
) -> dict[str, Any]:
    """Check the keys given for a dataclass of settings, and drop the empty ones.

    Args:
        given: what the file holds.
        settings: the dataclass whose fields are allowed.
        source: the name of the file, for error messages.
        mappings: the keys whose values must be mappings themselves.
    """
    if not isinstance(given, dict):
        raise ValueError(f"{source} must be a mapping of settings, not {type(given).__name__}.")
    known = [field.name for field in fields(settings)]
    for key in given:
        if not isinstance(key, str) or key not in known:
            raise ValueError(
                f"Unknown key {key!r} in {source}.{did_you_mean(str(key), known)} "
                f"Allowed: {', '.join(sorted(known))}."
            )
    values = {key: value for key, value in given.items() if value is not None}
    for key in mappings:
        if not isinstance(values.get(key, {}), dict):
            raise ValueError(f"{key} in {source} must be a mapping, not {values[key]!r}.")
    return values


def read_yaml(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"There is no file {str(path)!r}.")
    is_json = path.suffix == ".json"  # PyYAML would read 1e-05 as a string.
    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if is_json else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        kind = "JSON" if is_json else "YAML"
        raise ValueError(f"{path} is not valid {kind}: {' '.join(str(error).split())}") from None


def write_json(path: Path, value: Any) -> None:
    """Write a file that is whole or as it was before."""
    written = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        written.write_text(json.dumps(value, indent=2) + "\n")
        os.replace(written, path)
    except OSError:
        written.unlink(missing_ok=True)
        raise


def parse_value(text: str) -> Any:
    """Turn ``1e-3``, ``[200, 200]``, ``true`` or ``None`` into values; all else stays a string."""
    words = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def parse_assignments(texts: Iterable[str] | None) -> dict[str, Any]:
    """Parse every ``key=value`` of the command line's ``--set``."""
    return dict(_parse_assignment(text) for text in texts or ())


def _parse_assignment(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"--set {text!r} is not allowed: it must be key=value.")
    return key, parse_value(value)


def parse_json_object(text: str, option: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{option} is not valid JSON ({error}): {text!r}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{option} must be a JSON object like '{{\"key\": value}}', not {text!r}.")
    return value
