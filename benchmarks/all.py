"""Run all benchmarks one after the other, print a table, and write bench.jsonl and the figure.

python benchmarks/all.py [--output runs/bench]

This takes a quarter of an hour on two cores. Run nothing else on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

NAMES = ("update", "threads", "env_runner", "replay", "policy", "scaling", "training")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("runs/bench"))
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    with (output / "bench.jsonl").open("w") as file:
        print("| name | ours | peer | unit | ratio | setting |\n|---|---|---|---|---|---|")
        for name in NAMES:
            command = [sys.executable, Path(__file__).with_name(f"{name}.py"), "--json"]
            command += ["--output", output] if name == "scaling" else []
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                for line in process.stdout or ():
                    if line.startswith("{"):
                        print(line, end="", file=file, flush=True)
                        values = json.loads(line).values()
                        cells = (f"{v:.4g}" if isinstance(v, float) else v for v in values)
                        print(f"| {' | '.join(cells)} |", flush=True)
            if process.returncode:
                sys.exit(f"benchmarks/{name}.py failed.")
    print(f"\nNumbers and figure: {output}")


if __name__ == "__main__":
    main()
