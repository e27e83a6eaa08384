"""Spending the time of a sweep on its better trials: schedulers and search algorithms of Tune."""

from __future__ import annotations

from collections.abc import Mapping

from ray.tune.schedulers import AsyncHyperBandScheduler, PopulationBasedTraining, TrialScheduler
from ray.tune.search import Searcher

from rerpi_rllib.sweeps.sweep import RUN_KEYS, Sweep, value_range

SCHEDULERS = ("asha", "pbt")
SEARCHES = ("optuna",)


def check_tuning(scheduler: str | None, search: str | None, num_samples: int) -> None:
    """Raise ``ValueError`` if an option has a value that is not allowed."""
    for option, value, allowed in (
        ("--scheduler", scheduler, SCHEDULERS),
        ("--search", search, SEARCHES),
    ):
        if value is not None and value not in allowed:
            raise ValueError(f"{option} {value!r} is not allowed: it must be {' or '.join(allowed)}.")
    if not 1 <= num_samples <= 10_000:
        raise ValueError(f"--num-samples {num_samples} is not allowed: it must be from 1 to 10,000.")


def make_scheduler(
    name: str | None, sweep: Sweep, stop: Mapping[str, float]
) -> TrialScheduler | None:
    """Build the scheduler of this name; it compares trials by the score after equal env steps."""
    if name is None:
        return None
    if "env_steps" not in stop:
        raise ValueError(f"--scheduler {name} needs env_steps in stop, which is {stop}.")
    steps = int(stop["env_steps"])
    if name == "asha":
        return AsyncHyperBandScheduler(
            time_attr="env_steps", max_t=steps, grace_period=max(1, steps // 8), reduction_factor=2
        )
    if not sweep.grid or any(key in RUN_KEYS for key in sweep.grid):
        raise ValueError(f"--scheduler pbt cannot change what is in the grid: {list(sweep.grid)}.")
    # PBT changes numbers a little or draws new ones; of other values it takes a neighbour.
    mutations = {key: value_range(values) or values for key, values in sweep.grid.items()}
    return PopulationBasedTraining(
        time_attr="env_steps",
        perturbation_interval=max(1, steps // 8),
        hyperparam_mutations={"settings": {"config": mutations}},
    )


def make_searcher(name: str | None) -> Searcher | None:
    """Build the search algorithm of this name."""
    if name is None:
        return None
    try:
        import optuna
        from ray.tune.search.optuna import OptunaSearch
    except ImportError:
        raise ValueError("--search optuna needs the package optuna: pip install optuna.") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return OptunaSearch(seed=0)
