"""The same algorithm on RLlib's old API stack: a policy around the same networks and loss."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import torch
from ray.rllib.models.torch.torch_modelv2 import TorchModelV2
from ray.rllib.policy.policy import Policy
from ray.rllib.policy.sample_batch import SampleBatch
from ray.rllib.policy.torch_policy_v2 import TorchPolicyV2
from ray.rllib.policy.view_requirement import ViewRequirement
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics import NUM_AGENT_STEPS_TRAINED
from ray.rllib.utils.metrics.learner_info import LEARNER_STATS_KEY
from ray.rllib.utils.threading import with_lock
from ray.rllib.utils.torch_utils import apply_grad_clipping
from torch import Tensor, nn

from rerpi_rllib.algorithm.config import RERPIConfig, model_settings, steps_per_row
from rerpi_rllib.algorithm.rl_module import act, build_networks
from rerpi_rllib.algorithm.updates import (
    Updates,
    keep_freed_memory,
    make_optimizers,
    preparation,
)
from rerpi_rllib.core.losses import LossSettings, rerpi_losses

_NUM_UPDATES = "num_updates"


class RERPITorchModel(TorchModelV2, nn.Module):
    """Online and target networks and multipliers; called, it gives greedy actions."""

    def __init__(
        self, observation_space: gym.Space, action_space: gym.Space, model_config: dict[str, Any]
    ) -> None:
        TorchModelV2.__init__(self, observation_space, action_space, None, model_config, "rerpi")
        nn.Module.__init__(self)
        self.nets = build_networks(observation_space, action_space, model_config)

    def forward(self, input_dict: dict[str, Tensor], state: list, seq_lens: Tensor):
        return act(self.nets, input_dict[SampleBatch.OBS], explore=False)[0], state


class RERPITorchPolicy(TorchPolicyV2):
    """What the module and the learner of the new stack are together."""

    config: dict[str, Any]

    def __init__(
        self, observation_space: gym.Space, action_space: gym.Space, config: dict[str, Any]
    ) -> None:
        given = {**RERPIConfig().to_dict(), **config}
        self._model_config = model_settings(given)
        self.settings = LossSettings(**self._model_config["loss"])
        self._rows_per_update = given["train_batch_size"] // steps_per_row(given)
        self._updates = Updates(given["target_update_period"], given["policy_update_period"])
        self._metrics: dict[str, Tensor] = {}
        # Actions are drawn in `action_sampler_fn`; RLlib still wants to be told how.
        given["exploration_config"] = {"type": "StochasticSampling"}
        super().__init__(observation_space, action_space, given)
        self.view_requirements[SampleBatch.ACTION_LOGP] = ViewRequirement(
            used_for_compute_actions=False
        )
        keep_freed_memory()

    @override(TorchPolicyV2)
    def make_model_and_action_dist(self):
        return RERPITorchModel(self.observation_space, self.action_space, self._model_config), None

    @override(TorchPolicyV2)
    def optimizer(self) -> list[torch.optim.Optimizer]:
        found = make_optimizers(self.model.nets, self.config["lr"], self.config["dual_lr"])
        self._optimizer_names = list(found)
        return list(found.values())

    @override(TorchPolicyV2)
    def action_sampler_fn(
        self, model, *, obs_batch, state_batches, explore: bool = True, **kwargs: Any
    ):
        actions, log_probs = act(model.nets, obs_batch[SampleBatch.OBS], explore=explore)
        return actions, log_probs, None, state_batches or []

    @override(TorchPolicyV2)
    def loss(
        self,
        model,
        dist_class,
        train_batch,
        improve_policy: bool = True,
        move_multipliers: bool = True,
    ) -> list[Tensor]:
        """A loss for each optimizer, each of which moves its own parameters alone."""
        # A SampleBatch makes tensors of its columns when they are asked for, one by one.
        columns = {key: train_batch[key] for key in train_batch}
        losses, self._metrics = rerpi_losses(
            model.nets, columns, self.settings, improve_policy, move_multipliers
        )
        zero = losses["critic"].new_zeros(())
        return [losses.get(name, zero) for name in self._optimizer_names]

    @override(TorchPolicyV2)
    def stats_fn(self, train_batch) -> dict[str, float]:
        return {name: float(value) for name, value in self._metrics.items()}

    @with_lock
    @override(TorchPolicyV2)
    def learn_on_batch(self, postprocessed_batch: SampleBatch) -> dict[str, Any]:
        """One update for every ``train_batch_size`` steps of the batch, in order."""
        self.model.train()
        custom_metrics: dict[str, Any] = {}
        self.callbacks.on_learn_on_batch(
            policy=self, train_batch=postprocessed_batch, result=custom_metrics
        )
        columns = {
            key: torch.as_tensor(value).to(self.device, non_blocking=True)
            for key, value in postprocessed_batch.items()
        }
        before = self._updates.count
        nets = self.model.nets
        means = self._updates.run(
            nets,
            columns,
            self._rows_per_update,
            self._update,
            # A user's policy may have another loss.
            prepare=preparation(nets, self.settings) if type(self) is RERPITorchPolicy else None,
        )
        self.num_grad_updates += self._updates.count - before
        return {
            LEARNER_STATS_KEY: means,
            "custom_metrics": custom_metrics,
            NUM_AGENT_STEPS_TRAINED: columns[SampleBatch.REWARDS].numel(),
        }

    def _update(
        self, minibatch: dict[str, Tensor], improve_policy: bool, move_multipliers: bool
    ) -> dict[str, Tensor]:
        losses = self.loss(self.model, None, minibatch, improve_policy, move_multipliers)
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        torch.stack(losses).sum().backward()
        for optimizer in self._optimizers:
            apply_grad_clipping(self, optimizer, None)
            optimizer.step()
        return self._metrics

    @override(TorchPolicyV2)
    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), _NUM_UPDATES: self._updates.count}

    @override(Policy)
    def set_state(self, state: dict[str, Any]) -> None:
        own = self.config
        super().set_state(state)
        # RLlib takes the settings of who saved the state; but an evaluation does not explore, and a
        # run may go on with another learning rate.
        self.config = own
        for name, optimizer in zip(self._optimizer_names, self._optimizers):
            optimizer.param_groups[0]["lr"] = own["dual_lr" if name == "dual" else "lr"]
        self._updates.count = state.get(_NUM_UPDATES, self._updates.count)
