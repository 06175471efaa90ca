"""The doctor's rows: each problem is named with its remedy, and only what prevents the labs is an error."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from mlsyslab import doctor, hardware
from mlsyslab.contract import RunError
from mlsyslab.doctor import Check

HERE: dict[str, Any] = {
    "cores": 8,
    "affinity_cores": 8,
    "quota_cores": None,
    "usable_cores": 8.0,
    "memory_bytes": 32 << 30,
    "memory_available_bytes": 30 << 30,
    "cgroup_memory_bytes": None,
    "shm_bytes": 16 << 30,
    "shm_free_bytes": 16 << 30,
    "open_files": 65536,
    "open_files_hard": 65536,
    "load_average": 0.5,
}
H200 = {
    "index": 0,
    "name": "NVIDIA H200",
    "uuid": "GPU-0",
    "memory_bytes": 150_000_000_000,
    "memory_free_bytes": 1,
    "driver": "570.1",
    "cuda": "12.8",
}
GOOD = {
    "torch": "2.13.0+cu128",
    "numpy": "2.4",
    "pandas": "3.1",
    "matplotlib": "3.11",
    "psutil": "7.2",
    "pillow": "13.0",
    "jupyterlab": "4.6",
    "ipywidgets": "8.1",
    "ipykernel": "7.4.0",
    "nbval": "0.11",
}
FIGURES: dict[str, Any] = {
    "matmul_flops_per_s": 64.9e9,
    "allreduce_bytes_per_s": 0.9e9,
    "allreduce_latency_s": 350e-6,
    "jpeg_decode_s": 0.0027,
    "disk_read_bytes_per_s": None,
    "disk_note": "not measured: Read-only file system",
    "spread": {
        "matmul_flops_per_s": [60e9, 70e9],
        "allreduce_bytes_per_s": [0.8e9, 1.1e9],
        "allreduce_latency_s": [300e-6, 2e-3],
        "jpeg_decode_s": [0.0026, 0.003],
    },
    "cached": True,
    "overloaded": False,
    "load_average": 0.4,
    "probe_s": 6.0,
    "date": "2026-01-01T00:00:00+0000",
}


@pytest.fixture
def well(monkeypatch, tmp_path):
    """A machine on which nothing is wrong; tests change one thing."""
    here, versions, gpus = dict(HERE), dict(GOOD), []
    monkeypatch.setattr(doctor, "limits", lambda root: here)
    monkeypatch.setattr(hardware, "version_of", versions.get)
    monkeypatch.setattr(hardware, "gpus", lambda: gpus)
    monkeypatch.setattr(hardware, "probe", lambda refresh: dict(FIGURES))
    monkeypatch.setenv("MLSYSLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return here, versions, gpus


def row(name: str, checks: list[Check] | None = None) -> Check:
    return next(item for item in (checks or doctor.check()) if item.name == name)


def test_a_good_machine_has_no_remedies(well):
    assert [item for item in doctor.check() if item.status != "ok" or item.remedy] == []


@pytest.mark.parametrize(
    ("change", "name", "says"),
    [
        ({"shm_bytes": 64 << 20, "shm_free_bytes": 64 << 20}, "/dev/shm", "--shm-size"),
        ({"shm_free_bytes": 100 << 20}, "/dev/shm", "workers=0"),
        ({"open_files": 256}, "open files", "ulimit -n 1024"),
        ({"load_average": 8.1}, "load", "wait or end them"),
        ({"usable_cores": 1.0, "quota_cores": 1.0}, "cores", "2 CPUs"),
        ({"memory_available_bytes": 1 << 30, "cgroup_memory_bytes": 2 << 30}, "memory", "raise"),
    ],
)
def test_a_tight_limit_is_a_warning_with_its_remedy(well, change, name, says):
    well[0].update(change)
    checks = doctor.check()
    assert [item.name for item in checks if item.status == "warn"] == [name]
    assert says in row(name, checks).remedy


@pytest.mark.parametrize(
    "change",
    [
        {"shm_bytes": 512 << 20, "shm_free_bytes": 512 << 20},
        {"shm_bytes": None, "shm_free_bytes": None},
        {"open_files": 1024},
        {"open_files": None, "open_files_hard": None},
        {"load_average": 8.0},
        {"load_average": None},
        {"usable_cores": 2.0},
        {"memory_available_bytes": None, "memory_bytes": None},
    ],
)
def test_the_edge_and_the_unknown_are_no_warning(well, change):
    well[0].update(change)
    assert {item.status for item in doctor.check()} == {"ok"}


def test_a_quota_is_shown_beside_the_count(well):
    well[0].update(cores=64, affinity_cores=64, quota_cores=2.0, usable_cores=2.0)
    assert row("cores").value == "2 usable (count 64, affinity 64, quota 2)"
    assert "2 usable cores" in row("steptime").value


@pytest.mark.parametrize(
    ("package", "name"), [("torch", "torch"), ("pillow", "packages"), ("psutil", "packages")]
)
def test_a_missing_package_prevents_the_labs(well, package, name, capsys):
    del well[1][package]
    checks = doctor.check()
    assert [item.name for item in checks if item.status == "fail"] == [name]
    assert f"pip install {package}" in row(name, checks).remedy
    assert doctor.report(as_json=False, refresh=False, probe=False) == 1
    assert capsys.readouterr().out.endswith("The labs cannot run here yet.\n")


@pytest.mark.parametrize(
    ("version", "status"),
    [("7.0.0", "warn"), ("7.0.1", "warn"), ("6.30.1", "ok"), ("7.4.0", "ok"), ("70.0", "ok")],
)
def test_ipykernel_7_0_is_a_warning(well, version, status):
    well[1]["ipykernel"] = version
    found = row("Jupyter")
    assert found.status == status
    assert ("ipykernel!=7.0.*" in found.remedy) is (status == "warn")


def test_without_jupyter_the_labs_still_run(well, capsys):
    for name in ("jupyterlab", "ipywidgets", "ipykernel", "nbval"):
        del well[1][name]
    assert "mlsyslab[notebooks]" in row("Jupyter").remedy
    assert doctor.report(as_json=False, refresh=False, probe=True) == 0


def test_a_gpu_is_what_the_lab_runs_on(well):
    well[2].append(H200)
    assert row("GPU").value == "NVIDIA H200, 150000.0 MB, driver 570.1, CUDA 12.8"
    assert row("steptime").value.startswith("runs on cuda:0 NVIDIA H200")
    assert "NCCL for CUDA" in row("backends").value


def test_a_cpu_build_of_torch_beside_a_gpu_is_a_warning(well):
    well[2].append(H200)
    well[1]["torch"] = "2.13.0+cpu"
    assert row("GPU").status == "warn"
    assert "CPU build" in row("GPU").remedy
    assert row("steptime").value.startswith("runs on the CPU")


def test_folders_are_judged_without_being_made(well, tmp_path, monkeypatch):
    doctor.check()
    assert not (tmp_path / "cache").exists()
    assert not (tmp_path / "runs").exists()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLSYSLAB_CACHE", str(tmp_path / "file" / "cache"))
    found = row("cache folder")
    assert (found.status, "MLSYSLAB_CACHE" in found.remedy) == ("warn", True)


def test_a_folder_that_may_not_be_written_is_a_warning(well, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert {row(name).status for name in ("cache folder", "run folder")} == {"warn"}


def test_the_data_set_is_counted(well, tmp_path):
    assert "not made yet" in row("data set").value
    folder = tmp_path / "cache" / "jpeg" / "000"
    folder.mkdir(parents=True)
    for name in ("0.jpg", "1.jpg", "2.part"):
        (folder / name).write_text("")
    assert row("data set").value == "2 images"


def test_torch_that_cannot_be_imported_fails_only_when_asked(well, monkeypatch):
    ended = subprocess.CompletedProcess([], 1, "", "Traceback\nImportError: libgomp.so.1: no such file\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    assert "fail" not in {item.status for item in doctor.check()}
    found = row("torch imports", doctor.check(full=True))
    assert (found.status, found.value) == ("fail", "ImportError: libgomp.so.1: no such file")


# ---- the report


def test_the_probe_is_shown_with_units_and_spread_and_says_that_it_was_kept(well, capsys):
    assert doctor.report(as_json=False, refresh=False, probe=True) == 0
    said = capsys.readouterr().out
    assert "kept from 2026-01-01" in said
    assert "64.9 GFLOP/s (p10 60.0 GFLOP/s, p90 70.0 GFLOP/s)" in said
    assert "350 us (p10 300 us, p90 2.0 ms)" in said
    assert "disk read" not in said  # a figure that is absent is no row, and never 0
    assert said.endswith("The labs can run here.\n")


def test_gpu_figures_stand_beside_the_published_peak(well, monkeypatch):
    well[2].append(H200)
    gpu = {"gpu_matmul_flops_per_s": 700e12, "gpu_matmul_dtype": "bfloat16"}
    spread = {"gpu_matmul_flops_per_s": [690e12, 710e12]}
    monkeypatch.setattr(
        hardware, "probe", lambda refresh: {**FIGURES, **gpu, "spread": spread | FIGURES["spread"]}
    )
    rows, _ = doctor.probe_checks(refresh=False)
    expected = "700.0 TFLOP/s (p10 690.0 TFLOP/s, p90 710.0 TFLOP/s), bfloat16, 71% of the published peak"
    assert row("GPU matmul", rows).value == expected


def test_figures_of_a_busy_machine_are_marked(well, monkeypatch):
    busy = {**FIGURES, "overloaded": True, "cached": False}
    monkeypatch.setattr(hardware, "probe", lambda refresh: busy)
    found = row("machine probe", doctor.probe_checks(refresh=False)[0])
    assert (found.status, "--refresh" in found.remedy) == ("warn", True)
    assert "measured now" in found.value


def test_ranks_that_cannot_run_prevent_the_labs(well, monkeypatch, capsys):
    def broken(refresh: bool) -> None:
        raise RunError("cannot import torch: no module")

    monkeypatch.setattr(hardware, "probe", broken)
    assert doctor.report(as_json=True, refresh=False, probe=True) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["ok"], said["probe"]) == (False, None)
    assert said["checks"][-1]["value"] == "cannot import torch: no module"


def test_refresh_and_no_probe_are_passed_on(well, monkeypatch, capsys):
    asked: list[bool] = []
    monkeypatch.setattr(hardware, "probe", lambda refresh: asked.append(refresh) or dict(FIGURES))
    monkeypatch.setattr(doctor, "_torch_import", lambda: Check(name="torch imports", value="yes"))
    doctor.report(as_json=False, refresh=True, probe=True)
    doctor.report(as_json=False, refresh=False, probe=False)
    assert asked == [True]
    assert capsys.readouterr().out.count("torch imports") == 1


def test_the_table_is_aligned_and_failures_come_first():
    said = doctor.table(
        [
            Check(name="a", value="1", status="warn", remedy="mend a"),
            Check(name="long name", value="2", status="fail", remedy="mend b"),
            Check(name="c", value="3"),
        ]
    ).splitlines()
    assert {line.index(value) for line, value in zip(said, "123", strict=False)} == {6 + len("long name") + 2}
    assert said[4:6] == ["fail: long name: mend b", "warn: a: mend a"]


def test_this_very_machine_can_be_examined():
    checks = doctor.check()
    assert len({item.name for item in checks}) == len(checks) >= 14
    assert {item.status for item in checks} <= {"ok", "warn"}
    assert all(bool(item.remedy) is (item.status != "ok") for item in checks)
