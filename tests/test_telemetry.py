"""Counters from an imagined /proc and NVML, rates from two readings, and samplers on real processes."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlsyslab import neighbours, nvml, processes, telemetry
from mlsyslab.contract import RunError
from mlsyslab.processes import PAGE_BYTES, TICK_S, Process
from mlsyslab.telemetry import Reading, difference

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def wait_until(true: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    """The first truthy answer, or the last one when the time is over."""
    end = time.monotonic() + timeout_s
    while not (answer := true()) and time.monotonic() < end:
        time.sleep(0.02)
    return answer


def put_process(
    root: Path,
    pid: int,
    *,
    parent: int = 1,
    state: str = "S",
    children: str = "",
    cpu_ticks: int = 30,
    name: str = "a) b (c",
    **files: str,
) -> None:
    """A folder of /proc: 30 ticks of its own, 12 of reaped children, started at tick 777, 10 pages resident, core 6."""
    fields = [
        state,
        parent,
        *[0] * 9,
        cpu_ticks - 10,
        10,
        7,
        5,
        *[0] * 4,
        777,
        0,
        10,
        *[0] * 14,
        6,
        *[0] * 13,
    ]
    folder = root / str(pid)
    (folder / "task" / str(pid)).mkdir(parents=True, exist_ok=True)
    (folder / "stat").write_text(f"{pid} ({name}) " + " ".join(map(str, fields)))
    (folder / "task" / str(pid) / "children").write_text(children)
    for file, text in files.items():
        (folder / file).write_text(text)


def put_schedstat(root: Path, pid: int, tid: int, ran_ns: int, waited_ns: int) -> None:
    folder = root / str(pid) / "task" / str(tid)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "schedstat").write_text(f"{ran_ns} {waited_ns} 5\n")


# ---- one process


def test_a_process_is_read_in_seconds_and_bytes(tmp_path):
    put_process(
        tmp_path,
        40,
        io="rchar: 900\nwchar: 1\nread_bytes: 512\n",
        smaps_rollup="00-ff ---p 0 00:00 0 [rollup]\nRss: 99 kB\nPrivate_Clean:   3 kB\nPrivate_Dirty: 5 kB\n",
    )
    put_schedstat(tmp_path, 40, 40, 10**9, 2 * 10**9)
    put_schedstat(tmp_path, 40, 41, 10**9, 5 * 10**8)
    found = processes.read_process(40, tmp_path, private=True)
    assert found == Process(
        cpu_s=pytest.approx(30 * TICK_S),
        tree_cpu_s=pytest.approx(42 * TICK_S),
        started=777.0,
        rss_bytes=10 * PAGE_BYTES,
        delay_s={40: 2.0, 41: 0.5},
        read_bytes=900,
        disk_read_bytes=512,
        private_bytes=8 * 1024,
        state="S",
    )


def test_what_the_system_does_not_tell_is_none_and_not_zero(tmp_path):
    put_process(tmp_path, 40)
    found = processes.read_process(40, tmp_path, private=True)
    assert (found.delay_s, found.read_bytes, found.disk_read_bytes, found.private_bytes) == (None,) * 4


def test_a_kernel_that_does_not_count_waits_shows_zeros_which_mean_none(tmp_path):
    put_process(tmp_path, 40)
    put_schedstat(tmp_path, 40, 40, 0, 0)
    assert processes.read_process(40, tmp_path).delay_s is None


def test_ended_processes_are_none(tmp_path):
    put_process(tmp_path, 40, state="Z")
    assert processes.read_process(40, tmp_path) is None
    assert processes.read_process(41, tmp_path) is None


@pytest.mark.parametrize("files", [True, False])
def test_descendants_are_found_with_and_without_the_kernels_list(tmp_path, files):
    for pid, parent, children in ((10, 1, "11 12"), (11, 10, "13"), (12, 10, ""), (13, 11, ""), (99, 1, "")):
        put_process(tmp_path, pid, parent=parent, children=children)
    if not files:
        for path in tmp_path.glob("*/task/*/children"):
            path.unlink()
    assert processes.descendants(10, tmp_path) == [11, 12, 13]


def test_helpers_and_samplers_are_no_workers_and_the_vanished_are_left_out(tmp_path, monkeypatch):
    put_process(tmp_path, 10, children="11 12 13 14")
    put_process(tmp_path, 11, cmdline="python\0-c\0from multiprocessing.resource_tracker import main")
    put_process(tmp_path, 12, cmdline="python\0-m\0mlsyslab.telemetry\0--pid=10")
    put_process(tmp_path, 13, cmdline="python\0-c\0from multiprocessing.forkserver import main")
    monkeypatch.setattr(processes, "read_machine", dict)
    assert list(telemetry.read(10, root=tmp_path).workers) == [13]  # 14 ended between listing and reading


def test_the_process_asked_for_is_read_and_not_its_parent(tmp_path):
    """dynolog#430: the launcher was sampled instead of the ranks."""
    put_process(tmp_path, 5, children="10 20")
    put_process(tmp_path, 10, parent=5, children="11")
    put_process(tmp_path, 20, parent=5, children="21")
    put_process(tmp_path, 11, parent=10)
    put_process(tmp_path, 21, parent=20)
    found = telemetry.read(10, tree=5, root=tmp_path)
    assert list(found.workers) == [11]
    assert found.tree_cpu_s == pytest.approx(5 * 42 * TICK_S)
    assert telemetry.read(10, root=tmp_path).tree_cpu_s == pytest.approx(2 * 42 * TICK_S)


