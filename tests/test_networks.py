"""Networks and losses: shapes, sharing, and which parameters get which gradients."""

import copy
import pickle

import pytest
import torch
from conftest import METRICS

from rerpi_rllib import RERPIConfig, core
from rerpi_rllib.algorithm.networks import act, record_act
from rerpi_rllib.core import layers
from rerpi_rllib.core.critics import CategoricalHead, Critic, QuantileHead, SmoothedHead
from rerpi_rllib.core.layers import ELU, Tanh
from rerpi_rllib.core.losses import (
    _td0_targets,
    _window_targets,
    critic_targets,
    prepare,
    rerpi_losses,
)
from rerpi_rllib.core.multipliers import Multiplier
from rerpi_rllib.core.networks import ActorCritic
from rerpi_rllib.core.optimizers import make_optimizers
from rerpi_rllib.core.plan import Plan
from rerpi_rllib.core.policies import POLICIES
from rerpi_rllib.core.settings import LearningSettings
from rerpi_rllib.core.updates import run_updates


def _nets(policy=None, critic=None, settings=None, clip_actions=True, networks=None):
    torch.manual_seed(0)
    return ActorCritic(
        5,
        3,
        policy={"layers": (32, 16), "initial_stddev": 0.4, **(policy or {})},
        critic={"layers": (32, 16), **(critic or {})},
        networks=networks,
        clip_actions=clip_actions,
        constraints=(settings or _settings()).constraints(bounded_actions=clip_actions),
    )


def _settings(**kwargs):
    defaults = {**vars(RERPIConfig()), "num_bootstrap_samples": 2}
    return LearningSettings.from_mapping({**defaults, **kwargs})


def rerpi_loss(nets, batch, settings):
    """Return the sum of all losses, each of which moves only its own parameters, and the metrics."""
    losses, metrics = rerpi_losses(nets, batch, settings)
    return torch.stack(list(losses.values())).sum(), metrics


def _batch(size=16):
    g = torch.Generator().manual_seed(1)
    r = lambda *s: torch.randn(*s, generator=g)  # noqa: E731
    return {
        "obs": r(size, 5),
        "new_obs": r(size, 5),
        "actions": r(size, 3),
        "rewards": r(size),
        "terminateds": (r(size) > 1).float(),
    }


def test_papers_layers():
    nets = _nets(policy={"layers": (200, 200, 200)}, critic={"layers": (500, 500, 500)})
    network = nets.critic.networks[0]
    for body in ([network.first_state, *network.body], nets.policy.body):
        kinds = [type(layer).__name__ for layer in body]
        assert kinds == ["Linear", "LayerNorm", "Tanh", "Linear", "ELU", "Linear", "ELU"]
    assert network.first_state.weight.shape == (500, 5)
    assert network.first_action.weight.shape == (500, 3)


def test_initial_policy():
    policy = _nets().policy(10 * torch.randn(64, 5))
    assert float(policy.mean.detach().abs().max()) < 0.05
    torch.testing.assert_close(policy.stddev, torch.full((64, 3), 0.4), atol=0.02, rtol=0)


def test_critic_of_many_actions_is_the_critic_of_each_and_sees_them_clipped():
    critic = _nets().critic
    obs, actions = torch.randn(8, 5), 2 * torch.randn(20, 8, 3)
    together = critic(obs, actions)
    assert together.shape == (20, 8)
    for row in (0, 7):
        torch.testing.assert_close(together[row], critic(obs, actions[row]))
    torch.testing.assert_close(together, critic(obs, actions.clamp(-1, 1)))
    unbounded = _nets(clip_actions=False).critic
    assert not torch.allclose(unbounded(obs, actions), unbounded(obs, actions.clamp(-1, 1)))


def test_state_half_of_the_critic_is_computed_once():
    critic = _nets().critic
    rows = []
    critic.networks[0].first_state.register_forward_hook(
        lambda module, args, out: rows.append(len(args[0]))
    )
    critic(torch.randn(8, 5), torch.randn(20, 8, 3))
    assert rows == [8]


def test_elu_and_its_gradient():
    inputs = torch.linspace(-9.0, 9.0, 1000, requires_grad=True)
    expected = torch.nn.functional.elu(inputs)
    outputs = ELU()(1.0 * inputs)
    torch.testing.assert_close(outputs, expected)
    (gradient,) = torch.autograd.grad(outputs.sum(), inputs)
    torch.testing.assert_close(gradient, inputs.detach().clamp(max=0.0).exp())
    with torch.no_grad():
        torch.testing.assert_close(ELU()(inputs.clone()), expected, rtol=0.0, atol=2e-7)


