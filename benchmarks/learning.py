"""Learning curves of RERPI, its relatives and two SACs, on the same tasks with the same evaluation.

Each run has one process and one torch thread, and is evaluated on ten greedy episodes every 5,000
environment steps. There are two plans of runs: "family", RERPI with its relatives and both SACs, with
the settings that the preset `compact` had at first; and "frontier", the presets as they are on the 14
tasks for which others have published curves.

python benchmarks/learning.py run [--jobs 2] [--only METHOD ...] [--tasks TASK ...] [--seeds SEED ...]
    makes the runs of the plan that have no CSV in results/frontier yet, in runs/frontier; it can be
    interrupted at any time, and the same command resumes it
python benchmarks/learning.py speed
    measures the environment steps per second of each method of the family, in turn; leave the machine
    idle
python benchmarks/learning.py table
    writes the figure and the table of the family's runs that have a CSV; for the frontier there is
    published.py
python benchmarks/learning.py compare BEFORE AFTER [--only METHOD ...]
    writes a figure and a table of the runs (method, task and seed) that both directories have into
    AFTER

The first three take --results DIR, instead of results/frontier for `run` and of results/learning for
the other two. The plan of results/parts takes each part out of the preset `compact`. A directory with
another name NAME is a new set of runs, in runs/NAME; its plan is the family's.

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

import common
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from ray.rllib.algorithms.sac import SAC, SACConfig
from ray.rllib.utils.annotations import override
from ray.tune.registry import get_trainable_cls

from rerpi_rllib import envs
from rerpi_rllib.analysis.curves import load_run

RUNS = Path("runs")
EVALUATION_STEPS, EVALUATION_EPISODES = 5_000, 10
# The 14 tasks with published curves, as the CSV of these names them. The first five served to choose
# the presets.
CHOSEN_ON = ("cartpole-swingup", "cheetah-run", "walker-run", "finger-spin", "hopper-stand")
PUBLISHED_TASKS = (
    *CHOSEN_ON,
    *("walker-walk", "finger-turn-hard", "hopper-hop", "acrobot-swingup", "fish-swim"),
    *("quadruped-walk", "quadruped-run", "reacher-hard", "pendulum-swingup"),
)
FAMILY_TASKS = ("cartpole-swingup", "walker-walk", "cheetah-run", "finger-spin", "pendulum")
# Short names and ids.
TASKS = {
    **{task: f"dm_control/{task}-v0" for task in PUBLISHED_TASKS},
    "finger-turn-hard": "dm_control/finger-turn_hard-v0",
    "pendulum": "Pendulum-v1",
}
# Arguments of `rllib train`; None for the peers below.
METHODS: dict[str, list[str] | None] = {
    "RERPI": ["--algo", "RERPI", "--preset", "compact"],
    "RERPI-Retrace": [
        *("--algo", "RERPI", "--preset", "compact", "--set", "policy_evaluation=retrace")
    ],
    "MPO": ["--algo", "MPO", "--preset", "compact"],
    "SVG0": ["--algo", "SVG0", "--preset", "compact"],
    "DDPG": ["--algo", "DDPG", "--preset", "compact"],
    "SB3-SAC": None,
    "RLlib-SAC": None,
    "strong": ["--algo", "RERPI", "--preset", "strong"],
}
# What `compact` has beside the paper's method, and each of these parts as the paper has it.
PARTS = {
    "networks": {"network": "paper", "policy_layers": [128, 128], "critic_layers": [256, 256]},
    "normalization": {"normalize_observations": False},
    "correlation": {"noise_correlation": 0.0},
    "covariance": {"covariance_layers": None},
    "bootstrap": {"num_bootstrap_samples": 1},
    "penalty": {"epsilon_penalty": None},
}
PARTS_TASKS = ("cheetah-run", "hopper-stand", "finger-spin")
for _part, _settings in PARTS.items():
    METHODS[f"without-{_part}"] = [
        *(METHODS["RERPI"] or ()),
        *(word for key, value in _settings.items() for word in ("--set", f"{key}={value}")),
    ]
RLLIB_SAC_STEPS = 50_000
SPEEDS = "speeds.json"
# Curves by method and task, then by seed.
Runs = dict[tuple[str, str], dict[int, pd.DataFrame]]


def plan(results: Path) -> list[tuple[str, str, int]]:
    """Return method, task and seed of every run, the most informative ones first."""
    return PLANS.get(results.name, _family_plan)()


def has_presets_of_today(results: Path) -> bool:
    """Tell whether the runs are made with the presets, or with what `compact` was at first."""
    return results.name in PLANS


def _frontier_plan() -> list[tuple[str, str, int]]:
    # The presets were chosen with seed 0.
    runs = [("RERPI", task, seed) for seed in (1, 2) for task in PUBLISHED_TASKS]
    runs += [("strong", task, 1) for task in PUBLISHED_TASKS]
    return runs + [("SB3-SAC", task, seed) for seed in (1, 2) for task in CHOSEN_ON]


def _parts_plan() -> list[tuple[str, str, int]]:
    methods = ("RERPI", *(f"without-{part}" for part in PARTS))
    return [(method, task, seed) for seed in (1, 2) for task in PARTS_TASKS for method in methods]


def _family_plan() -> list[tuple[str, str, int]]:
    runs = [("RERPI", task, seed) for seed in range(3) for task in FAMILY_TASKS]
    runs += [("SB3-SAC", task, 0) for task in FAMILY_TASKS]
    # Each seed evaluates from its own ten starts, and on Pendulum-v1 the return depends on them.
    runs += [("SB3-SAC", "pendulum", seed) for seed in (1, 2)]
    # This was added later, because the first run was close to RERPI's.
    runs += [("SB3-SAC", "walker-walk", 1)]
    two = ("cartpole-swingup", "cheetah-run")
    runs += [(method, task, 0) for method in list(METHODS)[1:5] for task in two]
    # This was added later, because TD(0) is unreliable there.
    runs += [("RERPI-Retrace", "walker-walk", 0)]
    return [*runs, ("RLlib-SAC", "cartpole-swingup", 0)]


PLANS = {"frontier": _frontier_plan, "parts": _parts_plan}


def budget(results: Path, method: str, task: str) -> int:
    """Return the environment steps of a run."""
    if method == "RLlib-SAC":
        return RLLIB_SAC_STEPS
    if not has_presets_of_today(results):
        return {"pendulum": 20_000, "cheetah-run": 150_000}.get(task, 100_000)
    return 100_000


def run_directory(results: Path, method: str, task: str, seed: int) -> Path:
    return RUNS / results.name / method / f"{task}-{seed}"


def curves_file(results: Path, method: str, task: str, seed: int) -> Path:
    """Return the CSV file of a finished run."""
    return results / f"{method}-{task}-{seed}.csv"


def run_one(method: str, task: str, seed: int, results: Path) -> None:
    """Start or resume one run, and write its CSV at the end."""
    directory = run_directory(results, method, task, seed)
    torch.set_num_threads(1)
    if method == "SB3-SAC":
        _stable_baselines(directory, TASKS[task], seed, budget(results, method, task))
    elif method == "RLlib-SAC":
        _rllib_sac(directory, TASKS[task], seed, budget(results, method, task))
    else:
        arguments = list(METHODS[method] or ())
        if not has_presets_of_today(results):
            for key, value in common.FIRST_COMPACT.items():
                arguments += ["--set", f"{key}={json.dumps(value)}"]
        _own(directory, arguments, TASKS[task], seed, budget(results, method, task))
    curves = load_run(directory).curves.dropna(subset="greedy_return").drop(columns="time_s")
    results.mkdir(parents=True, exist_ok=True)
    path = curves_file(results, method, task, seed)
    curves.to_csv(path.with_suffix(".new"), index=False, float_format="%.6g")
    path.with_suffix(".new").replace(path)


def _own(directory: Path, arguments: list[str], env: str, seed: int, steps: int) -> None:
    command = [Path(sys.executable).with_name("rllib"), "train", "--no-dashboard", "--quiet"]
    if any(directory.glob("part-*/checkpoint_*")):
        command += ["--resume", directory]
    else:
        interval = EVALUATION_STEPS // 1_000  # An iteration is a thousand environment steps.
        command += [*arguments, "--env", env, "--seed", str(seed)]
        # Synchronous runs are compiled at the start or not at all.
        command += ["--set", "compile_updates=at_start"]
        command += ["--num-env-runners", "0", "--stop", json.dumps({"env_steps": steps})]
        command += ["--set", f"evaluation_interval={interval}"]
        command += ["--set", f"evaluation_duration={EVALUATION_EPISODES}"]
        command += ["--storage-path", directory.parent, "--name", directory.name]
    subprocess.run(command, check=True)


def _stable_baselines(directory: Path, env_id: str, seed: int, steps: int) -> None:
    """Run or resume stable-baselines3's SAC with its defaults."""
    from stable_baselines3 import SAC as StableSAC
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv

    env, test_env = envs.make(env_id), DummyVecEnv([lambda: Monitor(envs.make(env_id))])
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
        test_env.seed(1_000_000 + seed)  # RLlib evaluates with this seed, so the starts are the same.
        returns, _ = evaluate_policy(
            model, test_env, EVALUATION_EPISODES, return_episode_rewards=True
        )
        seconds += time.perf_counter() - started
        with results.open("a") as file:
            print(json.dumps(_result(model.num_timesteps, seconds, returns)), file=file)
        for save, path in ((model.save, model_file), (model.save_replay_buffer, replay_file)):
            save(path.with_name("new-" + path.name))
        for path in (model_file, replay_file):  # The two files belong together.
            path.with_name("new-" + path.name).replace(path)


