"""RLlib's view of the networks: acting with the online policy, and the loss as ``forward_train``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.distribution.distribution import Distribution as RLlibDistribution
from ray.rllib.core.rl_module.apis import InferenceOnlyAPI
from ray.rllib.core.rl_module.torch import TorchRLModule
from torch import Tensor

from rerpi_rllib.algorithm.networks import act, build_networks, make_noise, usable
from rerpi_rllib.algorithm.spaces import join_parts
from rerpi_rllib.core.losses import rerpi_losses
from rerpi_rllib.core.policies import Distribution, Policy
from rerpi_rllib.core.policies.gaussian import Gaussian
from rerpi_rllib.core.settings import LearningSettings

TOTAL_LOSS = "total_loss"
METRICS = "metrics"


class ActionDistribution(RLlibDistribution):
    """A policy's distribution with RLlib's methods, for scripts that sample actions themselves.

    :meth:`of` makes the class of one policy, which is what a module hands out.
    """

    policy: Policy
    example: Distribution

    @classmethod
    @torch.no_grad()
    def of(cls, policy: Policy) -> type[ActionDistribution]:
        device = next(policy.parameters()).device
        example = policy(torch.zeros(1, policy.observation_size, device=device))
        return type(cls.__name__, (cls,), {"policy": policy, "example": example})

    def __init__(self, distribution: Distribution, greedy: bool = False) -> None:
        self.distribution, self.greedy = distribution, greedy

    @classmethod
    def from_logits(cls, logits: Tensor, **kwargs: Any) -> ActionDistribution:
        return cls(cls.example.from_inputs(logits))

    @classmethod
    def required_input_dim(cls, space: Any, **kwargs: Any) -> int:
        return cls.example.to_inputs().shape[-1]

    def to_deterministic(self) -> ActionDistribution:
        return type(self)(self.distribution, greedy=True)

    def sample(self, *, sample_shape: Any = None, **kwargs: Any) -> Tensor:
        return self.policy.decode_actions(self._draw(self.distribution.sample, sample_shape))

    def rsample(self, *, sample_shape: Any = None, **kwargs: Any) -> Tensor:
        if not self.policy.is_reparameterizable:
            raise TypeError(f"Samples of a {type(self.policy).__name__} pass no gradients on.")
        assert isinstance(self.distribution, Gaussian)
        return self._draw(self.distribution.reparameterized_sample, sample_shape)

    def _draw(self, draw: Callable[[int], Tensor], sample_shape: Any) -> Tensor:
        shape = torch.Size(sample_shape or ())
        if self.greedy:
            return self.distribution.mode.expand(*shape, *self.distribution.mode.shape)
        actions = draw(shape.numel())
        return actions.view(*shape, *actions.shape[1:])

    def logp(self, value: Tensor, **kwargs: Any) -> Tensor:
        if self.policy.is_discrete:
            value = self.policy.encode_actions(value.unsqueeze(-1))
        return self.distribution.log_prob(value.to(self.distribution.mode.dtype))

    def entropy(self, **kwargs: Any) -> Tensor:
        return self.distribution.entropy()

    def kl(self, other: RLlibDistribution, **kwargs: Any) -> Tensor:
        divergence: Tensor = other.distribution.kl(self.distribution)
        return divergence


class RERPITorchRLModule(TorchRLModule, InferenceOnlyAPI):
    """Online and target policy and critic and the Lagrange multipliers in one module.

    ``model_config`` is what :func:`~rerpi_rllib.algorithm.networks.model_settings` returns. A batch
    holds observations as vectors or, where the environment has a Dict of them, as its parts. The
    multipliers are parameters of the module, so they are checkpointed with it, and their gradients
    are averaged over several learners.
    """

    def setup(self) -> None:
        self.settings = LearningSettings(**self.model_config["learning"])
        self.nets = build_networks(
            self.observation_space, self.action_space, self.model_config, self.inference_only
        )
        self.noise = make_noise(self.nets, self.model_config)

    def get_inference_action_dist_cls(self) -> type[ActionDistribution]:
        return ActionDistribution.of(self.nets.policy)

    def get_non_inference_attributes(self) -> list[str]:
        parts = ("critic", "target_policy", "target_critic", "multipliers")
        return [f"nets.{part}" for part in (*parts, "num_updates", "return_scale")]

    def _forward_inference(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return self._act(batch, explore=False)

    def _forward_exploration(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return self._act(batch, explore=True)

    @torch.no_grad()
    def _act(self, batch: dict[str, Any], explore: bool) -> dict[str, Any]:
        observations = usable(join_parts(self.observation_space, batch[Columns.OBS]))
        if explore and self.noise is not None:
            self.noise.begin(observations)
        decoded, actions, policy = act(self.nets, observations, explore, self.noise)
        return {
            Columns.ACTIONS: decoded,
            Columns.ACTION_LOGP: policy.log_prob(actions),
            Columns.ACTION_DIST_INPUTS: policy.to_inputs(),
        }

    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        # The loss is computed here, inside the forward pass, because that is what data-parallel
        # learners synchronise gradients for.
        losses, metrics = rerpi_losses(self.nets, batch, self.settings)
        return {TOTAL_LOSS: torch.stack(list(losses.values())).sum(), METRICS: metrics}
