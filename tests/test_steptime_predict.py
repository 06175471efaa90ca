"""The closed form against independent arithmetic, a simulation of the loader, and the real model."""

from __future__ import annotations

import dataclasses
import importlib

import pytest

from mlsyslab import steptime
from mlsyslab.labs.steptime.config import PRESETS, Config
from mlsyslab.labs.steptime.predict import REFERENCE_MACHINE, Parts, allreduce_s, exposed_s, parts

closed = importlib.import_module("mlsyslab.labs.steptime.predict")  # the package's own name is the function
MACHINE = {**REFERENCE_MACHINE, "usable_cores": 16.0}


def simulate(load_s: float, workers: int, prefetch: int, device_s: float, steps: int = 400) -> float:
    """Mean steady step of a prefetching loader, event by event: workers take turns, each keeps `prefetch` batches."""
    if workers == 0:
        return load_s + device_s
    ready: dict[int, float] = {}
    free = [0.0] * workers
    now, consumed, times = 0.0, 0, []
    requested = 0
    for step in range(steps):
        while requested < consumed + workers * prefetch + (1 if step else 0):
            worker = requested % workers
            begin = max(free[worker], now)
            free[worker] = begin + load_s
            ready[requested] = free[worker]
            requested += 1
        now = max(now, ready[step]) + device_s
        consumed = step + 1
        times.append(now)
    half = steps // 2
    return (times[-1] - times[half]) / (steps - 1 - half)


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
@pytest.mark.parametrize("device_s", [0.02, 0.12, 0.5])
def test_the_loader_model_agrees_with_an_event_simulation(workers, device_s):
    batch_s = 0.3
    step = Parts(
        load_s=batch_s / max(workers, 1),
        compute_s=device_s,
        sync_s=0,
        host_s=0,
        cores_s=0,
        cores=16,
        ahead=workers > 0,
    )
    assert step.step_s == pytest.approx(simulate(batch_s, workers, 2, device_s), rel=0.02)


def test_the_worked_example_is_three_hundred_milliseconds_with_sixty_percent_wait():
    found = closed.predict(PRESETS["worked_example"], REFERENCE_MACHINE)
    assert found.cause == "input"
    assert found.values["step_s"].expected == pytest.approx(0.300, abs=0.005)
    assert found.values["data_frac"].expected == pytest.approx(0.60, abs=0.02)


@pytest.mark.parametrize(
    ("preset", "cause"),
    [("compute_bound", "compute"), ("communication_bound", "communication"), ("host_bound", "host"), ("healthy", "healthy"),
     ("scaling", "communication"), ("quick", "input")],
)  # fmt: skip
def test_each_preset_is_predicted_as_its_name_says(preset, cause):
    assert closed.predict(PRESETS[preset], REFERENCE_MACHINE).cause == cause


def test_ranges_are_ordered_and_phases_add_up():
    for config in PRESETS.values():
        values = closed.predict(config).values
        assert all(v.low <= v.expected <= v.high for v in values.values())
        assert values["data_s"].expected <= values["step_s"].expected


def test_ring_all_reduce_by_hand():
    machine = {**MACHINE, "allreduce_bytes_per_s": 1e9, "allreduce_latency_s": 1e-3}
    assert allreduce_s(8e6, 1, machine) == 0
    assert allreduce_s(8e6, 2, machine) == pytest.approx(8e-3 + 2e-3)
    assert allreduce_s(8e6, 4, machine) == pytest.approx(1.5 * 8e-3 + 6e-3)


def test_more_ranks_than_cores_take_turns():
    many = {**MACHINE, "allreduce_latency_s": 0.0}
    few = {**many, "usable_cores": 2.0}
    assert allreduce_s(64e6, 8, few) == pytest.approx(4 * allreduce_s(64e6, 8, {**many, "usable_cores": 8.0}))


def test_overlap_hides_at_most_backward_and_never_the_last_bucket():
    assert exposed_s(0.2, 100e6, 10.0, overlap=True) == pytest.approx(0.05)
    assert exposed_s(0.2, 100e6, 0.04, overlap=True) == pytest.approx(0.17)
    assert exposed_s(0.2, 100e6, 10.0, overlap=False) == 0.2


