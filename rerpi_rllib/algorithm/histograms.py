"""How what the results give means of is distributed over states, now and then, for trackers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.learner.learner_group import LearnerGroup
from torch import Tensor

from rerpi_rllib.core import weights
from rerpi_rllib.core.losses import sample_candidates
from rerpi_rllib.core.networks import ActorCritic
from rerpi_rllib.core.settings import LearningSettings

# The key in a result for quantiles by the name of what they are of.
HISTOGRAMS = "histograms"
NUM_STATES = 256
_NUM_QUANTILES = 65
# Tune's CSV file has a column for all that is in the first result, where these do not belong.
_SECONDS_TO_FIRST, _SECONDS_BETWEEN = 15.0, 60.0
_SECONDS_TO_ANSWER = 10.0


class Histograms:
    """Asks a learner for histograms once a minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._due = clock, clock() + _SECONDS_TO_FIRST

    def due(self, group: LearnerGroup | None) -> dict[str, list[float]]:
        """Return quantiles by name, if it is time and the learners are those of this package."""
        if group is None or self._clock() < self._due:
            return {}
        self._due = self._clock() + _SECONDS_BETWEEN
        answers = group.foreach_learner(_of_learner, timeout_seconds=_SECONDS_TO_ANSWER)
        return next((answer.get() for answer in answers if answer.ok), {})


def _of_learner(learner: Any, **kwargs: Any) -> dict[str, list[float]]:
    states = getattr(learner, "latest_states", None)
    if states is None:
        return {}
    module = learner.module[DEFAULT_MODULE_ID].unwrapped()
    return histograms(module.nets, module.settings, states)


@torch.no_grad()
def histograms(
    nets: ActorCritic, settings: LearningSettings, states: Tensor
) -> dict[str, list[float]]:
    """Return evenly spaced quantiles over states ``[B, O]``, with no effect on what is drawn later.

    They are of the policy's standard deviations and of the effective sample size of the weights, as
    far as the policy and the weighting have them.
    """
    found: dict[str, Tensor] = {}
    stddev = getattr(nets.policy(states), "stddev", None)
    if stddev is not None:
        found["policy_stddev"] = stddev
    if settings.fit != "value_gradient" and settings.weighting != "identity":
        devices = [states.device] if states.is_cuda else []
        with torch.random.fork_rng(devices):
            candidates = sample_candidates(nets, states, settings)
        values, prior = candidates.values["nonparametric"], candidates.log_prior
        if settings.weighting == "ranking":
            of_actions = weights.ranking_weights(values, settings.ranking_eta)
        else:
            temperature = weights.solve_temperature(values, settings.epsilon, prior)
            of_actions = weights.exponential_weights(values, temperature, prior)
        found["weights_ess"] = weights.effective_sample_size(of_actions)
    levels = torch.linspace(0, 1, _NUM_QUANTILES, device=states.device)
    return {
        name: [float(f"{value:.4g}") for value in values.float().flatten().quantile(levels).tolist()]
        for name, values in found.items()
    }
