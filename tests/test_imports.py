"""What importing does and does not do; each test uses a fresh process."""

import os
import subprocess
import sys

HEAVY = "{'ray', 'gymnasium', 'mujoco', 'pandas'}"


def _run(code: str, **environment: str) -> str:
    """Run code in a process without a display; return what it prints."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "MUJOCO_GL")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**inherited, **environment},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "DISPLAY" not in done.stderr, done.stderr
    return done.stdout


def test_the_core_imports_torch_and_nothing_else():
    _run(f"import sys, rerpi_rllib.core; assert not {HEAVY} & set(sys.modules)")


def test_the_package_imports_nothing():
    _run(f"import sys, rerpi_rllib; assert not ({HEAVY} | {{'torch', 'numpy'}}) & set(sys.modules)")


def test_environments_do_not_import_ray():
    code = "import sys; from rerpi_rllib import envs; envs.make('Pendulum-v1')"
    _run(f"{code}; assert 'ray' not in sys.modules")


def test_loading_a_policy_does_not_import_ray():
    code = "import sys, rerpi_rllib; rerpi_rllib.load_policy"
    _run(f"{code}; assert not {HEAVY} & set(sys.modules)")


def test_the_names_of_the_package():
    code = """
import rerpi_rllib
assert set(rerpi_rllib.__all__) <= set(dir(rerpi_rllib))
assert not hasattr(rerpi_rllib, "PPO")
from rerpi_rllib import DDPG, MPO, RERPI, SVG0, DDPGConfig, MPOConfig, RERPIConfig, SVG0Config
from ray.tune.registry import get_trainable_cls
for algorithm in (RERPI, MPO, SVG0, DDPG):
    assert get_trainable_cls(algorithm.__name__) is algorithm
assert MPO.get_default_config().__class__ is MPOConfig
"""
    _run(code)


def test_loading_the_algorithms_changes_neither_environment_nor_threads():
    # RLlib sets variables of its own when it is imported; this test ignores them.
    code = """
import os, warnings
import torch
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ray.rllib.algorithms.algorithm
before, threads = dict(os.environ), torch.get_num_threads()
import rerpi_rllib
rerpi_rllib.RERPI
import rerpi_rllib.runs.training, rerpi_rllib.sweeps.running, rerpi_rllib.figures.paper
assert dict(os.environ) == before
assert torch.get_num_threads() == threads
import sys
assert "matplotlib.pyplot" not in sys.modules
"""
    _run(code, OMP_NUM_THREADS="2")


def test_help_imports_nothing_heavy():
    for arguments in ("--help", "train --help", "--version"):
        code = f"""
import sys
from rerpi_rllib.cli import main
sys.argv = ["rllib", *"{arguments}".split()]
try:
    main()
except SystemExit as ended:
    assert not ended.code
assert not ({HEAVY} | {{'torch', 'numpy', 'matplotlib'}}) & set(sys.modules)
"""
        assert _run(code).strip()


def test_training_does_not_wait_for_the_plots():
    code = """
import sys
from rerpi_rllib.cli import main
sys.argv = ["rllib", "train", "--algo", "PPO"]
try:
    main()
except SystemExit as ended:
    assert ended.code == 2
assert "rerpi_rllib.runs.training" in sys.modules
assert not {"matplotlib", "scipy.stats"} & set(sys.modules)
"""
    _run(code)


def test_the_command_line_chooses_how_mujoco_renders_before_it_is_imported():
    code = """
import os, sys
from rerpi_rllib.cli import main
sys.argv = ["rllib", "list", "algos"]
try:
    main()
except SystemExit as ended:
    assert not ended.code
assert os.environ["MUJOCO_GL"] == "disabled" and "mujoco" in sys.modules
"""
    assert _run(code).split() == ["RERPI", "MPO", "SVG0", "DDPG"]


def test_the_command_line_silences_ray_after_it_is_imported():
    code = """
import logging
from rerpi_rllib.runs.process import prepare_process
prepare_process()
for name in ("ray", "ray.rllib", "ray.tune"):
    assert logging.getLogger(name).level == logging.CRITICAL, name
import rerpi_rllib.runs.training, rerpi_rllib.sweeps.running
for name in ("ray", "ray.rllib", "ray.tune"):
    assert logging.getLogger(name).level == logging.CRITICAL, name
"""
    _run(code)
