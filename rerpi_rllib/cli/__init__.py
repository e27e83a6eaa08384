"""The command ``rllib``: it parses arguments, calls the packages below, and prints what they return.

Wrong use ends with exit code 2 and one line on stderr, a failed run with exit code 1. Every command
imports what it needs by itself, so that ``rllib --help`` is quick, and calls :func:`prepare_process`
before anything imports MuJoCo.
"""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, NoReturn, Optional

import typer

from rerpi_rllib import __version__
from rerpi_rllib.runs.errors import (
    EndedBySignal,
    RunFailed,
    describe_os_error,
    os_errors_fail_the_run,
)
from rerpi_rllib.runs.files import short_path

# The base of all of typer's errors: click's class, or the one of the copy in newer versions of typer.
_USAGE_ERROR: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train, evaluate and compare RERPI and its relatives with Ray RLlib.",
)


_DASHBOARD = typer.Option(
    envvar="RLLIB_DASHBOARD",
    show_envvar=False,
    help="Start Ray's dashboard on this machine, unless Ray runs already.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rllib {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Take the options that stand before a command."""


_ADDRESS: Any = typer.Option(
    metavar="auto|HOST:PORT",
    help="Join a Ray cluster, whose nodes share --storage-path, instead of starting Ray here.",
)


@app.command(epilog="Example: rllib train --algo RERPI --env Pendulum-v1 --preset compact")
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
    env_timeout: Annotated[
        Optional[float],
        typer.Option(help="Seconds until an environment that hangs is started anew [300]."),
    ] = None,
    storage_path: Annotated[Path, typer.Option(help="Where runs go.")] = Path("runs"),
    name: Annotated[Optional[str], typer.Option(help="The run's directory there.")] = None,
    resume: Annotated[
        Optional[Path], typer.Option(help="Go on from the newest checkpoint of a run.")
    ] = None,
    preset: Annotated[
        Optional[str],
        typer.Option(help="A named set of settings: compact (no GPU needed) or strong."),
    ] = None,
    api_stack: Annotated[
        Optional[str], typer.Option(help="RLlib's API stack: new (the default) or old.")
    ] = None,
    checkpoint_replay: Annotated[
        Optional[bool],
        typer.Option(help="Whether checkpoints hold the replay; without it, resuming refills it."),
    ] = None,
    trust: Annotated[
        bool,
        typer.Option("--trust", help="Resume a run of somebody else, whose pickles may do harm."),
    ] = False,
    max_failures: Annotated[
        int, typer.Option(min=0, max=1000, help="How often a run that fails is tried again.")
    ] = 3,
    address: Annotated[Optional[str], _ADDRESS] = None,
    dashboard: Annotated[bool, _DASHBOARD] = True,
    wandb: Annotated[
        Optional[str], typer.Option(metavar="PROJECT", help="Log to Weights & Biases.")
    ] = None,
    mlflow: Annotated[
        Optional[str], typer.Option(metavar="URI", help="Log to an MLflow server or directory.")
    ] = None,
    aim: Annotated[
        Optional[str], typer.Option(metavar="REPO", help="Log to an Aim repository.")
    ] = None,
    video_every: Annotated[
        Optional[float], typer.Option(metavar="MINUTES", help="Film the policy every so often.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress display.")] = False,
) -> None:
    """Train an algorithm, with settings from options or from a file (options win)."""
    from rerpi_rllib.runs.process import choose_cluster, prepare_process

    choose_cluster(address)
    prepare_process()
    from rerpi_rllib.runs.files import parse_assignments, parse_json_object
    from rerpi_rllib.runs.machine import no_gpu_hint
    from rerpi_rllib.runs.planning import Options, plan_run
    from rerpi_rllib.runs.training import resume_command, summary
    from rerpi_rllib.runs.training import train as run_training
    from rerpi_rllib.runs.watching import Watching

    if words and (words[0] != "file" or len(words) != 2):
        raise ValueError(f"'rllib train {' '.join(words)}': it must be 'rllib train file FILE'.")
    watching = Watching(
        quiet=quiet,
        dashboard=dashboard,
        wandb=wandb,
        mlflow=mlflow,
        aim=aim,
        video_every=video_every,
    )
    options = Options(
        algo=algo,
        env=env,
        preset=preset,
        seed=seed,
        stop=parse_json_object(stop, "--stop") if stop is not None else None,
        config={
            **(parse_json_object(config, "--config") if config is not None else {}),
            **parse_assignments(set_),
        },
        api_stack=api_stack,
        num_env_runners=num_env_runners,
        num_learners=num_learners,
        num_gpus=num_gpus,
        checkpoint_replay=checkpoint_replay,
        env_timeout=env_timeout,
    )
    run = plan_run(
        options,
        file=words[1] if words else None,
        resume=resume,
        storage_path=storage_path,
        name=name,
        trust=trust,
        report=typer.echo,
    )
    if not quiet and (hint := no_gpu_hint(run.config, run.settings.preset)):
        typer.echo(hint)
    outcome = run_training(
        run,
        watching=watching,
        max_failures=max_failures,
        report=typer.echo,
    )
    typer.echo(summary(outcome))
    typer.echo(f"checkpoint  {short_path(outcome.checkpoint)}")
    if outcome.ended_by not in (None, signal.SIGINT):
        # Whoever sent it waits for the end, and does not take the run for a finished one.
        typer.echo(f"next        {resume_command(short_path(outcome.directory))}")
        raise typer.Exit(128 + outcome.ended_by)
    # matplotlib and SciPy's statistics take a second to import: training does not wait for them.
    from rerpi_rllib.analysis.plots import plot_runs

    with os_errors_fail_the_run():
        typer.echo(f"plot        {short_path(plot_runs([outcome.directory]))}")
    typer.echo(
        f"next        {shlex.join(['rllib', 'evaluate', str(short_path(outcome.checkpoint))])}"
    )