@pytest.mark.parametrize("uses_sigmoid", [False, True])
@pytest.mark.parametrize("size", [10, 10_000], ids=["few", "many"])
def test_tanh_and_its_gradient(monkeypatch, size, uses_sigmoid):
    monkeypatch.setattr(layers, "_uses_sigmoid", uses_sigmoid)
    inputs = torch.linspace(-9.0, 9.0, size, requires_grad=True)
    outputs = Tanh()(inputs)
    torch.testing.assert_close(outputs, torch.tanh(inputs), rtol=0.0, atol=2e-6)
    (gradient,) = torch.autograd.grad(outputs.sum(), inputs)
    torch.testing.assert_close(gradient, 1.0 - torch.tanh(inputs) ** 2, rtol=0.0, atol=2e-6)
    with torch.no_grad():
        torch.testing.assert_close(Tanh()(inputs), outputs, rtol=0.0, atol=2e-6)


def test_metrics_by_name_and_weights_kl_at_its_bound():
    _, metrics = rerpi_loss(_nets(), _batch(), _settings())
    assert set(METRICS) <= set(metrics)
    assert abs(float(metrics["kl_nonparametric"]) - 0.1) < 1e-4
    assert float(metrics["kl_mu"]) == 0.0 and float(metrics["alpha_mu"]) == 1.0


def _check_gradients(settings, batch):
    nets = _nets(settings=settings)
    loss, metrics = rerpi_loss(nets, batch, settings)
    loss.backward()
    assert bool(torch.isfinite(loss))
    assert all(bool(torch.isfinite(value)) for value in metrics.values())
    for name, parameter in nets.named_parameters():
        assert (parameter.grad is None) == name.startswith("target_"), name
    return metrics


@pytest.mark.parametrize("temperature_solver", ["exact", "adam"])
@pytest.mark.parametrize("weighting", ["exponential", "ranking", "identity"])
@pytest.mark.parametrize("fit", ["decoupled", "coupled", "unconstrained"])
def test_every_online_parameter_and_no_target_gets_a_gradient(temperature_solver, weighting, fit):
    penalty = None if weighting == "identity" else 1e-3
    settings = _settings(
        temperature_solver=temperature_solver, weighting=weighting, fit=fit, epsilon_penalty=penalty
    )
    metrics = _check_gradients(settings, _batch())
    assert ("temperature" in metrics) == (weighting == "exponential")
    assert ("alpha_pi" in metrics) == ("kl_pi" in metrics) == (fit == "coupled")
    assert ("alpha_mu" in metrics) == (fit == "decoupled")


def test_gradients_with_bounds_for_each_dimension():
    _check_gradients(_settings(per_dimension_kl=True, temperature_solver="adam"), _batch())


def test_actions_without_bounds_have_no_penalty():
    losses = {}
    for clip_actions in (True, False):
        for penalty in (None, 1e-3):
            settings = _settings(epsilon_penalty=penalty)
            nets = _nets(settings=settings, clip_actions=clip_actions)
            torch.manual_seed(2)
            losses[clip_actions, penalty] = rerpi_losses(nets, _batch(), settings)[0]["policy"]
    assert losses[True, None] != losses[True, 1e-3]
    assert losses[False, None] == losses[False, 1e-3]


def _windows(size=6, length=4, lengths=None):
    g = torch.Generator().manual_seed(2)
    r = lambda *s: torch.randn(*s, generator=g)  # noqa: E731
    mask = torch.ones(size, length, dtype=torch.bool)
    for row, steps in enumerate(lengths or []):
        mask[row, steps:] = False
    return {
        "obs": r(size, length + 1, 5),
        "actions": r(size, length, 3),
        "rewards": r(size, length),
        "terminateds": torch.zeros(size, length),
        "action_logp": r(size, length) - 3,
        "loss_mask": mask,
    }


@pytest.mark.parametrize("method", ["nstep", "retrace"])
def test_windows_train_everything_and_ignore_what_is_beyond_the_end(method):
    settings, batch = _settings(policy_evaluation=method), _windows(lengths=[1, 2, 3, 4, 4, 4])
    _check_gradients(settings, batch)
    torch.manual_seed(7)
    before = _window_targets(_nets(), batch, settings)[batch["loss_mask"]]
    for name in ("rewards", "action_logp", "actions"):
        batch[name] = torch.where(
            batch["loss_mask"] if batch[name].dim() == 2 else batch["loss_mask"][..., None],
            batch[name],
            torch.full_like(batch[name], 99.0),
        )
    torch.manual_seed(7)
    after = _window_targets(_nets(), batch, settings)[batch["loss_mask"]]
    torch.testing.assert_close(after, before)


