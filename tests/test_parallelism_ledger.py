"""The ledger and the traffic in closed form: published figures, and what must grow or shrink with what. Real runs: test_parallelism_ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlsyslab.labs.parallelism.config import STATE_BYTES, Layout
from mlsyslab.labs.parallelism.ledger import largest, ledger
from mlsyslab.labs.parallelism.shapes import PUBLISHED, TRAINED, Model
from mlsyslab.labs.parallelism.traffic import Collective, buckets, comm_bytes, traffic, wire_bytes

MODEL = TRAINED["17M"]
EIGHT = Layout(dp=8, batch=8, seq=64)


def test_the_whole_state_is_sixteen_bytes_a_parameter_with_adam() -> None:
    assert ledger(MODEL, EIGHT).state_bytes == 16 * MODEL.params


@pytest.mark.parametrize("optimizer", STATE_BYTES)
def test_fsdp_cuts_the_state_by_the_number_of_ranks_and_zero1_the_optimizers_part(optimizer: str) -> None:
    whole = ledger(MODEL, replace(EIGHT, optimizer=optimizer))
    assert ledger(MODEL, replace(EIGHT, optimizer=optimizer, shard="fsdp")).state_bytes == pytest.approx(
        whole.state_bytes / 8
    )
    zero1 = ledger(MODEL, replace(EIGHT, optimizer=optimizer, shard="zero1"))
    assert zero1.state_bytes == pytest.approx(8 * MODEL.params + whole.state["optimizer"] / 8)


def test_zero_of_a_7_5b_model_over_64_devices_as_published() -> None:
    """Rajbhandari et al. 2020, figure 1: 120 GB whole, 31.4 with ZeRO-1, 1.9 with ZeRO-3, for 16 bytes a parameter of which 12 are the
    optimizer's. Ours keeps float32 gradients (4 bytes) and 8 of Adam, so ZeRO-1 leaves 8 + 8/64; the whole and ZeRO-3 are the same."""
    model = Model(name="7.5B", layers=78, width=2816, heads=22, kv_heads=22, ffn=7509, vocab=32_000, seq=1024)
    assert model.params == pytest.approx(7.5e9, rel=0.02)
    each = 7.5e9 / model.params
    at = Layout(dp=64, batch=64, seq=1024, precision="mixed")
    assert ledger(model, at).state_bytes * each / 1e9 == pytest.approx(120, rel=0.01)
    assert ledger(model, replace(at, shard="fsdp")).state_bytes * each / 1e9 == pytest.approx(1.9, rel=0.02)
    assert ledger(model, replace(at, shard="zero1")).state_bytes * each / 1e9 == pytest.approx(
        7.5 * (8 + 8 / 64), rel=0.01
    )


def test_the_state_of_an_8b_model_falls_from_8_to_128_gpus_as_torchtitan_reports() -> None:
    """torchtitan's benchmarks (H100, 2024): 82.4 GiB reserved on 8 GPUs, 67.0 on 128, a fall of 15.4; the state's share of it is
    16 n (1/8 - 1/128) = 14.0. The rest is the allocator's."""
    state = [
        ledger(PUBLISHED["8B"], Layout(dp=n, batch=n, seq=8192, shard="fsdp", precision="mixed")).state_bytes
        for n in (8, 128)
    ]
    assert (state[0] - state[1]) / 2**30 == pytest.approx(14.0, rel=0.01)
    assert (state[0] - state[1]) / 2**30 == pytest.approx(15.4, rel=0.1)


@pytest.mark.parametrize("change", [{}, {"shard": "fsdp"}, {"shard": "fsdp", "precision": "mixed"}, {"shard": "zero1", "precision": "mixed"},
                                    {"dp": 1, "tp": 8}, {"dp": 1, "pp": 8, "microbatches": 8}, {"dp": 4, "tp": 2, "shard": "fsdp"}])  # fmt: skip
def test_checkpointing_never_holds_more_and_the_peak_bounds_every_moment(change: dict[str, object]) -> None:
    layout = replace(EIGHT, **change)  # type: ignore[arg-type]  # values of several fields
    whole, less = largest(MODEL, layout), largest(MODEL, replace(layout, checkpointing=True))
    assert less.peak_bytes <= whole.peak_bytes
    for found in (whole, less):
        assert all(sum(moment.values()) <= found.peak_bytes for moment in found.moments.values())
        assert all(size >= 0 for moment in found.moments.values() for size in moment.values())


