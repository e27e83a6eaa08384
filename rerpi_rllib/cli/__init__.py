"""``rllib ...``: arguments in, calls out.

Wrong use ends with exit code 2 and one line on stderr, a failed run with exit code 1.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

# The base of all of typer's errors: click's own class, or that of the copy newer versions carry.
_USAGE_ERROR: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train, evaluate and compare RERPI and its relatives with Ray RLlib.",
)


@app.command()
def train(
    words: Annotated[
        Optional[list[str]],
        typer.Argument(metavar="[file FILE]", help="Take settings from a YAML file."),
    ] = None,
    algo: Annotated[Optional[str], typer.Option(help="The algorithm, e.g. RERPI.")] = None,
    env: Annotated[
        Optional[str], typer.Option(help="The task, e.g. dm_control/cheetah-run-v0.")
    ] = None,
    config: Annotated[Optional[str], typer.Option(help="Settings as a JSON object.")] = None,
    set_: Annotated[
        Optional[list[str]], typer.Option("--set", metavar="KEY=VALUE", help="One setting.")
    ] = None,
    stop: Annotated[
        Optional[str],
        typer.Option(help="JSON with env_steps, updates, iterations, time_s or return."),
    ] = None,
    seed: Annotated[Optional[int], typer.Option(help="Makes the run repeatable.")] = None,
    num_env_runners: Annotated[
        Optional[int], typer.Option(help="Processes that act; 0: synchronous, deterministic.")
    ] = None,
    num_learners: Annotated[Optional[int], typer.Option(help="Learner processes.")] = None,
    num_gpus: Annotated[Optional[float], typer.Option(help="GPUs for each learner.")] = None,
    storage_path: Annotated[Path, typer.Option(help="Where runs go.")] = Path("runs"),
    name: Annotated[Optional[str], typer.Option(help="The run's directory there.")] = None,
    resume: Annotated[
        Optional[Path], typer.Option(help="Go on from the newest checkpoint of a run.")
    ] = None,
    preset: Annotated[
        Optional[str], typer.Option(help="A named set of settings: compact (no GPU needed).")
    ] = None,
    api_stack: Annotated[
        Optional[str], typer.Option(help="RLlib's API stack: new (the default) or old.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress display.")] = False,
) -> None:
    """Train an algorithm, with settings from options or from a file (options win)."""
    from rerpi_rllib.experiments import training
    from rerpi_rllib.experiments.checkpoints import check_resumable
    from rerpi_rllib.experiments.plots import plot_runs
    from rerpi_rllib.experiments.settings import (
        CONFIGS,
        DEFAULT_ENV,
        Configuration,
        RunSettings,
        find_file,
        parse_assignment,
        parse_json_object,
    )

    if words and (words[0] != "file" or len(words) != 2):
        raise ValueError(f"'rllib train {' '.join(words)}': it must be 'rllib train file FILE'.")
    if words and resume is not None:
        raise ValueError("--resume goes on with the run's own settings: leave 'file FILE' out.")
    resume_from = None
    if resume is not None:
        resume_from = training.newest_checkpoint(resume.resolve())
        directory = _run_of(resume_from)
        settings = RunSettings.from_file(directory / RunSettings.FILE_NAME)
    elif words:
        file = Configuration.from_file(find_file(words[1], CONFIGS))
        settings = file.run
        if env is None and len(file.tasks) > 1:
            typer.echo(
                f"{words[1]} is for {len(file.tasks)} tasks: training on {settings.env} (--env)."
            )
    elif algo is None:
        raise ValueError("Say what to train: --algo RERPI, file FILE or --resume DIR.")
    else:
        settings = RunSettings()
        if env is None:
            typer.echo(f"No --env given: training on {DEFAULT_ENV}.")
    settings.algo = algo or settings.algo
    settings.env = env or settings.env
    settings.preset = preset or settings.preset
    settings.seed = seed if seed is not None else settings.seed
    if stop is not None:
        settings.stop = parse_json_object(stop, "--stop")
    if api_stack not in (None, "new", "old"):
        raise ValueError(f"--api-stack {api_stack!r} is not allowed: it must be new or old.")
    new_stack = None if api_stack is None else api_stack == "new"
    options = {
        "enable_rl_module_and_learner": new_stack,
        "enable_env_runner_and_connector_v2": new_stack,
        "num_env_runners": num_env_runners,
        "num_learners": num_learners,
        "num_gpus_per_learner": num_gpus,
    }
    settings.config = {
        **settings.config,
        **(parse_json_object(config, "--config") if config else {}),
        **dict(parse_assignment(text) for text in set_ or []),
        **{key: value for key, value in options.items() if value is not None},
    }

    built = settings.build_config()
    if resume_from is not None:
        check_resumable(resume_from, built)
    else:
        directory = training.run_directory(settings, storage_path, name)
        if list(directory.glob("part-*/checkpoint_*")):
            raise ValueError(f"{directory} holds a run already: --resume it, or choose a --name.")
    if training.has_no_gpu(built) and settings.preset is None and not quiet:
        typer.echo(
            f"No GPU: one update with batch {built.total_train_batch_size} takes about "
            f"{training.update_seconds(built):.2g} s here. --preset compact is made for CPUs."
        )
    outcome = training.train(settings, built, directory, resume_from=resume_from, quiet=quiet)
    typer.echo(training.summary(outcome))
    typer.echo(f"checkpoint  {_shown(outcome.checkpoint)}")
    typer.echo(f"plot        {_shown(plot_runs([outcome.directory]))}")
    typer.echo(f"next        rllib evaluate {_shown(outcome.checkpoint)}")


@app.command()
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a run's directory.")],
    episodes: Annotated[int, typer.Option(help="How many episodes.")] = 10,
    stochastic: Annotated[
        bool, typer.Option("--stochastic", help="Sample actions instead of taking the mean.")
    ] = False,
    video: Annotated[
        Optional[Path], typer.Option(help="Film the first episode (.mp4 or .gif).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seeds the episodes.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Play a checkpoint's policy and report its returns."""
    from rerpi_rllib.envs import rendering_backend
    from rerpi_rllib.experiments.evaluation import evaluate as play

    if video and os.environ.get("MUJOCO_GL") == "disabled":
        # MuJoCo's packages have been imported already: start again with pictures.
        os.environ["MUJOCO_GL"] = rendering_backend()
        os.execv(sys.executable, [sys.executable, *sys.argv])
    result = play(checkpoint, episodes=episodes, stochastic=stochastic, video=video, seed=seed)
    if as_json:
        typer.echo(json.dumps(result))
        return
    for number, (value, length) in enumerate(
        zip(result["returns"], result["episode_lengths"]), start=1
    ):
        typer.echo(f"episode {number:3d}: return {value:9.2f}  steps {length}")
    typer.echo(f"mean {result['return_mean']:.2f}, std {result['return_std']:.2f}")
    if video:
        typer.echo(f"video {video}")


