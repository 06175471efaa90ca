"""The planner: what fits, what is recommended and why, and what would change it."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from mlsyslab import ConfigError, parallelism
from mlsyslab.labs.parallelism.clusters import Cluster, cluster
from mlsyslab.labs.parallelism.plan import PLANS, ask, layouts, plan, what_changes
from mlsyslab.labs.parallelism.shapes import PUBLISHED, TRAINED


def best(name: str) -> parallelism.Plan:
    return plan(*PLANS[name])[0]


def test_a_model_that_almost_fits_one_device_is_sharded_first() -> None:
    model, on = PLANS["worked_example"]
    one = plan(model, on)[0]
    assert (one.layout.shard, one.layout.dp, one.layout.tp, one.layout.pp, one.layout.checkpointing) == (
        "fsdp",
        8,
        1,
        1,
        False,
    )
    whole = parallelism.ledger(model, replace(one.layout, shard="none"), fused=True)
    assert on.usable_bytes < whole.peak_bytes < 1.3 * on.usable_bytes  # almost
    assert "simplest that fits" in one.says


@pytest.mark.parametrize(
    ("name", "shard", "tp", "pp", "checkpointing"),
    [
        ("fits one device", "none", 1, 1, False),
        ("8B on 8", "fsdp", 1, 1, False),
        ("70B on 64", "fsdp", 1, 1, True),
        ("one sequence at a time", "none", 8, 1, False),
        ("deep and long", "fsdp", 1, 1, True),
    ],
)
def test_each_rule_has_its_model(name: str, shard: str, tp: int, pp: int, checkpointing: bool) -> None:
    at = best(name).layout
    assert (at.shard, at.tp, at.pp, at.checkpointing) == (shard, tp, pp, checkpointing)


@pytest.mark.parametrize("name", ["one huge layer", "405B on 16384"])
def test_layers_or_batches_too_large_for_sharding_alone_are_cut_inside_a_node(name: str) -> None:
    model, on = PLANS[name]
    at = best(name).layout
    assert 1 < at.tp <= on.devices_per_node
    assert all(one.layout.tp > 1 or one.layout.pp > 1 for one in plan(model, on))


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_fits_uses_all_devices_and_the_best_comes_first(name: str) -> None:
    model, on = PLANS[name]
    found = plan(model, on)
    for one in found:
        assert 0 <= one.headroom_bytes < on.usable_bytes
        assert one.layout.ranks == on.devices
        assert one.step_s.low < one.step_s.expected < one.step_s.high
        assert one.name in one.says
    rest = [(one.complexity, one.step_s.expected) for one in found[1:]]
    assert rest == sorted(rest)
    assert all(
        one.complexity >= found[0].complexity or one.step_s.expected > 1.4 * found[0].step_s.expected
        for one in found
    )


def test_a_plan_of_405b_on_16384_devices_takes_less_than_a_second_of_cpu() -> None:
    began = time.process_time()
    plan(*PLANS["405B on 16384"])
    assert time.process_time() - began < 1.0


def test_a_model_that_fits_nowhere_is_refused_with_its_terms_and_what_would_be_enough() -> None:
    with pytest.raises(ConfigError, match=r"405B fits on no mesh of 8 devices with 73\.6 GB for tensors each: the smallest peak is .* GB \(.*params .* GB.*\); \d+ devices would be enough") as caught:  # fmt: skip
        plan(PUBLISHED["405B"], cluster("H100", 8))
    enough = int(str(caught.value).split("; ")[-1].split()[0])
    assert plan(PUBLISHED["405B"], cluster("H100", enough))


def test_a_cluster_of_broken_nodes_or_unknown_devices_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"devices=12 over nodes of 8 is 1\.5 nodes"):
        cluster("H100", 12)
    with pytest.raises(ConfigError, match="device='TPU' is not one of H100"):
        cluster("TPU", 8)


def test_no_mesh_that_divides_the_batch_is_said_so() -> None:
    with pytest.raises(ConfigError, match="no mesh of 8 devices divides"):
        plan(replace(TRAINED["1B"], layers=1, heads=1, kv_heads=1, width=64), cluster("H100", 8, batch=7))


def test_the_tensor_axis_stays_inside_a_node() -> None:
    assert (
        max(
            at.tp
            for at in layouts(PUBLISHED["70B"], cluster("H100", 64), precision="mixed", optimizer="adamw")
        )
        == 8
    )


class TestFollowUps:
    def test_twice_the_memory_makes_sharding_unnecessary(self) -> None:
        model, on = PLANS["worked_example"]
        said = ask(model, on, memory_bytes=2 * on.memory_bytes)
        assert "the answer becomes DDP over 8, instead of FSDP over 8" in said

    def test_longer_sequences_call_for_checkpointing_first(self) -> None:
        model, on = PLANS["worked_example"]
        assert "FSDP over 8, checkpointing" in ask(model, on, seq=8 * model.seq)

    def test_a_batch_of_one_leaves_only_the_matrices_to_cut(self) -> None:
        model, on = PLANS["worked_example"]
        assert "the answer becomes tensor parallel over 8" in ask(model, on, batch=1)

    def test_what_changes_nothing_is_said_so(self) -> None:
        model, on = PLANS["worked_example"]
        assert "the answer stays: FSDP over 8" in ask(model, on, latency_s=on.latency_s / 2)

    def test_too_small_devices_end_in_the_arithmetic(self) -> None:
        model, on = PLANS["worked_example"]
        assert "nothing fits any more" in ask(model, on, memory_bytes=1e9)

    def test_an_unknown_change_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="colour is no field of a cluster or a model"):
            ask(*PLANS["worked_example"], colour=1)

    def test_break_points_are_where_the_answer_turns(self) -> None:
        model, on = PLANS["worked_example"]
        sentence = next(one for one in what_changes(model, on) if one.startswith("memory above"))
        where = float(sentence.split()[2]) * 1e9
        assert plan(model, replace(on, memory_bytes=0.98 * where))[0].layout.shard == "fsdp"
        assert plan(model, replace(on, memory_bytes=1.02 * where))[0].layout.shard == "none"


def test_a_slower_link_never_makes_a_plan_faster() -> None:
    model, on = PLANS["70B on 64"]
    slow: Cluster = replace(on, between_bytes_per_s=on.between_bytes_per_s / 10)
    times = {one.layout: one.step_s.expected for one in plan(model, on)}
    assert all(one.step_s.expected >= times[one.layout] for one in plan(model, slow) if one.layout in times)
