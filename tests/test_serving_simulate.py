"""The simulation against closed forms that are exact, and against what people met."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mlsyslab.contract import ConfigError
from mlsyslab.labs.serving import queueing
from mlsyslab.labs.serving.arrivals import Schedule
from mlsyslab.labs.serving.config import Config
from mlsyslab.labs.serving.curves import line_through, seconds_of
from mlsyslab.labs.serving.day import Day, capacity
from mlsyslab.labs.serving.figures import summary_of
from mlsyslab.labs.serving.simulate import Simulated, simulate

S = 0.002 + 0.0005 * np.arange(1, 9)  # saturation 8 / 6 ms = 1333 a second
MU = queueing.saturation_per_s(S)
OPEN = Config(admission=False, max_wait_s=0.0, warmup_s=0.1)


def at(rate_per_s: float, requests: int = 20_000, **changes: Any) -> Config:
    """So many requests at a rate."""
    return replace(OPEN, rate_per_s=rate_per_s, duration_s=requests / rate_per_s, **changes)


def figures(config: Config, curve: Any = S, **more: Any) -> dict[str, float]:
    """Every figure, none of which may be missing."""
    found = simulate(config, curve, **more).summary()
    assert None not in found.values()
    return {name: float(value or 0.0) for name, value in found.items()}


def plan(time_s: list[float], **columns: Any) -> Schedule:
    """A schedule of given moments."""
    n = len(time_s)
    whole = {"rows": np.ones(n, int), "priority": np.ones(n, int), "deadline_s": np.full(n, math.inf)}
    given = {name: np.array(values) for name, values in columns.items()}
    return Schedule(time_s=np.array(time_s), **{**whole, **given})


def drained(run: Simulated) -> bool:
    return not any(run.left.values())


# ---- against closed forms
@pytest.mark.parametrize("rho", [0.3, 0.8])
def test_without_batching_it_is_m_d_1(rho: float) -> None:
    config = at(rho / S[0], 40_000 if rho > 0.5 else 20_000, max_batch=1)
    assert figures(config)["mean_s"] == pytest.approx(queueing.md1_s(config.rate_per_s, S[0]), rel=0.03)


@pytest.mark.parametrize(("rho", "seeds"), [(0.1, 1), (0.5, 2), (0.8, 4)])
def test_without_a_hold_it_is_the_markov_chain_within_two_percent(rho: float, seeds: int) -> None:
    exact = queueing.chain(rho * MU, S)
    runs = [figures(at(rho * MU, seed=seed)) for seed in range(seeds)]
    for name, value in (
        ("mean_s", exact.mean_s),
        ("mean_batch_rows", exact.mean_batch),
        ("utilisation_frac", exact.utilisation_frac),
    ):
        assert np.mean([run[name] for run in runs]) == pytest.approx(value, rel=0.02)


def test_the_chain_of_batches_of_one_is_m_d_1() -> None:
    """Two closed forms by different ways."""
    for rho in (0.1, 0.5, 0.9):
        assert queueing.chain(rho / S[0], S[:1]).mean_s == pytest.approx(
            queueing.md1_s(rho / S[0], S[0]), rel=1e-6
        )


def test_little_holds_exactly() -> None:
    """Mean number in the system = arrivals a second × mean seconds in it, over the whole of any run that drains."""
    run = simulate(at(0.9 * MU, 5000, max_wait_s=0.003, rows=3), S)
    begins, ends = run.columns["intended_s"], run.columns["intended_s"] + run.columns["total_s"]
    moments = np.sort(np.concatenate([begins, ends]))
    middles = (moments[1:] + moments[:-1]) / 2
    inside = np.searchsorted(np.sort(begins), middles) - np.searchsorted(np.sort(ends), middles)
    lasts_s = moments[-1] - moments[0]
    number = float((inside * np.diff(moments)).sum() / lasts_s)
    assert number == pytest.approx(
        queueing.in_system(len(begins) / lasts_s, run.columns["total_s"].mean()), rel=1e-9
    )


def test_light_load_with_a_hold() -> None:
    rate = 0.15 * MU
    assert figures(at(rate, max_wait_s=0.005))["mean_s"] == pytest.approx(
        queueing.light_load_s(rate, 0.005, S), rel=0.05
    )


def test_the_bound_for_unlimited_batches_holds_and_is_tight() -> None:
    long = 0.002 + 0.0005 * np.arange(1, 61)
    for rho in (0.5, 0.8):
        mean_s = queueing.chain(rho / 0.0005, long, 400).mean_s
        bound_s = queueing.unlimited_bound_s(rho / 0.0005, 0.002, 0.0005)
        assert 0.999 * mean_s <= bound_s <= 1.02 * mean_s


def test_late_binding_without_a_hold_has_the_lowest_tail_and_a_hold_buys_fewer_batches() -> None:
    for rho in (0.2, 0.5, 0.8):
        runs = [figures(at(rho * MU, 6000, max_wait_s=hold_s)) for hold_s in (0.0, 0.005, 0.02)]
        assert runs[0]["p99_s"] < runs[1]["p99_s"] < runs[2]["p99_s"]
        assert runs[0]["mean_s"] < runs[1]["mean_s"] < runs[2]["mean_s"]
        assert runs[0]["utilisation_frac"] > runs[1]["utilisation_frac"] > runs[2]["utilisation_frac"]


@pytest.mark.parametrize(("hold_s", "limit"), [(0.001, 0.42), (0.002, 0.59), (0.005, 0.93)])
def test_early_binding_is_stable_up_to_its_limit_and_not_beyond(hold_s: float, limit: float) -> None:
    found = queueing.early_limit_per_s(hold_s, S)
    assert found / MU == pytest.approx(limit, abs=0.01)

    def growth(rate: float) -> float:
        """Waits at the end of the run over those at its beginning."""
        waits = simulate(at(rate, 12_000, max_wait_s=hold_s, binding="early"), S).columns["queue_s"]
        return float(waits[-3000:].mean() / waits[1000:4000].mean())

    assert growth(0.9 * found) < 2.5
    assert growth(1.08 * found) > 3.0


def test_early_binding_diverges_at_half_of_the_saturation_where_late_is_fast() -> None:
    early = figures(at(0.5 * MU, 6000, max_wait_s=0.001, binding="early"))
    late = figures(at(0.5 * MU, 6000, max_wait_s=0.001))
    assert late["p99_s"] < 3 * S[-1]
    assert early["p99_s"] > 20 * late["p99_s"]


def test_saturation_is_replicas_times_the_batch_over_its_seconds() -> None:
    for replicas in (1, 3):
        found = figures(at(3 * replicas * MU, 12_000, replicas=replicas))
        assert found["throughput_per_s"] == pytest.approx(replicas * MU, rel=0.02)
        assert found["utilisation_frac"] == pytest.approx(1.0, abs=0.02)
        assert found["mean_batch_rows"] == pytest.approx(8.0, rel=0.01)


@pytest.mark.parametrize("rows", [1, 3])
def test_nobody_waits_longer_than_the_bound_with_admission(rows: int) -> None:
    config = at(5 * MU, 8000, admission=True, max_queue=40, max_wait_s=0.004, rows=rows)
    run = simulate(config, S)
    waits = (run.columns["queue_s"] + run.columns["batch_wait_s"])[run.columns["outcome"] == "ok"]
    bound_s = queueing.wait_bound_s(S, 0.004, 40, 1, rows)
    assert 0.5 * bound_s < waits.max() <= bound_s
    found = run.summary()
    assert found["rejected_frac"] == pytest.approx(1 - 1 / 5 / (1 + rows) * 2, abs=0.12)


def test_kingman_is_near_for_one_replica_without_batching() -> None:
    rho = 0.8
    waits = simulate(at(rho / S[0], 30_000, max_batch=1), S).columns["queue_s"].mean()
    assert queueing.kingman_s(rho, S[0], 1.0) == pytest.approx(waits, rel=0.08)


# ---- what people met
def test_five_at_once_run_as_one_and_four() -> None:
    """triton#3624: no hold; the first runs alone, the others queue behind it."""
    run = simulate(replace(OPEN, duration_s=1.0), S, plan([0.5] * 5))
    assert run.batches["rows"].tolist() == [1, 4]


