"""Gates of the notebooks that are committed: built from their sources, really run, and exercises that really check.

nbval runs the lessons and solutions themselves (`make test`); what it cannot see is here.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from exercises import build
from exercises.wrong import Wrong, load

ROOT = build.ROOT
# What must be there. A new notebook is added here, or its absence would go unnoticed.
EXPECTED = (
    "notebooks/00_start_here",
    "notebooks/01_step_time",
    "notebooks/02_straggler",
    "notebooks/03_parallelism",
    "notebooks/04_serving",
    "notebooks/05_scale_up",
    "exercises/01_step_time",
    "exercises/02_straggler",
    "exercises/03_parallelism",
    "exercises/04_serving",
    "exercises/05_scale_up",
    "solutions/01_step_time",
    "solutions/02_straggler",
    "solutions/03_parallelism",
    "solutions/04_serving",
    "solutions/05_scale_up",
)
TARGETS = build.targets()
EXERCISES = [t for t in TARGETS if t.notebook.parent.name == "exercises"]
EXECUTED = [t for t in TARGETS if t.executed]
MAX_CODE_LINES = 10
CELL_TIMEOUT_S = 180
UNSOLVED = "Not solved yet"
EXERCISE_TAG = re.compile(r"\d+\.\d+\w?")


def name_of(target: build.Target) -> str:
    return f"{target.notebook.parent.name}/{target.notebook.stem}"


def committed(target: build.Target) -> build.Notebook:
    notebook = build.read(target.notebook)
    if notebook is None:
        pytest.fail(f"{name_of(target)}.ipynb is missing; run: make notebooks")
    return notebook


def code_cells(notebook: build.Notebook) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tags(cell: Any) -> list[str]:
    return list(cell.metadata.get("tags", []))


def exercise_of(cell: Any) -> str:
    """The exercise that a cell belongs to, '' for none."""
    return next((tag for tag in tags(cell) if EXERCISE_TAG.fullmatch(tag)), "")


def checks(notebook: build.Notebook) -> list[Any]:
    return [cell for cell in code_cells(notebook) if "check" in tags(cell)]


def error_line(cell: Any) -> str | None:
    """What the learner sees of a cell's exception, without colours; None where it raised nothing."""
    for output in cell.outputs:
        if output.output_type == "error":
            return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(output.traceback)).strip()
    return None


# ---- they are there, and they are what their sources say
def test_the_expected_notebooks_exist() -> None:
    made = {name_of(target) for target in TARGETS}
    assert set(EXPECTED) == made, (
        "notebooks/src and exercises/src do not make the notebooks that EXPECTED names"
    )
    assert [name for name in EXPECTED if not (ROOT / f"{name}.ipynb").exists()] == [], "run: make notebooks"


def test_every_notebook_has_a_source() -> None:
    folders = ("notebooks", "exercises", "solutions")
    found = {path for folder in folders for path in (ROOT / folder).glob("*.ipynb")}
    assert found - {target.notebook for target in TARGETS} == set()


@pytest.mark.parametrize("target", TARGETS, ids=name_of)
def test_the_committed_notebook_is_what_its_source_makes(target: build.Target) -> None:
    assert build.difference(target) == "", "run: make exercises"


# ---- they really ran
@pytest.mark.parametrize("target", EXECUTED, ids=name_of)
def test_it_was_committed_after_one_run_from_top_to_bottom(target: build.Target) -> None:
    cells = code_cells(committed(target))
    assert cells
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "run: make notebooks"
    assert [line for cell in cells if (line := error_line(cell))] == []


@pytest.mark.parametrize("target", EXECUTED, ids=name_of)
def test_its_verdicts_are_compared_by_nbval(target: build.Target) -> None:
    marked = [cell for cell in code_cells(committed(target)) if "# NBVAL_CHECK_OUTPUT" in cell.source]
    assert marked or target.notebook.stem.startswith("00_"), "no cell says # NBVAL_CHECK_OUTPUT"
    assert [cell.source for cell in marked if not cell.outputs] == [], "there is nothing to compare"


@pytest.mark.parametrize("target", EXECUTED, ids=name_of)
def test_its_outputs_are_fit_to_be_read_by_others(target: build.Target) -> None:
    notebook = committed(target)
    assert build.absolute_paths(notebook) == []
    assert len(nbformat.writes(notebook).encode()) <= build.SIZE_LIMIT_BYTES


