"""``RERPIConfig``: every setting, its default and its check, in one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import gymnasium as gym
import ray
import torch
from ray.rllib.algorithms.algorithm_config import DEPRECATED_VALUE, AlgorithmConfig, NotProvided
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.models.catalog import MODEL_DEFAULTS
from ray.rllib.utils.annotations import override

from rerpi_rllib import envs
from rerpi_rllib.algorithm import checks
from rerpi_rllib.algorithm.effects import dependent_settings, settings_without_effect
from rerpi_rllib.algorithm.env_runner import RERPIEnvRunner, RERPIRolloutWorker
from rerpi_rllib.algorithm.learner import RERPITorchLearner
from rerpi_rllib.algorithm.networks import (
    PAPER_CRITIC_LAYERS,
    PAPER_POLICY_LAYERS,
    STREAM_LAYERS,
    WhenStreams,
    model_settings,
)
from rerpi_rllib.algorithm.rl_module import RERPITorchRLModule
from rerpi_rllib.core.constraints import Constraint, MultiplierSchedule
from rerpi_rllib.core.critics import Aggregation
from rerpi_rllib.core.gradients import WhenToCompile
from rerpi_rllib.core.layers import NetworkKind
from rerpi_rllib.core.policies import POLICIES
from rerpi_rllib.core.settings import (
    FitKind,
    LearningSettings,
    PolicyEvaluation,
    TemperatureSolver,
    Weighting,
    all_parts,
)

# Settings of RLlib's own that are checked more strictly than RLlib does.
_RLLIB_CHECKS = {
    "lr": checks.check_of(checks.LearningRate),
    "gamma": checks.check_of(checks.Fraction),
    "seed": checks.check_of(checks.Seed),
    "num_env_runners": checks.check_of(checks.NumProcesses),
    "num_envs_per_env_runner": checks.check_of(checks.NumEnvs),
    "num_learners": checks.check_of(checks.NumProcesses),
    "num_gpus_per_learner": checks.check_of(checks.ResourceOrAuto),
    "num_cpus_per_learner": checks.check_of(checks.ResourceOrAuto),
    "num_cpus_per_env_runner": checks.check_of(checks.Resource),
    "num_gpus_per_env_runner": checks.check_of(checks.Resource),
    "num_cpus_for_main_process": checks.check_of(checks.Resource),
    "normalize_actions": checks.check_of(checks.Normalised),
    "env_config": checks.check_of(checks.Mapping),
    "framework_str": checks.check_of(Literal["torch"]),
    "train_batch_size_per_learner": checks.check_of(checks.Count),
    "batch_mode": checks.check_of(Literal["truncate_episodes", "complete_episodes"]),
    "rollout_fragment_length": checks.check_of(checks.FragmentLength),
    "max_requests_in_flight_per_env_runner": checks.check_of(checks.CountPerState),
    "metrics_num_episodes_for_smoothing": checks.check_of(checks.Count),
    "grad_clip": checks.check_of(checks.OptionalPositive),
    "grad_clip_by": checks.check_of(Literal["value", "norm", "global_norm"]),
    "min_time_s_per_iteration": checks.check_of(checks.OptionalSeconds),
    "evaluation_interval": checks.check_of(checks.OptionalCount),
    "evaluation_duration": checks.check_of(checks.FragmentLength),
    "evaluation_duration_unit": checks.check_of(Literal["episodes", "timesteps"]),
    "evaluation_num_env_runners": checks.check_of(checks.NumProcesses),
    "evaluation_config": checks.check_of(checks.OptionalMapping),
}


def _not_together() -> list[tuple[str, Any, str, list[str]]]:
    """List values of settings, with another setting and the values of that one they exclude."""
    kinds = POLICIES.items()
    joint = [name for name, kind in kinds if not any(part.per_dimension for part in kind.PARTS)]
    return [
        ("per_dimension_kl", True, "policy", joint),
        ("fit", "value_gradient", "policy", [n for n, k in kinds if not k.is_reparameterizable]),
        # Its corrections are for expected returns.
        ("policy_evaluation", "retrace", "critic", ["quantile"]),
    ]


def setting_checks() -> dict[str, checks.Check]:
    """Return the checks of all settings; those of this package are written in the signature."""
    bound = checks.check_of(checks.Positive)
    bounds = {f"epsilon_{part.name}": bound for part in all_parts()}
    return bounds | checks.checks_of(RERPIConfig.training) | _RLLIB_CHECKS


# The names of the class methods that make configurations with other values than the defaults.
PRESETS = ("compact", "strong")


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
        self.policy_evaluation: PolicyEvaluation = "td0"
        self.n_step = 5
        self.retrace_lambda = 1.0
        self.sequence_length = 8
        self.num_bootstrap_samples = 1
        self.target_update_period = 250
        self.policy_update_period = 1
        # Step 2, weights.
        self.weighting: Weighting = "exponential"
        self.ranking_eta = 10.0
        self.epsilon = 0.1
        self.temperature_solver: TemperatureSolver = "exact"
        self.num_action_samples = 20
        # Step 3, fit.
        self.fit: FitKind = "decoupled"
        for part in all_parts():
            setattr(self, f"epsilon_{part.name}", part.epsilon)
        self.epsilon_penalty: float | None = None
        self.per_dimension_kl = False
        self.multiplier_schedule: MultiplierSchedule = "late"
        self.entropy_weight = 0.0
        # The policy's distribution, and the critic's output.
        self.policy = "gaussian"
        self.num_mixture_components = 3
        self.min_stddev = 0.0
        self.tanh_mean = False
        self.tanh_observations = False
        self.normalize_observations = False
        self.normalize_returns = False
        self.critic: checks.CriticKind = "scalar"
        self.num_critics = 1
        self.critic_aggregation: Aggregation = "min"
        self.num_atoms = 51
        self.value_range: Sequence[float] = (-150.0, 150.0)
        # Networks and optimizers.
        self.network: NetworkKind = "paper"
        self.policy_layers: Sequence[int] = PAPER_POLICY_LAYERS
        self.critic_layers: Sequence[int] = PAPER_CRITIC_LAYERS
        self.covariance_layers: Sequence[int] | None = (64, 64)
        self.streams: WhenStreams = "auto"
        self.policy_stream_layers: Sequence[int] = (100, 100)
        self.critic_stream_layers: Sequence[int] = (200, 200)
        self.joint_layers: Sequence[int] = (100,)
        self.initial_stddev = 0.5
        self.noise_correlation = 0.0
        self.lr = 3e-4
        self.dual_lr = 1e-2
        # Replay, and how fast to learn from it.
        self.replay_capacity = 2_000_000
        self.num_replay_shards = 0
        self.checkpoint_replay = True
        self.updates_per_env_step: float | None = None
        self.num_steps_sampled_before_learning_starts = 1_000
        self.compile_updates: WhenToCompile = "background"
        # Faults.
        self.max_bad_episode_share = 0.1
        self.env_timeout_s: float | None = 300.0

        # RLlib's own settings have defaults that fit.
        # Lost EnvRunners are asked without waiting whether they are back.
        self.env_runner_health_probe_timeout_s = 0.0
        self.gamma = 0.99
        self.train_batch_size = 3072
        self.env_runner_cls: type | None = RERPIEnvRunner
        self.num_env_runners = 1
        self.rollout_fragment_length = 50
        # An EnvRunner has enough to do until the main loop looks again.
        self.max_requests_in_flight_per_env_runner = 4
        self.num_gpus_per_learner: Any = "auto"
        self.gpus_were_auto = False
        self._accepted_settings: dict[str, Any] = {}
        self.torch_ddp_kwargs: dict[str, Any] = {}
        self.min_time_s_per_iteration: float | None = None
        self.min_sample_timesteps_per_iteration = 0
        self.metrics_num_episodes_for_smoothing = 10
        # An evaluation plays the policy's mean.
        self.evaluation_config = {"explore": False}
        # Our learner checks for NaN once a call instead of twice for each parameter and update.
        self.torch_skip_nan_gradients = True

    @classmethod
    def compact(cls) -> RERPIConfig:
        """Make a configuration for a machine without a GPU, where updates are scarce.

        Networks are small and residual and see normalized observations, the batch is small, the
        bounds are wider than the paper's, and target copies two and a half times as often. There are
        two updates a step; the critic learns in each and the policy, which costs more, in every
        fourth. Exploration noise stays similar for several steps.
        """
        config = cls()
        config.training(
            network="residual",
            normalize_observations=True,
            policy_layers=(64, 64),
            covariance_layers=(32,),
            critic_layers=(128, 128),
            train_batch_size=128,
            epsilon=0.3,
            epsilon_mu=1e-2,
            epsilon_sigma=3e-5,
            epsilon_pi=1e-2,
            epsilon_penalty=1e-3,
            target_update_period=100,
            policy_update_period=4,
            dual_lr=3e-2,  # The multipliers move with the policy, in every fourth update.
            num_bootstrap_samples=5,
            noise_correlation=0.8,
            updates_per_env_step=2.0,
        )
        return config

    @classmethod
    def strong(cls) -> RERPIConfig:
        """Make :meth:`compact` with more learning for each step, for tasks whose steps are scarce.

        It has larger networks, two critics whose mean counts, and four times as many updates.
        """
        config = cls.compact()
        config.training(
            policy_layers=(128, 128),
            critic_layers=(256, 256),
            num_critics=2,
            critic_aggregation="mean",
            updates_per_env_step=8.0,
        )
        return config

    @override(AlgorithmConfig)
    def training(
        self,
        *,
        epsilon: checks.Positive = NotProvided,
        epsilon_mu: checks.Positive = NotProvided,
        epsilon_sigma: checks.Positive = NotProvided,
        epsilon_pi: checks.Positive = NotProvided,
        epsilon_penalty: checks.Penalty = NotProvided,
        weighting: Weighting = NotProvided,
        ranking_eta: checks.Positive = NotProvided,
        fit: FitKind = NotProvided,
        per_dimension_kl: bool = NotProvided,
        multiplier_schedule: MultiplierSchedule = NotProvided,
        entropy_weight: checks.Nonnegative = NotProvided,
        policy: checks.PolicyKind = NotProvided,
        num_mixture_components: checks.CountPerState = NotProvided,
        epsilon_mixture: checks.Positive = NotProvided,
        min_stddev: checks.Nonnegative = NotProvided,
        tanh_mean: bool = NotProvided,
        tanh_observations: bool = NotProvided,
        normalize_observations: bool = NotProvided,
        normalize_returns: bool = NotProvided,
        critic: checks.CriticKind = NotProvided,
        num_critics: checks.NumCritics = NotProvided,
        critic_aggregation: Aggregation = NotProvided,
        num_atoms: checks.NumAtoms = NotProvided,
        value_range: checks.ValueRange = NotProvided,
        temperature_solver: TemperatureSolver = NotProvided,
        policy_evaluation: PolicyEvaluation = NotProvided,
        n_step: checks.CountPerState = NotProvided,
        retrace_lambda: checks.Fraction = NotProvided,
        sequence_length: checks.CountPerState = NotProvided,
        num_action_samples: checks.CountPerState = NotProvided,
        num_bootstrap_samples: checks.CountPerState = NotProvided,
        target_update_period: checks.Count = NotProvided,
        policy_update_period: checks.Count = NotProvided,
        dual_lr: checks.LearningRate = NotProvided,
        replay_capacity: checks.Count = NotProvided,
        num_replay_shards: checks.NumShards = NotProvided,
        checkpoint_replay: bool = NotProvided,
        updates_per_env_step: checks.UpdateRatio = NotProvided,
        num_steps_sampled_before_learning_starts: checks.Count = NotProvided,
        network: NetworkKind = NotProvided,
        policy_layers: checks.Layers = NotProvided,
        critic_layers: checks.Layers = NotProvided,
        covariance_layers: checks.OptionalLayers = NotProvided,
        streams: WhenStreams = NotProvided,
        policy_stream_layers: checks.Layers = NotProvided,
        critic_stream_layers: checks.Layers = NotProvided,
        joint_layers: checks.Layers = NotProvided,
        initial_stddev: checks.Positive = NotProvided,
        noise_correlation: checks.Correlation = NotProvided,
        compile_updates: WhenToCompile = NotProvided,
        max_bad_episode_share: checks.Fraction = NotProvided,
        env_timeout_s: checks.Timeout = NotProvided,
        **kwargs: Any,
    ) -> RERPIConfig:
        """Set what the algorithm does; a setting that is not listed here is RLlib's own.

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
            normalize_observations: subtract the mean of all observations gathered so far and divide
                by their standard deviation, inside the networks; the replay keeps them as they are.
            normalize_returns: let the critic work with rewards in units of the standard deviation of
                the discounted returns gathered so far, or of a fifth of the largest one if that is
                more. Values, temperatures and the loss of a scalar critic are shown in the units of
                the rewards; ``entropy_weight`` is then in the critic's.
            critic: what it learns: "scalar" (expected return), "categorical" (probabilities of
                evenly spaced returns, two-hot targets), "hl_gauss" (the same with targets that are
                spread over several of them) or "quantile".
            num_critics: 2 learns a pair of critics.
            critic_aggregation: "min" takes the smaller value of a pair, as SAC does; "mean" their
                mean, which does not underestimate where episodes do not terminate.
            num_atoms: outputs of a "categorical", "hl_gauss" or "quantile" critic.
            value_range: returns that a "categorical" or "hl_gauss" critic can tell apart; what is
                beyond counts as the nearer end. With ``normalize_returns`` it is known.
            temperature_solver: "exact" solves the dual for the states at hand (a large batch, or
                several small ones between two target copies, those of all learners), which makes
                the weights independent of the scale of the rewards; "adam" takes one gradient step
                an update, as the paper, but on the logarithm and with ``dual_lr``.
            policy_evaluation: how the critic's targets are made: "td0", "nstep" or "retrace".
            n_step: rewards in an n-step return.
            retrace_lambda: Retrace's lambda.
            sequence_length: steps in the windows that "nstep" and "retrace" learn from. Every stored
                step is equally likely in them. A batch has as many rows as with "td0", of which one
                for each episode that ends in it holds no step.
            num_action_samples: actions per state in Step 2 (the paper's N).
            num_bootstrap_samples: actions averaged in the bootstrap of Step 1.
            target_update_period: learner updates between two copies to the target networks.
            policy_update_period: updates between two steps of the policy (Steps 2 and 3), which cost
                several times as much as the critic's step; the critic learns in each update.
            dual_lr: learning rate of the multipliers' logarithms.
            replay_capacity: steps kept.
            num_replay_shards: processes, on any nodes of a cluster, that hold the replay. Steps go
                from the EnvRunners to them and batches from them to the learners, without passing
                through the main process. 0 keeps the replay in that.
            checkpoint_replay: whether checkpoints hold the replay. Without it, a restored run first
                gathers ``num_steps_sampled_before_learning_starts`` steps anew.
            updates_per_env_step: ratio of learning to acting; None lets both run free.
            num_steps_sampled_before_learning_starts: steps gathered before the first update; the
                updates that belong to them are then made up at once.
            network: how policy, covariance and critic are built: "paper" (layer normalisation and
                tanh, then layers with ELU) or "residual" (a linear layer, then blocks of layer
                normalisation, a layer twice as wide with ReLU and one back, added to their input,
                and layer normalisation at the end).
            policy_layers: sizes of the policy's hidden layers; in a residual network, of its blocks,
                which are all the same.
            critic_layers: the same for the critic.
            covariance_layers: sizes of the hidden layers of the network that computes the covariance,
                and of the one for a mixture's weights. None computes all parts of the policy from
                its one stack of hidden layers, as the paper does; then a step of the mean moves the
                covariance, too.
            streams: whether each part of a Dict observation has hidden layers of its own before they
                are joined: "auto" where the parts are ``proprioception`` and ``terrain`` and
                ``network``, ``policy_layers`` and ``critic_layers`` are the paper's, "always" for
                any Dict of two or more vectors, or "never". Without streams, and in the network of
                the covariance, the parts are one vector.
            policy_stream_layers: sizes of the hidden layers of each of the policy's streams.
            critic_stream_layers: the same for the critic, whose actions enter after the streams.
            joint_layers: sizes of the hidden layers that follow, of policy and critic.
            initial_stddev: the policy's standard deviation before training, where actions are
                normalised to [-1, 1]; a "deterministic" policy keeps it.
            noise_correlation: how similar the exploration noise of a step is to that of the step
                before, from 0 (independent, as in the paper) to below 1. It needs a policy that is
                one Gaussian.
            compile_updates: "background" compiles the update after half a minute, beside the learner,
                on CPUs and in runs with EnvRunners of their own (others are to be the same for a
                seed); "at_start" before the first update, in any run; "never" not at all. Without a
                C++ compiler the update stays as it is.
            max_bad_episode_share: how many of the last 100 episodes may be dropped because of
                observations or rewards that are NaN, infinite or beyond 1e15, before the run ends
                with an error; 1.0 lets any number pass.
            env_timeout_s: seconds after which an EnvRunner that returns no steps is killed and
                started anew, because its environment hangs; None waits for ever. One that answers
                returns ``rollout_fragment_length`` steps of each of its environments. Without remote
                EnvRunners the environment is in the main process, which nobody restarts.
            **kwargs: the bounds ``epsilon_<part>`` of other policies in ``POLICIES``, and settings of
                RLlib's own, such as ``lr``, ``gamma`` and ``train_batch_size_per_learner``.
        """
        given = {
            key: value
            for key, value in locals().items()
            if key not in ("self", "kwargs", "__class__") and value is not NotProvided
        }
        # The bounds of policies that were added to the registry.
        bounds = {f"epsilon_{part.name}" for part in all_parts()}
        given |= {key: kwargs.pop(key) for key in bounds & kwargs.keys()}
        if "train_batch_size" in kwargs:
            self._train_batch_size_per_learner = None
        super().training(**kwargs)
        for key, value in given.items():
            setattr(self, key, value)
        return self

    @override(AlgorithmConfig)
    def get_state(self) -> dict[str, Any]:
        """Return RLlib's state, from which algorithms are built, with the settings of value -1.

        RLlib leaves them out, because it takes them for deprecated ones; then a wrong value would
        silently become the default.
        """
        default = vars(type(self)())
        wrong = {
            key: value
            for key, value in vars(self).items()
            if checks.is_number(value) and value == DEPRECATED_VALUE and default.get(key) != value
        }
        return {**super().get_state(), **wrong}

    @override(AlgorithmConfig)
    def freeze(self) -> None:
        """Freeze the configuration of an algorithm, whose values have been accepted.

        Checkpoints and copies carry them, so that they are valid with other presets, too, and when
        one of the settings is changed.
        """
        if not self._is_frozen:
            self._accepted_settings = dependent_settings(self)
        super().freeze()

    @override(AlgorithmConfig)
    def validate(self) -> None:
        for key, check in setting_checks().items():
            self._check(key, check)
        presets = [getattr(type(self), preset)() for preset in PRESETS]
        references = [vars(config) for config in (type(self)(), *presets)]
        for message in settings_without_effect(self, [*references, self._accepted_settings]):
            self._value_error(message)
        self._check_combinations()
        self._fill_in()
        super().validate()

    def _check(self, key: str, check: checks.Check) -> None:
        if key == "train_batch_size_per_learner" and self._train_batch_size_per_learner is None:
            key = "train_batch_size"
        value = getattr(self, key)
        if not check.holds(value):
            key = key.removesuffix("_str")
            self._value_error(f"{key}={value!r} is not allowed: it must be {check.allowed}.")

    def _check_combinations(self) -> None:
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
        if self.num_replay_shards > self.num_env_runners and not self.in_evaluation:
            self._value_error(
                f"num_replay_shards={self.num_replay_shards} is not allowed with num_env_runners="
                f"{self.num_env_runners}: each EnvRunner fills one shard, so that there must be at "
                "least as many EnvRunners. Set num_replay_shards=0 to keep the replay in the main "
                "process."
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
        if (
            self.fit in ("decoupled", "coupled")
            and self.target_update_period < 2 * self.policy_update_period
        ):
            # The KL is to the last copy: it is zero in the first step after one.
            self._value_error(
                f"target_update_period={self.target_update_period} with policy_update_period="
                f"{self.policy_update_period} leaves less than two steps of the policy between two "
                "target copies, so that the bounds on its KL never act: target_update_period must "
                "be at least twice policy_update_period, or fit='unconstrained'."
            )
        for key, value, other, refused in _not_together():
            if getattr(self, key) == value and getattr(self, other) in refused:
                allowed = [repr(c) for c in setting_checks()[other].choices if c not in refused]
                self._value_error(
                    f"{key}={value!r} is not allowed with {other}={getattr(self, other)!r}: it must "
                    f"be {' or '.join(allowed)}."
                )
        for key in ("policy_layers", "critic_layers", "covariance_layers", *STREAM_LAYERS):
            sizes = getattr(self, key)
            if self.network == "residual" and sizes and len(set(sizes)) > 1:
                self._value_error(
                    f"{key}={sizes!r} is not allowed with network='residual': its blocks are all of "
                    "the same size."
                )
        if self.min_stddev >= self.initial_stddev:
            self._value_error(
                f"min_stddev={self.min_stddev} is not below initial_stddev={self.initial_stddev}."
            )
        if (
            self.weighting == "identity"
            and self.epsilon_penalty is not None
            and not POLICIES[self.policy].is_discrete
            and self.fit != "value_gradient"
        ):
            self._value_error(
                f"epsilon_penalty={self.epsilon_penalty} is not allowed with weighting='identity': "
                "the two kinds of weights have no common scale. Set epsilon_penalty=None."
            )
        env_spec = gym.registry.get(self.env) if isinstance(self.env, str) else None
        if (
            self.gym_env_vectorize_mode == gym.VectorizeMode.VECTOR_ENTRY_POINT.value
            and env_spec is not None
            and env_spec.vector_entry_point is None
        ):
            self._value_error(
                f"gym_env_vectorize_mode='vector_entry_point' is not allowed with env={self.env!r}, "
                "which Gymnasium has no vectorised version of: it must be 'sync' or 'async'."
            )
        if self.enable_rl_module_and_learner != self.enable_env_runner_and_connector_v2:
            self._value_error(
                "enable_rl_module_and_learner and enable_env_runner_and_connector_v2 must be both "
                "True (RLlib's new API stack) or both False (the old one)."
            )

    def _fill_in(self) -> None:
        """Set what depends on the machine, on the API stack and on other settings."""
        if self.num_gpus_per_learner == "auto":
            self.num_gpus_per_learner = _gpus_for_learner(self.num_learners)
            self.gpus_were_auto = True
        if self.uses_old_api_stack:
            self._check_old_api_stack()
        if not (self.min_time_s_per_iteration or self.min_sample_timesteps_per_iteration):
            # Results come by time, or by steps in synchronous runs, which have to be repeatable.
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
        """Refuse what needs learners, which the old stack has not, and set its names of settings."""
        if self.num_learners:
            self._value_error(
                f"num_learners={self.num_learners} is not allowed on the old API stack: it must be 0."
            )
        if self.num_replay_shards:
            self._value_error(
                f"num_replay_shards={self.num_replay_shards} is not allowed on the old API stack: it "
                "must be 0."
            )
        for key in ("lr", "dual_lr"):
            if not checks.is_number(getattr(self, key)):
                self._value_error(
                    f"{key}={getattr(self, key)!r} is not allowed on the old API stack: it must be "
                    "a number."
                )
        if self.env_runner_cls is RERPIEnvRunner:
            self.env_runner_cls = RERPIRolloutWorker
        # The old stack has another name for it; a value given under that name counts.
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
        return {**super()._model_config_auto_includes, **model_settings(vars(self))}

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        """The KLs that these settings bound, for everything that shows them."""
        return LearningSettings.from_mapping(vars(self)).constraints()

    def actor_name(self, role: str, number: int | None = None) -> str:
        """Return what Ray's dashboard and logs call an actor: "RERPI env runner 1"."""
        words = [self.algo_class.__name__, role, *([] if number is None else [str(number)])]
        return " ".join(words)

    @property
    def steps_per_row(self) -> int:
        return steps_per_row(vars(self))

    @property
    def window_length(self) -> int | None:
        """The number of steps in the windows of a batch, None if it has single transitions."""
        return None if self.policy_evaluation == "td0" else int(self.sequence_length)

    @property
    def num_environments(self) -> int:
        """The number of environments that are stepped at the same time."""
        return int(max(1, self.num_env_runners) * self.num_envs_per_env_runner)

    @property
    def uses_old_api_stack(self) -> bool:
        return not self.enable_env_runner_and_connector_v2


def steps_per_row(config: Mapping[str, Any]) -> int:
    """Return the number of steps in a row of a batch: one for TD(0), otherwise those of a window."""
    return 1 if config["policy_evaluation"] == "td0" else int(config["sequence_length"])


def _gpus_for_learner(num_learners: int) -> int:
    """Return one GPU for each learner if the cluster has that many, otherwise none."""
    if ray.is_initialized():
        available = int(ray.cluster_resources().get("GPU", 0))
    else:
        available = torch.cuda.device_count()
    return 1 if available >= max(1, num_learners) else 0
