"""Every argument of RLlib's setters takes effect, is refused, or is known not to matter here."""

import inspect

import pytest
import torch
from conftest import on_old_stack, tiny_config
from ray.rllib.algorithms.algorithm_config import DEPRECATED_VALUE, AlgorithmConfig, NotProvided
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.connectors.env_to_module import MeanStdFilter
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from rerpi_rllib import RERPIConfig
from rerpi_rllib.algorithm import effects
from rerpi_rllib.algorithm.env_runner import RERPIEnvRunner
from rerpi_rllib.algorithm.learner import RERPITorchLearner
from rerpi_rllib.algorithm.rl_module import RERPITorchRLModule

SETTERS = (
    *("python_environment", "resources", "framework", "api_stack", "environment", "env_runners"),
    *("learners", "training", "callbacks", "evaluation", "offline_data", "multi_agent", "reporting"),
    *("checkpointing", "debugging", "fault_tolerance", "rl_module", "experimental"),
)


class OwnEnvRunner(RERPIEnvRunner):
    pass


class OwnLearner(RERPITorchLearner):
    pass


class OwnModule(RERPITorchRLModule):
    pass


def do_nothing(*args, **kwargs):
    return None


# Arguments that take effect on the new API stack: a value other than the default, and who reads it.
ACTOR_MANAGER = "RLlib's actor manager, which our loop asks for samples"
EVALUATION = "RLlib's Algorithm.evaluate()"
LEARNER = "RLlib's TorchLearner, whose steps are taken where it is set"
LEARNER_GROUP = "RLlib's LearnerGroup"
RESOURCES = "RLlib's resource request"
RUNNER = "RLlib's SingleAgentEnvRunner"
ALGORITHM = "RLlib's Algorithm"
CALLBACK = "RLlib's make_callback"
OWN = "this package"
EFFECTIVE = {
    "num_cpus_for_main_process": (2, RESOURCES),
    "custom_resources_for_main_process": ({"a": 1}, RESOURCES),
    "placement_strategy": ("SPREAD", RESOURCES),
    "framework": ("tf2", f"{OWN}: refused unless it is torch"),
    "torch_compile_learner": (True, LEARNER),
    "torch_compile_learner_what_to_compile": ("complete_update", LEARNER),
    "torch_compile_learner_dynamo_mode": ("max-autotune", LEARNER),
    "torch_compile_learner_dynamo_backend": ("eager", LEARNER),
    "torch_ddp_kwargs": ({"static_graph": True}, LEARNER),
    "torch_skip_nan_gradients": (False, LEARNER),
    "enable_rl_module_and_learner": (False, f"{OWN}: the stack, with the next argument"),
    "enable_env_runner_and_connector_v2": (False, f"{OWN}: the stack, with the last argument"),
    "env": ("CartPole-v1", RUNNER),
    "env_config": ({"g": 9.0}, RUNNER),
    "observation_space": ("a space", "RLlib, for a module without an environment to ask"),
    "action_space": ("a space", "RLlib, for a module without an environment to ask"),
    "normalize_actions": (False, f"{OWN}: refused unless it is True"),
    "env_runner_cls": (OwnEnvRunner, "RLlib's EnvRunnerGroup"),
    "num_env_runners": (2, f"{OWN} and RLlib's EnvRunnerGroup"),
    "create_local_env_runner": (False, ALGORITHM),
    "create_env_on_local_worker": (True, RUNNER),
    "num_envs_per_env_runner": (3, RUNNER),
    "gym_env_vectorize_mode": ("async", RUNNER),
    "num_cpus_per_env_runner": (2, RESOURCES),
    "num_gpus_per_env_runner": (1, RESOURCES),
    "custom_resources_per_env_runner": ({"a": 1}, RESOURCES),
    "validate_env_runners_after_construction": (False, "RLlib's EnvRunnerGroup"),
    "max_requests_in_flight_per_env_runner": (7, ACTOR_MANAGER),
    "env_to_module_connector": (do_nothing, f"{RUNNER}, whose loop is used then"),
    "module_to_env_connector": (do_nothing, f"{RUNNER}, whose loop is used then"),
    "add_default_connectors_to_env_to_module_pipeline": (False, f"{RUNNER}, whose loop is used then"),
    "add_default_connectors_to_module_to_env_pipeline": (False, f"{RUNNER}, whose loop is used then"),
    "episode_lookback_horizon": (5, f"{RUNNER}, for connectors that look back"),
    "merge_env_runner_states": (True, "RLlib's EnvRunnerGroup, for connectors with a state"),
    "broadcast_env_runner_states": (False, "RLlib's EnvRunnerGroup, for connectors with a state"),
    "rollout_fragment_length": (20, RUNNER),
    "batch_mode": ("complete_episodes", RUNNER),
    "explore": (False, RUNNER),
    "episodes_to_numpy": (False, f"{RUNNER}, whose loop is used then"),
    "num_learners": (2, LEARNER_GROUP),
    "num_cpus_per_learner": (2, f"{RESOURCES}, and the threads of a learner"),
    "num_gpus_per_learner": (1, RESOURCES),
    "custom_resources_per_learner": ({"a": 1}, RESOURCES),
    "local_gpu_idx": (1, "RLlib's choice of a learner's device"),
    "learner_class": (OwnLearner, LEARNER_GROUP),
    "learner_config_dict": ({"a": 1}, "a learner_class of the user's; refused without one"),
    "gamma": (0.9, f"{OWN}: the losses"),
    "lr": (1e-3, f"{OWN}: the optimizers"),
    "grad_clip": (1.0, LEARNER),
    "grad_clip_by": ("value", f"{LEARNER}; refused without grad_clip"),
    "train_batch_size": (64, f"{OWN}: the size of a batch"),
    "train_batch_size_per_learner": (64, f"{OWN}: the size of a batch"),
    "model": ({"fcnet_hiddens": [1]}, f"{OWN}: refused without a rl_module_spec"),
    "model_config": ({"a": 1}, f"{OWN}: refused without a rl_module_spec"),
    "rl_module_spec": (RLModuleSpec(module_class=OwnModule), LEARNER_GROUP),
    "callbacks_class": (type("Own", (RLlibCallback,), {}), CALLBACK),
    **{
        f"on_{event}": (do_nothing, CALLBACK)
        for event in (
            *("algorithm_init", "train_result", "evaluate_start", "evaluate_end", "sample_end"),
            *("env_runners_recreated", "checkpoint_loaded", "environment_created"),
            *("episode_created", "episode_start", "episode_step", "episode_end"),
        )
    },
    "evaluation_interval": (2, EVALUATION),
    "evaluation_duration": (3, EVALUATION),
    "evaluation_duration_unit": ("timesteps", EVALUATION),
    "evaluation_auto_duration_min_env_steps_per_sample": (7, EVALUATION),
    "evaluation_auto_duration_max_env_steps_per_sample": (700, EVALUATION),
    "evaluation_sample_timeout_s": (7.0, EVALUATION),
    "evaluation_parallel_to_training": (True, f"{EVALUATION}; refused without its EnvRunners"),
    "evaluation_unhealthy_workers_timeout_s": (7.0, EVALUATION),
    "evaluation_error_after_n_consecutive_skips": (3, EVALUATION),
    "evaluation_force_reset_envs_before_iteration": (False, EVALUATION),
    "evaluation_config": ({"explore": True}, EVALUATION),
    "evaluation_num_env_runners": (1, EVALUATION),
    "custom_evaluation_function": (do_nothing, EVALUATION),
    "metrics_num_episodes_for_smoothing": (3, RUNNER),
    "min_time_s_per_iteration": (2, ALGORITHM),
    "min_train_timesteps_per_iteration": (2, ALGORITHM),
    "min_sample_timesteps_per_iteration": (2, ALGORITHM),
    "log_gradients": (True, LEARNER),
    "custom_stats_cls_lookup": (
        {**AlgorithmConfig().stats_cls_lookup, "own": None},
        "RLlib's MetricsLogger",
    ),
    "log_level": ("ERROR", ALGORITHM),
    "seed": (7, f"{OWN}, {RUNNER} and {LEARNER}"),
    "restart_failed_env_runners": (False, ACTOR_MANAGER),
    "ignore_env_runner_failures": (True, ACTOR_MANAGER),
    "max_num_env_runner_restarts": (7, ACTOR_MANAGER),
    "delay_between_env_runner_restarts_s": (7.0, ACTOR_MANAGER),
    "restart_failed_sub_environments": (True, f"{OWN}: the sampling loop"),
    "num_consecutive_env_runner_failures_tolerance": (7, ALGORITHM),
    "env_runner_health_probe_timeout_s": (7.0, ACTOR_MANAGER),
    "env_runner_restore_timeout_s": (7.0, ALGORITHM),
    "_validate_config": (False, "RLlib's and our validate()"),
    "_use_msgpack_checkpoints": (True, ALGORITHM),
    "_torch_grad_scaler_class": (torch.amp.GradScaler, LEARNER),
    "_torch_lr_scheduler_classes": ([torch.optim.lr_scheduler.ConstantLR], LEARNER),
}
# Effective values that validate() refuses, or accepts only together with another argument.
REFUSED_VALUES = {
    *("framework", "normalize_actions", "model", "model_config", "learner_config_dict"),
    *("grad_clip_by", "evaluation_parallel_to_training", "enable_rl_module_and_learner"),
    *("enable_env_runner_and_connector_v2", "torch_compile_learner_what_to_compile"),
    *("torch_compile_learner_dynamo_mode", "torch_compile_learner_dynamo_backend"),
}
# Values for arguments whose setters refuse others.
OTHER_VALUES = {
    "count_steps_by": "agent_steps",
    "policies_to_train": ["default_policy"],
    "grad_clip_by": "value",
    "num_cpus_per_learner": 2,
}
# Arguments that change nothing, whatever their value; docs/rllib-settings.md says why.
CANNOT_MATTER = {
    "clip_actions": True,
    "disable_env_checking": True,
    "log_sys_usage": False,
    "policies": {"default_policy"},
}


