"""Which settings take effect: what a user has set may be refused, but is never ignored.

A setting of this package may belong to a choice that was not made (``n_step`` to n-step returns); a
setting of RLlib may belong to a mechanism that is not used here. Both are refused where the value is
neither the default of the configuration's class nor that of one of its presets, nor comes from a
checkpoint: such configurations hold every setting, and only what differs was set by somebody.
``docs/rllib-settings.md`` lists what happens to each setting of RLlib.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided

from rerpi_rllib.algorithm.networks import STREAM_LAYERS
from rerpi_rllib.core.policies import POLICIES
from rerpi_rllib.core.settings import all_parts


@dataclass(frozen=True)
class Need:
    """The values of a setting with which another one takes effect: these, or any except these."""

    key: str
    values: tuple[Any, ...] = ()
    excluded: tuple[Any, ...] = ()

    def holds(self, config: AlgorithmConfig) -> bool:
        value = getattr(config, self.key)
        return value in self.values if self.values else value not in self.excluded

    @property
    def advice(self) -> str:
        if not self.values:
            key = self.key.removeprefix("_")
            return f"set {key}" if None in self.excluded else f"choose another {key}"
        return "set " + " or ".join(f"{self.key}={value!r}" for value in self.values)


# Otherwise RLlib takes the steps of the optimizers, with what it does around them.
TO_TAKE_OWN_STEPS = (
    Need("grad_clip", (None,)),
    Need("torch_skip_nan_gradients", (True,)),
    Need("log_gradients", (False,)),
    Need("torch_compile_learner", (False,)),
    Need("_torch_grad_scaler_class", (None,)),
    Need("_torch_lr_scheduler_classes", (None,)),
)


def _policy_with(part: str) -> Need:
    """Need a policy of which this part is bounded separately."""
    kinds = POLICIES.items()
    return Need("policy", tuple(name for name, kind in kinds if part in {p.name for p in kind.PARTS}))


def _needs() -> dict[str, Sequence[Sequence[Need]]]:
    """Return, for each setting that depends on others, the alternatives of what it needs."""
    weighted = Need("fit", ("decoupled", "coupled", "unconstrained"))
    decoupled = Need("fit", ("decoupled",))
    trust_region = Need("fit", ("decoupled", "coupled"))
    value_gradient = Need("fit", ("value_gradient",))
    exponential = Need("weighting", ("exponential",))
    kinds = POLICIES.items()
    continuous = Need("policy", excluded=tuple(n for n, kind in kinds if kind.is_discrete))
    stochastic = Need("policy", excluded=tuple(n for n, kind in kinds if not kind.learns_covariance))
    gaussian = Need("policy", tuple(n for n, kind in kinds if kind.is_reparameterizable))
    penalty = Need("epsilon_penalty", excluded=(None,))
    without_streams = Need("streams", ("auto", "never"))
    return {
        "n_step": [[Need("policy_evaluation", ("nstep",))]],
        "retrace_lambda": [[Need("policy_evaluation", ("retrace",))]],
        "sequence_length": [[Need("policy_evaluation", ("nstep", "retrace"))]],
        "num_bootstrap_samples": [[continuous], [Need("critic", ("quantile",))]],
        "weighting": [[weighted]],
        "ranking_eta": [[weighted, Need("weighting", ("ranking",))]],
        "epsilon": [[weighted, exponential]],
        "temperature_solver": [[weighted, exponential], [weighted, continuous, penalty]],
        "num_action_samples": [[continuous]],
        **{f"epsilon_{part.name}": [[decoupled, _policy_with(part.name)]] for part in all_parts()},
        "epsilon_pi": [[Need("fit", ("coupled",))], [decoupled, _policy_with("pi")]],
        "epsilon_penalty": [[weighted, continuous]],
        "per_dimension_kl": [[decoupled]],
        "multiplier_schedule": [[trust_region]],
        "covariance_layers": [[stochastic]],
        **{key: [[without_streams]] for key in ("policy_layers", "critic_layers")},
        **{key: [[Need("streams", ("always",))]] for key in STREAM_LAYERS},
        "entropy_weight": [[value_gradient, stochastic]],
        "dual_lr": [
            [trust_region],
            [weighted, Need("temperature_solver", ("adam",)), exponential],
            [weighted, Need("temperature_solver", ("adam",)), continuous, penalty],
        ],
        "compile_updates": [TO_TAKE_OWN_STEPS],
        "env_timeout_s": [[Need("num_env_runners", excluded=(0,))]],
        "num_mixture_components": [[Need("policy", ("mixture",))]],
        "min_stddev": [[stochastic]],
        "initial_stddev": [[continuous]],
        "noise_correlation": [[gaussian]],
        "tanh_mean": [[continuous]],
        "critic_aggregation": [[Need("num_critics", (2,))]],
        "num_atoms": [[Need("critic", ("categorical", "hl_gauss", "quantile"))]],
        "value_range": [
            [Need("critic", ("categorical", "hl_gauss")), Need("normalize_returns", (False,))]
        ],
        "grad_clip_by": [[Need("grad_clip", excluded=(None,))]],
        "learner_config_dict": [[Need("_learner_class", excluded=(None,))]],
        **{
            f"torch_compile_learner_{key}": [[Need("torch_compile_learner", (True,))]]
            for key in ("what_to_compile", "dynamo_mode", "dynamo_backend")
        },
    }


# -- Settings of RLlib: what to do instead. Setters are named as ``setter()`` for all their arguments.

_TORCH_ONLY = "the networks are torch's; leave it out"
_NO_OFFLINE = "learning and evaluation are on live environments; use another algorithm of RLlib's"
_ONE_AGENT = "there is one agent with one module; set it with training() or leave it out"
_NO_AGGREGATION = "batches come from the replay without aggregator actors; leave it out"
_OLD_STACK = "it is a setting of RLlib's old API stack; leave it out, or choose that stack"
_NEW_STACK = "it is a setting of RLlib's new API stack; leave it out, or choose that stack"

REFUSED = {
    "offline_data()": _NO_OFFLINE,
    "multi_agent()": _ONE_AGENT,
    "algorithm_config_overrides_per_module": _ONE_AGENT,
    **dict.fromkeys(
        [
            *("off_policy_estimation_methods", "ope_split_batch_by_episode"),
            *("on_evaluate_offline_start", "on_evaluate_offline_end"),
            "on_offline_eval_runners_recreated",
            *(
                name
                for name in inspect.signature(AlgorithmConfig.evaluation).parameters
                if "offline" in name
            ),
        ],
        _NO_OFFLINE,
    ),
    **dict.fromkeys(
        [
            *("eager_tracing", "eager_max_retraces", "tf_session_args", "local_tf_session_args"),
            *("enable_tf1_exec_eagerly", "_tf_policy_handles_more_than_one_loss"),
        ],
        _TORCH_ONLY,
    ),
    "learner_connector": "batches do not pass through RLlib's connectors; change them in the "
    "update() of a learner_class, or observations in an env_to_module_connector",
    "add_default_connectors_to_learner_pipeline": "batches do not pass through RLlib's connectors; "
    "leave it out",
    "num_aggregator_actors_per_learner": _NO_AGGREGATION,
    "max_requests_in_flight_per_aggregator_actor": _NO_AGGREGATION,
    "max_requests_in_flight_per_learner": "there is one request at a time; leave it out",
    "num_epochs": "set updates_per_env_step, the number of updates for each step",
    "minibatch_size": "set train_batch_size_per_learner, the number of steps in an update",
    "shuffle_batch_per_epoch": "batches are drawn from the replay in random order; leave it out",
    "optimizer": "set lr and dual_lr, or write the optimizers of a learner_class",
    "sample_timeout_s": "nothing waits for samples; leave it out",
    "compress_observations": "observations go to the replay as they are; leave it out",
    "exploration_config": "the policy explores by its own distribution; set initial_stddev",
    "use_env_runner_state_server": "weights are sent to the EnvRunners; leave it out",
    "env_runner_state_server_max_concurrency": "weights are sent to the EnvRunners; leave it out",
    "is_atari": "observations are vectors; leave it out",
    "action_mask_key": "all actions are allowed at every step; leave it out",
    "torch_compile_worker": "only learners are compiled; set torch_compile_learner",
    "torch_compile_worker_dynamo_backend": "only learners are compiled; leave it out",
    "torch_compile_worker_dynamo_mode": "only learners are compiled; leave it out",
}
REFUSED_ON_NEW_STACK = {
    "num_gpus": "set num_gpus_per_learner",
    "clip_rewards": "wrap the environment, for instance with gymnasium's TransformReward",
    "render_env": "render in a callback; `rllib evaluate --video` makes videos",
    "observation_filter": "set normalize_observations=True",
    "remote_worker_envs": "set gym_env_vectorize_mode='async'",
    "extra_python_environs_for_driver": "set them in os.environ",
    "extra_python_environs_for_worker": "set them in the runtime_env of ray.init()",
    **dict.fromkeys(
        [
            *("_fake_gpus", "remote_env_batch_wait_ms", "sample_collector", "preprocessor_pref"),
            *("use_worker_filter_stats", "update_worker_filter_stats", "fake_sampler"),
            *("sampler_perf_stats_ema_coef", "keep_per_episode_custom_metrics"),
            *("metrics_episode_collection_timeout_s", "export_native_model_files"),
            *("checkpoint_trainable_policies_only", "_disable_preprocessor_api"),
            *("_disable_action_flattening", "_disable_initialize_loss_from_dummy_batch"),
        ],
        _OLD_STACK,
    ),
}
REFUSED_ON_OLD_STACK = dict.fromkeys(
    [
        *("learner_class", "learner_config_dict", "rl_module_spec", "grad_clip_by"),
        *("torch_compile_learner", "torch_compile_learner_what_to_compile", "torch_ddp_kwargs"),
        *("torch_compile_learner_dynamo_mode", "torch_compile_learner_dynamo_backend"),
        *("torch_skip_nan_gradients", "log_gradients", "custom_stats_cls_lookup"),
        *("_torch_grad_scaler_class", "_torch_lr_scheduler_classes", "gym_env_vectorize_mode"),
        *("env_to_module_connector", "module_to_env_connector", "episodes_to_numpy"),
        *("add_default_connectors_to_env_to_module_pipeline", "episode_lookback_horizon"),
        *("add_default_connectors_to_module_to_env_pipeline", "local_gpu_idx"),
        *("merge_env_runner_states", "broadcast_env_runner_states"),
        *("num_cpus_per_learner", "custom_resources_per_learner", "_use_msgpack_checkpoints"),
    ],
    _NEW_STACK,
)

_ATTRIBUTES = {
    "custom_stats_cls_lookup": "stats_cls_lookup",
    "dataset_num_iters_per_offline_eval_runner": "dataset_num_iters_per_eval_runner",
}


def attribute(config: AlgorithmConfig, argument: str) -> str:
    """Return the name of the attribute in which a setter of RLlib's stores an argument."""
    names = (_ATTRIBUTES.get(argument, argument), f"_{argument}", f"callbacks_{argument}")
    return next(name for name in (*names, f"{argument}_str") if name in vars(config))


