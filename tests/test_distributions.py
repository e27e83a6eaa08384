"""The policies' distributions, compared with torch's own and with samples."""

import pytest
import torch
from torch import distributions as td

from rerpi_rllib.core.policies import POLICIES
from rerpi_rllib.core.policies.categorical import Categorical
from rerpi_rllib.core.policies.gaussian import (
    DeterministicWithNoise,
    DiagonalGaussian,
    FullGaussian,
)
from rerpi_rllib.core.policies.mixture import GaussianMixture

B, D, M = 6, 3, 4
NAMES = {
    DiagonalGaussian: "gaussian",
    FullGaussian: "full_gaussian",
    GaussianMixture: "mixture",
    Categorical: "categorical",
    DeterministicWithNoise: "deterministic",
}


def _random(kind, seed, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    r = lambda *s: torch.randn(*s, generator=g, dtype=dtype)  # noqa: E731
    if kind in (DiagonalGaussian, DeterministicWithNoise):
        return kind(r(B, D), r(B, D).exp())
    if kind is FullGaussian:
        return FullGaussian(r(B, D), r(B, D, D).tril(-1) + torch.diag_embed(r(B, D).exp()))
    if kind is GaussianMixture:
        return GaussianMixture(r(B, M), r(B, M, D), (0.5 * r(B, M, D)).exp())
    return Categorical(r(B, D))


def _of_torch(p):
    """Return the same distribution as one of torch's."""
    if isinstance(p, DiagonalGaussian):
        return td.Independent(td.Normal(p.mean, p.stddev), 1)
    if isinstance(p, FullGaussian):
        return td.MultivariateNormal(p.mean, scale_tril=p.cholesky)
    if isinstance(p, GaussianMixture):
        components = td.Independent(td.Normal(p.mean, p.stddev), 1)
        return td.MixtureSameFamily(td.Categorical(logits=p.logits), components)
    return td.OneHotCategorical(logits=p.logits)


KINDS = [DiagonalGaussian, DeterministicWithNoise, FullGaussian, GaussianMixture, Categorical]
WITH_CLOSED_KL = [DiagonalGaussian, FullGaussian, Categorical]


@pytest.mark.parametrize("kind", KINDS)
def test_log_prob_and_samples(kind):
    torch.manual_seed(0)
    p = _random(kind, 0)
    reference = _of_torch(p)
    actions = reference.sample((7,))
    torch.testing.assert_close(p.log_prob(actions), reference.log_prob(actions))
    samples = p.sample(200_000)
    assert samples.shape == (200_000, B, D) and not samples.requires_grad
    # The mean log-density of samples is minus the entropy; it depends on mean, width and correlation.
    expected = reference.log_prob(reference.sample((200_000,))).mean(0)
    torch.testing.assert_close(p.log_prob(samples).mean(0), expected, atol=0.03, rtol=0.01)
    torch.testing.assert_close(samples.mean(0), reference.mean, atol=0.1, rtol=0.02)


@pytest.mark.parametrize("kind", WITH_CLOSED_KL)
def test_kls_against_torch(kind):
    online, target = _random(kind, 0), _random(kind, 1)
    reference = _of_torch(target)
    torch.testing.assert_close(online.kl(target), td.kl_divergence(reference, _of_torch(online)))
    hybrids, kls = online.hybrids(target), online.part_kls(target)
    assert set(hybrids) == set(kls) == {part.name for part in POLICIES[NAMES[kind]].PARTS}
    for part, hybrid in hybrids.items():
        kl = kls[part] if kls[part].dim() == 1 else kls[part].sum(-1)
        torch.testing.assert_close(kl, td.kl_divergence(reference, _of_torch(hybrid)))


def test_kl_of_a_deterministic_policy_is_that_of_its_mean():
    online, target = _random(DeterministicWithNoise, 0), _random(DeterministicWithNoise, 1)
    online = DeterministicWithNoise(online.mean, target.stddev)
    expected = td.kl_divergence(_of_torch(target), _of_torch(online))
    torch.testing.assert_close(online.kl(target), expected)
    torch.testing.assert_close(online.part_kls(target)["mu"].sum(-1), expected)
    assert torch.equal(online.mode, online.mean)


def _joint_samples(p, n):
    """Sample pairs (component, action) of a mixture; return the actions and the joint log-density."""
    chosen = td.Categorical(logits=p.logits).sample((n,))
    index = chosen[..., None, None].expand(n, B, 1, D)
    actions = td.Normal(
        p.mean.expand(n, B, M, D).gather(2, index).squeeze(2),
        p.stddev.expand(n, B, M, D).gather(2, index).squeeze(2),
    ).sample()

    def log_prob(q):
        components = DiagonalGaussian(q.mean, q.stddev).log_prob(actions.unsqueeze(-2))
        joint = q.logits.log_softmax(-1) + components
        return joint.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)

    return actions, log_prob


