"""What this process may use of its machine: cores, memory, shared memory, open files; containers included.

Every reader takes the root of the file system, so that a container can be imagined in a test. Sources of the files'
meaning: Linux Documentation/admin-guide/cgroup-v2.rst and cgroup-v1, man 7 cgroups.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path("/")
NO_LIMIT_BYTES = 1 << 60  # cgroup v1 says "no limit" with a number near 2**63
MOST_WORKERS = 8


def _text(path: Path) -> str:
    """The file's text, "" where it is absent or may not be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def cgroup_dirs(root: Path, controller: str) -> Iterator[Path]:
    """Folders whose limits hold for this process: its own control group and all above it, cgroup v1 and v2.

    Inside a container the path in /proc may be the host's while the mount shows the group itself: the mount's root
    is always among them. A folder may come twice, under two names.
    """
    base = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        names, _, inner = line.partition(":")[2].partition(":")
        if names and controller not in names.split(","):
            continue
        path = PurePosixPath(inner)
        for mount in (base / names, base / controller) if names else (base, base / "unified"):
            for part in (path, *path.parents):
                if ".." not in part.parts and part.is_absolute():
                    yield mount / part.relative_to("/")


def cpu_quota(root: Path = ROOT) -> float | None:
    """Cores that the tightest control group allows; None without a quota."""
    quotas = []
    for folder in cgroup_dirs(root, "cpu"):
        words = _text(folder / "cpu.max").split() or [
            _text(folder / f"cpu.cfs_{what}_us").strip() for what in ("quota", "period")
        ]
        with contextlib.suppress(ValueError):  # "max", or no such file
            quotas.append(int(words[0]) / int(words[1]))
    return min((quota for quota in quotas if quota > 0), default=None)


def cgroup_memory(root: Path = ROOT) -> tuple[int, int] | None:
    """(limit, still free) in bytes under the tightest control groups; None without a limit. Idle page cache is free."""
    found = []
    for folder in cgroup_dirs(root, "memory"):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            with contextlib.suppress(ValueError):  # "max", or no such file
                limit = int(_text(folder / limit_name))
                cache = re.search(r"^(?:total_)?inactive_file (\d+)", _text(folder / "memory.stat"), re.M)
                used = int(_text(folder / used_name) or 0) - (int(cache.group(1)) if cache else 0)
                if limit < NO_LIMIT_BYTES:
                    found.append((limit, max(0, limit - used)))
    return (min(limit for limit, _ in found), min(free for _, free in found)) if found else None


def _memory(root: Path) -> dict[str, int | None]:
    total = available = None
    with contextlib.suppress(ImportError, OSError):
        import psutil

        memory = psutil.virtual_memory()
        total, available = memory.total, memory.available
    group = cgroup_memory(root)
    if group and available is not None:
        available = min(available, group[1])
    return {
        "memory_bytes": total,
        "memory_available_bytes": available,
        "cgroup_memory_bytes": group[0] if group else None,
    }


def cores(root: Path = ROOT) -> dict[str, Any]:
    """Core count, affinity mask, quota, and `usable_cores`, the least of them."""
    count = os.cpu_count() or 1
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    quota = cpu_quota(root)
    usable = min(float(value) for value in (count, affinity, quota) if value is not None)
    return {"cores": count, "affinity_cores": affinity, "quota_cores": quota, "usable_cores": usable}


def _shm(root: Path) -> dict[str, int | None]:
    try:
        usage = shutil.disk_usage(root / "dev/shm")
    except OSError:
        return {"shm_bytes": None, "shm_free_bytes": None}
    return {"shm_bytes": usage.total, "shm_free_bytes": usage.free}


def _open_files() -> dict[str, int | None]:
    """Soft and hard limit on open files; None is unlimited or unknown."""
    try:
        import resource
    except ImportError:
        return {"open_files": None, "open_files_hard": None}
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (None if limit == resource.RLIM_INFINITY else limit for limit in limits)
    return {"open_files": soft, "open_files_hard": hard}


def _cpu_model(root: Path) -> str | None:
    found = re.search(r"^model name\s*:\s*(.+)$", _text(root / "proc/cpuinfo"), re.M)
    return found.group(1).strip() if found else platform.processor() or None


def load_average() -> float | None:
    """Mean number of processes that ran or wanted to, over the last minute."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def limits(root: Path = ROOT) -> dict[str, Any]:
    """What this process may use. Cores, bytes; None where the system sets or tells nothing.

    usable_cores: the least of the core count, the affinity mask and the control group's quota, so a container with
    a quota of 2 CPUs on 64 cores has 2.0.
    """
    return {
        "hostname": socket.gethostname(),
        "platform": platform.platform(),
        "cpu_model": _cpu_model(root),
        **cores(root),
        **_memory(root),
        **_shm(root),
        **_open_files(),
        "load_average": load_average(),
    }


def default_workers(ranks: int = 1, root: Path = ROOT) -> int:
    """Loader workers of each rank: usable cores less one for each training process, shared out; 1 to 8."""
    spare = math.floor(cores(root)["usable_cores"]) - ranks
    return max(1, min(MOST_WORKERS, spare // ranks))


def containers(root: Path = ROOT, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Signs of a container or a hosted notebook, by name."""
    text = _text(root / "proc/self/cgroup")
    signs = {
        "docker": (root / ".dockerenv").exists() or "docker" in text,
        "podman": (root / "run/.containerenv").exists(),
        "kubernetes": "KUBERNETES_SERVICE_HOST" in environ or "kubepods" in text,
        "colab": "COLAB_RELEASE_TAG" in environ,
        "slurm": "SLURM_JOB_ID" in environ,
    }
    return [name for name, seen in signs.items() if seen]
