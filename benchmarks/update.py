"""One learner update of this package's core, compared with four peers in one run, in turn.

The peers are a JAX learner (``jax_learner.py``), a textbook version in torch, the time of the matrix
products alone at the fastest rate that torch offers on this machine, and the core inside RLlib's
Learner. The first two run in processes of their own.

The textbook version is the paper's update as one would first write it in torch: state and sampled
action are concatenated for the critic, ``torch.distributions`` computes densities and KLs, and each
loss has an optimizer and a backward pass of its own. It has the C library's default memory
management, which the core changes for its whole process. The operators of an update are counted, too.

python benchmarks/update.py [--json]
"""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import statistics
from collections.abc import Callable
from typing import Any

import common
import gymnasium as gym
import numpy as np
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch
from torch import nn
from torch.distributions import Independent, Normal, kl_divergence
from torch.utils._python_dispatch import TorchDispatchMode

from rerpi_rllib import RERPIConfig
from rerpi_rllib.algorithm.networks import build_networks
from rerpi_rllib.algorithm.process import (
    compile_sampled_values,
    give_way,
    keep_freed_memory,
)
from rerpi_rllib.core.gradients import Gradients
from rerpi_rllib.core.layers import _onednn_product, choose_fastest
from rerpi_rllib.core.networks import ActorCritic
from rerpi_rllib.core.optimizers import make_optimizers
from rerpi_rllib.core.settings import LearningSettings
from rerpi_rllib.core.threads import Crew, set_threads
from rerpi_rllib.core.updates import run_updates

# Observations, action dimensions, batch, policy layers, critic layers, kind of network. The residual
# networks are those of the preset `compact`.
SIZES = (
    (17, 6, 128, (128,) * 2, (256,) * 2, "paper"),
    (17, 6, 256, (200,) * 3, (500,) * 3, "paper"),
    (67, 21, 256, (200,) * 3, (500,) * 3, "paper"),
    (67, 21, 3072, (200,) * 3, (500,) * 3, "paper"),
    (17, 6, 256, (256,) * 2, (256,) * 2, "paper"),
    (17, 6, 128, (64,) * 2, (128,) * 2, "residual"),
)
ACTIONS, ROUNDS = 20, 7
THREADS = 2  # The same for all.
PEERS = {
    "jax": "a JAX learner in Acme's style",
    "textbook": "the textbook version",
    "limit": "its matrix products alone",
    "learner": "with RLlib's Learner around it",
}


class Block(nn.Module):
    """A residual block of the textbook version."""

    def __init__(self, size: int) -> None:
        super().__init__()
        layers = nn.LayerNorm(size), nn.Linear(size, 2 * size), nn.ReLU(), nn.Linear(2 * size, size)
        self.layers = nn.Sequential(*layers)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.layers(inputs)


