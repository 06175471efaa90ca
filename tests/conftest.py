"""Fixtures of every test. MLSYSLAB_CACHE is left alone: the data set is made once a machine, not once a test."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

# Every process that this session starts inherits it, and keeps it when its parent dies.
SESSION = "MLSYSLAB_TEST_SESSION"
os.environ[SESSION] = uuid.uuid4().hex
GONE_WITHIN_S = 3.0


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A folder for one run directory; absent until the run makes it."""
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def no_orphans(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test of real ranks, none of them is alive. The idle warm server may stay for the next test."""
    yield
    if request.node.get_closest_marker("ranks"):
        deadline = time.monotonic() + GONE_WITHIN_S
        while (left := leftover_ranks()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, f"still alive {GONE_WITHIN_S:g} s after the test: {'; '.join(left)}"


def leftover_ranks() -> list[str]:
    """Processes of this session that descend from a warm server, or are a server whose own parent is gone.

    Ranks are forks of `python -m mlsyslab.warm` and carry its command line; loader workers are forks of ranks.
    """
    ours: dict[int, psutil.Process] = {}
    warm: set[int] = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get(SESSION) != os.environ[SESSION]:
                continue
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            ours[process.pid] = process
            if "mlsyslab.warm" in process.cmdline():
                warm.add(process.pid)
        except psutil.Error:  # ended meanwhile, or not ours to read
            continue
    left = []
    for pid, process in ours.items():
        try:
            parents = [p.pid for p in process.parents()]
            below_server = any(p in warm for p in parents)
            orphaned_server = pid in warm and not (
                parents and (parents[0] in ours or parents[0] == os.getpid())
            )
            if below_server or orphaned_server:
                left.append(f"pid {pid} ({process.status()}): {' '.join(process.cmdline())[:80]}")
        except psutil.Error:
            continue
    return left
