"""Each closed form beside its simulation, at its limits, and against figures that others have published."""

from __future__ import annotations

import importlib
import math
import re
import tracemalloc

import numpy as np
import pytest

from mlsyslab.contract import ConfigError
from mlsyslab.labs.straggler.blame import blame
from mlsyslab.labs.straggler.scale import (
    BLOM_ERROR_FRAC,
    daly_every_s,
    expected_later,
    expected_max,
    goodput_frac,
    spread_of_max,
    young_every_s,
)
from mlsyslab.labs.straggler.simulate import Job, records, simulate

# The lab offers the function by the module's own name.
module = importlib.import_module("mlsyslab.labs.straggler.simulate")
HOUR_S, MINUTE_S = 3600.0, 60.0


def paper(name, **changes):
    return simulate(steps=2, **changes).predicted[name].expected


# ---- jitter
@pytest.mark.parametrize(
    ("n", "published"),  # Harter 1961, "Expected values of normal order statistics", largest of n
    [(2, 0.56419), (5, 1.16296), (10, 1.53875), (50, 2.24907), (100, 2.50759)],
)
def test_the_expected_maximum_is_the_published_one_within_its_stated_error(n, published):
    assert expected_max(n) == pytest.approx(published, rel=BLOM_ERROR_FRAC)
    if n >= 16:
        assert expected_max(n) == pytest.approx(published, rel=0.005)


@pytest.mark.parametrize("n", [1, 2, 16, 1024])
def test_maximum_and_its_spread_are_those_of_a_simulation(n):
    drawn = np.random.default_rng(1).standard_normal((20_000 if n < 1024 else 4000, n)).max(1)
    assert expected_max(n) == pytest.approx(drawn.mean(), abs=0.05)
    assert spread_of_max(n) == pytest.approx(drawn.std(), rel=0.07)


@pytest.mark.parametrize("apart", [-3.0, -0.5, 0.0, 1.0, 4.0])
def test_the_later_of_two_is_that_of_a_simulation(apart):
    a, b = np.random.default_rng(2).standard_normal((2, 200_000))
    assert expected_later(0.0, 1.0, apart, 0.5) == pytest.approx(
        np.maximum(a, apart + 0.5 * b).mean(), abs=0.01
    )


