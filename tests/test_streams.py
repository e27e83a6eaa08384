"""Dict observations, from the environment to the replay and the networks, and streams."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import networks_of, on_old_stack, tiny_config

from rerpi_rllib import RERPI, RERPIConfig, envs
from rerpi_rllib.algorithm.env_runner import RERPIEnvRunner
from rerpi_rllib.algorithm.networks import build_networks
from rerpi_rllib.core.layers import ELU, Linear, Streams, Tanh
from rerpi_rllib.core.optimizers import make_optimizers
from rerpi_rllib.core.settings import LearningSettings
from rerpi_rllib.core.updates import run_updates
from rerpi_rllib.envs import states
from rerpi_rllib.runs.checkpoints import load_networks
from rerpi_rllib.runs.evaluation import evaluate

STREAMS = {
    "streams": "always",
    "policy_stream_layers": [8, 6],
    "critic_stream_layers": [12, 8],
    "joint_layers": [16],
}
TASK = "test_streams:DictCourse-v0"


class Course(gym.Env):
    """Two vectors to observe, one of which counts the steps of the episode."""

    observation_space = gym.spaces.Dict(
        {
            "terrain": gym.spaces.Box(-1.0, 1.0, (3,), np.float64),
            "proprioception": gym.spaces.Box(-20.0, 20.0, (2, 1), np.float32),
        }
    )
    action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, config=None):
        self.steps = 0

    def _observe(self):
        terrain = self.np_random.uniform(-1.0, 1.0, 3)
        return {"terrain": terrain, "proprioception": np.full((2, 1), self.steps, np.float32)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._observe(), {}

    def step(self, action):
        self.steps += 1
        return self._observe(), -float(np.square(action).sum()), False, self.steps == 10, {}

    def get_state(self):
        return {"steps": self.steps, "generator": states.get_generator(self.np_random)}

    def set_state(self, state):
        self.steps = state["steps"]
        states.set_generator(self.np_random, state["generator"])


class WithCamera(Course):
    observation_space = gym.spaces.Dict(
        {**Course.observation_space, "eye": gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)}
    )


gym.register("DictCourse-v0", "test_streams:Course")


def _config(env=TASK, **training):
    config = tiny_config(**{**STREAMS, **training}).environment(env)
    default = RERPIConfig()
    # With streams there are none of these layers.
    config.training(policy_layers=default.policy_layers, critic_layers=default.critic_layers)
    return config


@pytest.mark.parametrize("env", [TASK, Course], ids=["by id", "by class"])
@pytest.mark.parametrize("stack", ["new", "old"])
def test_dict_observations_are_stored_flat_and_learned_from(ray_session, stack, env):
    config = _config(env, policy_evaluation="retrace", normalize_observations=True)
    algo = (config if stack == "new" else on_old_stack(config)).build_algo()
    algo.train()
    rows = algo.replay._columns["obs"][: len(algo.replay)]
    # Gymnasium sorts the keys: the number of the step comes first, twice.
    np.testing.assert_array_equal(rows[:11, :2], np.arange(11)[:, None].repeat(2, 1))
    assert rows.shape[1] == 5 and np.unique(rows[:50, 2:]).size > 100
    nets = networks_of(algo)
    assert int(nets.num_updates) > 0
    sizes = [[stream[0].in_features for stream in module.streams] for module in _streams(nets)]
    assert sizes and all(size == [2, 3] for size in sizes)
    algo.stop()


def _streams(nets):
    return [module for module in nets.modules() if isinstance(module, Streams)]


def test_a_run_goes_on_from_a_checkpoint_as_if_nothing_had_happened(ray_session, tmp_path):
    algo = _config(normalize_observations=True).build_algo()
    algo.train()
    algo.save_to_path(tmp_path)
    nets, observations = networks_of(algo), torch.randn(7, 5)
    loaded = load_networks(tmp_path)
    torch.testing.assert_close(loaded.policy(observations).mean, nets.policy(observations).mean)
    assert evaluate(tmp_path, episodes=2)["episode_lengths"] == [10, 10]

    # What a script with the observations of the environment itself does.
    parts = {"terrain": observations[:, 2:].double(), "proprioception": observations[:, :2, None]}
    module = algo.get_module()
    for forward in (module.forward_inference, module.forward_exploration):
        found = forward({"obs": parts})["action_dist_inputs"]
        torch.testing.assert_close(found, forward({"obs": observations})["action_dist_inputs"])

    restored = RERPI.from_checkpoint(str(tmp_path))
    random = torch.get_rng_state()  # It is the process's, and now as it was when it was saved.
    for algorithm in (restored, algo):
        torch.set_rng_state(random)
        algorithm.train()
    np.testing.assert_array_equal(algo.replay._columns["obs"], restored.replay._columns["obs"])
    expected = nets.state_dict()
    for name, tensor in networks_of(restored).state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0.0, atol=0.0, msg=name)
    algo.stop()
    restored.stop()


def _nets(space, **training):
    config = RERPIConfig().training(**training)
    action_space = gym.spaces.Box(-1.0, 1.0, (6,), np.float32)
    return build_networks(space, action_space, config.model_config), config


def _joined(**parts):
    size = sum(parts.values())
    return envs.Joined(np.full(size, -np.inf), np.full(size, np.inf), parts)


PARKOUR = _joined(proprioception=80, terrain=40)


def test_the_papers_streams():
    nets, _ = _nets(PARKOUR)
    network = nets.critic.networks[0]
    for body, width, inputs in (
        (nets.policy.body, 100, 200),
        ([*network.streams, network.first_state, *network.body], 200, 400),
    ):
        streams, joint, last = body
        for stream, size in zip(streams.streams, (80, 40), strict=True):
            assert [type(layer) for layer in stream] == [
                *(Linear, torch.nn.LayerNorm, Tanh),
                *(Linear, ELU),
            ]
            assert stream[0].weight.shape == (width, size)
            assert stream[3].weight.shape == (width, width)
        assert joint.weight.shape == (100, inputs) and isinstance(last, ELU)
    assert network.output.weight.shape == (1, 100)


@pytest.mark.parametrize(
    "space,training,expected",
    [
        (PARKOUR, {"covariance_layers": None, "num_critics": 2}, 6),
        (PARKOUR, {"streams": "never"}, 0),
        (PARKOUR, {"network": "residual"}, 0),
        (PARKOUR, {"policy_layers": (64, 64)}, 0),
        (_joined(position=80, velocity=40), {}, 0),
        (_joined(position=80, velocity=40), {"streams": "always"}, 4),
        (_joined(a=1, b=2, c=3), {"streams": "always", "network": "residual"}, 4),
        (gym.spaces.Box(-1.0, 1.0, (120,), np.float32), {}, 0),
    ],
)
def test_when_there_are_streams(space, training, expected):
    nets, _ = _nets(space, **training)
    # One in each of the policies and critics, online and target.
    assert len(_streams(nets)) == expected


@pytest.mark.parametrize("network", ["paper", "residual"])
@pytest.mark.parametrize("method", ["td0", "retrace"])
def test_streams_learn(network, method):
    training = {"network": network, "policy_evaluation": method, "num_critics": 2}
    sizes = {**STREAMS, "policy_stream_layers": (8, 8), "critic_stream_layers": (8, 8)}
    nets, config = _nets(_joined(a=2, b=3), **training, **sizes)
    for streams in _streams(nets):
        inputs = torch.randn(4, 5, requires_grad=True)
        (gradient,) = torch.autograd.grad(streams(inputs)[:, 0].sum(), inputs)
        assert bool(gradient[:, :2].any()) and not gradient[:, 2:].any()
    before = {name: tensor.clone() for name, tensor in nets.named_parameters()}
    rows, length = 8, () if method == "td0" else (4,)
    batch = {
        "obs": torch.randn(rows, *(n + 1 for n in length), 5),
        "new_obs": torch.randn(rows, *length, 5),
        "actions": torch.randn(rows, *length, 6),
        "rewards": torch.randn(rows, *length),
        "terminateds": torch.zeros(rows, *length),
        "action_logp": torch.randn(rows, *length),
        "loss_mask": torch.ones(rows, *length, dtype=torch.bool),
    }
    settings = LearningSettings.from_mapping(vars(config))
    run_updates(nets, settings, batch, rows, optimizers=make_optimizers(nets))
    for name, tensor in nets.named_parameters():
        if name.startswith(("policy.", "critic.")):
            assert not torch.equal(tensor, before[name]), name


def _runner(env, **env_runners):
    return RERPIEnvRunner(config=_config(env).env_runners(**env_runners), worker_index=0)


def test_what_is_not_supported_is_named(ray_session):
    with pytest.raises(ValueError, match=r"image observations \(eye.*vector observations"):
        _runner(WithCamera)
    with pytest.raises(ValueError, match=r"must be 'sync', or wrap .*VectorObservations"):
        _runner(Course, gym_env_vectorize_mode="async")
    with pytest.raises(ValueError, match=r"streams='always' is not allowed with .*Box.*two or more"):
        _runner("Pendulum-v1")
    # Connectors of the user's see observations as they are, and have to join them.
    with pytest.raises(ValueError, match="let RLlib's FlattenObservations be one"):
        _runner(Course, env_to_module_connector=lambda env, spaces, device: [])
    for training, advice in (
        ({"streams": "always", "policy_layers": (8,)}, "set streams='auto' or streams='never'"),
        ({"joint_layers": (8,)}, "set streams='always'"),
    ):
        with pytest.raises(ValueError, match=advice):
            RERPIConfig().environment(TASK).training(**training).validate()
