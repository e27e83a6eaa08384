"""The algorithm on RLlib's old API stack: a policy around the same networks and updates."""

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

from rerpi_rllib.algorithm.config import RERPIConfig, steps_per_row
from rerpi_rllib.algorithm.networks import (
    act,
    build_networks,
    make_noise,
    model_settings,
    usable,
)
from rerpi_rllib.algorithm.process import make_gradients
from rerpi_rllib.core.losses import Batch, Metrics, rerpi_losses
from rerpi_rllib.core.optimizers import make_optimizers
from rerpi_rllib.core.settings import LearningSettings
from rerpi_rllib.core.updates import run_updates


class RERPITorchModel(TorchModelV2, nn.Module):
    """Online and target networks and multipliers; its forward pass gives greedy actions."""

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        model_config: dict[str, Any],
    ) -> None:
        TorchModelV2.__init__(self, observation_space, action_space, None, model_config, "rerpi")
        nn.Module.__init__(self)
        self.nets = build_networks(observation_space, action_space, model_config)
        self.noise = make_noise(self.nets, model_config)

    def forward(
        self, input_dict: dict[str, Tensor], state: list[Tensor], seq_lens: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        return act(self.nets, input_dict[SampleBatch.OBS], explore=False)[0], state


class RERPITorchPolicy(TorchPolicyV2):
    """The counterpart of the new stack's module and learner together."""

    config: dict[str, Any]

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        config: dict[str, Any],
    ) -> None:
        settings = {**RERPIConfig().to_dict(), **config}
        self._model_config = model_settings(settings)
        self.settings = LearningSettings(**self._model_config["learning"])
        self._rows_per_update = settings["train_batch_size"] // steps_per_row(settings)
        self._metrics: Metrics = {}
        # Actions are drawn in `action_sampler_fn`; RLlib still wants to be told how.
        settings["exploration_config"] = {"type": "StochasticSampling"}
        super().__init__(observation_space, action_space, settings)
        self._gradients = make_gradients(settings, self.device)
        self.view_requirements[SampleBatch.ACTION_LOGP] = ViewRequirement(
            used_for_compute_actions=False
        )

    @override(TorchPolicyV2)
    def make_model_and_action_dist(self) -> tuple[RERPITorchModel, None]:
        return RERPITorchModel(self.observation_space, self.action_space, self._model_config), None

    @override(TorchPolicyV2)
    def optimizer(self) -> list[torch.optim.Optimizer]:
        self._optimizers_by_name = make_optimizers(
            self.model.nets, self.config["lr"], self.config["dual_lr"], others=self.model
        )
        return list(self._optimizers_by_name.values())

    @override(TorchPolicyV2)
    def action_sampler_fn(
        self, model: Any, *, obs_batch: Any, state_batches: Any, explore: bool = True, **kwargs: Any
    ) -> tuple[Tensor, Tensor, None, list[Tensor]]:
        observations = usable(obs_batch[SampleBatch.OBS])
        if explore and model.noise is not None:
            model.noise.begin(observations)
        decoded, actions, policy = act(model.nets, observations, explore, model.noise)
        return decoded, policy.log_prob(actions), None, state_batches or []

    @override(TorchPolicyV2)
    def loss(self, model: Any, dist_class: Any, train_batch: Any) -> list[Tensor]:
        """Return a loss for each optimizer, each of which moves its own parameters alone."""
        # A SampleBatch makes tensors of its columns when they are asked for, one by one.
        columns = {key: train_batch[key] for key in train_batch}
        losses, self._metrics = rerpi_losses(model.nets, columns, self.settings)
        zero = losses["critic"].new_zeros(())
        return [losses.get(name, zero) for name in self._optimizers_by_name]

    @override(TorchPolicyV2)
    def stats_fn(self, train_batch: Any) -> dict[str, float]:
        return {name: float(value) for name, value in self._metrics.items()}

    @with_lock
    @override(TorchPolicyV2)
    def learn_on_batch(self, postprocessed_batch: SampleBatch) -> dict[str, Any]:
        """Make one update for every ``train_batch_size`` steps of the batch, in order."""
        self.model.train()
        custom_metrics: dict[str, Any] = {}
        self.callbacks.on_learn_on_batch(
            policy=self, train_batch=postprocessed_batch, result=custom_metrics
        )
        columns = {
            key: torch.as_tensor(value).to(self.device, non_blocking=True)
            for key, value in postprocessed_batch.items()
        }
        nets = self.model.nets
        before = int(nets.num_updates)
        # The user's policy may have another loss, and RLlib clips gradients.
        is_own = type(self) is RERPITorchPolicy
        if is_own and self.config["grad_clip"] is None:
            how: dict[str, Any] = {
                "optimizers": self._optimizers_by_name,
                "gradients": self._gradients,
            }
        else:
            how = {
                "optimizers": self._optimizers_by_name,
                "step": self._rllib_step,
                "ahead": is_own,
            }
        means = run_updates(nets, self.settings, columns, self._rows_per_update, **how)
        self.num_grad_updates += int(nets.num_updates) - before
        return {
            LEARNER_STATS_KEY: means,
            "custom_metrics": custom_metrics,
            NUM_AGENT_STEPS_TRAINED: columns[SampleBatch.REWARDS].numel(),
        }

    def _rllib_step(self, minibatch: Batch) -> Metrics:
        losses = self.loss(self.model, None, minibatch)
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        torch.stack(losses).sum().backward()
        for optimizer in self._optimizers:
            apply_grad_clipping(self, optimizer, None)
            optimizer.step()
        return self._metrics

    @override(Policy)
    def set_state(self, state: dict[str, Any]) -> None:
        own = self.config
        super().set_state(state)
        # RLlib takes the settings of who saved the state; but an evaluation does not explore, and a
        # run may go on with another learning rate.
        self.config = own
        for name, optimizer in self._optimizers_by_name.items():
            optimizer.param_groups[0]["lr"] = own["dual_lr" if name == "dual" else "lr"]