@app.command()
def plot(
    directories: Annotated[list[Path], typer.Argument(help="Directories of runs.")],
    output: Annotated[
        Optional[Path], typer.Option(help="The PNG file; by default in the first directory.")
    ] = None,
) -> None:
    """Draw the learning curves of runs into one figure, with a CSV file beside it."""
    from rerpi_rllib.experiments.plots import plot_runs

    typer.echo(str(_shown(plot_runs(directories, output))))


@app.command()
def sweep(
    name: Annotated[str, typer.Argument(help="A sweep of `rllib list sweeps`, or a YAML file.")],
    smoke: Annotated[
        bool, typer.Option("--smoke", help="All variants on one task, for a moment.")
    ] = False,
    cpu: Annotated[
        Optional[bool],
        typer.Option(help="The variant for machines without a GPU; by default if there is none."),
    ] = None,
    env: Annotated[Optional[list[str]], typer.Option(help="Other tasks; may be repeated.")] = None,
    seeds: Annotated[Optional[int], typer.Option(help="Runs of each variant.")] = None,
    set_: Annotated[
        Optional[list[str]], typer.Option("--set", metavar="KEY=VALUE", help="One setting for all.")
    ] = None,
    stop: Annotated[Optional[str], typer.Option(help="When a run ends, as in `rllib train`.")] = None,
    scheduler: Annotated[
        Optional[str], typer.Option(help="asha or pbt: spend the time on the better trials.")
    ] = None,
    search: Annotated[
        Optional[str], typer.Option(help="optuna: draw settings between the grid's values.")
    ] = None,
    num_samples: Annotated[int, typer.Option(help="Trials of a search.")] = 20,
    storage_path: Annotated[Path, typer.Option(help="Where sweeps go.")] = Path("runs"),
    directory_name: Annotated[
        Optional[str], typer.Option("--name", help="The sweep's directory there.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress display.")] = False,
) -> None:
    """Run a sweep with Ray Tune, or what is left of it, and end with a figure and a table."""
    from rerpi_rllib.experiments.settings import parse_assignment, parse_json_object
    from rerpi_rllib.experiments.summary import summarise
    from rerpi_rllib.experiments.sweeps import load, run_sweep
    from rerpi_rllib.experiments.training import RunFailed

    asked, file_name = load(
        name,
        on_cpu=cpu,
        smoke=smoke,
        env=env,
        seeds=seeds,
        config=dict(parse_assignment(text) for text in set_ or []),
        stop=parse_json_object(stop, "--stop") if stop else None,
    )
    parts = [file_name, scheduler, search, "smoke" if smoke else None]
    directory = (
        (storage_path / (directory_name or "-".join(filter(None, parts)))).expanduser().resolve()
    )
    try:
        failed = run_sweep(
            asked,
            directory,
            scheduler=scheduler,
            search=search,
            num_samples=num_samples,
            command=shlex.join(["rllib", *sys.argv[1:]]),
            quiet=quiet,
        )
    except KeyboardInterrupt:
        typer.echo(f"Stopped. The same command goes on with what is left of {_shown(directory)}.")
        raise
    if len(failed) < (num_samples if search else len(asked.trials())):
        summary, drawn = summarise(directory)
        typer.echo(summary.markdown)
        typer.echo(f"figure      {_shown(drawn)}")
        typer.echo(f"next        rllib report {_shown(directory)}")
    for trial, reason in failed.items():
        typer.echo(f"failed      {trial}: {reason}")
    if failed:
        raise RunFailed(
            f"{len(failed)} of the sweep's trials failed: {', '.join(failed)}. Logs are in "
            f"{directory}; the same command tries them again."
        )


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(help="Of a run or of a sweep.")],
    output: Annotated[
        Optional[Path], typer.Option(help="The HTML file; by default report.html in the directory.")
    ] = None,
) -> None:
    """Write one self-contained HTML page about a run or a sweep."""
    from rerpi_rllib.experiments.report import write_report

    typer.echo(str(_shown(write_report(directory, output))))


