"""Learners that make the same updates together, each on an equal share of the batch.

The result is that of one learner with the joined batch. The losses are means over states, so their
gradients are averaged. What is not linear in the states is computed from averages, too: the exact
temperature is that of all states, and with windows, which hold steps in different numbers, each step
counts the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Gradients = Sequence[Tensor | None]


class Alone:
    """A learner without others."""

    def mean(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return the means of scalars or vectors of one shape over all learners."""
        return values

    def maximum(self, value: Tensor) -> Tensor:
        """Return the largest value of a scalar over all learners."""
        return value

    def agree(self, is_sound: bool) -> bool:
        """Tell whether something holds for all learners."""
        return is_sound

    def average(self, gradients: Gradients) -> Gradients:
        """Return the means of gradients, of which the same ones are None in all learners."""
        return gradients


class Peers(Alone):
    """The learners of torch's default process group. All of them make the same calls in turn."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._number = device, torch.distributed.get_world_size()

    def mean(self, *values: Tensor) -> tuple[Tensor, ...]:
        together = torch.stack(values)
        torch.distributed.all_reduce(together)
        return (together / self._number).unbind()

    def maximum(self, value: Tensor) -> Tensor:
        largest = value.clone()
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        return largest

    def agree(self, is_sound: bool) -> bool:
        return bool(self.maximum(torch.tensor(float(not is_sound), device=self._device)) == 0.0)

    def average(self, gradients: Gradients) -> Gradients:
        known = [gradient for gradient in gradients if gradient is not None]
        flat = torch.cat([gradient.flatten() for gradient in known])
        torch.distributed.all_reduce(flat)
        flat /= self._number
        parts = iter(flat.split([gradient.numel() for gradient in known]))
        return [g if g is None else next(parts).view_as(g) for g in gradients]


ALONE = Alone()
