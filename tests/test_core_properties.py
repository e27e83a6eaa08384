"""Properties of the core that hold for any input, and its behaviour at the edges."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rerpi_rllib import core
from rerpi_rllib.core import weights as w
from rerpi_rllib.core.policies.gaussian import gaussian_kl_mean, gaussian_kl_stddev

DTYPES = [torch.float32, torch.float64]


def _q(n=20, b=8, scale=1.0, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(n, b, generator=generator, dtype=dtype)


WEIGHTINGS = {
    "exponential": lambda q: core.exponential_weights(q, core.solve_temperature(q, 0.1)),
    "ranking": core.ranking_weights,
}


@pytest.mark.parametrize("name", WEIGHTINGS)
@settings(max_examples=50, deadline=None)
@given(
    n=st.integers(2, 40),
    b=st.integers(1, 6),
    scale=st.sampled_from([1e-3, 1.0, 1e4]),
    offset=st.sampled_from([0.0, -7.0, 1e3]),
    seed=st.integers(0, 10_000),
)
def test_weights_are_a_distribution_that_keeps_the_ranking(name, n, b, scale, offset, seed):
    q = _q(n, b, scale, seed)
    weights = WEIGHTINGS[name](q)
    assert bool((weights > 0).all())
    torch.testing.assert_close(weights.sum(0), torch.ones(b, dtype=q.dtype))
    order = q.argsort(0)
    assert bool((weights.gather(0, order).diff(dim=0) >= -1e-12).all())
    # The weights do not change with an offset, and are permuted with the actions.
    torch.testing.assert_close(WEIGHTINGS[name](q + offset), weights, rtol=1e-6, atol=1e-9)
    permutation = torch.randperm(n)
    torch.testing.assert_close(WEIGHTINGS[name](q[permutation]), weights[permutation])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1e-3, 1e6])
def test_solved_weights_do_not_depend_on_the_scale_of_q(factor, dtype):
    q = _q(dtype=dtype)
    base = core.exponential_weights(q, core.solve_temperature(q, 0.1))
    scaled = core.exponential_weights(factor * q, core.solve_temperature(factor * q, 0.1))
    torch.testing.assert_close(scaled, base, rtol=1e-4, atol=1e-6)


def test_temperature_is_positive_in_every_dtype():
    for q in (_q(dtype=torch.float16), torch.ones(5, 3, dtype=torch.float16), _q(scale=9).long()):
        assert float(core.solve_temperature(q, 0.1)) > 0.0
    q = _q(scale=9).long()
    torch.testing.assert_close(core.solve_temperature(q, 0.1), core.solve_temperature(q.float(), 0.1))


@pytest.mark.parametrize("n", [20, 1000, 20_000])
def test_ranking_weights_keep_their_digits(n):
    q = _q(n, 2, dtype=torch.float32)
    exact = core.ranking_weights(q.double(), eta=0.5)
    torch.testing.assert_close(core.ranking_weights(q, eta=0.5), exact.float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(2, 64),
    epsilon=st.sampled_from([1e-3, 0.01, 0.1, 0.5]),
    scale=st.sampled_from([1e-6, 1e-3, 1.0, 1e4, 1e8]),
    offset=st.sampled_from([0.0, 3.0]),
    seed=st.integers(0, 10_000),
)
def test_solved_temperature_reaches_epsilon(dtype, n, epsilon, scale, offset, seed):
    q = _q(n, 5, 1.0, seed, dtype) * scale + offset * scale
    temperature = core.solve_temperature(q, epsilon)
    achieved = float(w.kl_to_prior(core.exponential_weights(q, temperature)).mean())
    reachable = float(w.kl_to_prior(core.exponential_weights(q, 1e-9 * scale)).mean())
    if epsilon < reachable:
        assert achieved == pytest.approx(epsilon, abs=1e-4)
    else:
        assert achieved <= epsilon
    assert float(temperature) > 0


def test_solved_temperature_with_very_different_states():
    q = torch.cat([1e6 * _q(20, 1), 1e-3 * _q(20, 7, seed=1)], dim=1)
    weights = core.exponential_weights(q, core.solve_temperature(q, 0.1))
    assert float(w.kl_to_prior(weights).mean()) == pytest.approx(0.1, abs=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_temperature_reaches_epsilon(dtype):
    equal = torch.full((20, 4), 5.0, dtype=dtype)
    temperature = core.solve_temperature(equal, 0.1)
    assert float(temperature) > 0
    uniform = torch.full_like(equal, 1 / 20)
    torch.testing.assert_close(core.exponential_weights(equal, temperature), uniform)

    single = _q(1, 4, dtype=dtype)
    assert bool((core.exponential_weights(single, core.solve_temperature(single, 0.1)) == 1).all())

    q = _q(10, 4, dtype=dtype)
    greedy = core.exponential_weights(q, core.solve_temperature(q, math.log(10) + 0.1))
    torch.testing.assert_close(
        greedy, torch.nn.functional.one_hot(q.argmax(0), 10).T.to(dtype), atol=1e-6, rtol=0
    )


def test_solved_temperature_minimises_the_dual():
    q = _q(seed=3)
    best = core.solve_temperature(q, 0.1).requires_grad_()
    core.temperature_dual(q, best, 0.1).backward()
    assert abs(float(best.grad)) < 1e-8
    value = float(core.temperature_dual(q, best.detach(), 0.1))
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert float(core.temperature_dual(q, best.detach() * factor, 0.1)) > value


def test_ranking_weights_follow_the_formula_and_share_ties():
    q = torch.tensor([[3.0], [1.0], [2.0], [1.0]])
    raw = torch.log((4 + 10.0) / torch.arange(1.0, 5.0))
    expected = torch.stack([raw[0], (raw[2] + raw[3]) / 2, raw[1], (raw[2] + raw[3]) / 2])
    torch.testing.assert_close(core.ranking_weights(q)[:, 0], expected / raw.sum())
    torch.testing.assert_close(core.ranking_weights(torch.zeros(5, 2)), torch.full((5, 2), 1 / 5))


def _random_fit(n, b, d, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    r = lambda *s: torch.randn(*s, generator=g, dtype=dtype)  # noqa: E731
    target_mean, target_stddev = r(b, d), torch.nn.functional.softplus(r(b, d))
    mean = (target_mean + 0.1 * r(b, d)).requires_grad_()
    stddev = (target_stddev * (0.1 * r(b, d)).exp()).requires_grad_()
    actions = target_mean + target_stddev * r(n, b, d)
    return actions, mean, stddev, target_mean, target_stddev


@pytest.mark.parametrize("q_scale", [0.0, 1e-3, 1.0, 1e8])
@pytest.mark.parametrize("n", [1, 20])
@pytest.mark.parametrize("d", [1, 6, 64])
@pytest.mark.parametrize("per_dimension", [False, True])
def test_finite_everywhere(q_scale, n, d, per_dimension):
    actions, mean, stddev, *target = _random_fit(n, 4, d)
    q = q_scale * _q(n, 4, dtype=torch.float32)
    weights = core.exponential_weights(q, core.solve_temperature(q, 0.1))
    alphas = [torch.ones(d if per_dimension else (), requires_grad=True) for _ in range(2)]
    decoupled = core.decoupled_fit(
        actions, weights, mean, stddev, *target, *alphas, 5e-4, 1e-5, per_dimension
    )
    coupled = core.coupled_fit(actions, weights, mean, stddev, *target, alphas[0].mean(), 1e-3)
    total = sum(x.sum() for fit in (decoupled, coupled) for x in vars(fit).values())
    total.backward()
    for tensor in (total, mean.grad, stddev.grad, *(a.grad for a in alphas)):
        assert bool(torch.isfinite(tensor).all())
    assert decoupled.kl_mu.shape == ((d,) if per_dimension else ())


def test_kls_against_torch_distributions():
    _, mean, stddev, target_mean, target_stddev = _random_fit(1, 32, 5, torch.float64)
    normal, kl = torch.distributions.Normal, torch.distributions.kl_divergence
    target = normal(target_mean, target_stddev)
    torch.testing.assert_close(
        gaussian_kl_mean(mean, target_mean, target_stddev), kl(target, normal(mean, target_stddev))
    )
    torch.testing.assert_close(
        gaussian_kl_stddev(stddev, target_stddev), kl(target, normal(target_mean, stddev))
    )
    fit = core.coupled_fit(
        target_mean[None],
        torch.ones(1, 32, dtype=torch.float64),
        mean,
        stddev,
        target_mean,
        target_stddev,
        1.0,
        0.1,
    )
    expected = kl(target, normal(mean, stddev)).sum(-1).mean()
    torch.testing.assert_close(fit.kl, expected)


def test_small_kl_of_stddev_survives_float32():
    stddev = torch.tensor([[1.0 + 1e-3]])
    exact = math.log(1.001) + 1 / (2 * 1.001**2) - 0.5
    assert float(gaussian_kl_stddev(stddev, torch.ones(1, 1))) == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("fit", [core.decoupled_fit, core.coupled_fit])
def test_the_target_policy_is_constant(fit):
    policies = torch.rand(4, 5, 3, requires_grad=True)  # The mean and stddev, then the target's.
    names = 2 if fit is core.decoupled_fit else 1
    numbers = [1.0] * names + [0.1] * names
    fitted = fit(torch.randn(7, 5, 3), torch.full((7, 5), 1 / 7), *(policies + 0.5), *numbers)
    (fitted.policy_loss + fitted.penalty).backward()
    assert bool((policies.grad[:2] != 0).all()) and not policies.grad[2:].any()


def test_multipliers_take_only_their_own_gradient():
    actions, mean, stddev, *target = _random_fit(10, 4, 3)
    alpha_mu = torch.tensor(2.0, requires_grad=True)
    alpha_sigma = torch.tensor(3.0, requires_grad=True)
    weights = torch.full((10, 4), 0.1)
    fit = core.decoupled_fit(actions, weights, mean, stddev, *target, alpha_mu, alpha_sigma, 0.5, 0.7)
    (fit.policy_loss + fit.penalty).backward(retain_graph=True)
    assert alpha_mu.grad is None and alpha_sigma.grad is None
    before = mean.grad.clone()
    fit.dual_loss.backward()
    torch.testing.assert_close(mean.grad, before)
    torch.testing.assert_close(alpha_mu.grad, 0.5 - fit.kl_mu.detach())
    torch.testing.assert_close(alpha_sigma.grad, 0.7 - fit.kl_sigma.detach())


def test_targets_by_hand():
    rewards = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    values = torch.tensor([[10.0, 20.0, 30.0, 40.0]])
    discounts = torch.tensor([[0.5, 0.5, 0.0, 0.5]])
    torch.testing.assert_close(
        core.td_targets(rewards[0], discounts[0], values[0]), torch.tensor([6.0, 12.0, 3.0, 24.0])
    )
    torch.testing.assert_close(
        core.nstep_targets(rewards, discounts, values, 1), torch.tensor([[6.0, 12.0, 3.0, 24.0]])
    )
    # Two rewards, then the value; cut off by the termination of step 2 and the end of the window.
    torch.testing.assert_close(
        core.nstep_targets(rewards, discounts, values, 2),
        torch.tensor([[1 + 0.5 * 12.0, 2 + 0.5 * 3.0, 3.0, 24.0]]),
    )
    torch.testing.assert_close(
        core.nstep_targets(rewards, discounts, values, 99),
        torch.tensor([[1 + 0.5 * (2 + 0.5 * 3), 2 + 0.5 * 3, 3.0, 24.0]]),
    )


@pytest.mark.parametrize(
    "call,words",
    [
        (lambda: core.td_targets(*torch.ones(2, 4), torch.ones(4, 1)), r"\(4,\).*\(4, 1\)"),
        (lambda: core.nstep_targets(*torch.ones(3, 2, 5), n=0), "n=0"),
        (lambda: core.retrace_targets(*torch.ones(5, 2, 5), 1.0), r"next_q.*\(2, 5\).*\(2, 4\)"),
        (lambda: core.solve_temperature(_q(), 0.0), "epsilon=0.0"),
        (lambda: core.solve_temperature(_q(b=0), 0.1), r"\(20, 0\)"),
        (
            lambda: core.decoupled_fit(
                torch.ones(3, 2, 4), torch.ones(3, 2), *torch.ones(4, 2, 4), torch.ones(4), 1, 1, 1
            ),
            "'mu'.*per_dimension",
        ),
    ],
)
def test_wrong_input_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_retrace_limits():
    g = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 3, 6, generator=g, dtype=torch.float64)
    discounts = torch.full((3, 6), 0.9, dtype=torch.float64)
    next_q = torch.randn(3, 5, generator=g, dtype=torch.float64)
    on_policy = torch.zeros(3, 5, dtype=torch.float64)
    torch.testing.assert_close(
        core.retrace_targets(rewards, discounts, values, next_q, on_policy, 0.0),
        core.td_targets(rewards, discounts, values),
    )
    # On policy, with lambda 1 and V equal to Q of the action taken, it is the Monte Carlo return.
    discounts[:, -1] = 0.0
    values[:, :-1] = next_q
    returns = torch.zeros(3, dtype=torch.float64)
    for t in range(5, -1, -1):
        returns = rewards[:, t] + discounts[:, t] * returns
    targets = core.retrace_targets(rewards, discounts, values, next_q, on_policy, 1.0)
    torch.testing.assert_close(targets[:, 0], returns)