def test_windows_of_one_step_and_cut_steps_are_td0():
    nets = _nets()
    batch = _windows(size=16, length=1)
    transitions = {name: batch[name][:, 0] for name in ("actions", "rewards", "terminateds")}
    transitions |= {"obs": batch["obs"][:, 0], "new_obs": batch["obs"][:, 1]}
    torch.manual_seed(3)
    expected = _td0_targets(nets, transitions, _settings())
    for method in ("nstep", "retrace"):
        torch.manual_seed(3)
        actual = _window_targets(nets, batch, _settings(policy_evaluation=method))
        torch.testing.assert_close(actual[:, 0], expected)
    # In longer windows it holds for the last step before the cut, or for all with lambda 0 or n = 1.
    batch = _windows(lengths=[1, 2, 3, 4, 4, 4])
    one_step = _settings(policy_evaluation="nstep", n_step=1)
    torch.manual_seed(4)
    expected = _window_targets(nets, batch, one_step)
    for settings in (
        _settings(policy_evaluation="retrace", retrace_lambda=0.0),
        _settings(policy_evaluation="retrace"),
        _settings(policy_evaluation="nstep", n_step=3),
    ):
        torch.manual_seed(4)
        actual = _window_targets(nets, batch, settings)
        rows = [0, 1, 2, 3]
        torch.testing.assert_close(actual[rows, rows], expected[rows, rows])
        if settings.retrace_lambda == 0.0:
            mask = batch["loss_mask"]
            torch.testing.assert_close(actual[mask], expected[mask])


def test_a_terminated_step_does_not_bootstrap():
    nets, batch = _nets(), _batch()
    batch["terminateds"] = torch.ones(16)
    before = rerpi_loss(nets, batch, _settings())[1]["critic_loss"]
    batch["new_obs"] = 100 + batch["new_obs"]
    torch.testing.assert_close(rerpi_loss(nets, batch, _settings())[1]["critic_loss"], before)
    expected = (nets.critic(batch["obs"], batch["actions"]) - batch["rewards"]).square().mean()
    torch.testing.assert_close(before, expected.detach())


def test_updating_targets_copies_both_networks():
    nets = _nets()
    with torch.no_grad():
        for parameter in (*nets.policy.parameters(), *nets.critic.parameters()):
            parameter.add_(1.0)
    nets.update_targets()
    for online, target in ((nets.policy, nets.target_policy), (nets.critic, nets.target_critic)):
        for a, b in zip(online.parameters(), target.parameters()):
            assert torch.equal(a, b) and a is not b and not b.requires_grad


def test_multiplier_steps_by_factors_and_stays_positive():
    multiplier = Multiplier(5.0)
    optimizer = torch.optim.Adam(multiplier.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        (multiplier() * 0.3).backward()
        assert float(multiplier.log_value.grad) > 0.29  # by the value, not by its logarithm
        optimizer.step()
    assert 0.0 < float(multiplier().detach()) < 1e-2


def test_an_idle_multiplier_stops_at_its_floor_and_comes_back():
    multiplier = Multiplier(minimum=1e-3)
    optimizer = torch.optim.Adam(multiplier.parameters(), lr=1e-2)
    for slope, updates in ((0.3, 20_000), (-0.3, 1500)):
        for _ in range(updates):
            optimizer.zero_grad()
            (multiplier() * slope).backward()
            optimizer.step()
        if slope > 0:
            assert float(multiplier().detach()) >= 0.99e-3
    assert float(multiplier().detach()) > 1.0


def test_updates_of_the_critic_alone():
    nets = _nets()
    batch = {**_batch(), "plan": Plan(improve_policy=False)}
    loss, metrics = rerpi_loss(nets, batch, _settings())
    loss.backward()
    assert set(metrics) == {"critic_loss"}
    moved = {name for name, p in nets.named_parameters() if p.grad is not None}
    assert moved and all(name.startswith("critic") for name in moved)


def test_the_fit_holds_its_bounds():
    """The KLs at the target copies are within their bounds, with everything as in a run."""
    settings = _settings(epsilon_mu=1e-2, epsilon_sigma=1e-3, target_update_period=100)
    nets, logged = _nets(settings=settings), []
    optimizers = make_optimizers(nets, lr=1e-3, dual_lr=3e-2)
    for _ in range(16):
        columns = {
            key: value.repeat(100, *[1] * (value.dim() - 1)) for key, value in _batch(64).items()
        }
        means = run_updates(nets, settings, columns, 64, optimizers=optimizers)
        logged.append([means["kl_mu_at_target_update"], means["kl_sigma_at_target_update"]])
    kl_mu, kl_sigma = torch.tensor(logged[4:]).mean(0).tolist()
    assert 0.75 * 1e-2 < kl_mu < 1.25 * 1e-2
    assert 0.75 * 1e-3 < kl_sigma < 1.25 * 1e-3


# -- Other policies and critics. --


def _family(policy="gaussian", critic="scalar", num_critics=1, **settings):
    settings = _settings(policy=policy, **settings)
    nets = _nets(
        policy={"kind": policy, "num_components": 2},
        critic={"kind": critic, "num_critics": num_critics, "num_atoms": 11},
        clip_actions=policy != "categorical",
        settings=settings,
    )
    return nets, settings


def _discrete(batch):
    actions = torch.randint(3, (*batch["rewards"].shape, 1)).float()
    return {**batch, "actions": actions}


@pytest.mark.parametrize("critic,num_critics", [("scalar", 2), ("categorical", 1), ("quantile", 2)])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("method", ["td0", "nstep", "retrace"])
def test_every_policy_with_every_critic(policy, critic, num_critics, method):
    if method == "retrace" and critic == "quantile":
        with pytest.raises(ValueError, match="is not allowed with"):
            RERPIConfig().environment("Pendulum-v1").training(
                policy=policy, critic=critic, policy_evaluation=method
            ).validate()
        return
    nets, settings = _family(policy, critic, num_critics, policy_evaluation=method)
    batch = _batch() if method == "td0" else _windows(lengths=[1, 2, 3, 4, 4, 4])
    loss, metrics = rerpi_loss(nets, _discrete(batch) if policy == "categorical" else batch, settings)
    loss.backward()
    assert all(bool(torch.isfinite(value)) for value in metrics.values())
    for name, parameter in nets.named_parameters():
        assert (parameter.grad is None) == name.startswith("target_"), name
    for part in POLICIES[policy].PARTS:
        assert float(metrics[f"kl_{part.name}"]) == pytest.approx(0.0, abs=1e-6)
        assert f"alpha_{part.name}" in metrics


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "more",
    [
        {"epsilon_penalty": 1e-2},
        {"temperature_solver": "adam", "epsilon_penalty": 1e-2},
        {"policy_evaluation": "retrace"},
        {"critic": "quantile", "num_critics": 2},
        {"weighting": "ranking"},
    ],
    ids=str,
)
def test_losses_are_the_same_when_the_targets_are_prepared_first(policy, more):
    nets, settings = _family(policy, **more)
    with torch.no_grad():
        for parameter in nets.target_policy.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    batch = _batch() if settings.policy_evaluation == "td0" else _windows(lengths=[1, 2, 3, 4, 4, 4])
    batch = _discrete(batch) if policy == "categorical" else batch
    torch.manual_seed(1)
    losses, metrics = rerpi_losses(nets, batch, settings)
    torch.manual_seed(1)
    (prepared,) = prepare(nets, [batch], settings)
    with torch.no_grad():  # From here on they must not be used.
        for parameter in (*nets.target_policy.parameters(), *nets.target_critic.parameters()):
            parameter.fill_(torch.nan)
    found, found_metrics = rerpi_losses(nets, prepared, settings)
    torch.testing.assert_close(found, losses)
    torch.testing.assert_close(found_metrics, metrics)


