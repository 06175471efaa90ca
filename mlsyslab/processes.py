"""Counters of processes and of the machine: from /proc on Linux, from psutil elsewhere; None where nobody counts.

Run-queue wait (`delay_s`) is time in which a thread was ready and no core was free: the sign of an overloaded host.
Source: Linux Documentation/scheduler/sched-stats.rst (/proc/<pid>/schedstat: ran, waited, both in nanoseconds).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROC = Path("/proc")
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
STATES = {
    "running": "R",
    "sleeping": "S",
    "disk-sleep": "D",
    "stopped": "T",
    "tracing-stop": "t",
}  # psutil's words
NOT_WORKERS = (b"multiprocessing.resource_tracker", b"mlsyslab.telemetry", b"tc\0-batch")


@dataclass(frozen=True, kw_only=True)
class Process:
    """Counters of one process since it started; None where the system does not tell.

    tree_cpu_s: cpu_s and that of the children it has reaped. started: tells a reused pid from the old process.
    delay_s: run-queue wait of each living thread, by thread id. read_bytes: what read() returned, page cache
    included. disk_read_bytes: what came from storage. private_bytes: memory shared with no other process. state: R
    runs, S sleeps, D waits for the disk, T is stopped by a signal, t by a debugger; as it was at that moment.
    """

    cpu_s: float
    tree_cpu_s: float
    started: float
    rss_bytes: int
    delay_s: Mapping[int, float] | None = None
    read_bytes: int | None = None
    disk_read_bytes: int | None = None
    private_bytes: int | None = None
    state: str | None = None


def read_process(
    pid: int, root: Path = PROC, *, detail: bool = True, private: bool = False
) -> Process | None:
    """The counters of `pid`; None once it has ended, a zombie included.

    detail: also threads and I/O. private: also private memory, which costs a walk over the page tables.
    """
    if not root.is_dir():
        return _portable(pid)
    fields = _stat(pid, root)
    if not fields or fields[0] in "ZXx":
        return None
    own_s, reaped_s = (sum(map(int, fields[i : i + 2])) * TICK_S for i in (11, 13))
    folder = root / str(pid)
    io = pairs_of(folder / "io") if detail else {}
    return Process(
        cpu_s=own_s,
        tree_cpu_s=own_s + reaped_s,
        started=float(fields[19]),
        rss_bytes=int(fields[21]) * PAGE_BYTES,
        delay_s=_thread_delays(folder, own_s) if detail else None,
        read_bytes=io.get("rchar"),
        disk_read_bytes=io.get("read_bytes"),
        private_bytes=_private_bytes(folder) if private else None,
        state=fields[0],
    )


def _portable(pid: int) -> Process | None:
    """CPU and resident memory through psutil, for systems without /proc."""
    import psutil

    try:
        process = psutil.Process(pid)
        cpu, started, rss_bytes = process.cpu_times(), process.create_time(), process.memory_info().rss
        status = process.status()
    except psutil.Error:
        return None
    own_s = cpu.user + cpu.system
    reaped_s = getattr(cpu, "children_user", 0.0) + getattr(cpu, "children_system", 0.0)
    if status == psutil.STATUS_ZOMBIE:
        return None
    return Process(
        cpu_s=own_s,
        tree_cpu_s=own_s + reaped_s,
        started=started,
        rss_bytes=rss_bytes,
        state=STATES.get(status),
    )


def text_of(path: Path) -> str:
    """The file's text; "" where it is absent, forbidden, or its process has just ended."""
    try:
        with open(path, "rb", buffering=0) as file:  # half of what read_text takes, many times a sample
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _stat(pid: int, root: Path) -> list[str]:
    """Fields of /proc/<pid>/stat from the third on: the second, the name, may hold spaces and brackets."""
    return text_of(root / str(pid) / "stat").rpartition(")")[2].split()


