"""A constraint is defined by one value, from which everything else follows."""

from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import tiny_config

from rerpi_rllib import RERPIConfig
from rerpi_rllib.algorithm.networks import build_networks
from rerpi_rllib.core.constraints import Constraint
from rerpi_rllib.core.fitting import fit_policy
from rerpi_rllib.core.policies import POLICIES, Part
from rerpi_rllib.core.policies.gaussian import DiagonalGaussian, GaussianPolicy
from rerpi_rllib.core.settings import LearningSettings

BOX = gym.spaces.Box(-1.0, 1.0, (3,))
UNBOUNDED = gym.spaces.Box(-np.inf, np.inf, (3,))


def _config(**settings):
    return RERPIConfig().environment("Pendulum-v1").update_from_dict(settings)


@pytest.mark.parametrize(
    "settings,expected",
    [
        ({}, ["alpha_mu", "alpha_sigma", "temperature"]),
        ({"fit": "coupled"}, ["alpha_pi", "temperature"]),
        ({"fit": "unconstrained"}, ["temperature"]),
        ({"fit": "value_gradient"}, []),
        ({"policy": "mixture"}, ["alpha_mu", "alpha_sigma", "alpha_mixture", "temperature"]),
        ({"policy": "categorical", "epsilon_penalty": 1e-3}, ["alpha_pi", "temperature"]),
        ({"policy": "deterministic"}, ["alpha_mu", "temperature"]),
        (
            {"weighting": "ranking", "epsilon_penalty": 1e-3},
            ["alpha_mu", "alpha_sigma", "penalty_temperature"],
        ),
    ],
    ids=str,
)
def test_constraints_of_a_configuration(settings, expected):
    constraints = _config(**settings).constraints
    assert [constraint.multiplier for constraint in constraints] == expected
    assert len({constraint.kl for constraint in constraints}) == len(constraints)
    assert all(constraint.epsilon > 0.0 and constraint.label for constraint in constraints)


@pytest.mark.parametrize("space", [BOX, UNBOUNDED], ids=["bounded", "unbounded"])
def test_a_multiplier_is_learned_where_its_constraint_is(space):
    """Otherwise data-parallel learners would wait for a gradient that never comes."""
    config = _config(temperature_solver="adam", epsilon_penalty=1e-3)
    nets = build_networks(BOX, space, config.model_config)
    assert ("penalty_temperature" in nets.multipliers) == (space is BOX)
    assert {"alpha_mu", "alpha_sigma", "temperature"} <= set(nets.multipliers)


def _gradients(nets, alpha_mu, alpha_sigma):
    """Return the gradients of the policy's parameters by name, for these multipliers."""
    torch.manual_seed(1)
    states, target = torch.randn(16, 3), DiagonalGaussian(torch.zeros(16, 3), torch.ones(16, 3))
    actions, weights = target.sample(20), torch.rand(20, 16)
    constraints = [
        (Constraint("mu", "mean", 1e-2, "alpha_mu"), alpha_mu),
        (Constraint("sigma", "covariance", 1e-3, "alpha_sigma"), alpha_sigma),
    ]
    summary = target.summarise(actions, weights)
    fit = fit_policy("decoupled", nets.policy(states), target, summary, constraints)
    nets.zero_grad()
    fit.scaled_loss.backward()
    return {name: p.grad.clone() for name, p in nets.policy.named_parameters()}


def test_neither_multiplier_sets_the_other_parts_steps():
    nets = build_networks(BOX, BOX, _config().model_config)
    before = _gradients(nets, 1.0, 1.0)
    after = _gradients(nets, 1.0, 100.0)
    for name, gradient in before.items():
        same = torch.equal(gradient, after[name])
        assert same == (name.startswith("body") or name.startswith("mean")), name
    after = _gradients(nets, 100.0, 1.0)
    for name, gradient in before.items():
        same = torch.equal(gradient, after[name])
        assert same == (name.startswith("covariance") or name.startswith("stddev")), name


def test_one_network_for_all_parts_is_still_to_be_had():
    shared = build_networks(BOX, BOX, _config(covariance_layers=None).model_config)
    assert not [name for name, _ in shared.policy.named_parameters() if "covariance" in name]


# -- A user's own distribution needs one class; everything else follows. --


@dataclass(frozen=True)
class Tilted(DiagonalGaussian):
    """A Gaussian that uses another name for its covariance."""

    def hybrids(self, target):
        hybrids = super().hybrids(target)
        return {"mu": hybrids["mu"], "tilt": hybrids["sigma"]}

    def part_kls(self, target):
        kls = super().part_kls(target)
        return {"mu": kls["mu"], "tilt": kls["sigma"]}


class TiltedPolicy(GaussianPolicy):
    PARTS = (GaussianPolicy.PARTS[0], Part("tilt", "tilt of the robot", 3e-4, per_dimension=True))

    def forward(self, observations):
        mean, stddev, _ = self.parameters_at(observations)
        return Tilted(mean, stddev)


@pytest.mark.usefixtures("ray_session")
def test_a_new_distribution_is_one_class(monkeypatch):
    monkeypatch.setitem(POLICIES, "tilted", TiltedPolicy)
    config = tiny_config(policy="tilted", epsilon_tilt=2e-4)
    assert [(c.label, c.epsilon) for c in config.constraints][1] == ("tilt of the robot", 2e-4)
    algo = config.build_algo()
    try:
        result = algo.train()["learners"]["default_policy"]
    finally:
        algo.stop()
    assert {"kl_tilt", "kl_tilt_at_target_update", "alpha_tilt"} <= set(result)
    with pytest.raises(ValueError, match="epsilon_tilt=-3"):
        tiny_config(policy="tilted", epsilon_tilt=-3).validate()


def test_settings_of_the_core_are_those_of_the_configuration():
    config = _config(epsilon_mu=0.3, multiplier_schedule="always")
    settings = LearningSettings(**config.model_config["learning"])
    assert settings.bounds["mu"] == 0.3 and settings.constraints()[0].schedule == "always"


def test_bounds_of_each_dimension_have_a_scale_of_their_own():
    mean = torch.zeros(16, 2, requires_grad=True)
    target = DiagonalGaussian(torch.zeros(16, 2), torch.ones(16, 2))
    torch.manual_seed(0)
    actions, weights = target.sample(20), torch.rand(20, 16)
    gradients = []
    for other in (1.0, 100.0):
        constraints = [
            (Constraint(part, part, 1e-2, part, per_dimension=True), torch.tensor([1.0, other]))
            for part in ("mu", "sigma")
        ]
        online = DiagonalGaussian(mean, torch.ones(16, 2))
        summary = target.summarise(actions, weights)
        fit = fit_policy("decoupled", online, target, summary, constraints)
        gradients.append(torch.autograd.grad(fit.scaled_loss, mean)[0])
    assert torch.equal(gradients[0][:, 0], gradients[1][:, 0])
    assert not torch.equal(gradients[0][:, 1], gradients[1][:, 1])
