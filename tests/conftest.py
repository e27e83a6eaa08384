import json
import os
from pathlib import Path

import pytest

os.environ.setdefault("MUJOCO_GL", "disabled")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

GOLDEN = Path(__file__).parent / "golden"


def golden_cases(kind: str) -> list:
    """Every golden file of a kind as a pytest parameter named after the file."""
    paths = sorted(GOLDEN.glob(f"{kind}_*.json"))
    assert paths, f"no golden files {kind}_*.json in {GOLDEN}"
    return [pytest.param(json.loads(path.read_text()), id=path.stem) for path in paths]


def resident_megabytes() -> float:
    """Memory of this process that is really in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
