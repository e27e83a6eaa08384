"""What a setting may be: types for signatures that carry the check and the words that explain it."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from rerpi_rllib.core.critics import HEADS
from rerpi_rllib.core.policies import POLICIES

# Numbers beyond these are slips: float32 loses them, or nothing would ever come of them.
LARGEST = 1e15
_MOST = 10**12


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
    return is_number(value) and 0 < value <= LARGEST


def _is_nonnegative(value: Any) -> bool:
    return is_number(value) and 0 <= value <= LARGEST


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
        and -LARGEST <= value[0] < value[1] <= LARGEST
    )


def _whole(low: int, high: int) -> Check:
    """Allow whole numbers from ``low`` to ``high``."""
    return Check(lambda v: _is_int(v) and low <= v <= high, f"a whole number from {low} to {high:,}")


def _or_none(check: Check, meaning: str = "") -> Check:
    words = f"{check.allowed}, or None{meaning and f' {meaning}'}"
    return Check(lambda v: v is None or check.holds(v), words)


def _or_auto(check: Check) -> Check:
    holds = check.holds
    return Check(
        lambda v: (isinstance(v, str) and v == "auto") or holds(v), f"{check.allowed}, or 'auto'"
    )


_POSITIVE = Check(_is_positive, f"a number above 0, at most {LARGEST:g}")
Positive: TypeAlias = Annotated[float, _POSITIVE]
Nonnegative: TypeAlias = Annotated[
    float, Check(_is_nonnegative, f"a number of at least 0, at most {LARGEST:g}")
]
Fraction: TypeAlias = Annotated[
    float, Check(lambda v: is_number(v) and 0 <= v <= 1, "a number from 0 to 1")
]
Correlation: TypeAlias = Annotated[
    float, Check(lambda v: is_number(v) and 0 <= v < 1, "a number from 0 to below 1")
]
Penalty: TypeAlias = Annotated[float | None, _or_none(_POSITIVE, "for no penalty")]
Timeout: TypeAlias = Annotated[float | None, _or_none(_POSITIVE, "to wait for ever")]
_RATIO = Check(lambda v: is_number(v) and 0 < v <= 10_000, "a number above 0, at most 10,000")
UpdateRatio: TypeAlias = Annotated[
    float | None, _or_none(_RATIO, "to let learner and EnvRunners run free")
]
Count: TypeAlias = Annotated[int, _whole(1, _MOST)]
Natural: TypeAlias = Annotated[int, _whole(0, _MOST)]
# Of these an update holds as many values for each state of its batch.
CountPerState: TypeAlias = Annotated[int, _whole(1, 100_000)]
NumProcesses: TypeAlias = Annotated[int, _whole(0, 10_000)]
NumShards: TypeAlias = Annotated[int, _whole(0, 1_000)]
NumEnvs: TypeAlias = Annotated[int, _whole(1, 10_000)]
# Seeds of several processes and environments are this one plus a few thousands.
_SEED = _whole(0, 2**31 - 1)
Seed: TypeAlias = Annotated[int | None, _or_none(_SEED)]
NumAtoms: TypeAlias = Annotated[int, _whole(2, 100_000)]
NumCritics: TypeAlias = Annotated[int, Check(lambda v: _is_int(v) and v in (1, 2), "1 or 2")]
ValueRange: TypeAlias = Annotated[
    Sequence[float], Check(_is_range, "two numbers, the smaller one first")
]
_LAYER = _whole(1, 100_000)
Layers: TypeAlias = Annotated[
    Sequence[int],
    Check(
        lambda v: _is_sequence(v) and 0 < len(v) <= 100 and all(_LAYER.holds(n) for n in v),
        f"a list of at least one layer size (and at most 100), each {_LAYER.words}",
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
_RESOURCE = Check(lambda v: is_number(v) and 0 <= v <= 10_000, "a number from 0 to 10,000")
Resource: TypeAlias = Annotated[float, _RESOURCE]
ResourceOrAuto: TypeAlias = Annotated[float | str, _or_auto(_RESOURCE)]
Normalised: TypeAlias = Annotated[
    bool, Check(lambda v: v is True, "True (the policy works in normalised units)")
]
_MAPPING = Check(
    lambda v: isinstance(v, dict) and all(isinstance(key, str) for key in v),
    "a mapping whose keys are strings",
)
Mapping: TypeAlias = Annotated[dict[str, Any], _MAPPING]
OptionalMapping: TypeAlias = Annotated[Any, _or_none(_MAPPING)]
OptionalPositive: TypeAlias = Annotated[float | None, _or_none(_POSITIVE)]
OptionalCount: TypeAlias = Annotated[int | None, _or_none(_whole(1, _MOST))]
_SECONDS = Check(lambda v: is_number(v) and 0 <= v <= 86_400, "a number from 0 to 86,400")
OptionalSeconds: TypeAlias = Annotated[float | None, _or_none(_SECONDS)]
FragmentLength: TypeAlias = Annotated[int | str, _or_auto(_whole(1, 1_000_000))]

CriticKind: TypeAlias = Annotated[str, one_of(HEADS)]
PolicyKind: TypeAlias = Annotated[str, one_of(POLICIES)]  # Open: whoever adds one registers it.


def like(default: Any) -> Check:
    """Return a check for a value that takes the place of this default, as text can give it."""
    if isinstance(default, bool):
        return check_of(bool)
    if isinstance(default, int):
        return check_of(Natural)
    if isinstance(default, float):
        return check_of(Nonnegative)
    if isinstance(default, str):
        return Check(lambda v: isinstance(v, str), "a string")
    if isinstance(default, dict):
        return _MAPPING
    if isinstance(default, (list, tuple)):
        return Check(_is_sequence, "a list")
    return Check(lambda v: v == default, "left out, or set from Python")


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
