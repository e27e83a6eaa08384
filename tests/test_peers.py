"""Several learners make the updates that one would make with the joined batch."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import SMALL

from rerpi_rllib import RERPIConfig
from rerpi_rllib.algorithm.networks import build_networks
from rerpi_rllib.core import weights
from rerpi_rllib.core.optimizers import make_optimizers
from rerpi_rllib.core.peers import Peers
from rerpi_rllib.core.policies.gaussian import Gaussian
from rerpi_rllib.core.settings import LearningSettings
from rerpi_rllib.core.updates import run_updates

UPDATES, ROWS, LENGTH = 12, 16, 4


def _sample_by_state(self, n):
    """Draw actions that depend on the state alone, so that a state has the same in any batch."""
    numbers = torch.arange(1, n + 1, dtype=self.mean.dtype)[:, None, None]
    return self.displaced(1.5 * torch.sin(37.0 * numbers + 50.0 * numbers.sqrt() * self.mean))


def _settings(evaluation, per_dimension):
    config = RERPIConfig().training(**SMALL)
    config.training(
        policy_evaluation=evaluation,
        epsilon_mu=1e-2,
        epsilon_sigma=1e-3,
        epsilon_penalty=0.05,
        per_dimension_kl=per_dimension,
        target_update_period=5,
        policy_update_period=2,
        multiplier_schedule="always",
    )
    if evaluation != "td0":
        config.training(sequence_length=LENGTH, n_step=3)
    return config.model_config


def _batch(evaluation):
    """Make a batch of all updates, with steps in different numbers in its halves."""
    generator = torch.Generator().manual_seed(1)
    rows, windows = (UPDATES * ROWS,), () if evaluation == "td0" else (LENGTH,)

    def random(*shape):
        return torch.randn(*rows, *shape, generator=generator, dtype=torch.float64)

    mask = torch.ones(*rows, *windows, dtype=torch.bool)
    if windows:
        mask[: rows[0] // 2 : 3, 1] = False
    return {
        "obs": random(*(length + 1 for length in windows), 3),
        "new_obs": random(*windows, 3),
        "actions": random(*windows, 2),
        "rewards": random(*windows),
        "terminateds": (random(*windows) > 1.5).double(),
        "action_logp": random(*windows) - 2.0,
        "loss_mask": mask,
    }


def _share(batch, rank, world):
    """Return the part of a batch for one learner, with its part of each update's rows."""
    return {
        key: column.unflatten(0, (UPDATES, world, ROWS // world))[:, rank].flatten(0, 1)
        for key, column in batch.items()
    }


def _learn(model_config, batch, peers=None, rows=ROWS):
    space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    torch.manual_seed(0)
    nets = build_networks(gym.spaces.Box(-9.0, 9.0, (3,), np.float32), space, model_config).double()
    nets.target_policy.load_state_dict(nets.policy.state_dict())
    if peers is not None:
        nets.peers = peers
    settings = LearningSettings(**model_config["learning"])
    metrics = run_updates(
        nets, settings, batch, rows, optimizers=make_optimizers(nets, lr=1e-2, dual_lr=1e-2)
    )
    return nets.state_dict(), metrics


CASES = [("td0", False), ("nstep", True), ("retrace", False)]


def _one_of_two(rank, directory):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=2
    )
    Gaussian.reparameterized_sample = _sample_by_state
    peers = Peers(torch.device("cpu"))
    results = [
        _learn(_settings(*case), _share(_batch(case[0]), rank, 2), peers, ROWS // 2) for case in CASES
    ]
    sound = [peers.agree(True), peers.agree(rank == 0)]
    # With one state far above the others, which only one of them has.
    q_values = torch.randn(9, 20, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    q_values[:, 3] *= 1e3
    half = q_values[:, rank * 10 : rank * 10 + 10]
    temperature = weights.solve_temperature(half, 0.1, peers=peers)
    torch.save((results, sound, temperature, q_values), f"{directory}/{rank}.pt")


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """What two learners have learned in processes of their own."""
    directory = tmp_path_factory.mktemp("together")
    torch.multiprocessing.spawn(_one_of_two, (str(directory),), nprocs=2)
    return [torch.load(directory / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("number,case", enumerate(CASES), ids=[case[0] for case in CASES])
def test_two_learners_are_one_with_the_joined_batch(together, monkeypatch, number, case):
    monkeypatch.setattr(Gaussian, "reparameterized_sample", _sample_by_state)
    model_config = _settings(*case)
    one, metrics = _learn(model_config, _batch(case[0]))
    (first, first_metrics), (second, second_metrics) = (results[number] for results, *_ in together)
    assert all(torch.equal(first[name], second[name]) for name in first)
    for name, value in one.items():
        torch.testing.assert_close(first[name], value, rtol=1e-5, atol=1e-9, msg=name)
    # Each alone, on its own share, would have learned something else.
    alone, _ = _learn(model_config, _share(_batch(case[0]), 0, 2), rows=ROWS // 2)
    assert not torch.allclose(
        alone["critic.networks.0.output.weight"], one["critic.networks.0.output.weight"], rtol=1e-3
    )
    assert first_metrics["temperature"] == second_metrics["temperature"]
    for name in ("temperature", "kl_nonparametric", "kl_mu", "kl_sigma", "alpha_mu"):
        mean = (first_metrics[name] + second_metrics[name]) / 2
        assert mean == pytest.approx(metrics[name], rel=1e-5), name


def test_all_of_them_have_to_be_sound_and_solve_for_one_temperature(together):
    for _, sound, temperature, q_values in together:
        assert sound == [True, False]
        expected = weights.solve_temperature(q_values, 0.1)
        torch.testing.assert_close(temperature, expected, rtol=1e-9, atol=0.0)
