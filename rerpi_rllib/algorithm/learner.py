"""The new API stack's learner: several updates a call."""

from __future__ import annotations

import os
from typing import Any

import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.utils.annotations import override

from rerpi_rllib.algorithm.rl_module import METRICS, TOTAL_LOSS, RERPITorchRLModule
from rerpi_rllib.algorithm.updates import (
    Updates,
    keep_freed_memory,
    make_optimizers,
    preparation,
    steps_apart,
)
from rerpi_rllib.core.parallel import set_threads

NUM_UPDATES = "num_updates"


def learner_threads(config: AlgorithmConfig) -> int:
    """As many threads as RLlib reserves CPUs for the learner.

    EnvRunners that are held to a ratio of updates to steps mostly wait for the learner, so a learner
    in the main process takes their CPUs too, as far as this machine has them.
    """
    cpus = config.num_cpus_per_learner if config.num_cpus_per_learner != "auto" else 1
    if config.num_learners == 0:
        cpus = max(cpus, config.num_cpus_for_main_process)
        if config.updates_per_env_step is not None:
            cpus += config.num_env_runners * config.num_cpus_per_env_runner
    return max(1, min(int(cpus), _cpus_here()))


def _cpus_here() -> int:
    """CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class RERPITorchLearner(TorchLearner):
    """Critic, policy and multipliers, each with an Adam of its own."""

    @override(TorchLearner)
    def build(self) -> None:
        self._threads = learner_threads(self.config)
        set_threads(self._threads)
        keep_freed_memory()
        self._updates = Updates(self.config.target_update_period, self.config.policy_update_period)
        super().build()

    @property
    def _is_of_this_package(self) -> bool:
        """Whether learner and module are as they are here: a user's may do something else."""
        module = self.module[DEFAULT_MODULE_ID].unwrapped()
        return type(self) is RERPITorchLearner and type(module) is RERPITorchRLModule

    @property
    def _takes_policy_steps_beside(self) -> bool:
        """Whether critic and policy learn at the same time, in two threads, without RLlib's steps.

        Not in synchronous runs, and not where the user changed something in those steps.
        """
        config = self.config.get_config_for_module(DEFAULT_MODULE_ID)
        return (
            self._threads > 1
            and self._is_of_this_package
            and config.num_env_runners > 0
            and config.num_learners <= 1
            and self._device.type == "cpu"
            and config.fit != "value_gradient"
            and config.grad_clip is None
            and config.torch_skip_nan_gradients
            and not config.log_gradients
            and not config.torch_compile_learner
            and config._torch_grad_scaler_class is None
            and config._torch_lr_scheduler_classes is None
        )

    @override(TorchLearner)
    def configure_optimizers_for_module(self, module_id: str, config=None) -> None:
        nets = self.module[module_id].unwrapped().nets
        for name, optimizer in make_optimizers(nets).items():
            self.register_optimizer(
                module_id=module_id,
                optimizer_name=name,
                optimizer=optimizer,
                params=optimizer.param_groups[0]["params"],
                lr_or_lr_schedule=config.dual_lr if name == "dual" else config.lr,
            )

    @override(TorchLearner)
    def compute_loss_for_module(self, *, module_id, config, batch, fwd_out) -> torch.Tensor:
        return fwd_out[TOTAL_LOSS]

    @override(TorchLearner)
    def update(
        self,
        *,
        training_data: TrainingData,
        timesteps: dict[str, Any] | None = None,
        minibatch_size: int,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """One update for every ``minibatch_size`` rows of the batch, in order.

        What RLlib does around an update (metrics, schedules, iterators) is done once for all of
        them: at 256 rows it would otherwise cost a good part of the update itself.
        """
        self._check_is_built()
        self.before_gradient_based_update(timesteps=timesteps or {})
        training_data.validate()
        training_data.solve_refs()
        batch = self._make_batch_if_necessary(training_data=training_data)
        self._weights_seq_no += 1
        module = self.module[DEFAULT_MODULE_ID].unwrapped()

        def update(minibatch, improve_policy: bool, move_multipliers: bool):
            module.improve_policy, module.move_multipliers = improve_policy, move_multipliers
            fwd_out, _, _ = self._update({DEFAULT_MODULE_ID: minibatch})
            return fwd_out[DEFAULT_MODULE_ID][METRICS]

        steps: dict[str, Any] = {"update": update}
        if self._is_of_this_package:
            steps["prepare"] = preparation(module.nets, module.settings)
        if self._takes_policy_steps_beside:
            optimizers = dict(self.get_optimizers_for_module(DEFAULT_MODULE_ID))
            steps = steps_apart(module.nets, module.settings, optimizers)
        columns = batch.policy_batches[DEFAULT_MODULE_ID]
        means = self._updates.run(module.nets, columns, minibatch_size, **steps)
        for name, mean in means.items():
            self.metrics.log_value((DEFAULT_MODULE_ID, name), mean, reduce="mean")
        self._log_steps_trained_metrics(batch)
        self.after_gradient_based_update(timesteps=timesteps or {})
        return self.metrics.reduce()

    @override(TorchLearner)
    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**super().get_state(*args, **kwargs), NUM_UPDATES: self._updates.count}

    @override(TorchLearner)
    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self._updates.count = state.get(NUM_UPDATES, self._updates.count)