def _arguments():
    """Yield the setter and name of every argument, and whether RLlib has deprecated it."""
    for setter in SETTERS:
        signature = inspect.signature(getattr(AlgorithmConfig, setter))
        for name, parameter in signature.parameters.items():
            if name not in ("self", "kwargs"):
                yield setter, name, parameter.default == DEPRECATED_VALUE


def _refused(stack):
    """Return all arguments that are refused on a stack."""
    config = RERPIConfig()
    if stack == "old":
        config.enable_rl_module_and_learner = config.enable_env_runner_and_connector_v2 = False
    return dict(effects._refused(config))


ARGUMENTS = sorted({(setter, name) for setter, name, deprecated in _arguments() if not deprecated})
DEPRECATED = sorted({(setter, name) for setter, name, deprecated in _arguments() if deprecated})


def _other_value(default):
    """Return another value of the same type as the default."""
    if isinstance(default, bool):
        return not default
    if isinstance(default, (int, float)):
        return default + 1
    if isinstance(default, dict):
        return {**default, "a": 1}
    if isinstance(default, list):
        return [*default, "a"]
    if isinstance(default, type):
        return type("Other", (default,), {})
    return do_nothing if callable(default) else "other"


def _with(setter, name, value, config=None):
    config = config or RERPIConfig().environment("Pendulum-v1")
    return getattr(config, setter)(**{name: value})


