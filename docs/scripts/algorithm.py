"""The pictures of docs/algorithm.md, computed by the functions that train.

python docs/scripts/algorithm.py
"""

from __future__ import annotations

import copy
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse, Rectangle
from torch import Tensor, nn

from rerpi_rllib import RERPIConfig, core
from rerpi_rllib.core.critics import Critic
from rerpi_rllib.core.losses import PLAN
from rerpi_rllib.core.networks import ActorCritic
from rerpi_rllib.core.optimizers import make_optimizers
from rerpi_rllib.core.plan import plan_update
from rerpi_rllib.core.policies.gaussian import gaussian_kl_mean, gaussian_kl_stddev
from rerpi_rllib.core.settings import LearningSettings
from rerpi_rllib.core.updates import policy_step
from rerpi_rllib.core.weights import effective_sample_size, kl_to_prior

matplotlib.use("Agg")
matplotlib.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "font.size": 10})

PICTURES = Path(__file__).parents[1] / "pictures"
_OLD, _NEW, _Q, _OTHER = "0.55", "#3949ab", "#00695c", "#e65100"


def _value(actions: Tensor) -> Tensor:
    """Stand in for the target critic at one state: a low hill, and a higher one further away."""
    low, high = 1.0 * torch.exp(-2.0 * (actions + 0.7) ** 2), torch.exp(-3.0 * (actions - 0.8) ** 2)
    return 6.0 * low + 10.0 * high - 2.0 * actions**2


def weights() -> Figure:
    """Draw Step 2: the same samples with three bounds on the KL of their weights."""
    torch.manual_seed(3)
    mean, stddev = 0.1, 0.6
    actions = mean + stddev * torch.randn(20, 1)
    q_values = _value(actions)
    grid = torch.linspace(-1.8, 1.8, 400)
    density = torch.exp(-0.5 * ((grid - mean) / stddev) ** 2)
    figure = Figure(figsize=(11.0, 4.4), layout="constrained")
    for column, (axes, epsilon) in enumerate(zip(figure.subplots(2, 3).T, (0.03, 0.3, 1.5))):
        temperature = core.solve_temperature(q_values, epsilon)
        by_action = core.exponential_weights(q_values, temperature)
        above, below = axes
        above.plot(grid, _value(grid), color=_Q, label="Q of the state")
        above.scatter(actions, q_values, s=600 * by_action, color=_NEW, alpha=0.5, zorder=3)
        above.scatter(actions, q_values, s=6, color="k", zorder=4, label="sampled actions")
        size = float(effective_sample_size(by_action))
        above.set_title(
            f"epsilon = {epsilon}: temperature {float(temperature):.2f},\n"
            f"weights worth {size:.1f} of 20 actions",
            fontsize=10,
        )
        below.fill_between(grid, density / density.sum(), color=_OLD, alpha=0.35, label="old policy")
        wanted = density * torch.exp((_value(grid) - _value(grid).max()) / temperature)
        below.plot(grid, wanted / wanted.sum(), color=_NEW, label="what the weights ask for")
        below.set(yticks=[], xlabel="action")
        above.set(xticks=[])
        if column == 0:
            above.set_ylabel("value")
    above.legend(fontsize=8, loc="lower center")
    below.legend(fontsize=8, loc="upper left")
    return figure


