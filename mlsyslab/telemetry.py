"""Host and device evidence, sampled by a process of its own, so that nothing happens in the timed path.

`start(pid, out)` watches one rank and its children (the loader workers; never the launcher, dynolog#430) and appends
a line every period to `telemetry-<rank>.jsonl`. Counters come from /proc, psutil and NVML; an absent sensor is None.

`*_cpu_frac` and `*_delay_frac` are in cores: 1.0 is one core busy, or one thread waiting, all the time. Several
workers can exceed 1. `throttled_s`, `retransmits` and `net_errors` are what was added in the interval; `rank_state`,
`stopped_frac` and `worker_stopped_frac` are of its last moment. `neighbours` is None also in the lines between two looks,
where thousands of processes make a look dear.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlsyslab import hostlog
from mlsyslab.contract import LabError, RunError
from mlsyslab.neighbours import Census, busiest, take_census
from mlsyslab.nvml import SENSORS, Gpu, open_gpu
from mlsyslab.processes import (
    PROC,
    Process,
    descendants,
    is_worker,
    read_machine,
    read_process,
    run_delay_s,
)
from mlsyslab.ranks import die_with_parent
from mlsyslab.records import Stream

__all__ = ["Process", "Reading", "Sampler", "difference", "read", "run_delay_s", "start"]

PRIVATE_EVERY = 20  # measured: 10 ms for a torch worker, during which it cannot map memory

Pairs = Mapping[int, tuple[Process | None, Process]]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """All counters at one moment. machine: `processes.read_machine`; host: of `hostlog.read`; gpu: `nvml.Gpu.read`;
    cores: those that the rank may run on, None where the system does not tell."""

    time_s: float
    clock_s: float
    rank: Process
    workers: Mapping[int, Process] = field(default_factory=dict)
    tree_cpu_s: float | None = None
    own_cpu_s: float = 0.0
    machine: Mapping[str, float | None] = field(default_factory=dict)
    host: Mapping[str, float | None] = field(default_factory=dict)
    census: Census | None = None
    cores: frozenset[int] | None = None
    gpu: Mapping[str, Any] = field(default_factory=lambda: dict.fromkeys(SENSORS))


def read(
    pid: int,
    *,
    tree: int | None = None,
    gpu: Gpu | None = None,
    root: Path = PROC,
    private: bool = False,
    last: Census | None = None,
) -> Reading | None:
    """Read all counters now; None once `pid` has ended.

    tree: what runs below this pid counts as this run; without it, the rank and its children do.
    private: also the workers' private memory, whose growth is the tale of pytorch#13246.
    last: the look at all processes of the reading before.
    """
    rank = read_process(pid, root)
    if rank is None:
        return None
    top = pid if tree is None else tree
    below = [child for child in descendants(pid, root) if child != os.getpid() and is_worker(child, root)]
    workers = {child: read_process(child, root, private=private) for child in below}
    return Reading(
        time_s=time.time(),
        clock_s=time.monotonic(),
        rank=rank,
        workers={child: found for child, found in workers.items() if found},
        tree_cpu_s=_tree_cpu_s(top, root),
        machine=read_machine(),
        host=hostlog.read_often(root.parent),
        census=take_census([top, pid, os.getpid()], root, last),
        cores=_cores(pid, root),
        gpu=gpu.read() if gpu else dict.fromkeys(SENSORS),
        own_cpu_s=time.process_time(),
    )


def _cores(pid: int, root: Path) -> frozenset[int] | None:
    """The cores that a process may run on, of the line `Cpus_allowed_list: 0-3,8` (man 5 proc_pid_status)."""
    try:
        status = (root / str(pid) / "status").read_text(errors="replace")
        listed = status.partition("Cpus_allowed_list:")[2].split(maxsplit=1)[0]
        ends = [part.partition("-") for part in listed.split(",")]
        return frozenset(core for low, _, high in ends for core in range(int(low), int(high or low) + 1))
    except (OSError, IndexError, ValueError):  # no /proc here, or the process has just ended
        return None


def _tree_cpu_s(top: int, root: Path) -> float:
    """CPU seconds of `top`, of all below it and of this sampler.

    A parent keeps the count of the children it reaped, so the sum does not fall when a worker ends.
    """
    pids = {top, os.getpid(), *descendants(top, root)}
    found = (read_process(pid, root, detail=False) for pid in pids)
    return sum(process.tree_cpu_s for process in found if process)


def difference(before: Reading, after: Reading) -> dict[str, Any]:
    """What happened between two readings: the keys of one telemetry line, rates per second of wall clock.

    A worker that came in between counts from its start; one that ended in between is left out.
    """
    seconds = after.clock_s - before.clock_s
    pairs: Pairs = {pid: (_same(before.workers.get(pid), now), now) for pid, now in after.workers.items()}
    machine = {name: _rate(before.machine.get(name), value, seconds) for name, value in after.machine.items()}
    ours = _rate(before.tree_cpu_s, after.tree_cpu_s, seconds)
    host = hostlog.difference(before.host, after.host)
    return {
        "time_s": after.time_s,
        "interval_s": seconds,
        "rank_cpu_frac": (after.rank.cpu_s - before.rank.cpu_s) / seconds,
        "run_delay_frac": _delay(before.rank, after.rank, seconds),
        "rank_state": after.rank.state,
        "stopped_frac": _stopped([after.rank]),
        "rank_rss_bytes": after.rank.rss_bytes,
        "rank_read_bytes_per_s": _rate(before.rank.read_bytes, after.rank.read_bytes, seconds),
        **_worker_rates(pairs, seconds),
        "steal_frac": _steal(before.machine, after.machine),
        "other_cpu_frac": _others(machine.get("busy_s"), ours),
        "neighbours": busiest(before.census, after.census, after.cores),
        "throttled_s": host.get("throttled_s"),
        "busy_cores": machine.get("busy_s"),
        "own_cpu_frac": (after.own_cpu_s - before.own_cpu_s) / seconds,
        "disk_read_bytes_per_s": machine.get("disk_read_bytes"),
        "net_bytes_per_s": machine.get("net_bytes"),
        "loopback_bytes_per_s": machine.get("loopback_bytes"),
        "retransmits": host.get("retransmits"),
        "net_errors": host.get("net_errors"),
        **after.gpu,
    }


def _worker_rates(pairs: Pairs, seconds: float) -> dict[str, Any]:
    """What the loader workers did, together and (in lists, by pid) each."""
    each = [(now.cpu_s - (was.cpu_s if was else 0.0)) / seconds for was, now in pairs.values()]
    private = [now.private_bytes for _, now in pairs.values()]
    return {
        "workers": len(pairs),
        "worker_cpu_frac": sum(each),
        "worker_cpu_each": each,
        "worker_stopped_frac": _stopped([now for _, now in pairs.values()]),
        "worker_run_delay_frac": _sum(_delay(was, now, seconds) for was, now in pairs.values()),
        "worker_rss_bytes": [now.rss_bytes for _, now in pairs.values()],
        "worker_private_bytes": private if any(value is not None for value in private) else None,
        "worker_read_bytes_per_s": _worker_rate(pairs, "read_bytes", seconds),
        "worker_disk_read_bytes_per_s": _worker_rate(pairs, "disk_read_bytes", seconds),
    }


def _stopped(found: Collection[Process]) -> float | None:
    """The share that a signal or a debugger has stopped; None of nobody, or where the system does not tell."""
    states = [process.state for process in found]
    return (
        None if not states or None in states else sum(state in ("T", "t") for state in states) / len(states)
    )


def _same(was: Process | None, now: Process) -> Process | None:
    return was if was and was.started == now.started else None  # a reused pid is a new process


def _rate(before: float | None, after: float | None, seconds: float) -> float | None:
    return None if before is None or after is None or seconds <= 0 else (after - before) / seconds


def _sum(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return None if None in known else sum(value or 0.0 for value in known)


def _delay(was: Process | None, now: Process, seconds: float) -> float | None:
    """Run-queue wait, summed over the threads that live now: one that ended takes its count with it."""
    if now.delay_s is None:
        return None
    old = (was.delay_s if was else None) or {}
    return sum(delay - old.get(tid, 0.0) for tid, delay in now.delay_s.items()) / seconds


def _worker_rate(pairs: Pairs, name: str, seconds: float) -> float | None:
    starts = ((getattr(was, name) if was else 0, getattr(now, name)) for was, now in pairs.values())
    return _sum(_rate(before, after, seconds) for before, after in starts)


def _steal(before: Mapping[str, float | None], after: Mapping[str, float | None]) -> float | None:
    """Share of this machine's CPU time that its hypervisor gave to others, 0..1."""
    steal_s = _rate(before.get("steal_s"), after.get("steal_s"), 1.0)
    total_s = _rate(before.get("total_s"), after.get("total_s"), 1.0)
    return None if steal_s is None or not total_s else steal_s / total_s