def _refused(config: AlgorithmConfig) -> Iterator[tuple[str, str]]:
    """Yield the arguments of RLlib's setters that have no effect with this stack, and the advice."""
    is_new_stack = config.enable_env_runner_and_connector_v2
    refused = REFUSED | (REFUSED_ON_NEW_STACK if is_new_stack else REFUSED_ON_OLD_STACK)
    for name, advice in refused.items():
        if name.endswith("()"):
            setter = getattr(AlgorithmConfig, name.removesuffix("()"))
            for argument, parameter in inspect.signature(setter).parameters.items():
                # RLlib itself refuses deprecated arguments; policies are changed by saving them.
                if parameter.default is NotProvided and argument != "policies":
                    yield argument, advice
        else:
            yield name, advice


def dependent_settings(config: AlgorithmConfig) -> dict[str, Any]:
    """Return the settings whose effect depends on others."""
    return {name: getattr(config, name) for name in _needs()}


def settings_without_effect(
    config: AlgorithmConfig, references: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Yield a message for each setting that was set and does nothing.

    Args:
        config: the configuration.
        references: values that count as not set: the defaults, the presets, those of a checkpoint.
    """

    def was_set(name: str) -> bool:
        value = _plain(getattr(config, name))
        return all(name not in other or value != _plain(other[name]) for other in references)

    for name, alternatives in _needs().items():
        unmet = [[need for need in needs if not need.holds(config)] for needs in alternatives]
        if all(unmet) and was_set(name):
            # An alternative that asks for more than another one is no help.
            unmet = [needs for needs in unmet if not any(set(other) < set(needs) for other in unmet)]
            keys = dict.fromkeys(need.key for needs in unmet for need in needs)
            present = " and ".join(f"{k.removeprefix('_')}={getattr(config, k)!r}" for k in keys)
            advice = ", or ".join(" and ".join(need.advice for need in needs) for needs in unmet)
            yield (
                f"{name}={getattr(config, name)!r} has no effect with {present}: {advice}, or "
                f"leave {name} out."
            )
    for argument, advice in _refused(config):
        name = attribute(config, argument)
        if was_set(name):
            yield f"{argument}={getattr(config, name)!r} has no effect here: {advice}."


def _plain(value: Any) -> Any:
    """Make values comparable that files and Python write differently."""
    return list(value) if isinstance(value, tuple) else value
