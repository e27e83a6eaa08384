"""Policy improvement alone, on functions with a known optimum (the paper's section 5.1).

Steps 2 and 3 are those of training, but the true function takes the place of the target critic,
random states that of the replay, and the multipliers learn in every step.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rerpi_rllib import RERPIConfig
from rerpi_rllib.core.critics import Critic
from rerpi_rllib.core.networks import ActorCritic
from rerpi_rllib.core.optimizers import make_optimizers
from rerpi_rllib.core.policies.gaussian import GaussianPolicy
from rerpi_rllib.core.settings import LearningSettings
from rerpi_rllib.core.updates import policy_step
from rerpi_rllib.figures.known_functions import FUNCTIONS


@dataclass(frozen=True)
class Problem:
    """One experiment; the defaults are the numbers that the paper gives."""

    function: str
    dimensions: int
    fit: str
    initial_stddev: float
    initial_mean: float = 0.0
    iterations: int = 300
    # The paper counts gradient steps; it does not say how often the old policy is replaced.
    steps_per_iteration: int = 20
    epsilon_mu: float = 5.0
    epsilon_sigma: float = 1e-3
    epsilon_pi: float = 0.1
    num_states: int = 100
    num_actions: int = 10
    lr: float = 1e-3


@dataclass(frozen=True)
class Iteration:
    """The policy at the start or after an iteration, over many states and at state zero."""

    value: float
    stddev: float
    mean_at_zero: Tensor
    stddev_at_zero: Tensor


class _KnownFunction(Critic):
    """Takes the place of a critic; it has nothing to learn."""

    def __init__(self, name: str) -> None:
        nn.Module.__init__(self)
        self.function = FUNCTIONS[name]

    def forward(self, observations: Tensor, actions: Tensor) -> Tensor:
        return self.function(observations, actions)


def run(problem: Problem, seed: int) -> list[Iteration]:
    """Improve a policy that starts the same in every state.

    Returns:
        The policy at the start and after every iteration.
    """
    torch.manual_seed(seed)
    defaults = RERPIConfig()
    settings = LearningSettings.from_mapping(
        vars(defaults)
        | {
            "fit": problem.fit,
            "epsilon_mu": problem.epsilon_mu,
            "epsilon_sigma": problem.epsilon_sigma,
            "epsilon_pi": problem.epsilon_pi,
            "num_action_samples": problem.num_actions,
            "multiplier_schedule": "always",
        }
    )
    size = problem.dimensions
    nets = ActorCritic(
        size,
        size,
        policy={
            "layers": (50, 50),
            "covariance_layers": None,
            "initial_stddev": problem.initial_stddev,
        },
        critic={"layers": (1,)},
        clip_actions=False,
        constraints=settings.constraints(bounded_actions=False),
    )
    assert isinstance(nets.policy, GaussianPolicy)
    nn.init.constant_(nets.policy.mean.bias, problem.initial_mean)
    function = _KnownFunction(problem.function)
    nets.critic = nets.target_critic = function
    optimizers = make_optimizers(nets, problem.lr, defaults.dual_lr)
    test_states = 4.0 * torch.rand(1000, size, generator=torch.Generator().manual_seed(0)) - 2.0

    @torch.no_grad()
    def measure() -> Iteration:
        policy, at_zero = nets.policy(test_states), nets.policy(torch.zeros(1, size))
        value = function(test_states, policy.sample(problem.num_actions)).mean()
        return Iteration(
            float(value), float(policy.stddev.mean()), at_zero.mean[0], at_zero.stddev[0]
        )

    measured = [measure()]
    for _ in range(problem.iterations):
        nets.target_policy = copy.deepcopy(nets.policy).requires_grad_(False)
        for _ in range(problem.steps_per_iteration):
            states = 4.0 * torch.rand(problem.num_states, size) - 2.0
            policy_step(nets, {"obs": states}, settings, optimizers)
        measured.append(measure())
    return measured