@app.command(epilog="Example: rllib evaluate runs/NAME --episodes 10 --video cheetah.mp4")
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
    from rerpi_rllib.runs.process import prepare_process

    prepare_process(pictures=video is not None)
    from rerpi_rllib.runs.evaluation import evaluate as play

    result = play(
        checkpoint,
        episodes=episodes,
        stochastic=stochastic,
        video=video,
        seed=seed,
        report=partial(typer.echo, err=True),
    )
    _print_episodes(result, video, as_json)


def _print_episodes(result: dict[str, Any], video: Path | None, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(result))
        return
    distances = [f"  distance {value:.1f}" for value in result.get("distances", [])]
    for number, (value, length, distance) in enumerate(
        zip_longest(result["returns"], result["episode_lengths"], distances, fillvalue=""), start=1
    ):
        typer.echo(f"episode {number:3d}: return {value:9.2f}  steps {length}{distance}")
    typer.echo(f"mean {result['return_mean']:.2f}, std {result['return_std']:.2f}")
    if video:
        typer.echo(f"video {video}")


@app.command(epilog="Example: rllib enjoy cheetah-run --video cheetah.mp4")
def enjoy(
    task: Annotated[
        str, typer.Argument(help="A task of `rllib list zoo`, or a directory of `rllib export`.")
    ],
    episodes: Annotated[int, typer.Option(min=1, max=1_000_000, help="How many episodes.")] = 1,
    video: Annotated[
        Optional[Path], typer.Option(help="Film the first episode (.mp4 or .gif).")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Seeds the episodes.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Play a policy of the zoo, or one that was exported."""
    from rerpi_rllib.envs.rendering import choose_backend

    # Nothing here needs Ray, which takes seconds to import.
    choose_backend(pictures=video is not None)
    from rerpi_rllib.runs.zoo import enjoy as play

    _print_episodes(play(task, episodes=episodes, seed=seed, video=video), video, as_json)


@app.command(epilog="Example: rllib export runs/NAME policy --onnx")
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a run's directory.")],
    directory: Annotated[Path, typer.Argument(help="Where to write the policy and its card.")],
    onnx: Annotated[
        bool, typer.Option("--onnx", help="Write policy.onnx, too, and compare it with torch.")
    ] = False,
    episodes: Annotated[
        int, typer.Option(help="How many episodes to play for the card; 0 for none.")
    ] = 20,
    video: Annotated[bool, typer.Option("--video", help="Film the first episode.")] = False,
) -> None:
    """Write a policy that runs without Ray."""
    from rerpi_rllib.runs.process import prepare_process

    prepare_process(pictures=video)
    from rerpi_rllib.analysis.export import export as write

    written = write(
        checkpoint,
        directory,
        onnx=onnx,
        episodes=episodes,
        video=video,
        report=partial(typer.echo, err=True),
    )
    if written["evaluation"]:
        typer.echo(f"return      {written['evaluation']['return_mean']:.2f}")
    for path in sorted(directory.expanduser().iterdir()):
        typer.echo(f"{path.stat().st_size:>9,} B {short_path(path)}")
    if written["evaluation"]:
        typer.echo(f"next        {shlex.join(['rllib', 'enjoy', str(short_path(directory))])}")


@app.command(epilog="Example: rllib inspect runs/NAME")
def inspect(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a run's directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Show what a checkpoint is: settings, networks, counters, metrics, versions, files."""
    from rerpi_rllib.runs.process import prepare_process

    prepare_process()
    from rerpi_rllib.runs.inspection import describe
    from rerpi_rllib.runs.inspection import inspect as look

    found = look(checkpoint, report=partial(typer.echo, err=True))
    typer.echo(json.dumps(found) if as_json else "\n".join(describe(found)))


@app.command(epilog="Example: rllib plot runs/NAME runs/OTHER --output curves.png")
def plot(
    directories: Annotated[list[Path], typer.Argument(help="Directories of runs.")],
    output: Annotated[
        Optional[Path], typer.Option(help="The PNG file; by default in the first directory.")
    ] = None,
) -> None:
    """Draw the learning curves of runs into one figure, with a CSV file beside it."""
    from rerpi_rllib.runs.process import prepare_process

    prepare_process()
    from rerpi_rllib.analysis.plots import plot_runs

    typer.echo(str(short_path(plot_runs(directories, output))))


@app.command(epilog="Example: rllib sweep epsilon_mu --smoke")
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
    address: Annotated[Optional[str], _ADDRESS] = None,
    dashboard: Annotated[bool, _DASHBOARD] = True,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress display.")] = False,
) -> None:
    """Run a sweep with Ray Tune, or what is left of it, and end with a figure and a table."""
    from rerpi_rllib.runs.process import choose_cluster, prepare_process

    choose_cluster(address)
    prepare_process()
    from rerpi_rllib.analysis.summary import summarise
    from rerpi_rllib.runs.files import parse_assignments, parse_json_object
    from rerpi_rllib.sweeps.running import check_failures, num_trials, run_sweep, sweep_directory
    from rerpi_rllib.sweeps.sweep import load

    planned, file_name = load(
        name,
        on_cpu=cpu,
        smoke=smoke,
        env=env,
        seeds=seeds,
        config=parse_assignments(set_),
        stop=parse_json_object(stop, "--stop") if stop is not None else None,
    )
    directory = sweep_directory(
        storage_path,
        file_name,
        name=directory_name,
        scheduler=scheduler,
        search=search,
        smoke=smoke,
    )
    try:
        failed = run_sweep(
            planned,
            directory,
            scheduler=scheduler,
            search=search,
            num_samples=num_samples,
            command=shlex.join(["rllib", *sys.argv[1:]]),
            quiet=quiet,
            dashboard=dashboard,
            report=typer.echo,
        )
    except (KeyboardInterrupt, EndedBySignal):
        typer.echo(f"Stopped. The same command goes on with what is left of {short_path(directory)}.")
        raise
    if len(failed) < num_trials(planned, search, num_samples):
        summary, drawing = summarise(directory)
        typer.echo(summary.markdown)
        typer.echo(f"figure      {short_path(drawing)}")
        typer.echo(f"next        {shlex.join(['rllib', 'report', str(short_path(directory))])}")
    for trial, reason in failed.items():
        typer.echo(f"failed      {trial}: {reason}")
    check_failures(failed, directory)


@app.command(epilog="Example: rllib report runs/NAME")
def report(
    directory: Annotated[Path, typer.Argument(help="The directory of a run or of a sweep.")],
    output: Annotated[
        Optional[Path], typer.Option(help="The HTML file; by default report.html in the directory.")
    ] = None,
) -> None:
    """Write one self-contained HTML page about a run or a sweep."""
    from rerpi_rllib.runs.process import prepare_process

    prepare_process()
    from rerpi_rllib.analysis.report import write_report

    typer.echo(str(short_path(write_report(directory, output))))


@app.command(epilog="Example: rllib figure landscape --output figures")
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
    env: Annotated[Optional[list[str]], typer.Option(help="Other tasks; may be repeated.")] = None,
    storage_path: Annotated[Path, typer.Option(help="Where the sweeps' runs are.")] = Path("runs"),
) -> None:
    """Make a figure of the paper from runs of its own."""
    from rerpi_rllib.runs.process import prepare_process

    prepare_process()
    from rerpi_rllib.figures.paper import figure as make_figure

    path = make_figure(
        name,
        output,
        seeds=seeds,
        iterations=iterations,
        smoke=smoke,
        env=env,
        storage_path=storage_path,
        report=typer.echo,
    )
    typer.echo(str(short_path(path)))


