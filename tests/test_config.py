"""Settings: the defaults are the paper's, and wrong values are refused at once."""

import numpy as np
import pytest
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.connectors.env_to_module import MeanStdFilter
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from rerpi_rllib import RERPI, DDPGConfig, MPOConfig, RERPIConfig, SVG0Config
from rerpi_rllib.algorithm.rl_module import RERPITorchRLModule
from rerpi_rllib.core.policies import POLICIES


def test_defaults_are_the_papers():
    config = RERPIConfig()
    paper = {
        "policy_layers": (200, 200, 200),
        "critic_layers": (500, 500, 500),
        "num_action_samples": 20,
        "epsilon": 0.1,
        "epsilon_mu": 5e-4,
        "epsilon_sigma": 1e-5,
        "gamma": 0.99,
        "lr": 3e-4,
        "replay_capacity": 2_000_000,
        "target_update_period": 250,
        "num_bootstrap_samples": 1,
        "policy_evaluation": "td0",
        "weighting": "exponential",
        "fit": "decoupled",
        "temperature_solver": "exact",
        "updates_per_env_step": None,
    }
    assert {key: getattr(config, key) for key in paper} == paper
    assert config.total_train_batch_size == 3072
    assert config.num_env_runners == 1 and config.num_learners == 0


@pytest.mark.parametrize(
    "key,value",
    [
        ("epsilon", 0.0),
        ("epsilon", "0.1"),
        ("epsilon_mu", -1e-3),
        ("epsilon_sigma", float("inf")),
        ("weighting", "softmax"),
        ("fit", "both"),
        ("temperature_solver", "newton"),
        ("policy_evaluation", "td1"),
        ("n_step", 0),
        ("retrace_lambda", 1.5),
        ("sequence_length", 0),
        ("ranking_eta", 0.0),
        ("epsilon_pi", 0.0),
        ("epsilon_penalty", 0.0),
        ("per_dimension_kl", "yes"),
        ("num_action_samples", 0),
        ("num_bootstrap_samples", 1.5),
        ("target_update_period", True),
        ("lr", 0),
        ("dual_lr", -1.0),
        ("lr", []),
        ("lr", [1, 2]),
        ("lr", [[0, 1e-3], [10, "a"]]),
        ("dual_lr", [[10, 1e-3], [20, 1e-4]]),
        ("dual_lr", [[0, 1e-3], [20, 1e-4], [10, 1e-5]]),
        ("dual_lr", [[0, 1e-3]]),
        ("replay_capacity", 0),
        ("updates_per_env_step", 0),
        ("policy_layers", []),
        ("critic_layers", [256, 0]),
        ("initial_stddev", 0.0),
        ("gamma", 1.1),
        ("policy", "beta"),
        ("critic", "expectile"),
        ("num_critics", 3),
        ("num_atoms", 1),
        ("value_range", (1.0, 0.0)),
        ("value_range", 5),
        ("epsilon_mixture", 0.0),
        ("num_mixture_components", 0),
        ("entropy_weight", -1.0),
        ("tanh_mean", 1),
        ("env_timeout_s", 0),
        ("max_bad_episode_share", 1.5),
    ],
)
def test_a_wrong_value_is_named(key, value):
    config = RERPIConfig().environment("Pendulum-v1").training(**{key: value})
    with pytest.raises(ValueError) as error:
        config.validate()
    message = str(error.value)
    assert key in message and repr(value) in message and "must be" in message


def test_batch_must_fit_into_the_replay():
    config = RERPIConfig().environment("Pendulum-v1").training(replay_capacity=1000)
    with pytest.raises(ValueError, match=r"3072.*replay_capacity=1000"):
        config.validate()


