"""What a setting may be: types for signatures that carry the check and the words that explain it."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from rerpi_rllib.core.critics import HEADS
from rerpi_rllib.core.policies import POLICIES


@dataclass(frozen=True)
class Check:
    """Tells whether a value is allowed, and in words which values are."""

    holds: Callable[[Any], bool]
    words: str = ""
    choices: Collection[Any] = ()

    @property
    def allowed(self) -> str:
        return self.words or "one of " + ", ".join(map(repr, self.choices))


def one_of(choices: Collection[Any]) -> Check:
    """Allow these values; they are looked up when a value is checked, not before."""
    return Check(lambda v: isinstance(v, str) and v in choices, choices=choices)


def _is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return is_number(value) and 0 < value < float("inf")


def _is_nonnegative(value: Any) -> bool:
    return is_number(value) and 0 <= value < float("inf")


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _is_schedule(value: Any) -> bool:
    return (
        _is_sequence(value)
        and len(value) > 1
        and all(_is_sequence(pair) and len(pair) == 2 for pair in value)
        and all(_is_int(step) and _is_nonnegative(rate) for step, rate in value)
        and value[0][0] == 0
        and all(earlier[0] < later[0] for earlier, later in pairwise(value))
    )


def _is_range(value: Any) -> bool:
    return (
        _is_sequence(value)
        and len(value) == 2
        and all(map(is_number, value))
        and float("-inf") < value[0] < value[1] < float("inf")
    )


Positive: TypeAlias = Annotated[float, Check(_is_positive, "a number above 0")]
Nonnegative: TypeAlias = Annotated[float, Check(_is_nonnegative, "a number of at least 0")]
Fraction: TypeAlias = Annotated[
    float, Check(lambda v: is_number(v) and 0 <= v <= 1, "a number from 0 to 1")
]
Correlation: TypeAlias = Annotated[
    float, Check(lambda v: is_number(v) and 0 <= v < 1, "a number from 0 to below 1")
]
Penalty: TypeAlias = Annotated[
    float | None,
    Check(lambda v: v is None or _is_positive(v), "a number above 0, or None for no penalty"),
]
UpdateRatio: TypeAlias = Annotated[
    float | None,
    Check(
        lambda v: v is None or _is_positive(v),
        "a number above 0, or None to let learner and EnvRunners run free",
    ),
]
Timeout: TypeAlias = Annotated[
    float | None,
    Check(lambda v: v is None or _is_positive(v), "a number above 0, or None to wait for ever"),
]
Count: TypeAlias = Annotated[
    int, Check(lambda v: _is_int(v) and v >= 1, "a whole number of at least 1")
]
Natural: TypeAlias = Annotated[
    int, Check(lambda v: _is_int(v) and v >= 0, "a whole number of at least 0")
]
Seed: TypeAlias = Annotated[
    int | None,
    Check(lambda v: v is None or (_is_int(v) and v >= 0), "a whole number of at least 0, or None"),
]
NumAtoms: TypeAlias = Annotated[
    int, Check(lambda v: _is_int(v) and v >= 2, "a whole number of at least 2")
]
NumCritics: TypeAlias = Annotated[int, Check(lambda v: _is_int(v) and v in (1, 2), "1 or 2")]
ValueRange: TypeAlias = Annotated[
    Sequence[float], Check(_is_range, "two numbers, the smaller one first")
]
Layers: TypeAlias = Annotated[
    Sequence[int],
    Check(
        lambda v: _is_sequence(v) and len(v) > 0 and all(_is_int(n) and n > 0 for n in v),
        "a list of at least one layer size, each a whole number of at least 1",
    ),
]
OptionalLayers: TypeAlias = Annotated[
    Sequence[int] | None,
    Check(
        lambda v: v is None or check_of(Layers).holds(v),
        f"{Layers.__metadata__[0].words}, or None to share the policy's",
    ),
]
LearningRate: TypeAlias = Annotated[
    float | Sequence[Sequence[float]],
    Check(
        lambda v: _is_schedule(v) or _is_positive(v),
        "a number above 0, or a schedule [[0, value], [step, value], ...] of rising steps",
    ),
]
NumGpus: TypeAlias = Annotated[
    float | str,
    Check(
        lambda v: v == "auto" or _is_nonnegative(v),
        "a number of at least 0, or 'auto'",
    ),
]
Normalised: TypeAlias = Annotated[
    bool, Check(lambda v: v is True, "True (the policy works in normalised units)")
]
EnvConfig: TypeAlias = Annotated[dict[str, Any], Check(lambda v: isinstance(v, dict), "a mapping")]

CriticKind: TypeAlias = Annotated[str, one_of(HEADS)]
PolicyKind: TypeAlias = Annotated[str, one_of(POLICIES)]  # Open: whoever adds one registers it.


def check_of(annotation: Any) -> Check:
    """Return the check that a type of this module carries or implies."""
    if get_origin(annotation) is Annotated:
        return next(extra for extra in get_args(annotation) if isinstance(extra, Check))
    if get_origin(annotation) is Literal:
        return one_of(get_args(annotation))
    if annotation is bool:
        return Check(lambda v: isinstance(v, bool), "True or False")
    raise TypeError(f"There is no check for settings of the type {annotation}.")


def checks_of(function: Callable[..., Any]) -> dict[str, Check]:
    """Return the checks of a function's arguments, except the ones it takes as keywords."""
    hints = get_type_hints(function, include_extras=True)
    return {key: check_of(hint) for key, hint in hints.items() if key not in ("kwargs", "return")}