def pairs_of(path: Path) -> dict[str, int]:
    """Lines of the form `name: number [kB]`, numbers as they stand there."""
    rows = (line.replace(":", " ").split() for line in text_of(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}


def _private_bytes(folder: Path) -> int | None:
    kb = pairs_of(folder / "smaps_rollup")
    return (kb["Private_Clean"] + kb["Private_Dirty"]) * 1024 if "Private_Dirty" in kb else None


def _thread_delays(folder: Path, cpu_s: float) -> dict[int, float] | None:
    """Run-queue wait of each thread; None where the kernel keeps no such count (it then shows zeros)."""
    delays_s, ran_ns = {}, 0
    for tid in _numbers(folder / "task"):
        counts = text_of(folder / "task" / str(tid) / "schedstat").split()
        if len(counts) >= 2:
            delays_s[tid] = int(counts[1]) / 1e9
            ran_ns += int(counts[0])
    return None if not delays_s or (ran_ns == 0 and cpu_s > 0) else delays_s


def _numbers(folder: Path) -> list[int]:
    try:
        return [int(name) for name in os.listdir(folder) if name.isdigit()]
    except OSError:
        return []


def descendants(pid: int, root: Path = PROC) -> list[int]:
    """Children, their children and so on, in the order of their pids."""
    found: list[int] = []
    todo, below = [pid], _children(pid, root)
    while todo:
        fresh = [child for child in below(todo.pop()) if child not in found]
        found += fresh
        todo += fresh
    return sorted(found)


def _children(pid: int, root: Path) -> Callable[[int], list[int]]:
    """The cheapest way to a process's children that this system has."""
    if (root / str(pid) / "task" / str(pid) / "children").exists():
        return lambda parent: _children_files(root / str(parent) / "task")
    parents = _parents_by_psutil() if not root.is_dir() else {p: _stat(p, root)[1:2] for p in _numbers(root)}
    return lambda parent: [child for child, above in parents.items() if above == [str(parent)]]


def _children_files(tasks: Path) -> list[int]:
    texts = [text_of(tasks / str(tid) / "children") for tid in _numbers(tasks)]
    return [int(child) for text in texts for child in text.split()]


def _parents_by_psutil() -> dict[int, list[str]]:
    import psutil

    return {process.pid: [str(process.info["ppid"])] for process in psutil.process_iter(["ppid"])}


def is_worker(pid: int, root: Path = PROC) -> bool:
    """False for Python's own helper, for samplers and for traffic control, which are children of a rank too."""
    command = text_of(root / str(pid) / "cmdline").encode()
    return not any(word in command for word in NOT_WORKERS)


def read_machine() -> dict[str, float | None]:
    """Counters of the whole machine since boot: CPU seconds over all cores, and bytes; None where there is none.

    busy_s leaves out what the hypervisor gave to others (steal_s).
    """
    import psutil

    cpu = psutil.cpu_times()
    steal_s = getattr(cpu, "steal", None)
    # user time already holds guest time, and iowait is idle time with a name
    total_s = sum(cpu) - getattr(cpu, "guest", 0.0) - getattr(cpu, "guest_nice", 0.0)
    disk = net = None
    with contextlib.suppress(Exception):  # containers hide these files in many ways
        disk = psutil.disk_io_counters()
    with contextlib.suppress(Exception):
        net = psutil.net_io_counters(pernic=True)
    return {
        "total_s": total_s,
        "busy_s": total_s - cpu.idle - getattr(cpu, "iowait", 0.0) - (steal_s or 0.0),
        "steal_s": steal_s,
        "disk_read_bytes": disk.read_bytes if disk else None,
        "net_bytes": _net_bytes(net, loopback=False),
        "loopback_bytes": _net_bytes(net, loopback=True),
    }


def _net_bytes(net: Mapping[str, Any] | None, *, loopback: bool) -> float | None:
    """Bytes in and out of real interfaces; of loopback only those in, since each byte out comes in again."""
    if not net:
        return None
    chosen = [card for name, card in net.items() if (name in ("lo", "lo0")) == loopback]
    return float(sum(card.bytes_recv + (0 if loopback else card.bytes_sent) for card in chosen))


_schedstat: dict[int, int] = {}  # open file by thread id; a forked child has a new id, so it opens its own


def run_delay_s(tid: int | None = None, root: Path = PROC) -> tuple[float, float] | None:
    """(CPU seconds, run-queue wait in seconds) of one thread since it started; None where nobody counts.

    tid: a thread of this process, or the pid of another process's main thread; None is the calling thread. It costs
    one read of an open file, so a training loop can ask between steps.
    """
    key = tid or threading.get_native_id()
    try:
        if key not in _schedstat:
            _schedstat[key] = os.open(root / str(key) / "schedstat", os.O_RDONLY | os.O_CLOEXEC)
        ran_ns, waited_ns, _ = os.pread(_schedstat[key], 128, 0).split()
    except (OSError, ValueError):
        if key in _schedstat:
            os.close(_schedstat.pop(key))  # the thread has ended; its number may come again
        return None
    return int(ran_ns) / 1e9, int(waited_ns) / 1e9
