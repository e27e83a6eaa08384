"""The optimizers of critic, policy and multipliers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rerpi_rllib.core.networks import ActorCritic

Optimizers = Mapping[str, torch.optim.Optimizer]


class Adam(torch.optim.Adam):
    """torch's fused Adam with one count of steps for all parameters.

    With small networks, torch spends as long on counting each parameter's steps as on taking them.
    """

    _shared_count: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        (group,) = self.param_groups
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        states = [self.state[parameter] for parameter in parameters if parameter in self.state]
        count = self._shared_count
        if (
            closure is not None
            or count is None
            or not len(parameters) == len(states) == len(self.state)
            or any(state["step"] is not count for state in states)
        ):
            return self._torch_step(closure)
        count += 1
        # A gradient scaler leaves these here.
        grad_scale, found_inf = (getattr(self, key, None) for key in ("grad_scale", "found_inf"))
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
            grad_scale=grad_scale,
            found_inf=found_inf,
        )
        if found_inf is not None:
            count -= found_inf.reshape(())
        return None

    def _torch_step(self, closure: Any) -> Any:
        """Take a step as torch does; if it is the first one of all parameters, share their count."""
        is_first = not self.state
        counts = {id(state["step"]) for state in self.state.values()}
        if len(counts) < len(self.state):
            for state in self.state.values():
                state["step"] = state["step"].clone()
        self._shared_count = None
        result = super().step(closure)
        if is_first and len(self.state) == len(self.param_groups[0]["params"]):
            self._share_count()
        return result

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self._shared_count = None
        counts = [state["step"] for state in self.state.values()]
        everything = len(counts) == len(self.param_groups[0]["params"])
        if counts and everything and all(torch.equal(count, counts[0]) for count in counts):
            self._share_count()

    def _share_count(self) -> None:
        self._shared_count = next(iter(self.state.values()))["step"]
        for state in self.state.values():
            state["step"] = self._shared_count


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
    return {
        name: (
            make_dual_optimizer(parameters, dual_lr)
            if name == "dual"
            else make_optimizer(parameters, lr)
        )
        for name, parameters in groups.items()
        if parameters
    }


def make_optimizer(parameters: Iterable[Tensor], lr: float) -> Adam:
    """Make the Adam of a network."""
    # Capturable: on a GPU an update can be recorded in a graph.
    return Adam(parameters, lr=lr, fused=True, capturable=True)


def make_dual_optimizer(parameters: Iterable[Tensor], lr: float) -> Adam:
    """Make the Adam of the multipliers.

    They have a short memory: one large KL must not keep them slow for a thousand updates. They have
    no momentum: it would carry them on through the updates that leave them alone.
    """
    return Adam(parameters, lr=lr, betas=(0.0, 0.9), fused=True, capturable=True)