def test_all_setters_are_looked_at():
    takes_settings = {
        name
        for name, function in inspect.getmembers(AlgorithmConfig, inspect.isfunction)
        if not name.startswith("_")
        and any(p.default is NotProvided for p in inspect.signature(function).parameters.values())
    }
    assert takes_settings == set(SETTERS), (
        "Ray has other setters of AlgorithmConfig than before: add or remove them in SETTERS."
    )


def test_every_argument_is_classified_once():
    names = {name for _, name in ARGUMENTS}
    refused = set(_refused("new"))
    for name in names:
        places = [
            place
            for place, group in (
                ("EFFECTIVE", EFFECTIVE),
                ("effects.REFUSED", refused),
                ("CANNOT_MATTER", CANNOT_MATTER),
            )
            if name in group
        ]
        assert len(places) == 1, (
            f"AlgorithmConfig's argument {name} is in {places or 'no table'}: find out what it does "
            "here and put it into EFFECTIVE or CANNOT_MATTER of this file, or into REFUSED or "
            "REFUSED_ON_NEW_STACK of rerpi_rllib/algorithm/effects.py."
        )
    for table in (EFFECTIVE, refused, CANNOT_MATTER, _refused("old")):
        assert set(table) <= names, f"Ray has no arguments {set(table) - names} any more."


