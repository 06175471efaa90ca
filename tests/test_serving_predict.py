"""What is predicted against what the simulation and the closed forms say, and the recommendation against its target."""

from __future__ import annotations

import importlib
import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mlsyslab.contract import ConfigError
from mlsyslab.labs.serving import predict, recommend, simulate
from mlsyslab.labs.serving.config import CAUSES, Config
from mlsyslab.labs.serving.queueing import chain

S = 0.002 + 0.0005 * np.arange(1, 9)
MACHINE = {"curve_s": S.tolist(), "overhead_s": 0.0}
BY_POLICIES = importlib.import_module("mlsyslab.labs.serving.predict")
BY_TRIAL = importlib.import_module("mlsyslab.labs.serving.recommend")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of the requests, where percentiles do not matter."""
    monkeypatch.setattr(BY_POLICIES, "REQUESTS", 4000)


PLAIN = predict(Config(duration_s=12.0), MACHINE).assumptions


def test_the_worked_example_has_ranges_that_hold_what_another_seed_gives() -> None:
    found = predict(Config(), MACHINE)
    assert found.origin == "simulated"
    assert found.cause == "healthy"
    came = simulate(Config(seed=77), S).summary()
    for name in (
        "p50_s",
        "p95_s",
        "p99_s",
        "mean_s",
        "throughput_per_s",
        "mean_batch_rows",
        "utilisation_frac",
    ):
        assert came[name] in found.values[name], name
        low, expected, high = found.values[name]
        assert low <= expected <= high
    assert found.values["p95_s"].high < 1.5 * found.values["p95_s"].low, (
        "a range that says nothing is no prediction"
    )


def test_the_range_holds_a_curve_that_is_a_tenth_slower() -> None:
    config = Config(rate_per_s=1000.0)
    slower = simulate(replace(config, seed=5), 1.1 * S).summary()
    found = predict(config, MACHINE)
    assert slower["mean_s"] in found.values["mean_s"]
    assert slower["utilisation_frac"] in found.values["utilisation_frac"]


def test_it_takes_less_than_half_a_second() -> None:
    predict(Config(), MACHINE)
    began_s = time.thread_time()
    predict(Config(rate_per_s=1200.0, duration_s=600.0), MACHINE)
    assert time.thread_time() - began_s < 0.5


def test_the_mean_is_that_of_the_markov_chain() -> None:
    config = Config(max_wait_s=0.0, rate_per_s=667.0, duration_s=60.0, admission=False)
    assert predict(config, MACHINE).expected()["mean_s"] == pytest.approx(chain(667.0, S).mean_s, rel=0.05)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("changes", "saturation", "load"),
    [
        ({}, 8 / 0.006, 300 / 1333.3),
        ({"replicas": 2}, 16 / 0.006, 300 / 2666.7),
        ({"rows": 3}, 8 / 0.006 / 2, 300 / 666.7),
        ({"binding": "early", "max_wait_s": 0.001}, 561.6, 300 / 561.6),
        ({"autoscale": True, "ceiling": 3}, 24 / 0.006, 300 / 4000),
        ({"max_batch": 4}, 4 / 0.004, 0.3),
    ],
)
def test_saturation_is_the_closed_form(changes: dict[str, Any], saturation: float, load: float) -> None:
    found = predict(Config(**changes), MACHINE).expected()
    assert found["saturation_per_s"] == pytest.approx(saturation, rel=1e-3)
    assert found["load_frac"] == pytest.approx(load, rel=1e-3)


@pytest.mark.usefixtures("quick")
def test_throughput_does_not_pass_the_saturation_and_refusals_make_up_the_rest() -> None:
    found = predict(Config(rate_per_s=4000.0), MACHINE).expected()
    assert found["throughput_per_s"] == pytest.approx(found["saturation_per_s"], rel=0.05)
    assert found["rejected_frac"] == pytest.approx(2 / 3, abs=0.03)
    assert found["p99_s"] <= found["wait_bound_s"] + S[-1]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"rate_per_s": 2000.0}, "saturated"),
        ({"rate_per_s": 2000.0, "admission": False}, "no admission control"),
        ({"rate_per_s": 700.0, "binding": "early", "max_wait_s": 0.001}, "saturated"),
        ({"rate_per_s": 600.0, "arrivals": "bursts", "burst_factor": 6.0}, "bursts exceed warm capacity"),
        ({"rate_per_s": 200.0, "max_wait_s": 0.03, "slo_p95_s": 0.02}, "batch wait too long"),
        ({"rate_per_s": 100.0, "autoscale": True, "floor": 0, "replicas": 0, "cold": True}, "cold starts"),
        ({"rate_per_s": 300.0}, "healthy"),
    ],
)
def test_the_cause_is_what_the_numbers_imply(changes: dict[str, Any], cause: str) -> None:
    assert cause in CAUSES
    assert predict(Config(**changes), MACHINE).cause == cause


def test_a_growing_queue_is_not_called_short_because_the_run_is_long() -> None:
    found = predict(Config(rate_per_s=1800.0, duration_s=60.0, admission=False), MACHINE)
    assert any("only the beginning" in one for one in found.assumptions)
    assert found.expected()["p95_s"] > 1.0


@pytest.mark.usefixtures("quick")
def test_without_a_curve_the_range_is_wide_and_says_so() -> None:
    guess, paced = predict(Config(), {}), predict(Config(paced=True), {})
    assert guess.values["saturation_per_s"].high > 3 * guess.values["saturation_per_s"].low
    assert any("no curve was measured" in one for one in guess.assumptions)
    fast = predict(Config(), {"matmul_flops_per_s": 1e12})
    assert fast.expected()["saturation_per_s"] > 2 * guess.expected()["saturation_per_s"]
    assert paced.values["saturation_per_s"].expected == pytest.approx(8 / 0.006)
    assert paced.values["saturation_per_s"].low > 0.9 * paced.values["saturation_per_s"].high


def test_a_measured_curve_of_some_sizes_is_enough_and_a_short_list_is_not() -> None:
    some = predict(Config(), {"curve_s": {1: 0.0025, 8: 0.006}})
    assert some.expected()["saturation_per_s"] == pytest.approx(8 / 0.006)
    with pytest.raises(ConfigError, match="4 values, which does not reach max_batch=8"):
        predict(Config(), {"curve_s": [0.001] * 4})


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("changes", "machine", "said"),
    [
        ({"slo_p95_s": 0.002}, MACHINE, "the target is out of reach"),
        ({"deadline_s": 0.002, "max_wait_s": 0.0}, MACHINE, "no answer can come in time"),
        ({"clients": 4}, MACHINE, "leaves out what they did not send"),
        ({"autoscale": True}, {**MACHINE, "start_s": 1.7}, "ready 1.7 s after"),
        ({}, {"curve_s": [0.01, 0.021, 0.08, 0.08, 0.08, 0.08, 0.08, 0.09]}, "batching does not pay"),
        ({"duration_s": 2.0}, MACHINE, "a p99 needs about 2628 requests, the run has 300"),
    ],
)
def test_what_a_user_should_know_before_it_runs(
    changes: dict[str, Any], machine: dict[str, Any], said: str
) -> None:
    """BentoML PR 3646: an unreachable goal is said at build time; tensorflow/serving#1529: padding 3 up to 8 does not pay."""
    assert any(said in one for one in predict(Config(**changes), machine).assumptions)
    assert not any(said in one for one in PLAIN)