def test_a_batch_is_formed_when_the_replica_frees_and_a_full_one_never_waits() -> None:
    config = replace(OPEN, max_wait_s=0.1, duration_s=1.0)
    run = simulate(config, S, plan([0.0] * 8 + [0.001, 0.002, 0.003]))
    assert run.batches["started_s"].tolist() == pytest.approx([0.0, 0.101])
    assert run.batches["rows"].tolist() == [8, 3]
    held = run.columns["batch_wait_s"]
    assert held[8:].tolist() == pytest.approx([0.095] * 3)  # the replica was free from 6 ms on
    assert run.columns["queue_s"][8:].tolist() == pytest.approx([0.005, 0.004, 0.003])


def test_throughput_stays_with_queue_timeouts_and_every_counter_is_zero_at_the_drain() -> None:
    """triton#8870: a credit that leaks with each timed-out request lowers the rate; here for 10,000 batches."""
    config = at(1.1 * MU, 80_000, deadline_s=0.02, urgent_frac=0.3)
    run = simulate(config, S)
    ends = np.sort(run.batches["started_s"] + run.batches["service_s"])
    assert len(ends) > 9000
    quarter = len(ends) // 4
    rates = [
        (run.batches["rows"][i : i + quarter].sum()) / (ends[i + quarter - 1] - ends[i])
        for i in range(0, 3 * quarter + 1, quarter)
    ]
    assert max(rates) / min(rates) < 1.02
    assert (run.columns["outcome"] == "expired").mean() > 0.03
    assert drained(run)


