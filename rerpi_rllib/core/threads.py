"""The threads of an update on the CPU: few of them, each with work of its own.

torch's own threads meet in every operation, which for networks and batches of a few hundred costs as
much as it gains.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch

_Result = TypeVar("_Result")
_helpers: ThreadPoolExecutor | None = None
_num_threads = 1
_NICENESS = 4  # Ray's workers have 15, and 19 is the most.


def one_torch_thread_each(threads: int, *, yields: bool = False) -> ThreadPoolExecutor:
    """Make a pool whose threads start when they are first needed.

    Args:
        threads: their number.
        yields: whether they leave the processor to other threads of the process that want it, where
            threads have priorities of their own.
    """

    def set_up() -> None:
        torch.set_num_threads(1)
        if yields and sys.platform == "linux":
            os.nice(_NICENESS)

    return ThreadPoolExecutor(threads, initializer=set_up)


class Crew:
    """Two threads that work beside the one that takes the critic's steps.

    The steps of critic and policy are two chains, each as long as its time on one core. What is
    prepared for later steps can be shared among threads, and fills the gaps that the chains leave.
    """

    def __init__(self) -> None:
        self.policy = one_torch_thread_each(1)
        self.preparation = one_torch_thread_each(1, yields=True)


def set_threads(threads: int) -> None:
    """Set the number of threads for this process's updates; torch's operations take one each."""
    global _helpers, _num_threads
    torch.set_num_threads(1)
    if threads != _num_threads:
        _helpers = one_torch_thread_each(threads - 1, yields=True) if threads > 1 else None
        _num_threads = threads


def in_threads(
    function: Callable[..., _Result], arguments: Sequence[tuple[Any, ...]]
) -> list[_Result]:
    """Call the function with each of the arguments, without gradients, in this process's threads."""
    results: dict[int, _Result] = {}
    remaining = iter(range(len(arguments)))  # Each number goes to one thread.

    @torch.no_grad()
    def work() -> None:
        for index in remaining:
            results[index] = function(*arguments[index])

    wanted = min(_num_threads, len(arguments)) - 1
    helpers = [_helpers.submit(work) for _ in range(wanted)] if _helpers else []
    try:
        work()
    finally:  # After an error nothing keeps running.
        wait([helper for helper in helpers if not helper.cancel()])
    for helper in helpers:
        if not helper.cancelled():
            helper.result()
    return [results[index] for index in range(len(arguments))]