def _others(busy: float | None, ours: float | None) -> float | None:
    """Cores used by processes outside this run; clock ticks may put our sum above the machine's, hence the floor."""
    return None if busy is None or ours is None else max(0.0, busy - ours)


class Sampler:
    """A sampling process. It ends with `stop`, with its parent, and with the process that it watches."""

    def __init__(self, process: subprocess.Popen[bytes], path: Path) -> None:
        self.process, self.path = process, path

    def stop(self) -> None:
        """End the sampler; safe to call twice."""
        if self.process.stdin:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        try:
            self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start(
    pid: int,
    out: Path,
    period_s: float = 0.5,
    *,
    rank: int = 0,
    tree: int | None = None,
    gpu: str | None = None,
) -> Sampler:
    """Watch `pid` and its children from a new process; a line every `period_s` in out/telemetry-<rank>.jsonl.

    tree: the pid above all ranks of this run (a rank's parent), so that their work does not count as others'.
    gpu: "GPU-<uuid>", or the CUDA index as text. Raises RunError where no process can be started.
    """
    given = {"pid": pid, "out": out, "period-s": period_s, "rank": rank, "tree": tree, "gpu": gpu}
    command = [sys.executable, "-m", "mlsyslab.telemetry", f"--parent={os.getpid()}"]
    command += [f"--{name}={value}" for name, value in given.items() if value is not None]
    if threading.current_thread() is threading.main_thread():
        command.append("--die-with-parent")  # the kernel ties that signal to the calling thread's life
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    except OSError as error:
        raise RunError(
            f"cannot start the telemetry of process {pid}: {error.strerror}; end other processes"
        ) from error
    return Sampler(process, Path(out) / f"telemetry-{rank}.jsonl")