def test_offline_traffic_does_not_move_the_urgent_tail_and_is_not_starved() -> None:
    """triton#980: a burst of slow, large, less urgent requests beside urgent ones."""
    urgent = np.arange(0, 4, 0.004)
    bulk = np.full(300, 1.0)
    time_s = np.concatenate([urgent, bulk])
    order = np.argsort(time_s, kind="stable")
    config = replace(OPEN, duration_s=4.0, aging_s=5.0)
    priority = np.concatenate([np.zeros(len(urgent), int), np.ones(300, int)])[order]
    rows = np.concatenate([np.ones(len(urgent), int), np.full(300, 8)])[order]
    both = simulate(config, S, plan(time_s[order].tolist(), priority=priority, rows=rows))
    alone = simulate(config, S, plan(urgent.tolist(), priority=np.zeros(len(urgent), int)))
    mixed_s = both.columns["total_s"][priority == 0]
    assert np.quantile(mixed_s, 0.99) <= np.quantile(alone.columns["total_s"], 0.99) + 2 * S[-1]
    assert (both.columns["outcome"] == "ok").all()
    fifo = simulate(
        replace(config, aging_s=0.0), S, plan(time_s[order].tolist(), priority=priority, rows=rows)
    )
    assert np.quantile(fifo.columns["total_s"][priority == 0], 0.99) > 10 * np.quantile(mixed_s, 0.99)


@pytest.mark.parametrize("seed", range(5))
def test_chance_does_not_turn_the_replica_count_up_and_down(seed: int) -> None:
    """ray#18925: 5 a second on a model of 1 s, for 5 minutes. It goes up, down where it went too far, and up once more
    where that was a mistake."""
    config = Config(
        rate_per_s=5.0, duration_s=300.0, max_batch=1, autoscale=True, floor=1, ceiling=20, replicas=1, admission=False,
        cold=True, seed=seed,
    )  # fmt: skip
    run = simulate(config, [1.0], cold_s=4.0)
    moves = [{"asked": 1, "retire": -1}.get(note["event"], 0) for note in run.events if note["time_s"] < 300]
    assert 7 <= sum(moves) <= 14
    assert (np.diff([move for move in moves if move]) != 0).sum() <= 2
    assert drained(run)


def test_a_dead_replica_loses_no_request_and_another_takes_its_place() -> None:
    config = at(1.5 * MU, 8000, replicas=2, kill_at_s=1.0)
    run = simulate(config, S, start_s=0.3)
    assert (run.columns["outcome"] == "ok").all()
    assert 1 <= run.columns["retries"].sum() <= 8
    happened = [(note["event"], note["replica"]) for note in run.events[4:-1]]
    assert happened == [("lost", 0), ("asked", 2), ("ready", 2)]
    assert run.replica_s == pytest.approx(2 * run.end_s, rel=1e-6)
    assert drained(run)


def test_a_stall_shows_in_an_open_loop_and_hides_in_a_closed_one() -> None:
    """PerfCake#258: all replicas stop for 1 s of 6."""
    config = replace(OPEN, rate_per_s=300.0, stall_at_s=3.0, stall_s=1.0)
    loop = {clients: simulate(replace(config, clients=clients), S) for clients in (0, 4)}
    tail = {clients: run.summary()["p99_s"] or 0.0 for clients, run in loop.items()}
    assert tail[0] > 0.8
    assert tail[4] < 0.05
    assert (loop[4].columns["total_s"] > 0.9).sum() == 4, "one of each client saw it"
    assert drained(loop[4])