def _result(steps: int, seconds: float, returns: list[float]) -> dict[str, Any]:
    """Return a result in the format that Tune writes."""
    return {
        "training_iteration": steps // EVALUATION_STEPS,
        "num_env_steps_sampled_lifetime": steps,
        "time_total_s": seconds,
        "evaluation": {"env_runners": {"episode_return_mean": float(np.mean(returns))}},
    }


class SACWithReplay(SAC):
    """RLlib's SAC, with checkpoints that include the replay."""

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
    """Run or resume RLlib's SAC with its defaults."""
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


# -- What the runs show. --


def measure_speeds(results: Path) -> None:
    """Measure the environment steps per second on cheetah-run with one thread, without evaluations.

    The runs of the plan run in parallel and may be interrupted, so their own wall-clock times say
    little. Each method is measured twice, in turn, and the faster result counts: other work on the
    same processor can only slow a method down.
    """
    torch.set_num_threads(1)
    methods = dict.fromkeys(method for method, _, _ in _family_plan())
    rounds = [{method: _speed(method) for method in methods} for _ in range(2)]
    speeds = {method: max(measured[method] for measured in rounds) for method in methods}
    results.mkdir(parents=True, exist_ok=True)
    (results / SPEEDS).write_text(json.dumps(speeds, indent=1) + "\n")
    for method, speed in speeds.items():
        print(f"{method}: {speed:.1f} env steps/s")


