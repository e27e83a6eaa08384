"""Policy improvement alone, on functions with a known optimum (the paper's section 5.1).

Steps 2 and 3 are those of training, but the true function takes the place of the target critic,
random states that of the replay, and the multipliers learn in every step. The networks are tiny, so
that an experiment's repetitions and variants are stacked and learn together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state

from rerpi_rllib import RERPIConfig
from rerpi_rllib.core import layers
from rerpi_rllib.core.constraints import Constraint
from rerpi_rllib.core.fitting import fit_policy
from rerpi_rllib.core.multipliers import Multiplier
from rerpi_rllib.core.optimizers import make_dual_optimizer, make_optimizer
from rerpi_rllib.core.policies import PolicySettings
from rerpi_rllib.core.policies.gaussian import DiagonalGaussian, GaussianPolicy
from rerpi_rllib.core.settings import LearningSettings
from rerpi_rllib.core.weights import exponential_weights, solve_temperature
from rerpi_rllib.figures.known_functions import FUNCTIONS


@dataclass(frozen=True)
class Problem:
    """One experiment; the defaults are the numbers that the paper gives.

    Args:
        steps_per_iteration: gradient steps between two copies of the old policy. The paper counts
            gradient steps; it does not say how often the old policy is replaced.
        batches_per_iteration: the steps of an iteration go through so many batches of states and
            sampled actions in turn. With 1 they all fit the same actions.
    """

    function: str
    dimensions: int
    fit: str
    initial_stddev: float
    initial_mean: float = 0.0
    iterations: int = 300
    steps_per_iteration: int = 20
    batches_per_iteration: int = 20
    epsilon: float = 0.1
    epsilon_mu: float = 5.0
    epsilon_sigma: float = 1e-3
    epsilon_pi: float = 0.1
    num_states: int = 100
    num_actions: int = 10
    lr: float = 1e-3

    def can_be_stacked_with(self, other: Problem) -> bool:
        """Tell whether Step 3 is the same function for both, and done as often."""
        return self == replace(
            other,
            function=self.function,
            initial_stddev=self.initial_stddev,
            initial_mean=self.initial_mean,
            epsilon=self.epsilon,
            epsilon_mu=self.epsilon_mu,
            epsilon_sigma=self.epsilon_sigma,
            epsilon_pi=self.epsilon_pi,
            num_actions=self.num_actions,
        )

    def description(self) -> str:
        """Say what distinguishes this problem."""
        bound = f" with epsilon_pi {self.epsilon_pi:g}" if self.fit == "coupled" else ""
        return (
            f"{self.function} {self.dimensions}-D, {self.fit}{bound}, initial stddev "
            f"{self.initial_stddev:g}, {self.num_actions} actions, {self.steps_per_iteration} steps "
            f"on {self.batches_per_iteration} batch(es)"
        )

    def constraints(self) -> list[Constraint]:
        """Return the bounds on how far the policy moves."""
        settings = LearningSettings.from_mapping(
            vars(RERPIConfig())
            | {
                "fit": self.fit,
                "epsilon_mu": self.epsilon_mu,
                "epsilon_sigma": self.epsilon_sigma,
                "epsilon_pi": self.epsilon_pi,
            }
        )
        constraints = settings.constraints(bounded_actions=False)
        return [constraint for constraint in constraints if constraint.is_trust_region]


@dataclass(frozen=True)
class Iteration:
    """The policy at the start or after an iteration, over many states and at state zero."""

    value: float
    stddev: float
    mean_at_zero: Tensor
    stddev_at_zero: Tensor


@dataclass
class _Member:
    """One of the runs that learn together, and its random numbers, which do not depend on others."""

    problem: Problem
    seed: int

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)

    def new_policy(self) -> GaussianPolicy:
        size = self.problem.dimensions
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            policy = GaussianPolicy(
                size,
                size,
                PolicySettings(
                    layers=(50, 50),
                    covariance_layers=None,
                    initial_stddev=self.problem.initial_stddev,
                ),
            )
        nn.init.constant_(policy.mean.bias, self.problem.initial_mean)
        return policy

    def states(self) -> Tensor:
        problem = self.problem
        number = problem.batches_per_iteration * problem.num_states
        return 4.0 * torch.rand(number, problem.dimensions, generator=self.random) - 2.0

    def weighted_actions(self, states: Tensor, target: DiagonalGaussian) -> tuple[Tensor, ...]:
        """Do Step 2 at all states of an iteration and summarise the result."""
        shape = (self.problem.num_actions, *states.shape)
        actions = target.displaced(torch.randn(shape, generator=self.random))
        q_values = FUNCTIONS[self.problem.function](states, actions)
        temperature = solve_temperature(q_values, self.problem.epsilon)
        return target.summarise(actions, exponential_weights(q_values, temperature))


@contextmanager
def _torchs_own_operations() -> Iterator[None]:
    """Keep layers from choosing faster operations, which cannot be stacked."""
    choices = layers.get_choices()
    layers.set_choices(dict.fromkeys(choices, False))
    try:
        yield
    finally:
        layers.set_choices(choices)


def run(problem: Problem, seed: int) -> list[Iteration]:
    """Improve a policy that starts the same in every state.

    Returns:
        The policy at the start and after every iteration.
    """
    return run_together([(problem, seed)])[0]


@_torchs_own_operations()
def run_together(runs: Sequence[tuple[Problem, int]]) -> list[list[Iteration]]:
    """Do what :func:`run` does for several problems with their seeds at the same time.

    Args:
        runs: problems that can be stacked, each with a seed.
    """
    problem, _ = runs[0]
    if not all(problem.can_be_stacked_with(other) for other, _ in runs):
        raise ValueError("Only problems with the same fit, steps and states can be run together.")
    members = [_Member(*one) for one in runs]
    policies = [member.new_policy() for member in members]
    parameters, _ = stack_module_state(list[nn.Module](policies))

    def of_one(parameters: dict[str, Tensor], states: Tensor) -> tuple[Tensor, Tensor]:
        policy = functional_call(policies[0], parameters, (states,))
        return policy.mean, policy.stddev

    all_of_them: Any = torch.func.vmap(of_one)

    def evaluate(states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the means and standard deviations of all policies, as constants."""
        # Without gradients the networks would work in place, which cannot be stacked.
        mean, stddev = all_of_them(parameters, states)
        return mean.detach(), stddev.detach()

    # Each member has its own bounds, which are added outside of the function that is for all of them.
    unbounded = [replace(constraint, epsilon=0.0) for constraint in problem.constraints()]
    bounds = torch.tensor([[c.epsilon for c in m.problem.constraints()] for m in members])
    multipliers = nn.ModuleList(
        Multiplier(minimum=constraint.minimum, size=len(members)) for constraint in unbounded
    )

    def loss_of_one(
        parameters: dict[str, Tensor],
        alphas: Tensor,
        states: Tensor,
        target: Sequence[Tensor],
        summary: Sequence[Tensor],
    ) -> Tensor:
        """Do Step 3; the bounds' share of the multipliers' losses is missing."""
        fit = fit_policy(
            problem.fit,
            DiagonalGaussian(*of_one(parameters, states)),
            DiagonalGaussian(*target),
            summary,
            list(zip(unbounded, alphas)),
        )
        return torch.stack([fit.scaled_loss, *fit.dual_losses.values()]).sum()

    losses: Any = torch.func.vmap(loss_of_one)
    optimizers = [make_optimizer(parameters.values(), problem.lr)]
    if len(multipliers):
        optimizers.append(make_dual_optimizer(multipliers.parameters(), RERPIConfig().dual_lr))
    leaves = [*parameters.values(), *multipliers.parameters()]

    size = problem.dimensions
    test_states = 4.0 * torch.rand(1000, size, generator=torch.Generator().manual_seed(0)) - 2.0
    test_states = torch.cat([test_states, torch.zeros(1, size)]).expand(len(members), -1, -1)
    measured: list[list[Iteration]] = [[] for _ in members]

    def measure() -> None:
        for member, mean, stddev, curve in zip(members, *evaluate(test_states), measured):
            policy, states = DiagonalGaussian(mean[:-1], stddev[:-1]), test_states[0, :-1]
            noise = torch.randn(member.problem.num_actions, *states.shape, generator=member.random)
            value = FUNCTIONS[member.problem.function](states, policy.displaced(noise)).mean()
            curve.append(Iteration(float(value), float(policy.stddev.mean()), mean[-1], stddev[-1]))

    measure()
    for _ in range(problem.iterations):
        states = torch.stack([member.states() for member in members])
        target = evaluate(states)
        summaries = [
            member.weighted_actions(*one)
            for member, *one in zip(members, states, map(DiagonalGaussian, *target))
        ]
        columns = (states, *target, *map(torch.stack, zip(*summaries)))
        batches = list(zip(*(column.split(problem.num_states, dim=1) for column in columns)))
        for number in range(problem.steps_per_iteration):
            batch, mean, stddev, *summary = batches[number % len(batches)]
            values = [multiplier() for multiplier in multipliers]
            alphas = torch.stack(values, dim=1) if values else bounds
            loss = losses(parameters, alphas, batch, (mean, stddev), tuple(summary)).sum()
            loss = loss + (alphas * bounds).sum()
            for leaf, gradient in zip(leaves, torch.autograd.grad(loss, leaves)):
                # The fused optimizer goes by the order in memory.
                leaf.grad = gradient.contiguous()
            for optimizer in optimizers:
                optimizer.step()
        measure()
    return measured