@pytest.mark.parametrize(
    "stack,setter,name",
    [(s, *pair) for s in ("new", "old") for pair in ARGUMENTS if pair[1] in _refused(s)],
)
def test_refused_arguments(stack, setter, name):
    config = RERPIConfig().environment("Pendulum-v1")
    if stack == "old":
        on_old_stack(config)
    config.training(grad_clip=1.0)  # Then an argument that needs it is refused for its own value.
    default = getattr(config, effects.attribute(config, name))
    _with(setter, name, OTHER_VALUES.get(name, _other_value(default)), config)
    with pytest.raises(ValueError, match=rf"{name}=.* has no effect"):
        config.validate()


@pytest.mark.parametrize(
    "setter,name", [pair for pair in ARGUMENTS if pair[1] in {**EFFECTIVE, **CANNOT_MATTER}]
)
def test_effective_arguments_reach_the_configuration(setter, name):
    value = EFFECTIVE[name][0] if name in EFFECTIVE else CANNOT_MATTER[name]
    config = _with(setter, name, value)
    if name in EFFECTIVE:
        default = RERPIConfig().environment("Pendulum-v1")
        stored = effects.attribute(config, name)
        assert getattr(config, stored) != getattr(default, stored)
    if name in REFUSED_VALUES:
        with pytest.raises(ValueError):
            config.validate()
    else:
        config.validate()


@pytest.mark.parametrize("setter,name", DEPRECATED)
def test_deprecated_arguments_are_refused_or_renamed_by_rllib(setter, name):
    """RLlib raises an error, or stores the value under the new name, or warns that it is gone."""
    before = vars(RERPIConfig()).copy()
    try:
        after = vars(_with(setter, name, 7, RERPIConfig()))
    except ValueError as error:
        assert name in str(error) or "deprecated" in str(error)
    else:
        changed = {key for key in before if after[key] is not before[key]}
        assert any(after[key] == 7 for key in changed) or name == "enable_connectors"


def test_callbacks_and_connectors_are_called():
    called = set()

    class Own(RLlibCallback):
        def on_sample_end(self, **kwargs):
            called.add("class")

    def note(name):
        return lambda **kwargs: called.add(name)

    def connector(*args):
        called.add("connector")
        return MeanStdFilter()

    events = ("environment_created", "episode_created", "episode_start", "episode_step")
    events += ("episode_end", "sample_end")
    config = tiny_config().callbacks(Own, **{f"on_{event}": note(event) for event in events})
    runner = RERPIEnvRunner(
        config=config.env_runners(env_to_module_connector=connector), worker_index=0
    )
    runner.sample(num_episodes=1)
    assert called == {"class", "connector", *events}


@pytest.mark.parametrize(
    "setter,name,value",
    [
        ("training", "epsilon", -1),
        ("training", "n_step", -1),
        ("training", "lr", -1),
        ("training", "train_batch_size_per_learner", -1),
        ("training", "replay_capacity", -1.0),
        ("learners", "num_learners", -1),
        ("debugging", "seed", -1),
    ],
)
def test_minus_one_is_a_wrong_value_like_others(setter, name, value):
    config = _with(setter, name, value)
    with pytest.raises(ValueError, match=rf"{name}={value}.*must be"):
        config.build_algo()
    with pytest.raises(ValueError, match=rf"{name}={value}.*must be"):
        config.algo_class(config=config.to_dict())
