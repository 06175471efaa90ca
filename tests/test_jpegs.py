"""The data set is deterministic, complete or absent; the loader's costs are real work."""

from __future__ import annotations

import io
import multiprocessing
import time

import numpy as np
import pytest
import torch
from PIL import Image

from mlsyslab import jpegs
from mlsyslab.contract import RunError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MLSYSLAB_CACHE", str(tmp_path))
    return jpegs.jpeg_files(20)


def test_images_are_the_same_every_time_and_look_like_photographs_in_size():
    assert jpegs.photograph(7) == jpegs.photograph(7)
    sizes = [len(jpegs.photograph(i)) for i in range(24)]
    assert len({Image.open(io.BytesIO(jpegs.photograph(i))).size for i in range(6)}) >= 4
    assert 40_000 < np.mean(sizes) < 150_000
    assert max(sizes) > 1.3 * min(sizes)


def test_only_missing_images_are_made(folder):
    first = jpegs.image_path(folder, 0)
    stamp = first.stat().st_mtime_ns
    jpegs.image_path(folder, 5).unlink()
    jpegs.jpeg_files(25)
    assert first.stat().st_mtime_ns == stamp
    assert all(jpegs.image_path(folder, i).exists() for i in range(25))
    assert not list(folder.rglob("*.part"))


def test_many_images_are_made_by_several_processes_and_progress_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("MLSYSLAB_CACHE", str(tmp_path))
    told: list[tuple[int, int]] = []
    jpegs.jpeg_files(120, lambda made, missing: told.append((made, missing)))
    assert told[-1] == (120, 120)


def test_a_cache_that_cannot_be_written_is_one_clear_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLSYSLAB_CACHE", str(tmp_path / "file"))
    with pytest.raises(RunError, match="cannot write"):
        jpegs.jpeg_files(3)


def test_a_sample_has_the_models_shape_and_its_cost(folder):
    image, label, cost = jpegs.JpegFolder(folder, 20)[13]
    assert image.shape == (3, jpegs.CROP, jpegs.CROP)
    assert image.dtype == torch.uint8
    assert label == 3
    read_s, cpu_s, wall_s, size = cost.tolist()
    assert 0 <= read_s <= wall_s
    assert cpu_s > 0
    assert size == jpegs.image_path(folder, 13).stat().st_size


def test_the_cost_of_a_sample_is_cpu_time_and_right_on_average(folder):
    data = jpegs.JpegFolder(folder, 20, cost_s=0.03)
    began = time.thread_time()
    for index in range(10):
        data[index]
    assert time.thread_time() - began == pytest.approx(0.3, rel=0.1)


def test_a_cached_sample_costs_no_decoding(folder):
    data = jpegs.JpegFolder(folder, 20, cost_s=0.05)
    data.fill_cache([4, 4, 5])
    began = time.thread_time()
    image, _, cost = data[4]
    assert time.thread_time() - began < 0.05
    assert cost.tolist()[0] == 0.0
    assert torch.equal(image, data.cached[4])


def read_some(limit: jpegs.ReadLimit, count: int) -> None:
    for _ in range(count):
        limit.wait(10_000)


def test_a_read_limit_is_shared_by_the_workers_and_costs_no_cpu():
    limit = jpegs.ReadLimit(200_000)
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=read_some, args=(limit, 5)) for _ in range(2)]
    began, cpu = time.monotonic(), time.process_time()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert time.monotonic() - began >= 0.5  # 100 kB at 200 kB/s
    assert time.process_time() - cpu < 0.4


def test_an_unreadable_file_is_named(folder):
    jpegs.image_path(folder, 2).unlink()
    with pytest.raises(RunError, match=r"000002\.jpg: No such file"):
        jpegs.JpegFolder(folder, 20)[2]


def test_ranks_share_an_epoch_without_seeing_a_sample_twice():
    seen = []
    for rank in range(4):
        for batch in jpegs.StepSampler(400, 5, 20, rank=rank, world=4, seed=1):
            seen += batch
    assert sorted(seen) == list(range(400))


def test_the_next_epoch_has_another_order_and_seeds_differ():
    batches = list(jpegs.StepSampler(40, 8, 10, rank=0, world=1, seed=1))
    assert sorted(index for batch in batches[:5] for index in batch) == list(range(40))
    assert batches[:5] != batches[5:]
    assert batches[0] != next(iter(jpegs.StepSampler(40, 8, 10, rank=0, world=1, seed=2)))


def test_a_batch_is_never_short_even_when_the_share_is_small():
    assert {len(b) for b in jpegs.StepSampler(16, 8, 12, rank=3, world=4, seed=0)} == {8}
