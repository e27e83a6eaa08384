"""A local file system whose files are whole or not there.

Tune copies the state of a sweep and the results of its trials to the sweep's directory again and
again. With pyarrow's own file system each copy empties the file first, so that a process killed at
that moment leaves an empty file, and the sweep would run finished trials again.
"""

from __future__ import annotations

import io
import os
from typing import Any

from fsspec.implementations.local import LocalFileSystem
from pyarrow.fs import FSSpecHandler, PyFileSystem


class _WholeFile(io.FileIO):
    """A file that is written beside its place and moved there when it is closed."""

    def __init__(self, path: str) -> None:
        self._path, self._failed = path, False
        self._temporary = os.path.join(
            os.path.dirname(path), f".{os.path.basename(path)}.{os.getpid()}"
        )
        super().__init__(self._temporary, "wb")

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            self._failed = True
            raise

    def close(self) -> None:
        if not self.closed:
            super().close()
            if self._failed:
                os.remove(self._temporary)
            else:
                os.replace(self._temporary, self._path)


class _WholeFiles(LocalFileSystem):
    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode == "wb":
            return _WholeFile(self._strip_protocol(path))
        return super()._open(path, mode, **kwargs)


def whole_files() -> PyFileSystem:
    """Make the file system for ``tune.run``."""
    return PyFileSystem(FSSpecHandler(_WholeFiles()))
