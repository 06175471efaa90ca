"""Counters of throttling, memory, network and pressure from imagined machines, and the kernel log of a fake device."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mlsyslab import hostlog

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /dev")
CGROUP = "sys/fs/cgroup"


def put(root: Path, files: dict[str, str]) -> Path:
    """A fake root: each file by its path."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


# ---- control groups


def test_where_nobody_counts_every_counter_is_none(tmp_path):
    found = hostlog.read(tmp_path)
    assert set(found.values()) == {None}
    assert {"nr_throttled", "oom_kill", "thermal_throttles", "net_errors", "retransmits"} <= set(found)
    assert {"loopback_drops", "tcp_timeouts", "lost_retransmits", "cpu_pressure_s", "memory_max"} <= set(
        found
    )


def v2_stat(periods: int, usec: int) -> str:
    return f"usage_usec 9\nuser_usec 5\nnr_periods 90\nnr_throttled {periods}\nthrottled_usec {usec}\nnr_bursts 0\n"


def test_throttling_is_summed_over_the_own_group_and_those_above(tmp_path):
    files = {
        "proc/self/cgroup": "0::/pod/box\n",
        f"{CGROUP}/cpu.stat": "usage_usec 9\nuser_usec 5\n",  # the root has no quota
        f"{CGROUP}/pod/cpu.stat": v2_stat(3, 250_000),
        f"{CGROUP}/pod/box/cpu.stat": v2_stat(4, 1_500_000),
        f"{CGROUP}/pod/neighbour/cpu.stat": v2_stat(1000, 10**9),
    }
    assert hostlog.cpu_throttling(put(tmp_path, files)) == {
        "nr_throttled": 7,
        "throttled_s": pytest.approx(1.75),
    }


def test_a_container_sees_its_own_group_as_the_root_of_the_mount(tmp_path):
    files = {
        "proc/self/cgroup": "0::/../../kubepods/x\n",
        f"{CGROUP}/cpu.stat": v2_stat(2, 40_000),
        f"{CGROUP}/memory.events": "low 0\nhigh 0\nmax 8\noom 2\noom_kill 1\n",
        f"{CGROUP}/memory.events.local": "low 0\nhigh 0\nmax 8\noom 2\noom_kill 1\n",
    }
    found = hostlog.read(put(tmp_path, files))
    names = ("nr_throttled", "throttled_s", "memory_max", "oom", "oom_kill")
    assert [found[name] for name in names] == [2, pytest.approx(0.04), 8, 2, 1]


def test_a_group_without_a_quota_has_none_and_not_zero(tmp_path):
    files = {"proc/self/cgroup": "0::/\n", f"{CGROUP}/cpu.stat": "usage_usec 9\n"}
    assert hostlog.cpu_throttling(put(tmp_path, files)) == {"nr_throttled": None, "throttled_s": None}


@pytest.fixture
def v1(tmp_path):
    stat = "nr_periods 50\nnr_throttled 5\nthrottled_time 2500000000\n"
    return put(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n1:cpuset:/other\n",
            f"{CGROUP}/cpu,cpuacct/cpu.stat": stat,
            f"{CGROUP}/memory/memory.failcnt": "7\n",
            f"{CGROUP}/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
        },
    )


def test_cgroup_v1_counts_in_nanoseconds_and_by_failures(v1):
    found = hostlog.read(v1)
    assert (found["nr_throttled"], found["throttled_s"]) == (5, pytest.approx(2.5))
    assert (found["memory_max"], found["oom_kill"], found["oom"]) == (7, 3, None)


def test_a_folder_with_two_names_counts_once(v1):
    (v1 / CGROUP / "cpu").symlink_to("cpu,cpuacct")
    assert hostlog.cpu_throttling(v1)["nr_throttled"] == 5