@pytest.mark.parametrize("ranks", [1, 8, 512, 16_384])
@pytest.mark.parametrize(
    ("slow_ranks", "slow_factor"), [(0, 2.0), (1, 420 / 180), (1, 1.2), (1, 1.05), (1, 1.0)]
)
def test_closed_form_and_simulation_agree(ranks, slow_ranks, slow_factor):
    job = {"ranks": ranks, "slow_ranks": slow_ranks, "slow_factor": slow_factor}
    found = simulate(steps=max(200, 40_000 // ranks), **job, seed=3)
    for name in ("healthy_step_s", "step_s", "jitter_s", "slow_s"):
        on_paper, drawn = found.predicted[name], found.simulated[name]
        slack = (drawn.high - drawn.low) / 2 + 1e-9  # twice a 95 % interval
        assert on_paper.low - slack <= drawn.high, name
        assert drawn.low <= on_paper.high + slack, name
        # The two do not agree by being vague.
        assert on_paper.high - on_paper.low < 0.03 * found.job.base_s


def test_without_jitter_the_step_is_exactly_the_slowest_ranks():
    found = simulate(ranks=100, jitter_frac=0.0, base_s=0.2, slow_factor=1.5)
    for values in (found.predicted, found.simulated):
        assert values["healthy_step_s"] == pytest.approx((0.2, 0.2, 0.2))
        assert values["step_s"] == pytest.approx((0.3, 0.3, 0.3))
        assert values["efficiency_frac"].expected == pytest.approx(2 / 3)
        assert values["lost_rank_s"].expected == pytest.approx(100 * 0.1)


def test_one_healthy_rank_loses_nothing_to_jitter():
    found = simulate(ranks=1, slow_ranks=0, steps=20_000)
    assert found.predicted["jitter_s"] == (0, 0, 0)
    assert abs(found.simulated["jitter_s"].expected) < 0.0001


def test_without_slow_ranks_nothing_is_lost_to_them():
    found = simulate(ranks=64, slow_ranks=0)
    for values in (found.predicted, found.simulated):
        assert values["slow_s"] == values["lost_rank_s"] == (0, 0, 0)


def test_a_job_of_slow_ranks_alone_is_a_slower_job():
    found = simulate(ranks=1000, slow_ranks=1000, slow_factor=2.0)
    for values in (found.predicted, found.simulated):
        assert values["step_s"].expected == pytest.approx(2 * values["healthy_step_s"].expected)


def test_the_cost_of_one_slow_rank_stays_in_seconds_and_grows_with_n_in_rank_seconds():
    sizes = [16, 256, 4096, 16_384]
    found = [simulate(ranks=n, jitter_frac=0.0) for n in sizes]
    for part in ("predicted", "simulated"):
        cost_s = [getattr(f, part)["slow_s"].expected for f in found]
        lost_s = [getattr(f, part)["lost_rank_s"].expected for f in found]
        assert cost_s == pytest.approx([0.240] * 4)
        assert lost_s == pytest.approx([0.240 * n for n in sizes])


def test_a_slow_rank_hides_the_jitter_of_the_others():
    found = simulate(slow_factor=1.5)
    assert found.predicted["step_s"].expected == pytest.approx(1.5 * 0.180, rel=1e-6)
    assert found.predicted["slow_s"].expected < 0.5 * 0.180 - 0.01


@pytest.mark.parametrize("part", ["predicted", "simulated"])
def test_jitter_costs_more_with_more_ranks_and_more_of_it(part):
    def costs(**changes):
        return getattr(simulate(slow_ranks=0, **changes), part)["jitter_s"].expected

    by_ranks = [costs(ranks=n) for n in (4, 64, 1024, 16_384)]
    by_share = [costs(ranks=64, jitter_frac=f) for f in (0.0, 0.01, 0.05, 0.2)]
    assert by_ranks == sorted(set(by_ranks))
    assert by_share == sorted(set(by_share))
    assert by_ranks[-1] < 2.5 * by_ranks[1]  # like sqrt(2 ln n), not like n


# ---- failures
@pytest.mark.parametrize(
    ("mtbf_s", "minutes"),  # Daly 2006, figures 3 to 5: a checkpoint of 5 minutes
    [(24 * HOUR_S, 117), (6 * HOUR_S, 57), (15 * MINUTE_S, 9.1)],
)
def test_the_best_interval_is_the_one_that_daly_published(mtbf_s, minutes):
    assert daly_every_s(5 * MINUTE_S, mtbf_s) / MINUTE_S == pytest.approx(minutes, rel=0.008)


@pytest.mark.parametrize("checkpoint_s", [1.0, 30.0, 300.0, 900.0])
def test_the_best_interval_is_that_of_a_brute_force_search(checkpoint_s):
    job = {"job_mtbf_s": HOUR_S, "checkpoint_s": checkpoint_s, "restart_s": 200.0}
    tried = np.geomspace(1, 20 * HOUR_S, 20_000)
    kept = [goodput_frac(every_s, **job) for every_s in tried]
    assert daly_every_s(checkpoint_s, HOUR_S) == pytest.approx(tried[int(np.argmax(kept))], rel=0.01)
    assert goodput_frac(daly_every_s(checkpoint_s, HOUR_S), **job) == pytest.approx(max(kept), rel=1e-4)
    young_s = young_every_s(checkpoint_s, HOUR_S)
    assert goodput_frac(young_s, **job) > (0.999 if checkpoint_s < 60 else 0.97) * max(kept)


def test_young_and_daly_meet_where_checkpoints_are_cheap_and_part_where_they_are_not():
    assert daly_every_s(0.01, HOUR_S) == pytest.approx(young_every_s(0.01, HOUR_S), rel=0.002)
    assert young_every_s(2.0, 100.0) == 20.0
    assert daly_every_s(HOUR_S, HOUR_S) < 0.8 * young_every_s(HOUR_S, HOUR_S)
    assert daly_every_s(3 * HOUR_S, HOUR_S) == HOUR_S


@pytest.mark.parametrize("ranks", [1, 1024, 16_384, 131_072])
@pytest.mark.parametrize("checkpoint_every_s", [0.0, 3600.0])
def test_goodput_on_paper_is_that_of_the_simulated_failures(ranks, checkpoint_every_s):
    found = simulate(ranks=ranks, steps=2, checkpoint_every_s=checkpoint_every_s, seed=4)
    for name in ("job_mtbf_s", "goodput_frac"):
        drawn = found.simulated[name]
        slack = (drawn.high - drawn.low) / 2  # twice a 95 % interval
        assert drawn.low - slack <= found.predicted[name].expected <= drawn.high + slack, name
        assert drawn.high - drawn.low < 0.12 * drawn.expected
    assert found.predicted["best_every_s"].expected in found.simulated["best_every_s"]


def test_the_simulated_best_interval_comes_with_those_that_are_as_good():
    low_s, best_s, high_s = simulate(steps=2).simulated["best_every_s"]
    assert low_s < 0.9 * best_s < best_s < 0.9 * high_s
    best = paper("goodput_frac")
    for every_s in (low_s, high_s):
        assert best * (1 - 3 * module.FLAT_FRAC) < paper("goodput_frac", checkpoint_every_s=every_s) < best
    for every_s in (0.5 * low_s, 2 * high_s):
        assert paper("goodput_frac", checkpoint_every_s=every_s) < best * (1 - module.FLAT_FRAC)


def test_no_range_holds_what_cannot_be():
    rarely = simulate(steps=2, mtbf_s=35.0 * Job.ranks).simulated["goodput_frac"]
    assert rarely.low == 0 < rarely.expected < rarely.high
    assert simulate(slow_factor=1.0).predicted["slow_s"].low == 0


def test_goodput_of_a_job_that_hardly_fails_is_what_checkpoints_leave():
    assert goodput_frac(90.0, job_mtbf_s=1e9, checkpoint_s=10.0, restart_s=100.0) == pytest.approx(
        0.9, rel=1e-5
    )


def test_goodput_falls_with_ranks_with_restarts_and_off_the_best_interval():
    by_ranks = [paper("goodput_frac", ranks=n) for n in (64, 1024, 16_384, 131_072)]
    assert by_ranks == sorted(set(by_ranks), reverse=True)
    assert paper("job_mtbf_s", ranks=1000) == pytest.approx(paper("job_mtbf_s", ranks=1) / 1000)
    assert paper("goodput_frac", restart_s=1200.0) < paper("goodput_frac", restart_s=60.0)
    best_s = Job().best_every_s
    for factor in (0.2, 5.0):
        assert paper("goodput_frac", checkpoint_every_s=factor * best_s) < paper("goodput_frac") - 0.01


def test_the_defaults_fail_as_often_as_llama_3_did_and_keep_as_much():
    found = simulate(steps=2)
    assert found.predicted["job_mtbf_s"].expected == pytest.approx(54 * 24 * HOUR_S / 419)
    assert 0.90 < found.predicted["goodput_frac"].expected < 0.95  # "more than 90 % effective training time"


def test_a_job_that_never_reaches_a_checkpoint_keeps_nothing():
    found = simulate(steps=2, mtbf_s=10_000.0)
    assert found.simulated["goodput_frac"].expected == found.simulated["useful_frac"].expected == 0
    assert found.predicted["goodput_frac"].expected < 1e-6
    assert math.isnan(found.simulated["best_every_s"].expected)
    assert goodput_frac(1e9, job_mtbf_s=1.0, checkpoint_s=1.0, restart_s=0.0) == 0


# ---- the whole
def test_what_is_useful_is_efficiency_times_goodput():
    found = simulate(ranks=256)
    for values in (found.predicted, found.simulated):
        product = values["efficiency_frac"].expected * values["goodput_frac"].expected
        assert values["useful_frac"].expected == pytest.approx(product)
        assert values["efficiency_frac"].expected == pytest.approx(0.180 / values["step_s"].expected)
        assert all(value.low <= value.expected <= value.high for value in values.values())
    assert set(found.predicted) == set(found.simulated)


def test_it_is_one_stable_line_labelled_simulated():
    first, again, other = simulate(ranks=64), simulate(ranks=64), simulate(ranks=64, seed=1)
    assert str(first) == str(again)
    assert first == again
    assert first.simulated != other.simulated
    assert "\n" not in str(first)
    assert str(first).startswith("simulated, 64 ranks: step 180.0 ms, +8.")
    assert first.origin == "simulated"


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        (64, r"a failure every 3\d\.\d d, a checkpoint every 3\.6 h,"),
        (16_384, r"a failure every 3\.\d h, a checkpoint every 13\.3 min,"),
        (1_000_000, r"a failure every 3\.\d min, a checkpoint every 85\.6 s,"),
    ],
)
def test_times_are_said_in_the_unit_that_people_would_use(ranks, says):
    assert re.search(says, str(simulate(ranks=ranks, steps=2)))