@pytest.mark.parametrize(
    "settings,words",
    [
        ({"policy_evaluation": "retrace", "sequence_length": 7}, "multiple"),
        ({"policy_evaluation": "nstep", "n_step": 9, "sequence_length": 8}, "n_step=9"),
        ({"per_dimension_kl": True, "fit": "coupled"}, "per_dimension_kl=True.*fit='coupled'"),
        ({"per_dimension_kl": True, "policy": "full_gaussian"}, "per_dimension_kl=True"),
        ({"fit": "value_gradient", "policy": "mixture"}, "'gaussian' or 'full_gaussian' or 'det"),
        ({"policy_evaluation": "retrace", "critic": "quantile"}, "'scalar' or 'categorical'"),
        ({"min_stddev": 0.5}, "min_stddev=0.5"),
        ({"epsilon_penalty": 1e-3, "weighting": "identity"}, "epsilon_penalty"),
    ],
)
def test_settings_that_do_not_go_together(settings, words):
    config = RERPIConfig().environment("Pendulum-v1").training(**settings)
    with pytest.raises(ValueError, match=words):
        config.validate()


# Settings for a choice that was not made, the choices made, and what the message must name.
NO_EFFECT = [
    ({"n_step": 3}, "policy_evaluation='td0': set policy_evaluation='nstep'"),
    ({"retrace_lambda": 0.5, "policy_evaluation": "nstep"}, "set policy_evaluation='retrace'"),
    ({"sequence_length": 16}, "set policy_evaluation='nstep' or policy_evaluation='retrace'"),
    ({"ranking_eta": 0.5}, "set weighting='ranking'"),
    ({"epsilon": 0.7, "weighting": "ranking"}, "set weighting='exponential'"),
    (
        {"temperature_solver": "adam", "weighting": "ranking", "epsilon_penalty": None},
        "set weighting='exponential', or set epsilon_penalty, or leave",
    ),
    ({"epsilon_mu": 0.7, "fit": "coupled"}, "set fit='decoupled'"),
    ({"epsilon_sigma": 0.7, "fit": "unconstrained"}, "set fit='decoupled'"),
    ({"epsilon_sigma": 0.7, "policy": "deterministic"}, "set policy='gaussian'"),
    ({"epsilon_pi": 0.7}, "set fit='coupled', or set policy='categorical'"),
    ({"epsilon_mixture": 0.7}, "set policy='mixture'"),
    ({"num_mixture_components": 7}, "set policy='mixture'"),
    ({"entropy_weight": 0.7}, "set fit='value_gradient'"),
    ({"num_atoms": 7}, "set critic='categorical' or critic='hl_gauss' or critic='quantile'"),
    ({"value_range": [0.0, 1.0], "critic": "hl_gauss", "normalize_returns": True}, "False"),
    ({"value_range": [0.0, 1.0], "critic": "quantile"}, "set critic='categorical'"),
    ({"epsilon_penalty": 0.7, "policy": "categorical"}, "choose another policy"),
    ({"epsilon_penalty": 0.7, "fit": "value_gradient"}, "set fit='decoupled'"),
    ({"num_action_samples": 7, "policy": "categorical"}, "choose another policy"),
    ({"num_bootstrap_samples": 7, "policy": "categorical"}, "set critic='quantile'"),
    ({"min_stddev": 0.1, "policy": "deterministic"}, "choose another policy"),
    ({"tanh_mean": True, "policy": "categorical"}, "choose another policy"),
    ({"initial_stddev": 0.7, "policy": "categorical"}, "choose another policy"),
    ({"weighting": "ranking", "fit": "value_gradient"}, "set fit='decoupled' or fit='coupled'"),
    ({"dual_lr": 0.7, "fit": "unconstrained"}, "or set temperature_solver='adam', or leave"),
    ({"per_dimension_kl": True, "fit": "unconstrained"}, "set fit='decoupled'"),
    ({"grad_clip_by": "value"}, "set grad_clip"),
]


@pytest.mark.parametrize("settings,words", NO_EFFECT, ids=[next(iter(s)) for s, _ in NO_EFFECT])
def test_what_has_no_effect_is_refused(settings, words):
    key, value = next(iter(settings.items()))
    for make in (RERPIConfig, RERPIConfig.compact, RERPIConfig.strong):
        for give in ("training", "update_from_dict", "setattr"):
            config = make().environment("Pendulum-v1")
            if give == "training":
                config.training(**settings)
            elif give == "update_from_dict":
                config.update_from_dict(settings)
            else:
                for name, setting in settings.items():
                    setattr(config, name, setting)
            with pytest.raises(ValueError) as error:
                config.validate()
            message = str(error.value)
            assert message.startswith(f"{key}={value!r} has no effect with ")
            assert words in message and f"or leave {key} out." in message


