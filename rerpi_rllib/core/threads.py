"""The threads of an update on the CPU: few of them, each with work of its own.

torch's own threads meet in every operation, which for networks and batches of a few hundred costs as
much as it gains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch

_Result = TypeVar("_Result")
_helpers: ThreadPoolExecutor | None = None
_give_way: Callable[[], object] | None = None
_num_threads = 1


def one_torch_thread_each(
    threads: int, set_up: Callable[[], object] | None = None
) -> ThreadPoolExecutor:
    """Make a pool whose threads start when they are first needed; each calls ``set_up`` then."""

    def initialize() -> None:
        torch.set_num_threads(1)
        if set_up is not None:
            set_up()

    return ThreadPoolExecutor(threads, initializer=initialize)


class Crew:
    """Two threads that work beside the one that takes the critic's steps.

    The steps of critic and policy are two chains, each as long as its time on one core. What is
    prepared for later steps can be shared among threads, and fills the gaps that the chains leave.
    """

    def __init__(self) -> None:
        self.policy = one_torch_thread_each(1)
        self.preparation = one_torch_thread_each(1, _give_way)


def set_threads(threads: int, give_way: Callable[[], object] | None = None) -> None:
    """Set the number of threads for this process's updates; torch's operations take one each.

    Args:
        threads: their number.
        give_way: called by each thread that works for others, to let them go first.
    """
    global _helpers, _num_threads, _give_way
    torch.set_num_threads(1)
    _give_way = give_way
    if threads != _num_threads:
        _helpers = one_torch_thread_each(threads - 1, give_way) if threads > 1 else None
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