def temperature() -> Figure:
    """Draw the dual whose minimum is the temperature."""
    torch.manual_seed(0)
    q_values = 3.0 * torch.randn(20, 256)
    grid = torch.logspace(-1.0, 2.0, 200)
    figure = Figure(figsize=(10.0, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for epsilon, color in ((0.03, _OLD), (0.1, _NEW), (0.3, _OTHER)):
        best = core.solve_temperature(q_values, epsilon)
        dual = torch.stack([core.temperature_dual(q_values, t, epsilon) for t in grid])
        lowest = core.temperature_dual(q_values, best, epsilon)
        left.plot(grid, dual - lowest, color=color, label=f"epsilon = {epsilon}")
        left.plot(best, 0.0, "o", color=color)
        right.axhline(epsilon, color=color, linewidth=0.8)
        right.plot(best, epsilon, "o", color=color)
    left.set(xscale="log", ylim=(-0.1, 3.0), xlabel="temperature", title="dual above its minimum")
    left.legend(fontsize=8)
    kls = [kl_to_prior(core.exponential_weights(q_values, t)).mean() for t in grid]
    right.plot(grid, kls, color="k")
    right.set(xscale="log", yscale="log", xlabel="temperature", ylim=(1e-3, 4.0))
    right.set_title("KL of the weights: it is epsilon at the minimum")
    return figure


def kinds() -> Figure:
    """Draw the three kinds of weights over the same values."""
    torch.manual_seed(1)
    q_values = (4.0 + torch.randn(20, 1)).sort(dim=0, descending=True).values
    by_kind = {
        "exponential, epsilon = 0.1": core.exponential_weights(
            q_values, core.solve_temperature(q_values, 0.1)
        ),
        "ranking, ranking_eta = 10": core.ranking_weights(q_values),
        "identity": core.identity_weights(q_values),
    }
    figure = Figure(figsize=(10.0, 2.6), layout="constrained")
    for axis, (title, values) in zip(figure.subplots(1, 3), by_kind.items()):
        axis.bar(range(1, 21), values[:, 0], color=_NEW)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("actions, the best first")
    return figure


def _improve(kind: str, actions: Tensor, by_action: Tensor) -> tuple[Tensor, Tensor]:
    """Fit a free Gaussian to weighted actions for one target period; return mean and stddev."""
    target = torch.zeros(1, 2), 0.5 * torch.ones(1, 2)
    mean = nn.Parameter(target[0].clone())
    log_stddev = nn.Parameter(target[1].log())
    alphas = nn.Parameter(torch.zeros(2))
    policy = torch.optim.Adam([mean, log_stddev], lr=3e-3)
    dual = torch.optim.Adam([alphas], lr=3e-2)
    for _ in range(4000):
        alpha = alphas.exp()
        online = mean, log_stddev.exp()
        if kind == "decoupled":
            fit = core.decoupled_fit(
                actions, by_action, *online, *target, alpha[0], alpha[1], EPSILON_MU, EPSILON_SIGMA
            )
        else:
            fit = core.coupled_fit(actions, by_action, *online, *target, alpha[0], EPSILON_PI)
        is_free = kind == "unconstrained"
        scale = 1.0 if is_free else 1.0 / (1.0 + float(alpha.detach().max()))
        loss = fit.policy_loss if is_free else fit.policy_loss + fit.penalty
        for optimizer in (policy, dual):
            optimizer.zero_grad()
        (scale * loss + fit.dual_loss).backward()
        policy.step()
        dual.step()
    return mean.detach()[0], log_stddev.detach().exp()[0]


EPSILON_MU, EPSILON_SIGMA, EPSILON_PI = 0.5, 0.02, 0.5


def fit() -> Figure:
    """Draw Step 3: three ways to fit a Gaussian to the same weighted actions."""
    torch.manual_seed(0)
    best = torch.tensor([1.2, 0.9])
    actions = 0.5 * torch.randn(200, 1, 2)
    q_values = -4.0 * (actions - best).square().sum(dim=-1)
    by_action = core.exponential_weights(q_values, core.solve_temperature(q_values, 1.0))
    figure = Figure(figsize=(11.0, 4.1), layout="constrained")
    titles = {
        "unconstrained": "unconstrained",
        "coupled": "coupled: one bound",
        "decoupled": "decoupled: a bound for each",
    }
    for axis, (kind, title) in zip(figure.subplots(1, 3), titles.items()):
        mean, stddev = _improve(kind, actions, by_action)
        axis.scatter(*actions[:, 0].T, s=500 * by_action[:, 0], color=_OTHER, alpha=0.5)
        axis.scatter(*actions[:, 0].T, s=2, color="0.4")
        _ellipse(axis, torch.zeros(2), 0.5 * torch.ones(2), _OLD, "--")
        _ellipse(axis, mean, stddev, _NEW, "-")
        axis.plot(*best, "*", color=_Q, markersize=12)
        axis.set_title(f"{title}\nstddev 0.50 to {float(stddev.mean()):.2f}", fontsize=10)
        axis.set(xlim=(-1.4, 1.6), ylim=(-1.4, 1.4), aspect="equal", xticks=[], yticks=[])
    return figure


def _ellipse(axis: Axes, mean: Tensor, stddev: Tensor, color: str, style: str) -> None:
    width, height = (2.0 * stddev).tolist()
    center = mean.tolist()
    axis.add_patch(
        Ellipse(center, width, height, fill=False, color=color, linewidth=2, linestyle=style)
    )
    axis.plot(*center, "+", color=color, markersize=10)


def trust_regions() -> Figure:
    """Draw which Gaussians the bounds allow: a box for two bounds, a lens for one."""
    shift, ratio = torch.meshgrid(
        torch.linspace(-1.3, 1.3, 261), torch.linspace(0.5, 2.1, 321), indexing="xy"
    )
    one = torch.ones(())
    kl_mean = gaussian_kl_mean(shift, torch.zeros(()), one)
    kl_stddev = gaussian_kl_stddev(ratio, one)
    joint = kl_stddev + gaussian_kl_mean(torch.zeros(()), shift, ratio)
    figure = Figure(figsize=(6.6, 3.8), layout="constrained")
    axis = figure.subplots()
    axis.contourf(shift, ratio, joint, levels=[0.0, EPSILON_PI], colors=[_OTHER], alpha=0.25)
    axis.contour(shift, ratio, joint, levels=[EPSILON_PI], colors=_OTHER)
    edge = float(shift[kl_mean < EPSILON_MU].max())
    inside = ratio[kl_stddev < EPSILON_SIGMA]
    low, high = float(inside.min()), float(inside.max())
    box = Rectangle((-edge, low), 2 * edge, high - low, color=_NEW, alpha=0.35)
    axis.add_patch(box)
    axis.plot(0.0, 1.0, "k+", markersize=12)
    axis.annotate("old policy", (0.03, 1.03), fontsize=9)
    axis.annotate(f"coupled: joint KL < {EPSILON_PI}", (-0.4, 1.5), color=_OTHER, fontsize=9)
    axis.annotate(
        f"decoupled: KL of mean < {EPSILON_MU}\nand KL of covariance < {EPSILON_SIGMA}",
        (-0.85, 0.9),
        color=_NEW,
        fontsize=9,
    )
    axis.set(xlabel="shift of the mean, in old stddevs", ylabel="new stddev / old stddev")
    return figure


class _Quadratic(Critic):
    """A known function in place of the critic: the best action is minus the state."""

    def __init__(self) -> None:
        nn.Module.__init__(self)

    def forward(self, observations: Tensor, actions: Tensor) -> Tensor:
        return -(actions + observations).square().sum(dim=-1)


def periods() -> Figure:
    """Draw KLs and multipliers over the updates of several target periods."""
    torch.manual_seed(0)
    config = RERPIConfig.compact()
    config.training(policy_update_period=1, epsilon_penalty=None)
    settings = LearningSettings.from_mapping(vars(config))
    nets = ActorCritic(
        2,
        2,
        policy={"layers": (64, 64), "covariance_layers": (32,)},
        critic={"layers": (1,)},
        clip_actions=False,
        constraints=settings.constraints(),
    )
    nets.critic = nets.target_critic = _Quadratic()
    optimizers = make_optimizers(nets, config.lr, config.dual_lr)
    rows = []
    for number in range(1, 12 * settings.target_update_period + 1):
        plan = plan_update(number, settings)
        states = 4.0 * torch.rand(128, 2) - 2.0
        metrics = policy_step(nets, {"obs": states, PLAN: plan}, settings, optimizers)
        names = ("kl_mu", "kl_sigma", "alpha_mu", "alpha_sigma")
        rows.append([float(metrics[name]) for name in names])
        if plan.copy_targets:
            nets.target_policy = copy.deepcopy(nets.policy).requires_grad_(False)
    curves = np.array(rows)
    numbers = np.arange(1, len(curves) + 1)
    figure = Figure(figsize=(11.0, 4.4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for column, (label, color, epsilon) in enumerate(
        (("mean", _NEW, config.epsilon_mu), ("covariance", _OTHER, config.epsilon_sigma))
    ):
        above.plot(numbers, curves[:, column] / epsilon, color=color, label=label)
        below.plot(numbers, curves[:, 2 + column], color=color, label=f"multiplier of the {label}")
    above.axhline(1.0, color="k", linewidth=0.8)
    above.set(ylabel="KL / bound", ylim=(0.0, 3.0))
    below.set(yscale="log", ylabel="multiplier", xlabel="update")
    period = settings.target_update_period
    for axis in (above, below):
        for start in range(0, len(curves), period):
            axis.axvspan(start + 0.75 * period, start + period, color="0.92", zorder=0)
        axis.legend(fontsize=8, loc="upper right" if axis is above else "lower right")
        axis.set_xlim(0, len(curves))
    return figure


FIGURES = {
    "weights": weights,
    "temperature": temperature,
    "kinds-of-weights": kinds,
    "fit": fit,
    "trust-regions": trust_regions,
    "target-periods": periods,
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    PICTURES.mkdir(exist_ok=True)
    for name, draw in FIGURES.items():
        draw().savefig(PICTURES / f"algorithm-{name}.png", dpi=90, bbox_inches="tight")
