"""Pipeline schedules: the textbook's bubble and what is in flight. That the order is torch's: test_parallelism_ranks."""

from __future__ import annotations

import pytest

from mlsyslab.labs.parallelism.schedule import bubble_frac, in_flight, orders, play

SIZES = [(1, 1), (2, 2), (2, 8), (3, 4), (4, 4), (4, 16), (8, 8)]


@pytest.mark.parametrize(("stages", "many"), SIZES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_each_microbatch_passes_each_stage_once_forward_and_then_backward(
    schedule: str, stages: int, many: int
) -> None:
    for work in orders(schedule, stages, many):
        assert sorted(work) == sorted([(op, m) for op in "FB" for m in range(many)])
        assert all(work.index(("F", m)) < work.index(("B", m)) for m in range(many))


@pytest.mark.parametrize(("stages", "many"), SIZES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_equal_stages_played_out_are_idle_as_the_formula_says(schedule: str, stages: int, many: int) -> None:
    timeline = play(orders(schedule, stages, many), [1.0] * stages, [2.0] * stages)
    assert timeline.step_s == pytest.approx(3.0 * (many + stages - 1))
    assert timeline.bubble_frac == pytest.approx(bubble_frac(stages, many))


@pytest.mark.parametrize(("stages", "many"), SIZES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_in_flight_is_what_playing_holds(schedule: str, stages: int, many: int) -> None:
    for stage, work in enumerate(orders(schedule, stages, many)):
        held = most = 0
        for op, _ in work:
            held += 1 if op == "F" else -1
            most = max(most, held)
        assert most == in_flight(schedule, stages, many, stage)


def test_a_slow_stage_sets_the_pace_and_more_microbatches_do_not_mend_it() -> None:
    few, many = (play(orders("1f1b", 2, m), [1.0, 3.0], [2.0, 6.0]) for m in (4, 64))
    assert few.step_s / 4 > many.step_s / 64 > 9.0
    assert many.idle_frac[0] == pytest.approx(2 / 3, abs=0.02)


def test_sending_takes_its_time_on_the_way_there_and_back() -> None:
    assert play(orders("gpipe", 2, 1), [1.0, 1.0], [1.0, 1.0], send_s=0.5).step_s == pytest.approx(5.0)


def test_orders_that_wait_for_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="for ever"):
        play([(("B", 0), ("F", 0)), (("F", 0), ("B", 0))], [1.0, 1.0], [1.0, 1.0])
