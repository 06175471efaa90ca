"""The rules of the house (docs/design.md), so that the second lab keeps what the first one promised."""

from __future__ import annotations

import ast
import importlib.metadata
import io
import json
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ROOT / "mlsyslab"
MODULES = sorted(LIBRARY.rglob("*.py"))
LABS = sorted(p.parent.name for p in (LIBRARY / "labs").glob("*/__init__.py"))
SOURCES = sorted(
    p for p in ROOT.rglob("*.py") if not any(part.startswith(".") for part in p.relative_to(ROOT).parts)
)

LAB_FILES = ("__init__", "config", "predict", "measure", "worker", "diagnose", "plot")
HEAVY = ("torch", "IPython", "ipywidgets", "matplotlib.pyplot")
LIGHT = (
    "mlsyslab",
    "mlsyslab.contract",
    "mlsyslab.records",
    "mlsyslab.faults",
    "mlsyslab.options",
    "mlsyslab.cli",
    *(
        f"mlsyslab.labs.{lab}{part}"
        for lab in LABS
        for part in ("", ".config", ".predict", ".diagnose", ".measure")
    ),
)
MAX_LINES = 350
VAGUE = {"util", "utils", "common", "helper", "helpers", "manager", "misc"}


def dotted(path: Path) -> str:
    """The module name of a file of the library."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> set[str]:
    """Every module that a file imports, also inside its functions. Relative imports are resolved."""
    names: set[str] = set()
    package = list(path.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return names


def under(name: str, *packages: str) -> bool:
    """Whether a dotted name is one of `packages` or lies inside one."""
    return any(name == package or name.startswith(package + ".") for package in packages)


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def fresh_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that has imported nothing of ours."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("module", LIGHT)
def test_importing_it_loads_neither_torch_nor_jupyter(module: str) -> None:
    code = "import importlib, sys; importlib.import_module(sys.argv[1]); print(*(m for m in sys.argv[2:] if m in sys.modules))"
    done = fresh_python(code, module, *HEAVY)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


@pytest.mark.parametrize("lab", LABS)
def test_every_lab_has_the_same_files(lab: str) -> None:
    missing = [name for name in LAB_FILES if not (LIBRARY / "labs" / lab / f"{name}.py").exists()]
    assert missing == []


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_imports_point_inwards(path: Path) -> None:
    """The edge (teach, cli) knows the labs, a lab knows the shared modules, and nobody looks the other way."""
    me = dotted(path)
    edge = under(me, "mlsyslab.teach", "mlsyslab.cli")
    forbidden = []
    if under(me, "mlsyslab.labs."[:-1]) and me.count(".") >= 2:
        mine = ".".join(me.split(".")[:3])
        forbidden = [
            n
            for n in imported(path)
            if under(n, "mlsyslab.labs") and n.count(".") >= 2 and not under(n, mine)
        ]
    elif not edge and me != "mlsyslab":  # mlsyslab itself offers the labs by name, and loads them when asked
        forbidden = [n for n in imported(path) if under(n, "mlsyslab.labs")]
    if not edge:
        forbidden += [n for n in imported(path) if under(n, "mlsyslab.teach", "mlsyslab.cli")]
    assert forbidden == []


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_only_the_edge_imports_jupyter_and_only_plots_import_matplotlib(path: Path) -> None:
    me = dotted(path)
    if under(me, "mlsyslab.teach", "mlsyslab.cli"):
        return
    assert [n for n in imported(path) if under(n, "IPython", "ipywidgets", "ipykernel", "jupyter")] == []
    if path.stem != "plot":
        assert [n for n in imported(path) if under(n, "matplotlib")] == []


BLOCKED_RUN = """
import importlib, json, pkgutil, sys
blocked = set(json.loads(sys.argv[1]))
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"{name} is no base dependency", name=name)
sys.meta_path.insert(0, Block())
import mlsyslab
for found in pkgutil.walk_packages(mlsyslab.__path__, "mlsyslab.", onerror=lambda name: None):
    if not found.name.startswith("mlsyslab.teach") and not found.name.endswith("__main__"):
        importlib.import_module(found.name)
