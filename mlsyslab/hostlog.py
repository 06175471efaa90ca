"""What host and container count against a job: throttling, OOM kills, network errors, pressure; and the kernel's log.

Every reader takes the root of the file system, so that a container can be imagined in a test. Sources of the files'
meaning: Linux Documentation/admin-guide/cgroup-v2.rst, scheduler/sched-bwc.rst, accounting/psi.rst,
networking/snmp_counter.rst, ABI/testing/dev-kmsg; man 5 proc_net.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

from mlsyslab.limits import ROOT, cgroup_dirs
from mlsyslab.processes import pairs_of, text_of

Counters = Mapping[str, float | None]

MOST_LINES = 200
MOST_LINE_BYTES = 500
MOST_READ_BYTES = 16 << 20
RECORD_BYTES = 16 << 10  # the kernel refuses a buffer that is smaller than its longest record

# Boot messages that only announce a feature ("NVRM: loading", "SATA link down" of an empty port) are no trouble.
TROUBLE = re.compile(
    r"hardware error|machine check|\bmce: .*(error|threshold|event)|\bEDAC .*\b(CE|UE)\b|\bAER: .*error|PCIe Bus Error"
    r"|out of memory|oom-kill|oom_reaper|killed process|page allocation failure"
    r"|throttl|temperature above threshold"
    r"|(?<!SATA )link (is |status definitely )?down|NETDEV WATCHDOG|transmit queue \d+ timed out"
    r"|\bNVRM: (?!loading)|\bS?Xid \("
    r"|I/O error|-fs error|medium error|\bnvme.* timeout|\bnfs: server .* not responding"
    r"|blocked for more than \d+ seconds|(soft|hard) lockup|\brcu.* stall",
    re.IGNORECASE,
)


def read(root: Path = ROOT) -> dict[str, float | None]:
    """All counters since boot (of a control group: since it was made); each None where nobody counts.

    Take it before and after a run, and `difference` tells what happened. What the parts mean stands with them.
    """
    return {
        **read_often(root),
        **memory_events(root),
        "thermal_throttles": thermal_throttles(root),
        **losses(root),
        **pressure(root),
    }


def read_often(root: Path = ROOT) -> dict[str, float | None]:
    """Those that cost little to read on a large machine too, for a look twice a second."""
    return {**cpu_throttling(root), **interfaces(root), "retransmits": retransmits(root)}


def difference(before: Counters, after: Counters) -> dict[str, float | None]:
    """What happened in between. None where a side is None, and where a counter went down, as after a restart."""
    return {name: _gain(before.get(name), value) for name, value in after.items()}


def _gain(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None or after < before else after - before


def _sum(values: Iterable[float | None]) -> float | None:
    """The sum of those that are counted; None where none is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


@cache  # a job stays where its launcher has put it, and finding out costs more than reading
def _groups(root: Path, controller: str) -> tuple[Path, ...]:
    """The folders of this process's control group and of those above, each once."""
    names = dict.fromkeys(map(os.path.realpath, cgroup_dirs(root, controller)))
    return tuple(Path(name) for name in names if os.path.isdir(name))


def cpu_throttling(root: Path = ROOT) -> dict[str, float | None]:
    """nr_throttled: periods in which a control group had used up its quota; throttled_s: how long it stood still.

    Summed over this process's group and those above. The kernel adds throttled_s up over cores, so that it can
    exceed the wall clock.
    """
    stats = [pairs_of(folder / "cpu.stat") for folder in _groups(root, "cpu")]
    times_s = [_scaled(stat.get("throttled_usec"), 1e-6) for stat in stats]  # cgroup v2
    times_s += [_scaled(stat.get("throttled_time"), 1e-9) for stat in stats]  # cgroup v1
    return {"nr_throttled": _sum(stat.get("nr_throttled") for stat in stats), "throttled_s": _sum(times_s)}


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def memory_events(root: Path = ROOT) -> dict[str, float | None]:
    """oom_kill: processes killed in this process's control group or directly in one above; oom: allocations that
    failed at a limit; memory_max: how often a limit was hit, and memory had to be reclaimed. cgroup v1 has no oom.
    """
    folders = _groups(root, "memory")
    old_kills = _sum(pairs_of(folder / "memory.oom_control").get("oom_kill") for folder in folders)
    old_hits = _sum(_number(text_of(folder / "memory.failcnt")) for folder in folders)
    return {
        "oom_kill": _sum([_events(folders, "oom_kill"), old_kills]),
        "oom": _events(folders, "oom"),
        "memory_max": _sum([_events(folders, "max"), old_hits]),
    }


def _events(folders: Collection[Path], name: str) -> float | None:
    """The sum of the groups' own events; before Linux 5.2 a group's count holds those below it, so the largest."""
    own = _sum(pairs_of(folder / "memory.events.local").get(name) for folder in folders)
    whole = [pairs_of(folder / "memory.events") for folder in folders]
    return max((group[name] for group in whole if name in group), default=None) if own is None else own


