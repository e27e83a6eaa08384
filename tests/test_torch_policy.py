"""RLlib's old API stack: the same algorithm, with what users of that stack expect of a policy."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import METRICS, SMALL, on_old_stack, tiny_config
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.policy.policy import Policy
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch
from ray.tune.registry import register_env

from rerpi_rllib import RERPI, SVG0Config
from rerpi_rllib.algorithm.torch_policy import RERPITorchPolicy

pytestmark = pytest.mark.usefixtures("ray_session")

MODULE = "default_policy"


def nets_of(learner):
    return learner.module[MODULE].nets


@pytest.fixture
def build():
    """Return a function that builds algorithms, which are all stopped at the end."""
    built = []

    def make(config):
        built.append(config.build_algo())
        return built[-1]

    yield make
    for algo in built:
        algo.stop()


VARIANTS = [
    {"policy_evaluation": method, "fit": fit}
    for method in ("td0", "retrace")
    for fit in ("decoupled", "coupled")
]


def _both(build, **settings):
    """Return a learner and a policy with equal weights, different from the targets', and a batch."""
    algo = build(tiny_config(**settings))
    for _ in range(2):
        algo.train()
    learner = algo.learner_group._learner
    policy = build(on_old_stack(tiny_config(**settings))).get_policy()
    nets = learner.module[MODULE].nets
    with torch.no_grad():
        for parameter in nets.policy.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    policy.model.nets.load_state_dict(nets.state_dict())
    config = algo.config
    rows = 32 // config.steps_per_row
    batch = (
        algo.replay.sample(rows)
        if config.policy_evaluation == "td0"
        else algo.replay.sample_sequences(rows, config.sequence_length)
    )
    return learner, policy, batch


@pytest.mark.parametrize("settings", VARIANTS)
def test_both_stacks_have_the_same_losses_kls_and_gradients(build, settings):
    learner, policy, batch = _both(build, **settings)
    tensors = {name: torch.as_tensor(column) for name, column in batch.items()}

    torch.manual_seed(0)
    out = learner.module.forward_train({MODULE: dict(tensors)})
    loss = learner.compute_loss_for_module(
        module_id=MODULE, config=learner.config, batch=tensors, fwd_out=out[MODULE]
    )
    of_learner = learner.compute_gradients({MODULE: loss})
    names = dict(learner.module[MODULE].named_parameters())

    torch.manual_seed(0)
    given = SampleBatch(batch)
    given.zero_padded = True
    of_policy, info = policy.compute_gradients(given)

    metrics = out[MODULE]["metrics"]
    assert set(METRICS[:2]) < set(metrics)
    for name, value in metrics.items():
        assert info["learner_stats"][name] == pytest.approx(float(value), rel=1e-6, abs=1e-6), name
    kl = "kl_mu" if settings["fit"] == "decoupled" else "kl_pi"
    assert float(metrics[kl]) > 0.0
    for (name, _), gradient in zip(policy.model.named_parameters(), of_policy):
        if name.startswith("nets.target"):
            assert gradient is None
            continue
        expected = of_learner[learner.get_param_ref(names[name])]
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-6)


def test_both_stacks_are_the_same_after_many_updates(build):
    """The updates include several target copies and steps of the policy and the multipliers."""
    learner, policy, _ = _both(build, policy_update_period=2, target_update_period=10)
    assert torch.equal(nets_of(learner).num_updates, policy.model.nets.num_updates)
    for group in policy._optimizers:
        group.state.clear()
    for optimizer in learner._named_optimizers.values():
        optimizer.state.clear()
    g = np.random.default_rng(0)
    rows = 45 * 32
    batch = {
        "obs": g.normal(size=(rows, 3)).astype(np.float32),
        "new_obs": g.normal(size=(rows, 3)).astype(np.float32),
        "actions": g.normal(size=(rows, 1)).astype(np.float32),
        "rewards": g.normal(size=rows).astype(np.float32),
        "terminateds": np.zeros(rows, np.float32),
    }
    torch.manual_seed(1)
    learner.update(
        training_data=TrainingData(batch=MultiAgentBatch({MODULE: SampleBatch(batch)}, rows)),
        timesteps={"num_env_steps_sampled_lifetime": 0},
        minibatch_size=32,
    )
    torch.manual_seed(1)
    results = policy.learn_on_batch(SampleBatch(batch))
    assert results["num_agent_steps_trained"] == rows and policy.num_grad_updates == 45
    assert {"kl_mu_at_target_update", *METRICS} <= set(results["learner_stats"])
    expected = learner.module[MODULE].nets.state_dict()
    for name, value in policy.model.nets.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


