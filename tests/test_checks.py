"""Checks say one line: correct, not solved yet, or what was got, what was expected and a hint."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pandas as pd
import pytest

from mlsyslab.contract import ConfigError
from mlsyslab.teach.checks import (
    CheckFailed,
    NotSolvedYet,
    RunFirst,
    WrongAnswer,
    check,
    check_cases,
    check_close,
    check_that,
    difference,
    hidden_seeds,
    needs,
)


def line(failed: Callable[[], object], kind: type[CheckFailed] = WrongAnswer) -> str:
    """What Jupyter shows for a failing check; always one line."""
    with pytest.raises(kind) as caught:
        failed()
    shown = caught.value._render_traceback_()
    assert len(shown) == 1
    assert "\n" not in shown[0]
    return str(shown[0])


def stub(*_: Any) -> float:
    raise NotImplementedError("write `data_frac`")


def test_a_right_answer_prints_one_stable_line(capsys: pytest.CaptureFixture[str]) -> None:
    check("1.2", 3, 3)
    check_close("1.3", 0.601, 0.6)
    check_that("1.4", lambda: True, "two is more than one")
    check_cases("1.5", max, [((1, 2), 2), ((5, 3), 5)])
    said = capsys.readouterr().out
    assert said == "".join(f"Exercise 1.{n}: correct\n" for n in (2, 3, 4, 5))


def test_a_wrong_answer_says_got_expected_and_hint(capsys: pytest.CaptureFixture[str]) -> None:
    said = line(lambda: check("1.2", 0.4, 0.6, hint="divide by the whole step"))
    assert said == "Exercise 1.2: got 0.4, expected 0.6; hint: divide by the whole step"
    assert capsys.readouterr().out == ""


def test_a_wrong_case_names_the_arguments() -> None:
    def data_frac(data_s: float, step_s: float) -> float:
        return data_s / (step_s - data_s)

    said = line(lambda: check_cases("1.2", data_frac, [((0.18, 0.3), 0.6)], tolerance=0.01))
    assert said == "Exercise 1.2: data_frac(0.18, 0.3): got 1.5, expected 0.6"


@pytest.mark.parametrize(
    "attempt",
    [
        lambda: check("1.2", stub, 1),
        lambda: check_that("1.2", stub, "it holds"),
        lambda: check_cases("1.2", stub, [((1,), 1)]),
    ],
)
def test_a_stub_is_not_solved_yet_rather_than_wrong(attempt: Callable[[], object]) -> None:
    assert line(attempt, NotSolvedYet) == "Not solved yet - Exercise 1.2: write `data_frac`"


@pytest.mark.parametrize(
    "attempt",
    [
        lambda: check("1.2", None, 1),
        lambda: check_close("1.2", lambda: None, 1.0),
        lambda: check_that("1.2", None, "it holds"),
        lambda: check_cases("1.2", lambda x: None, [((1,), 1)]),
    ],
)
def test_none_is_not_solved_yet(attempt: Callable[[], object]) -> None:
    assert line(attempt, NotSolvedYet).startswith("Not solved yet - Exercise 1.2: ")


def test_none_can_be_the_right_answer(capsys: pytest.CaptureFixture[str]) -> None:
    check("1.2", None, None)
    assert "correct" in capsys.readouterr().out
    assert line(lambda: check("1.2", 3, None)) == "Exercise 1.2: got 3, expected None"


def test_code_that_raises_is_one_line_with_the_place() -> None:
    def data_frac(data_s: float) -> float:
        return data_s / 0

    said = line(lambda: check_cases("1.2", data_frac, [((1.0,), 1.0)]))
    assert said.startswith("Exercise 1.2: your code raised ZeroDivisionError: ")
    assert "of `data_frac`" in said
    assert "return data_s / 0" in said


def test_an_error_of_the_library_speaks_for_itself() -> None:
    def refused() -> None:
        raise ConfigError("workers=-1 is outside 0..64; choose a value in that range")

    assert line(lambda: check("1.2", refused, 1)).startswith("Exercise 1.2: workers=-1 is outside 0..64")


def test_an_interrupt_is_not_an_answer() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check("1.2", interrupted, 1)


@pytest.mark.parametrize(
    ("got", "expected", "tolerance"),
    [
        (1.0, 1, None),
        (np.float64(0.3), 0.3, None),
        (np.int64(3), 3, None),
        (np.array([1.0, 2.0]), [1, 2], None),
        ([1.0, 2.001], np.array([1.0, 2.0]), 0.01),
        ({"a": 1.0, "b": [1, 2]}, {"b": [1, 2], "a": 1.0}, None),
        (pd.Series({"a": 1.0}), {"a": 1.0}, None),
        (pd.DataFrame({"a": [1, 2]}), pd.DataFrame({"a": [1.0, 2.0]}), None),
        (np.bool_(True), True, None),
        (float("nan"), float("nan"), 0.1),
        (float("inf"), float("inf"), 0.1),
        (0.005, 0, 0.01),
        (100.5, 100, 0.01),
        ("input", "input", None),
        ((1, 2), [1, 2], None),
    ],
)
def test_equal_values(got: Any, expected: Any, tolerance: float | None) -> None:
    assert difference(got, expected, tolerance) == ""


@pytest.mark.parametrize(
    ("got", "expected", "tolerance", "said"),
    [
        (0.3, 0.1 + 0.2, None, "got 0.3, expected 0.30000000000000004"),
        (1.02, 1.0, 0.01, "got 1.02, expected 1"),
        (0.98, 1.0, 0.01, "got 0.98, expected 1"),
        (0.0102, 0.01, 0.01, "got 0.0102, expected 0.01"),
        (float("nan"), 1.0, 0.5, "got nan, expected 1"),
        (1.0, float("nan"), 0.5, "got 1, expected nan"),
        (1.0, float("inf"), 0.5, "got 1, expected inf"),
        (True, 1, None, "got True, expected 1"),
        (1, True, None, "got 1, expected True"),
        ("0.6", 0.6, 0.1, "got '0.6', expected 0.6"),
        ([1, 2], [1, 2, 3], None, "got 2 values [1, 2], expected 3 values [1, 2, 3]"),
        ([1, 5], [1, 2], None, "got [1] = 5, expected [1] = 2"),
        ({"a": 1}, {"a": 2}, None, "got ['a'] = 1, expected ['a'] = 2"),
        ({"b": 1}, {"a": 1}, None, "got the keys ['b'], expected ['a']"),
        ({"a": [1, 2]}, {"a": [1, 3]}, None, "got ['a'][1] = 2, expected ['a'][1] = 3"),
        (3, [3], None, "got 3, expected [3]"),
        (None, 3, None, "got None, expected 3"),
    ],
)
def test_different_values(got: Any, expected: Any, tolerance: float | None, said: str) -> None:
    assert difference(got, expected, tolerance) == said


def test_a_large_value_is_cut_short() -> None:
    assert len(line(lambda: check("1.2", list(range(10_000)), "x" * 5000))) < 400


def test_a_check_without_cases_is_a_bug_of_the_exercise() -> None:
    with pytest.raises(ValueError, match="has no cases"):
        check_cases("1.2", max, [])


def test_what_should_hold_is_said() -> None:
    said = line(
        lambda: check_that("1.4", False, "the rule fires on an input-bound run", hint="compare shares")
    )
    assert said == (
        "Exercise 1.4: this should hold and does not: the rule fires on an input-bound run; hint: compare shares"
    )


def test_cells_out_of_order_name_the_cell_to_run_first() -> None:
    needs({"records": 1}, "records", cell="2")
    said = line(lambda: needs({"x": 1}, "records", "run", cell="2"), RunFirst)
    assert said == "Run cell 2 first: it makes `records`, `run`"


def test_hidden_seeds_are_the_same_everywhere_and_others_for_each_exercise() -> None:
    seeds = list(hidden_seeds("1.2", 3))
    assert seeds == [2930938847, 3716745383, 2615527805]
    assert len({*seeds, *hidden_seeds("1.3", 3)}) == 6


@pytest.mark.kernel
def test_a_notebook_shows_one_line_and_no_traceback(tmp_path: Path) -> None:
    head = (
        "from mlsyslab.teach.checks import check, needs\ndef f():\n    raise NotImplementedError('write `f`')"
    )
    cells = {"unsolved": "check('1.1', f, 1)", "order": "needs(globals(), 'records', cell='3')"}
    for name, cell in cells.items():
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in (head, cell)])
        nbformat.write(book, tmp_path / f"{name}.ipynb")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--nbval-lax",
        "--nbval-current-env",
    ]
    done = subprocess.run(
        [*command, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Not solved yet - Exercise 1.1: write `f`" in done.stdout
    assert "Run cell 3 first: it makes `records`" in done.stdout
    assert "checks.py" not in done.stdout
    assert "2 failed, 2 passed" in done.stdout
