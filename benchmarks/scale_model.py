"""Extrapolates the costs that scale.py has measured to a cluster, and says what is full first.

python benchmarks/scale_model.py [--measured results/scale/measured.csv] [--env-runners 256] ...

The model: the main process spends the same CPU time on every request, which is one fragment of all
environments of an EnvRunner, and on every update call. Shards spend CPU time on every step that they
store. What is measured by other arrangements than those that the model was fitted to is compared with
what it predicts for them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).parents[1]
# Of a row of a batch, with the sizes of scale.py: two observations, an action and three numbers.
ROW_BYTES = 4 * (2 * 67 + 21 + 3)


def fit(measured: pd.DataFrame) -> dict[str, float]:
    """Return the costs in milliseconds of CPU time, from runs with one environment and shards."""
    known = measured[
        (measured["shards"] > 0) & (measured["envs"] == 1) & (measured["fragment"] == 50)
    ]
    return {
        "request": float(known["main_ms_per_request"].mean()),
        "update": float(known["main_ms_per_1000_updates"].clip(lower=0).mean()) / 1000,
        "shard_step": float(known["shards_ms_per_1000_steps"].mean()) / 1000,
    }


def check(measured: pd.DataFrame, costs: dict[str, float]) -> pd.DataFrame:
    """Compare the main process's time for 1,000 steps with what the model says."""
    table = measured[measured["shards"] > 0].copy()
    requests = 1000 / (table["envs"] * table["fragment"])
    table["predicted"] = costs["request"] * requests
    table["error"] = table["predicted"] / table["main_ms_per_1000_steps"] - 1
    return table


def extrapolate(
    costs: dict[str, float], arguments: argparse.Namespace
) -> list[tuple[str, float, str]]:
    """Return, for each part of a cluster, which share of it a run needs."""
    steps = arguments.env_runners * arguments.envs * arguments.steps_per_s
    requests = steps / (arguments.envs * arguments.fragment)
    updates = arguments.updates_per_s
    rows = updates * arguments.learners * arguments.batch
    parts = [
        (
            "main process",
            (requests * costs["request"] + updates * costs["update"]) / 1000,
            f"{requests:,.0f} requests and {updates:,.0f} updates a second",
        ),
        (
            "each shard, storing",
            steps * costs["shard_step"] / 1000 / arguments.shards,
            f"{steps / arguments.shards:,.0f} steps a second, on one core",
        ),
        (
            "each shard's network, out",
            rows * ROW_BYTES / arguments.shards / arguments.network_bytes,
            f"{rows * ROW_BYTES / arguments.shards / 1e6:,.0f} MB/s of batches",
        ),
        (
            "each learner's network, in",
            updates * arguments.batch * ROW_BYTES / arguments.network_bytes,
            f"{updates * arguments.batch * ROW_BYTES / 1e6:,.0f} MB/s of batches",
        ),
        (
            "the first learner's network, out",
            arguments.nodes * arguments.weights_bytes / arguments.network_bytes,
            f"{arguments.nodes * arguments.weights_bytes / 1e6:,.1f} MB/s of weights to the nodes",
        ),
    ]
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measured", type=Path, default=ROOT / "results" / "scale" / "measured.csv")
    parser.add_argument("--env-runners", type=int, default=256)
    parser.add_argument("--envs", type=int, default=4, help="environments of an EnvRunner")
    parser.add_argument("--fragment", type=int, default=50, help="rollout_fragment_length")
    parser.add_argument("--steps-per-s", type=float, default=400, help="of one environment")
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--learners", type=int, default=8)
    parser.add_argument("--batch", type=int, default=3072, help="of one learner")
    parser.add_argument("--updates-per-s", type=float, default=100)
    parser.add_argument("--nodes", type=int, default=18)
    parser.add_argument("--weights-bytes", type=float, default=7e5, help="of the policy")
    parser.add_argument("--network-bytes", type=float, default=1.25e9, help="a second, of a node")
    arguments = parser.parse_args()
    measured = pd.read_csv(arguments.measured)
    costs = fit(measured)
    print("costs, ms of CPU time:", ", ".join(f"{key} {value:.3g}" for key, value in costs.items()))
    columns = ["env_runners", "envs", "fragment", "learners", "main_ms_per_1000_steps"]
    table = check(measured, costs)
    print(table[[*columns, "predicted", "error"]].to_string(index=False, float_format="%.3g"))
    parts = extrapolate(costs, arguments)
    for name, share, why in sorted(parts, key=lambda part: -part[1]):
        print(f"{name}: {100 * share:.3g} % of what it can do ({why})")


if __name__ == "__main__":
    main()
