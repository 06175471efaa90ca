"""The machine probe, inside rank processes: a few seconds of matmul, copy, all-reduce, JPEG decode, disk and GPU.

Each section warms up, repeats for a fixed short time and gives the median; `spread` has [p10, p90]. On a machine
that others use, the median of a second is an estimate, not a constant: `overloaded` in `hardware.probe` says so.
"""

from __future__ import annotations

import contextlib
import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

PROBE_VERSION = 1  # raise it when a figure changes its meaning: kept figures are then measured again
SECTION_S = 0.4
MATMUL_SIZE = 1024
COPY_BYTES = 64_000_000
ALLREDUCE_BYTES = 32_000_000
DISK_BYTES = 32_000_000
LOOP_OPERATIONS = 20_000
PHOTO_SIZE = (500, 375)


class Figures:
    """Collects the median of each section, and beside it [p10, p90]."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"spread": {}}

    def seconds(self, name: str, times_s: Sequence[float]) -> None:
        ordered = sorted(times_s)
        self.values[name] = statistics.median(ordered)
        self.values["spread"][name] = [ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]]

    def rate(self, name: str, amount: float, times_s: Sequence[float]) -> None:
        """amount / seconds of each repetition."""
        self.seconds(name, [amount / max(seconds, 1e-9) for seconds in times_s])

    def absent(self, *names: str) -> None:
        self.values.update(dict.fromkeys(names))


def repeat(work: Callable[[], object], for_s: float = SECTION_S, least: int = 3) -> list[float]:
    """Seconds of each call, for about `for_s` and at least `least` calls, after one call that is not counted."""
    work()
    times_s: list[float] = []
    end = time.perf_counter() + for_s
    while len(times_s) < least or time.perf_counter() < end:
        begin = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - begin)
    return times_s


def probe_rank(config: dict[str, Any], out: Path) -> dict[str, Any]:
    """A rank's part. Rank 0 returns all figures, the others nothing of interest; `out` is not used.

    config: cache_dir, where the disk is measured; cuda, whether to measure the GPU.
    """
    import torch

    from mlsyslab.ranks import rank_context

    torch.set_num_threads(1)
    context, figures = rank_context(), Figures()
    if context.world > 1:
        measure_allreduce(figures, context)
    else:
        figures.absent("allreduce_bytes_per_s", "allreduce_latency_s")
    if context.rank == 0:  # alone from here on: the others have returned
        measure_compute(figures)
        measure_input(figures)
        measure_disk(figures, Path(config["cache_dir"]))
        measure_gpu(figures, wanted=bool(config.get("cuda")))
    return figures.values


def measure_allreduce(figures: Figures, context: Any) -> None:
    """Algorithm bandwidth (buffer bytes / seconds) of 32 MB, and the seconds of 4 bytes, over gloo."""
    import torch
    import torch.distributed as dist

    from mlsyslab.ranks import init_process_group

    init_process_group(context, backend="gloo", timeout_s=30)
    for name, count in (("allreduce_bytes_per_s", ALLREDUCE_BYTES // 4), ("allreduce_latency_s", 1)):
        buffer = torch.zeros(count)
        times_s = _together(lambda tensor=buffer: dist.all_reduce(tensor), most=200)  # type: ignore[misc]  # mypy cannot infer a default's type
        if count > 1:
            figures.rate(name, ALLREDUCE_BYTES, times_s)
        else:
            figures.seconds(name, times_s)


def _together(collective: Callable[[], object], most: int) -> list[float]:
    """Time a collective as often as fits; every rank must agree how often, so rank 0 decides."""
    import torch
    import torch.distributed as dist

    warm_s = statistics.median(repeat(collective, for_s=0, least=3))
    count = torch.tensor([min(most, max(5, int(2 * SECTION_S / max(warm_s, 1e-6))))])
    dist.broadcast(count, src=0)
    return repeat(collective, for_s=0, least=int(count))


def measure_compute(figures: Figures) -> None:
    """One thread: float32 matmul (2 n^3 operations), a copy (bytes of the buffer, each read and written), a loop."""
    import torch

    left, right = torch.rand(2, MATMUL_SIZE, MATMUL_SIZE)
    result = torch.empty(MATMUL_SIZE, MATMUL_SIZE)
    times_s = repeat(lambda: torch.mm(left, right, out=result))
    figures.rate("matmul_flops_per_s", 2 * MATMUL_SIZE**3, times_s)
    source = torch.ones(COPY_BYTES // 4)
    target = torch.empty_like(source)
    figures.rate("copy_bytes_per_s", COPY_BYTES, repeat(lambda: target.copy_(source)))
    figures.rate("python_ops_per_s", LOOP_OPERATIONS, repeat(_python_loop, for_s=SECTION_S / 2))


def _python_loop() -> int:
    total = 0
    for number in range(LOOP_OPERATIONS):
        total += number & 7
    return total


def photograph(size: tuple[int, int] = PHOTO_SIZE) -> bytes:
    """A JPEG that costs about what a photograph costs: broad shapes, edges and grain; always the same bytes."""
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(7)
    picture = np.zeros((size[1], size[0], 3))
    for cells, weight in ((4, 0.5), (16, 0.25), (64, 0.15)):  # each octave is finer and fainter
        coarse = Image.fromarray(noise.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
        picture += weight * np.asarray(coarse.resize(size, Image.Resampling.BICUBIC))
    picture += noise.normal(0, 8, picture.shape)
    file = io.BytesIO()
    Image.fromarray(picture.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def measure_input(figures: Figures) -> None:
    """Seconds to decode one 500 x 375 JPEG and resize it to 224 x 224."""
    from PIL import Image

    data = photograph()

    def decode() -> None:
        Image.open(io.BytesIO(data)).convert("RGB").resize((224, 224), Image.Resampling.BILINEAR)

    figures.seconds("jpeg_decode_s", repeat(decode))


def measure_disk(figures: Figures, folder: Path) -> None:
    """Bytes a second of a sequential read in `folder`; `disk_note` says whether they came from storage."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(os.urandom(DISK_BYTES))
            file.flush()
            os.fsync(file.fileno())
            before = _storage_read_bytes()
            times_s = list(_cold_reads(file.fileno()))
            after = _storage_read_bytes()
    except OSError as error:
        figures.absent("disk_read_bytes_per_s")
        figures.values["disk_note"] = f"not measured: {error.strerror}"
        return
    figures.rate("disk_read_bytes_per_s", DISK_BYTES, times_s)
    figures.values["disk_note"] = _disk_note(before, after, len(times_s) * DISK_BYTES)


