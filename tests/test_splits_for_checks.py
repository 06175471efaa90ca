"""What checks the parallelism exercises: its counts against the closed forms, and a learner's function on real ranks."""

from __future__ import annotations

from typing import Any

import pytest

from mlsyslab.labs.parallelism.schedule import bubble_frac, in_flight
from mlsyslab.labs.parallelism.traffic import Collective, wire_bytes
from mlsyslab.teach import splits_for_checks as counted
from mlsyslab.teach.checks import NotSolvedYet, WrongAnswer

torch: Any = None  # the functions below run in ranks, which have it


def fill(sizes, limit):
    return [[at] for at in range(len(sizes))]


def mean(gradients, all_reduce, world):
    for gradient in gradients:
        all_reduce(gradient)
        gradient.div_(world)


def half_mean(gradients, all_reduce, world):
    if float(gradients[0].flatten()[0]) > 0:  # which differs between the ranks
        all_reduce(gradients[0])


def broken(gradients, all_reduce, world):
    return 1 / 0


def blank(gradients, all_reduce, world):
    raise NotImplementedError


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_chunks_around_a_ring_are_the_formula(kind: str, ranks: int) -> None:
    one = Collective(axis="dp", kind=kind, count=1, bytes=9600, size=ranks)
    assert counted.ring_bytes(kind, 9600, ranks) == wire_bytes(one, "nccl")


@pytest.mark.parametrize(("stages", "many"), [(1, 3), (2, 2), (2, 8), (4, 4), (4, 16), (8, 9)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_played_pipeline_is_the_formula(schedule: str, stages: int, many: int) -> None:
    idle, held = counted.played(schedule, stages, many)
    assert idle == pytest.approx(bubble_frac(stages, many))
    assert held == [in_flight(schedule, stages, many, stage) for stage in range(stages)]


def test_owners_counted_are_the_figures_of_the_zero_paper() -> None:
    """Rajbhandari et al. 2020, figure 1, scaled: 120, 31.4, 16.6 and 1.9 GB for 7.5 billion parameters on 64 devices."""
    scale = 7.5e9 / 64_000 / 1e9
    sums = {
        strategy: sum(counted.state_of_rank_0(64_000, 64, strategy).values()) * scale
        for strategy in counted.CUT
    }
    assert sums == pytest.approx({"ddp": 120, "zero1": 31.4, "zero2": 16.6, "zero3": 1.9}, rel=0.02)


def test_every_rule_of_the_choice_has_a_case() -> None:
    assert [answer for _, answer in counted.plan_cases()] == [
        "hybrid",
        "DDP",
        "FSDP",
        "FSDP, checkpointing",
        None,
    ]


@pytest.mark.ranks
class TestOnRanks:
    def test_a_right_function_gives_the_mean_on_both_ranks(self) -> None:
        got = counted.on_ranks("x", [fill, mean], "buckets")
        assert [rank["worst"] < 1e-6 for rank in got] == [True, True]
        assert [len(rank["calls"]) for rank in got] == [5, 5]

    def test_an_error_is_one_line_with_its_rank(self) -> None:
        with pytest.raises(
            WrongAnswer,
            match=r"^Exercise x: on rank 0 your function raised ZeroDivisionError: division by zero$",
        ):
            counted.on_ranks("x", [fill, broken], "buckets")

    def test_ranks_that_do_not_call_the_same_collectives_are_told_so_in_time(self) -> None:
        with pytest.raises(
            WrongAnswer, match=r"collective that the other does not call|did not come to an end"
        ):
            counted.on_ranks("x", [fill, half_mean], "buckets")


def test_a_blank_starts_no_rank() -> None:
    with pytest.raises(NotSolvedYet, match="exercise x"):
        counted.on_ranks("x", [fill, blank], "buckets")


def test_a_function_without_a_text_is_refused() -> None:
    with pytest.raises(WrongAnswer, match="cannot be read; define it with `def` in a cell"):
        counted.on_ranks("x", [len, mean], "buckets")
