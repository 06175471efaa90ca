"""`mlsyslab doctor`: what this machine has, what is wrong with it, the remedy, and what each lab will run on here."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlsyslab import hardware
from mlsyslab.contract import LabError, format_value, unit_of
from mlsyslab.limits import ROOT, default_workers, limits

SHM_BYTES = 512 * 1024**2  # a few prefetched batches of each of a few workers
OPEN_FILES = 1024  # each worker and each batch in flight holds descriptors
MEMORY_BYTES = 2 * 1024**3  # two ranks, their workers and batches, with room to spare
NEEDED = ("numpy", "pandas", "matplotlib", "psutil", "pillow")
FRONT_END = ("jupyterlab", "ipywidgets", "ipykernel", "nbval")
PROBE_SAYS = {
    "matmul_flops_per_s": "matmul, 1 thread",
    "copy_bytes_per_s": "memory copy",
    "allreduce_bytes_per_s": "all-reduce, 2 ranks",
    "allreduce_latency_s": "all-reduce, 4 bytes",
    "jpeg_decode_s": "JPEG decode",
    "disk_read_bytes_per_s": "disk read",
    "python_ops_per_s": "Python loop",
    "gpu_matmul_flops_per_s": "GPU matmul",
    "gpu_copy_bytes_per_s": "GPU memory copy",
    "gpu_h2d_bytes_per_s": "host to GPU, pinned",
    "gpu_h2d_pageable_bytes_per_s": "host to GPU, pageable",
    "gpu_launch_s": "kernel launch",
}


@dataclass(frozen=True, kw_only=True)
class Check:
    """One row. status "fail" is only what prevents the labs; `remedy` is empty where nothing is wrong."""

    name: str
    value: str
    status: str = "ok"
    remedy: str = ""


def check(root: Path = ROOT, *, full: bool = False) -> list[Check]:
    """All rows of the table. full: also import torch, in a process of its own (seconds)."""
    here, gpus = limits(root), hardware.gpus()
    return [
        _python(),
        _torch(),
        *([_torch_import()] if full else []),
        _packages(),
        _gpu(gpus),
        _cores(here),
        _memory(here),
        _shm(here),
        _open_files(here),
        _backends(gpus),
        _load(here),
        _writable("cache folder", hardware.cache_dir(), "set MLSYSLAB_CACHE to a folder you may write"),
        _writable("run folder", Path("runs"), "start in another folder, or give --out (out= in Python)"),
        _front_end(),
        _data_set(),
        _labs(here, gpus, default_workers(root=root)),
        _straggler(here),
        _parallelism(here),
        _serving(),
        _scaleup(here),
    ]


def _judged(name: str, value: str, wrong: bool, remedy: str, status: str = "warn") -> Check:
    return (
        Check(name=name, value=value, status=status, remedy=remedy)
        if wrong
        else Check(name=name, value=value)
    )


def _python() -> Check:
    old = sys.version_info < (3, 11)
    return _judged("Python", platform.python_version(), old, "install Python 3.11 or newer", "fail")


def _torch() -> Check:
    version = hardware.version_of("torch")
    remedy = "pip install torch (CPU only: add --index-url https://download.pytorch.org/whl/cpu)"
    return _judged("torch", version or "not installed", version is None, remedy, "fail")


def _torch_import() -> Check:
    """Whether torch can be imported: a wheel for another CPU or a missing library shows only then."""
    code = "import torch, torch.distributed as d; print(torch.cuda.is_available(), d.is_gloo_available(), d.is_nccl_available())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if ended.returncode:
        why = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
        return Check(
            name="torch imports", value=why, status="fail", remedy="reinstall torch for this machine"
        )
    cuda, gloo, nccl = ended.stdout.split()[-3:]
    return Check(name="torch imports", value=f"yes; CUDA {cuda}, gloo {gloo}, NCCL {nccl}")


def _packages() -> Check:
    found = {name: hardware.version_of(name) for name in NEEDED}
    absent = [name for name, version in found.items() if version is None]
    return _judged("packages", _versions(found), bool(absent), f"pip install {' '.join(absent)}", "fail")


def _versions(found: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {version or 'not installed'}" for name, version in found.items())


def _gpu(gpus: Sequence[Mapping[str, Any]]) -> Check:
    if not gpus:
        return Check(name="GPU", value="none found through NVML; the labs run on the CPU")
    first, more = gpus[0], f" and {len(gpus) - 1} more" if len(gpus) > 1 else ""
    memory = format_value(first["memory_bytes"], "bytes")
    return _judged(
        "GPU",
        f"{first['name']}{more}, {memory}, driver {first['driver']}, CUDA {first['cuda']}",
        hardware.torch_has_cuda() is False,
        "this torch is a CPU build and leaves the GPU idle: install the CUDA build (pytorch.org, Get started)",
    )


def _cores(here: Mapping[str, Any]) -> Check:
    quota = "none" if here["quota_cores"] is None else f"{here['quota_cores']:g}"
    affinity = "unknown" if here["affinity_cores"] is None else here["affinity_cores"]
    return _judged(
        "cores",
        f"{here['usable_cores']:g} usable (count {here['cores']}, affinity {affinity}, quota {quota})",
        here["usable_cores"] < 2,
        "ranks and loader workers share one core here: give the container 2 CPUs or more",
    )


def _memory(here: Mapping[str, Any]) -> Check:
    free, group = here["memory_available_bytes"], here["cgroup_memory_bytes"]
    limit = "none" if group is None else _gib(group)
    return _judged(
        "memory",
        f"{_gib(here['memory_bytes'])}, {_gib(free)} free, container limit {limit}",
        free is not None and free < MEMORY_BYTES,
        "close other programs, raise the container's memory to 4 GiB, or lower ranks and workers",
    )


def _gib(value: float | None) -> str:
    return "unknown" if value is None else f"{value / 1024**3:.1f} GiB"


def _shm(here: Mapping[str, Any]) -> Check:
    total, free = here["shm_bytes"], here["shm_free_bytes"]
    if total is None:
        return Check(name="/dev/shm", value="not on this system")
    return _judged(
        "/dev/shm",
        f"{total / 1024**2:.0f} MiB, {free / 1024**2:.0f} MiB free",
        min(total, free) < SHM_BYTES,
        "batches of loader workers pass through it: docker run --shm-size=1g (or --ipc=host), or workers=0",
    )


def _open_files(here: Mapping[str, Any]) -> Check:
    soft, hard = here["open_files"], here["open_files_hard"] or "none"
    return _judged(
        "open files",
        "no limit" if soft is None else f"{soft} (hard limit {hard})",
        soft is not None and soft < OPEN_FILES,
        f"ulimit -n {OPEN_FILES} before the start, or fewer ranks and workers",
    )


def _backends(gpus: Sequence[Mapping[str, Any]]) -> Check:
    """By build, not by trial: the probe tries gloo, and `full` asks torch."""
    if gpus and hardware.torch_has_cuda() is not False and sys.platform == "linux":
        return Check(name="backends", value="gloo for CPU, NCCL for CUDA (one rank a GPU)")
    return Check(name="backends", value="gloo; no NCCL without a GPU and a CUDA build")


def _load(here: Mapping[str, Any]) -> Check:
    load, usable = here["load_average"], here["usable_cores"]
    return _judged(
        "load",
        f"{_number(load)} over the last minute, {usable:g} cores",
        load is not None and load > usable,
        "others use the cores: wait or end them; until then a verdict may be `unknown`",
    )


def _writable(name: str, folder: Path, remedy: str) -> Check:
    """Whether `folder`, or the nearest folder above it that exists, can be written. Makes nothing."""
    above = next((path for path in (folder, *folder.absolute().parents) if path.exists()), Path("/"))
    closed = not (above.is_dir() and os.access(above, os.W_OK | os.X_OK))
    return _judged(name, f"{folder}{' cannot be written' if closed else ''}", closed, remedy)


def _front_end() -> Check:
    """Jupyter is optional: the library and the command work without it."""
    found = {name: hardware.version_of(name) for name in FRONT_END}
    remedy = "" if all(found.values()) else "for the notebooks: pip install 'mlsyslab[notebooks]'"
    if (found["ipykernel"] or "").startswith("7.0."):
        remedy = "ipykernel 7.0 loses widget updates (ipykernel#1450): pip install 'ipykernel!=7.0.*'"
    return _judged("Jupyter", _versions(found), bool(remedy), remedy)


def _data_set() -> Check:
    """JPEG files in the cache folder; counted without importing what makes them (it needs torch)."""
    files = (name for _, _, names in os.walk(hardware.cache_dir()) for name in names)
    count = sum(name.endswith(".jpg") for name in files)
    return Check(
        name="data set", value=f"{count} images" if count else "not made yet; the first run makes it"
    )


def _labs(here: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]], workers: int) -> Check:
    """What a lab's device=auto will use."""
    if gpus and hardware.torch_has_cuda() is not False:
        names = ", ".join(f"cuda:{gpu['index']} {gpu['name']}" for gpu in gpus)
        return Check(name="steptime", value=f"runs on {names}; NCCL between GPUs")
    cores = f"{here['usable_cores']:g} usable cores: start with {workers} loader worker{'s' if workers > 1 else ''} a rank"
    return Check(name="steptime", value=f"runs on the CPU, gloo, paced accelerator, {cores}")