@pytest.mark.parametrize("solver,key", [("exact", "weighted"), ("adam", "candidates")])
def test_targets_prepared_for_several_updates_at_once(solver, key):
    settings = _settings(temperature_solver=solver)
    nets = _nets(settings=settings)
    batches = [{key: column + i for key, column in _batch(64).items()} for i in range(3)]
    plans = [{"plan": Plan(improve_policy=improves)} for improves in (True, False, True)]
    prepared = prepare(nets, [b | plan for b, plan in zip(batches, plans)], settings)
    assert [key in batch for batch in prepared] == [True, False, True]
    for batch, given in zip(prepared, batches):
        assert torch.equal(batch["obs"], given["obs"]) and batch["targets"].shape == (64,)
        # Resampling the bootstrap actions changes targets less than the batches differ.
        alone = critic_targets(nets, given, settings)
        torch.testing.assert_close(batch["targets"], alone, atol=0.2, rtol=0.0)
    for i in (0, 2):
        torch.testing.assert_close(
            prepared[i][key].target.mean, nets.target_policy(batches[i]["obs"]).mean
        )
    if solver == "adam":
        for i in (0, 2):
            q_values = nets.target_critic(batches[i]["obs"], prepared[i][key].actions)
            torch.testing.assert_close(prepared[i][key].values["nonparametric"], q_values)
    else:
        # There is one temperature, so the bound holds for all states together.
        kls = [rerpi_losses(nets, prepared[i], settings)[1]["kl_nonparametric"] for i in (0, 2)]
        assert float(kls[0]) == float(kls[1]) == pytest.approx(settings.epsilon, rel=1e-4)