def _speed(method: str) -> float:
    env_id = TASKS["cheetah-run"]
    if method == "SB3-SAC":
        from stable_baselines3 import SAC as StableSAC

        model = StableSAC("MlpPolicy", envs.make(env_id), seed=0)
        model.learn(500)
        started = time.perf_counter()
        model.learn(1_000, reset_num_timesteps=False)
        return 1_000 / (time.perf_counter() - started)
    if method == "RLlib-SAC":
        envs.register_with_tune(env_id)
        config = SACConfig().training(num_steps_sampled_before_learning_starts=300)
        steps = 100
    else:
        _, name, _, preset, *options = METHODS[method] or []
        config = getattr(get_trainable_cls(name).get_default_config(), preset)()
        settings = dict(option.split("=") for option in options[1::2])
        settings |= {"compile_updates": "at_start", **common.FIRST_COMPACT}
        config.training(**settings, num_steps_sampled_before_learning_starts=300)
        steps = 1_000
    config.environment(env_id).env_runners(num_env_runners=0).learners(num_gpus_per_learner=0)
    config.reporting(min_sample_timesteps_per_iteration=steps, min_time_s_per_iteration=None)
    algorithm = config.debugging(seed=0, log_level="ERROR").build_algo()
    before = 0
    while before < 500:
        before = algorithm.train()["num_env_steps_sampled_lifetime"]
    started = time.perf_counter()
    after = algorithm.train()["num_env_steps_sampled_lifetime"]
    speed = (after - before) / (time.perf_counter() - started)
    algorithm.stop()
    return speed


def read_runs(results: Path) -> Runs:
    """Read the curves of the finished runs."""
    found: Runs = {}
    for method, task, seed in plan(results):
        path = curves_file(results, method, task, seed)
        if path.exists():
            found.setdefault((method, task), {})[seed] = pd.read_csv(path)
    return found


