"""What the benchmarks share: each result is one line, for people or as JSON."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("MUJOCO_GL", "disabled")

# What the preset `compact` was at first, beside what it still has, for comparisons with earlier runs.
FIRST_COMPACT = {
    "network": "paper",
    "policy_layers": (128, 128),
    "critic_layers": (256, 256),
    "covariance_layers": (64, 64),
    "normalize_observations": False,
    "noise_correlation": 0.0,
}


class Report:
    """Prints results, each of which compares this package with a peer."""

    def __init__(self, doc: str | None, output: bool = False) -> None:
        parser = argparse.ArgumentParser(
            description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("--json", action="store_true", help="one JSON object a line")
        if output:
            parser.add_argument("--output", type=Path, help="where the figure goes")
        arguments = parser.parse_args()
        self._json = arguments.json
        self.output: Path | None = arguments.output if output else None

    def add(
        self,
        name: str,
        ours: float,
        peer: float,
        unit: str,
        ratio: float,
        setting: str,
        peer_name: str,
    ) -> None:
        """Print one comparison; a ratio above 1 means that ours is better."""
        if self._json:
            row = {"name": name, "ours": ours, "peer": peer, "unit": unit, "ratio": ratio}
            print(json.dumps({**row, "setting": f"{setting}; peer: {peer_name}"}), flush=True)
        else:
            print(
                f"{name}: {ours:.4g} {unit} here, {peer:.4g} {unit} {peer_name}, "
                f"ratio {ratio:.3g} ({setting})",
                flush=True,
            )


def seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started
