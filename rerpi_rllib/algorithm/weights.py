"""How new weights of the policy reach the EnvRunners: as one object that all of them refer to."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.rllib.core import COMPONENT_RL_MODULE
from ray.rllib.core.learner.learner import Learner
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.utils.metrics import WEIGHTS_SEQ_NO

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Weights:
    """The weights at one moment.

    They are sent with requests that are made anyway, and an EnvRunner fetches them if it has not done
    so: a message of their own to each EnvRunner would be most of the work of a large run.

    Args:
        number: a higher one than that of older weights.
        reference: the state for :meth:`EnvRunner.set_state`.
    """

    number: int
    reference: Any

    @classmethod
    def of(cls, group: LearnerGroup) -> Weights:
        """Take the newest ones; those of learners in other processes stay where they are."""
        if group.is_local:
            (result,) = group.foreach_learner(_state)
            return cls(time.monotonic_ns(), ray.put(result.get()))
        (result,) = group.foreach_learner(
            _state,
            remote_actor_ids=group._worker_manager.healthy_actor_ids()[:1],
            return_obj_refs=True,
        )
        return cls(time.monotonic_ns(), result.get())

    def give_to(self, env_runner: EnvRunner) -> None:
        """Let an EnvRunner take them, unless it has them."""
        if getattr(env_runner, "weights_number", 0) < self.number:
            try:
                state = ray.get(self.reference)
            except RayError as error:  # The learner was lost with them; there will be others.
                logger.warning("New weights were lost: %s", error)
                return
            env_runner.set_state(state)
            env_runner.weights_number = self.number


def _state(learner: Learner) -> dict[str, Any]:
    state = learner.get_state(components=COMPONENT_RL_MODULE, inference_only=True)
    return {key: state[key] for key in (COMPONENT_RL_MODULE, WEIGHTS_SEQ_NO)}
