"""The mathematics of the paper in torch: no Ray, no Gymnasium, no files.

``weights`` is Step 2, ``fitting`` Step 3, ``evaluation`` Step 1; ``losses`` puts them together.
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