class Textbook:
    """The update, written without regard to speed."""

    def __init__(
        self, observations: int, actions: int, policy: tuple, critic: tuple, network: str
    ) -> None:
        def body(inputs: int, sizes: tuple) -> list[nn.Module]:
            if network == "residual":
                first = nn.Linear(inputs, sizes[0])
                return [first, *map(Block, sizes), nn.LayerNorm(sizes[0])]
            layers: list[nn.Module] = [nn.Linear(inputs, sizes[0]), nn.LayerNorm(sizes[0]), nn.Tanh()]
            for before, after in itertools.pairwise(sizes):
                layers += [nn.Linear(before, after), nn.ELU()]
            return layers

        self.policy = nn.Sequential(*body(observations, policy), nn.Linear(policy[-1], 2 * actions))
        self.critic = nn.Sequential(*body(observations + actions, critic), nn.Linear(critic[-1], 1))
        self.target_policy, self.target_critic = (
            copy.deepcopy(self.policy),
            copy.deepcopy(self.critic),
        )
        self.log_temperature = torch.zeros((), requires_grad=True)
        self.log_alphas = torch.zeros(2, requires_grad=True)
        self.policy_optimizer = torch.optim.Adam(self.policy.parameters(), lr=3e-4)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=3e-4)
        self.dual_optimizer = torch.optim.Adam([self.log_temperature, self.log_alphas], lr=1e-2)

    def _distribution(self, network: nn.Module, obs: torch.Tensor) -> Independent:
        mean, stddev = network(obs).chunk(2, dim=-1)
        return Independent(Normal(mean, nn.functional.softplus(stddev) + 1e-4), 1)

    def update(self, batch: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            next_policy = self._distribution(self.target_policy, batch["new_obs"])
            inputs = torch.cat([batch["new_obs"], next_policy.sample().clamp(-1, 1)], -1)
            next_q = self.target_critic(inputs).squeeze(-1)
            targets = batch["rewards"] + 0.99 * (1.0 - batch["terminateds"]) * next_q
        inputs = torch.cat([batch["obs"], batch["actions"].clamp(-1, 1)], -1)
        critic_loss = (self.critic(inputs).squeeze(-1) - targets).square().mean()
        self.critic_optimizer.zero_grad()
        critic_loss.backward()
        self.critic_optimizer.step()

        with torch.no_grad():
            target = self._distribution(self.target_policy, batch["obs"])
            actions = target.sample((ACTIONS,))
            states = batch["obs"].expand(ACTIONS, -1, -1)
            q = self.target_critic(torch.cat([states, actions.clamp(-1, 1)], -1)).squeeze(-1)
        temperature = nn.functional.softplus(self.log_temperature)
        weights = torch.softmax(q / temperature.detach(), 0)
        log_mean_exp = torch.logsumexp(q / temperature, 0) - np.log(ACTIONS)
        dual = temperature * (0.1 + log_mean_exp.mean())
        online = self._distribution(self.policy, batch["obs"])
        old, new = target.base_dist, online.base_dist
        of_mean = Independent(Normal(new.loc, old.scale), 1)
        of_stddev = Independent(Normal(old.loc, new.scale), 1)
        cross_entropy = -(weights * (of_mean.log_prob(actions) + of_stddev.log_prob(actions))).sum(0)
        kls = torch.stack([kl_divergence(target, part).mean() for part in (of_mean, of_stddev)])
        alphas = nn.functional.softplus(self.log_alphas)
        policy_loss = cross_entropy.mean() + (alphas.detach() * kls).sum()
        self.policy_optimizer.zero_grad()
        policy_loss.backward()
        self.policy_optimizer.step()
        dual = dual + (alphas * (torch.tensor([5e-4, 1e-5]) - kls.detach())).sum()
        self.dual_optimizer.zero_grad()
        dual.backward()
        self.dual_optimizer.step()


def config_for(size: tuple) -> RERPIConfig:
    _, _, batch, policy, critic, network = size
    # The learner also uses the CPU of the EnvRunner, which mostly waits for it.
    config = RERPIConfig().learners(num_gpus_per_learner=0).env_runners(num_env_runners=1)
    config.training(updates_per_env_step=1.0, compile_updates="at_start")
    config.training(policy_layers=policy, critic_layers=critic, network=network)
    return config.training(train_batch_size=batch)


def spaces(size: tuple) -> tuple[gym.Space, gym.Space]:
    return gym.spaces.Box(-np.inf, np.inf, (size[0],)), gym.spaces.Box(-1.0, 1.0, (size[1],))


def networks(size: tuple, config: RERPIConfig) -> tuple[ActorCritic, LearningSettings]:
    nets = build_networks(*spaces(size), config.model_config)
    return nets, LearningSettings(**config.model_config["learning"])


def core(size: tuple, num_actions: int = ACTIONS) -> Callable[[dict[str, np.ndarray]], None]:
    """Return a function that makes the updates for a batch with the bare core."""
    config = config_for(size).training(num_action_samples=num_actions).environment("Pendulum-v1")
    set_threads(THREADS, give_way)
    keep_freed_memory()
    choose_fastest()
    compile_sampled_values()
    nets, settings = networks(size, config)
    how = {
        "optimizers": make_optimizers(nets),
        "gradients": Gradients.when_compiled("at_start"),
        "crew": Crew(),
    }

    def update(batch: dict[str, np.ndarray]) -> None:
        columns = {name: torch.from_numpy(column) for name, column in batch.items()}
        run_updates(nets, settings, columns, size[2], **how)

    return update


def _learner(size: tuple, updates: int) -> Callable[[dict[str, np.ndarray]], None]:
    """Return a function that makes ``updates`` updates in one call of RLlib's Learner."""
    rows = size[2]
    learner = config_for(size).build_learner(spaces={DEFAULT_MODULE_ID: spaces(size)})

    def update(batch: dict[str, np.ndarray]) -> None:
        data = MultiAgentBatch({DEFAULT_MODULE_ID: SampleBatch(batch)}, updates * rows)
        learner.update(training_data=TrainingData(batch=data), minibatch_size=rows)

    return update


def random_batch(size: tuple, updates: int = 1) -> dict[str, np.ndarray]:
    observations, actions, rows, *_ = size
    rng = np.random.default_rng(0)
    shapes = {
        "obs": (observations,),
        "new_obs": (observations,),
        "actions": (actions,),
        "rewards": (),
        "action_logp": (),
    }
    batch = {
        name: rng.standard_normal((updates * rows, *shape)).astype(np.float32)
        for name, shape in shapes.items()
    }
    return {**batch, "terminateds": np.zeros(updates * rows, np.float32)}


def _limit_seconds(size: tuple) -> float:
    """Return the time of all matrix products of an update at this machine's fastest rate for one."""
    observations, actions, rows, policy, critic, network = size

    def products(inputs: int, sizes: tuple, outputs: int) -> int:
        if network == "residual":
            return sizes[0] * (inputs + 4 * sum(sizes) + outputs)
        return sum(a * b for a, b in itertools.pairwise((inputs, *sizes, outputs)))

    def backward(inputs: int, sizes: tuple, outputs: int) -> int:
        """Count the gradients of the weights of all layers and of the inputs of all but the first."""
        return 2 * products(inputs, sizes, outputs) - inputs * sizes[0]

    q, pi = (observations + actions, critic, 1), (observations, policy, 2 * actions)
    # The state's part of the first layer is computed once for all sampled actions.
    sampled = ACTIONS * (products(*q) - observations * critic[0]) + observations * critic[0]
    multiplications = rows * (
        products(*q) + (products(*q) + backward(*q)) + sampled  # bootstrap, critic, Step 2
        + 2 * products(*pi) + (products(*pi) + backward(*pi))  # target policy twice, policy
    )  # fmt: skip
    left, right = torch.randn(2048, critic[0]), torch.randn(critic[0], critic[0])
    torch.set_num_threads(THREADS)
    fastest = min(
        common.seconds(product)
        for product in (lambda: left @ right, lambda: _onednn_product(left, right, None))
        for _ in range(30)
    )
    torch.set_num_threads(1)
    return multiplications * fastest / (2048 * critic[0] ** 2)


_textbook: dict[tuple, Textbook] = {}


def _textbook_seconds(size: tuple, calls: int) -> float:
    """Return the time of several textbook updates; call this in a separate process."""
    torch.set_num_threads(THREADS)
    batch = {name: torch.from_numpy(column) for name, column in random_batch(size).items()}
    if size not in _textbook:
        _textbook[size] = Textbook(*size[:2], *size[3:])
    return common.seconds(lambda: [_textbook[size].update(batch) for _ in range(calls)])


_jax: dict[tuple, Callable[[list[dict[str, np.ndarray]]], None]] = {}


def _jax_seconds(size: tuple, calls: int) -> float:
    """Return the time of several updates of the JAX learner; call this in a separate process."""
    import jax_learner

    if size not in _jax:
        _jax[size] = jax_learner.make_update(size, ACTIONS)
    batch = random_batch(size)
    return common.seconds(lambda: _jax[size]([batch] * calls))


class _Count(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def count_operators(size: tuple, updates: int) -> float:
    """Return the operators of an update when several are made in one call, on one thread."""
    nets, settings = networks(size, config_for(size).environment("Pendulum-v1"))
    columns = {name: torch.from_numpy(c) for name, c in random_batch(size, updates).items()}
    optimizers = make_optimizers(nets)
    set_threads(1)
    run_updates(nets, settings, columns, size[2], optimizers=optimizers)
    with _Count() as counter:
        run_updates(nets, settings, columns, size[2], optimizers=optimizers)
    set_threads(THREADS)
    return counter.count / updates


def _measure(size: tuple, textbook: Any, jax: Any) -> dict[str, float]:
    """Return the milliseconds per update: medians over several rounds."""
    calls = max(1, min(50, 6400 // size[2]))  # As many as in training.
    batch = random_batch(size, calls)
    own, learner = core(size), _learner(size, calls)
    found: dict[str, list[float]] = {name: [] for name in ("core", *PEERS)}
    for _ in range(ROUNDS + 1):
        found["core"].append(common.seconds(lambda: own(batch)) / calls)
        found["textbook"].append(textbook.apply(_textbook_seconds, (size, calls)) / calls)
        found["jax"].append(jax.apply(_jax_seconds, (size, calls)) / calls)
        found["learner"].append(common.seconds(lambda: learner(batch)) / calls)
        found["limit"].append(_limit_seconds(size))
    # The first round is a warm-up.
    return {name: 1e3 * statistics.median(values[1:]) for name, values in found.items()}


def main() -> None:
    report = common.Report(__doc__)
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(1) as textbook, spawn.Pool(1) as jax:
        for size in SIZES:
            observations, actions, rows, policy, critic, network = size
            times = _measure(size, textbook, jax)
            setting = (
                f"{observations} + {actions} floats, batch {rows}, policy {policy}, critic {critic}, "
                f"{network} networks, {THREADS} threads"
            )
            for peer, peer_name in PEERS.items():
                ratio = times[peer] / times["core"]
                name = f"update_{rows}_{observations}_{critic[0]}x{len(critic)}_{peer}"
                report.add(name, times["core"], times[peer], "ms", ratio, setting, peer_name)
            several, one = (count_operators(size, updates) for updates in (20, 1))
            name = f"operators_{rows}_{critic[0]}x{len(critic)}"
            peer_name = "in a call with one update"
            report.add(name, several, one, "operators", one / several, setting, peer_name)


if __name__ == "__main__":
    main()
