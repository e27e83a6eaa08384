"""The optimizers of critic, policy and multipliers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rerpi_rllib.core.networks import ActorCritic

Optimizers = Mapping[str, torch.optim.Optimizer]


class Adam(torch.optim.Adam):
    """torch's fused Adam with one count of steps for all parameters.

    With small networks, torch spends as long on counting each parameter's steps as on taking them.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        (group,) = self.param_groups
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        states = [self.state[parameter] for parameter in parameters]
        if closure is not None or not states or not all(states):
            result = super().step(closure)
            self._share_count()
            return result
        count = states[0]["step"]
        count += 1
        torch._fused_adam_(
            parameters,
            [parameter.grad for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [count] * len(states),
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )
        return None

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self._share_count()

    def _share_count(self) -> None:
        states = [state for state in self.state.values() if state]
        for state in states:
            state["step"] = states[0]["step"]


def make_optimizers(
    nets: ActorCritic, lr: float = 1e-3, dual_lr: float = 1e-3, others: nn.Module | None = None
) -> dict[str, Adam]:
    """Make an Adam for each of critic, policy and multipliers that has parameters.

    Args:
        nets: the networks.
        lr, dual_lr: learning rates of the networks and of the multipliers.
        others: a module around ``nets``; an optimizer "others" has what is trainable in it beside
            them.
    """
    parts = {"critic": nets.critic, "policy": nets.policy, "dual": nets.multipliers}
    groups = {
        name: [parameter for parameter in part.parameters() if parameter.requires_grad]
        for name, part in parts.items()
    }
    if others is not None:
        known = {id(parameter) for group in groups.values() for parameter in group}
        groups["others"] = [
            parameter
            for parameter in others.parameters()
            if parameter.requires_grad and id(parameter) not in known
        ]
    optimizers = {}
    for name, parameters in groups.items():
        if parameters:
            # Multipliers have a short memory: one large KL must not keep them slow for a thousand
            # updates. They have no momentum: it would carry them on through the updates that leave
            # them alone.
            rate, betas = (dual_lr, (0.0, 0.9)) if name == "dual" else (lr, (0.9, 0.999))
            # Capturable: on a GPU an update can be recorded in a graph.
            optimizers[name] = Adam(parameters, lr=rate, betas=betas, fused=True, capturable=True)
    return optimizers