@pytest.mark.usefixtures("quick")
def test_a_peak_needs_warm_replicas_only_where_starts_are_slower_than_the_target() -> None:
    config = Config(autoscale=True, arrivals="on/off", burst_factor=4.0, rate_per_s=800.0, ceiling=4)
    assert predict(config, MACHINE).expected()["warm_needed"] == math.ceil(3200 / 1333.4)
    assert predict(replace(config, slo_p95_s=1.0), MACHINE).expected()["warm_needed"] == 0


def test_a_run_without_a_request_is_unknown() -> None:
    found = predict(Config(rate_per_s=0.1, duration_s=0.3, warmup_s=0.1), MACHINE)
    assert found.cause == "unknown"
    assert found.expected()["saturation_per_s"] == pytest.approx(8 / 0.006)


# ---- recommend
def few(slo_s: float, config: Config, curve: Any = S) -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(BY_TRIAL, "REQUESTS", 2000)
        return recommend(slo_s, config, curve, waits_s=(0.0, 0.005), most_batch=16, most_replicas=8)


def test_the_cheapest_configuration_meets_the_target_and_one_replica_less_does_not() -> None:
    traffic = Config(rate_per_s=3000.0, duration_s=2.0)
    found = few(0.020, traffic, lambda rows: 0.002 + 0.0005 * rows)
    assert found.config is not None
    costs = [round(point.cost, 2) for point in found.best]
    assert costs == sorted(costs)
    again = simulate(
        replace(found.config, seed=5, duration_s=4.0), lambda rows: 0.002 + 0.0005 * rows
    ).summary()
    assert again["p95_s"] is not None
    assert again["p95_s"] < 0.020
    assert again["goodput_frac"] is not None
    assert again["goodput_frac"] > 0.95
    fewer = [p for p in found.points if p.config.replicas < found.config.replicas]
    assert all(p.p95_s > 0.85 * 0.020 or p.missed_frac > 0.05 for p in fewer)


def test_a_tighter_target_costs_more_and_an_impossible_one_gives_nothing() -> None:
    traffic = Config(rate_per_s=2400.0, duration_s=2.0)
    loose, tight = few(0.030, traffic, S), few(0.006, traffic, S)
    assert loose.best[0].cost < tight.best[0].cost
    none = few(0.002, traffic)
    assert none.config is None
    assert "one row alone takes 2.5 ms" in none.reason
    assert few(0.05, Config(rate_per_s=90_000.0)).config is None


def test_fast_answers_to_the_few_that_are_let_in_do_not_meet_a_target() -> None:
    found = few(0.050, Config(rate_per_s=600.0, arrivals="bursts", burst_factor=6.0, max_queue=16))
    assert found.best
    assert all(point.missed_frac <= 0.05 for point in found.best)
    assert any(point.p95_s < 0.04 and point.missed_frac > 0.1 for point in found.points)


def test_where_batching_does_not_pay_it_recommends_no_batch() -> None:
    """tensorflow/serving#1529: sizes padded up, so that 2 rows cost as much as 8."""
    found = few(
        0.060, Config(rate_per_s=60.0), np.array([0.010, 0.080, 0.080, 0.080, 0.080, 0.080, 0.080, 0.080])
    )
    assert found.config is not None
    assert found.config.max_batch == 1


def test_a_curve_too_short_for_the_requests_is_refused() -> None:
    with pytest.raises(ConfigError, match="the curve reaches batches of 2 rows, requests have up to 4"):
        few(0.05, Config(rows=4), S[:2])
