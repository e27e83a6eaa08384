"""A copy of all that updates change, with which they can be undone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rerpi_rllib.core.networks import ActorCritic
from rerpi_rllib.core.optimizers import Optimizers


class Snapshot:
    """Networks, multipliers, the count of updates and the optimizers' states at one moment.

    Copying them takes a fraction of a millisecond for networks of the usual size, which the many
    updates of one call share.
    """

    def __init__(self, nets: ActorCritic, optimizers: Optimizers) -> None:
        self._nets, self._optimizers = nets, optimizers
        self._states = [_states(optimizer) for optimizer in optimizers.values()]
        tensors = {id(tensor): tensor for tensor in self._all_tensors()}
        self._copies = [(tensor, tensor.detach().clone()) for tensor in tensors.values()]

    @torch.no_grad()
    def total(self) -> Tensor:
        """Return the sum of all that is learned now, which is finite only if all of it is."""
        learned = [*self._parameters(), *self._of_optimizers()]
        device = self._nets.num_updates.device
        return torch.cat(
            [t.flatten() for t in learned if t.is_floating_point() and t.device == device]
            or [torch.zeros(1, device=device)]
        ).sum()

    @torch.no_grad()
    def restore(self) -> None:
        """Undo all changes since then."""
        for optimizer, states in zip(self._optimizers.values(), self._states):
            # What an optimizer has made in its first step would be no part of the copies.
            optimizer.state.clear()
            optimizer.state.update({parameter: dict(state) for parameter, state in states.items()})
        for tensor, copy in self._copies:
            tensor.copy_(copy)

    def _all_tensors(self) -> Iterator[Tensor]:
        yield from self._nets.state_dict(keep_vars=True).values()
        yield from self._parameters()
        yield from self._of_optimizers()

    def _parameters(self) -> Iterator[Tensor]:
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                yield from group["params"]

    def _of_optimizers(self) -> Iterator[Tensor]:
        for optimizer in self._optimizers.values():
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))


def _states(optimizer: torch.optim.Optimizer) -> dict[Tensor, dict[str, Any]]:
    return {parameter: dict(state) for parameter, state in optimizer.state.items()}