def test_an_event_that_the_groups_above_repeat_counts_once(tmp_path):
    """memory.events holds what happened below; memory.events.local does not."""
    files = {"proc/self/cgroup": "0::/pod/box\n"}
    for folder, whole, local in (("pod", 5, 1), ("pod/box", 3, 3)):
        files[f"{CGROUP}/{folder}/memory.events"] = f"max {10 * whole}\noom_kill {whole}\n"
        files[f"{CGROUP}/{folder}/memory.events.local"] = f"max {10 * local}\noom_kill {local}\n"
    found = hostlog.memory_events(put(tmp_path / "new", files))
    assert found == {"oom_kill": 4, "oom": None, "memory_max": 40}
    old = {name: text for name, text in files.items() if not name.endswith("local")}
    assert hostlog.memory_events(put(tmp_path / "old", old))["oom_kill"] == 5


# ---- heat, network, pressure


def test_thermal_events_are_summed_and_none_happened_is_zero(tmp_path):
    folder = "sys/devices/system/cpu"
    files = {f"{folder}/cpu{n}/thermal_throttle/core_throttle_count": f"{n}\n" for n in (0, 1, 12)}
    files[f"{folder}/cpu0/thermal_throttle/package_throttle_count"] = "100\n"
    files[f"{folder}/cpu0/thermal_throttle/core_throttle_max_time_ms"] = "5000\n"
    files[f"{folder}/cpufreq/thermal_throttle/core_throttle_count"] = "7000\n"
    assert hostlog.thermal_throttles(put(tmp_path, files)) == 113
    cool = put(tmp_path / "cool", {f"{folder}/cpu0/thermal_throttle/core_throttle_count": "0\n"})
    assert hostlog.thermal_throttles(cool) == 0


NET_DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo: 9000 90 1 2 0 0 0 0 9000 90 10 20 0 0 0 0
  eth0:8000 80 100 200 7 7 7 7 8000 80 1000 2000 7 7 7 7
  eth1: 8000 80 3 4 0 0 0 0 8000 80 0 0 0 0 0 0