def test_workers_beyond_the_cores_do_not_help():
    config = Config(batch_size=8, input_cost_s=0.05, compute_s=0.02, paced=True, width=64)
    steps = [
        closed.predict(dataclasses.replace(config, workers=w), REFERENCE_MACHINE).values["step_s"].expected
        for w in (1, 2, 8)
    ]
    assert steps[0] == pytest.approx(2 * steps[1], rel=0.1)
    assert steps[2] == pytest.approx(steps[1], rel=0.1)


def test_a_read_limit_sets_the_pace():
    slow = Config(batch_size=8, storage_mb_per_s=1.0, compute_s=0.05, paced=True, width=64)
    assert closed.predict(slow, MACHINE).values["step_s"].expected == pytest.approx(
        8 * closed.IMAGE_BYTES / 1e6
    )
    assert closed.predict(dataclasses.replace(slow, cache="memory"), MACHINE).cause != "input"


def test_what_if_names_the_remedy_that_helps():
    found = steptime.what_if(PRESETS["worked_example"], MACHINE)
    base = found["as it is"].expected
    assert found["free communication"].expected == pytest.approx(base)
    assert found["2x faster device"].expected == pytest.approx(base)
    assert found["2x loader workers"].expected == pytest.approx(base / 2)
    assert found["decoded samples cached"].expected < base / 2


def test_more_workers_do_not_help_a_slow_disk_and_the_cached_what_if_is_the_cached_prediction():
    slow = Config(batch_size=8, storage_mb_per_s=1.0, compute_s=0.05, paced=True, width=64)
    found = closed.what_if(slow, MACHINE)
    assert found["2x loader workers"].expected == pytest.approx(found["as it is"].expected)
    busy = Config(ranks=2, workers=2, batch_size=8, input_cost_s=0.05, compute_s=0.05, width=64)
    cached = (
        closed.predict(dataclasses.replace(busy, cache="memory"), REFERENCE_MACHINE).values["step_s"].expected
    )
    assert closed.what_if(busy, REFERENCE_MACHINE)["decoded samples cached"].expected == pytest.approx(
        cached, rel=0.1
    )


def test_a_gpu_is_bound_by_its_own_rates():
    machine = {**MACHINE, "gpu_float32_matmul_flops_per_s": 50e12, "gpu_copy_bytes_per_s": 3e12}
    on_gpu = closed.predict(PRESETS["healthy"], machine).values["compute_s"].expected
    on_cpu = (
        closed.predict(dataclasses.replace(PRESETS["healthy"], device="cpu"), machine)
        .values["compute_s"]
        .expected
    )
    assert on_gpu < on_cpu / 100


def test_pacing_and_an_unprobed_machine_are_said():
    said = " ".join(closed.predict(PRESETS["worked_example"]).assumptions)
    assert "paced" in said
    assert "not probed" in said
    assert "not probed" not in " ".join(closed.predict(PRESETS["worked_example"], MACHINE).assumptions)


def test_the_closed_forms_of_the_model_match_the_model():
    from mlsyslab import workloads

    config = Config(width=128, gradient_mb=8.0)
    model = workloads.PatchModel(config.width, gradient_bytes=config.gradient_mb * 1e6)
    assert closed.model_parameters(config) == pytest.approx(
        sum(p.numel() for p in model.parameters()), rel=1e-3
    )
    assert closed.model_flops(config) == pytest.approx(model.matmul_flops(config.batch_size), rel=1e-6)


def test_matmul_flops_match_torchs_own_counter():
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from mlsyslab import workloads

    model = workloads.PatchModel(64)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(4, 3, 160, 160, dtype=torch.uint8)).sum().backward()
    assert model.matmul_flops(4) == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_parts_count_the_cores_of_every_rank():
    two = parts(Config(ranks=2, workers=1, input_cost_s=0.02), 2, MACHINE)
    one = parts(Config(ranks=1, workers=1, input_cost_s=0.02), 1, MACHINE)
    assert two.cores_s == pytest.approx(2 * one.cores_s)
