"""The mathematics of the paper in torch: no Ray, no Gymnasium, no files.

``evaluation`` is Step 1, ``weights`` Step 2 and ``fitting`` Step 3. ``losses`` puts them together and
``updates`` takes the steps.
"""

from rerpi_rllib.core.evaluation import nstep_targets, retrace_targets, td_targets
from rerpi_rllib.core.fitting import (
    CoupledFit,
    DecoupledFit,
    bandit_update,
    coupled_fit,
    decoupled_fit,
)
from rerpi_rllib.core.weights import (
    exponential_weights,
    identity_weights,
    out_of_bounds_cost,
    ranking_weights,
    solve_temperature,
    temperature_dual,
)

__all__ = [
    "CoupledFit",
    "DecoupledFit",
    "bandit_update",
    "coupled_fit",
    "decoupled_fit",
    "exponential_weights",
    "identity_weights",
    "nstep_targets",
    "out_of_bounds_cost",
    "ranking_weights",
    "retrace_targets",
    "solve_temperature",
    "td_targets",
    "temperature_dual",
]
