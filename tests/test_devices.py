"""An update fits a GPU: it reads no value while it runs, mixes no devices and is one graph."""

import pytest
import torch
from test_networks import _batch, _discrete, _family, _windows

from rerpi_rllib.core.losses import PLAN, prepare, rerpi_losses
from rerpi_rllib.core.optimizers import make_optimizers
from rerpi_rllib.core.plan import Plan
from rerpi_rllib.core.policies import POLICIES
from rerpi_rllib.core.updates import critic_step, policy_step
from rerpi_rllib.core.weights import solve_temperature

VARIANTS = [
    *({"policy": policy} for policy in POLICIES),
    {"policy": "mixture", "temperature_solver": "adam", "epsilon_penalty": 1e-3},
    {"policy": "categorical", "weighting": "ranking"},
    {"temperature_solver": "adam", "multiplier_schedule": "always"},
    {"epsilon_penalty": 1e-3, "per_dimension_kl": True},
    {"weighting": "ranking"},
    {"weighting": "identity", "fit": "unconstrained"},
    {"fit": "coupled"},
    {"fit": "value_gradient", "entropy_weight": 1e-3},
    {"policy": "deterministic", "fit": "value_gradient"},
    {"policy_evaluation": "nstep", "critic": "categorical"},
    {"policy_evaluation": "retrace", "num_critics": 2},
    {"critic": "quantile", "num_critics": 2},
]


def _variant(variant):
    nets, settings = _family(**variant)
    batch = _batch() if settings.policy_evaluation == "td0" else _windows(lengths=[1, 2, 3, 4, 4, 4])
    if variant.get("policy") == "categorical":
        batch = _discrete(batch)
    return nets, settings, batch


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_an_update_reads_no_value_and_stays_on_its_device(variant):
    nets, settings, batch = _variant(variant)
    made = make_optimizers(nets)
    assert all(adam.defaults["fused"] and adam.defaults["capturable"] for adam in made.values())
    moved = {"critic": nets.critic, "policy": nets.policy, "dual": nets.multipliers}
    # Tensors of this device have no values, and it takes no others.
    nets = nets.to("meta")
    batch = {key: column.to("meta") for key, column in batch.items()}
    # Adam on this device would read its count of steps, but not on a GPU.
    optimizers = {name: torch.optim.SGD(moved[name].parameters()) for name in made}
    for prepared in prepare(nets, [batch | {PLAN: Plan()} for _ in range(2)], settings):
        metrics = policy_step(nets, prepared, settings, optimizers)
        metrics |= critic_step(nets, prepared, settings, optimizers)
        assert {value.device.type for value in metrics.values()} == {"meta"}
    nets.update_targets()
    with pytest.raises(RuntimeError, match="meta"):
        float(metrics["critic_loss"])


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_an_update_is_one_graph(variant):
    nets, settings, batch = _variant(variant)

    def losses(batch):
        (prepared,) = prepare(nets, [batch], settings)
        return rerpi_losses(nets, prepared, settings)

    torch._dynamo.reset()
    torch.manual_seed(0)
    expected, _ = losses(batch)
    torch.manual_seed(0)
    compiled, _ = torch.compile(losses, fullgraph=True, backend="eager")(batch)
    torch.testing.assert_close(compiled, expected, rtol=1e-4, atol=1e-5)
    torch.stack(list(compiled.values())).sum().backward()
    assert all(parameter.grad is not None for parameter in nets.critic.parameters())


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_what_is_prepared_has_the_same_layout_in_blocks_of_any_size(variant):
    """Otherwise a compiled update could not take it."""
    nets, settings, batch = _variant(variant)

    def layouts(number):
        prepared = prepare(nets, [batch | {PLAN: Plan()} for _ in range(number)], settings)[0]
        added = {key: value for key, value in prepared.items() if key not in {*batch, PLAN}}
        found = []
        while added:
            key, value = added.popitem()
            if isinstance(value, torch.Tensor):
                found.append((key, value.shape, value.stride()))
            elif isinstance(value, dict):
                added |= {f"{key}.{name}": inner for name, inner in value.items()}
            elif isinstance(value, (list, tuple)):
                added |= {f"{key}.{index}": inner for index, inner in enumerate(value)}
            elif value is not None:
                added |= {f"{key}.{name}": inner for name, inner in vars(value).items()}
        return sorted(found)

    assert layouts(1) == layouts(3) != []


@pytest.mark.parametrize("spread", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 1.0])
def test_a_fixed_number_of_steps_finds_the_same_temperature(spread, epsilon):
    torch.manual_seed(0)
    q_values = spread * torch.randn(20, 64) * torch.randn(64).exp()
    exact = solve_temperature(q_values, epsilon)
    fixed = torch.compile(solve_temperature, fullgraph=True, backend="eager")
    torch.testing.assert_close(fixed(q_values, epsilon), exact, rtol=1e-6, atol=0.0)
    for equal in (torch.zeros(20, 3), q_values[:1]):
        assert float(fixed(equal, epsilon)) == float(solve_temperature(equal, epsilon)) < 1e-20
