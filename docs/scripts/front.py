"""The two pictures at the top of the README.

python docs/scripts/front.py curves
    draws docs/pictures/curves.png from results/frontier: the tasks that have been run
python docs/scripts/front.py film TASK=VIDEO ...
    joins a piece of each video of `rllib evaluate --video` to docs/pictures/policies.gif
"""

from __future__ import annotations

import sys
from pathlib import Path

import imageio.v3 as imageio
import matplotlib
import numpy as np
import pandas as pd
from PIL import Image, ImageDraw

matplotlib.use("Agg")
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
RESULTS, PICTURES = ROOT / "results" / "frontier", ROOT / "docs" / "pictures"
# Names in published.csv: a part of them, which the table of results/frontier has in full.
PUBLISHED = {
    "tonic_MPO": ("MPO (tonic)", "o"),
    "sony_sac": ("SAC", "s"),
    "bro_utd2": ("BRO, 2 updates", "^"),
    "simbaV2_utd8": ("SimbaV2, 8 updates", "h"),
}
COLUMNS = 5
# Of the films: pixels, frames, frames per second, and seconds left out at the start.
SIZE, FRAMES, RATE, SKIPPED = 200, 48, 16, 3.0


def curves() -> Figure:
    published = pd.read_csv(RESULTS / "published.csv")
    tasks = [task for task in published["task"].unique() if list(RESULTS.glob(f"RERPI-{task}-*.csv"))]
    columns = min(COLUMNS, len(tasks))
    rows = -(-len(tasks) // columns)
    figure = Figure(figsize=(2.6 * columns, 2.2 * rows + 0.4), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for axis, task in zip(axes, tasks):
        for path in sorted(RESULTS.glob(f"RERPI-{task}-*.csv")):
            curve = pd.read_csv(path)
            axis.plot(curve["env_steps"] / 1_000, curve["greedy_return"], color="#3949ab", lw=1.8)
        for number, (system, (_, marker)) in enumerate(PUBLISHED.items()):
            points = published[(published["task"] == task) & (published["system"] == system)]
            points = points[points["env_steps"] <= 100_000]
            style = {"color": f"C{number + 1}", "ms": 6, "alpha": 0.85, "clip_on": False}
            axis.plot(points["env_steps"] / 1_000, points["mean_return"], marker, **style)
        axis.set_title(task, fontsize=10)
        axis.set(xlim=(0, 100), ylim=(0, None))
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in list(axes):
        axis.axis("off")
    handles = [matplotlib.lines.Line2D([], [], color="#3949ab", lw=1.8, label="RERPI, compact")]
    for number, (label, marker) in enumerate(PUBLISHED.values()):
        style = {"color": f"C{number + 1}", "linestyle": "", "label": f"{label}, published"}
        handles.append(matplotlib.lines.Line2D([], [], marker=marker, **style))
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    return figure


def film(videos: dict[str, Path]) -> list[Image.Image]:
    """Return frames with all videos side by side and the names of the tasks below."""
    strips = []
    for path in videos.values():
        rate = imageio.immeta(path)["fps"]
        wanted = {round((SKIPPED + i / RATE) * rate): i for i in range(FRAMES)}
        strip = [frame for i, frame in enumerate(imageio.imiter(path)) if i in wanted]
        if len(strip) < FRAMES:
            sys.exit(f"{path} is shorter than {SKIPPED + FRAMES / RATE:.0f} s.")
        strips.append(strip)
    joined = []
    for frames in zip(*strips):
        scaled = [Image.fromarray(np.asarray(f)).resize((SIZE, SIZE * 3 // 4)) for f in frames]
        sheet = Image.new("RGB", (SIZE * len(scaled), SIZE * 3 // 4 + 16), "white")
        for column, (name, picture) in enumerate(zip(videos, scaled)):
            sheet.paste(picture, (column * SIZE, 0))
            ImageDraw.Draw(sheet).text((column * SIZE + 6, SIZE * 3 // 4 + 2), name, fill="black")
        joined.append(sheet.quantize(96))
    return joined


def main() -> None:
    command, *arguments = sys.argv[1:] or [""]
    PICTURES.mkdir(exist_ok=True)
    if command == "curves" and not arguments:
        curves().savefig(PICTURES / "curves.png", dpi=90)
    elif command == "film" and arguments:
        videos = {name: Path(path) for name, path in (a.split("=", 1) for a in arguments)}
        first, *others = film(videos)
        options = {"duration": 1000 // RATE, "loop": 0, "optimize": True}
        first.save(PICTURES / "policies.gif", save_all=True, append_images=others, **options)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