def test_one_client_gets_batches_of_one() -> None:
    """mosec#338: batching does nothing for a caller who waits for each answer."""
    found = figures(replace(OPEN, rate_per_s=2000.0, clients=1))
    assert found["mean_batch_rows"] == 1.0
    assert found["throughput_per_s"] == pytest.approx(1 / S[0], rel=0.02)


def test_scale_to_zero_pays_a_start_and_a_floor_does_not() -> None:
    times = plan([5.0, 5.1, 30.0])
    config = Config(duration_s=40.0, autoscale=True, floor=0, replicas=0, cold=True, warmup_s=0.0)
    zero, one = (simulate(replace(config, floor=n, replicas=n), S, times, cold_s=4.0) for n in (0, 1))
    assert zero.columns["total_s"].max() > 3.5
    assert one.columns["total_s"].max() < 0.02
    assert zero.replica_s < 0.6 * one.replica_s
    assert {note["event"] for note in zero.events} == {"asked", "ready", "retire", "retired", "end"}


def test_overload_with_admission_keeps_what_is_let_in_fast() -> None:
    bounded = figures(at(5 * MU, 12_000, admission=True))
    assert bounded["p95_s"] < 0.06
    assert bounded["rejected_frac"] == pytest.approx(0.8, abs=0.02)
    assert figures(at(5 * MU, 12_000))["p95_s"] > 1.0


def test_figures_of_nothing_are_none_and_of_refusals_have_no_percentile() -> None:
    columns = simulate(at(300.0, 400), S).columns
    full = summary_of(columns, slo_s=0.05)
    empty = summary_of({}, slo_s=0.05)
    assert set(empty) == set(full)
    assert empty.pop("n") == 0
    assert set(empty.values()) == {None}
    refused = summary_of({**columns, "outcome": np.full(len(columns["id"]), "rejected", object)}, slo_s=0.05)
    assert (refused["goodput_frac"], refused["rejected_frac"], refused["p95_s"]) == (0.0, 1.0, None)


def test_figures_are_what_they_say() -> None:
    """Ten answers of 1 .. 10 s, sent one a second; the first two are warm-up."""
    n = 10
    columns = {
        "intended_s": np.arange(10.0), "sent_s": np.arange(10.0) + 0.5, "lag_s": np.full(n, 0.5),
        "queue_s": np.full(n, 0.25), "batch_wait_s": np.full(n, 0.125), "service_s": np.full(n, 0.5),
        "total_s": np.arange(1.0, 11.0), "batch_size": np.full(n, 4.0), "rows": np.full(n, 2), "outcome": np.full(n, "ok", object),
        "warmup": np.arange(10) < 2,
    }  # fmt: skip
    found = summary_of(columns, slo_s=6.0, warmup_s=2.0, replica_s=20.0)
    assert found["n"] == 8
    assert found["p50_s"] == pytest.approx(6.5)
    assert found["goodput_frac"] == pytest.approx(4 / 8)
    assert found["throughput_per_s"] == pytest.approx(
        9 / 17.5
    )  # all but the first went out after 2 s; the last at 19.5 s
    assert found["mean_batch_rows"] == 4
    assert found["utilisation_frac"] == pytest.approx(10 * 0.5 * 2 / 4 / 20)
    assert (found["queue_s"], found["batch_wait_s"], found["service_s"], found["lag_p99_s"]) == (
        0.25,
        0.125,
        0.5,
        0.5,
    )


def test_records_have_the_columns_of_a_measured_run() -> None:
    run = simulate(at(300.0, 400, rows=2, max_wait_s=0.002, deadline_s=1.0), S, overhead_s=0.001)
    frame = run.records
    assert list(frame.columns) == [
        "id", "intended_s", "sent_s", "lag_s", "queue_s", "batch_wait_s", "service_s", "total_s", "batch_size",
        "replica", "rows", "priority", "deadline_s", "outcome", "warmup", "retries",
    ]  # fmt: skip
    parts = frame["queue_s"] + frame["batch_wait_s"] + frame["service_s"]
    assert np.allclose(parts + 0.001, frame["total_s"])
    assert (frame["batch_size"] <= 8).all()
    assert set(run.batches["reason"]) <= {"full", "waited"}
    assert run.batches["requests"].sum() == len(frame)


def test_noise_is_of_mean_one_and_seeded() -> None:
    runs = [simulate(at(600.0, 4000, seed=seed), S, noise=0.2) for seed in (0, 0, 1)]
    assert np.array_equal(runs[0].columns["total_s"], runs[1].columns["total_s"])
    factor = runs[0].batches["service_s"] / S[runs[0].batches["rows"] - 1]
    assert factor.mean() == pytest.approx(1.0, abs=0.02)
    assert factor.std() == pytest.approx(0.2, abs=0.02)
    drawn = simulate(at(600.0, 1000), S, noise=np.array([1.0, 2.0]))
    assert set(np.round(drawn.batches["service_s"] / S[drawn.batches["rows"] - 1], 9)) == {1.0, 2.0}