@pytest.mark.parametrize(("listed", "pids"), [("0-3,6", [90]), ("0-5", []), (None, [90])])
def test_only_a_process_on_the_ranks_own_cores_is_its_neighbour(listed, pids, tmp_path, monkeypatch):
    """put_process says that it last ran on core 6; where nothing tells the rank's cores, all are its own."""
    monkeypatch.setattr(processes, "read_machine", dict)
    readings = []
    for count in (1, 3):
        put_process(tmp_path, 10)
        if listed:
            (tmp_path / "10/status").write_text(f"Name:\tx\nCpus_allowed_list:\t{listed}\nMems_allowed:\t1\n")
        put_process(tmp_path, 90, cpu_ticks=count * 100, name="stress")
        readings.append(telemetry.read(10, root=tmp_path))
    after = dataclasses.replace(
        readings[1],
        clock_s=readings[0].clock_s + 4,
        census=dataclasses.replace(readings[1].census, clock_s=readings[0].census.clock_s + 4),
    )
    assert [entry["pid"] for entry in difference(readings[0], after)["neighbours"]] == pids


def test_what_host_and_neighbours_did_is_of_the_interval(tmp_path, monkeypatch):
    stat = "nr_throttled {}\nthrottled_usec {}\n"
    card = "  eth0: 1 1 {} 0 0 0 0 0 1 1 0 0 0 0 0 0\n"
    proc, cpu_stat = tmp_path / "proc", tmp_path / "sys/fs/cgroup/cpu.stat"
    for folder in (proc / "self", proc / "net", cpu_stat.parent):
        folder.mkdir(parents=True)
    (proc / "self/cgroup").write_text("0::/\n")
    monkeypatch.setattr(processes, "read_machine", dict)
    put_process(proc, 5)
    put_process(proc, 11, parent=10)
    readings = []
    for count, state in ((3, "S"), (5, "T")):
        put_process(proc, 10, parent=5, state=state, children="11")
        cpu_stat.write_text(stat.format(count, count * 500_000))
        (proc / "net/dev").write_text(card.format(count))
        (proc / "net/snmp").write_text(f"Tcp: RetransSegs\nTcp: {count * count}\n")
        put_process(proc, 90, cpu_ticks=count * 100, name="stress")
        put_process(proc, 5, cpu_ticks=count * 100)
        readings.append(telemetry.read(10, tree=5, root=proc))
    before, after = (
        dataclasses.replace(
            reading, clock_s=clock_s, census=dataclasses.replace(reading.census, clock_s=clock_s)
        )
        for reading, clock_s in zip(readings, (50.0, 54.0), strict=True)
    )
    line = difference(before, after)
    assert (line["throttled_s"], line["net_errors"], line["retransmits"]) == (1.0, 2, 16)
    assert line["neighbours"] == [
        {"pid": 90, "name": "stress", "cpu_frac": pytest.approx(200 * TICK_S / 4), "cpu": 6}
    ]
    assert (line["rank_state"], line["stopped_frac"], line["worker_stopped_frac"]) == ("T", 1.0, 0.0)