@pytest.mark.parametrize("weighting", ["exponential", "ranking", "identity"])
@pytest.mark.parametrize("temperature_solver", ["exact", "adam"])
def test_discrete_actions_are_weighted_by_their_probabilities(weighting, temperature_solver):
    nets, settings = _family(
        "categorical", weighting=weighting, temperature_solver=temperature_solver, epsilon=1e-3
    )
    with torch.no_grad():
        for net in (nets.policy, nets.target_policy):
            net.logits.bias.copy_(torch.tensor([2.0, 0.0, -1.0]))
    batch = _discrete(_batch())
    loss, metrics = rerpi_loss(nets, batch, settings)
    if weighting == "exponential" and temperature_solver == "exact":
        assert float(metrics["kl_nonparametric"]) == pytest.approx(1e-3, rel=1e-2)
    # The policy's loss is the expected loss of actions sampled by their probabilities.
    with torch.no_grad():
        p = nets.target_policy(batch["obs"]).logits.softmax(-1)
        q = nets.target_critic(batch["obs"], torch.eye(3)[:, None].expand(3, 16, 3)).T
        if weighting == "exponential":
            weights = p * ((q - q.amax(-1, keepdim=True)) / float(metrics["temperature"])).exp()
        else:
            weights = p * (q if weighting == "identity" else core.ranking_weights(q.T).T)
        if weighting != "identity":
            weights = weights / weights.sum(-1, keepdim=True)
        expected = -(weights * nets.policy(batch["obs"]).logits.log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(metrics["policy_loss"], expected)
    loss.backward()
    if temperature_solver == "adam" and weighting == "exponential":
        # The dual's slope is epsilon minus the KL of the weights to the old policy.
        slope = nets.multipliers["temperature"].log_value.grad
        assert float(slope) == pytest.approx(1e-3 - float(metrics["kl_nonparametric"]), rel=1e-3)


def test_value_of_a_discrete_policy_is_exact():
    nets, settings = _family("categorical", gamma=1.0)
    batch = {**_discrete(_batch()), "terminateds": torch.zeros(16)}
    targets = _td0_targets(nets, batch, settings)
    probabilities = nets.target_policy(batch["new_obs"]).logits.softmax(-1)
    every = torch.eye(3)
    values = sum(
        probabilities[:, a] * nets.target_critic(batch["new_obs"], every[a].expand(16, 3))
        for a in range(3)
    )
    torch.testing.assert_close(targets, batch["rewards"] + values)


def test_actions_of_discrete_policies_are_encoded_and_decoded():
    policy = _family("categorical")[0].policy
    actions = torch.tensor([[2.0], [0.0], [1.0]])
    encoded = policy.encode_actions(actions)
    assert encoded.tolist() == [[0, 0, 1], [1, 0, 0], [0, 1, 0]]
    assert policy.decode_actions(encoded).tolist() == [2, 0, 1]


def test_initial_policies_and_limits():
    obs = torch.randn(32, 5)
    assert float(_family("deterministic")[0].policy(obs).stddev.max()) == pytest.approx(0.4)
    means = _family("mixture")[0].policy(obs).mean
    assert not torch.allclose(means[:, 0], means[:, 1], atol=1e-2)
    bounded = _nets(policy={"min_stddev": 0.3, "tanh_mean": True}).policy
    with torch.no_grad():
        bounded.mean.bias.fill_(50.0)
        bounded.stddev.bias.fill_(-50.0)
        limited = bounded(obs)
    assert float(limited.mean.max()) <= 1.0
    assert float(limited.stddev.min()) == pytest.approx(0.3)


@pytest.mark.parametrize("explore", [True, False], ids=["exploring", "greedy"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_recorded_policy_acts_as_the_policy_does(policy, explore):
    nets, observations = _nets({"kind": policy}), torch.randn(2, 5)
    with torch.inference_mode():
        state = torch.get_rng_state()
        recorded = record_act(nets, observations, explore)
        assert torch.equal(torch.get_rng_state(), state)
        assert isinstance(recorded, torch.jit.ScriptModule)
        for _ in range(3):
            # The weights change, as when an EnvRunner gets the learner's.
            nets.load_state_dict({k: v * 2 for k, v in nets.state_dict().items()})
            observations = torch.randn(2, 5)
            found = []
            for choose in (lambda o: act(nets, o, explore)[0], recorded):
                torch.manual_seed(0)
                found.append(choose(observations))
            torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_a_policy_that_decides_by_its_observations_is_not_recorded():
    class Deciding(POLICIES["gaussian"]):
        def forward(self, observations):
            return super().forward(observations if observations.sum() > 0 else -observations)

    nets = _nets()
    nets.policy.__class__ = Deciding
    recorded = record_act(nets, torch.ones(1, 5), explore=False)
    for observations in (torch.ones(1, 5), -torch.ones(1, 5)):
        assert torch.equal(recorded(observations), recorded(torch.ones(1, 5)))


def test_pair_of_critics_gives_the_smaller_value_and_both_learn():
    critic = _nets(critic={"num_critics": 2}).critic
    obs, actions = torch.randn(8, 5), torch.rand(4, 8, 3)
    each = torch.stack([net(obs, actions).squeeze(-1) for net in critic.networks])
    assert not torch.allclose(each[0], each[1])
    torch.testing.assert_close(critic(obs, actions), each.amin(0))
    targets = torch.randn(8)
    losses = [(values[0] - targets).square().mean() for values in each]
    torch.testing.assert_close(critic.loss(obs, actions[0], targets), losses[0] + losses[1])


def test_two_hot_targets():
    head = CategoricalHead((-10.0, 10.0), 5)
    targets = torch.tensor([-10.0, -7.5, 0.0, 3.0, 10.0, 99.0, -99.0])
    encoded = head.two_hot(targets)
    torch.testing.assert_close(encoded @ head.atoms, targets.clamp(-10, 10))
    torch.testing.assert_close(encoded.sum(-1), torch.ones(7))
    assert int((encoded > 0).sum(-1).max()) == 2
    outputs = (encoded + 1e-9).log()
    torch.testing.assert_close(head.value(outputs), targets.clamp(-10, 10), atol=1e-4, rtol=0)


def test_quantile_targets_are_those_of_the_next_state_moved_and_scaled():
    nets, settings = _family("deterministic", "quantile", 2, num_bootstrap_samples=1, gamma=0.9)
    with torch.no_grad():
        nets.target_policy.fixed_stddev.fill_(1e-6)
    batch = _batch()
    targets = _td0_targets(nets, batch, settings)
    actions = nets.target_policy(batch["new_obs"]).mean
    atoms = torch.stack([net(batch["new_obs"], actions) for net in nets.target_critic.networks])
    smaller = atoms.mean(-1).argmin(0)
    chosen = atoms[smaller, torch.arange(16)]
    discounts = 0.9 * (1 - batch["terminateds"])
    expected = batch["rewards"][:, None] + discounts[:, None] * chosen
    torch.testing.assert_close(targets, expected, atol=1e-4, rtol=1e-4)
    # Two-step targets are the sum of both rewards and the quantiles of the state after them.
    windows = _windows(size=4, length=2)
    nstep = _window_targets(nets, windows, _family(policy="deterministic", critic="quantile",
        policy_evaluation="nstep", n_step=2, num_bootstrap_samples=1, gamma=0.9)[1])  # fmt: skip
    last = nstep[:, 1]
    torch.testing.assert_close(nstep[:, 0], windows["rewards"][:, :1] + 0.9 * last)


def test_quantiles_are_learned():
    torch.manual_seed(0)
    head, outputs = QuantileHead(5), torch.zeros(1, 5, requires_grad=True)
    optimizer = torch.optim.Adam([outputs], lr=0.05)
    samples = 100.0 * torch.rand(1, 10_000)  # They are wide, so that the Huber loss is linear.
    for _ in range(4000):
        optimizer.zero_grad()
        head.loss(outputs, samples).backward()
        optimizer.step()
    torch.testing.assert_close(
        outputs.detach()[0], torch.tensor([10.0, 30.0, 50.0, 70.0, 90.0]), atol=2.0, rtol=0
    )
    assert float(head.value(outputs.detach())) == pytest.approx(50.0, abs=2.0)


@pytest.mark.parametrize("policy", ["gaussian", "full_gaussian", "deterministic"])
def test_value_gradient_moves_the_policy_along_the_critic_and_leaves_that_alone(policy):
    nets, settings = _family(policy, fit="value_gradient", entropy_weight=1e-3)
    batch = _batch(64)
    optimizer = torch.optim.Adam(nets.policy.parameters(), lr=1e-3)

    def value():
        with torch.no_grad():
            return float(nets.critic(batch["obs"], nets.policy(batch["obs"]).mode).mean())

    before = value()
    for _ in range(100):
        nets.zero_grad()
        rerpi_loss(nets, batch, settings)[0].backward()
        optimizer.step()
    assert value() > before + 0.01
    # The critic's gradient is that of its own loss alone.
    torch.manual_seed(5)
    nets.zero_grad()
    rerpi_loss(nets, batch, settings)[0].backward()
    gradients = [p.grad.clone() for p in nets.critic.parameters()]
    torch.manual_seed(5)
    nets.zero_grad()
    rerpi_loss(nets, {**batch, "plan": Plan(improve_policy=False)}, settings)[0].backward()
    for a, b in zip(gradients, nets.critic.parameters()):
        torch.testing.assert_close(a, b.grad)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(128,), (4, 50)])
def test_both_products_agree_with_their_gradients(monkeypatch, bias, shape):
    torch.manual_seed(0)
    layer = layers.Linear(7, 5, bias=bias)
    inputs = torch.randn(*shape, 7, requires_grad=True)
    results = []
    for uses_onednn in (False, True):
        monkeypatch.setattr(layers, "_uses_onednn", uses_onednn)
        outputs = layer(inputs)
        gradients = torch.autograd.grad(outputs.square().sum(), [inputs, *layer.parameters()])
        with torch.no_grad():
            torch.testing.assert_close(layer(inputs), outputs)
        results.append((outputs, *gradients))
    torch.testing.assert_close(results[1], results[0])


def test_double_precision_is_left_to_torch(monkeypatch):
    monkeypatch.setattr(layers, "_uses_onednn", True)  # oneDNN has single precision only.
    layer, inputs = layers.Linear(4, 3).double(), torch.randn(1000, 4, dtype=torch.float64)
    torch.testing.assert_close(layer(inputs), inputs @ layer.weight.t() + layer.bias)


@pytest.mark.parametrize("seconds,expected", [(1.0, False), (0.1, True)])
def test_the_faster_way_is_chosen(monkeypatch, seconds, expected):
    """With a clock that goes on by what each way of computing the same costs."""
    clock = [0.0]

    def costs(amount):
        def compute(*inputs):
            clock[0] += amount

        return compute

    for flag in ("_uses_onednn", "_uses_sigmoid"):
        monkeypatch.setattr(layers, flag, not expected)
    monkeypatch.setattr(layers.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(layers, "_onednn_product", costs(seconds))
    monkeypatch.setattr(layers.functional, "linear", costs(1.0))
    monkeypatch.setattr(layers, "_tanh_by_sigmoid", costs(seconds))
    monkeypatch.setattr(layers.torch, "tanh", costs(1.0))
    layers.choose_fastest()
    assert layers._uses_onednn == layers._uses_sigmoid == expected


def test_a_copied_critic_has_the_values_of_its_own_weights():
    """It keeps references to its layers, which must be those of the copy."""
    critic = Critic(3, 2, (8, 8), clip_actions=True)
    observations, actions = torch.randn(5, 3), torch.randn(4, 5, 2)
    with torch.no_grad():
        before = critic(observations, actions)
        copied = pickle.loads(pickle.dumps(copy.deepcopy(critic)))
        for parameter in critic.parameters():
            parameter.mul_(2.0)
        torch.testing.assert_close(copied(observations, actions), before)
        assert not torch.allclose(critic(observations, actions), before)


def test_without_onednn_there_is_one_product(monkeypatch):
    monkeypatch.setattr(layers, "_uses_onednn", True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    layers.choose_fastest()
    assert not layers._uses_onednn


def test_smoothed_targets():
    head = SmoothedHead((-10.0, 10.0), 41)
    targets = torch.tensor([-8.0, -0.1, 0.0, 3.3, 8.0])
    encoded = head.encode(targets)
    torch.testing.assert_close(encoded.sum(dim=-1), torch.ones(5))
    torch.testing.assert_close(encoded @ head.atoms, targets, atol=1e-3, rtol=0)
    # The Gaussian's deviation is 0.75 of the distance between atoms, which is 0.5; the atoms' own
    # width adds a twelfth of its square.
    variance = encoded @ head.atoms.square() - targets.square()
    torch.testing.assert_close(
        variance, torch.full((5,), 0.5**2 * (0.75**2 + 1.0 / 12.0)), atol=2e-3, rtol=0
    )
    # The ends of the range are not drawn inwards, which bootstrapping would add up.
    ends = torch.tensor([-10.0, -9.9, 9.9, 10.0])
    torch.testing.assert_close(head.encode(ends) @ head.atoms, ends, atol=1e-3, rtol=0)
    # Beyond it targets are those at its end, and what is not a number is not hidden.
    torch.testing.assert_close(head.encode(torch.tensor([99.0])), head.encode(torch.tensor([10.0])))
    assert head.encode(torch.tensor([float("nan")])).isnan().any()


def test_a_smoothed_critic_learns_values():
    torch.manual_seed(0)
    critic = Critic(2, 1, (32,), clip_actions=True, kind="hl_gauss", value_range=(-5.0, 5.0))
    optimizer = torch.optim.Adam(critic.parameters(), lr=3e-3)
    observations, actions = torch.randn(256, 2), torch.rand(256, 1) * 2.0 - 1.0
    targets = observations[:, 0] - 2.0 * actions[:, 0]
    for _ in range(500):
        optimizer.zero_grad()
        critic.loss(observations, actions, targets).backward()
        optimizer.step()
    assert (critic(observations, actions) - targets).abs().mean() < 0.15


@pytest.mark.parametrize("evaluation", ["td0", "nstep", "retrace"])
@pytest.mark.parametrize("fit", ["decoupled", "value_gradient"])
def test_normalized_returns_learn_the_same_whatever_the_unit_of_rewards(evaluation, fit):
    arguments = {"policy_evaluation": evaluation, "fit": fit, "n_step": 2}
    settings = _settings(**arguments)
    batch = _batch() if evaluation == "td0" else _windows()
    found = []
    for unit in (None, 1.0, 1e3, 1e-3):
        torch.manual_seed(0)
        nets = ActorCritic(
            5, 3, policy={"layers": (16,)}, critic={"layers": (16,)}, clip_actions=True,
            normalize_returns=unit is not None, constraints=settings.constraints(),
        )  # fmt: skip
        if unit is not None:  # The networks themselves stay the same.
            nets.return_scale.fill_(unit)
        torch.manual_seed(1)
        scaled = {**batch, "rewards": batch["rewards"] * (unit or 1.0)}
        loss, metrics = rerpi_loss(nets, scaled, settings)
        loss.backward()
        gradients = [p.grad for p in nets.parameters() if p.grad is not None]
        powers = {"q_mean": 1, "temperature": 1, "critic_loss": 2}
        if fit == "value_gradient":
            assert "temperature" not in metrics
            powers["policy_loss"] = 1
        metrics = {k: v / (unit or 1.0) ** powers.get(k, 0) for k, v in metrics.items()}
        found.append((gradients, metrics))
    for gradients, metrics in found[1:]:
        torch.testing.assert_close(gradients, found[0][0], rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(metrics, found[0][1], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", ["scalar", "quantile", "categorical"])
def test_another_scale_leaves_what_was_learned(kind):
    torch.manual_seed(0)
    critic = {"layers": (16,), "kind": kind, "num_critics": 2}
    arguments = {"policy": {"layers": (16,)}, "critic": critic, "clip_actions": True}
    nets = ActorCritic(5, 3, **arguments, normalize_returns=True)
    observations, actions = torch.randn(7, 5), torch.randn(7, 3)
    nets.set_return_scale(2.0)

    def values():
        networks = (nets.critic, nets.target_critic)
        return [nets.to_reward_units(net(observations, actions)) for net in networks]

    before = values()
    nets.set_return_scale(60.0)
    assert float(nets.return_scale) == 60.0
    # Probabilities of returns in units of the scale cannot be multiplied.
    factor = 30.0 if kind == "categorical" else 1.0
    torch.testing.assert_close(values(), [factor * value for value in before])


@pytest.mark.parametrize("policy", ["gaussian", "full_gaussian", "mixture", "categorical"])
def test_residual_networks_learn_and_have_gradients_everywhere(policy):
    torch.manual_seed(0)
    settings = _settings(policy=policy)
    nets = ActorCritic(
        5,
        3,
        policy={"kind": policy, "layers": (16, 16), "covariance_layers": (8,), "num_components": 2},
        critic={"layers": (32, 32), "num_critics": 2, "aggregation": "mean"},
        networks={"network": "residual", "normalize_observations": True},
        clip_actions=policy != "categorical",
        constraints=settings.constraints(policy != "categorical"),
    )
    batch = _discrete(_batch()) if policy == "categorical" else _batch()
    first = rerpi_loss(nets, batch, settings)[1]["critic_loss"]
    optimizers = make_optimizers(nets, lr=3e-3)
    columns = {key: value.repeat(60, *[1] * (value.dim() - 1)) for key, value in batch.items()}
    run_updates(nets, settings, columns, len(batch["rewards"]), optimizers=optimizers)
    assert rerpi_loss(nets, batch, settings)[1]["critic_loss"] < 0.5 * first
    for name, parameter in (*nets.policy.named_parameters(), *nets.critic.named_parameters()):
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0.0, name


def test_normalized_networks_see_observations_in_units_of_their_deviation():
    settings = _settings()
    plain, normalized = (
        _nets(settings=settings, networks={"normalize_observations": flag}) for flag in (False, True)
    )
    mean, stddev = torch.arange(5.0), torch.tensor([1e-3, 1.0, 10.0, 1e4, 0.0])
    normalized.set_observation_moments(mean, stddev)
    observations = torch.randn(7, 5)
    actions = torch.randn(7, 3)
    # A number that never changed keeps its unit.
    scaled = mean + observations * torch.where(stddev > 0.0, stddev, 1.0)
    for found, expected in (
        (normalized.policy(scaled).mean, plain.policy(observations).mean),
        (normalized.policy(scaled).stddev, plain.policy(observations).stddev),
        (normalized.critic(scaled, actions), plain.critic(observations, actions)),
        (normalized.target_policy(scaled).mean, plain.policy(observations).mean),
        (normalized.target_critic(scaled, actions), plain.critic(observations, actions)),
    ):
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-2)
    # One sensor that has gone mad does not carry everything else away.
    far = scaled.clone()
    far[:, 1] = 1e9
    near = scaled.clone()
    near[:, 1] = mean[1] + 10.0
    torch.testing.assert_close(normalized.policy(far).mean, normalized.policy(near).mean)


def test_a_pair_of_critics_is_joined_as_asked():
    observations, actions = torch.randn(4, 5), torch.randn(4, 3)
    values = {}
    for aggregation in ("min", "mean"):
        torch.manual_seed(0)
        critic = Critic(5, 3, (16,), clip_actions=True, num_critics=2, aggregation=aggregation)
        values[aggregation] = critic(observations, actions)
        each = torch.stack([net(observations, actions.clamp(-1, 1)) for net in critic.networks])
    torch.testing.assert_close(values["min"], each.squeeze(-1).amin(dim=0))
    torch.testing.assert_close(values["mean"], each.squeeze(-1).mean(dim=0))
