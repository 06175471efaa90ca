"""A JPEG data set on disk, made once, and a loader that really reads and decodes it.

Cost is reached by decoding again, never by sleeping; a read limit blocks as a slow disk does.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from mlsyslab import hardware
from mlsyslab.contract import RunError
from mlsyslab.ranks import die_with_parent
from mlsyslab.records import disk_error

CLASSES = 10
CROP = 160  # pixels; a sample is [3, CROP, CROP] bytes
RESIZE = 176
# The shapes of photographs in common data sets: ImageNet's mean is about 500 × 375 and 110 kB.
SHAPES = ((500, 375), (375, 500), (500, 333), (640, 480), (400, 300), (500, 375))


def photograph(index: int) -> bytes:
    """A JPEG with a photograph's size, smooth regions and grain, the same on every machine for one `index`.

    Its class, `index % CLASSES`, sets the colour cast, so that a model can learn it.
    """
    rng = np.random.default_rng(index)
    width, height = SHAPES[index % len(SHAPES)]
    coarse = rng.integers(0, 200, (height // 24, width // 24, 3), dtype=np.uint8)
    angle = 2 * math.pi * (index % CLASSES) / CLASSES
    cast = 27 * (1 + np.array([math.cos(angle), math.cos(angle - 2.1), math.cos(angle + 2.1)]))
    smooth = Image.fromarray((coarse + cast).clip(0, 255).astype(np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    grain = rng.integers(-24, 25, (height, width, 1), dtype=np.int16)
    pixels = (np.asarray(smooth).astype(np.int16) + grain).clip(0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=86)
    return buffer.getvalue()


def image_name(index: int) -> str:
    """The file name of image `index`."""
    return f"{index:06d}.jpg"


def image_path(folder: Path, index: int) -> Path:
    """Where image `index` lies, a thousand a folder."""
    return folder / f"{index // 1000:03d}" / image_name(index)


def _make_images(job: tuple[str, Sequence[int]]) -> int:
    folder = Path(job[0])
    for index in job[1]:
        target = image_path(folder, index)
        part = target.with_suffix(f".{os.getpid()}.part")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(photograph(index))
            part.replace(target)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise disk_error(error, target) from error
    return len(job[1])


def jpeg_files(images: int, progress: Callable[[int, int], None] | None = None) -> Path:
    """The folder that holds images 0..images-1, made where they are missing (about 5 ms each and core, once).

    Ranks that ask at the same time wait for the one that makes them. Raises RunError where the cache folder
    cannot be written. `progress(made, missing)` is called now and then.
    """
    folder = hardware.cache_dir() / "jpeg-v1"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise disk_error(error, folder) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        there = {name for _, _, names in os.walk(folder) for name in names}
        missing = [index for index in range(images) if image_name(index) not in there]
        chunks = [(str(folder), missing[at : at + 50]) for at in range(0, len(missing), 50)]
        cores = max(1, int(hardware.limits()["usable_cores"]))
        if len(chunks) == 1:
            _make_images(chunks[0])
        elif chunks:
            context = multiprocessing.get_context("fork")
            with ProcessPoolExecutor(min(cores, 16), mp_context=context, initializer=die_with_parent) as pool:
                made = 0
                for count in pool.map(_make_images, chunks):
                    made += count
                    if progress:
                        progress(made, len(missing))
    finally:
        os.close(lock)
    return folder


class ReadLimit:
    """A token bucket over all loader workers of a rank: reads wait until their bytes fit into `bytes_per_s`.

    The wait blocks without using a core, as a slow disk does. The rate is a limit, not a model of latency.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at = multiprocessing.get_context("fork").Value("d", 0.0)

    def wait(self, size_bytes: int) -> None:
        with self._free_at.get_lock():
            done = max(time.monotonic(), self._free_at.value) + size_bytes / self.bytes_per_s
            self._free_at.value = done
        time.sleep(max(0.0, done - time.monotonic()))