def test_where_the_host_tells_nothing_its_keys_are_none_and_not_zero():
    line = difference(BEFORE, AFTER)
    names = ("neighbours", "throttled_s", "retransmits", "net_errors", "rank_state", "stopped_frac")
    assert {name: line[name] for name in names} == dict.fromkeys(names)


@pytest.mark.parametrize(
    ("states", "frac"), [("ST", 0.5), ("tT", 1.0), ("RD", 0.0), (["T", None], None), ("", None)]
)
def test_the_stopped_share_of_the_workers(states, frac):
    workers = {pid: process(1.0, state=state) for pid, state in enumerate(states)}
    line = difference(BEFORE, dataclasses.replace(AFTER, workers=workers))
    assert line["worker_stopped_frac"] == frac


def test_a_dear_look_at_all_processes_is_carried_over_to_the_next_reading(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "read_machine", dict)
    put_process(tmp_path, 10)
    first = telemetry.read(10, root=tmp_path)
    dear = dataclasses.replace(first.census, cost_s=1e9)
    assert telemetry.read(10, root=tmp_path, last=dear).census is dear
    assert telemetry.read(10, root=tmp_path, last=first.census).census is not dear


def test_the_sampler_hands_each_look_on_to_the_next(tmp_path, monkeypatch):
    looks = [neighbours.Census(clock_s=float(number), seen={}) for number in range(3)]
    readings = [dataclasses.replace(AFTER, clock_s=look.clock_s, census=look) for look in looks]
    handed: list[Any] = []

    def read(_: int, *, last: Any = None, **__: Any) -> Reading | None:
        handed.append(last)
        return readings.pop(0) if readings else None

    monkeypatch.setattr(telemetry, "read", read)
    monkeypatch.setattr(telemetry.select, "select", lambda *_: ([], [], []))
    told = {"pid": 1, "tree": None, "gpu": None, "out": tmp_path, "rank": 0, "period_s": 0.0}
    telemetry.sample(argparse.Namespace(**told, parent=os.getppid()))
    assert handed == [None, *looks]
    assert [line["neighbours"] for line in lines_of(tmp_path / "telemetry-0.jsonl")] == [[], []]


def test_psutil_serves_systems_without_proc(tmp_path):
    nowhere = tmp_path / "none"
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert child.pid in processes.descendants(os.getpid(), nowhere)
        own = processes.read_process(os.getpid(), nowhere)
        assert own.cpu_s == pytest.approx(sum(os.times()[:2]), abs=1.0)
        assert own.rss_bytes == pytest.approx(psutil.Process().memory_info().rss, rel=0.5)
        assert own.delay_s is None
        child.send_signal(signal.SIGSTOP)
        assert wait_until(lambda: processes.read_process(child.pid, nowhere).state == "T")
    finally:
        child.kill()
    assert wait_until(
        lambda: processes.read_process(child.pid, nowhere) is None
    )  # a zombie until it is reaped
    child.wait()


@LINUX
def test_proc_and_psutil_agree_on_this_process():
    own = processes.read_process(os.getpid(), private=True)
    times = os.times()
    assert own.cpu_s == pytest.approx(times.user + times.system, abs=0.2)
    assert own.tree_cpu_s - own.cpu_s == pytest.approx(times.children_user + times.children_system, abs=0.2)
    memory = psutil.Process().memory_full_info()
    assert own.private_bytes == pytest.approx(memory.uss, rel=0.1)
    assert own.rss_bytes == pytest.approx(memory.rss, rel=0.1)


