"""pyproject.toml says what is needed, constraints.txt which versions, environment.yml how conda gets there."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
APART = "ray"  # half a gigabyte that nothing but one engine needs: not in the lock, its version stands in pyproject.toml
NEEDED = [
    Requirement(line)
    for line in [
        *PROJECT["dependencies"],
        *(line for name, lines in EXTRAS.items() if name != APART for line in lines),
    ]
]
DIRECT = [need for need in NEEDED if need.name != PROJECT["name"]]


def pins() -> list[Requirement]:
    """The lines of constraints.txt, comments left out."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]


def pinned() -> dict[str, Version]:
    """Canonical name -> the pinned version."""
    return {canonicalize_name(p.name): Version(next(iter(p.specifier)).version) for p in pins()}


def environment() -> tuple[dict[str, str], list[str]]:
    """environment.yml as ({conda package: version}, lines of the pip section)."""
    entries = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))["dependencies"]
    conda = dict([*entry.split("=", 1), ""][:2] for entry in entries if isinstance(entry, str))
    return conda, [line for entry in entries if isinstance(entry, dict) for line in entry["pip"]]


@pytest.mark.parametrize("pin", pins(), ids=str)
def test_a_pin_is_one_exact_public_version(pin: Requirement) -> None:
    (specifier,) = pin.specifier
    assert specifier.operator == "=="
    assert Version(specifier.version).local is None, "a build tag would tie the lock to one kind of machine"
    assert not pin.url


def test_no_package_is_pinned_twice() -> None:
    names = [canonicalize_name(p.name) for p in pins()]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("need", DIRECT, ids=str)
def test_a_direct_dependency_is_pinned_within_its_range(need: Requirement) -> None:
    name = canonicalize_name(need.name)
    assert name in pinned(), f"add {name} to constraints.txt"
    assert pinned()[name] in need.specifier


@pytest.mark.parametrize("need", DIRECT, ids=str)
def test_what_is_installed_is_what_is_pinned(need: Requirement) -> None:
    name = canonicalize_name(need.name)
    assert Version(Version(importlib.metadata.version(name)).public) == pinned()[name], "run: make test"


def test_what_is_not_in_the_lock_has_one_exact_version_and_comes_with_no_other_extra() -> None:
    apart = [need for need in map(Requirement, EXTRAS[APART]) if need.name != PROJECT["name"]]
    assert all([one.operator for one in need.specifier] == ["=="] for need in apart)
    others = [Requirement(line) for name, lines in EXTRAS.items() if name != APART for line in lines]
    assert not any(APART in (need.name, *need.extras) for need in others)


def test_indirect_dependencies_are_pinned_too() -> None:
    """Whatever the dev extra brings on this platform, except the libraries that come with one build of torch."""
    loose, seen, todo = set(), set(), [Requirement(f"{PROJECT['name']}[dev]")]
    while todo:
        need = todo.pop()
        name = canonicalize_name(need.name)
        if (name, tuple(need.extras)) in seen:
            continue
        seen.add((name, tuple(need.extras)))
        if name not in {*pinned(), PROJECT["name"]}:
            loose.add(name)
        for line in importlib.metadata.requires(name) or []:
            inner = Requirement(line)
            wanted = ("", *need.extras)
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in wanted):
                todo.append(inner)
    builds = re.compile(r"nvidia-|cuda-|triton$|setuptools$|appnope$")
    assert sorted(name for name in loose if not builds.match(name)) == []


def test_conda_brings_only_a_python_that_the_project_supports() -> None:
    conda, _ = environment()
    assert set(conda) == {"python", "pip"}
    # repo2docker reads exactly python=X.Y; anything else and Binder falls back to its own default
    assert re.fullmatch(r"\d+\.\d+", conda["python"])
    assert Version(conda["python"]) in SpecifierSet(PROJECT["requires-python"])


def test_conda_installs_this_project_with_its_notebooks_and_the_lock() -> None:
    _, lines = environment()
    assert lines == ["-c constraints.txt", "-e .[notebooks]"]
    assert "notebooks" in EXTRAS
    assert (ROOT / "constraints.txt").exists()


def test_this_python_is_supported() -> None:
    assert Version(platform.python_version()) in SpecifierSet(PROJECT["requires-python"])


def test_the_base_install_brings_no_jupyter() -> None:
    names = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    assert names == {"torch", "numpy", "pandas", "matplotlib", "psutil", "pillow", "nvidia-ml-py"}
