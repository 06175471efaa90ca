"""What this machine is and can: published peaks of GPUs, the probe's figures kept between runs, a run's environment.

Nothing here imports torch: the probe (`mlsyslab.probe`) measures in rank processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlsyslab.contract import LabError
from mlsyslab.devicelock import DeviceLock
from mlsyslab.limits import containers, cores, default_workers, limits, load_average
from mlsyslab.nvml import gpus
from mlsyslab.probe import PROBE_VERSION, probe_rank
from mlsyslab.records import write_json

__all__ = [
    "PEAKS",
    "Peak",
    "cache_dir",
    "cached_probe",
    "default_workers",
    "environment",
    "gpus",
    "limits",
    "peak_of",
    "probe",
    "probe_rank",
    "version_of",
]

FRESH_S = 7 * 86400.0
FRESH_OVERLOADED_S = 3600.0  # measured while others had the cores: soon measured again


# ---- published peaks


@dataclass(frozen=True, kw_only=True)
class Peak:
    """A vendor's figures of one device, and where they stand.

    flops_per_s: by type, dense (tensor cores without sparsity; float32 without tensor cores). pattern: matches the
    whole name that the driver gives, the maker's name aside.
    """

    pattern: str
    flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    source: str
    date: str


def _peak(pattern: str, source: str, date: str, gigabytes_per_s: float, **tera: float) -> Peak:
    flops_per_s = {name: value * 1e12 for name, value in tera.items()}
    return Peak(
        pattern=pattern,
        flops_per_s=flops_per_s,
        memory_bytes_per_s=gigabytes_per_s * 1e9,
        source=f"NVIDIA, {source}",
        date=date,
    )


_A100 = {"float32": 19.5, "tfloat32": 156, "bfloat16": 312, "float16": 312}
_HOPPER = {"float32": 67, "tfloat32": 494.5, "bfloat16": 989.5, "float16": 989.5, "float8": 1979}
_L4 = {"float32": 30.3, "tfloat32": 60, "bfloat16": 121, "float16": 121, "float8": 242.5}
_B200 = {"float32": 75, "tfloat32": 1100, "bfloat16": 2250, "float16": 2250, "float8": 4500}
_RTX_4090 = {"float32": 82.6, "tfloat32": 82.6, "bfloat16": 165.2, "float16": 165.2}

# Where a sheet prints only the figure "with sparsity", the dense one is half of it. The RTX 4090's half types are
# those with float32 accumulation, as in training.
PEAKS: Mapping[str, Peak] = {
    "T4": _peak("T4", "T4 product page", "2019", 320, float32=8.1, float16=65),
    "V100 SXM2": _peak("V100-SXM2-(16|32)GB", "V100 data sheet", "2020-01", 900, float32=15.7, float16=125),
    "A100 SXM 40 GB": _peak("A100-SXM4-40GB", "A100 data sheet", "2021-06", 1555, **_A100),
    "A100 SXM 80 GB": _peak("A100-SXM4-80GB", "A100 data sheet", "2021-06", 2039, **_A100),
    "A100 PCIe 80 GB": _peak("A100 80GB PCIe", "A100 data sheet", "2021-06", 1935, **_A100),
    "L4": _peak("L4", "L4 data sheet", "2023", 300, **_L4),
    "H100 SXM": _peak("H100 80GB HBM3", "H100 data sheet", "2023", 3350, **_HOPPER),
    "H200 SXM": _peak("H200", "H200 data sheet", "2024", 4800, **_HOPPER),
    "B200": _peak("B200", "HGX B200 data sheet", "2025", 7700, **_B200),
    "RTX 4090": _peak("GeForce RTX 4090", "Ada GPU architecture white paper", "2022", 1008, **_RTX_4090),
}


def peak_of(name: str) -> Peak | None:
    """The published peak of the device that the driver calls `name`; None for one that is not in PEAKS.

    A name must match as a whole: an A10G is no A10, an L40 no L4, and a laptop's RTX 4090 no desktop's.
    """
    short = re.sub(r"^(NVIDIA|Tesla)\s+", "", name.strip())
    return next((peak for peak in PEAKS.values() if re.fullmatch(peak.pattern, short)), None)


# ---- the probe's figures, measured or kept


def cache_dir() -> Path:
    """Where figures and data are kept: $MLSYSLAB_CACHE, else $XDG_CACHE_HOME/mlsyslab, else ~/.cache/mlsyslab.

    It may not exist, and may not be writable.
    """
    if own := os.environ.get("MLSYSLAB_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mlsyslab"


def version_of(package: str) -> str | None:
    """The installed version, found without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _probe_path() -> Path:
    here = limits()
    identity = [PROBE_VERSION, here["hostname"], here["cpu_model"], here["usable_cores"]]
    identity += [version_of("torch"), *(gpu["uuid"] for gpu in gpus())]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    return cache_dir() / f"probe-{key}.json"


