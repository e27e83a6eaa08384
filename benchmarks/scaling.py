"""How the cost of an update grows with the sampled actions N, the action dimensions D and the batch.

python benchmarks/scaling.py [--json] [--output DIR]

With --output, a figure and its data are written to that directory as scaling.png and scaling.csv.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import common
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd
import update

ROUNDS = 5
BASE = {"N": 20, "D": 6, "batch": 256}
VALUES = {
    "N": (1, 2, 5, 10, 20, 40, 80, 128),
    "D": (1, 3, 6, 12, 21, 38, 56),
    "batch": (64, 128, 256, 512, 1024, 2048, 3072),
}
LABELS = {"N": "sampled actions N", "D": "action dimensions D", "batch": "batch"}


def _milliseconds(setting: dict[str, int]) -> float:
    size = (17, setting["D"], setting["batch"], (200,) * 3, (500,) * 3, "paper")
    calls = max(1, 1024 // setting["batch"])
    core, batch = update.core(size, setting["N"]), update.random_batch(size, calls)
    core(batch)
    return 1e3 * statistics.median(common.seconds(lambda: core(batch)) for _ in range(ROUNDS)) / calls


def main() -> None:
    report = common.Report(__doc__, output=True)
    rows = []
    for name, values in VALUES.items():
        times = [_milliseconds({**BASE, name: value}) for value in values]
        rows += [{"varied": name, "value": v, "ms": t} for v, t in zip(values, times)]
        growth, linear = times[-1] / times[0], values[-1] / values[0]
        fixed = ", ".join(f"{key} = {value}" for key, value in BASE.items() if key != name)
        setting = f"{LABELS[name]} from {values[0]} to {values[-1]}, {fixed}, paper's networks"
        report.add(f"scaling_{name}", growth, linear, "times", linear / growth, setting, "if linear")
    if report.output is not None:
        table = pd.DataFrame(rows)
        report.output.mkdir(parents=True, exist_ok=True)
        table.to_csv(report.output / "scaling.csv", index=False, float_format="%.4g")
        _figure(table, report.output / "scaling.png")


def _figure(table: pd.DataFrame, path: Path) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    for axis, name in zip(axes, VALUES):
        rows = table[table["varied"] == name]
        axis.plot(rows["value"], rows["ms"], "ko-", label="measured")
        last = rows.iloc[-1]
        axis.plot(rows["value"], last["ms"] * rows["value"] / last["value"], "k:", label="linear")
        axis.set(xscale="log", yscale="log", xlabel=LABELS[name], ylabel="ms an update")
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
