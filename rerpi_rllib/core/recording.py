"""Operations that are recorded once and then run in one call, without Python between them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)


@torch.no_grad()
def record(module: nn.Module, *inputs: Tensor, frozen: bool = False) -> Callable[..., Tensor]:
    """Return a function that does what the module does, without gradients, but faster.

    The operations read the weights where the module has them, and always see the current ones. Random
    numbers are the same as the module's, which runs once to be recorded. A record is valid for inputs
    of these shapes only. A frozen one, of a module in evaluation mode, keeps the weights as they are
    now and leaves out what the result does not depend on.

    A module that looks at values to choose its operations cannot be recorded, and is returned itself;
    so is every module if a future release of torch has no ``torch.jit``, which is deprecated.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            untraceable: type[Warning] = torch.jit.TracerWarning  # type: ignore[attr-defined]
            warnings.simplefilter("error", untraceable)
            # These layers choose their operations by the shape, which does not change.
            warnings.filterwarnings("ignore", category=untraceable, module=".*core.layers")
            recorded: Callable[..., Tensor] = torch.jit.trace(module, inputs, check_trace=False)
            if frozen:
                recorded = torch.jit.freeze(recorded)
        return recorded
    except Exception as reason:  # If the module itself fails, it does so again when it is used.
        logger.debug("%s is not recorded: %s", type(module).__name__, reason)
        return module