def cached_probe() -> dict[str, Any] | None:
    """The figures kept for this machine, with `cached` True; None where there are none or they are stale."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept: dict[str, Any] = json.loads(_probe_path().read_text())
        fresh_s = FRESH_OVERLOADED_S if kept["overloaded"] else FRESH_S
        if 0 <= time.time() - kept["time_s"] < fresh_s:
            return {**kept, "cached": True}
    return None


def probe(refresh: bool = False, timeout_s: float = 60.0, *, locked: bool = False) -> dict[str, Any]:
    """The machine probe: kept figures up to a week old, else measured now (some 10 s at most) and kept.

    Keys carry their units; None is what this machine does not have. `spread` holds [p10, p90] of each figure.
    It queues for the device like an experiment, unless the caller has it already (locked=True).
    Raises RunError where ranks cannot run; a cache that cannot be written is no error.
    """
    kept = None if refresh else cached_probe()
    if kept is not None:
        return kept
    lock = None if locked else DeviceLock("cuda" if cuda_usable() else "cpu", "machine probe")
    if lock:
        lock.acquire()
    try:
        measured = _measure_machine(timeout_s)
    finally:
        if lock:
            lock.release()
    with contextlib.suppress(OSError, LabError):
        cache_dir().mkdir(parents=True, exist_ok=True)
        write_json(_probe_path(), measured)
    return {**measured, "cached": False}


def _measure_machine(timeout_s: float) -> dict[str, Any]:
    from mlsyslab import launch

    load, usable = load_average(), cores()["usable_cores"]
    begin = time.monotonic()
    config = {"cache_dir": str(cache_dir()), "cuda": bool(gpus())}
    figures = launch.call("mlsyslab.probe:probe_rank", config, ranks=2, timeout_s=timeout_s)[0]
    return {
        **figures,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "time_s": time.time(),
        "probe_s": time.monotonic() - begin,
        "load_average": load,
        "overloaded": load is not None and load > usable,
    }


def torch_has_cuda() -> bool | None:
    """Whether the installed torch is a CUDA build, by its version; None where the version does not say."""
    build = re.search(r"\+(cpu|cu|rocm)", version_of("torch") or "")
    return build.group(1) != "cpu" if build else None


def cuda_usable(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether device="auto" will be a GPU here, told without importing torch."""
    visible = environ.get("CUDA_VISIBLE_DEVICES", "0").strip() not in ("", "-1")
    return visible and bool(gpus()) and torch_has_cuda() is not False


# ---- the environment of a run


def git_state(folder: Path | None = None) -> dict[str, Any] | None:
    """{"commit", "dirty"} of the repository around `folder` (the current one); None outside of any."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, timeout=5, check=True
        ).stdout

    try:
        commit = git("rev-parse", "HEAD").strip()
        return {"commit": commit, "dirty": bool(git("status", "--porcelain", "--untracked-files=no").strip())}
    except (OSError, subprocess.SubprocessError):
        return None


def environment(device: str, *, measure: bool = False) -> dict[str, Any]:
    """What environment.json holds: the circumstances under which a run's figures are true.

    `probe` has the kept figures, or None; with measure=True they are measured where none are kept (not inside a
    rank). Where that fails `probe_error` says why: a run does not fail for it.
    """
    figures, trouble = None, None
    try:
        figures = probe(locked=True) if measure else cached_probe()
    except LabError as error:
        trouble = str(error)
    here = limits()
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "device": device,
        "backend": "nccl" if device.startswith("cuda") else "gloo",
        "mlsyslab": version_of("mlsyslab"),
        "python": platform.python_version(),
        "torch": version_of("torch"),
        "numpy": version_of("numpy"),
        "load_average": here["load_average"],
        "limits": here,
        "gpus": gpus(),
        "containers": containers(),
        "git": git_state(),
        "probe": figures,
        "probe_error": trouble,
    }
