"""Noisy neighbours by name: the processes outside this run that used most CPU between two looks at /proc.

Three things stay unseen, so an empty list is no proof of quiet beside a high `other_cpu_frac`: processes of other
containers, those that /proc hides from this user (hidepid), and those that began and ended between two looks.
Source of the fields: man 5 proc_pid_stat.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mlsyslab.processes import PROC, TICK_S

NAMED = 3
LEAST_CORES = 0.1
COST_FRAC = 0.02  # of a core; a machine with thousands of processes is looked at less often


class Seen(NamedTuple):
    """One process at one moment. started: clock ticks after boot. cpu: the core its main thread last ran on. name: as
    the kernel has it, whatever bytes they are. line: what all this was read from."""

    line: bytes
    name: bytes
    parent: int
    cpu_s: float
    started: int
    cpu: int


@dataclass(frozen=True, kw_only=True)
class Census:
    """All processes at one moment, by pid. ours: (pid, started) of this run's; cost_s: CPU seconds of the look."""

    clock_s: float
    seen: Mapping[int, Seen]
    ours: frozenset[tuple[int, int]] = frozenset()
    cost_s: float = 0.0


def take_census(tops: Collection[int], root: Path = PROC, last: Census | None = None) -> Census | None:
    """Look at every process; None where there is no /proc. What is `tops` or below it is this run's.

    last: the look before. It is returned again while a new one would cost more than COST_FRAC of a core, and what was
    this run's stays so when its parent dies.
    """
    begin_s, clock_s = time.thread_time(), time.monotonic()
    if last and last.cost_s > COST_FRAC * (clock_s - last.clock_s):
        return last
    try:
        pids = [int(name) for name in os.listdir(root) if name.isdigit()]
    except OSError:
        return None
    old = last.seen if last else {}
    found = ((pid, _look(f"{root}/{pid}/stat", old.get(pid))) for pid in pids)
    seen = {pid: process for pid, process in found if process}
    known = [
        pid for pid, started in (last.ours if last else ()) if pid in seen and seen[pid].started == started
    ]
    ours = frozenset((pid, seen[pid].started) for pid in _family([*tops, *known], seen))
    return Census(clock_s=clock_s, seen=seen, ours=ours, cost_s=time.thread_time() - begin_s)


def _look(path: str, was: Seen | None) -> Seen | None:
    """The process of a stat file; None once it has ended. Where nothing has changed it is `was`, as most often."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # a third of what pathlib takes, 150 times a look
    except OSError:
        return None
    try:
        line = os.read(file, 4096)
    except OSError:
        return None
    finally:
        os.close(file)
    return was if was and was.line == line else _parsed(line)


def _parsed(line: bytes) -> Seen | None:
    """The fields of a stat line; the second, the name, may hold spaces and brackets."""
    head, _, tail = line.rpartition(b")")
    fields = tail.split(None, 37)
    if len(fields) < 37:
        return None
    cpu_s = (int(fields[11]) + int(fields[12])) * TICK_S
    return Seen(line, head.partition(b"(")[2], int(fields[1]), cpu_s, int(fields[19]), int(fields[36]))


def _family(tops: Collection[int], seen: Mapping[int, Seen]) -> Iterator[int]:
    """`tops` and all below them, those that are there."""
    below: dict[int, list[int]] = {}
    for pid, process in seen.items():
        below.setdefault(process.parent, []).append(pid)
    todo, met = list(tops), set()
    while todo:
        pid = todo.pop()
        if pid in seen and pid not in met:
            met.add(pid)
            todo += below.get(pid, [])
            yield pid


def busiest(
    before: Census | None, after: Census | None, cores: Collection[int] | None = None
) -> list[dict[str, Any]] | None:
    """Up to NAMED processes outside this run that used LEAST_CORES or more in between, busiest first: pid, name,
    cpu_frac (in cores, over all threads) and cpu. None where there are no two looks to compare.

    cores: only those whose main thread last ran on one of them; a process elsewhere disturbs nobody here.
    """
    if before is None or after is None or after.clock_s <= before.clock_s:
        return None
    seconds = after.clock_s - before.clock_s
    used: list[dict[str, Any]] = [
        {
            "pid": pid,
            "name": _printable(after.seen[pid].name),
            "cpu_frac": cpu_s / seconds,
            "cpu": after.seen[pid].cpu,
        }
        for pid, cpu_s in _others_cpu_s(before, after)
        if cpu_s / seconds >= LEAST_CORES and (cores is None or after.seen[pid].cpu in cores)
    ]
    return sorted(used, key=lambda entry: -entry["cpu_frac"])[:NAMED]


def _printable(name: bytes) -> str:
    """Its text; a process can give itself any name, also one that would move the cursor of a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in name.decode(errors="replace"))


def _others_cpu_s(before: Census, after: Census) -> Iterator[tuple[int, float]]:
    """CPU seconds between two looks, by pid. A process that came in between counts from its start."""
    newest = max((process.started for process in before.seen.values()), default=0)
    for pid, now in after.seen.items():
        was = before.seen.get(pid)
        if (pid, now.started) in after.ours:
            continue
        if was and was.started == now.started:
            yield pid, now.cpu_s - was.cpu_s
        elif now.started >= newest:  # else it was hidden before, and how much of its time is new is unknown
            yield pid, now.cpu_s
