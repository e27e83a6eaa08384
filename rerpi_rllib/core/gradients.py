"""The gradients of an update's losses, which can be compiled while training goes on.

With small networks and batches an update is hundreds of small operations, each of which takes Python
and torch longer to start than to compute. ``torch.compile`` makes one function of them for the critic
and one for the policy, and these run without Python's lock. It needs a C++ compiler and half a
minute, or a few seconds if the same update was compiled before.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rerpi_rllib.core import layers
from rerpi_rllib.core.losses import PLAN, Batch, Metrics, critic_loss, policy_losses
from rerpi_rllib.core.networks import ActorCritic
from rerpi_rllib.core.settings import LearningSettings
from rerpi_rllib.core.threads import one_torch_thread_each

logger = logging.getLogger(__name__)

WhenToCompile = Literal["background", "at_start", "never"]
Parameters = Sequence[nn.Parameter]
# A gradient for each parameter, None where the losses do not depend on it, and the metrics.
Result = tuple[Sequence[Tensor | None], Metrics]
GradientFunction = Callable[[ActorCritic, Batch, LearningSettings, Parameters], Result]

# A run that is over sooner would gain nothing.
_SECONDS_BEFORE_COMPILING = 30.0
_one_compiles = threading.Lock()


def critic_gradients(
    nets: ActorCritic, batch: Batch, settings: LearningSettings, parameters: Parameters
) -> Result:
    """Compute the gradients of Step 1's loss for the critic's parameters, and its metrics."""
    loss, metrics = critic_loss(nets, batch, settings)
    return torch.autograd.grad(loss, parameters, allow_unused=True), metrics


def policy_gradients(
    nets: ActorCritic, batch: Batch, settings: LearningSettings, parameters: Parameters
) -> Result:
    """Compute the gradients of Step 3's losses for policy and multipliers, and their metrics."""
    losses, metrics = policy_losses(nets, batch, settings)
    loss = torch.stack(list(losses.values())).sum()
    return torch.autograd.grad(loss, parameters, allow_unused=True), metrics


class WhenCompiled:
    """A gradient function of one learner that is replaced by a compiled version of itself.

    Args:
        function: computes the gradients until then, and for good if it cannot be compiled here.
        when: "background" compiles it beside the learner once that has worked for a while,
            "at_start" in the first call.
    """

    def __init__(self, function: GradientFunction, when: WhenToCompile) -> None:
        self._eager, self._function, self._when = function, function, when
        self._started = time.monotonic()

    def __call__(
        self, nets: ActorCritic, batch: Batch, settings: LearningSettings, parameters: Parameters
    ) -> Result:
        arguments = nets, batch, settings, parameters
        if self._when == "at_start":
            self._when = "never"
            self._compile(*arguments)
        elif (
            self._when == "background"
            and time.monotonic() - self._started > _SECONDS_BEFORE_COMPILING
        ):
            self._when = "never"
            thread = one_torch_thread_each(1)
            thread.submit(self._compile, *arguments)
            thread.shutdown(wait=False)
        function = self._function
        try:
            return function(*arguments)
        except Exception as reason:
            if function is self._eager:
                raise
            self._function = self._eager
            self._warn("no longer compiled", reason)
            return self._eager(*arguments)

    def _compile(
        self, nets: ActorCritic, batch: Batch, settings: LearningSettings, parameters: Parameters
    ) -> None:
        started = time.monotonic()
        try:
            # Without this setting, which is the process's, torch.compile refuses functions that
            # compute gradients.
            with _one_compiles, torch._dynamo.config.patch(trace_autograd_ops=True):
                function = self._first_call(
                    _faster_products(batch), nets, batch, settings, parameters
                )
        except Exception as reason:
            self._warn("not compiled", reason)
            return
        self._function = function
        name = self._eager.__name__
        logger.info("%s was compiled in %.0f s.", name, time.monotonic() - started)

    def _first_call(self, products: dict[str, Any], *arguments: Any) -> GradientFunction:
        """Compile with the option for products, or without it where torch does not take it."""
        function = _compiled(self._eager, arguments[1], products)
        try:
            function(*arguments)
        except Exception as reason:
            if not products:
                raise
            _warn_of_slower_products(reason)
            return self._first_call({}, *arguments)
        return function

    def _warn(self, what: str, reason: Exception) -> None:
        name = self._eager.__name__
        logger.warning("%s is %s, which makes updates slower: %s", name, what, _first_line(reason))


def _first_line(reason: Exception) -> str:
    return str(reason).strip().partition("\n")[0]


def _warn_of_slower_products(reason: Exception) -> None:
    logger.warning("Compiled updates multiply matrices with MKL: %s", _first_line(reason))


@dataclass(frozen=True)
class Gradients:
    """The functions that compute the gradients of a learner's updates."""

    critic: GradientFunction = critic_gradients
    policy: GradientFunction = policy_gradients

    @classmethod
    def when_compiled(cls, when: WhenToCompile) -> Gradients:
        return cls(WhenCompiled(critic_gradients, when), WhenCompiled(policy_gradients, when))


def _faster_products(example: Batch) -> dict[str, Any]:
    """Return the option that lets compiled functions use oneDNN, if that is faster here."""
    if not layers.uses_onednn() or example["rewards"].device.type != "cpu":
        return {}
    try:
        from rerpi_rllib.core.compiled_products import UseOneDNN
    except (ImportError, AttributeError) as reason:  # They are torch's private names.
        _warn_of_slower_products(reason)
        return {}
    return {"post_grad_custom_post_pass": UseOneDNN()}


def _compiled(
    function: GradientFunction, example: Batch, products: Mapping[str, Any]
) -> GradientFunction:
    """Return a version of the function that is compiled in its first call.

    It is for the same networks and settings, and for batches with the layout of the example. Batches
    of another size go to the function itself; other differences of layout raise an error.

    Args:
        function: computes the gradients.
        example: a batch.
        products: the option of :func:`_faster_products`.
    """
    rows = len(example["rewards"])
    options: dict[str, Any] = {
        **products,
        "guard_filter_fn": torch.compiler.skip_all_guards_unsafe,
        # The same random numbers as without compilation.
        "fallback_random": True,
        # Without Python between the operations, and without its lock.
        "cpp_wrapper": example["rewards"].device.type == "cpu",
        # By the exponential, which is vectorised better.
        "cpp.use_decompose_tanh": True,
    }
    # Torch keeps what it has compiled with the code of a function, for all who call that.
    own = FunctionType(function.__code__.replace(), function.__globals__)
    fast: GradientFunction = torch.compile(own, fullgraph=True, dynamic=False, options=options)

    def gradients(
        nets: ActorCritic, batch: Batch, settings: LearningSettings, parameters: Parameters
    ) -> Result:
        if len(batch["rewards"]) != rows:
            return function(nets, batch, settings, parameters)
        plan = batch[PLAN]
        # As a tensor it is no constant of the compiled function.
        late = torch.full((), float(plan.is_late), device=batch["rewards"].device)
        return fast(nets, {**batch, PLAN: replace(plan, is_late=late)}, settings, parameters)

    return gradients
