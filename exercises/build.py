"""One percent-format source per notebook -> the notebooks that are committed.

    notebooks/src/NN_name.py  ->  notebooks/NN_name.ipynb                             a lesson
    exercises/src/NN_name.py  ->  exercises/NN_name.ipynb + solutions/NN_name.ipynb   stubs, and the same solved

In an exercise source the learner's part stands between `### BEGIN SOLUTION` and `### END SOLUTION`. Indented, it
becomes `raise NotImplementedError`; at top level each name that it assigns becomes `name = None  # YOUR CODE`.
`### BEGIN SOLUTION stub: <one line>` says something else instead.

    python exercises/build.py                write the notebooks; outputs of unchanged cells stay
    python exercises/build.py --execute      then run lessons and solutions, and keep their outputs
    python exercises/build.py --check        write nothing; exit 1 where a committed notebook differs
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jupytext
import nbformat

ROOT = Path(__file__).resolve().parents[1]
SIZE_LIMIT_BYTES = 1_500_000
CELL_TIMEOUT_S = 600
KEPT_CELL_METADATA = ("tags", "jupyter")
NOTEBOOK_METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
WIDGET = "application/vnd.jupyter.widget-view+json"

_MARK = re.compile(
    r"^(?P<indent>[ \t]*)#+ (?P<end>BEGIN|END) SOLUTION(?:[ \t]+stub:[ \t]*(?P<stub>.+))?[ \t]*$"
)
_ALMOST_MARK = re.compile(r"#.*\b(begin|end)[ _-]*solution", re.IGNORECASE)
_ABSOLUTE = re.compile(
    r"(?<![\w.:/~+-])/(?:root|home|tmp|work|Users|var/folders|private|mnt|opt)/[^\s'\"<>)]+"
)
_DATA_URI = re.compile(r"data:[\w/+.;-]+,[^\s'\"]+")

# A notebook is what nbformat reads: a dict with attribute access. It has no types of its own.
Notebook = Any


class BuildError(Exception):
    """A source or a notebook that cannot be used; the message says which, where, and what to do."""


@dataclass(frozen=True)
class Target:
    """One notebook: its source, its place, and which side of the markers it shows."""

    source: Path
    notebook: Path
    solved: bool
    executed: bool


def targets(root: Path = ROOT, names: list[str] | None = None) -> list[Target]:
    """Every notebook that the sources under `root` make, lessons first."""
    found = []
    for source in sorted((root / "notebooks" / "src").glob("*.py")):
        found.append(Target(source, root / "notebooks" / f"{source.stem}.ipynb", solved=True, executed=True))
    for source in sorted((root / "exercises" / "src").glob("*.py")):
        for folder, solved in (("exercises", False), ("solutions", True)):
            found.append(
                Target(source, root / folder / f"{source.stem}.ipynb", solved=solved, executed=solved)
            )
    return [t for t in found if not names or t.source.stem in names]


# ---- from source to notebook
def split(text: str, where: str) -> tuple[str, str, list[str]]:
    """(text with stubs, text with solutions, the solution regions) of a percent source."""
    blank: list[str] = []
    solved: list[str] = []
    regions: list[str] = []
    opened: tuple[int, str, str | None] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        mark = _MARK.match(line)
        if not mark and _ALMOST_MARK.search(line):
            raise BuildError(
                f"{where}, line {number}: {line.strip()!r} is no marker; write '### BEGIN SOLUTION'"
            )
        if mark and mark["end"] == "BEGIN":
            if opened:
                raise BuildError(f"{where}, line {number}: BEGIN SOLUTION inside the one of line {opened[0]}")
            opened = (number, mark["indent"], mark["stub"])
            regions.append("")
        elif mark:
            if not opened:
                raise BuildError(f"{where}, line {number}: END SOLUTION without a BEGIN SOLUTION before it")
            blank += stub_lines(regions[-1], opened[1], opened[2], f"{where}, line {opened[0]}")
            opened = None
        elif opened and line.startswith("# %%"):
            break
        else:
            solved.append(line)
            if opened:
                regions[-1] += line + "\n"
            else:
                blank.append(line)
    if opened:
        raise BuildError(f"{where}, line {opened[0]}: BEGIN SOLUTION without an END SOLUTION in its cell")
    return "\n".join(blank) + "\n", "\n".join(solved) + "\n", regions


def stub_lines(region: str, indent: str, stub: str | None, where: str) -> list[str]:
    """What the learner sees in place of a solution region."""
    if stub:
        return [f"{indent}{stub}  # YOUR CODE"]
    if indent:
        return [f"{indent}# YOUR CODE", f'{indent}raise NotImplementedError("write this part")']
    try:
        statements = ast.parse(region).body
    except SyntaxError as error:
        raise BuildError(f"{where}: the solution is no Python by itself ({error.msg})") from error
    names = [
        t.id for s in statements if isinstance(s, ast.Assign) for t in s.targets if isinstance(t, ast.Name)
    ]
    if not names or len(names) != len(statements):
        raise BuildError(
            f"{where}: a solution at top level that does not only assign names needs its stub spelt out: "
            "'### BEGIN SOLUTION stub: share = None'"
        )
    return [f"{name} = None  # YOUR CODE" for name in dict.fromkeys(names)]


def make_notebook(target: Target) -> Notebook:
    """The notebook of a target, without outputs. Raises BuildError on markers that do not match."""
    where = str(target.source.relative_to(target.source.parents[2]))
    blank, solved, regions = split(target.source.read_text(encoding="utf-8"), where)
    if regions and target.notebook.parent.name == "notebooks":
        raise BuildError(f"{where}: a lesson has no solution regions; move the exercise to exercises/src")
    notebook = jupytext.reads(solved if target.solved else blank, fmt="py:percent")
    notebook.metadata = nbformat.from_dict(NOTEBOOK_METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for index, cell in enumerate(notebook.cells):
        cell.id = f"{target.source.stem}-{index:02d}"
        cell.metadata = {k: cell.metadata[k] for k in KEPT_CELL_METADATA if k in cell.metadata}
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbformat.validate(notebook)
    return notebook


def keep_outputs(notebook: Notebook, old: Notebook) -> None:
    """Carry the outputs of `old` over to the cells whose source has not changed."""
    known: dict[str, list[Any]] = {}
    for cell in old.cells:
        if cell.cell_type == "code":
            known.setdefault(cell.source, []).append(cell)
    for cell in notebook.cells:
        if cell.cell_type == "code" and known.get(cell.source):
            before = known[cell.source].pop(0)
            cell.outputs, cell.execution_count = before.outputs, before.execution_count


def read(path: Path) -> Notebook | None:
    """The notebook at `path`, None where there is none."""
    return nbformat.read(path, as_version=4) if path.exists() else None


def write(notebook: Notebook, path: Path) -> None:
    """Write a notebook; one that has not changed keeps its file time."""
    text = nbformat.writes(notebook).rstrip("\n") + "\n"
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


# ---- committed notebooks against their sources
def as_lines(notebook: Notebook) -> list[str]:
    """What must agree between a committed notebook and its source: everything but outputs and counts."""
    lines = [f"metadata: {json.dumps(notebook.metadata, sort_keys=True)}"]
    for cell in notebook.cells:
        lines += [f"cell {cell.get('id')}: {cell.cell_type} {json.dumps(cell.metadata, sort_keys=True)}"]
        lines += [f"  {line}" for line in cell.source.split("\n")]
    return lines


def difference(target: Target) -> str:
    """How the committed notebook differs from its source, '' where it does not."""
    name = f"{target.notebook.parent.name}/{target.notebook.name}"
    committed = read(target.notebook)
    if committed is None:
        return f"{name} is missing"
    diff = difflib.unified_diff(as_lines(committed), as_lines(make_notebook(target)), lineterm="", n=1)
    lines = list(diff)[2:]
    if lines:
        more = [f"... {len(lines) - 20} more lines"] if len(lines) > 20 else []
        return "\n".join([f"{name} differs from its source:", *lines[:20], *more])
    if not target.executed and any(c.get("outputs") or c.get("execution_count") for c in committed.cells):
        return f"{name} has outputs; an exercise is committed without"
    return ""


# ---- running
def execute(notebook: Notebook, folder: Path, name: str) -> None:
    """Run a notebook in a fresh kernel with `folder` as its working directory, keeping its outputs.

    Raises BuildError at the first cell that fails.
    """
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,  # a time stamp a cell would make every diff long
        store_widget_state=False,
        coalesce_streams=True,
    )
    try:
        client.execute()
    except CellExecutionError as error:
        raise BuildError(f"{name} failed: {error.ename}: {error.evalue}\n{error.traceback}") from error
    notebook.metadata = nbformat.from_dict(NOTEBOOK_METADATA)


def tidy(notebook: Notebook, root: Path = ROOT) -> None:
    """Make outputs fit to be committed: no paths of this machine below `root`, no widgets without their kernel."""
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        cell.metadata = {k: cell.metadata[k] for k in KEPT_CELL_METADATA if k in cell.metadata}
        for output in cell.outputs:
            data = output.get("data", {})
            if WIDGET in data:  # reopened, it would only say "model not found"
                del data[WIDGET]
                data.pop("text/plain", None)
            for holder in (data, output):
                for key, value in holder.items():
                    if isinstance(value, str) and not key.startswith("image/"):
                        holder[key] = value.replace(f"{root}{os.sep}", "").replace(str(root), ".")
        cell.outputs = [o for o in cell.outputs if "data" not in o or o["data"]]


def texts(notebook: Notebook) -> list[tuple[int, str]]:
    """(cell index, text) of every textual output; pictures left out."""
    found = []
    for index, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            parts = [output.get("text", ""), output.get("evalue", ""), *output.get("traceback", [])]
            for kind, value in output.get("data", {}).items():
                if not kind.startswith("image/") or kind == "image/svg+xml":
                    parts.append(value if isinstance(value, str) else str(value))
            found += [(index, _DATA_URI.sub("", part)) for part in parts if part]
    return found


def absolute_paths(notebook: Notebook) -> list[str]:
    """Paths of somebody's machine in the outputs, as 'cell 3: /home/...'."""
    return [f"cell {index}: {path}" for index, text in texts(notebook) for path in _ABSOLUTE.findall(text)]