def sample(options: argparse.Namespace) -> None:
    """Append lines until stdin ends, the parent is gone or the watched process is gone."""
    import psutil  # noqa: F401  paid before the first reading, not in the first interval

    gpu = open_gpu(options.gpu)
    before, count = read(options.pid, tree=options.tree, gpu=gpu), 0
    if before is None:
        return
    stream, started = Stream(options.out / f"telemetry-{options.rank}.jsonl"), before.rank.started
    while not select.select([0], [], [], options.period_s)[0] and os.getppid() == options.parent:
        after = read(
            options.pid,
            tree=options.tree,
            gpu=gpu,
            private=count % PRIVATE_EVERY == 0,
            last=before.census,
        )
        if after is None or after.rank.started != started:
            return
        stream.write({"kind": "telemetry", "rank": options.rank, **difference(before, after)})
        before, count = after, count + 1


def main(arguments: list[str] | None = None) -> int:
    """The sampling process; started by `start`, not by hand."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the ranks; stdin ends with them
    parser = argparse.ArgumentParser(prog="mlsyslab.telemetry", description=main.__doc__)
    for name in ("--pid", "--parent", "--rank"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--period-s", type=float, default=0.5)
    parser.add_argument("--tree", type=int)
    parser.add_argument("--gpu")
    parser.add_argument("--die-with-parent", action="store_true")
    options = parser.parse_args(arguments)
    if options.die_with_parent:
        die_with_parent()
    try:
        sample(options)
    except LabError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