# ---- exercises: nothing given away, nothing unchecked
@pytest.mark.parametrize("target", EXERCISES, ids=name_of)
def test_every_exercise_has_an_answer_cell_and_a_check(target: build.Target) -> None:
    notebook = committed(target)
    asked = {exercise_of(cell) for cell in code_cells(notebook) if "# YOUR CODE" in cell.source}
    assert "" not in asked, "a cell with YOUR CODE needs the tag of its exercise"
    checked = Counter(exercise_of(cell) for cell in checks(notebook))
    assert asked, "no cell asks anything"
    assert checked == dict.fromkeys(asked, 1)


def code_of(text: str) -> list[str]:
    """The lines of a text without indentation, comments and surplus spaces."""
    stripped = (re.sub(r"\s+", " ", re.sub(r"#.*", "", line)).strip() for line in text.splitlines())
    return [line for line in stripped if line]


@pytest.mark.parametrize("target", EXERCISES, ids=name_of)
def test_no_solution_text_is_left_in_the_exercise(target: build.Target) -> None:
    notebook = committed(target)
    everything = " ".join(line for cell in notebook.cells for line in code_of(cell.source))
    _, _, regions = build.split(target.source.read_text(encoding="utf-8"), target.source.name)
    telling = {line for region in regions for line in code_of(region) if len(line) >= 12}
    assert telling
    assert [line for line in sorted(telling) if line in everything] == []
    assert not re.search(r"(BEGIN|END) SOLUTION", nbformat.writes(notebook))


@pytest.mark.kernel
@pytest.mark.parametrize("target", EXERCISES, ids=name_of)
def test_the_blank_exercise_fails_at_its_checks_and_nowhere_else(
    target: build.Target, tmp_path: Path
) -> None:
    notebook = committed(target)
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        allow_errors=True,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    failed = {cell.id: line for cell in code_cells(notebook) if (line := error_line(cell)) is not None}
    assert sorted(failed) == sorted(cell.id for cell in checks(notebook)), failed
    assert [line for line in failed.values() if UNSOLVED not in line or "\n" in line] == []


class Session:
    """The solution in one kernel, whose answer cells can be replaced and checked again."""

    def __init__(self, notebook: build.Notebook, folder: Path) -> None:
        self.notebook = notebook
        self.client = NotebookClient(
            notebook,
            timeout=CELL_TIMEOUT_S,
            allow_errors=True,
            kernel_name="python3",
            resources={"metadata": {"path": str(folder)}},
        )

    def run(self, source: str) -> str | None:
        """Run a cell; what the learner sees of its exception, None where there was none."""
        self.notebook.cells.append(nbformat.v4.new_code_cell(source))
        self.client.execute_cell(self.notebook.cells[-1], len(self.notebook.cells) - 1)
        return error_line(self.notebook.cells[-1])

    def answer(self, exercise: str) -> str:
        """The cell with the solution of an exercise."""
        (cell,) = [c for c in self.given if exercise_of(c) == exercise and "check" not in tags(c)]
        return str(cell.source)

    def check(self, exercise: str) -> str:
        (cell,) = [c for c in self.given if exercise_of(c) == exercise and "check" in tags(c)]
        return str(cell.source)

    def play(self) -> Iterator[tuple[str, str | None]]:
        """Run the notebook as it is: (source, error) of each code cell."""
        self.given = code_cells(self.notebook)
        for cell in self.given:
            yield cell.source, self.run(cell.source)


@pytest.mark.kernel
@pytest.mark.parametrize("target", EXERCISES, ids=name_of)
def test_typical_wrong_answers_fail_with_one_line(target: build.Target, tmp_path: Path) -> None:
    solution = build.read(target.notebook.parents[1] / "solutions" / target.notebook.name)
    assert solution is not None, "run: make notebooks"
    wrong = load(ROOT / "exercises" / "wrong" / target.source.name)
    enough_wrong_answers(solution, wrong)
    session = Session(solution, tmp_path)
    with session.client.setup_kernel():
        assert [(source, error) for source, error in session.play() if error] == []
        accepted = []
        for answer in wrong:
            right, check = session.answer(answer.exercise), session.check(answer.exercise)
            assert session.run(answer.cell(right)) is None, f"{answer} must fail in its check, not before"
            seen = session.run(check)
            if seen is None or "\n" in seen or UNSOLVED in seen:
                accepted.append(f"{answer.exercise}, {answer.why}: {seen or 'passes'}")
            session.run(right)
            assert session.run(check) is None, f"{answer.exercise} fails although its solution is back"
        assert accepted == []