@app.command(epilog="Example: rllib dashboard --prometheus")
def dashboard(
    prometheus: Annotated[
        bool,
        typer.Option(
            "--prometheus", help="Run Prometheus, and Grafana if there is one, until Ctrl-C."
        ),
    ] = False,
) -> None:
    """Say where running trainings can be watched, and run what keeps their metrics."""
    from rerpi_rllib.runs.dashboard import describe, serve

    if prometheus:
        serve(typer.echo)
    for line in describe():
        typer.echo(line)


@app.command("list", epilog="Example: rllib list envs")
def list_(
    what: Annotated[
        Optional[str], typer.Argument(help="algos, envs, configs, sweeps, figures or zoo.")
    ] = None,
) -> None:
    """Show the algorithms, environments, configurations, sweeps, figures and zoo there are."""
    from rerpi_rllib.runs.process import prepare_process

    prepare_process()
    from rerpi_rllib import envs
    from rerpi_rllib.figures.paper import FIGURES
    from rerpi_rllib.runs.settings import ALGORITHMS, describe_configurations
    from rerpi_rllib.runs.zoo import describe_zoo
    from rerpi_rllib.sweeps.sweep import describe_sweeps

    kinds: dict[str, Callable[[], list[str]]] = {
        "algos": lambda: list(ALGORITHMS),
        "envs": envs.list_ids,
        "configs": describe_configurations,
        "sweeps": describe_sweeps,
        "figures": lambda: list(FIGURES),
        "zoo": describe_zoo,
    }
    if what is not None and what not in kinds:
        raise ValueError(f"Unknown kind {what!r}. Allowed: {', '.join(kinds)}.")
    for kind in [what] if what else kinds:
        if what is None:
            typer.echo(f"{kind}:")
        for line in kinds[kind]():
            typer.echo(line if what else f"  {line}")


def main() -> None:
    """Run a command and turn its errors into one line on stderr and an exit code."""
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
        if code == 130:
            raise KeyboardInterrupt  # Newer versions of typer return this code for it.
    except _USAGE_ERROR as error:
        _fail(2, error.format_message())
    except EndedBySignal as error:
        _fail(error.exit_code, str(error))
    except (typer.Abort, KeyboardInterrupt):
        _fail(130, "Aborted.")
    except OSError as error:
        _fail(2, describe_os_error(error))
    except ValueError as error:
        _fail(2, str(error))
    except RunFailed as error:
        _fail(1, str(error))
    sys.exit(code or 0)


def _fail(code: int, message: str) -> NoReturn:
    print("rllib: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(code)