def test_busy_time_leaves_out_idle_waiting_for_disk_stolen_and_double_counted_time(monkeypatch):
    names = "user nice system idle iowait irq softirq steal guest guest_nice"
    cpu = namedtuple("cpu", names)(10, 1, 20, 300, 40, 2, 3, 50, 4, 1)
    monkeypatch.setattr(psutil, "cpu_times", lambda: cpu)
    found = processes.read_machine()
    assert (found["busy_s"], found["steal_s"], found["total_s"]) == (36, 50, 426)


def test_a_system_without_steal_has_none(monkeypatch):
    cpu = namedtuple("cpu", "user nice system idle")(10, 1, 20, 300)
    monkeypatch.setattr(psutil, "cpu_times", lambda: cpu)
    found = processes.read_machine()
    assert (found["busy_s"], found["steal_s"]) == (31, None)


def test_loopback_is_apart_from_other_interfaces_and_counted_once(monkeypatch):
    card = namedtuple("card", "bytes_sent bytes_recv")
    monkeypatch.setattr(psutil, "net_io_counters", lambda pernic: {"lo": card(70, 70), "eth0": card(1, 2)})
    monkeypatch.setattr(psutil, "disk_io_counters", lambda: None)
    found = processes.read_machine()
    assert (found["loopback_bytes"], found["net_bytes"], found["disk_read_bytes"]) == (70, 3, None)


# ---- the calling thread's run-queue wait


@LINUX
def test_run_delay_is_of_the_calling_thread_and_grows():
    if processes.run_delay_s() is None:
        pytest.skip("this kernel keeps no schedstat")
    seen: dict[str, Any] = {}

    def burn() -> None:
        first = processes.run_delay_s()
        end = time.thread_time() + 0.2
        while time.thread_time() < end:
            pass
        seen["thread"] = processes.run_delay_s()[0] - first[0]

    before = processes.run_delay_s()
    thread = threading.Thread(target=burn)
    thread.start()
    thread.join()
    after = processes.run_delay_s()
    assert seen["thread"] == pytest.approx(
        0.2, abs=0.05
    )  # CPU seconds, so the load of others does not matter
    assert after[0] - before[0] < 0.1
    assert after[1] >= before[1]


@LINUX
def test_run_delay_in_a_forked_child_is_the_childs():
    if processes.run_delay_s() is None:
        pytest.skip("this kernel keeps no schedstat")
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    code = (
        "import os, sys, time; from mlsyslab import processes as p; t = time.process_time() + 0.3\n"
        "while time.process_time() < t: pass\n"
        "p.run_delay_s(); child = os.fork()\n"
        "if child == 0: os._exit(int(p.run_delay_s()[0] > 0.25))\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_run_delay_without_schedstat_is_none(tmp_path):
    assert processes.run_delay_s(4_000_000, tmp_path) is None


# ---- the GPU


class FakeNvml:
    """A device that is throttled by heat and power; `missing` calls fail, as they do on devices without the sensor."""

    def __init__(self, *missing: str) -> None:
        self.missing = missing
        self.opened: list[Any] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in object.__getattribute__(self, "missing"):
            raise AttributeError(name)
        return object.__getattribute__(self, name)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        self.opened.append(index)
        if index > 3:
            raise RuntimeError("Invalid Argument")
        return "handle"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.opened.append(uuid)
        return "handle"

    def nvmlDeviceGetUtilizationRates(self, _: str) -> Any:
        return namedtuple("rates", "gpu memory")(37, 5)

    def nvmlDeviceGetMemoryInfo(self, _: str) -> Any:
        return namedtuple("memory", "total free used")(100, 40, 60)

    def nvmlDeviceGetClockInfo(self, _: str, kind: int) -> int:
        return {1: 1500}[kind]

    def nvmlDeviceGetCurrentClocksEventReasons(self, _: str) -> int:
        return 0x1 | 0x4 | 0x20

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, _: str) -> int:
        return 0x8

    def nvmlDeviceGetPowerUsage(self, _: str) -> int:
        return 250_500

    def nvmlDeviceGetTemperature(self, _: str, sensor: int) -> int:
        return {0: 81}[sensor]


