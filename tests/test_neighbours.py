"""Noisy neighbours in an imagined /proc: who is named, who is one of ours, and who was there before."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlsyslab import neighbours
from mlsyslab.neighbours import Census, busiest, take_census
from mlsyslab.processes import TICK_S


def put(
    root: Path,
    pid: int,
    cpu_s: float,
    *,
    parent: int = 1,
    started: int = 50,
    cpu: int = 0,
    name: str = "busy",
) -> None:
    """A stat file of /proc with its 52 fields; a quarter of the CPU seconds are system time."""
    fields: list[Any] = ["R", parent, *range(103, 151)]
    fields[11], fields[12] = round(cpu_s * 0.75 / TICK_S), round(cpu_s * 0.25 / TICK_S)
    fields[19], fields[36] = started, cpu
    (root / str(pid)).mkdir(parents=True, exist_ok=True)
    line = f"{pid} ({name}) " + " ".join(map(str, fields)) + "\n"
    (root / str(pid) / "stat").write_bytes(line.encode(errors="surrogateescape"))


@pytest.fixture
def proc(tmp_path):
    """Init, the run (10 and its child 11), two others (20, 21) and files that are no processes."""
    for pid, parent in ((1, 0), (10, 1), (11, 10), (20, 1), (21, 20)):
        put(tmp_path, pid, 4.0, parent=parent)
    (tmp_path / "meminfo").write_text("MemTotal: 1 kB\n")
    (tmp_path / "sys").mkdir()
    return tmp_path


def look(
    root: Path, last: Census | None = None, *, tops: tuple[int, ...] = (10,), clock_s: float = 100.0
) -> Census:
    """A census at an imagined moment."""
    found = take_census(tops, root, last and dataclasses.replace(last, cost_s=0.0))
    assert found is not None
    return dataclasses.replace(found, clock_s=clock_s)


def named(before: Census, after: Census) -> dict[int, float]:
    return {entry["pid"]: pytest.approx(entry["cpu_frac"]) for entry in busiest(before, after) or []}


def test_a_busy_process_outside_is_named_with_its_cores_and_its_core(proc):
    before = look(proc)
    put(proc, 20, 5.0, cpu=3, name="stress")
    after = look(proc, before, clock_s=102.0)
    assert busiest(before, after) == [{"pid": 20, "name": "stress", "cpu_frac": pytest.approx(0.5), "cpu": 3}]


def test_this_runs_own_processes_are_no_neighbours_however_busy(proc):
    before = look(proc)
    for pid, parent in ((10, 1), (11, 10), (12, 11)):
        put(proc, pid, 9.0, parent=parent, started=60)
    assert busiest(before, look(proc, before, clock_s=101.0)) == []


def test_what_lies_beside_or_above_the_run_is_outside(proc):
    before = look(proc, tops=(11,))
    put(proc, 10, 4.8)
    assert named(before, look(proc, before, tops=(11,), clock_s=101.0)) == {10: 0.8}


def test_only_what_ran_on_the_given_cores_is_a_neighbour(proc):
    before = look(proc)
    put(proc, 20, 5.0, cpu=3)
    after = look(proc, before, clock_s=101.0)
    assert busiest(before, after, {0, 1}) == []
    assert [entry["pid"] for entry in busiest(before, after, {1, 3})] == [20]


def test_the_busiest_three_come_in_order_and_the_idle_not_at_all(proc):
    before = look(proc)
    for pid, cpu_s in ((30, 0.3), (31, 0.05), (32, 0.9), (33, 0.6), (34, 0.2)):
        put(proc, pid, cpu_s)
    after = look(proc, before, clock_s=101.0)
    assert list(named(before, after).items()) == [(32, 0.9), (33, 0.6), (30, 0.3)]
    later = look(proc, after, clock_s=102.0)
    assert busiest(after, later) == []
    put(proc, 31, 0.14)
    assert busiest(later, look(proc, later, clock_s=103.0)) == []  # 0.09 cores


def test_a_process_that_came_in_between_counts_from_its_start(proc):
    before = look(proc)
    put(proc, 30, 0.4, started=50)  # in the same clock tick as the newest that was seen
    assert named(before, look(proc, before, clock_s=102.0)) == {30: 0.2}


def test_a_reused_pid_is_a_new_process(proc):
    before = look(proc)
    put(proc, 20, 4.6, started=60)
    assert named(before, look(proc, before, clock_s=101.0)) == {20: 4.6}
    put(proc, 20, 1.0, started=70)
    assert named(before, look(proc, before, clock_s=101.0)) == {20: 1.0}


def test_a_process_that_was_hidden_before_is_not_blamed_for_its_whole_life(proc):
    before = look(proc)
    put(proc, 30, 5000.0, started=49)
    after = look(proc, before, clock_s=101.0)
    assert busiest(before, after) == []
    put(proc, 30, 5000.5, started=49)
    assert named(after, look(proc, after, clock_s=102.0)) == {30: 0.5}


def test_processes_that_end_before_or_while_they_are_looked_at_are_left_out(proc):
    before = look(proc)
    shutil.rmtree(proc / "20")
    (proc / "21" / "stat").unlink()
    (proc / "30").mkdir()
    (proc / "30" / "stat").write_text("")
    after = look(proc, before, clock_s=101.0)
    assert set(after.seen) == {1, 10, 11}
    assert busiest(before, after) == []


def test_an_orphan_of_this_run_stays_this_runs_and_so_do_its_children(proc):
    first = look(proc, tops=(9, 10))
    shutil.rmtree(proc / "10")
    put(proc, 11, 4.5, parent=1)
    second = look(proc, first, tops=(9, 10), clock_s=101.0)
    put(proc, 11, 5.0, parent=1)
    put(proc, 12, 0.5, parent=11, started=60)
    third = look(proc, second, tops=(9, 10), clock_s=102.0)
    assert busiest(first, second) == busiest(second, third) == []
    put(proc, 11, 0.5, parent=1, started=70)  # the orphan has ended, and a stranger has its pid
    assert named(third, look(proc, third, tops=(9, 10), clock_s=103.0)) == {11: 0.5}


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a) R 1 (b", "a) R 1 (b"),
        ("kworker/0:1-events", "kworker/0:1-events"),
        ("\x1b[2J\n", "?[2J?"),
        ("caf\udce9", "caf\ufffd"),
        ("", ""),
    ],
)
def test_any_name_can_be_shown(proc, name, shown):
    before = look(proc)
    put(proc, 20, 5.0, name=name)
    assert [entry["name"] for entry in busiest(before, look(proc, before, clock_s=101.0))] == [shown]


def test_no_proc_and_no_two_looks_are_none_which_is_not_an_empty_list(proc, tmp_path):
    assert take_census([10], tmp_path / "absent") is None
    now = look(proc)
    assert busiest(None, now) is None
    assert busiest(now, None) is None
    assert busiest(now, now) is None
    assert busiest(now, look(proc, now, clock_s=101.0)) == []


def test_where_a_look_is_dear_the_last_one_serves_until_it_is_paid_for(proc, monkeypatch):
    clock_s = [100.0]
    monkeypatch.setattr(neighbours.time, "monotonic", lambda: clock_s[0])
    last = dataclasses.replace(take_census([10], proc), cost_s=0.06)
    clock_s[0] += 0.5 * 0.06 / neighbours.COST_FRAC
    assert take_census([10], proc, last) is last
    put(proc, 20, 5.0)
    clock_s[0] += 0.6 * 0.06 / neighbours.COST_FRAC
    found = take_census([10], proc, last)
    assert found.clock_s == clock_s[0]
    assert named(last, found) == {20: 1.0 / (1.1 * 0.06 / neighbours.COST_FRAC)}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_real_look_knows_its_cost_and_whose_child_is_whose():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        found = take_census([os.getpid()])
        assert found.cost_s > 0
        assert {os.getpid(), child.pid} <= {pid for pid, _ in found.ours}
        assert found.seen[child.pid].parent == os.getpid()
        assert 1 not in {pid for pid, _ in found.ours}
        assert 0 <= found.seen[child.pid].cpu < (os.cpu_count() or 1)
    finally:
        child.kill()
        child.wait()