def _straggler(here: Mapping[str, Any]) -> Check:
    """Which faults the straggler lab can inject here, and how it makes a link slow."""
    apart = here["usable_cores"] >= 2 and hasattr(os, "sched_setaffinity")
    faults = (
        "every fault can be injected" if apart else "every fault but cpu_contention, which needs two cores"
    )
    shaped = sys.platform == "linux" and os.geteuid() == 0 and shutil.which("tc") and shutil.which("ip")
    link = "by traffic control" if shaped else "by delayed sends (by traffic control as root, with iproute2)"
    return Check(name="straggler", value=f"runs as steptime does; {faults}; a slow link {link}")


def _parallelism(here: Mapping[str, Any]) -> Check:
    """How the parallelism lab counts and caps memory here, and whether it can have nodes."""
    linux = sys.platform == "linux"
    cap = "memory can be capped" if linux else "memory cannot be capped (Linux or a GPU)"
    nodes = linux and os.geteuid() == 0 and shutil.which("tc") and shutil.which("ip")
    link = "nodes with a slow link" if nodes else "no nodes (root on Linux, with iproute2)"
    shared = f"; more than {here['usable_cores']:g} ranks share cores" if here.get("usable_cores") else ""
    return Check(name="parallelism", value=f"every split; {cap}; {link}{shared}")