def test_the_gpu_is_read_in_the_units_of_its_keys():
    found = telemetry.open_gpu("0", FakeNvml()).read()
    assert found == {
        "gpu_util_frac": 0.37,
        "gpu_memory_util_frac": 0.05,
        "gpu_memory_bytes": 60,
        "gpu_sm_clock_hz": 1.5e9,
        "gpu_throttle": ["software power cap", "software thermal"],
        "gpu_power_w": 250.5,
        "gpu_temperature_c": 81,
    }
    assert tuple(found) == nvml.SENSORS


def test_a_sensor_that_the_gpu_lacks_is_none_and_the_others_stay():
    fake = FakeNvml("nvmlDeviceGetPowerUsage", "nvmlDeviceGetUtilizationRates")
    found = telemetry.open_gpu("0", fake).read()
    assert (found["gpu_power_w"], found["gpu_util_frac"]) == (None, None)
    assert found["gpu_temperature_c"] == 81


def test_old_drivers_tell_throttle_reasons_under_their_older_name():
    fake = FakeNvml("nvmlDeviceGetCurrentClocksEventReasons")
    assert telemetry.open_gpu("0", fake).read()["gpu_throttle"] == ["hardware slowdown"]


def test_no_throttle_is_an_empty_list_which_is_not_an_absent_sensor():
    assert nvml.throttle_names(0) == nvml.throttle_names(1) == []
    names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
    assert telemetry.open_gpu("0", FakeNvml(*names)).read()["gpu_throttle"] is None


@pytest.mark.parametrize(
    ("visible", "device", "opened"),
    [
        (None, "1", 1),
        ("3,2", "1", 2),
        ("GPU-a,GPU-b", "1", "GPU-b"),
        ("3,2", "GPU-x", "GPU-x"),
        ("", "0", 0),
    ],
)
def test_a_cuda_index_counts_only_visible_devices(monkeypatch, visible, device, opened):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    fake = FakeNvml()
    telemetry.open_gpu(device, fake)
    assert fake.opened == [opened]