def write_table(results: Path) -> None:
    if results.name == "frontier":
        sys.exit(f"The table of {results} is written by benchmarks/published.py.")
    runs = read_runs(results)
    if not runs:
        sys.exit(f"{results} has no CSV of a run of the plan.")
    speeds_file = results / SPEEDS
    table = _table(results, runs, json.loads(speeds_file.read_text()) if speeds_file.exists() else {})
    (results / "table.md").write_text(table)
    print(table)
    _figure(runs, results / "learning.png")


def _table(results: Path, runs: Runs, speeds: dict[str, float]) -> str:
    """Format means and standard deviations over seeds; a single run has no standard deviation.

    Minutes are steps divided by the method's speed on cheetah-run.
    """
    lines = [
        "| task | method | seeds | at 25 % | at 50 % | at 100 % | last quarter "
        "| steps to 80 % | minutes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for task in dict.fromkeys(task for _, task in runs):
        budgeted = budget(results, "RERPI", task)
        ends = [
            np.mean([curves["greedy_return"].max() for curves in by_seed.values()])
            for (_, of), by_seed in runs.items()
            if of == task
        ]
        if not ends:
            continue
        # Returns of Pendulum are negative, so they are measured from the worst return, about -1600.
        worst = -1600.0 if task == "pendulum" else 0.0
        wanted = worst + 0.8 * (max(ends) - worst)
        for (method, of), by_seed in runs.items():
            if of != task:
                continue
            curves = list(by_seed.values())
            cells = [_at(curves, share * budgeted) for share in (0.25, 0.5, 1.0)]
            cells.append(_over(curves, 0.75 * budgeted, budgeted))
            steps = [_first(curve, wanted) for curve in curves]
            reached = [step for step in steps if step is not None]
            when, minutes = f"not in {budget(results, method, task):,}", ""
            if reached:
                when = f"{np.mean(reached):,.0f}"
                if len(reached) < len(steps):
                    when += f" ({len(reached)} of {len(steps)} runs)"
                if method in speeds:
                    minutes = f"{np.mean(reached) / speeds[method] / 60.0:.0f}"
            row = [task, method, str(len(by_seed)), *cells, when, minutes]
            lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def _at(runs: list[pd.DataFrame], steps: float) -> str:
    """Format the greedy returns after this number of steps."""
    return _mean_and_spread(
        [
            float(np.interp(steps, curves["env_steps"], curves["greedy_return"]))
            for curves in runs
            if curves["env_steps"].iloc[-1] >= steps
        ]
    )


def _over(runs: list[pd.DataFrame], after: float, until: float) -> str:
    """Format the mean of each run's evaluations after a step, since one alone may be an outlier."""
    return _mean_and_spread(
        [
            float(curves["greedy_return"][curves["env_steps"] > after].mean())
            for curves in runs
            if curves["env_steps"].iloc[-1] >= until
        ]
    )


def _mean_and_spread(values: list[float]) -> str:
    """Format the mean and, in parentheses, the standard deviation over seeds."""
    if not values:
        return ""
    spread = f" ({np.std(values, ddof=1):.0f})" if len(values) > 1 else ""
    return f"{np.mean(values):.0f}{spread}"


def _first(curves: pd.DataFrame, wanted: float) -> float | None:
    reached = curves["env_steps"][curves["greedy_return"] >= wanted]
    return float(reached.iloc[0]) if len(reached) else None


def _figure(runs: Runs, path: Path) -> None:
    figure, axes = plt.subplots(2, 3, figsize=(13, 7), layout="constrained")
    lines = ("k-", "k-.", "C0-", "C1--", "C2:", "C3-", "C4--", "C5-.", "C6:")
    styles = dict(zip(dict.fromkeys(method for method, _ in runs), lines))
    for axis, task in zip(axes.flat, dict.fromkeys(task for _, task in runs)):
        for (method, of), by_seed in runs.items():
            if of != task:
                continue
            steps = np.unique(np.concatenate([c["env_steps"] for c in by_seed.values()]))
            steps = steps[steps <= min(c["env_steps"].iloc[-1] for c in by_seed.values())]
            values = [np.interp(steps, c["env_steps"], c["greedy_return"]) for c in by_seed.values()]
            label = f"{method} ({len(values)})"
            (line,) = axis.plot(steps / 1_000, np.mean(values, axis=0), styles[method], label=label)
            if len(values) > 1:
                low, high = np.min(values, axis=0), np.max(values, axis=0)
                axis.fill_between(
                    steps / 1_000, low, high, color=line.get_color(), alpha=0.15, linewidth=0
                )
        axis.set(title=task, xlabel="thousand environment steps", ylabel="greedy return")
        if task == "pendulum":
            axis.set_ylim(-400.0, 0.0)
        if axis.lines:
            axis.legend(frameon=False, fontsize=8)
    for axis in axes.flat:
        if not axis.lines:
            axis.axis("off")
    figure.savefig(path, dpi=120)


def compare(before: Path, after: Path, methods: list[str]) -> None:
    """Draw the runs that two directories have in common, one panel a task."""
    both = [read_runs(before), read_runs(after)]
    pairs = [pair for pair in both[0] if pair in both[1] and pair[0] in methods]
    if not pairs:
        sys.exit(f"{before} and {after} have no run in common.")
    figure, axes = plt.subplots(
        1, len(pairs), figsize=(5 * len(pairs), 4), layout="constrained", squeeze=False
    )
    lines = ["| task | method | runs | seeds | at 25 % | at 50 % | at 75 % | at 100 % |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for axis, (method, task) in zip(axes.flat, pairs):
        seeds = sorted(set(both[0][method, task]) & set(both[1][method, task]))
        for directory, runs, style in zip((before, after), both, ("0.6", "k")):
            curves = [runs[method, task][seed] for seed in seeds]
            for curve, dashes in zip(curves, ("-", "--", ":")):
                axis.plot(curve["env_steps"] / 1_000, curve["greedy_return"], dashes, color=style)
            axis.plot([], [], color=style, label=directory.name)
            shares = (0.25, 0.5, 0.75, 1.0)
            cells = [_at(curves, share * budget(after, method, task)) for share in shares]
            row = [task, method, directory.name, ", ".join(map(str, seeds)), *cells]
            lines.append("| " + " | ".join(row) + " |")
        axis.set(title=f"{method}, {task}", xlabel="thousand environment steps")
        axis.set_ylabel("greedy return; a line for each seed")
        axis.legend(frameon=False)
    (after / "comparison.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    figure.savefig(after / "comparison.png", dpi=120)


def run_plan(arguments: argparse.Namespace) -> None:
    """Make the missing runs, each in a process of its own."""
    missing = [
        run
        for run in plan(arguments.results)
        if not curves_file(arguments.results, *run).exists()
        and (not arguments.only or run[0] in arguments.only)
        and (not arguments.tasks or run[1] in arguments.tasks)
        and (not arguments.seeds or run[2] in arguments.seeds)
    ]
    print(f"{len(missing)} runs to make", flush=True)

    def make(run: tuple[str, str, int]) -> None:
        name = " ".join(map(str, run))
        print(f"{name} starts", flush=True)
        log = run_directory(arguments.results, *run).with_suffix(".log")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            command = [sys.executable, __file__, "one", *map(str, run)]
            command += ["--results", str(arguments.results)]
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
    run.add_argument("--seeds", nargs="+", type=int, metavar="SEED")
    one = commands.add_parser("one")
    one.add_argument("method", choices=METHODS)
    one.add_argument("task", choices=TASKS)
    one.add_argument("seed", type=int)
    for command in (run, one):
        command.add_argument("--results", type=Path, default=Path("results/frontier"))
    for command in (commands.add_parser("speed"), commands.add_parser("table")):
        command.add_argument("--results", type=Path, default=Path("results/learning"))
    comparison = commands.add_parser("compare")
    comparison.add_argument("before", type=Path)
    comparison.add_argument("after", type=Path)
    comparison.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    arguments = parser.parse_args()
    if arguments.command == "run":
        run_plan(arguments)
    elif arguments.command == "speed":
        measure_speeds(arguments.results)
    elif arguments.command == "compare":
        compare(arguments.before, arguments.after, arguments.only)
    elif arguments.command == "table":
        write_table(arguments.results)
    else:
        run_one(arguments.method, arguments.task, arguments.seed, arguments.results)


if __name__ == "__main__":
    main()