def _scaleup(here: Mapping[str, Any]) -> Check:
    """How many ranks of the scale-up lab are processes here."""
    cores = f", sharing {here['usable_cores']:g} cores" if here.get("usable_cores") else ""
    return Check(name="scaleup", value=f"up to 8 ranks as processes{cores}; more, up to 64, in one process")


def _serving() -> Check:
    """Which engines of the serving lab can run here."""
    missing = [name for name in ("aiohttp", "prometheus_client") if importlib.util.find_spec(name) is None]
    engines = ["in process", *([] if missing else ["http"])]
    engines += ["ray"] if importlib.util.find_spec("ray") else []
    hint = " (for HTTP: pip install 'mlsyslab[serving]')" if missing else ""
    return Check(name="serving", value=f"engines: {', '.join(engines)}{hint}")


# ---- the probe's rows


def probe_checks(*, refresh: bool) -> tuple[list[Check], dict[str, Any] | None]:
    """The probe's figures as rows, and as they are; a probe that fails is what prevents the labs."""
    try:
        figures = hardware.probe(refresh=refresh)
    except LabError as error:
        remedy = "ranks cannot run here; `python -c 'import torch, torch.distributed'` may show why"
        return [Check(name="machine probe", value=str(error), status="fail", remedy=remedy)], None
    when = "kept from" if figures["cached"] else "measured now,"
    head = _judged(
        "machine probe",
        f"{when} {figures['date']}, {figures['probe_s']:.1f} s, load {_number(figures['load_average'])}",
        figures["overloaded"],
        "measured while others used the cores: `mlsyslab doctor --refresh` when they are idle",
    )
    return [head, *(_figure(name, figures) for name in PROBE_SAYS if figures.get(name) is not None)], figures


def _figure(name: str, figures: Mapping[str, Any]) -> Check:
    low, high = (_shown(name, value) for value in figures["spread"][name])
    notes = {
        "disk_read_bytes_per_s": f", {figures.get('disk_note')}",
        "gpu_matmul_flops_per_s": f", {figures.get('gpu_matmul_dtype')}{_of_peak(figures)}",
    }
    return Check(
        name=PROBE_SAYS[name],
        value=f"{_shown(name, figures[name])} (p10 {low}, p90 {high}){notes.get(name, '')}",
    )


def _shown(name: str, value: float) -> str:
    if name == "python_ops_per_s":
        return f"{value / 1e6:.1f} million operations/s"
    if unit_of(name) == "s" and value < 1e-3:
        return f"{value * 1e6:.0f} us"
    if value >= 1e12:
        return f"{value / 1e12:.1f} T{'FLOP' if name.endswith('flops_per_s') else 'B'}/s"
    return format_value(value, unit_of(name))


def _of_peak(figures: Mapping[str, Any]) -> str:
    """The matmul as a share of the published peak, where the device is in the table."""
    names = [gpu["name"] for gpu in hardware.gpus() if gpu["name"]]
    peak = hardware.peak_of(names[0]) if names else None
    published = peak.flops_per_s.get(figures["gpu_matmul_dtype"]) if peak else None
    return f", {figures['gpu_matmul_flops_per_s'] / published:.0%} of the published peak" if published else ""


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"


def report(*, as_json: bool, refresh: bool, probe: bool) -> int:
    """Print the table, then the remedies; exit code 1 only where something prevents the labs.

    refresh: measure the machine again, and try whether torch can be imported. probe=False measures nothing.
    """
    checks = check(full=refresh)
    rows, figures = probe_checks(refresh=refresh) if probe else ([], None)
    checks += rows
    failed = any(item.status == "fail" for item in checks)
    if as_json:
        print(json.dumps({"ok": not failed, "checks": [asdict(item) for item in checks], "probe": figures}))
    else:
        print(table(checks))
    return int(failed)


def table(checks: Sequence[Check]) -> str:
    """Aligned rows; below them each problem with its remedy, the worst first."""
    width = max(len(item.name) for item in checks)
    lines = [f"{item.status:<4}  {item.name:<{width}}  {item.value}" for item in checks]
    wrong = sorted((item for item in checks if item.remedy), key=lambda item: item.status != "fail")
    lines += ["", *(f"{item.status}: {item.name}: {item.remedy}" for item in wrong)] if wrong else []
    prevented = any(item.status == "fail" for item in checks)
    return "\n".join([*lines, "", "The labs cannot run here yet." if prevented else "The labs can run here."])
