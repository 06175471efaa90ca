"""What the tensors of this rank occupy, byte by byte, and a cap on it.

Counted are storages: each block of memory that a tensor looks into, once, from its allocation to its end. That agrees with the
allocator to a few percent under every strategy, pipelining included (docs/log.md); resident-set size does not, since the C library
keeps what was freed. On CUDA the caching allocator's own figures are used beside it.
"""

from __future__ import annotations

import ctypes
import resource
import sys
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from mlsyslab.contract import ConfigError

ROLES = ("params", "grads", "optimizer", "inputs", "other")
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # of mallopt, glibc's malloc.h


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor that may be distributed."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Storages:
    """The live storages and their bytes; `add` takes tensors as they are made, the rest follows by itself.

    The peak is noted when something is freed, and at `mark`: between two frees memory only grows.
    """

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self._refs: dict[int, weakref.ref[Any]] = {}
        self._owners: list[tuple[Iterable[torch.nn.Module], torch.optim.Optimizer | None]] = []
        self._inputs: list[torch.Tensor] = []
        self.total_bytes = 0
        self.peak: dict[str, int] = {}
        self.moment, self.peak_moment = "", ""
        self.moments: dict[str, dict[str, int]] = {}

    def adopt(self, modules: Iterable[torch.nn.Module], optimizer: torch.optim.Optimizer | None) -> None:
        """Whose parameters, gradients and optimizer state the roles are; what exists of them is counted from now on."""
        self._owners = [(list(modules), optimizer)]
        for held, _ in self._owners:
            for module in held:
                for buffer in module.buffers():
                    self.add(buffer)
        for tensors in self._held().values():
            for tensor in tensors:
                self.add(tensor)

    def inputs(self, *tensors: torch.Tensor) -> None:
        """The batch of this step."""
        self._inputs = list(tensors)
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: torch.Tensor) -> None:
        """Count the storage behind a tensor, once."""
        try:
            storage = local(tensor).untyped_storage()
        except (NotImplementedError, RuntimeError):  # a tensor without storage (sparse, functional wrappers)
            return
        key = storage._cdata
        if key in self._refs and self._refs[key]() is not None:
            return
        self._refs[key] = weakref.ref(storage, lambda _, key=key: self._freed(key))  # type: ignore[misc]  # mypy cannot infer a default's type
        self._set(key, storage.nbytes())

    def resized(self, storage: Any) -> None:
        """FSDP frees and allocates by resizing a storage in place."""
        if storage._cdata in self._refs:
            self._set(storage._cdata, storage.nbytes())

    def _set(self, key: int, size: int) -> None:
        change = size - self.sizes.get(key, 0)
        if change < 0:
            self._note_peak()
        self.sizes[key] = size
        self.total_bytes += change

    def _freed(self, key: int) -> None:
        if key in self.sizes:
            self._note_peak()
            self.total_bytes -= self.sizes.pop(key)
            self._refs.pop(key, None)

    def _note_peak(self) -> None:
        if self.total_bytes > self.peak.get("total", 0):
            self.peak, self.peak_moment = self.by_role(), self.moment

    def _held(self) -> dict[str, list[torch.Tensor]]:
        held: dict[str, list[torch.Tensor]] = {role: [] for role in ROLES}
        for modules, optimizer in self._owners:
            params = [p for module in modules for p in module.parameters()]
            held["params"] += params
            held["grads"] += [p.grad for p in params if p.grad is not None]
            # ZeroRedundancyOptimizer keeps the state in the optimizer that it wraps
            states = getattr(optimizer, "optim", optimizer)
            held["optimizer"] += [
                t for t in tree_leaves(dict(states.state) if states else {}) if torch.is_tensor(t)
            ]
        held["inputs"] += self._inputs
        return held

    def by_role(self) -> dict[str, int]:
        """Bytes live now, by role, and their "total"."""
        of = dict.fromkeys(ROLES, 0)
        seen: set[int] = set()
        for role, tensors in self._held().items():
            for tensor in tensors:
                self.add(tensor)  # made by C++ past every operator, as DDP's buckets are
                key = local(tensor).untyped_storage()._cdata
                if key not in seen:
                    seen.add(key)
                    of[role] += self.sizes.get(key, 0)
        of["other"] = self.total_bytes - sum(of.values())
        return {**of, "total": self.total_bytes}

    def mark(self, name: str) -> None:
        """The end of a part of the step: keep what is live, the most of it where a part comes several times."""
        self._note_peak()
        now = self.by_role()
        if now["other"] >= self.moments.get(name, {"other": -1})["other"]:
            self.moments[name] = now

    def reset(self) -> None:
        """Before the next step."""
        self.peak, self.peak_moment, self.moments = {}, "", {}


def allocated_bytes(device: torch.device) -> tuple[int, int] | None:
    """(now, peak) of the CUDA caching allocator in this process; None on a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)


def resident_bytes() -> int | None:
    """Anonymous memory of this process, as the kernel counts it (Linux); None elsewhere."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return None
    return next(
        (int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("RssAnon")), None
    )


def return_freed_memory() -> None:
    """Let the C library give freed blocks from 64 KiB on back to the kernel at once, so that a cap means live tensors."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(MMAP_THRESHOLD, 64 << 10)
            libc.mallopt(TRIM_THRESHOLD, 0)


def cap_memory(cap_bytes: int, device: torch.device) -> Callable[[], None]:
    """Let the kernel (on CUDA the allocator) refuse this process more than `cap_bytes` beyond what it has now.

    Returns what lifts the cap. Call it before the tensors to be counted are made. Raises ConfigError where it cannot be had.
    """
    if device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / whole), device)
        return lambda: torch.cuda.set_per_process_memory_fraction(1.0, device)
    if sys.platform != "linux":
        raise ConfigError("memory_cap_mb needs Linux or a GPU; set memory_cap_mb=0 to run without a cap")
    return_freed_memory()
    before = resource.getrlimit(resource.RLIMIT_DATA)
    text = Path("/proc/self/status").read_text()
    now = next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("VmData"))
    wanted = now + cap_bytes
    if before[1] != resource.RLIM_INFINITY and wanted > before[1]:
        raise ConfigError(f"memory_cap_mb={cap_bytes / 1e6:g} is above what this process may take; lower it")
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, before[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_DATA, before)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory was refused."""
    words = ("can't allocate memory", "not enough memory", "out of memory", "Cannot allocate memory")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        word in str(error) for word in words
    )
