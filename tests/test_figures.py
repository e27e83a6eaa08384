"""Known functions, policy improvement on them, and the figures that show it."""

import pandas as pd
import pytest
import torch

from rerpi_rllib.figures.known_functions import FUNCTIONS
from rerpi_rllib.figures.paper import FIGURES, figure
from rerpi_rllib.figures.policy_improvement import Problem, run


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


def test_a_run_is_repeatable():
    problem = Problem("rosenbrock", 3, "coupled", 0.2, iterations=2)
    values = [[i.value for i in run(problem, seed)] for seed in (0, 0, 1)]
    assert values[0] == values[1] != values[2]


@pytest.mark.parametrize("name", [name for name, make in FIGURES.items() if callable(make)])
def test_figures_with_their_data(name, tmp_path):
    said = []
    path = figure(name, tmp_path / "new", seeds=2, iterations=1, report=said.append)
    assert path.read_bytes().startswith(b"\x89PNG") and path.name == f"{name}.png"
    table = pd.read_csv(path.with_suffix(".csv"))
    kinds = table.groupby(["function", "fit", "initial_stddev"]).ngroups
    assert len(table) == kinds * 2 * 2 and len(said) == kinds  # Two seeds, two rows each.
    assert set(table["fit"]) == {"decoupled", "coupled"}