def test_no_gpu_is_none(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert telemetry.open_gpu(None) is None
    assert telemetry.open_gpu("9", FakeNvml()) is None
    monkeypatch.setattr(nvml, "library", lambda: None)
    assert telemetry.open_gpu("0") is None


# ---- rates between two readings


def process(cpu_s: float, delay_s: dict[int, float] | None = None, **more: Any) -> Process:
    values = {"tree_cpu_s": cpu_s, "started": 1.0, "rss_bytes": 100, "read_bytes": 0, "disk_read_bytes": 0}
    return Process(cpu_s=cpu_s, delay_s=delay_s, **{**values, **more})


def machine(
    busy_s: float = 0.0, steal_s: float | None = 0.0, total_s: float = 0.0, **more: float | None
) -> Any:
    return {"busy_s": busy_s, "steal_s": steal_s, "total_s": total_s, **more}


BEFORE = Reading(
    time_s=1000.0,
    clock_s=50.0,
    rank=process(1.0, {1: 0.5, 2: 9.0}),
    workers={7: process(4.0, {7: 1.0}, read_bytes=100), 8: process(6.0, {8: 2.0})},
    tree_cpu_s=20.0,
    own_cpu_s=0.10,
    machine=machine(100.0, 10.0, 400.0, disk_read_bytes=0, net_bytes=50, loopback_bytes=None),
)
AFTER = Reading(
    time_s=1002.0,
    clock_s=52.0,
    rank=process(1.5, {1: 0.9, 3: 0.2}, read_bytes=64),
    workers={
        7: process(6.0, {7: 1.5}, read_bytes=5100, disk_read_bytes=2000, private_bytes=77),
        9: process(0.5, {9: 0.1}, read_bytes=1000),
    },
    tree_cpu_s=23.0,
    own_cpu_s=0.12,
    machine=machine(103.5, 11.0, 404.0, disk_read_bytes=4096, net_bytes=150, loopback_bytes=None),
    gpu={"gpu_util_frac": 0.5},
)


def test_rates_are_per_second_of_wall_clock():
    line = difference(BEFORE, AFTER)
    expected = {
        "time_s": 1002.0,
        "interval_s": 2.0,
        "rank_cpu_frac": 0.25,
        "run_delay_frac": (0.4 + 0.2) / 2,  # thread 2 has ended, thread 3 is new
        "rank_read_bytes_per_s": 32.0,
        "workers": 2,
        "worker_cpu_frac": (2.0 + 0.5) / 2,  # worker 8 has ended, worker 9 is new
        "worker_cpu_each": [1.0, 0.25],
        "worker_run_delay_frac": (0.5 + 0.1) / 2,
        "worker_rss_bytes": [100, 100],
        "worker_read_bytes_per_s": (5000 + 1000) / 2,
        "worker_disk_read_bytes_per_s": 1000.0,
        "steal_frac": 0.25,
        "other_cpu_frac": 3.5 / 2 - 3.0 / 2,
        "own_cpu_frac": 0.01,
        "disk_read_bytes_per_s": 2048.0,
        "net_bytes_per_s": 50.0,
        "gpu_util_frac": 0.5,
    }
    for name, value in expected.items():
        assert line[name] == pytest.approx(value), name
    assert line["loopback_bytes_per_s"] is None
    assert line["worker_private_bytes"] == [77, None]


def test_absent_counters_stay_none_in_every_rate():
    bare = process(1.0, None, read_bytes=None, disk_read_bytes=None)
    reading = dataclasses.replace(
        BEFORE, rank=bare, workers={7: bare}, tree_cpu_s=None, machine=machine(steal_s=None)
    )
    line = difference(reading, dataclasses.replace(reading, clock_s=51.0))
    names = ("run_delay_frac", "worker_run_delay_frac", "rank_read_bytes_per_s", "worker_read_bytes_per_s")
    names += (
        "steal_frac",
        "other_cpu_frac",
        "worker_private_bytes",
        "disk_read_bytes_per_s",
        "gpu_util_frac",
    )
    assert {line[name] for name in names} == {None}
    assert line["worker_cpu_frac"] == 0.0


def test_no_workers_is_a_true_zero():
    line = difference(dataclasses.replace(BEFORE, workers={}), dataclasses.replace(AFTER, workers={}))
    assert (line["workers"], line["worker_cpu_frac"], line["worker_cpu_each"]) == (0, 0, [])
    assert line["worker_run_delay_frac"] == line["worker_read_bytes_per_s"] == 0


def test_a_reused_pid_is_a_new_worker():
    reborn = dataclasses.replace(AFTER, workers={7: process(0.5, {7: 0.1}, started=2.0)})
    assert difference(BEFORE, reborn)["worker_cpu_frac"] == pytest.approx(0.25)


def test_others_are_never_below_zero():
    assert difference(BEFORE, dataclasses.replace(AFTER, tree_cpu_s=99.0))["other_cpu_frac"] == 0.0


# ---- samplers on real processes

BUSY_CHILD = """
import os, sys, time
child = os.fork()
if child == 0:
    while True:
        pass
print(child, flush=True)
time.sleep(60)
"""


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def rank() -> Iterator[subprocess.Popen[str]]:
    """A process that sleeps, with a child that burns a core: a rank that waits for its loader worker."""
    process = subprocess.Popen([sys.executable, "-c", BUSY_CHILD], stdout=subprocess.PIPE, text=True)
    worker = int(process.stdout.readline())
    yield process
    process.kill()
    process.wait()
    process.stdout.close()
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)


