"""Learning curves of RERPI and of what people use now, on the same tasks with the same evaluation.

Ten greedy episodes every 5,000 environment steps; one process and one torch thread a run.

python benchmarks/learning.py run [--jobs 2] [--only METHOD ...] [--tasks TASK ...]
    makes the runs of the plan that are missing, in runs/learning; stop it when you like, the same
    command goes on where it stopped
python benchmarks/learning.py table [--output results/learning]
    writes CSV, figure and table of the runs that there are

stable-baselines3 is needed for its SAC: pip install -c constraints.txt -e '.[benchmark]'
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("MUJOCO_GL", "disabled")

import numpy as np
import torch
from ray.rllib.algorithms.sac import SAC, SACConfig
from ray.rllib.utils.annotations import override

from rerpi_rllib import envs

DIRECTORY = Path("runs/learning")
EVALUATION_STEPS, EVALUATION_EPISODES = 5_000, 10
# Short names, ids and budgets of environment steps.
TASKS = {
    "cartpole-swingup": ("dm_control/cartpole-swingup-v0", 100_000),
    "walker-walk": ("dm_control/walker-walk-v0", 100_000),
    "cheetah-run": ("dm_control/cheetah-run-v0", 150_000),
    "finger-spin": ("dm_control/finger-spin-v0", 100_000),
    "pendulum": ("Pendulum-v1", 20_000),
}
# Arguments of `rllib train`; None for the peers below.
METHODS: dict[str, list[str] | None] = {
    "RERPI": ["--algo", "RERPI"],
    "RERPI-Retrace": ["--algo", "RERPI", "--set", "policy_evaluation=retrace"],
    "MPO": ["--algo", "MPO"],
    "SVG0": ["--algo", "SVG0"],
    "DDPG": ["--algo", "DDPG"],
    "SB3-SAC": None,
    "RLlib-SAC": None,
}
RLLIB_SAC_STEPS = 50_000


def plan() -> list[tuple[str, str, int]]:
    """Method, task and seed of every run, the most telling ones first."""
    runs = [("RERPI", task, seed) for seed in range(3) for task in TASKS]
    runs += [("SB3-SAC", task, 0) for task in TASKS]
    two = ("cartpole-swingup", "cheetah-run")
    runs += [(method, task, 0) for method in list(METHODS)[1:5] for task in two]
    return [*runs, ("RLlib-SAC", "cartpole-swingup", 0)]


def budget(method: str, task: str) -> int:
    return RLLIB_SAC_STEPS if method == "RLlib-SAC" else TASKS[task][1]


def run_directory(method: str, task: str, seed: int) -> Path:
    return DIRECTORY / method / f"{task}-{seed}"


def is_done(method: str, task: str, seed: int) -> bool:
    return (run_directory(method, task, seed) / "done").exists()


def run_one(method: str, task: str, seed: int) -> None:
    """One run from where it stands to its end."""
    directory = run_directory(method, task, seed)
    torch.set_num_threads(1)
    if method == "SB3-SAC":
        _stable_baselines(directory, TASKS[task][0], seed, budget(method, task))
    elif method == "RLlib-SAC":
        _rllib_sac(directory, TASKS[task][0], seed, budget(method, task))
    else:
        _own(directory, METHODS[method], TASKS[task][0], seed, budget(method, task))
    (directory / "done").touch()


def _own(directory: Path, arguments: list[str], env: str, seed: int, steps: int) -> None:
    command = [Path(sys.executable).with_name("rllib"), "train", "--quiet"]
    if any(directory.glob("part-*/checkpoint_*")):
        command += ["--resume", directory]
    else:
        interval = EVALUATION_STEPS // 1_000  # An iteration has a thousand environment steps.
        command += [*arguments, "--preset", "compact", "--env", env, "--seed", str(seed)]
        command += ["--num-env-runners", "0", "--stop", json.dumps({"env_steps": steps})]
        command += ["--set", f"evaluation_interval={interval}"]
        command += ["--set", f"evaluation_duration={EVALUATION_EPISODES}"]
        command += ["--storage-path", directory.parent, "--name", directory.name]
    subprocess.run(command, check=True)


def _stable_baselines(directory: Path, env_id: str, seed: int, steps: int) -> None:
    """stable-baselines3's SAC with its defaults."""
    from stable_baselines3 import SAC as StableSAC
    from stable_baselines3.common.evaluation import evaluate_policy

    env, test_env = envs.make(env_id), envs.make(env_id)
    test_env.reset(seed=seed + 1000)
    directory.mkdir(parents=True, exist_ok=True)
    model_file, replay_file = directory / "model.zip", directory / "replay.pkl"
    results = directory / "result.json"
    if replay_file.exists():
        model = StableSAC.load(model_file, env=env)
        model.load_replay_buffer(replay_file)
        lines = results.read_text().splitlines()[: model.num_timesteps // EVALUATION_STEPS]
        results.write_text("".join(line + "\n" for line in lines))
        seconds = json.loads(lines[-1])["time_total_s"]
    else:
        results.unlink(missing_ok=True)
        model, seconds = StableSAC("MlpPolicy", env, seed=seed), 0.0
    while model.num_timesteps < steps:
        started = time.perf_counter()
        model.learn(EVALUATION_STEPS, reset_num_timesteps=False)
        returns, _ = evaluate_policy(
            model, test_env, EVALUATION_EPISODES, return_episode_rewards=True, warn=False
        )
        seconds += time.perf_counter() - started
        with results.open("a") as file:
            print(json.dumps(_result(model.num_timesteps, seconds, returns)), file=file)
        for save, path in ((model.save, model_file), (model.save_replay_buffer, replay_file)):
            save(path.with_name("new-" + path.name))
        for path in (model_file, replay_file):  # The two belong together.
            path.with_name("new-" + path.name).replace(path)


def _result(steps: int, seconds: float, returns: list[float]) -> dict[str, Any]:
    """As Tune writes it."""
    return {
        "training_iteration": steps // EVALUATION_STEPS,
        "num_env_steps_sampled_lifetime": steps,
        "time_total_s": seconds,
        "evaluation": {"env_runners": {"episode_return_mean": float(np.mean(returns))}},
    }


class SACWithReplay(SAC):
    """RLlib's SAC, whose checkpoints hold the replay too."""

    @override(SAC)
    def save_checkpoint(self, checkpoint_dir: str) -> None:
        super().save_checkpoint(checkpoint_dir)
        with open(Path(checkpoint_dir) / "replay.pkl", "wb") as file:
            pickle.dump(self.local_replay_buffer.get_state(), file)

    @override(SAC)
    def load_checkpoint(self, checkpoint_dir: str) -> None:
        super().load_checkpoint(checkpoint_dir)
        with open(Path(checkpoint_dir) / "replay.pkl", "rb") as file:
            self.local_replay_buffer.set_state(pickle.load(file))


def _rllib_sac(directory: Path, env_id: str, seed: int, steps: int) -> None:
    """RLlib's SAC with its defaults."""
    from ray import tune

    envs.register_with_tune(env_id)
    config = (
        SACConfig(algo_class=SACWithReplay)
        .environment(env_id)
        .env_runners(num_env_runners=0)
        .evaluation(
            evaluation_interval=1,
            evaluation_duration=EVALUATION_EPISODES,
            evaluation_config={"explore": False},
        )
        .reporting(min_sample_timesteps_per_iteration=EVALUATION_STEPS, min_time_s_per_iteration=None)
        .debugging(seed=seed)
    )
    tune.run(
        SACWithReplay,
        config=config.to_dict(),
        storage_path=str(directory.parent.resolve()),
        name=directory.name,
        trial_dirname_creator=lambda trial: "part",
        stop={"num_env_steps_sampled_lifetime": steps},
        checkpoint_config=tune.CheckpointConfig(
            checkpoint_frequency=1, checkpoint_at_end=True, num_to_keep=1
        ),
        resume="AUTO",
        verbose=0,
    )


def run_plan(arguments: argparse.Namespace) -> None:
    """The missing runs, each in a process of its own."""
    missing = [
        run
        for run in plan()
        if not is_done(*run)
        and (not arguments.only or run[0] in arguments.only)
        and (not arguments.tasks or run[1] in arguments.tasks)
    ]
    print(f"{len(missing)} runs to make", flush=True)

    def make(run: tuple[str, str, int]) -> None:
        name = " ".join(map(str, run))
        print(f"{name} starts", flush=True)
        log = run_directory(*run).with_suffix(".log")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            command = [sys.executable, __file__, "one", *map(str, run)]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            ended = subprocess.run(command, stdout=file, stderr=file, env=environment)
        print(f"{name} " + ("is done" if ended.returncode == 0 else f"failed: see {log}"), flush=True)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(make, missing))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("--jobs", type=int, default=2)
    run.add_argument("--only", nargs="+", choices=METHODS, metavar="METHOD")
    run.add_argument("--tasks", nargs="+", choices=TASKS, metavar="TASK")
    one = commands.add_parser("one")
    one.add_argument("method", choices=METHODS)
    one.add_argument("task", choices=TASKS)
    one.add_argument("seed", type=int)
    arguments = parser.parse_args()
    if arguments.command == "run":
        run_plan(arguments)
    else:
        run_one(arguments.method, arguments.task, arguments.seed)


if __name__ == "__main__":
    main()