"""


def test_errors_and_drops_of_real_interfaces_are_apart_from_loopback(tmp_path):
    found = hostlog.interfaces(put(tmp_path, {"proc/net/dev": NET_DEV}))
    assert found == {"net_errors": 1103, "net_drops": 2204, "loopback_errors": 11, "loopback_drops": 22}


def test_without_a_real_interface_its_errors_are_none(tmp_path):
    text = "\n".join(NET_DEV.splitlines()[:3])
    found = hostlog.interfaces(put(tmp_path, {"proc/net/dev": text}))
    assert (found["net_errors"], found["loopback_errors"]) == (None, 11)


def test_tcp_counters_are_found_by_name_in_any_order(tmp_path):
    files = {
        "proc/net/snmp": "Ip: Forwarding RetransSegs\nIp: 1 99\nTcp: RtoMin MaxConn RetransSegs InErrs\nTcp: 200 -1 42 5\n",
        "proc/net/netstat": "TcpExt: TCPTimeouts Other TCPLostRetransmit\nTcpExt: 3 8 4\nIpExt: TCPTimeouts\nIpExt: 77\n",
    }
    root = put(tmp_path, files)
    assert hostlog.retransmits(root) == 42
    assert hostlog.losses(root) == {"lost_retransmits": 4, "tcp_timeouts": 3}


def test_a_kernel_without_such_a_counter_has_none(tmp_path):
    files = {"proc/net/snmp": "Tcp: RtoMin\nTcp: 200\n", "proc/net/netstat": "TcpExt: TCPTimeouts\n"}
    found = hostlog.read(put(tmp_path, files))
    assert (found["retransmits"], found["tcp_timeouts"]) == (None, None)


def test_pressure_is_the_time_in_which_some_task_waited(tmp_path):
    line = "avg10=0.50 avg60=0.04 avg300=0.25 total="
    files = {
        "proc/pressure/cpu": f"some {line}2500000\nfull {line}9\n",
        "proc/pressure/io": f"full {line}9\nsome {line}125\n",
    }
    assert hostlog.pressure(put(tmp_path, files)) == {
        "cpu_pressure_s": 2.5,
        "io_pressure_s": pytest.approx(125e-6),
        "memory_pressure_s": None,
    }


# ---- what happened in between


def test_the_difference_is_what_was_added_and_zero_where_nothing_was():
    before = {"oom_kill": 1, "throttled_s": 1.5, "retransmits": 7}
    after = {"oom_kill": 3, "throttled_s": 2.0, "retransmits": 7}
    assert hostlog.difference(before, after) == {"oom_kill": 2, "throttled_s": 0.5, "retransmits": 0}


@pytest.mark.parametrize(("before", "after"), [({"x": None}, 3), ({"x": 3}, None), ({}, 3), ({"x": 4}, 3)])
def test_what_was_not_counted_at_both_ends_or_went_down_is_none(before, after):
    assert hostlog.difference(before, {"x": after}) == {"x": None}


@LINUX
def test_this_machine_counts_and_never_backwards():
    before, after = hostlog.read(), hostlog.read()
    assert after["retransmits"] is not None
    assert all(gain is None or gain >= 0 for gain in hostlog.difference(before, after).values())
    assert set(hostlog.read_often()) < set(before)


# ---- the kernel's log


def kmsg(root: Path, *records: str) -> Path:
    return put(root, {"dev/kmsg": "".join(f"{record}\n" for record in records)})


@pytest.mark.parametrize(
    "text",
    [
        "mce: [Hardware Error]: Machine check events logged",
        "EDAC MC0: 1 CE memory read error on CPU_SrcID#0",
        "pcieport 0000:00:01.0: AER: Corrected error received: 0000:01:00.0",
        "Memory cgroup out of memory: Killed process 123 (python) total-vm:9kB",
        "python invoked oom-killer: gfp_mask=0xcc0, order=0",
        "mce: CPU3: Core temperature above threshold, cpu clock throttled (total events = 1)",
        "mlx5_core 0000:3b:00.0 eth0: Link down",
        "igb 0000:01:00.0 eth0: igb: eth0 NIC Link is Down",
        "bond0: (slave eth1): link status definitely down, disabling slave",
        "NETDEV WATCHDOG: eth0 (e1000e): transmit queue 0 timed out 5000 ms",
        "NVRM: Xid (PCI:0000:3b:00): 79, pid=123, GPU has fallen off the bus.",
        "nvidia-nvswitch3: SXid (PCI:0000:c4:00.0): 20034, Fatal, Link 30",
        "blk_update_request: I/O error, dev sda, sector 1234",
        "EXT4-fs error (device sda1): ext4_find_entry:1455",
        "nvme nvme0: I/O 12 QID 3 timeout, aborting",
        "nfs: server store not responding, still trying",
        "INFO: task python:123 blocked for more than 120 seconds.",
        "watchdog: BUG: soft lockup - CPU#3 stuck for 23s! [python:123]",
        "rcu: INFO: rcu_sched self-detected stall on CPU",
    ],
)
def test_trouble_is_found(tmp_path, text):
    assert hostlog.kernel_log(0, kmsg(tmp_path, f"4,7,12500000,-;{text}")) == [f"[12.500000] {text}"]


@pytest.mark.parametrize(
    "text",
    [
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.1",
        "ata3: SATA link down (SStatus 0 SControl 300)",
        "mlx5_core 0000:3b:00.0 eth0: Link up",
        "mce: CPU0: Thermal monitoring enabled (TM1)",
        "EDAC MC: Ver: 3.0.0",
        "EXT4-fs (vda): mounted filesystem r/w without journal. Quota mode: none.",
        "page_reporting_publish_free_bitmap: marked=1699768 err=0",
        "python (123): drop_caches: 3",
    ],
)
def test_news_that_is_no_trouble_is_left_out(tmp_path, text):
    assert hostlog.kernel_log(0, kmsg(tmp_path, f"4,7,12500000,-;{text}")) == []


def test_only_lines_since_the_moment_and_in_their_order(tmp_path):
    root = kmsg(tmp_path, *(f"3,{n},{n}000000,-;I/O error {n}" for n in (1, 2, 3)))
    assert hostlog.kernel_log(2.0, root) == ["[2.000000] I/O error 2", "[3.000000] I/O error 3"]


def test_only_the_kernel_speaks_and_not_a_program_or_the_details_of_a_record(tmp_path):
    root = kmsg(
        tmp_path,
        "30,1,5000000,-;systemd[1]: job.service: A process was killed: out of memory",
        "12,2,5000000,-;I/O error, says a program",
        "6,3,5000000,-;usb 1-1: new device",
        " SUBSYSTEM=I/O error;x",
        "nonsense;I/O error",
        "3,4;I/O error",
        "3,x,y,-;I/O error",
        "",
        "7,5,5000000,c,caller=T1;I/O error; dev sda",
    )
    assert hostlog.kernel_log(0, root) == ["[5.000000] I/O error; dev sda"]


def test_a_log_that_may_not_be_read_is_none_which_is_not_an_empty_one(tmp_path, monkeypatch):
    assert hostlog.kernel_log(0, tmp_path) is None
    assert hostlog.kernel_log(0, kmsg(tmp_path)) == []

    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "open", refuse)
    assert hostlog.kernel_log(0, tmp_path) is None


def test_the_last_lines_are_kept_and_long_ones_cut(tmp_path):
    count = hostlog.MOST_LINES + 50
    root = kmsg(tmp_path, *(f"3,{n},{n}000000,-;I/O error {'x' * 900}" for n in range(count)))
    found = hostlog.kernel_log(0, root)
    assert len(found) == hostlog.MOST_LINES
    assert found[-1].startswith(f"[{count - 1}.000000] I/O error x")
    assert max(map(len, found)) < hostlog.MOST_LINE_BYTES + 20


@LINUX
def test_it_does_not_wait_for_a_log_that_stays_open(tmp_path):
    (tmp_path / "dev").mkdir()
    os.mkfifo(tmp_path / "dev/kmsg")
    assert hostlog.kernel_log(0, tmp_path) == []  # nobody writes
    writer = os.open(tmp_path / "dev/kmsg", os.O_RDWR)
    try:
        os.write(writer, b"3,1,5000000,-;I/O error\n")
        assert hostlog.kernel_log(0, tmp_path) == ["[5.000000] I/O error"]
    finally:
        os.close(writer)


def fake_reads(monkeypatch: pytest.MonkeyPatch, answer: Callable[[int], bytes]) -> list[int]:
    calls: list[int] = []

    def read(_: int, __: int) -> bytes:
        calls.append(1)
        return answer(len(calls))

    monkeypatch.setattr(os, "read", read)
    return calls


def test_a_record_that_was_overwritten_meanwhile_does_not_end_the_reading(tmp_path, monkeypatch):
    def answer(call: int) -> bytes:
        if call == 1:
            raise BrokenPipeError(32, "Broken pipe")
        if call == 2:
            return b"3,1,5000000,-;I/O error\n"
        raise BlockingIOError(11, "Resource temporarily unavailable")

    root = kmsg(tmp_path)
    fake_reads(monkeypatch, answer)
    assert hostlog.kernel_log(0, root) == ["[5.000000] I/O error"]


@pytest.mark.parametrize("overwritten", [True, False])
def test_a_flood_is_read_only_up_to_a_bound(tmp_path, monkeypatch, overwritten):
    def answer(call: int) -> bytes:
        assert call <= 1000
        if overwritten:
            raise BrokenPipeError(32, "Broken pipe")
        return b"3,1,5000000,-;" + b"x" * 2000 + b"\n"

    root = kmsg(tmp_path)
    monkeypatch.setattr(hostlog, "MOST_READ_BYTES", 100_000)
    calls = fake_reads(monkeypatch, answer)
    assert hostlog.kernel_log(0, root) == []
    assert len(calls) < 60


@LINUX
def test_this_machines_log_is_read_or_forbidden():
    found = hostlog.kernel_log(0)
    assert found is None or all(line.startswith("[") for line in found)
