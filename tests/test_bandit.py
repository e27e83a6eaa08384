"""Appendix C: for one state the decoupled fit is an interpolation, with CMA-ES as a special case."""

import cma
import numpy as np
import torch

from rerpi_rllib import core
from rerpi_rllib.core.constraints import Constraint
from rerpi_rllib.core.fitting import fit_policy
from rerpi_rllib.core.policies.gaussian import FullGaussian


def _quadratic(actions):
    scales = torch.tensor([1.0, 4.0, 0.5], dtype=actions.dtype)
    return -(scales * (actions - 1.5).square()).sum(-1)


def _fit_by_gradient(target, actions, weights, alphas):
    """Run the core's own Step 3 to its optimum, on a linear policy of the single state s = 1."""
    constraints = [(Constraint(part, part, 0.0, part), alpha) for part, alpha in alphas.items()]
    log_diagonal = target.cholesky.diagonal(dim1=-2, dim2=-1).log()
    parameters = [target.mean.clone(), target.cholesky.tril(-1), log_diagonal.clone()]
    mean, below, log_diagonal = (p.requires_grad_() for p in parameters)
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=200, tolerance_grad=1e-12, tolerance_change=1e-16,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def policy():
        return FullGaussian(mean, below.tril(-1) + torch.diag_embed(log_diagonal.exp()))

    summary = target.summarise(actions, weights)

    def closure():
        optimizer.zero_grad()
        fit = fit_policy("decoupled", policy(), target, summary, constraints)
        loss = fit.policy_loss + fit.penalty
        loss.backward()
        return loss

    optimizer.step(closure)
    fitted = policy()
    return FullGaussian(fitted.mean.detach(), fitted.cholesky.detach())


def test_a_linear_run_with_ranking_weights_follows_the_closed_form():
    torch.manual_seed(0)
    dtype = torch.float64
    alphas = {"mu": 0.5, "sigma": 4.0}
    policy = FullGaussian(torch.zeros(1, 3, dtype=dtype), torch.eye(3, dtype=dtype)[None])
    mean, covariance = policy.mean[0], torch.eye(3, dtype=dtype)
    for _ in range(8):
        actions = policy.sample(50)
        weights = core.ranking_weights(_quadratic(actions))
        policy = _fit_by_gradient(policy, actions, weights, alphas)
        mean, covariance = core.bandit_update(
            mean,
            covariance,
            actions[:, 0],
            weights[:, 0],
            1.0 / (1.0 + alphas["mu"]),
            1.0 / (1.0 + alphas["sigma"]),
        )
        torch.testing.assert_close(policy.mean[0], mean, rtol=1e-5, atol=1e-6)
        found = policy.cholesky[0] @ policy.cholesky[0].T
        torch.testing.assert_close(found, covariance, rtol=1e-4, atol=1e-6)
    assert float(_quadratic(mean)) > 0.2 * float(_quadratic(torch.zeros(3, dtype=dtype)))


def test_steps_of_zero_and_one():
    torch.manual_seed(0)
    mean, covariance = torch.randn(3), torch.eye(3)
    actions, weights = torch.randn(10, 3), torch.full((10,), 0.1)
    stay = core.bandit_update(mean, covariance, actions, weights, 0.0, 0.0)
    torch.testing.assert_close(stay[0], mean)
    torch.testing.assert_close(stay[1], covariance)
    go = core.bandit_update(mean, covariance, actions, weights, 1.0, 1.0)
    torch.testing.assert_close(go[0], actions.mean(0))


def test_one_generation_of_cma_es():
    """The weights and learning rates are CMA-ES's, without its rank-one and negative updates."""
    start, step = np.array([0.3, -0.2, 1.0, 2.0]), 0.7
    es = cma.CMAEvolutionStrategy(
        start, step, {"seed": 1, "verbose": -9, "popsize": 12, "CMA_active": False,
                      "CMA_rankone": 0},
    )  # fmt: skip
    # After some generations the covariance is no longer the identity.
    for _ in range(5):
        solutions = es.ask()
        es.tell(solutions, [cma.ff.elli(x) for x in solutions])
    mean, sigma = es.mean.copy(), es.sigma
    covariance = sigma**2 * es.sm.covariance_matrix
    solutions = es.ask()
    values = [cma.ff.elli(x) for x in solutions]
    es.tell(solutions, values)
    best_first = np.argsort(values)
    weights = np.zeros(len(values))
    weights[best_first[: es.sp.weights.mu]] = es.sp.weights.positive_weights
    new_mean, new_covariance = core.bandit_update(
        *(torch.as_tensor(np.asarray(x)) for x in (mean, covariance, solutions, weights)),
        step_mu=es.sp.cmean,
        step_sigma=es.sp.cmu,
    )
    np.testing.assert_allclose(new_mean, es.mean, rtol=0, atol=1e-6)
    found = new_covariance.numpy() / sigma**2
    np.testing.assert_allclose(found, es.sm.covariance_matrix, rtol=0, atol=1e-6)
