"""The core reproduces numbers computed once by an independent implementation (Acme and rlax)."""

import pytest
import torch
from conftest import golden_cases

from rerpi_rllib import core

DTYPES = [torch.float32, torch.float64]


def _softplus_multiplier(raw: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.softplus(raw) + 1e-8


def _tensors(values: dict, dtype: torch.dtype, requires_grad: bool = False) -> dict:
    return {
        key: torch.tensor(value, dtype=dtype, requires_grad=requires_grad)
        for key, value in values.items()
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", golden_cases("mpo"))
def test_losses_weights_and_gradients(case, dtype):
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    inputs = _tensors(case["inputs"], dtype)
    mean = inputs["online_mean"].requires_grad_()
    stddev = inputs["online_stddev"].requires_grad_()
    raw = _tensors({k: v for k, v in case["duals"].items() if v is not None}, dtype, True)
    eps, expected, per_dimension = (
        case["epsilons"],
        case["outputs"],
        case["config"]["per_dim_constraining"],
    )

    def check(actual, wanted, name, scale=None):
        wanted = torch.tensor(wanted, dtype=torch.float64)
        # Relative to the size of the tensor: its smallest entries are differences of large ones.
        scale = scale if scale is not None else float(wanted.abs().max())
        error = float((actual.detach().double() - wanted).abs().max())
        assert error <= tolerance * max(scale, 1e-12), f"{name}: {error} against {scale}"

    temperature = _softplus_multiplier(raw["raw_temperature"]).squeeze()
    weights = core.exponential_weights(inputs["q_values"], temperature).detach()
    check(weights, expected["weights_q"], "weights_q")
    temperature_loss = core.temperature_dual(inputs["q_values"], temperature, eps["epsilon"])
    check(temperature_loss, expected["temperature_loss_q"], "temperature_loss_q")

    if case["config"]["action_penalization"]:
        cost = core.out_of_bounds_cost(inputs["actions"])
        check(cost, expected["penalty_cost"], "penalty_cost")
        penalty_temperature = _softplus_multiplier(raw["raw_penalty_temperature"]).squeeze()
        penalty_weights = core.exponential_weights(cost, penalty_temperature).detach()
        check(penalty_weights, expected["weights_penalty"], "weights_penalty")
        weights = weights + penalty_weights
        penalty_loss = core.temperature_dual(cost, penalty_temperature, eps["epsilon_penalty"])
        check(penalty_loss, expected["temperature_loss_penalty"], "temperature_loss_penalty")
        temperature_loss = temperature_loss + penalty_loss

    alphas = [
        _softplus_multiplier(raw[name]) if per_dimension else _softplus_multiplier(raw[name])[0]
        for name in ("raw_alpha_mean", "raw_alpha_stddev")
    ]
    fit = core.decoupled_fit(
        inputs["actions"],
        weights,
        mean,
        stddev,
        inputs["target_mean"],
        inputs["target_stddev"],
        *alphas,
        eps["epsilon_mean"],
        eps["epsilon_stddev"],
        per_dimension=per_dimension,
    )
    check(
        fit.policy_loss,
        expected["policy_mean_loss"] + expected["policy_stddev_loss"],
        "policy_loss",
    )
    for actual, name in ((fit.kl_mu, "kl_mean"), (fit.kl_sigma, "kl_stddev")):
        check(actual, torch.tensor(expected[name], dtype=torch.float64).mean(0).tolist(), name)
    check(fit.penalty, expected["kl_mean_penalty"] + expected["kl_stddev_penalty"], "penalty")
    dual_scale = abs(expected["kl_mean_penalty"]) + abs(expected["kl_stddev_penalty"])
    dual = expected["alpha_mean_loss"] + expected["alpha_stddev_loss"]
    check(fit.dual_loss, dual, "dual_loss", max(dual_scale, abs(dual)))

    total = fit.policy_loss + fit.penalty + fit.dual_loss + temperature_loss
    check(total, expected["total_loss"], "total_loss")
    total.backward()
    gradients = {"online_mean": mean, "online_stddev": stddev, **raw}
    for name, tensor in gradients.items():
        check(tensor.grad, case["gradients"][name], f"gradient of {name}")


@pytest.mark.parametrize("case", golden_cases("mpo"))
def test_solved_temperature(case):
    wanted = case["outputs"]["optimal_temperature"]
    q_values = torch.tensor(case["inputs"]["q_values"], dtype=torch.float64)
    solved = float(core.solve_temperature(q_values, case["epsilons"]["epsilon"]))
    assert wanted is not None and solved == pytest.approx(wanted, rel=5e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", golden_cases("retrace"))
def test_retrace_targets(case, dtype):
    lambda_ = case["inputs"]["lambda"]
    x = _tensors({k: v for k, v in case["inputs"].items() if k != "lambda"}, dtype)
    targets = core.retrace_targets(
        x["r_t"], x["discount_t"], x["v_t"], x["q_t"], x["log_rhos"], lambda_
    )
    wanted = torch.tensor(case["outputs"]["targets"], dtype=torch.float64)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(
        targets.double(), wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max())
    )