@app.command()
def figure(
    name: Annotated[str, typer.Argument(help="A figure of `rllib list figures`.")],
    output: Annotated[Path, typer.Option(help="The directory of the PNG, SVG and CSV files.")] = Path(
        "figures"
    ),
    seeds: Annotated[Optional[int], typer.Option(help="Runs of each kind.")] = None,
    iterations: Annotated[
        Optional[int], typer.Option(help="Shorter or longer runs on known functions.")
    ] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="Shorter sweeps.")] = False,
    storage_path: Annotated[Path, typer.Option(help="Where the sweeps' runs are.")] = Path("runs"),
) -> None:
    """Make a figure of the paper from runs of its own."""
    from rerpi_rllib.experiments.figures import figure as make

    drawn = make(
        name,
        output,
        seeds=seeds,
        iterations=iterations,
        smoke=smoke,
        storage_path=storage_path,
        report=typer.echo,
    )
    typer.echo(str(_shown(drawn)))


@app.command("list")
def list_(
    what: Annotated[
        Optional[str], typer.Argument(help="algos, envs, configs, sweeps or figures.")
    ] = None,
) -> None:
    """Show the algorithms, environments, configurations, sweeps and figures there are."""
    from rerpi_rllib import envs
    from rerpi_rllib.experiments.figures import FIGURES
    from rerpi_rllib.experiments.settings import ALGORITHMS, CONFIGS, Configuration
    from rerpi_rllib.experiments.sweeps import SWEEPS, Sweep

    def configs() -> list[str]:
        paths = sorted(CONFIGS.glob("*.yaml"))
        return [f"configs/{p.name}: {Configuration.from_file(p).description}" for p in paths]

    def sweeps() -> list[str]:
        paths = sorted(SWEEPS.glob("*.yaml"))
        return [f"{p.stem}: {Sweep.from_file(p, on_cpu=False).description}" for p in paths]

    kinds = {
        "algos": lambda: list(ALGORITHMS),
        "envs": envs.list_ids,
        "configs": configs,
        "sweeps": sweeps,
        "figures": lambda: list(FIGURES),
    }
    if what is not None and what not in kinds:
        raise ValueError(f"Unknown kind {what!r}. Allowed: {', '.join(kinds)}.")
    for kind in [what] if what else kinds:
        if what is None:
            typer.echo(f"{kind}:")
        for line in kinds[kind]():
            typer.echo(line if what else f"  {line}")


def _run_of(checkpoint: Path) -> Path:
    from rerpi_rllib.experiments.settings import RunSettings

    for directory in checkpoint.parents:
        if (directory / RunSettings.FILE_NAME).is_file():
            return directory
    raise ValueError(f"{checkpoint} does not belong to a run of `rllib train`: no run.json above it.")


def _shown(path: Path) -> Path:
    """Relative to where the user is, if it is below."""
    path, here = path.resolve(), Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def main() -> None:
    # What goes wrong is said in one line, with the place of the log that has it all.
    for noisy in ("ray", "ray.rllib", "ray.tune"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    import gymnasium

    gymnasium.logger.min_level = gymnasium.logger.ERROR
    from rerpi_rllib.experiments.training import RunFailed

    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except _USAGE_ERROR as error:
        _fail(2, error.format_message())
    except (typer.Abort, KeyboardInterrupt):
        _fail(130, "Aborted.")
    except ValueError as error:
        _fail(2, str(error))
    except RunFailed as error:
        _fail(1, str(error))
    sys.exit(code or 0)


def _fail(code: int, message: str) -> None:
    print("rllib: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(code)
