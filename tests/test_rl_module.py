"""The module as RLlib users expect it: action distributions, and layers of their own."""

import pickle

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import tiny_config
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.distribution.torch.torch_distribution import TorchCategorical, TorchDiagGaussian
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch

from rerpi_rllib.algorithm.rl_module import RERPITorchRLModule
from rerpi_rllib.core.policies import POLICIES

OBSERVATIONS = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
ACTIONS = {True: gym.spaces.Discrete(3), False: gym.spaces.Box(-1.0, 1.0, (3,), np.float32)}


def _module(policy):
    config = tiny_config(policy=policy)
    spec = config.get_default_rl_module_spec()
    spec.observation_space = OBSERVATIONS
    spec.action_space = ACTIONS[POLICIES[policy].is_discrete]
    spec.model_config = config.model_config
    torch.manual_seed(0)
    return spec.build()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_script_written_for_another_algorithm_samples_actions(policy):
    """Do what RLlib's own examples do with SAC or PPO."""
    module = _module(policy)
    batch = {"obs": torch.randn(5, 4)}
    outputs = module.forward_inference(batch)
    kind = module.get_inference_action_dist_cls()
    assert kind.required_input_dim(module.action_space) == outputs["action_dist_inputs"].shape[-1]
    distribution = kind.from_logits(outputs["action_dist_inputs"])
    greedy = distribution.to_deterministic().sample()
    torch.testing.assert_close(greedy, outputs["actions"])
    torch.testing.assert_close(distribution.logp(greedy), outputs["action_logp"])
    for action in greedy.numpy():
        assert module.action_space.contains(
            action if POLICIES[policy].is_discrete else np.clip(action, -1.0, 1.0)
        )
    samples = distribution.sample(sample_shape=(7, 2))
    assert samples.shape == (7, 2, *greedy.shape)
    assert torch.isfinite(distribution.logp(distribution.sample())).all()
    assert distribution.entropy().shape == (5,)
    torch.testing.assert_close(distribution.kl(distribution), torch.zeros(5), atol=1e-6, rtol=0)

    sampled = module.forward_exploration(batch)
    torch.testing.assert_close(sampled["action_dist_inputs"], outputs["action_dist_inputs"])
    torch.testing.assert_close(distribution.logp(sampled["actions"]), sampled["action_logp"])


@pytest.mark.parametrize(
    "policy,kind", [("gaussian", TorchDiagGaussian), ("categorical", TorchCategorical)]
)
def test_the_inputs_are_those_of_rllibs_own_distributions(policy, kind):
    module = _module(policy)
    outputs = module.forward_exploration({"obs": torch.randn(5, 4)})
    log_probs = kind.from_logits(outputs["action_dist_inputs"]).logp(outputs["actions"])
    torch.testing.assert_close(log_probs, outputs["action_logp"])


class _WithEncoder(RERPITorchRLModule):
    """Has a trainable layer in front of the networks of this package."""

    def setup(self):
        super().setup()
        self.encoder = torch.nn.Linear(4, 4)
        self.nets.inner = torch.nn.Linear(4, 4)

    def _forward_train(self, batch, **kwargs):
        encoded = {key: self.nets.inner(self.encoder(batch[key])) for key in ("obs", "new_obs")}
        return super()._forward_train({**batch, **encoded}, **kwargs)


@pytest.mark.usefixtures("ray_session")
def test_a_layer_of_the_users_learns():
    config = tiny_config().rl_module(rl_module_spec=RLModuleSpec(module_class=_WithEncoder))
    config.learners(num_gpus_per_learner=0)
    learner = config.build_learner(spaces={DEFAULT_MODULE_ID: (OBSERVATIONS, ACTIONS[False])})
    module = learner.module[DEFAULT_MODULE_ID].unwrapped()
    trainable = {id(p) for p in module.parameters() if p.requires_grad}
    optimized = {
        id(p)
        for _, optimizer in learner.get_optimizers_for_module(DEFAULT_MODULE_ID)
        for group in optimizer.param_groups
        for p in group["params"]
    }
    assert optimized == trainable
    before = module.encoder.weight.detach().clone()
    rng = np.random.default_rng(0)
    rows = 32 * 4
    columns = {
        "obs": rng.standard_normal((rows, 4)).astype(np.float32),
        "new_obs": rng.standard_normal((rows, 4)).astype(np.float32),
        "actions": rng.standard_normal((rows, 3)).astype(np.float32),
        "rewards": rng.standard_normal(rows).astype(np.float32),
        "terminateds": np.zeros(rows, np.float32),
        "action_logp": np.zeros(rows, np.float32),
    }
    data = MultiAgentBatch({DEFAULT_MODULE_ID: SampleBatch(columns)}, rows)
    learner.update(training_data=TrainingData(batch=data), minibatch_size=32)
    assert not torch.equal(module.encoder.weight, before)


@pytest.mark.parametrize("policy", POLICIES)
def test_samples_with_gradients_and_copies_of_a_module(policy):
    module = pickle.loads(pickle.dumps(_module(policy)))
    inputs = module.forward_inference({"obs": torch.randn(5, 4)})["action_dist_inputs"]
    distribution = module.get_train_action_dist_cls().from_logits(inputs.requires_grad_())
    if not POLICIES[policy].is_reparameterizable:
        with pytest.raises(TypeError, match="gradients"):
            distribution.rsample()
    else:
        assert distribution.rsample(sample_shape=(2,)).requires_grad
