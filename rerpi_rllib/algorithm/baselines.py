"""MPO, SVG(0) and DDPG: the same replay, loop, networks and Q-learning; what differs is said here."""

from __future__ import annotations

import math

from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.utils.annotations import override

from rerpi_rllib.algorithm.config import RERPIConfig
from rerpi_rllib.algorithm.rerpi import RERPI


class MPOConfig(RERPIConfig):
    """Maximum a Posteriori Policy Optimisation: one likelihood and one bound on the whole policy."""

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class or MPO)
        self.fit = "coupled"


class SVG0Config(RERPIConfig):
    """SVG(0): a stochastic policy follows the critic's gradient, with a weight on its entropy."""

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class or SVG0)
        self.fit = "value_gradient"
        self.num_action_samples = 1
        self.entropy_weight = 1e-3
        self.tanh_mean = True
        self.min_stddev = math.sqrt(0.1)  # The paper's minimum variance is 0.1.


class DDPGConfig(RERPIConfig):
    """DDPG: a deterministic policy follows the critic's gradient; exploration noise is fixed."""

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class or DDPG)
        self.fit = "value_gradient"
        self.num_action_samples = 1
        self.policy = "deterministic"
        self.initial_stddev = 0.3
        self.lr = 1e-4
        self.tanh_mean = True
        self.tanh_observations = True


class MPO(RERPI):
    """Maximum a Posteriori Policy Optimisation."""

    @classmethod
    @override(Algorithm)
    def get_default_config(cls) -> MPOConfig:
        return MPOConfig()


class SVG0(RERPI):
    """Stochastic Value Gradients, SVG(0)."""

    @classmethod
    @override(Algorithm)
    def get_default_config(cls) -> SVG0Config:
        return SVG0Config()


class DDPG(RERPI):
    """Deep Deterministic Policy Gradient."""

    @classmethod
    @override(Algorithm)
    def get_default_config(cls) -> DDPGConfig:
        return DDPGConfig()
