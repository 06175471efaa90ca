"""Limits of containers, names of GPUs, and the probe's cache; the probe itself runs for real once."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from mlsyslab import hardware, launch, limits, nvml, probe
from mlsyslab.contract import RunError


def put(root: Path, **files: str) -> Path:
    """A fake root: each file by its path, `/` written as `__`, `.` as it is."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def big_machine(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MLSYSLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# ---- limits


def test_a_quota_of_two_cpus_on_64_cores_gives_two_usable_cores_and_as_many_workers(tmp_path, big_machine):
    root = put(tmp_path, **{"proc__self__cgroup": "0::/\n", "sys__fs__cgroup__cpu.max": "200000 100000\n"})
    found = hardware.limits(root)
    assert (found["cores"], found["quota_cores"], found["usable_cores"]) == (64, 2.0, 2.0)
    assert hardware.default_workers(root=root) == 1  # one core trains, one loads
    assert hardware.default_workers(root=tmp_path / "no quota") == limits.MOST_WORKERS


def test_the_tightest_group_above_this_process_counts(tmp_path, big_machine):
    root = put(
        tmp_path,
        **{
            "proc__self__cgroup": "0::/pod/box\n",
            "sys__fs__cgroup__cpu.max": "max 100000\n",
            "sys__fs__cgroup__pod__cpu.max": "350000 100000\n",
            "sys__fs__cgroup__pod__box__cpu.max": "800000 100000\n",
        },
    )
    assert limits.cpu_quota(root) == 3.5


def test_cgroup_v1_is_read_where_the_mount_is_the_group_itself(tmp_path, big_machine):
    root = put(
        tmp_path,
        **{
            "proc__self__cgroup": "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n",
            "sys__fs__cgroup__cpu,cpuacct__cpu.cfs_quota_us": "150000\n",
            "sys__fs__cgroup__cpu,cpuacct__cpu.cfs_period_us": "100000\n",
            "sys__fs__cgroup__memory__memory.limit_in_bytes": "4000000000\n",
            "sys__fs__cgroup__memory__memory.usage_in_bytes": "3000000000\n",
            "sys__fs__cgroup__memory__memory.stat": "cache 9\ntotal_inactive_file 1000000000\n",
        },
    )
    assert limits.cpu_quota(root) == 1.5
    assert limits.cgroup_memory(root) == (4_000_000_000, 2_000_000_000)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"sys__fs__cgroup__cpu.max": "max 100000", "sys__fs__cgroup__memory.max": "max"},
        {"sys__fs__cgroup__cpu.max": "", "sys__fs__cgroup__memory.max": "nonsense"},
    ],
)
def test_without_a_limit_there_is_none_and_not_zero(tmp_path, files):
    root = put(tmp_path, **{"proc__self__cgroup": "0::/\n"}, **files)
    assert limits.cpu_quota(root) is None
    assert limits.cgroup_memory(root) is None


def test_no_quota_and_no_memory_limit_in_the_numbers_of_cgroup_v1(tmp_path):
    root = put(
        tmp_path,
        **{
            "proc__self__cgroup": "4:memory:/\n1:cpu:/\n",
            "sys__fs__cgroup__cpu__cpu.cfs_quota_us": "-1",
            "sys__fs__cgroup__cpu__cpu.cfs_period_us": "100000",
            "sys__fs__cgroup__memory__memory.limit_in_bytes": "9223372036854771712",
            "sys__fs__cgroup__memory__memory.usage_in_bytes": "5",
        },
    )
    assert limits.cpu_quota(root) is None
    assert limits.cgroup_memory(root) is None


def test_memory_available_is_what_the_container_leaves(tmp_path):
    root = put(
        tmp_path,
        **{
            "proc__self__cgroup": "0::/\n",
            "sys__fs__cgroup__memory.max": "50000000",
            "sys__fs__cgroup__memory.current": "45000000",
            "sys__fs__cgroup__memory.stat": "anon 1\ninactive_file 2000000\n",
        },
    )
    found = hardware.limits(root)
    assert found["memory_available_bytes"] == 7_000_000
    assert found["cgroup_memory_bytes"] == 50_000_000 < found["memory_bytes"]


def test_affinity_narrows_the_cores_without_any_container(tmp_path, monkeypatch, big_machine):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    assert hardware.limits(tmp_path)["usable_cores"] == 2.0


def test_shared_memory_of_64_mb_is_seen_and_its_absence_is_none(tmp_path, monkeypatch):
    assert hardware.limits(tmp_path)["shm_bytes"] is None
    usage = namedtuple("usage", "total used free")(64 << 20, 1 << 20, 63 << 20)
    asked: list[Path] = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(Path(path)) or usage)
    found = hardware.limits(tmp_path)
    assert (found["shm_bytes"], found["shm_free_bytes"]) == (64 << 20, 63 << 20)
    assert asked == [tmp_path / "dev/shm"]


def test_workers_are_shared_out_over_ranks_and_never_none(tmp_path, monkeypatch, big_machine):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert [hardware.default_workers(ranks, tmp_path) for ranks in (1, 2, 4, 16)] == [7, 3, 1, 1]


