"""Training on cheetah-run, now and at an earlier commit, in turn and in one run.

The settings are those that the preset `compact` had at first, with two updates a step. Both versions
have this environment's packages. What is compiled is compiled before the clock starts.

python benchmarks/before.py COMMIT [--json]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import common

ROUNDS = 3
REPOSITORY = Path(__file__).parents[1]
# For either version of the package: only names that both have.
MEASUREMENT = """
import logging, sys, time
from rerpi_rllib import RERPIConfig
logging.disable(logging.WARNING)
config = RERPIConfig.compact().environment("dm_control/cheetah-run-v0")
for name, value in SETTINGS.items():
    if hasattr(config, name):
        setattr(config, name, value)
config.learners(num_gpus_per_learner=0).env_runners(num_env_runners=1)
config.training(num_steps_sampled_before_learning_starts=400)
config.reporting(min_sample_timesteps_per_iteration=100).debugging(seed=0, log_level="ERROR")
config.replay_capacity = 100_000
algorithm = config.build_algo()
steps = lambda: algorithm.train()["num_env_steps_sampled_lifetime"]
while (before := steps()) < 1_000:
    pass
started = time.perf_counter()
while time.perf_counter() - started < 15.0:
    now = steps()
print("RATE", (now - before) / (time.perf_counter() - started))
algorithm.stop()
"""


def _rate(source: Path) -> float:
    """Return the environment steps per second of the package in this directory."""
    settings = {"compile_updates": "at_start", **common.FIRST_COMPACT}
    environment = os.environ | {"PYTHONPATH": str(source), "RLLIB_TEST_NO_JAX_IMPORT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", MEASUREMENT.replace("SETTINGS", repr(settings))],
        env=environment, cwd=source, check=True, capture_output=True, text=True,
    )  # fmt: skip
    (rate,) = (line.split()[1] for line in done.stdout.splitlines() if line.startswith("RATE"))
    return float(rate)


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("commit")
    arguments, others = parser.parse_known_args()
    sys.argv[1:] = others
    report = common.Report(__doc__)
    git = ["git", "-C", str(REPOSITORY), "worktree"]
    with tempfile.TemporaryDirectory() as directory:
        before = Path(directory) / "before"
        subprocess.run([*git, "add", "--quiet", "--detach", before, arguments.commit], check=True)
        try:
            pairs = [(_rate(REPOSITORY), _rate(before)) for _ in range(ROUNDS)]
        finally:
            subprocess.run([*git, "remove", "--force", before], check=True)
    ratio = statistics.median(now / then for now, then in pairs)
    ours, peer = (statistics.median(rates) for rates in zip(*pairs))
    setting = (
        "dm_control/cheetah-run-v0, 128 x 2 and 256 x 2, two updates of 128 per step, policy step in "
        "every 4th, asynchronous, two cores"
    )
    name = f"this package at {arguments.commit}"
    report.add("training_before", ours, peer, "env steps/s", ratio, setting, name)


if __name__ == "__main__":
    main()
