"""The new API stack's learner, which makes several updates a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RayError
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch
from ray.rllib.utils.annotations import override

from rerpi_rllib.algorithm.effects import TO_TAKE_OWN_STEPS
from rerpi_rllib.algorithm.histograms import NUM_STATES
from rerpi_rllib.algorithm.moments import Array
from rerpi_rllib.algorithm.process import make_gradients, set_up_learning
from rerpi_rllib.algorithm.replay_shards import join
from rerpi_rllib.algorithm.rl_module import METRICS, TOTAL_LOSS, RERPITorchRLModule
from rerpi_rllib.core.losses import Batch, Metrics
from rerpi_rllib.core.optimizers import make_optimizers
from rerpi_rllib.core.peers import Peers
from rerpi_rllib.core.threads import Crew
from rerpi_rllib.core.updates import NonFiniteUpdates, run_updates

# Keys of a call's results, under which it says why its updates were undone or not made at all.
UNDONE, NO_BATCH = "undone", "no_batch"


class RERPITorchLearner(TorchLearner):
    """Critic, policy and multipliers, each with an Adam of its own.

    It takes the steps itself. Where the user changed something in RLlib's own steps (gradient
    clipping, a learner or module of their own), it leaves them to RLlib. Several learners make the
    updates that one would make with all their batches.
    """

    def __repr__(self) -> str:
        """Return the name of the actor; Ray asks for it."""
        return str(self.config.actor_name("learner"))

    @override(TorchLearner)
    def build(self) -> None:
        self._threads = set_up_learning(self.config)
        self._crew = Crew()
        self._rng = np.random.default_rng(self.config.seed)
        super().build()
        self._gradients = make_gradients(vars(self.config), self._device)
        if self.config.num_learners > 1:
            self.module[DEFAULT_MODULE_ID].unwrapped().nets.peers = Peers(self._device)
            # With the same seed, all would sample the same actions.
            torch.manual_seed(torch.initial_seed() + torch.distributed.get_rank())

    @property
    def _is_of_this_package(self) -> bool:
        """Whether neither learner nor module is the user's own, which may do something else."""
        module = self.module[DEFAULT_MODULE_ID].unwrapped()
        # In a process of its own, it is a class that Ray has derived from this one.
        classes = type(self).__mro__
        own = next(cls for cls in classes if not cls.__module__.startswith("ray."))
        return own is RERPITorchLearner and type(module) is RERPITorchRLModule

    def _how_to_step(self, config: AlgorithmConfig) -> dict[str, Any]:
        """Return the arguments of :func:`run_updates` that say who takes the steps."""
        is_own = self._is_of_this_package and all(need.holds(config) for need in TO_TAKE_OWN_STEPS)
        optimizers = dict(self.get_optimizers_for_module(DEFAULT_MODULE_ID))
        if not is_own:
            return {
                "optimizers": optimizers,
                "step": self._rllib_step,
                "ahead": self._is_of_this_package,
            }
        # Synchronous runs take the steps in turn, to be repeatable.
        side_by_side = (
            self._threads > 1
            and config.num_env_runners > 0
            and self._device.type == "cpu"
            and config.fit != "value_gradient"
            and config.num_learners < 2
        )
        return {
            "optimizers": optimizers,
            "gradients": self._gradients,
            "crew": self._crew if side_by_side else None,
        }

    def _rllib_step(self, minibatch: Batch) -> Metrics:
        outputs, _, _ = self._update({DEFAULT_MODULE_ID: minibatch})
        metrics: Metrics = outputs[DEFAULT_MODULE_ID][METRICS]
        return metrics

    @override(TorchLearner)
    def configure_optimizers_for_module(
        self, module_id: str, config: AlgorithmConfig | None = None
    ) -> None:
        module, config = self.module[module_id].unwrapped(), config or self.config
        for name, optimizer in make_optimizers(module.nets, others=module).items():
            self.register_optimizer(
                module_id=module_id,
                optimizer_name=name,
                optimizer=optimizer,
                params=optimizer.param_groups[0]["params"],
                lr_or_lr_schedule=config.dual_lr if name == "dual" else config.lr,
            )

    @override(TorchLearner)
    def compute_loss_for_module(
        self, *, module_id: str, config: Any, batch: dict[str, Any], fwd_out: dict[str, Any]
    ) -> torch.Tensor:
        loss: torch.Tensor = fwd_out[TOTAL_LOSS]
        return loss

    @override(TorchLearner)
    def _convert_batch_type(
        self, batch: Any, to_device: bool = True, pin_memory: bool = False, use_stream: bool = False
    ) -> Any:
        """Copy a batch to a GPU from pinned memory, so that nothing waits for the copy."""
        pin_memory = pin_memory or self._device.type == "cuda"
        return super()._convert_batch_type(batch, to_device, pin_memory, use_stream)

    def _fetch(self, parts: Sequence[ray.ObjectRef]) -> tuple[TrainingData, str | None]:
        """Return the batch that shards of the replay have drawn, or why it cannot be had."""
        try:
            columns = join(ray.get(list(parts)), self._rng)
        except RayError as error:
            return TrainingData(), str(error)
        rows = len(columns["rewards"])
        batch = MultiAgentBatch({DEFAULT_MODULE_ID: SampleBatch(columns)}, rows)
        return TrainingData(batch=batch), None

    @override(TorchLearner)
    def update(
        self,
        *,
        training_data: TrainingData,
        timesteps: dict[str, Any] | None = None,
        minibatch_size: int,
        observation_moments: tuple[Array, Array] | None = None,
        return_scale: float | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Make one update for every ``minibatch_size`` rows of the batch, in order.

        ``observation_moments`` are mean and standard deviation of what the run has gathered so far,
        and ``return_scale`` is the size of its returns; without them the known ones stay.

        What RLlib does around an update (metrics, schedules, iterators) is done once for all of
        them: at 256 rows it would otherwise cost a good part of the update itself.
        """
        self._check_is_built()
        training_data.validate()
        lost = None
        if training_data.batch_refs is not None:
            training_data, lost = self._fetch(training_data.batch_refs)
        module = self.module[DEFAULT_MODULE_ID].unwrapped()
        if not module.nets.peers.agree(lost is None):
            return {NO_BATCH: lost or "another learner has none"}
        self.before_gradient_based_update(timesteps=timesteps or {})
        batch = self._make_batch_if_necessary(training_data=training_data)
        self._weights_seq_no += 1
        if observation_moments is not None:
            module.nets.set_observation_moments(*map(torch.from_numpy, observation_moments))
        if return_scale is not None:
            module.nets.set_return_scale(return_scale)
        try:
            means = run_updates(
                module.nets,
                module.settings,
                batch.policy_batches[DEFAULT_MODULE_ID],
                minibatch_size,
                **self._how_to_step(self.config.get_config_for_module(DEFAULT_MODULE_ID)),
            )
        except NonFiniteUpdates as reason:  # An error would end a remote learner.
            return {UNDONE: str(reason)}
        states = batch.policy_batches[DEFAULT_MODULE_ID][Columns.OBS]
        self.latest_states = states.reshape(-1, states.shape[-1])[:NUM_STATES].clone()
        for name, mean in means.items():
            self.metrics.log_value((DEFAULT_MODULE_ID, name), mean, reduce="mean")
        self._log_steps_trained_metrics(batch)
        self.after_gradient_based_update(timesteps=timesteps or {})
        return dict(self.metrics.reduce())