def test_activations_grow_with_the_batch_and_the_state_does_not() -> None:
    small, large = (ledger(MODEL, replace(EIGHT, batch=8 * n, shard="fsdp")) for n in (1, 4))
    assert large.activations_bytes == pytest.approx(4 * small.activations_bytes)
    assert large.state_bytes == small.state_bytes


def test_more_ranks_hardly_help_where_activations_dominate() -> None:
    """As in pytorch#104589: the state halves, the activations of a rank's own sequences stay."""
    peaks = [
        ledger(TRAINED["4M"], Layout(dp=n, batch=32 * n, seq=512, shard="fsdp")).peak_bytes for n in (4, 8)
    ]
    assert peaks[1] > 0.97 * peaks[0]


def test_a_large_vocabularys_loss_is_the_term_that_formulas_omit() -> None:
    found = ledger(
        PUBLISHED["8B"],
        Layout(dp=8, batch=8, seq=8192, shard="fsdp", precision="mixed", checkpointing=True),
        fused=True,
    )
    assert found.peak["loss"] > found.state_bytes / 2


def test_gpipe_holds_all_microbatches_and_1f1b_as_many_as_stages() -> None:
    at = replace(EIGHT, dp=1, pp=4, batch=32, microbatches=16)
    held = {
        schedule: ledger(MODEL, replace(at, schedule=schedule), stage=1).moments["forward"]["activations"]
        for schedule in ("gpipe", "1f1b")
    }
    assert held["gpipe"] / held["1f1b"] == pytest.approx(16 / 3)


# ---- traffic


@pytest.mark.parametrize(("kind", "share", "on_gloo"), [("all_reduce", 1.5, 1.5), ("all_gather", 0.75, 0.75), ("reduce_scatter", 0.75, 1.5), ("broadcast", 0.75, 0.75), ("send", 1.0, 1.0), ("recv", 0.0, 0.0)])  # fmt: skip
def test_a_ring_sends_its_share_and_gloos_reduce_scatter_an_all_reduce(
    kind: str, share: float, on_gloo: float
) -> None:
    one = Collective(axis="dp", kind=kind, count=1, bytes=1000, size=4)
    assert (wire_bytes(one, "nccl"), wire_bytes(one, "gloo")) == (1000 * share, 1000 * on_gloo)


def test_what_each_split_sends_beside_ddp() -> None:
    ddp = comm_bytes(traffic(MODEL, EIGHT), "nccl")
    assert ddp == pytest.approx(2 * 7 / 8 * 4 * MODEL.params)
    assert comm_bytes(traffic(MODEL, replace(EIGHT, shard="zero1")), "nccl") == pytest.approx(
        1.5 * ddp
    )  # pytorch#69591
    assert comm_bytes(traffic(MODEL, replace(EIGHT, shard="fsdp")), "nccl") == pytest.approx(1.5 * ddp)
    assert comm_bytes(traffic(MODEL, replace(EIGHT, shard="fsdp")), "gloo") == pytest.approx(2 * ddp)
    assert comm_bytes(traffic(MODEL, replace(EIGHT, shard="fsdp", reshard=False)), "nccl") == pytest.approx(
        ddp
    )
    assert comm_bytes(
        traffic(MODEL, replace(EIGHT, shard="fsdp", precision="mixed")), "nccl"
    ) == pytest.approx(ddp)


def test_a_plain_tensor_parallel_plan_reduces_seven_times_a_layer_and_a_good_one_four() -> None:
    counts = {
        plan: next(
            one.count
            for one in traffic(MODEL, replace(EIGHT, dp=1, tp=8, tp_plan=plan))
            if one.kind == "all_reduce"
        )
        for plan in ("plain", "shared input")
    }
    assert counts == {"plain": 7 * MODEL.layers + 1, "shared input": 4 * MODEL.layers + 1}


def test_one_rank_sends_nothing() -> None:
    assert traffic(MODEL, Layout(batch=8)) == ()


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ([], 0),
        ([100], 1),
        ([2 << 20, 100], 2),
        ([1 << 20, 25 << 20, 25 << 20], 3),
        ([1 << 20, *[1 << 20] * 26], 3),
    ],
)
def test_ddps_buckets_are_closed_by_the_gradient_that_fills_them(sizes: list[int], count: int) -> None:
    assert buckets(sizes) == count