class _OwnPolicy(RERPITorchPolicy):
    """Uses other rewards in its loss."""

    def loss(self, model, dist_class, train_batch, *args, **kwargs):
        changed = {**train_batch, "rewards": torch.full_like(train_batch["rewards"], 100.0)}
        return super().loss(model, dist_class, changed, *args, **kwargs)


def test_a_loss_of_the_users_counts():
    rewards = torch.zeros(64)
    batch = SampleBatch(
        obs=torch.zeros(64, 3), new_obs=torch.zeros(64, 3), actions=torch.zeros(64, 1),
        rewards=rewards, terminateds=torch.ones(64),
    )  # fmt: skip
    config = on_old_stack(tiny_config()).to_dict() | {"train_batch_size": 32}
    spaces = (gym.spaces.Box(-1.0, 1.0, (3,)), gym.spaces.Box(-1.0, 1.0, (1,)))
    losses = [
        kind(*spaces, config).learn_on_batch(batch)["learner_stats"]["critic_loss"]
        for kind in (RERPITorchPolicy, _OwnPolicy)
    ]
    assert losses[0] < 10.0 and losses[1] > 1000.0


@pytest.mark.parametrize("runners", [0, 1])
def test_training_keeps_the_ratio_and_fills_the_replay(build, runners):
    config = on_old_stack(tiny_config()).env_runners(num_env_runners=runners)
    algo = build(config.reporting(min_sample_timesteps_per_iteration=2500))
    assert isinstance(algo.get_policy(), RERPITorchPolicy)
    result = algo.train()
    steps, updates = (result[f"num_{k}_lifetime"] for k in ("env_steps_sampled", "updates"))
    assert updates / steps == pytest.approx(0.5, rel=0.05)
    assert len(algo.replay) == steps
    assert set(METRICS) <= set(result["learners"][MODULE])
    assert result["info"]["learner"][MODULE]["learner_stats"] == result["learners"][MODULE]
    assert np.isfinite(result["env_runners"]["episode_return_mean"])


def test_both_stacks_record_the_same_kind_of_data(build):
    """Episodes end where they should, and log-densities are those of the actions taken."""
    for config in (tiny_config(), on_old_stack(tiny_config())):
        algo = build(config)
        algo.train()
        windows = algo.replay.sample_sequences(200, 8)
        mask = windows["loss_mask"]
        assert not mask.all() and not windows["terminateds"][mask].any()
        # Pendulum's observation is (cos, sin, velocity), which changes little from step to step.
        moves = np.abs(np.diff(windows["obs"][..., :2], axis=1))[mask]
        assert moves.max() < 0.5
        assert np.isfinite(windows["action_logp"]).all() and windows["action_logp"].std() > 0


def test_actions_with_and_without_exploration(build):
    policy = build(on_old_stack(tiny_config())).get_policy()
    observations = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    greedy, _, extra = policy.compute_actions(observations, explore=False)
    again, _, _ = policy.compute_actions(observations, explore=False)
    assert greedy.shape == (5, 1) and np.array_equal(greedy, again)
    sampled, _, extra = policy.compute_actions(observations, explore=True)
    assert not np.array_equal(greedy, sampled)
    with torch.no_grad():
        distribution = policy.model.nets.policy(torch.as_tensor(observations))
        expected = distribution.log_prob(torch.as_tensor(sampled))
    np.testing.assert_allclose(extra["action_logp"], expected, rtol=1e-5)
    single, _, _ = policy.compute_single_action(observations[0], explore=False)
    np.testing.assert_allclose(single, greedy[0], rtol=1e-5)


def test_exploration_noise_that_is_similar_from_step_to_step(build):
    policy = build(on_old_stack(tiny_config(noise_correlation=0.9))).get_policy()
    observations = np.zeros((1, 3), np.float32)
    actions = np.array([policy.compute_actions(observations, explore=True)[0][0] for _ in range(500)])
    assert np.corrcoef(actions[1:, 0], actions[:-1, 0])[0, 1] > 0.7


def test_checkpoints_weights_and_export(build, tmp_path):
    config = on_old_stack(tiny_config())
    algo = build(config)
    algo.train()
    algo.save(str(tmp_path / "algo"))
    policy, observation = algo.get_policy(), np.ones(3, np.float32)
    expected, _, _ = policy.compute_single_action(observation, explore=False)

    loaded = Policy.from_checkpoint(str(tmp_path / "algo" / "policies" / MODULE))
    assert int(loaded.model.nets.num_updates) == int(policy.model.nets.num_updates) == 100
    np.testing.assert_array_equal(
        loaded.compute_single_action(observation, explore=False)[0], expected
    )
    for a, b in zip(loaded._optimizers, policy._optimizers):
        assert a.state_dict()["state"].keys() == b.state_dict()["state"].keys() != set()

    restored = build(config.copy(copy_frozen=False))
    restored.restore(str(tmp_path / "algo"))
    assert len(restored.replay) == len(algo.replay)
    for a, b in zip(algo.replay.sample(50).values(), restored.replay.sample(50).values()):
        np.testing.assert_array_equal(a, b)
    before = algo.train(), restored.train()
    assert before[0]["num_updates_lifetime"] == before[1]["num_updates_lifetime"] == 200

    other = build(on_old_stack(tiny_config()).debugging(seed=9)).get_policy()
    other.set_weights(policy.get_weights())
    for name, value in policy.get_weights().items():
        np.testing.assert_array_equal(other.get_weights()[name], value)

    policy.export_model(str(tmp_path / "export"))
    model = torch.load(tmp_path / "export" / "model.pt", weights_only=False)
    actions, _ = model({"obs": torch.as_tensor(observation)[None]})
    now, _, _ = policy.compute_single_action(observation, explore=False)
    np.testing.assert_allclose(actions.detach().numpy()[0], now, rtol=1e-6)


