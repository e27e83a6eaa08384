import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

os.environ.setdefault("MUJOCO_GL", "disabled")
# With small tensors, more threads only wait for each other, above all on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# The dashboard has a test of its own, and takes its time to start.
os.environ.setdefault("RLLIB_DASHBOARD", "0")
# Ray's workers must be able to import the environments that tests define.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
)

METRICS = [
    "critic_loss",
    "policy_loss",
    "kl_mu",
    "kl_sigma",
    "alpha_mu",
    "alpha_sigma",
    "temperature",
    "kl_nonparametric",
    "q_mean",
    "policy_stddev_mean",
    "weights_ess",
]
GOLDEN = Path(__file__).parent / "golden"


def golden_cases(kind: str) -> list:
    """Return every golden file of a kind as a pytest parameter named after the file."""
    paths = sorted(GOLDEN.glob(f"{kind}_*.json"))
    assert paths, f"no golden files {kind}_*.json in {GOLDEN}"
    return [pytest.param(json.loads(path.read_text()), id=path.stem) for path in paths]


def resident_megabytes() -> float:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.fixture(scope="session")
def ray_session():
    """Start one Ray for all tests, with more CPUs than there are, since most processes idle."""
    import ray

    ray.shutdown()  # A test without this fixture may have let an algorithm start it.
    # Another Ray of this machine is none of ours.
    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def in_a_cluster_of_its_own(script):
    """Run a script that starts a cluster; it has to print "survived" in the end."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:  # Sockets have short names.
        # Otherwise a Ray that other tests start would look for this cluster.
        environment = {**os.environ, "RAY_TMPDIR": directory}
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            env=environment,
            timeout=600,
        )
    assert "survived" in done.stdout, done.stderr[-2000:]


# With these settings training takes moments.
SMALL = {
    "policy_layers": [16, 16],
    "critic_layers": [16, 16],
    "train_batch_size": 32,
    "replay_capacity": 10_000,
    "num_action_samples": 5,
    "num_steps_sampled_before_learning_starts": 100,
    "target_update_period": 20,
    "updates_per_env_step": 0.5,
}
# Discrete actions are not sampled: all of them are evaluated.
SMALL_DISCRETE = {key: value for key, value in SMALL.items() if key != "num_action_samples"}


def tiny_config(**training):
    """Make a configuration that trains in moments, synchronously unless told otherwise."""
    from rerpi_rllib import RERPIConfig

    small = SMALL_DISCRETE if training.get("policy") == "categorical" else SMALL
    return (
        RERPIConfig()
        .environment("Pendulum-v1")
        .env_runners(num_env_runners=0)
        .training(**{**small, **training})
        .reporting(min_sample_timesteps_per_iteration=200)
        .debugging(seed=3)
    )


def on_old_stack(config):
    """Choose RLlib's old API stack."""
    return config.api_stack(
        enable_rl_module_and_learner=False, enable_env_runner_and_connector_v2=False
    )


def networks_of(algorithm):
    """Return the networks that an algorithm of either stack learns with in this process."""
    if algorithm.config.uses_old_api_stack:
        return algorithm.get_policy().model.nets
    return algorithm.learner_group._learner.module["default_policy"].unwrapped().nets


# The package does without a compiler, only slower, and so must its tests: nothing here installs one.
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="there is no C++ compiler"
)