def _cold_reads(fd: int) -> Iterator[float]:
    """Seconds of each read of the whole file, the page cache asked to forget it first."""
    buffer = bytearray(1 << 20)
    end = time.perf_counter() + 2 * SECTION_S
    while True:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        begin, offset = time.perf_counter(), 0
        while got := os.preadv(fd, [buffer], offset):
            offset += got
        yield time.perf_counter() - begin
        if time.perf_counter() > end:
            return


def _storage_read_bytes() -> int | None:
    """Bytes that this process caused storage to deliver (Linux, /proc/self/io)."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path("/proc/self/io").read_text()
        return int(text.partition("\nread_bytes:")[2].split()[0])
    return None


def _disk_note(before: int | None, after: int | None, expected: int) -> str:
    if before is None or after is None:
        return "unknown whether the page cache answered"
    share = (after - before) / expected
    return "read from storage" if share > 0.9 else f"page cache answered {1 - share:.0%} of the bytes"


GPU_FIGURES = (
    "gpu_matmul_flops_per_s",
    "gpu_float32_matmul_flops_per_s",
    "gpu_matmul_dtype",
    "gpu_copy_bytes_per_s",
    "gpu_h2d_bytes_per_s",
    "gpu_h2d_pageable_bytes_per_s",
    "gpu_launch_s",
)


def measure_gpu(figures: Figures, *, wanted: bool) -> None:
    """The first CUDA device: half-precision matmul, device copy, host-to-device copies, seconds to launch a kernel."""
    import torch

    figures.absent(*GPU_FIGURES)
    if not wanted or not torch.cuda.is_available():
        return
    dtype = torch.bfloat16 if torch.cuda.get_device_capability()[0] >= 8 else torch.float16
    size = 4096
    left, right = torch.rand(2, size, size, device="cuda").to(dtype)
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target, pageable = torch.empty_like(source), torch.empty(COPY_BYTES, dtype=torch.uint8)
    pinned = pageable.pin_memory()
    figures.values["gpu_matmul_dtype"] = str(dtype).removeprefix("torch.")
    figures.rate("gpu_matmul_flops_per_s", 2 * size**3, _on_device(lambda: left @ right))
    left, right = torch.rand(2, size, size, device="cuda")
    figures.rate("gpu_float32_matmul_flops_per_s", 2 * size**3, _on_device(lambda: left @ right))
    figures.rate("gpu_copy_bytes_per_s", COPY_BYTES, _on_device(lambda: target.copy_(source)))
    copy_in = lambda host: lambda: target.copy_(host, non_blocking=True)  # noqa: E731  two of a kind
    figures.rate("gpu_h2d_bytes_per_s", COPY_BYTES, _on_device(copy_in(pinned)))
    figures.rate("gpu_h2d_pageable_bytes_per_s", COPY_BYTES, _on_device(copy_in(pageable)))
    tiny = torch.zeros(1, device="cuda")
    figures.seconds("gpu_launch_s", _launches(lambda: tiny.add_(1)))


def _on_device(work: Callable[[], object]) -> list[float]:
    """Seconds of the device for each call, by a pair of events on its stream."""
    import torch

    def timed() -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times_s.append(begin.elapsed_time(end) / 1e3)

    times_s: list[float] = []
    repeat(timed, for_s=SECTION_S / 2, least=5)
    return times_s[1:]


def _launches(work: Callable[[], object]) -> list[float]:
    """Seconds of the host for a launch, the device drained after each 100 so that its queue never fills."""
    import torch

    def hundred() -> float:
        begin = time.perf_counter()
        for _ in range(100):
            work()
        seconds = time.perf_counter() - begin
        torch.cuda.synchronize()
        return seconds / 100

    return [hundred() for _ in range(21)][1:]
