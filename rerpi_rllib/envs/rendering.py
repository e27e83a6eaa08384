"""Which backend MuJoCo renders with, chosen by the process that trains or films."""

from __future__ import annotations

import ctypes.util
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


def choose_backend(pictures: bool = False) -> None:
    """Set ``MUJOCO_GL`` for a machine without a display, unless the user has set it.

    MuJoCo's packages read the variable when they are imported, so this has to be called before.

    Args:
        pictures: whether this process has to render. Training does not, and rendering is switched
            off for it; a value of "disabled" does not count as the user's choice for a video.
    """
    chosen = os.environ.get("MUJOCO_GL")
    if pictures and chosen == "disabled":
        chosen = None
    if chosen or os.environ.get("DISPLAY"):
        return
    os.environ["MUJOCO_GL"] = rendering_backend() if pictures else "disabled"


def rendering_backend() -> str:
    """Return a value of ``MUJOCO_GL`` that can render without a display on this machine."""
    for library, backend in (("EGL", "egl"), ("OSMesa", "osmesa")):
        if ctypes.util.find_library(library):
            return backend
    raise ValueError(
        "Nothing on this machine can render without a display: install EGL (Debian package "
        "libegl1) or OSMesa (libosmesa6)."
    )


def can_render() -> bool:
    """Whether MuJoCo has been told how to render, or has a display to find out by itself."""
    return os.environ.get("MUJOCO_GL") not in (None, "", "disabled") or bool(
        os.environ.get("DISPLAY")
    )


@contextmanager
def no_display_warning() -> Iterator[None]:
    """Import dm_control, or RLlib, which imports it, without its warning that there is no display."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*DISPLAY environment variable is missing.*")
        yield