@pytest.mark.parametrize("algorithm", [RERPIConfig, MPOConfig, SVG0Config, DDPGConfig])
@pytest.mark.parametrize("preset", [None, "compact", "strong"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"weighting": "ranking"},
        {"fit": "unconstrained"},
        {"fit": "coupled"},
        {"policy_evaluation": "retrace"},
        {"policy": "deterministic", "initial_stddev": 0.4},
    ],
    ids=str,
)
def test_presets_subclasses_and_copies_may_hold_what_has_no_effect(algorithm, preset, settings):
    """A sweep over a choice keeps the preset's other settings; checkpoints and Tune hold them all."""
    config = (getattr(algorithm, preset) if preset else algorithm)().training(**settings)
    config.environment("Pendulum-v1")
    if "weighting" in settings and algorithm in (SVG0Config, DDPGConfig):
        with pytest.raises(ValueError, match="weighting='ranking' has no effect"):
            config.validate()  # Value gradients use no weights.
        return
    config.validate()
    algorithm.from_dict(config.to_dict()).validate()
    algorithm().update_from_dict(config.to_dict()).validate()
    AlgorithmConfig.from_state(config.get_state()).validate()
    config.copy(copy_frozen=True).copy(copy_frozen=False).validate()


def test_a_checkpoint_may_hold_the_values_of_an_older_preset(monkeypatch):
    config = MPOConfig.compact().environment("Pendulum-v1")
    other = config.copy(copy_frozen=False)
    config.validate()
    config.freeze()
    state = config.get_state()
    monkeypatch.setattr("rerpi_rllib.algorithm.config.PRESETS", ())  # The preset no longer exists.
    with pytest.raises(ValueError, match=r"epsilon_mu=0\.01 has no effect"):
        other.validate()
    config.copy(copy_frozen=False).validate()
    restored = AlgorithmConfig.from_state(state)
    restored.validate()
    with pytest.raises(ValueError, match=r"epsilon_mu=0\.7 has no effect"):
        restored.training(epsilon_mu=0.7).validate()


def test_a_class_of_the_users_has_its_own_defaults():
    class Own(RERPIConfig):
        def __init__(self, algo_class=None):
            super().__init__(algo_class=algo_class)
            self.n_step = 3

    Own().environment("Pendulum-v1").validate()
    with pytest.raises(ValueError, match="n_step=4 has no effect"):
        Own().environment("Pendulum-v1").training(n_step=4).validate()


def test_a_policy_of_the_users_may_be_registered(monkeypatch):
    config = RERPIConfig().environment("Pendulum-v1").training(policy="own", tanh_mean=True)
    with pytest.raises(ValueError, match=r"policy='own'.*'gaussian', .*'deterministic'"):
        config.validate()
    monkeypatch.setitem(POLICIES, "own", type("Own", (POLICIES["gaussian"],), {}))
    config.training(epsilon_mu=0.7).validate()


@pytest.mark.parametrize("fit", ["decoupled", "coupled"])
@pytest.mark.parametrize("periods", [(1, 1), (10, 11), (10, 10), (10, 6)])
def test_the_trust_region_needs_two_steps_between_target_copies(fit, periods):
    target, policy = periods
    config = RERPIConfig().environment("Pendulum-v1")
    config.training(fit=fit, target_update_period=target, policy_update_period=policy)
    with pytest.raises(ValueError, match=f"target_update_period={target}.*_period={policy} "):
        config.validate()
    config.training(target_update_period=2 * policy).validate()
    config.training(fit="unconstrained", target_update_period=target).validate()


