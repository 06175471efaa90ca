"""Calibrated work is real work, and reaches its target; a pace is a pace."""

from __future__ import annotations

import time

import pytest
import torch

from mlsyslab import workloads
from mlsyslab.contract import RunError

IMAGES = torch.zeros(4, 3, 160, 160, dtype=torch.uint8)


def cpu_seconds(model: workloads.PatchModel, repeat: int = 3) -> float:
    model(IMAGES).sum().backward()
    began = time.thread_time()
    for _ in range(repeat):
        model(IMAGES).sum().backward()
    return (time.thread_time() - began) / repeat


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_compute_reaches_its_target_in_cpu_seconds():
    model = workloads.PatchModel(32)
    measured = workloads.calibrate(model, 4, 0.2, torch.device("cpu"))
    assert measured["model_alone_s"] < 0.2
    assert model.passes > 0
    assert cpu_seconds(model) == pytest.approx(0.2, rel=0.4)


def test_without_a_target_there_is_no_extra_work():
    model = workloads.PatchModel(32)
    workloads.calibrate(model, 4, 0.0, torch.device("cpu"))
    assert model.passes == 0


def test_a_target_below_the_model_is_refused():
    with pytest.raises(RunError, match="less than the model alone"):
        workloads.calibrate(workloads.PatchModel(512), 4, 0.0005, torch.device("cpu"))


def test_extra_work_changes_neither_output_nor_gradient():
    torch.manual_seed(0)
    plain = workloads.PatchModel(32)
    busy = workloads.PatchModel(32)
    busy.load_state_dict(plain.state_dict())
    busy.passes, busy.scratch = 3, torch.ones(1000)
    paced = workloads.PatchModel(32, pacer=workloads.Pacer(0.03, 4))
    paced.load_state_dict(plain.state_dict())
    grads = []
    for model in (plain, busy, paced):
        out = model(IMAGES)
        out.square().sum().backward()
        grads.append((out.detach(), model.embed.weight.grad))
    for out, grad in grads[1:]:
        assert torch.equal(out, grads[0][0])
        assert torch.equal(grad, grads[0][1])


def test_a_pace_lasts_at_least_its_time_a_third_of_it_forward_and_uses_little_cpu():
    model = workloads.PatchModel(16, pacer=workloads.Pacer(0.6, 4))
    model(IMAGES).sum().backward()
    wall, cpu = time.perf_counter(), time.thread_time()
    out = model(IMAGES)
    forward_s = time.perf_counter() - wall
    out.sum().backward()
    total_s = time.perf_counter() - wall
    assert forward_s >= 0.2
    assert total_s - forward_s >= 0.4
    assert time.thread_time() - cpu < 0.5 * total_s


def test_ballast_gives_dense_gradients_of_the_size_asked_for():
    model = workloads.PatchModel(32, gradient_bytes=4e6)
    model(IMAGES).sum().backward()
    size = sum(p.grad.numel() * 4 for p in model.parameters())
    assert size == pytest.approx(4e6, rel=0.1)


def test_the_model_learns_the_classes():
    from mlsyslab import jpegs

    torch.manual_seed(0)
    images = [jpegs.photograph(i) for i in range(40)]
    data = jpegs.JpegFolder.__new__(jpegs.JpegFolder)
    import numpy as np

    data.rng = np.random.default_rng(0)
    x = torch.stack([data.decode(raw, i) for i, raw in enumerate(images)])
    y = torch.arange(40) % jpegs.CLASSES
    model = workloads.PatchModel(64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(40):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_python_work_spends_its_cpu_seconds():
    began = time.thread_time()
    assert workloads.python_work(0.1) > 1
    assert time.thread_time() - began == pytest.approx(0.1, rel=0.2)
