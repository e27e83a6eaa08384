"""``RERPIConfig``: every setting, its default and its check, in one place."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import ray
import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.models.catalog import MODEL_DEFAULTS
from ray.rllib.utils.annotations import override

from rerpi_rllib import envs
from rerpi_rllib.algorithm.env_runner import RERPIEnvRunner
from rerpi_rllib.algorithm.learner import RERPITorchLearner
from rerpi_rllib.algorithm.networks import model_settings
from rerpi_rllib.algorithm.rl_module import RERPITorchRLModule
from rerpi_rllib.core.constraints import Constraint
from rerpi_rllib.core.policies import POLICIES
from rerpi_rllib.core.settings import LearningSettings


@dataclass(frozen=True)
class _Check:
    """Whether a value is allowed, and the words that say what is."""

    allowed: str
    holds: Callable[[Any], bool]
    choices: tuple[str, ...] = ()


def _is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_schedule(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) > 1
        and all(
            isinstance(pair, (list, tuple))
            and len(pair) == 2
            and _is_int(pair[0])
            and _NONNEGATIVE.holds(pair[1])
            for pair in value
        )
        and value[0][0] == 0
        and all(earlier[0] < later[0] for earlier, later in pairwise(value))
    )


def _one_of(*choices: str) -> _Check:
    words = "one of " + ", ".join(repr(c) for c in choices)
    return _Check(words, lambda v: v in choices, choices)


_POSITIVE = _Check("a number above 0", lambda v: _is_number(v) and 0 < v < float("inf"))
_NONNEGATIVE = _Check("a number of at least 0", lambda v: _is_number(v) and 0 <= v < float("inf"))
_BOOLEAN = _Check("True or False", lambda v: isinstance(v, bool))
_COUNT = _Check("a whole number of at least 1", lambda v: _is_int(v) and v >= 1)
_NATURAL = _Check("a whole number of at least 0", lambda v: _is_int(v) and v >= 0)
_LAYERS = _Check(
    "a list of at least one layer size, each a whole number of at least 1",
    lambda v: isinstance(v, (list, tuple)) and len(v) > 0 and all(_is_int(n) and n > 0 for n in v),
)
_LEARNING_RATE = _Check(
    "a number above 0, or a schedule [[0, value], [step, value], ...] of rising steps",
    lambda v: _is_schedule(v) or _POSITIVE.holds(v),
)

_CHECKS = {
    "epsilon": _POSITIVE,
    "epsilon_mu": _POSITIVE,
    "epsilon_sigma": _POSITIVE,
    "epsilon_penalty": _Check(
        "a number above 0, or None for no penalty", lambda v: v is None or _POSITIVE.holds(v)
    ),
    "epsilon_pi": _POSITIVE,
    "weighting": _one_of("exponential", "ranking", "identity"),
    "ranking_eta": _POSITIVE,
    "fit": _one_of("decoupled", "coupled", "unconstrained", "value_gradient"),
    "entropy_weight": _NONNEGATIVE,
    "policy": _one_of(*POLICIES),
    "num_mixture_components": _COUNT,
    "epsilon_mixture": _POSITIVE,
    "min_stddev": _NONNEGATIVE,
    "tanh_mean": _BOOLEAN,
    "tanh_observations": _BOOLEAN,
    "critic": _one_of("scalar", "categorical", "quantile"),
    "num_critics": _Check("1 or 2", lambda v: _is_int(v) and v in (1, 2)),
    "num_atoms": _Check("a whole number of at least 2", lambda v: _is_int(v) and v >= 2),
    "value_range": _Check(
        "two numbers, the smaller one first",
        lambda v: (
            isinstance(v, (list, tuple))
            and len(v) == 2
            and all(_is_number(n) for n in v)
            and float("-inf") < v[0] < v[1] < float("inf")
        ),
    ),
    "per_dimension_kl": _BOOLEAN,
    "multiplier_schedule": _one_of("late", "always"),
    "temperature_solver": _one_of("exact", "adam"),
    "policy_evaluation": _one_of("td0", "nstep", "retrace"),
    "n_step": _COUNT,
    "retrace_lambda": _Check("a number from 0 to 1", lambda v: _is_number(v) and 0 <= v <= 1),
    "sequence_length": _COUNT,
    "num_action_samples": _COUNT,
    "num_bootstrap_samples": _COUNT,
    "target_update_period": _COUNT,
    "policy_update_period": _COUNT,
    "lr": _LEARNING_RATE,
    "dual_lr": _LEARNING_RATE,
    "replay_capacity": _COUNT,
    "updates_per_env_step": _Check(
        "a number above 0, or None to let learner and EnvRunners run free",
        lambda v: v is None or _POSITIVE.holds(v),
    ),
    "num_steps_sampled_before_learning_starts": _COUNT,
    "policy_layers": _LAYERS,
    "critic_layers": _LAYERS,
    "covariance_layers": _Check(
        f"{_LAYERS.allowed}, or None to share the policy's",
        lambda v: v is None or _LAYERS.holds(v),
    ),
    "initial_stddev": _POSITIVE,
    "train_batch_size_per_learner": _COUNT,
    "num_env_runners": _NATURAL,
    "num_envs_per_env_runner": _COUNT,
    "num_learners": _NATURAL,
    "num_gpus_per_learner": _Check(
        "a number of at least 0, or 'auto'", lambda v: v == "auto" or (_is_number(v) and v >= 0)
    ),
    "normalize_actions": _Check("True (the policy works in normalised units)", lambda v: v is True),
    "env_config": _Check("a mapping", lambda v: isinstance(v, dict)),
    "gamma": _Check("a number from 0 to 1", lambda v: _is_number(v) and 0 <= v <= 1),
}


# A setting's value, another setting, and the values of that one it cannot be combined with.
_NOT_TOGETHER: dict[str, list[tuple[Any, str, tuple[str, ...]]]] = {
    "per_dimension_kl": [
        (True, "fit", ("coupled", "unconstrained", "value_gradient")),
        (True, "policy", ("full_gaussian", "categorical")),  # No KL of each dimension.
    ],
    # No gradient through the choice of an action or of a component.
    "fit": [("value_gradient", "policy", ("mixture", "categorical"))],
    # Its corrections are for expected returns.
    "policy_evaluation": [("retrace", "critic", ("quantile",))],
}


class RERPIConfig(AlgorithmConfig):
    """Settings of RERPI. The defaults are the paper's one set of hyperparameters.

    They assume millions of updates on a GPU. For a machine without one there is
    :meth:`RERPIConfig.compact`.

    .. code-block:: python

        from rerpi_rllib import RERPIConfig

        config = RERPIConfig.compact().environment("dm_control/cartpole-swingup-v0")
        algo = config.build_algo()
        print(algo.train())
    """

    num_gpus: float

    def __init__(self, algo_class: type | None = None) -> None:
        from rerpi_rllib.algorithm.rerpi import RERPI

        super().__init__(algo_class=algo_class or RERPI)

        # Step 1, policy evaluation.
        self.policy_evaluation = "td0"
        self.n_step = 5
        self.retrace_lambda = 1.0
        self.sequence_length = 8
        self.num_bootstrap_samples = 1
        self.target_update_period = 250
        self.policy_update_period = 1
        # Step 2, weights.
        self.weighting = "exponential"
        self.ranking_eta = 10.0
        self.epsilon = 0.1
        self.temperature_solver = "exact"
        self.num_action_samples = 20
        # Step 3, fit.
        self.fit = "decoupled"
        self.epsilon_mu = 5e-4
        self.epsilon_sigma = 1e-5
        self.epsilon_pi = 1e-3
        self.epsilon_penalty: float | None = None
        self.epsilon_mixture = 1e-4
        self.per_dimension_kl = False
        self.multiplier_schedule = "late"
        self.entropy_weight = 0.0
        # The policy's distribution, and the critic's output.
        self.policy = "gaussian"
        self.num_mixture_components = 3
        self.min_stddev = 0.0
        self.tanh_mean = False
        self.tanh_observations = False
        self.critic = "scalar"
        self.num_critics = 1
        self.num_atoms = 51
        self.value_range: Sequence[float] = (-150.0, 150.0)
        # Networks and optimizers.
        self.policy_layers: Sequence[int] = (200, 200, 200)
        self.critic_layers: Sequence[int] = (500, 500, 500)
        self.covariance_layers: Sequence[int] | None = (64, 64)
        self.initial_stddev = 0.5
        self.lr = 3e-4
        self.dual_lr = 1e-2
        # Replay, and how fast to learn from it.
        self.replay_capacity = 2_000_000
        self.updates_per_env_step: float | None = None
        self.num_steps_sampled_before_learning_starts = 1_000

        # Settings of RLlib's own, with defaults that fit.
        self.gamma = 0.99
        self.train_batch_size = 3072
        self.env_runner_cls: type | None = RERPIEnvRunner
        self.num_env_runners = 1
        self.rollout_fragment_length = 50
        # Work enough for an EnvRunner until the main loop looks again.
        self.max_requests_in_flight_per_env_runner = 4
        self.num_gpus_per_learner: Any = "auto"
        self.gpus_were_auto = False
        self.torch_ddp_kwargs: dict[str, Any] = {}
        self.min_time_s_per_iteration: float | None = None
        self.min_sample_timesteps_per_iteration = 0
        self.metrics_num_episodes_for_smoothing = 10
        # An evaluation plays the policy's mean.
        self.evaluation_config = {"explore": False}
        # Checked once a call by the learner instead of twice for each parameter and update.
        self.torch_skip_nan_gradients = True

    @classmethod
    def compact(cls) -> RERPIConfig:
        """Small networks and batch for a machine without a GPU, where updates are scarce.

        Bounds wider than the paper's, and target copies two and a half times as often. There are
        two updates a step; the critic learns in each and the policy, which costs more, in every
        fourth.
        """
        return cls().training(
            policy_layers=(128, 128),
            critic_layers=(256, 256),
            train_batch_size=128,
            epsilon=0.3,
            epsilon_mu=1e-2,
            epsilon_sigma=3e-5,
            epsilon_pi=1e-2,
            epsilon_penalty=1e-3,
            target_update_period=100,
            policy_update_period=4,
            dual_lr=3e-2,  # The multipliers move with the policy: every fourth update.
            num_bootstrap_samples=5,
            updates_per_env_step=2.0,
        )

    @override(AlgorithmConfig)
    def training(
        self,
        *,
        epsilon: float = NotProvided,
        epsilon_mu: float = NotProvided,
        epsilon_sigma: float = NotProvided,
        epsilon_pi: float = NotProvided,
        epsilon_penalty: float | None = NotProvided,
        weighting: str = NotProvided,
        ranking_eta: float = NotProvided,
        fit: str = NotProvided,
        per_dimension_kl: bool = NotProvided,
        multiplier_schedule: str = NotProvided,
        entropy_weight: float = NotProvided,
        policy: str = NotProvided,
        num_mixture_components: int = NotProvided,
        epsilon_mixture: float = NotProvided,
        min_stddev: float = NotProvided,
        tanh_mean: bool = NotProvided,
        tanh_observations: bool = NotProvided,
        critic: str = NotProvided,
        num_critics: int = NotProvided,
        num_atoms: int = NotProvided,
        value_range: Sequence[float] = NotProvided,
        temperature_solver: str = NotProvided,
        policy_evaluation: str = NotProvided,
        n_step: int = NotProvided,
        retrace_lambda: float = NotProvided,
        sequence_length: int = NotProvided,
        num_action_samples: int = NotProvided,
        num_bootstrap_samples: int = NotProvided,
        target_update_period: int = NotProvided,
        policy_update_period: int = NotProvided,
        dual_lr: float = NotProvided,
        replay_capacity: int = NotProvided,
        updates_per_env_step: float | None = NotProvided,
        num_steps_sampled_before_learning_starts: int = NotProvided,
        policy_layers: Sequence[int] = NotProvided,
        critic_layers: Sequence[int] = NotProvided,
        covariance_layers: Sequence[int] | None = NotProvided,
        initial_stddev: float = NotProvided,
        **kwargs: Any,
    ) -> RERPIConfig:
        """Settings of the algorithm; what is not listed here is RLlib's own.

        Args:
            epsilon: bound on the mean KL of the action weights to uniform (Step 2).
            epsilon_mu: bound on the KL by which the mean may move between two target copies.
            epsilon_sigma: the same for the covariance.
            epsilon_penalty: pulls actions outside [-1, 1] back: KL of a second set of weights, by
                the distance to the box, that is added to the first; None leaves it out. Discrete
                actions have none.
            epsilon_pi: bound on the KL of the whole policy, for ``fit="coupled"`` and for
                ``policy="categorical"``.
            epsilon_mixture: the same as ``epsilon_mu`` for the weights of a mixture's components.
            weighting: how Q-values become weights: "exponential", "ranking" or "identity".
            ranking_eta: for "ranking": weights proportional to ln((N + eta) / rank).
            fit: how the policy is fitted to them: "decoupled", "coupled" (MPO) or "unconstrained";
                or "value_gradient", which instead of weighting actions follows the critic's gradient
                (SVG(0), DDPG).
            per_dimension_kl: apply ``epsilon_mu`` and ``epsilon_sigma`` to each action dimension.
            multiplier_schedule: when the multipliers learn: "late", in the last quarter of each
                ``target_update_period``, when the KLs have grown to what they will be at the copy,
                or "always", in every update, as in the paper.
            entropy_weight: weight of the policy's entropy with ``fit="value_gradient"``.
            policy: the distribution: "gaussian" (diagonal covariance), "full_gaussian", "mixture" (of
                diagonal Gaussians), "categorical" (discrete actions) or "deterministic" (a mean with
                fixed exploration noise).
            num_mixture_components: Gaussians in a "mixture".
            min_stddev: smallest standard deviation of a Gaussian; its square is added to the
                variance.
            tanh_mean: keep the mean inside the action bounds; the paper's own mean is unbounded.
            tanh_observations: pass observations through tanh first.
            critic: what it learns: "scalar" (expected return), "categorical" (probabilities of
                evenly spaced returns, two-hot targets) or "quantile".
            num_critics: 2 takes the minimum of a pair, as SAC does.
            num_atoms: outputs of a "categorical" or "quantile" critic.
            value_range: returns that a "categorical" critic can tell apart; what is beyond counts as
                the nearer end.
            temperature_solver: "exact" solves the dual for the states at hand (a large batch, or
                several small ones between two target copies), which makes the weights independent
                of the scale of the rewards; "adam" takes one gradient step an update, as
                the paper, but on the logarithm and with ``dual_lr``.
            policy_evaluation: how the critic's targets are made: "td0", "nstep" or "retrace".
            n_step: rewards in an n-step return.
            retrace_lambda: Retrace's lambda.
            sequence_length: steps in the windows that "nstep" and "retrace" learn from; they are cut
                at the end of an episode. A batch holds as many steps as with "td0".
            num_action_samples: actions per state in Step 2 (the paper's N).
            num_bootstrap_samples: actions averaged in the bootstrap of Step 1.
            target_update_period: learner updates between two copies to the target networks.
            policy_update_period: do Steps 2 and 3 in every so many-th update only; the critic learns
                in each. They cost several times as much as the critic's step.
            dual_lr: learning rate of the multipliers' logarithms.
            replay_capacity: steps kept.
            updates_per_env_step: ratio of learning to acting; None lets both run free.
            num_steps_sampled_before_learning_starts: steps gathered before the first update.
            policy_layers: sizes of the policy's hidden layers.
            critic_layers: sizes of the critic's hidden layers.
            covariance_layers: sizes of the hidden layers of the network that computes the covariance,
                and of the one for a mixture's weights. None computes all parts of the policy from
                its one stack of hidden layers, as the paper does; then a step of the mean moves the
                covariance, too.
            initial_stddev: the policy's standard deviation before training, where actions are
                normalised to [-1, 1]; of a "deterministic" policy for ever.
            **kwargs: RLlib's own, such as ``lr``, ``gamma`` and ``train_batch_size_per_learner``.
        """
        given = {
            key: value
            for key, value in locals().items()
            if key not in ("self", "kwargs", "__class__") and value is not NotProvided
        }
        if "train_batch_size" in kwargs:
            self._train_batch_size_per_learner = None
        super().training(**kwargs)
        for key, value in given.items():
            setattr(self, key, value)
        return self

    @override(AlgorithmConfig)
    def validate(self) -> None:
        if self._train_batch_size_per_learner is None:
            self._check("train_batch_size", _COUNT, self.train_batch_size)
        for key, check in _CHECKS.items():
            self._check(key, check, getattr(self, key))
        self._check_together()
        super().validate()

    def _check(self, key: str, check: _Check, value: Any) -> None:
        if not check.holds(value):
            self._value_error(f"{key}={value!r} is not allowed: it must be {check.allowed}.")

    def _check_together(self) -> None:
        if self._rl_module_spec is None and (self._model_config or self.model != MODEL_DEFAULTS):
            self._value_error(
                "RLlib's model_config and model are not used: the networks are those of "
                "policy_layers and critic_layers, or those of an RLModule of your own "
                "(rl_module_spec)."
            )
        if self.total_train_batch_size > self.replay_capacity:
            self._value_error(
                f"train_batch_size={self.total_train_batch_size} is larger than "
                f"replay_capacity={self.replay_capacity}: a batch must fit into the replay."
            )
        if self.replay_capacity // self.num_environments < self.steps_per_row:
            self._value_error(
                f"replay_capacity={self.replay_capacity} is too small: each of the "
                f"{self.num_environments} environments has its share of it, which must hold "
                f"sequence_length={self.sequence_length} steps."
            )
        if self.is_multi_agent:
            self._value_error("multi_agent() is not allowed: there is one agent.")
        if self.train_batch_size_per_learner % self.steps_per_row:
            self._value_error(
                f"train_batch_size_per_learner={self.train_batch_size_per_learner} is not a multiple "
                f"of sequence_length={self.sequence_length}: a batch is made of whole windows."
            )
        if self.policy_evaluation == "nstep" and self.n_step > self.sequence_length:
            self._value_error(
                f"n_step={self.n_step} is larger than sequence_length={self.sequence_length}."
            )
        for key, others in _NOT_TOGETHER.items():
            for value, other_key, other_values in others:
                if getattr(self, key) == value and getattr(self, other_key) in other_values:
                    allowed = _CHECKS[other_key].choices
                    self._value_error(
                        f"{key}={value!r} is not allowed with {other_key}="
                        f"{getattr(self, other_key)!r}: it must be "
                        + " or ".join(repr(c) for c in allowed if c not in other_values)
                        + "."
                    )
        if self.min_stddev >= self.initial_stddev:
            self._value_error(
                f"min_stddev={self.min_stddev} is not below initial_stddev={self.initial_stddev}."
            )
        if (
            self.weighting == "identity"
            and self.epsilon_penalty is not None
            and self.policy != "categorical"
            and self.fit != "value_gradient"
        ):
            self._value_error(
                f"epsilon_penalty={self.epsilon_penalty} is not allowed with weighting='identity': "
                "the two kinds of weights have no common scale."
            )
        if self.num_gpus_per_learner == "auto":
            self.num_gpus_per_learner = _gpus_for_learner(self.num_learners)
            self.gpus_were_auto = True
        if self.enable_rl_module_and_learner != self.enable_env_runner_and_connector_v2:
            self._value_error(
                "enable_rl_module_and_learner and enable_env_runner_and_connector_v2 must be both "
                "True (RLlib's new API stack) or both False (the old one)."
            )
        if self.uses_old_api_stack:
            self._check_old_api_stack()
        if not (self.min_time_s_per_iteration or self.min_sample_timesteps_per_iteration):
            # A steady pulse of results; without remote EnvRunners by steps, to be repeatable.
            if self.num_env_runners > 0:
                self.min_time_s_per_iteration = 5
            else:
                self.min_sample_timesteps_per_iteration = 1_000
        if self.policy_update_period > 1 and self.num_learners > 1:
            # Updates of the critic alone leave the policy's parameters without a gradient.
            self.torch_ddp_kwargs = {**self.torch_ddp_kwargs, "find_unused_parameters": True}
        # Nothing in the default pipelines has a state to merge between EnvRunners.
        self._dont_auto_sync_env_runner_states = (
            self._env_to_module_connector is None and self._module_to_env_connector is None
        )
        if isinstance(self.env, str):
            envs.register_with_tune(self.env)

    def _check_old_api_stack(self) -> None:
        """What the old stack has no learners for, and its own names of the same settings."""
        if self.num_learners:
            self._value_error(
                f"num_learners={self.num_learners} is not allowed on the old API stack: it must be 0."
            )
        for key in ("lr", "dual_lr"):
            if not _is_number(getattr(self, key)):
                self._value_error(
                    f"{key}={getattr(self, key)!r} is not allowed on the old API stack: it must be "
                    "a number."
                )
        if self.env_runner_cls is RERPIEnvRunner:
            self.env_runner_cls = None
        # The old stack's own name; what was given by it counts.
        self.num_gpus = self.num_gpus_per_learner = self.num_gpus or self.num_gpus_per_learner
        if self.num_gpus > 1:
            self._value_error(
                f"num_gpus={self.num_gpus} is not allowed on the old API stack: it must be at most 1."
            )
        self.train_batch_size = self.total_train_batch_size

    @override(AlgorithmConfig)
    def get_default_rl_module_spec(self) -> RLModuleSpec:
        return RLModuleSpec(module_class=RERPITorchRLModule)

    @override(AlgorithmConfig)
    def get_default_learner_class(self) -> type[RERPITorchLearner]:
        return RERPITorchLearner

    @property
    @override(AlgorithmConfig)
    def _model_config_auto_includes(self) -> dict[str, Any]:
        return super()._model_config_auto_includes | model_settings(vars(self))

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        """The KLs that these settings bound, for everything that shows them."""
        return LearningSettings.from_mapping(vars(self)).constraints()

    @property
    def steps_per_row(self) -> int:
        return steps_per_row(vars(self))

    @property
    def num_environments(self) -> int:
        """Environments that are stepped at the same time."""
        return max(1, self.num_env_runners) * self.num_envs_per_env_runner

    @property
    def uses_old_api_stack(self) -> bool:
        return not self.enable_env_runner_and_connector_v2


def steps_per_row(config: Mapping[str, Any]) -> int:
    """Steps in a row of a batch: one transition for TD(0), otherwise a window."""
    return 1 if config["policy_evaluation"] == "td0" else config["sequence_length"]


def _gpus_for_learner(num_learners: int) -> int:
    """One GPU for each learner if the cluster has that many, otherwise none."""
    if ray.is_initialized():
        available = int(ray.cluster_resources().get("GPU", 0))
    else:
        available = torch.cuda.device_count()
    return 1 if available >= max(1, num_learners) else 0
