"""Reads docstrings as Markdown: roles become code, and blocks of code need no directive."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Roles(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = re.sub(r":\w+:`(?:~[\w.]+\.(?=\w+`))?", "`", obj.docstring.value)
            obj.docstring.value = re.sub(r"^\.\. code-block::.*\n\n?", "", text, flags=re.MULTILINE)