def enough_wrong_answers(solution: build.Notebook, wrong: list[Wrong]) -> None:
    """At least two for each exercise, none for an exercise that is not there."""
    count = Counter(answer.exercise for answer in wrong)
    exercises = {exercise_of(cell) for cell in checks(solution)}
    assert set(count) == exercises, "exercises/wrong does not cover exactly the exercises"
    assert [exercise for exercise in exercises if count[exercise] < 2] == []


# ---- house style of notebooks
def code_lines(source: str) -> int:
    """Lines with code; blank lines, comments and docstrings do not count."""
    skipped = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def plain_python(source: str) -> str:
    """A cell without its magics, which are no Python."""
    return "\n".join("pass" if line.startswith(("%", "!")) else line for line in source.splitlines())


def ends_with_semicolon(source: str) -> bool:
    """Whether a line ends in ';': under nbval it does not silence an output (nbval#194)."""
    ends = (tokenize.NEWLINE, tokenize.NL, tokenize.COMMENT, tokenize.ENDMARKER)
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    return any(a.string == ";" and b.type in ends for a, b in pairwise(tokens))


def headings(notebook: build.Notebook) -> list[tuple[int, int]]:
    """(cell index, level) of every markdown heading outside code blocks."""
    found = []
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            text = re.sub(r"(?ms)^```.*?^```", "", cell.source)
            found += [(index, len(marks)) for marks in re.findall(r"(?m)^(#{1,6}) ", text)]
    return found


def pictures_without_alt(text: str) -> list[str]:
    """Markdown pictures and <img> elements that say nothing to whoever cannot see them."""
    empty = re.findall(r"!\[\s*\]\([^)]*\)", text)
    elements = re.findall(r"<img\b[^>]*>", text)
    return empty + [e[:60] for e in elements if not re.search(r"""\balt=(["'])\s*(?!\1)\S""", e)]


@pytest.mark.parametrize("target", TARGETS, ids=name_of)
def test_its_cells_are_short_and_plain(target: build.Target) -> None:
    cells = [plain_python(cell.source) for cell in code_cells(build.make_notebook(target))]
    assert [cell for cell in cells if code_lines(cell) > MAX_CODE_LINES] == []
    assert [cell for cell in cells if ends_with_semicolon(cell)] == []


@pytest.mark.parametrize("target", TARGETS, ids=name_of)
def test_its_headings_are_in_order(target: build.Target) -> None:
    found = headings(build.make_notebook(target))
    assert found[:1] == [(0, 1)], "the first cell has the title, as an H1"
    levels = [level for _, level in found]
    assert levels.count(1) == 1
    assert [(a, b) for a, b in pairwise(levels) if b > a + 1] == []


@pytest.mark.parametrize("target", TARGETS, ids=name_of)
def test_its_pictures_have_a_text(target: build.Target) -> None:
    notebook = committed(target)
    markdown = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    html = "\n".join(
        str(o.data["text/html"])
        for c in code_cells(notebook)
        for o in c.outputs
        if "text/html" in o.get("data", {})
    )
    assert pictures_without_alt(markdown + html) == []


@pytest.mark.parametrize(
    ("source", "lines", "semicolon"),
    [
        ("x = 1\n\n# why\ny = 2", 2, False),
        ('def f():\n    """Says\n    much."""\n    return 1', 2, False),
        ("run(\n    1,\n)", 3, False),
        ("ax.plot(x);", 1, True),
        ("ax.plot(x);  # quiet", 1, True),
        ("a = 1; b = 2", 1, False),
        ("print('a;')", 1, False),
    ],
)
def test_how_code_is_counted(source: str, lines: int, semicolon: bool) -> None:
    assert code_lines(source) == lines
    assert ends_with_semicolon(source) is semicolon


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("![the step, 300 ms](a.png)", 0),
        ("![](a.png) ![ ](b.png)", 2),
        ('<img src="x" alt="300 ms">', 0),
        ('<img src="x"> <img alt="" src="y">', 2),
    ],
)
def test_which_pictures_say_nothing(text: str, bad: int) -> None:
    assert len(pictures_without_alt(text)) == bad