def test_a_thousand_replicas() -> None:
    slow = 20 * S
    config = replace(OPEN, rate_per_s=50_000.0, duration_s=0.6, max_wait_s=0.01)
    run = simulate(config, slow, replicas=1000)
    assert run.summary()["throughput_per_s"] == pytest.approx(50_000, rel=0.3)
    assert len(set(run.batches["replica"])) > 300
    assert drained(run)


def test_a_curve_that_cannot_be_used_is_refused() -> None:
    assert seconds_of({1: 1.0, 4: 2.5}, 6).tolist() == pytest.approx([1.0, 1.5, 2.0, 2.5, 3.0, 3.5])
    assert seconds_of(lambda rows: 0.1 * rows, 2).tolist() == pytest.approx([0.1, 0.2])
    for curve, message in (([0.1] * 4, "does not reach max_batch=8"), ({}, "is empty"), ([0.1] * 7 + [0.0], "0 s for 8 rows"), (lambda rows: math.nan, "nan s for 1 rows")):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            simulate(OPEN, curve)
    assert line_through(np.array([1.0, 2.0, 4.0]), np.array([3.0, 4.0, 6.0])) == pytest.approx((2.0, 1.0))
    assert line_through(np.array([2.0, 2.0]), np.array([3.0, 5.0])) == (4.0, 0.0)


# ---- a day
DAY = Day(duration_s=7200, rate_per_s=4000.0, ceiling=100, floor=5, down_after_s=60.0)


def test_a_scaled_day_costs_less_than_the_peak_and_answers_in_time() -> None:
    scaled, fixed = capacity(DAY), capacity(replace(DAY, autoscale=False))
    assert scaled.replica_s < 0.7 * fixed.replica_s
    assert scaled.late_frac < 0.01
    assert fixed.late_frac == 0.0
    assert scaled.reversals < 40
    assert scaled.backlog[-1] == 0
    assert scaled.arrivals.sum() == pytest.approx(7200 * 4000, rel=0.01)


def test_a_surge_needs_warm_replicas_when_starts_are_slow() -> None:
    surge = replace(DAY, surge_at_s=1500.0, surge_s=300.0, surge_factor=3.0)
    cold, warm = capacity(surge), capacity(replace(surge, floor=70))
    assert cold.late_frac > 3 * warm.late_frac
    backlog, drain_s = queueing.cold_start(
        cold.arrivals[1505], int(cold.ready[1505]), DAY.capacity_per_s, DAY.cold_s
    )
    assert cold.backlog.max() == pytest.approx(backlog, rel=0.25)
    assert drain_s > 0


def test_the_fluid_knows_what_is_between_the_cold_start_formulas() -> None:
    """A step from 60 to 160 a second, one replica of 100: (160 - 100) × 10 s = 600 wait, gone 15 s after the second is there."""
    assert queueing.cold_start(160.0, 1, 100.0, 10.0) == (600.0, 15.0)
    assert queueing.cold_start(90.0, 1, 100.0, 10.0) == (0.0, 0.0)
    assert queueing.cold_start(260.0, 1, 100.0, 10.0)[1] == math.inf
    assert queueing.warm_needed(260.0, 1, 100.0, 10.0, 0.05) == 2
    assert queueing.warm_needed(260.0, 1, 100.0, 0.04, 0.05) == 0
    assert queueing.staffing(10_000.0, 100.0) == 110
    assert (queueing.requests_needed(0.95), queueing.requests_needed(0.99)) == (505, 2628)
    assert queueing.best_batch(S) == 8
    assert queueing.best_batch(np.array([1.0, 2.1, 3.3])) == 1
    day = Day(duration_s=400, rate_per_s=60.0, peak_factor=1.0, scatter_frac=0.0, capacity_per_s=100.0, cold_s=9.0, floor=1, ceiling=2, surge_at_s=100.0, surge_s=200.0, surge_factor=160 / 60, target_frac=0.9)  # fmt: skip
    found = capacity(day)
    assert found.backlog.max() == pytest.approx(600.0, rel=0.15)
    assert found.reversals <= 1


def test_a_day_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="floor=5 is above ceiling=2"):
        Day(floor=5, ceiling=2)