def test_kls_of_mixtures_against_samples():
    """These are the KLs of the pairs (component, action), which bound the KLs of the actions."""
    torch.manual_seed(0)
    target, other = _random(GaussianMixture, 0), _random(GaussianMixture, 1)
    online = GaussianMixture(
        *(t + 0.3 * (o - t) for t, o in zip(vars(target).values(), vars(other).values()))
    )
    actions, joint = _joint_samples(target, 200_000)
    hybrids, kls = online.hybrids(target), online.part_kls(target)
    assert set(hybrids) == set(kls) == {"mu", "sigma", "mixture"}
    cases = [(online, online.kl(target))]
    cases += [(hybrids[part], kl if kl.dim() == 1 else kl.sum(-1)) for part, kl in kls.items()]
    for hybrid, kl in cases:
        estimate = (joint(target) - joint(hybrid)).mean(0)
        torch.testing.assert_close(kl, estimate, atol=0.02, rtol=0.05)
        of_actions = (target.log_prob(actions) - hybrid.log_prob(actions)).mean(0)
        assert bool((of_actions <= kl + 0.01).all())


def test_a_mixture_of_one_is_a_gaussian():
    p = _random(DiagonalGaussian, 0), _random(DiagonalGaussian, 1)
    online, target = (
        GaussianMixture(torch.zeros(B, 1).double(), q.mean[:, None], q.stddev[:, None]) for q in p
    )
    actions = torch.randn(5, B, D).double()
    torch.testing.assert_close(online.log_prob(actions), p[0].log_prob(actions))
    torch.testing.assert_close(online.kl(target), p[0].kl(p[1]))
    for part, kl in p[0].part_kls(p[1]).items():
        torch.testing.assert_close(online.part_kls(target)[part], kl)
    assert torch.equal(online.mode, p[0].mode)


def test_a_full_gaussian_without_correlation_is_a_diagonal_one():
    p = _random(DiagonalGaussian, 0), _random(DiagonalGaussian, 1)
    online, target = (FullGaussian(q.mean, torch.diag_embed(q.stddev)) for q in p)
    for part, kl in p[0].part_kls(p[1]).items():
        torch.testing.assert_close(online.part_kls(target)[part], kl.sum(-1))
    torch.testing.assert_close(online.entropy(), p[0].entropy())
    for name, value in p[0].metrics().items():
        torch.testing.assert_close(online.metrics()[name], value)


def test_small_kl_of_a_full_covariance_survives_float32():
    target = FullGaussian(torch.zeros(1, 4), torch.eye(4)[None])
    online = FullGaussian(torch.zeros(1, 4), 1.001 * torch.eye(4)[None])
    exact = td.kl_divergence(
        *(_of_torch(FullGaussian(p.mean.double(), p.cholesky.double())) for p in (target, online))
    )
    assert float(online.part_kls(target)["sigma"]) == pytest.approx(float(exact), rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_cross_entropy_is_the_weighted_log_density_with_its_gradient(kind):
    torch.manual_seed(0)
    p = _random(kind, 0)
    parameters = [t.requires_grad_() for t in vars(p).values()]
    target = _random(kind, 1)
    actions, weights = target.sample(10), torch.rand(10, B).double()
    loss = p.cross_entropy(target, target.summarise(actions, weights)).sum()
    expected = -(weights * _of_torch(p).log_prob(actions)).sum(0).mean()
    torch.testing.assert_close(loss, expected)
    for a, b in zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", [DiagonalGaussian, FullGaussian])
def test_reparameterized_samples_carry_gradients(kind):
    torch.manual_seed(0)
    p = _random(kind, 0)
    for tensor in vars(p).values():
        tensor.requires_grad_()
    p.reparameterized_sample(4).sum().backward()
    torch.testing.assert_close(p.mean.grad, torch.full((B, D), 4.0).double())
    torch.testing.assert_close(p.entropy(), _of_torch(p).entropy())


def test_greedy_actions():
    mixture = _random(GaussianMixture, 0)
    heaviest = mixture.logits.argmax(-1)
    assert all(torch.equal(mixture.mode[b], mixture.mean[b, heaviest[b]]) for b in range(B))
    categorical = _random(Categorical, 0)
    assert torch.equal(categorical.mode.argmax(-1), categorical.logits.argmax(-1))
    full = _random(FullGaussian, 0)
    assert torch.equal(full.mode, full.mean)


def test_all_discrete_actions_are_candidates_with_their_probabilities():
    p = _random(Categorical, 0)
    actions, log_probs = p.candidates(1)
    assert actions.shape == (D, B, D)
    torch.testing.assert_close(p.log_prob(actions), log_probs)
    torch.testing.assert_close(log_probs.exp().sum(0), torch.ones(B).double())