class JpegFolder(Dataset[tuple[torch.Tensor, int, torch.Tensor]]):
    """Samples (image [3, CROP, CROP] uint8, label, cost), cost = float64 [4]: seconds spent reading, CPU seconds,
    wall seconds, bytes read.

    cost_s: CPU seconds to spend on decoding and augmenting a sample; the JPEG is decoded again until they are
    spent, and an overshoot is taken off the next sample. 0 decodes once.
    """

    def __init__(
        self, folder: Path, images: int, *, cost_s: float = 0.0, limit: ReadLimit | None = None, seed: int = 0
    ) -> None:
        self.folder, self.images, self.cost_s, self.limit = folder, images, cost_s, limit
        self.rng = np.random.default_rng(seed)
        self.debt_s = 0.0
        self.cached: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return self.images

    def read(self, index: int) -> bytes:
        path = image_path(self.folder, index)
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise RunError(
                f"cannot read {path}: {error.strerror}; delete the file, it is made again at the next start"
            ) from error
        if self.limit:
            self.limit.wait(len(raw))
        return raw

    def decode(self, raw: bytes, index: int) -> torch.Tensor:
        """Decode, resize, crop at random, flip at random: [3, CROP, CROP] uint8."""
        try:
            image = (
                Image.open(io.BytesIO(raw)).convert("RGB").resize((RESIZE, RESIZE), Image.Resampling.BILINEAR)
            )
        except OSError as error:
            path = image_path(self.folder, index)
            raise RunError(
                f"{path} is no complete JPEG ({error}); delete the file, it is made again at the next start"
            ) from error
        left, top = self.rng.integers(0, RESIZE - CROP, 2)
        pixels = np.asarray(image)[top : top + CROP, left : left + CROP]
        if self.rng.random() < 0.5:
            pixels = pixels[:, ::-1]
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))

    def fill_cache(self, indices: Sequence[int]) -> None:
        """Decode each sample once; workers that are forked later share these pages and never write to them."""
        for index in indices:
            if index not in self.cached:
                self.cached[index] = self.decode(self.read(index), index)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, torch.Tensor]:
        wall, cpu = time.perf_counter(), time.thread_time()
        if index in self.cached:
            spent = torch.tensor([0.0, 0.0, time.perf_counter() - wall, 0.0], dtype=torch.float64)
            return self.cached[index], index % CLASSES, spent
        raw = self.read(index)
        read_s = time.perf_counter() - wall
        image = self.decode(raw, index)
        until = cpu + self.cost_s - self.debt_s
        while time.thread_time() < until:
            image = self.decode(raw, index)
        if self.cost_s:
            self.debt_s = time.thread_time() - until
        spent = torch.tensor(
            [read_s, time.thread_time() - cpu, time.perf_counter() - wall, len(raw)], dtype=torch.float64
        )
        return image, index % CLASSES, spent


class StepSampler(Sampler[list[int]]):
    """Batches of this rank's share of a seeded shuffle, as many as asked for, epoch after epoch.

    Batch k of the whole job is split over the ranks, so that no sample is seen twice within an epoch.
    """

    def __init__(
        self, images: int, batch_size: int, batches: int, *, rank: int, world: int, seed: int
    ) -> None:
        self.images, self.batch_size, self.batches = images, batch_size, batches
        self.rank, self.world, self.seed = rank, world, seed

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        share = max(self.images // self.world, self.batch_size)
        for batch in range(self.batches):
            epoch, start = divmod(batch * self.batch_size, share - share % self.batch_size or share)
            order = self._order(epoch)[self.rank :: self.world]
            yield [int(order[(start + i) % len(order)]) for i in range(self.batch_size)]

    @lru_cache(maxsize=2)  # noqa: B019 - a sampler lives as long as its run
    def _order(self, epoch: int) -> np.ndarray[Any, Any]:
        return np.random.default_rng([self.seed, epoch]).permutation(self.images)


def _start_worker(number: int) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    info = get_worker_info()
    if info:  # a forked generator would crop and flip alike in every worker
        data: Any = info.dataset
        data.rng = np.random.default_rng([info.seed % 2**32, number])


def make_loader(
    dataset: JpegFolder, sampler: Sampler[Any], *, workers: int, prefetch: int, pinned: bool = False
) -> DataLoader[Any]:
    """A DataLoader with real worker processes that die with the rank."""
    more: dict[str, Any] = {"prefetch_factor": prefetch, "multiprocessing_context": "fork"} if workers else {}
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=workers,
        pin_memory=pinned,
        worker_init_fn=_start_worker,
        **more,
    )


def close_loader(iterator: Any) -> None:
    """Stop a DataLoader iterator's workers now, not when the garbage collector comes round."""
    with contextlib.suppress(Exception):
        iterator._shutdown_workers()