def test_signs_of_containers(tmp_path):
    root = put(tmp_path, **{".dockerenv": "", "proc__self__cgroup": "0::/kubepods/x"})
    assert limits.containers(root, {"SLURM_JOB_ID": "1"}) == ["docker", "kubernetes", "slurm"]
    assert limits.containers(tmp_path / "bare", {}) == []


# ---- GPUs


Memory = namedtuple("Memory", "total free used")


class FakeNvml:
    """One device of each kind of trouble: index 0 tells all (names as bytes, like old libraries), 1 tells little."""

    NVMLError = RuntimeError

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 12080

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"570.1"

    def nvmlDeviceGetName(self, handle: int) -> Any:
        return b"NVIDIA H200" if handle == 0 else "NVIDIA Strange"

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Memory:
        if handle == 1:
            raise self.NVMLError("Not Supported")
        return Memory(total=150e9, free=149e9, used=1e9)


def test_gpus_are_described_and_what_one_lacks_is_none():
    first, second = hardware.gpus(FakeNvml())
    assert first == {
        "index": 0,
        "name": "NVIDIA H200",
        "uuid": "GPU-0",
        "memory_bytes": 150_000_000_000,
        "memory_free_bytes": 149_000_000_000,
        "driver": "570.1",
        "cuda": "12.8",
    }
    assert (second["name"], second["memory_bytes"]) == ("NVIDIA Strange", None)


def test_without_a_driver_there_are_no_gpus_and_no_error(monkeypatch):
    monkeypatch.setattr(nvml, "library", lambda: None)
    assert hardware.gpus() == []


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100 SXM2"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80 GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80 GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
    ],
)
def test_a_device_is_found_by_its_driver_name(name, key):
    assert hardware.peak_of(name) is hardware.PEAKS[key]


@pytest.mark.parametrize("name", ["NVIDIA L40", "NVIDIA H100 NVL", "NVIDIA GeForce RTX 4090 Laptop GPU", ""])
def test_a_look_alike_has_no_peak(name):
    assert hardware.peak_of(name) is None


def test_every_peak_says_where_it_stands_and_is_dense():
    for peak in hardware.PEAKS.values():
        assert peak.source.startswith("NVIDIA, ")
        assert peak.date
    # the sheet prints 1979 with sparsity
    assert hardware.PEAKS["H100 SXM"].flops_per_s["bfloat16"] == pytest.approx(1979e12 / 2, rel=0.001)


# ---- the cache of the probe


def fake_ranks(monkeypatch, figures: dict[str, Any]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    def call(worker: str, config: dict[str, Any], *, ranks: int, timeout_s: float) -> list[Any]:
        calls.append({"worker": worker, "config": config, "ranks": ranks})
        return [{**figures, "call": len(calls)}, {}]

    monkeypatch.setattr(launch, "call", call)
    return calls


def test_the_probe_is_measured_once_and_then_kept(own_cache, monkeypatch):
    calls = fake_ranks(monkeypatch, {"matmul_flops_per_s": 1e9})
    first, second = hardware.probe(), hardware.probe()
    assert (first["cached"], second["cached"], len(calls)) == (False, True, 1)
    assert {**first, "cached": True} == second
    assert calls[0]["ranks"] == 2
    assert hardware.probe(refresh=True)["call"] == 2
    assert hardware.cached_probe()["call"] == 2


@pytest.mark.parametrize(
    ("overloaded", "age_s", "kept"),
    [
        (False, 6 * 86400, True),
        (False, 8 * 86400, False),
        (True, 600, True),
        (True, 7200, False),
        (False, -3600, False),
    ],
)
def test_old_figures_and_those_of_a_busy_hour_are_measured_again(
    own_cache, monkeypatch, overloaded, age_s, kept
):
    fake_ranks(monkeypatch, {})
    monkeypatch.setattr(hardware, "load_average", lambda: 999.0 if overloaded else 0.0)
    assert hardware.probe()["overloaded"] is overloaded
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + age_s)
    assert (hardware.cached_probe() is not None) is kept


@pytest.mark.parametrize("change", ["torch", "uuid", "cores"])
def test_another_machine_has_another_key(own_cache, monkeypatch, change):
    fake_ranks(monkeypatch, {})
    hardware.probe()
    assert hardware.cached_probe()
    if change == "torch":
        monkeypatch.setattr(hardware, "version_of", lambda _: "9.9")
    elif change == "uuid":
        monkeypatch.setattr(hardware, "gpus", lambda: [{"uuid": "GPU-new"}])
    else:
        monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert hardware.cached_probe() is None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"time_s": "x", "overloaded": false}', "{}"])