from mlsyslab.cli import main
sys.exit(main(["--help"]))
"""


def base_dependencies() -> set[str]:
    """Canonical names of the distributions that `pip install mlsyslab` brings, directly or not."""
    wanted, todo = set(), ["mlsyslab"]
    while todo:
        name = canonicalize_name(todo.pop())
        if name in wanted:
            continue
        wanted.add(name)
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # of another platform
            continue
        needed = [Requirement(line) for line in lines]
        todo += [n.name for n in needed if n.marker is None or n.marker.evaluate({"extra": ""})]
    return wanted


def test_library_and_command_work_with_the_base_dependencies_alone() -> None:
    """As on a bare GPU node: whatever else this environment has cannot be imported."""
    allowed = base_dependencies() | {"setuptools", "pip"}  # a part of torch looks at them
    packages = importlib.metadata.packages_distributions()
    blocked = [top for top, names in packages.items() if not allowed & {canonicalize_name(n) for n in names}]
    assert {"IPython", "ipywidgets", "jupyterlab", "nbformat"} <= set(blocked)
    done = fresh_python(BLOCKED_RUN, json.dumps(blocked))
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_a_module_is_one_idea(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES, f"{lines} lines: is this two ideas?"


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_everything_public_has_a_docstring(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    public = [
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
    ]
    bare = [node.name for node in public if not ast.get_docstring(node)]
    assert [*([] if ast.get_docstring(tree) else ["the module"]), *bare] == []


SUPPRESSION = re.compile(
    r"#\s*(?P<what>noqa|type:\s*ignore|ruff:\s*noqa|mypy:)(?P<codes>(:\s*[A-Z]+\d+(,\s*[A-Z]+\d+)*)|\[[\w, -]+\])?(?P<rest>.*)"
)


def unexplained(text: str) -> list[str]:
    """The suppressing comments of a Python file that name no code, or give no reason of at least two words."""
    found = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        match = SUPPRESSION.search(token.string) if token.type == tokenize.COMMENT else None
        if match and not (match["codes"] and len(re.findall(r"\w+", match["rest"])) >= 2):
            found.append(f"line {token.start[0]}: {token.string}")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_every_ignore_has_its_reason(path: Path) -> None:
    assert unexplained(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("line", "accepted"),
    [
        ("x = 1  # noqa: E501 the address must stay whole", True),
        ("x = 1  # type: ignore[arg-type]  # torch's stub is narrower than torch", True),
        ("x = 1  # noqa: E501", False),
        ("x = 1  # noqa because of reasons", False),
        ("x = 1  # type: ignore", False),
        ("x = 1  # type: ignore[arg-type]", False),
    ],
)
def test_what_counts_as_a_reason(line: str, accepted: bool) -> None:
    assert (unexplained(line + "\n") == []) is accepted


def test_every_ignore_in_pyproject_has_its_reason() -> None:
    lines = (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    codes = [
        line for line in lines if re.match(r'\s+"[A-Z]+\d+",?', line) or "ignore_missing_imports" in line
    ]
    per_file = (
        lines[lines.index("[tool.ruff.lint.per-file-ignores]") + 1 :]
        if "[tool.ruff.lint.per-file-ignores]" in lines
        else []
    )
    codes += [
        line
        for line in per_file[: next((i for i, x in enumerate(per_file) if x.startswith("[")), None)]
        if line.strip()
    ]
    assert codes
    assert [line for line in codes if not re.search(r"#\s*\w+\W+\w+", line)] == []


def test_names_say_what_a_thing_is() -> None:
    words: list[tuple[str, str]] = []
    for path in SOURCES:
        words += [
            (ids(path), part) for part in re.split(r"[/_.]", str(path.relative_to(ROOT).with_suffix("")))
        ]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                words += [(f"{ids(path)}: {node.name}", w) for w in re.findall(r"[A-Z][a-z]+", node.name)]
    assert [where for where, word in words if word.lower() in VAGUE] == []