@LINUX
@pytest.mark.ranks
def test_the_busy_worker_is_seen_and_not_the_sleeping_rank(rank, tmp_path):
    sampler = telemetry.start(rank.pid, tmp_path, 0.2, rank=3, tree=os.getpid())
    try:
        path = tmp_path / "telemetry-3.jsonl"
        assert wait_until(lambda: len(lines_of(path)) >= 8, timeout_s=20)
    finally:
        sampler.stop()
    rows = lines_of(path)
    assert {(row["kind"], row["rank"], row["workers"]) for row in rows} == {("telemetry", 3, 1)}
    seconds = sum(row["interval_s"] for row in rows)
    worker, sleeper, waited = (
        sum(row[name] * row["interval_s"] for row in rows) / seconds
        for name in ("worker_cpu_frac", "rank_cpu_frac", "worker_run_delay_frac")
    )
    assert sleeper < 0.1 < worker
    # a thread that never sleeps runs, waits for a core, or its machine is taken away
    assert worker + waited == pytest.approx(1.0, abs=0.35) or any(row["steal_frac"] for row in rows)
    assert rows[0]["worker_private_bytes"][0] > 0
    assert rows[0]["gpu_util_frac"] is None
    assert all(row["own_cpu_frac"] < 0.25 for row in rows)


@LINUX
@pytest.mark.ranks
def test_work_outside_of_the_run_is_others_work_and_work_inside_is_not(rank, tmp_path):
    """The busy child is ours or not, by where the tree begins."""
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    inside = telemetry.start(rank.pid, tmp_path, 0.25, rank=0)
    outside = telemetry.start(stranger.pid, tmp_path, 0.25, rank=1)
    try:
        paths = [tmp_path / f"telemetry-{number}.jsonl" for number in (0, 1)]
        assert wait_until(lambda: all(len(lines_of(path)) >= 8 for path in paths), timeout_s=20)
    finally:
        inside.stop()
        outside.stop()
        stranger.kill()
        stranger.wait()
    ours, theirs = (sum(row["other_cpu_frac"] for row in lines_of(path)[:8]) / 8 for path in paths)
    burnt = sum(row["worker_cpu_frac"] for row in lines_of(paths[0])[:8]) / 8
    assert theirs - ours == pytest.approx(burnt, abs=0.35)
    assert theirs > ours


@LINUX
@pytest.mark.ranks
def test_a_busy_process_outside_is_named_and_the_busy_worker_inside_is_not(rank, tmp_path):
    stranger = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    sampler = telemetry.start(rank.pid, tmp_path, 0.25)

    def blamed() -> list[int]:
        return [entry["pid"] for row in lines_of(sampler.path) for entry in row["neighbours"] or []]

    try:
        assert wait_until(lambda: stranger.pid in blamed(), timeout_s=30)
        assert wait_until(
            lambda: sum(row["worker_cpu_frac"] > 0.1 for row in lines_of(sampler.path)) >= 3, 30
        )
        worker = processes.descendants(rank.pid)[0]
        assert worker not in blamed()
        found = [entry for row in lines_of(sampler.path) for entry in row["neighbours"] or []]
        mine = next(entry for entry in found if entry["pid"] == stranger.pid)
        assert mine["name"] == Path(f"/proc/{stranger.pid}/comm").read_text().strip()
    finally:
        sampler.stop()
        stranger.kill()
        stranger.wait()


@LINUX
@pytest.mark.ranks
def test_a_stopped_rank_is_seen_as_stopped_until_it_goes_on(rank, tmp_path):
    sampler = telemetry.start(rank.pid, tmp_path, 0.1)

    def last() -> dict[str, Any]:
        return (lines_of(sampler.path) or [{"rank_state": None}])[-1]

    try:
        assert wait_until(lambda: last()["rank_state"] == "S")
        assert last()["stopped_frac"] == 0.0
        rank.send_signal(signal.SIGSTOP)
        assert wait_until(lambda: last()["rank_state"] == "T")
        assert (last()["stopped_frac"], last()["worker_stopped_frac"]) == (1.0, 0.0)
        rank.send_signal(signal.SIGCONT)
        assert wait_until(lambda: last()["rank_state"] == "S")
    finally:
        sampler.stop()


def alive(pid: int) -> bool:
    return processes.read_process(pid) is not None