def test_other_algorithms_and_discrete_actions(build):
    small = {**SMALL, "env": "Pendulum-v1", "num_env_runners": 0}
    config = SVG0Config().update_from_dict(small)
    assert np.isfinite(build(on_old_stack(config)).train()["learners"][MODULE]["critic_loss"])
    config = tiny_config(policy="categorical").environment("CartPole-v1")
    assert np.isfinite(build(on_old_stack(config)).train()["learners"][MODULE]["kl_pi"])


def test_learning_may_start_late(build):
    """RLlib considers a hundred training steps without a result a failure."""
    config = on_old_stack(tiny_config(num_steps_sampled_before_learning_starts=2500))
    config.env_runners(rollout_fragment_length=10)
    result = build(config.reporting(min_sample_timesteps_per_iteration=2600)).train()
    assert result["num_env_steps_sampled_lifetime"] == 2600 and result["num_updates_lifetime"] > 0


class _Failing(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (3,))
    action_space = gym.spaces.Box(-1, 1, (1,))

    def reset(self, **kwargs):
        return np.zeros(3, np.float32), {}

    def step(self, action):
        raise OSError("the robot is on fire")


@pytest.mark.parametrize("runners", [0, 1])
def test_a_failing_environment_ends_the_run_with_its_message(build, runners):
    register_env("failing-old", lambda _: _Failing())
    config = (
        on_old_stack(tiny_config()).environment("failing-old").env_runners(num_env_runners=runners)
    )
    algo = build(config)
    with pytest.raises(RuntimeError, match="on fire"):
        algo.train()


def test_evaluation_is_greedy_also_after_a_restore_and_replay_is_loaded(build, tmp_path):
    config = on_old_stack(tiny_config()).evaluation(evaluation_interval=1, evaluation_duration=1)
    first = build(config)
    first.train()
    first.save(str(tmp_path))
    restored = RERPI.from_checkpoint(str(tmp_path))
    try:
        assert len(restored.replay) == len(first.replay) > 0
        observations = np.ones((20, 3), np.float32)
        for algo in (first, restored):
            policy = algo.eval_env_runner_group.local_env_runner.policy_map[MODULE]
            actions, _, _ = policy.compute_actions(observations)
            assert np.ptp(actions) < 1e-6
            assert "evaluation" in algo.train()
    finally:
        restored.stop()


def test_gradients_are_clipped(build):
    policy = build(on_old_stack(tiny_config(grad_clip=1e-3))).get_policy()
    g = np.random.default_rng(0)
    batch = {name: g.normal(size=(32, 3)).astype(np.float32) for name in ("obs", "new_obs")}
    batch |= {name: 100 * g.normal(size=32).astype(np.float32) for name in ("rewards", "terminateds")}
    policy.learn_on_batch(SampleBatch(batch | {"actions": np.zeros((32, 1), np.float32)}))
    norm = torch.stack([p.grad.norm() for p in policy.model.nets.critic.parameters()]).norm()
    assert float(norm) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(
    "settings,words",
    [
        ({"num_gpus": 2}, "num_gpus=2"),
        ({"num_learners": 2}, "num_learners=2"),
        ({"lr": [[0, 1e-3], [100, 1e-4]]}, "old API stack"),
        ({"enable_rl_module_and_learner": True}, "both"),
    ],
)
def test_what_the_old_stack_cannot_do(settings, words):
    config = on_old_stack(tiny_config())
    for key, value in settings.items():
        setattr(config, key, value)
    with pytest.raises(ValueError, match=words):
        config.validate()


def test_gpu_request():
    config = (
        on_old_stack(tiny_config()).env_runners(num_env_runners=1).learners(num_gpus_per_learner=1)
    )
    bundles = RERPI.default_resource_request(config.to_dict()).bundles
    assert bundles[0] == {"CPU": 1, "GPU": 1} and bundles[1]["CPU"] == 1
