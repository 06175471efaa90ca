"""The builder of the notebooks: one source, a blank and a solved notebook, and nothing of this machine in either."""

from __future__ import annotations

import textwrap
from pathlib import Path

import nbformat
import pytest

from exercises import build
from exercises.wrong import Wrong

EXERCISE = '''\
# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # Exercise

# %%
steps = [0.3, 0.1]

# %% tags=["1.1"]
def share(waits, total):
    """The share of waiting."""
    ### BEGIN SOLUTION
    return sum(waits) / total
    ### END SOLUTION

# %% tags=["1.2"]
### BEGIN SOLUTION
first = steps[0]
second = steps[1]
### END SOLUTION

# %% tags=["1.3"]
### BEGIN SOLUTION stub: rule = lambda share: None
def rule(share):
    return "input" if share > 0.2 else "unknown"
### END SOLUTION

# %% tags=["check", "1.1"]
assert share([1], 2) == 0.5, "Not solved yet"
print("right")
'''


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout with one exercise and one lesson."""
    for folder in ("notebooks/src", "exercises/src"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "exercises/src/01_share.py").write_text(EXERCISE)
    (tmp_path / "notebooks/src/00_start.py").write_text("# %% [markdown]\n# # Start\n\n# %%\nprint(1 + 1)\n")
    return tmp_path


def made(root: Path, folder: str, name: str = "01_share") -> build.Notebook:
    notebook = build.read(root / folder / f"{name}.ipynb")
    assert notebook is not None
    return notebook


def edit(root: Path, old: str, new: str) -> None:
    source = root / "exercises/src/01_share.py"
    assert old in source.read_text()
    source.write_text(source.read_text().replace(old, new))


def test_an_exercise_shows_stubs_where_the_solution_was(root: Path) -> None:
    assert build.main([], root) == 0
    blank = [cell.source for cell in made(root, "exercises").cells]
    assert blank[2].endswith('"""\n    # YOUR CODE\n    raise NotImplementedError("write this part")')
    assert blank[3] == "first = None  # YOUR CODE\nsecond = None  # YOUR CODE"
    assert blank[4] == "rule = lambda share: None  # YOUR CODE"
    assert "sum(waits)" not in "".join(blank)


def test_a_solution_has_no_markers(root: Path) -> None:
    build.main([], root)
    solved = [cell.source for cell in made(root, "solutions").cells]
    assert solved[2].endswith('"""\n    return sum(waits) / total')
    assert "SOLUTION" not in "".join(solved)


def test_ids_and_metadata_are_the_same_at_every_build(root: Path) -> None:
    build.main([], root)
    before = {path: path.read_bytes() for path in root.rglob("*.ipynb")}
    notebook = made(root, "exercises")
    assert [cell.id for cell in notebook.cells] == [f"01_share-{i:02d}" for i in range(6)]
    assert notebook.cells[5].metadata == {"tags": ["check", "1.1"]}
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    build.main([], root)
    assert {path: path.read_bytes() for path in root.rglob("*.ipynb")} == before


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("    ### END SOLUTION\n", "", "line 17: BEGIN SOLUTION without an END"),
        ("    ### BEGIN SOLUTION\n", "", "line 18: END SOLUTION without a BEGIN"),
        ("first = steps[0]\n", "### BEGIN SOLUTION\n", "line 23: BEGIN SOLUTION inside the one of line 22"),
        ("### BEGIN SOLUTION stub:", "### BEGIN SOLUTON\n#", "END SOLUTION without"),
        ("### BEGIN SOLUTION stub: rule = lambda share: None", "### Begin solution", "is no marker"),
        (
            "### BEGIN SOLUTION stub: rule = lambda share: None",
            "### BEGIN SOLUTION",
            "needs its stub spelt out",
        ),
        ("first = steps[0]", "first = steps[", "is no Python by itself"),
    ],
)
def test_a_broken_marker_gives_one_error_and_writes_nothing(
    root: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, said: str
) -> None:
    edit(root, old, new)
    assert build.main([], root) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("exercises/src/01_share.py, line ")
    assert len(error.splitlines()) == 1
    assert not list((root / "exercises").glob("*.ipynb"))


def test_a_lesson_may_not_have_solutions(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "notebooks/src/00_start.py").write_text(EXERCISE)
    assert build.main([], root) == 1
    assert "a lesson has no solution regions" in capsys.readouterr().err