def refuse_unfit(notebook: Notebook, name: str) -> None:
    """Raise BuildError where an executed notebook must not be committed."""
    paths = absolute_paths(notebook)
    if paths:
        raise BuildError(f"{name} shows paths of this machine: {'; '.join(paths[:5])}")
    size = len(nbformat.writes(notebook).encode())
    if size > SIZE_LIMIT_BYTES:
        raise BuildError(
            f"{name} has {size} bytes, more than {SIZE_LIMIT_BYTES}; show smaller or fewer pictures"
        )


def build(target: Target, *, run: bool) -> None:
    """Write one notebook, after running it where `run` says so and it is kept executed."""
    name = f"{target.notebook.parent.name}/{target.notebook.name}"
    notebook = make_notebook(target)
    if run and target.executed:
        target.notebook.parent.mkdir(exist_ok=True)
        execute(notebook, target.notebook.parent, name)
        tidy(notebook)
        refuse_unfit(notebook, name)
    elif target.executed:
        old = read(target.notebook)
        if old is not None:
            keep_outputs(notebook, old)
    write(notebook, target.notebook)
    print(f"{name}: {'run' if run and target.executed else 'written'}", flush=True)


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description="Make the notebooks from their sources.")
    parser.add_argument("names", nargs="*", help="only these, for example 01_step_time")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="write nothing; exit 1 where something differs")
    mode.add_argument(
        "--execute", action="store_true", help="run lessons and solutions and keep their outputs"
    )
    options = parser.parse_args(arguments)
    chosen = targets(root, options.names)
    strange = set(options.names) - {t.source.stem for t in chosen}
    try:
        if strange:
            raise BuildError(
                f"no source is called {', '.join(sorted(strange))}; see notebooks/src, exercises/src"
            )
        if options.check:
            differences = [d for d in map(difference, chosen) if d]
            if differences:
                raise BuildError("\n".join([*differences, "Run: make exercises"]))
        else:
            for target in chosen:
                build(target, run=options.execute)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