def _number(text: str) -> float | None:
    return int(text) if text.strip().isdigit() else None


def thermal_throttles(root: Path = ROOT) -> float | None:
    """How often heat slowed a core or its package down, summed over cores; a package's event counts in each of them."""
    folders = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle")
    return _sum(_number(text_of(path)) for folder in folders for path in folder.glob("*_throttle_count"))


def interfaces(root: Path = ROOT) -> dict[str, float | None]:
    """Packets in error and packets dropped, by real interfaces and by loopback.

    net_drops of a quiet network need not be 0: packets that no protocol wanted are among them. A bond counts its
    members once more.
    """
    cards = dict(_cards(text_of(root / "proc/net/dev")))
    loopback, real = ([cards[name] for name in cards if (name == "lo") == here] for here in (True, False))
    return {
        "net_errors": _sum(errors for errors, _ in real),
        "net_drops": _sum(drops for _, drops in real),
        "loopback_errors": _sum(errors for errors, _ in loopback),
        "loopback_drops": _sum(drops for _, drops in loopback),
    }


def _cards(text: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """(errors, drops) in both directions of each interface in /proc/net/dev."""
    for line in text.splitlines():
        name, colon, counts = line.partition(":")
        fields = counts.split()
        if colon and len(fields) >= 12:
            yield name.strip(), (int(fields[2]) + int(fields[10]), int(fields[3]) + int(fields[11]))


def retransmits(root: Path = ROOT) -> float | None:
    """TCP segments that were sent again, over every interface, loopback among them."""
    return _table(text_of(root / "proc/net/snmp"), "Tcp:").get("RetransSegs")


def losses(root: Path = ROOT) -> dict[str, float | None]:
    """lost_retransmits: a segment sent again was lost too; tcp_timeouts: for too long nothing had come back at all."""
    found = _table(text_of(root / "proc/net/netstat"), "TcpExt:")
    return {"lost_retransmits": found.get("TCPLostRetransmit"), "tcp_timeouts": found.get("TCPTimeouts")}


def _table(text: str, title: str) -> dict[str, int]:
    """The counters under a title of /proc/net/snmp: a line of names, then a line of numbers."""
    rows = [line.split()[1:] for line in text.splitlines() if line.startswith(title + " ")]
    return {name: int(value) for name, value in zip(*rows, strict=False)} if len(rows) == 2 else {}


def pressure(root: Path = ROOT) -> dict[str, float | None]:
    """Seconds in which at least one task on this machine waited for a core, for I/O, for memory (PSI, "some")."""
    texts = {name: text_of(root / "proc/pressure" / name) for name in ("cpu", "io", "memory")}
    totals = {name: re.search(r"^some .*\btotal=(\d+)", text, re.MULTILINE) for name, text in texts.items()}
    return {f"{name}_pressure_s": int(total[1]) / 1e6 if total else None for name, total in totals.items()}


def kernel_log(since_s: float, root: Path = ROOT) -> list[str] | None:
    """The kernel's own lines about trouble with hardware, memory, heat, links or storage, oldest first: "[seconds] text".

    since_s: seconds after boot, without sleep: time.monotonic() on Linux. The log's clock is not set by any other, and
    after weeks it is seconds off. None where the log may not be read, as in most containers; [] where nothing is amiss.
    Never waits; keeps the last MOST_LINES lines, and of each the first MOST_LINE_BYTES bytes.
    """
    try:
        file = os.open(root / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = deque(_troubles(b"".join(_records(file)), since_s), maxlen=MOST_LINES)
    finally:
        os.close(file)
    return list(found)


def _records(file: int) -> Iterator[bytes]:
    """What is in the log now; the device gives one record a read."""
    left = MOST_READ_BYTES
    while left > 0:
        try:
            record = os.read(file, RECORD_BYTES)
        except BrokenPipeError:  # overwritten before it was read; the next read gives the oldest that is left
            left -= RECORD_BYTES
            continue
        except OSError:  # no more for now
            return
        if not record:
            return
        left -= len(record)
        yield record


def _troubles(log: bytes, since_s: float) -> Iterator[str]:
    """Lines `priority,sequence,microseconds,flags;text`; those that begin with a space describe the record above."""
    for line in log.split(b"\n"):
        head, _, said = line.partition(b";")
        fields = head.split(b",")
        if len(fields) < 3 or not (fields[0].isdigit() and fields[2].isdigit()):
            continue
        from_kernel = int(fields[0]) < 8  # facility 0; programs can write to the log too, as other facilities
        text = said[:MOST_LINE_BYTES].decode(errors="replace")
        if from_kernel and int(fields[2]) >= since_s * 1e6 and TROUBLE.search(text):
            yield f"[{int(fields[2]) / 1e6:.6f}] {text}"
