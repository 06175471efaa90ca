"""For notebooks under nbval: after the first failing cell the rest of that notebook is skipped.

Later cells fail only because of the first, and would bury its message.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

_failed: dict[str, str] = {}  # notebook -> the cell that failed


def _notebook(item: pytest.Item) -> str | None:
    return str(item.path) if type(item).__name__ == "IPyNbCell" else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    notebook = _notebook(item)
    if notebook in _failed:
        pytest.skip(f"{_failed[notebook]} of this notebook failed")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome: Any = yield
    notebook = _notebook(item)
    if notebook and outcome.get_result().failed:
        _failed.setdefault(notebook, item.name)