def test_a_window_must_fit_into_an_environments_share_of_the_replay():
    config = RERPIConfig().environment("Pendulum-v1").training(replay_capacity=4000)
    config.env_runners(num_env_runners=2, num_envs_per_env_runner=300).validate()
    with pytest.raises(ValueError, match=r"replay_capacity=4000.*600 env.*sequence_length=8"):
        config.training(policy_evaluation="retrace").validate()


def test_a_vectorised_environment_must_exist():
    config = RERPIConfig().env_runners(gym_env_vectorize_mode="vector_entry_point")
    config.environment("CartPole-v1").training(policy="categorical").validate()
    with pytest.raises(ValueError, match=r"vectorize_mode='vector_entry_point'.*'Pendulum-v1'"):
        config.environment("Pendulum-v1").training(policy="gaussian").validate()


def test_several_agents_are_refused():
    config = RERPIConfig().environment("Pendulum-v1").multi_agent(policies={"a", "b"})
    with pytest.raises(ValueError, match=r"multi_agent.*one agent"):
        config.validate()


def test_numbers_of_numpy_are_numbers():
    config = RERPIConfig().environment("Pendulum-v1").debugging(log_level="ERROR")
    config.training(num_action_samples=np.int64(20), epsilon=np.float32(0.1)).validate()
    config.training(lr=[[0, 3e-4], [10_000, 1e-4]]).validate()


def test_networks_of_rllibs_catalog_are_refused():
    config = RERPIConfig().environment("Pendulum-v1").rl_module(model_config={"fcnet_hiddens": [64]})
    with pytest.raises(ValueError, match="policy_layers and critic_layers"):
        config.validate()
    # A module of the user's own may have settings of its own.
    spec = RLModuleSpec(module_class=type("Own", (RERPITorchRLModule,), {}))
    config.rl_module(rl_module_spec=spec, model_config={"depth": 3}).validate()


def test_env_runners_share_the_state_of_connectors_of_the_users():
    config = RERPIConfig().environment("Pendulum-v1")
    config.validate()
    assert config._dont_auto_sync_env_runner_states
    config.env_runners(env_to_module_connector=lambda env, spaces, device: MeanStdFilter())
    config.validate()
    assert not config._dont_auto_sync_env_runner_states


def test_unknown_setting_is_refused():
    with pytest.raises(TypeError, match="epsilon_nu"):
        RERPIConfig().training(epsilon_nu=1.0)


def test_batch_size_by_either_of_rllibs_names():
    config = RERPIConfig().training(train_batch_size_per_learner=64).learners(num_learners=2)
    assert config.total_train_batch_size == 128
    assert RERPIConfig.compact().training(train_batch_size=512).total_train_batch_size == 512


def _bundles(**learners):
    config = RERPIConfig().environment("Pendulum-v1").learners(**learners)
    return RERPI.default_resource_request(config.to_dict()).bundles


def test_resources():
    # There is no GPU here: the learner requests none, and the EnvRunner requests one CPU.
    assert _bundles() == [{"CPU": 1}, {"CPU": 1}]
    # A GPU is requested for a learner in the main process, or for each remote learner.
    assert _bundles(num_gpus_per_learner=1)[0] == {"CPU": 1, "GPU": 1}
    bundles = _bundles(num_learners=2, num_gpus_per_learner=1)
    assert sum(bundle.get("GPU", 0) for bundle in bundles) == 2


def test_learner_takes_a_gpu_when_the_cluster_has_one(monkeypatch):
    from rerpi_rllib.algorithm import config as module

    monkeypatch.setattr(module.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(module.ray, "cluster_resources", lambda: {"CPU": 8, "GPU": 1})
    assert _bundles()[0] == {"CPU": 1, "GPU": 1}
    # One GPU is not enough for two learners.
    assert all("GPU" not in bundle for bundle in _bundles(num_learners=2))


def test_nobody_waits_for_an_environment_in_the_main_process():
    config = RERPIConfig().environment("Pendulum-v1").training(env_timeout_s=60.0)
    config.validate()
    config.env_runners(num_env_runners=0)
    with pytest.raises(ValueError, match=r"env_timeout_s=60.0 has no effect with num_env_runners=0"):
        config.validate()
    config.training(env_timeout_s=300.0).validate()
