"""What exercise notebooks call: one line when right, one line when wrong or unsolved, never a traceback.

    check_cases("1.2", data_frac, [((0.18, 0.30), 0.6)], tolerance=0.01, hint="divide by the whole step")

prints `Exercise 1.2: correct`, or raises an exception that Jupyter and nbval show as that one line.
"""

from __future__ import annotations

import functools
import hashlib
import math
import numbers
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from mlsyslab.contract import LabError

LONGEST = 120  # characters of a value in a message
DEFAULT_TOLERANCE = 0.01


class CheckFailed(AssertionError):
    """A check that did not pass. IPython and nbval show `_render_traceback_` in place of a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class NotSolvedYet(CheckFailed):
    """Nothing was written yet: a stub that raises NotImplementedError, or a value that is still None."""


class WrongAnswer(CheckFailed):
    """Something was written, and it gives another result than expected."""


class RunFirst(CheckFailed):
    """A cell was run before the one that it needs."""


def check(name: str, got: Any, expected: Any, *, tolerance: float | None = None, hint: str = "") -> None:
    """Pass if `got` equals `expected`: numbers, texts, sequences, mappings, arrays, frames, at any depth.

    name: the exercise's number, such as "1.2". got: the value, or a function without arguments that gives it, so
    that its NotImplementedError becomes "not solved yet". tolerance: None compares exactly; else a share of the
    expected number (absolute where that is 0). Raises NotSolvedYet or WrongAnswer.
    """
    value = _value(name, got, hint)
    if value is None and expected is not None:
        raise NotSolvedYet(_unsolved(name, "it is still None"))
    _refuse(name, difference(value, expected, tolerance), hint)
    _say_correct(name)


def check_close(
    name: str, got: Any, expected: Any, *, tolerance: float = DEFAULT_TOLERANCE, hint: str = ""
) -> None:
    """`check` for numbers that were measured or rounded: within `tolerance`, a share of the expected number."""
    check(name, got, expected, tolerance=tolerance, hint=hint)


def check_that(name: str, condition: Any, says: str, *, hint: str = "") -> None:
    """Pass if `condition` (or what it returns, if it is a function) is true. says: what should hold, as a sentence."""
    value = _value(name, condition, hint)
    if value is None:
        raise NotSolvedYet(_unsolved(name, "it is still None"))
    if not bool(value):
        raise WrongAnswer(_line(f"{_title(name)}: this should hold and does not: {says}", hint))
    _say_correct(name)


def check_cases(
    name: str,
    function: Callable[..., Any],
    cases: Iterable[tuple[Sequence[Any], Any]],
    *,
    tolerance: float | None = None,
    hint: str = "",
) -> None:
    """Pass if function(*arguments) equals the expected value in every case; one line for all of them.

    cases: (arguments, expected) pairs. Raises NotSolvedYet or WrongAnswer, which names the arguments.
    """
    count = 0
    for arguments, expected in cases:
        value = _call(name, functools.partial(function, *arguments), hint)
        if value is None and expected is not None:
            raise NotSolvedYet(_unsolved(name, f"`{_name_of(function)}` returns None"))
        wrong = difference(value, expected, tolerance)
        called = f"{_name_of(function)}({', '.join(map(show, arguments))})"
        _refuse(name, wrong and f"{called}: {wrong}", hint)
        count += 1
    if not count:
        raise ValueError(f"{_title(name)} has no cases, so that it would pass without checking anything")
    _say_correct(name)


def needs(namespace: Mapping[str, Any], *names: str, cell: str) -> None:
    """Raise RunFirst, naming `cell`, unless all `names` are in `namespace` (`globals()` of the notebook)."""
    absent = [name for name in names if name not in namespace]
    if absent:
        raise RunFirst(f"Run cell {cell} first: it makes {', '.join(f'`{name}`' for name in absent)}")


def hidden_seeds(name: str, count: int = 5) -> Iterator[int]:
    """Seeds for inputs that the learner has not seen: the same on every machine, others for each exercise."""
    for index in range(count):
        digest = hashlib.sha256(f"{name}/{index}".encode()).digest()
        yield int.from_bytes(digest[:4], "big")


# ---- running the learner's code
def _value(name: str, got: Any, hint: str) -> Any:
    return _call(name, got, hint) if callable(got) else got


def _call(name: str, function: Callable[[], Any], hint: str) -> Any:
    """The learner's result; what the learner's code raises becomes one line."""
    try:
        return function()
    except NotImplementedError as error:
        raise NotSolvedYet(_unsolved(name, str(error))) from None
    except CheckFailed:
        raise
    except LabError as error:
        raise WrongAnswer(_line(f"{_title(name)}: {error}", hint)) from None
    except Exception as error:
        raise WrongAnswer(_line(f"{_title(name)}: your code raised {_raised(error)}", hint)) from None


def _raised(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f" in line {last.lineno} of `{last.name}`"
    source = f": {last.line}" if last.line else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}{source}"


# ---- comparing
def _refuse(name: str, wrong: str, hint: str) -> None:
    if wrong:
        raise WrongAnswer(_line(f"{_title(name)}: {wrong}", hint))


def difference(got: Any, expected: Any, tolerance: float | None = None, at: str = "") -> str:
    """`got ..., expected ...` for the first place where the two differ, "" where they are equal."""
    got, expected = _plain(got), _plain(expected)
    if isinstance(expected, Mapping) and isinstance(got, Mapping):
        return _mapping_difference(got, expected, tolerance, at)
    if isinstance(expected, (list, tuple)) and isinstance(got, (list, tuple)):
        return _sequence_difference(got, expected, tolerance, at)
    if _same(got, expected, tolerance):
        return ""
    where = f"{at} = " if at else ""
    mine, wanted = show(got), show(expected)
    if mine == wanted:  # they differ in digits that are usually not worth showing
        mine, wanted = repr(got), repr(expected)
    return f"got {where}{mine}, expected {where}{wanted}"


def _mapping_difference(
    got: Mapping[Any, Any], expected: Mapping[Any, Any], tolerance: float | None, at: str
) -> str:
    if set(got) != set(expected):
        return f"got {at or 'the keys'} {show(list(got))}, expected {show(list(expected))}"
    each = (difference(got[key], expected[key], tolerance, f"{at}[{key!r}]") for key in expected)
    return next(filter(None, each), "")


def _sequence_difference(
    got: Sequence[Any], expected: Sequence[Any], tolerance: float | None, at: str
) -> str:
    if len(got) != len(expected):
        return f"got {at or ''}{' with ' if at else ''}{len(got)} values {show(got)}, expected {len(expected)} values {show(expected)}"
    each = (
        difference(mine, wanted, tolerance, f"{at}[{index}]")
        for index, (mine, wanted) in enumerate(zip(got, expected, strict=True))
    )
    return next(filter(None, each), "")


def _plain(value: Any) -> Any:
    """Arrays and frames as lists and mappings, so that one comparison serves all."""
    if isinstance(value, pd.DataFrame):
        return {str(column): value[column].tolist() for column in value.columns}
    if isinstance(value, pd.Series):
        return dict(zip(value.index.tolist(), value.tolist(), strict=True))
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return value


def _same(got: Any, expected: Any, tolerance: float | None) -> bool:
    if isinstance(expected, bool) or isinstance(got, bool):
        return isinstance(got, bool) and isinstance(expected, bool) and got == expected
    if isinstance(expected, numbers.Real):
        return isinstance(got, numbers.Real) and _close(float(got), float(expected), tolerance)
    return bool(type(got) is type(expected) or isinstance(got, type(expected))) and bool(got == expected)


def _close(got: float, expected: float, tolerance: float | None) -> bool:
    if math.isnan(expected) or math.isnan(got):
        return math.isnan(expected) and math.isnan(got)
    if tolerance is None or math.isinf(expected) or math.isinf(got):
        return got == expected
    return abs(got - expected) <= tolerance * (abs(expected) or 1.0)


# ---- saying it
def show(value: Any) -> str:
    """A value on one line, short: floats with six digits."""
    value = _plain(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)) and len(value) <= 12:
        text = (
            f"[{', '.join(map(show, value))}]"
            if isinstance(value, list)
            else f"({', '.join(map(show, value))})"
        )
    else:
        text = " ".join(repr(value).split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", "the function")


def _title(name: str) -> str:
    return f"Exercise {name}" if name[:1].isdigit() else name


def _unsolved(name: str, why: str) -> str:
    return f"Not solved yet - {_title(name)}: {why or 'write this part first'}"


def _line(sentence: str, hint: str) -> str:
    return " ".join(f"{sentence}{f'; hint: {hint}' if hint else ''}".split())


def _say_correct(name: str) -> None:
    print(f"{_title(name)}: correct")
