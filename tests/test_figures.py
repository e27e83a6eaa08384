"""Known functions, policy improvement on them, and the figures that show it."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import pandas as pd
import pytest
import torch

from rerpi_rllib.core import layers
from rerpi_rllib.figures import improvement_plots, sac
from rerpi_rllib.figures.known_functions import FUNCTIONS
from rerpi_rllib.figures.paper import FIGURES, figure
from rerpi_rllib.figures.policy_improvement import Problem, run, run_together
from rerpi_rllib.runs.settings import RunSettings
from rerpi_rllib.sweeps.sweep import load, trial_name


@pytest.mark.parametrize("name,best", [("sphere", 0.0), ("rosenbrock", 1.0)])
def test_functions_have_their_optimum_where_they_should(name, best):
    torch.manual_seed(0)
    states = 4.0 * torch.rand(50, 10) - 2.0
    assert float(FUNCTIONS[name](states, best - states).abs().max()) < 1e-8
    others = FUNCTIONS[name](states, best - states + torch.randn(20, 50, 10))
    assert others.shape == (20, 50) and bool((others < 0).all())


def test_decoupled_fit_widens_the_policy_on_its_way_and_coupled_does_not():
    start = Problem("sphere", 2, "decoupled", 0.1, initial_mean=1.5, iterations=25)
    decoupled = run(start, seed=0)
    coupled = run(Problem(**{**vars(start), "fit": "coupled"}), seed=0)
    assert len(decoupled) == 26
    assert decoupled[0].stddev == pytest.approx(0.1, abs=0.01)
    assert decoupled[-1].stddev > 1.2 * decoupled[0].stddev
    assert coupled[-1].stddev < 1.05 * coupled[0].stddev
    assert decoupled[-1].value > coupled[-1].value > coupled[0].value


def test_coupled_fit_converges_prematurely_if_all_steps_fit_the_same_actions():
    start = Problem("sphere", 10, "coupled", 0.1, iterations=12)
    one_batch = replace(start, batches_per_iteration=1)
    tight = replace(one_batch, epsilon_pi=1e-3)
    new_batches = run(start, 0)
    coupled, held_back = run_together([(one_batch, 0), (tight, 0)])
    decoupled = run(replace(one_batch, fit="decoupled"), 0)
    assert coupled[-1].stddev < 0.09
    assert all(curve[-1].stddev > 0.097 for curve in (new_batches, held_back, decoupled))


def test_runs_are_repeatable_and_do_not_depend_on_those_beside_them(monkeypatch):
    # Operations that are chosen for their speed cannot be stacked.
    monkeypatch.setattr(layers, "_uses_onednn", True)
    problem = Problem("rosenbrock", 3, "coupled", 0.2, iterations=2)
    other = replace(problem, function="sphere", num_actions=20, epsilon_pi=1.0, initial_stddev=0.1)
    alone = [[i.value for i in run(problem, seed)] for seed in (0, 1)]
    beside = run_together([(problem, 0), (other, 0), (problem, 1)])
    together = [[i.value for i in curve] for curve in beside]
    assert [together[0], together[2]] == [pytest.approx(values, rel=1e-4) for values in alone]
    assert together[0] != together[1] and together[0] != together[2]
    assert layers.get_choices()["onednn"]
    with pytest.raises(ValueError, match="same fit"):
        run_together([(problem, 0), (replace(problem, fit="decoupled"), 0)])


@pytest.mark.parametrize("name", [name for name, make in FIGURES.items() if callable(make)])
def test_figures_with_their_data(name, tmp_path, monkeypatch):
    if name != "landscape":  # One is enough to test that processes share the work.
        in_a_thread = ThreadPoolExecutor(1)
        monkeypatch.setattr(improvement_plots, "ProcessPoolExecutor", lambda *_, **__: in_a_thread)
    said = []
    path = figure(name, tmp_path / "new", seeds=2, iterations=1, report=said.append)
    assert path.read_bytes().startswith(b"\x89PNG") and path.name == f"{name}.png"
    table = pd.read_csv(path.with_suffix(".csv"))
    settings = table.columns[: list(table.columns).index("seed")]
    kinds = table.groupby(list(settings), dropna=False).ngroups
    assert len(table) == kinds * 2 * 2 and len(said) == kinds  # Two seeds, two rows each.
    assert set(table["fit"]) == {"decoupled", "coupled"}


def test_without_stable_baselines_nothing_is_run(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "stable_baselines3", None)
    with pytest.raises(ValueError, match=r"SAC of stable-baselines3.*\[benchmark\]"):
        figure("gym", tmp_path / "figures", storage_path=tmp_path)
    assert not list(tmp_path.iterdir())


def test_sac_has_the_tasks_seeds_and_evaluations_of_the_sweep(tmp_path, monkeypatch):
    sweep, _ = load("gym", on_cpu=True, env=["Walker2d-v5"], seeds=2, stop={"env_steps": 1000})
    evaluation = {"min_sample_timesteps_per_iteration": 1000, "evaluation_duration": 1}

    def finish_all(sweep, directory, **how):
        for name, settings in sweep.trials().items():
            assert name == trial_name(settings, sweep.keys)  # Tune's name for the directory.
            assert (settings.algo, settings.preset, settings.config) == ("SAC", None, evaluation)
            result = {"num_env_steps_sampled_lifetime": 1000, "training_iteration": 1}
            (directory / name).mkdir(parents=True)
            (directory / name / "result.json").write_text(json.dumps(result))
        return {}

    monkeypatch.setattr(sac, "run_sweep", finish_all)
    runs, failed = sac.run_sac(sweep, tmp_path, "rllib figure gym")
    assert [(run.task, run.settings.seed) for run in runs] == [("Walker2d-v5", 0), ("Walker2d-v5", 1)]
    assert all(run.is_complete for run in runs) and not failed


def test_sac_goes_on_from_its_checkpoint(tmp_path):
    pytest.importorskip("stable_baselines3")
    how = {"min_sample_timesteps_per_iteration": 110, "evaluation_duration": 2}
    settings = asdict(RunSettings("SAC", "Pendulum-v1", config=how, seed=1))
    first, second = (sac.SACTrial({"settings": settings}) for _ in range(2))
    result = first.train()
    assert result["num_env_steps_sampled_lifetime"] == 110
    assert -4000.0 < result["evaluation"]["env_runners"]["episode_return_mean"] < 0.0
    first.save_checkpoint(str(tmp_path))
    second.load_checkpoint(str(tmp_path))
    assert second.train()["env_steps"] == 220