def test_memory_is_bounded_and_chunks_do_not_change_the_numbers(monkeypatch):
    whole = simulate(ranks=1000, steps=300)
    monkeypatch.setattr(module, "CHUNK", 7000)
    tracemalloc.start()
    assert simulate(ranks=1000, steps=300) == whole
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 8 * 1000 * 300


def test_records_name_the_slow_rank_at_scale():
    job = Job(ranks=2048, steps=40, slow_factor=1.2)
    own, wait = records(job, transfer_s=0.004)
    assert own.shape == wait.shape == (40, 2048)
    assert np.ptp(own + wait, axis=1).max() < 1e-12  # all ranks' steps are equal: the trap
    assert wait.min(1) == pytest.approx(0.004)
    found = blame(own, wait)
    assert (found.kind, found.ranks) == ("rank", job.slow)
    assert job.slow == (1024,)
    assert blame(*records(Job(ranks=2048, steps=40, slow_ranks=0))).kind == "healthy"


def test_nobody_works_less_than_nothing():
    own, _ = records(
        Job(ranks=1000, steps=1000, jitter_frac=0.2, slow_ranks=0, seed=2)
    )  # draws one below -5 sigma
    assert own.min() == 0


def test_slow_ranks_are_as_many_as_asked_for():
    for ranks, slow in ((7, 7), (7, 3), (100, 13)):
        who = Job(ranks=ranks, slow_ranks=slow).slow
        assert len(set(who)) == slow
        assert all(0 <= rank < ranks for rank in who)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"ranks": 0}, "ranks=0 is outside 1..1e+06"),
        ({"ranks": 2.5}, "ranks=2.5 is not a whole number"),
        ({"steps": 1}, "steps=1 is outside"),
        ({"base_s": 0.0}, "base_s=0.0 is outside"),
        ({"base_s": math.nan}, "base_s=nan is not a number"),
        ({"jitter_frac": -0.01}, "jitter_frac=-0.01 is outside 0..0.2"),
        ({"jitter_frac": 0.5}, "more would make steps negative"),
        ({"slow_ranks": -1}, "slow_ranks=-1 is outside"),
        ({"ranks": 4, "slow_ranks": 5}, "slow_ranks=5 is more than ranks=4; lower it or raise ranks"),
        ({"slow_factor": 0.9}, "slow_factor=0.9 is outside"),
        ({"mtbf_s": 0.0}, "mtbf_s=0.0 is outside"),
        ({"checkpoint_s": 0.0}, "checkpoint_s=0.0 is outside"),
        ({"checkpoint_every_s": -1.0}, "checkpoint_every_s=-1.0 is outside"),
        ({"restart_s": -1.0}, "restart_s=-1.0 is outside"),
        ({"seed": -1}, "seed=-1 is outside"),
        ({"ranks": 1_000_000, "steps": 100_000}, "lower steps"),
    ],
)
def test_bad_input_gives_one_clear_error(bad, says):
    with pytest.raises(ConfigError) as caught:
        simulate(**bad)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