def test_check_accepts_what_was_just_built_and_names_what_differs(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build.main([], root)
    assert build.main(["--check"], root) == 0
    edit(root, "sum(waits) / total", "max(waits) / total")
    assert build.main(["--check"], root) == 1
    error = capsys.readouterr().err
    assert "solutions/01_share.ipynb differs" in error
    assert "+      return max(waits) / total" in error
    assert "exercises/01_share.ipynb" not in error, "the blank notebook has not changed"


@pytest.mark.parametrize("change", ["id", "tags", "source", "kernel", "type", "missing cell"])
def test_check_sees_a_notebook_edited_by_hand(root: Path, change: str) -> None:
    build.main([], root)
    notebook = made(root, "solutions")
    if change == "id":
        notebook.cells[1].id = "other"
    elif change == "tags":
        notebook.cells[5].metadata["tags"] = ["check"]
    elif change == "source":
        notebook.cells[1].source += "\n"
    elif change == "kernel":
        notebook.metadata["kernelspec"]["name"] = "mine"
    elif change == "type":
        notebook.cells[1] = nbformat.v4.new_raw_cell(notebook.cells[1].source, id=notebook.cells[1].id)
    else:
        notebook.cells.pop()
    build.write(notebook, root / "solutions/01_share.ipynb")
    assert build.main(["--check"], root) == 1


def test_check_wants_a_missing_notebook_and_refuses_outputs_in_an_exercise(root: Path) -> None:
    assert build.main(["--check"], root) == 1
    build.main([], root)
    notebook = made(root, "exercises")
    notebook.cells[1].outputs = [nbformat.v4.new_output("stream", text="[0.3]")]
    build.write(notebook, root / "exercises/01_share.ipynb")
    assert build.main(["--check"], root) == 1


def test_a_name_without_a_source_is_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build.main(["02_nothing"], root) == 1
    assert "02_nothing" in capsys.readouterr().err


@pytest.mark.kernel
def test_executed_outputs_stay_with_the_cells_that_did_not_change(root: Path) -> None:
    assert build.main(["--execute"], root) == 0
    assert made(root, "notebooks", "00_start").cells[1].outputs[0].text == "2\n"
    assert [c.execution_count for c in made(root, "solutions").cells if c.cell_type == "code"] == [
        1,
        2,
        3,
        4,
        5,
    ]
    assert [c.execution_count for c in made(root, "exercises").cells if c.cell_type == "code"] == [None] * 5
    assert build.main(["--check"], root) == 0
    edit(root, "first = steps[0]", "first = steps[-2]")
    build.main([], root)
    solved = made(root, "solutions").cells
    assert solved[5].outputs[0].text == "right\n"
    assert (solved[3].execution_count, solved[4].execution_count) == (None, 4)


@pytest.mark.kernel
def test_a_failing_solution_is_not_written(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(root, "sum(waits) / total", "total")
    assert build.main(["01_share", "--execute"], root) == 1
    assert "solutions/01_share.ipynb failed: AssertionError" in capsys.readouterr().err
    assert not (root / "solutions/01_share.ipynb").exists()


def notebook_with(*outputs: nbformat.NotebookNode) -> build.Notebook:
    return nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell("x", outputs=list(outputs), execution_count=1)]
    )


def html(text: str) -> nbformat.NotebookNode:
    return nbformat.v4.new_output("display_data", {"text/html": text})


def test_paths_below_the_checkout_become_relative() -> None:
    root = Path("/home/ann/mlsyslab")
    notebook = notebook_with(
        nbformat.v4.new_output("stream", text=f"wrote {root}/notebooks/runs/a, in {root}\n")
    )
    build.tidy(notebook, root)
    assert notebook.cells[0].outputs[0].text == "wrote notebooks/runs/a, in .\n"
    build.refuse_unfit(notebook, "a")


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (nbformat.v4.new_output("stream", text="see /tmp/run-1/log"), True),
        (nbformat.v4.new_output("error", ename="E", evalue="no /home/ann/x", traceback=[]), True),
        (nbformat.v4.new_output("display_data", {"text/plain": "PosixPath('/root/a')"}), True),
        (html("<b>/Users/ann/a</b>"), True),
        (html('<img alt="a" src="data:image/png;base64,AB//tmp/x/home/y/">'), False),
        (nbformat.v4.new_output("display_data", {"image/png": "AB /tmp/x"}), False),
        (nbformat.v4.new_output("stream", text="https://example.org/home/x and a/tmp/b, 3 /s"), False),
    ],
)
def test_which_outputs_show_a_path_of_this_machine(output: nbformat.NotebookNode, found: bool) -> None:
    assert bool(build.absolute_paths(notebook_with(output))) is found
    if found:
        with pytest.raises(build.BuildError, match="shows paths of this machine"):
            build.refuse_unfit(notebook_with(output), "a")


def test_a_notebook_too_large_to_read_on_the_web_is_refused() -> None:
    with pytest.raises(build.BuildError, match="more than 1500000"):
        build.refuse_unfit(notebook_with(html("x" * build.SIZE_LIMIT_BYTES)), "a")


def test_a_widget_is_not_kept_without_its_kernel() -> None:
    widget = {build.WIDGET: {"model_id": "1"}, "text/plain": "VBox()"}
    notebook = notebook_with(
        nbformat.v4.new_output("display_data", widget),
        nbformat.v4.new_output("display_data", {**widget, "text/html": "<p>seen</p>"}),
    )
    build.tidy(notebook, Path("/nowhere"))
    assert [output.data for output in notebook.cells[0].outputs] == [{"text/html": "<p>seen</p>"}]


def test_a_wrong_answer_changes_the_solution_in_one_place() -> None:
    solution = textwrap.dedent("def share(a, b):\n    return a / b\n")
    assert Wrong(exercise="1", why="w", old="a / b", new="b / a").cell(solution).endswith("return b / a\n")
    assert Wrong(exercise="1", why="w", source="\nshare = None\n").cell(solution) == "share = None"
    for old in ("a", "nothing", ""):
        with pytest.raises(ValueError, match="must occur once"):
            Wrong(exercise="1", why="w", old=old, new="").cell(solution)