@pytest.mark.ranks
def test_the_sampler_is_gone_with_the_process_it_watches(tmp_path):
    watched = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    sampler = telemetry.start(watched.pid, tmp_path, 0.2)
    try:
        assert wait_until(lambda: lines_of(sampler.path))
        watched.kill()  # a zombie now: nobody has waited for it
        assert wait_until(lambda: sampler.process.poll() is not None, timeout_s=3) is True
        assert sampler.process.returncode == 0
    finally:
        watched.kill()
        watched.wait()
        sampler.stop()


@pytest.mark.ranks
def test_a_sampler_of_nobody_ends_at_once_and_leaves_no_file(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    sampler = telemetry.start(ended.pid, tmp_path)
    assert sampler.process.wait(timeout=10) == 0
    sampler.stop()
    assert list(tmp_path.iterdir()) == []


PARENT = """
import os, sys, threading, time
from pathlib import Path
from mlsyslab import telemetry
def say(who, pid):
    os.write(1, b"%s %d\\n" % (who, pid))  # in one piece: two processes share the pipe
def begin():
    sampler = telemetry.start(int(sys.argv[1]), Path(sys.argv[2]), 0.2)
    if sys.argv[4:] == ["leak"]:
        if os.fork() == 0:
            say(b"orphan", os.getpid())
            time.sleep(60)  # an orphan that keeps the sampler's stdin open, as a loader worker would
    say(b"sampler", sampler.process.pid)
    kept.append(sampler)
    while not sampler.path.exists():  # the thread ends when the sampler is at work
        time.sleep(0.02)
kept = []
if sys.argv[3] == "thread":
    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
else:
    begin()
time.sleep(60)
"""


@pytest.mark.ranks
@pytest.mark.parametrize("where", [["main"], ["thread"], ["thread", "leak"]])
def test_kill_9_of_the_parent_ends_the_sampler_within_3_s(tmp_path, where):
    watched = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    command = [sys.executable, "-c", PARENT, str(watched.pid), str(tmp_path), *where]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    printed = dict(parent.stdout.readline().split() for _ in where)
    pids = {who: int(pid) for who, pid in printed.items()}
    try:
        # the thread has ended by the third line; were the kernel's signal tied to it, the sampler would be gone
        assert wait_until(lambda: len(lines_of(tmp_path / "telemetry-0.jsonl")) >= 3)
        assert alive(pids["sampler"])
        parent.kill()
        assert wait_until(lambda: not alive(pids["sampler"]), timeout_s=3)
    finally:
        for pid in {parent.pid, watched.pid, *pids.values()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        parent.wait()
        parent.stdout.close()
        watched.wait()


@pytest.mark.ranks
def test_stop_ends_it_at_once_and_twice_is_fine(tmp_path):
    sampler = telemetry.start(os.getpid(), tmp_path, period_s=30.0)
    assert wait_until((tmp_path / "telemetry-0.jsonl").exists)
    begin = time.monotonic()
    sampler.stop()
    sampler.stop()
    assert sampler.process.returncode == 0
    assert time.monotonic() - begin < 2.0  # by itself, not by the kill that comes after 2 s


@pytest.mark.ranks
def test_ctrl_c_is_not_for_the_sampler(tmp_path):
    sampler = telemetry.start(os.getpid(), tmp_path, 0.1)
    assert wait_until(lambda: lines_of(sampler.path))
    sampler.process.send_signal(signal.SIGINT)
    count = len(lines_of(sampler.path))
    assert wait_until(lambda: len(lines_of(sampler.path)) > count + 1)
    sampler.stop()
    assert sampler.process.returncode == 0


@pytest.mark.ranks
def test_a_folder_that_cannot_be_written_is_one_line_on_stderr(tmp_path, capfd):
    sampler = telemetry.start(os.getpid(), tmp_path / "absent", 0.1)
    assert sampler.process.wait(timeout=10) == 1
    sampler.stop()
    said = capfd.readouterr().err
    assert said.startswith("cannot write ")
    assert said.count("\n") == 1


def test_no_process_to_be_had_is_a_run_error(monkeypatch, tmp_path):
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(RunError, match=r"telemetry of process 1.*unavailable.*end other processes"):
        telemetry.start(1, tmp_path)