def test_a_broken_cache_file_is_measured_again(own_cache, monkeypatch, text):
    calls = fake_ranks(monkeypatch, {})
    hardware.probe()
    next(own_cache.glob("probe-*.json")).write_text(text)
    assert hardware.probe()["call"] == 2 == len(calls)


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLSYSLAB_CACHE", str(tmp_path / "file" / "below"))
    calls = fake_ranks(monkeypatch, {"python_ops_per_s": 5.0})
    assert [hardware.probe()["python_ops_per_s"] for _ in range(2)] == [5.0, 5.0]
    assert len(calls) == 2


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("MLSYSLAB_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert hardware.cache_dir() == Path("/x/mlsyslab")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hardware.cache_dir() == tmp_path / ".cache/mlsyslab"


# ---- the environment of a run


def test_the_environment_is_json_and_names_no_path(own_cache, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = hardware.environment("cpu")
    text = json.dumps(found)
    assert found["backend"] == "gloo"
    assert found["git"] is None
    assert found["probe"] is None
    assert str(tmp_path) not in text
    assert str(Path.home()) not in text or str(Path.home()) == "/"


def test_a_probe_that_fails_is_named_and_does_not_fail_the_run(own_cache, monkeypatch):
    def call(*_: Any, **__: Any) -> None:
        raise RunError("no ranks here; run `mlsyslab doctor`")

    monkeypatch.setattr(launch, "call", call)
    found = hardware.environment("cuda:0", measure=True)
    assert (found["probe"], found["backend"]) == (None, "nccl")
    assert "no ranks here" in found["probe_error"]


def test_git_state_tells_the_commit_and_whether_files_were_changed(tmp_path):
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    (tmp_path / "a").write_text("1")
    for words in (["init", "-q"], ["add", "a"], ["commit", "-qm", "x"]):
        me = ["-c", "user.name=n", "-c", "user.email=e@x"]
        subprocess.run(["git", *me, *words], cwd=tmp_path, check=True, capture_output=True)
    clean = hardware.git_state(tmp_path)
    (tmp_path / "a").write_text("2")
    assert len(clean["commit"]) == 40
    assert (clean["dirty"], hardware.git_state(tmp_path)["dirty"]) == (False, True)


# ---- measuring


def test_a_section_gives_the_median_and_its_spread_in_order():
    figures = probe.Figures()
    times_s = [float(number) for number in range(1, 12)]
    figures.rate("x_per_s", 6.0, times_s)
    assert figures.values["x_per_s"] == pytest.approx(statistics.median(6 / t for t in times_s))
    low, high = figures.values["spread"]["x_per_s"]
    assert low < figures.values["x_per_s"] < high


def test_repeat_does_not_count_the_first_call():
    calls: list[float] = []
    assert len(probe.repeat(lambda: calls.append(1), for_s=0, least=4)) == 4
    assert len(calls) == 5


def test_the_photograph_is_always_the_same_and_as_heavy_as_a_photograph():
    data = probe.photograph()
    assert data == probe.photograph()
    assert 30_000 < len(data) < 200_000


def test_a_disk_that_cannot_be_written_is_none_with_a_reason(tmp_path):
    (tmp_path / "file").write_text("")
    figures = probe.Figures()
    probe.measure_disk(figures, tmp_path / "file" / "below")
    assert figures.values["disk_read_bytes_per_s"] is None
    assert figures.values["disk_note"].startswith("not measured: ")


@pytest.mark.parametrize(
    ("read", "says"), [(None, "unknown"), (100, "storage"), (40, "page cache answered 60%")]
)
def test_the_disk_note_says_who_answered(read, says):
    after = None if read is None else 7 + read
    assert says in probe._disk_note(7, after, 100)


RANK = (
    "matmul_flops_per_s",
    "copy_bytes_per_s",
    "python_ops_per_s",
    "jpeg_decode_s",
    "disk_read_bytes_per_s",
)


@pytest.mark.ranks
def test_one_process_alone_can_probe_and_has_no_all_reduce(own_cache):
    code = (
        "import json, pathlib; from mlsyslab.hardware import probe_rank;"
        f"print(json.dumps(probe_rank({{'cache_dir': {str(own_cache)!r}}}, pathlib.Path('.'))))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = json.loads(ended.stdout)
    assert all(found[name] > 0 for name in RANK)
    assert found["allreduce_bytes_per_s"] is None
    assert found["gpu_matmul_flops_per_s"] is None


@pytest.mark.ranks
def test_two_ranks_measure_every_figure_with_its_spread(own_cache):
    found = hardware.probe(timeout_s=120)
    for name in (*RANK, "allreduce_bytes_per_s", "allreduce_latency_s"):
        low, high = found["spread"][name]
        assert 0 < low <= found[name] <= high
    # a ring moves the buffer at least once through memory, so no all-reduce outruns a copy
    assert found["allreduce_bytes_per_s"] < found["spread"]["copy_bytes_per_s"][1]
    assert found["allreduce_latency_s"] < 32e6 / found["allreduce_bytes_per_s"]
    assert hardware.cached_probe() == {**found, "cached": True}
    assert (
        "torch"
        not in subprocess.run(
            [sys.executable, "-c", "import sys, mlsyslab.hardware, mlsyslab.doctor; print(*sys.modules)"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
    )
