"""What the lab refuses, when and where a fault acts, what it writes as the truth, and what it predicts."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from mlsyslab.contract import ConfigError
from mlsyslab.labs.straggler import CAUSES, predict
from mlsyslab.labs.straggler.config import (
    FAULTS,
    LATE_S,
    MECHANISMS,
    PAUSE_EVERY,
    PRESETS,
    Config,
    acts,
    faults_of,
)
from mlsyslab.labs.straggler.measure import preset, refuse_impossible


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"slow_rank": 9}, r"slow_rank=9 is outside 0\.\.3; choose a rank of this run"),
        ({"magnitude": -0.1}, r"magnitude=-0.1 is outside 0\.\.20"),
        ({"ranks": 1, "slow_rank": 0}, r"ranks=1 is outside 2\.\.64"),
        ({"fault": "gremlins"}, r"fault='gremlins' is not one of none, slow_input"),
        ({"start_step": 30}, "start_step=30 is after the last of steps=30"),
        ({"steps": 4}, "warmup=4 leaves no steady step"),
        ({"fault": "starved_workers", "workers": 0}, "no worker to starve"),
        ({"fault": "late_start", "pattern": "rotating"}, "happens once"),
        ({"ranks": 8, "batch_size": 200}, "more than the data set of 1000 images"),
    ],
)
def test_bad_input_is_one_clear_error(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(**fields)


def test_a_fault_that_the_machine_cannot_inject_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    with pytest.raises(ConfigError, match="needs two cores"):
        refuse_impossible(Config(fault="cpu_contention"))
    refuse_impossible(Config(fault="throttling"))


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(ConfigError, match="preset 'fast' is not one of quick, worked_example"):
        preset("fast")


def where(config: Config) -> list[list[int]]:
    """The ranks on which the fault acts, step by step."""
    return [[r for r in range(config.ranks) if acts(config, r, step)] for step in range(config.steps)]


def test_a_constant_fault_acts_on_its_rank_from_its_start_on() -> None:
    assert where(Config(fault="slow_forward", slow_rank=1, start_step=5)) == [[]] * 5 + [[1]] * 25


def test_a_rotating_fault_acts_on_one_rank_a_step_and_on_each_of_them() -> None:
    for fault, pattern in (("slow_forward", "rotating"), ("data_imbalance", "constant")):
        turns = where(Config(fault=fault, pattern=pattern, steps=200))
        assert all(len(turn) == 1 for turn in turns)
        assert set(Counter(turn[0] for turn in turns)) == {0, 1, 2, 3}


def test_an_intermittent_fault_comes_and_goes_on_its_rank_alone() -> None:
    turns = where(Config(fault="slow_forward", slow_rank=3, pattern="intermittent", steps=600))
    assert {tuple(turn) for turn in turns} == {(), (3,)}
    assert 0.3 < sum(map(len, turns)) / 600 < 0.5


def test_a_pause_acts_every_few_steps_and_everywhere_is_everywhere() -> None:
    turns = where(Config(fault="periodic_pause", slow_rank=0, steps=30))
    assert [step for step, turn in enumerate(turns) if turn] == list(range(PAUSE_EVERY - 1, 30, PAUSE_EVERY))
    assert where(Config(fault="slow_forward", pattern="everywhere", steps=5)) == [[0, 1, 2, 3]] * 5


@pytest.mark.parametrize("fault", FAULTS)
def test_a_spare_host_is_without_the_fault(fault: str) -> None:
    assert not any(where(Config(fault=fault, relief="spare host")))


def test_the_truth_says_what_was_injected_and_where() -> None:
    (fault,) = faults_of(Config(fault="throttling", slow_rank=3, magnitude=0.5, start_step=2))
    assert (fault.cause, fault.rank, fault.magnitude, fault.start_step) == ("host", 3, 0.5, 2)
    (late,) = faults_of(Config(fault="late_start", magnitude=2.0))
    assert (late.cause, late.magnitude, late.unit) == ("startup", 2 * LATE_S, "s")
    (turning,) = faults_of(Config(fault="slow_forward", pattern="rotating"))
    assert (turning.cause, turning.rank) == ("imbalance", None)
    assert faults_of(Config(fault="none")) == []
    assert faults_of(Config(magnitude=0.0)) == []


def test_causes_are_the_labs_words() -> None:
    assert {cause for cause, _ in MECHANISMS.values()} <= set(CAUSES)


def test_the_worked_example_is_the_one_of_the_question() -> None:
    values = predict(PRESETS["worked_example"], {}).expected()
    assert values["own_s"] == pytest.approx(0.180, abs=0.008)
    assert values["slow_own_s"] == pytest.approx(0.420, abs=0.015)
    assert values["step_s"] - values["own_s"] == pytest.approx(0.245, abs=0.015)


def test_the_job_is_as_slow_as_its_slowest_rank() -> None:
    config = Config(fault="slow_backward", magnitude=2.0)
    faulty, healthy = (predict(c, {}).expected() for c in (config, dataclasses.replace(config, fault="none")))
    assert faulty["step_s"] - healthy["step_s"] == pytest.approx(2.0 * config.base_s)
    assert faulty["own_s"] == healthy["own_s"]
    assert faulty["gain_frac"] == pytest.approx(1 - healthy["step_s"] / faulty["step_s"])
    assert healthy["gain_frac"] == 0.0


@pytest.mark.parametrize(
    ("relief", "fault", "left"),
    [("cache", "slow_input", 0.0), ("less preprocessing", "slow_input", 0.0), ("less contention", "throttling", 0.5),
     ("spare host", "slow_link", 0.0), ("cache", "slow_backward", 1.0)],
)  # fmt: skip
def test_what_a_remedy_leaves_of_the_fault(relief: str, fault: str, left: float) -> None:
    config = Config(fault=fault, magnitude=1.0)
    steps = {
        name: predict(dataclasses.replace(config, **change), {}).expected()["step_s"]
        for name, change in {"before": {}, "after": {"relief": relief}, "healthy": {"fault": "none"}}.items()
    }
    assert steps["after"] - steps["healthy"] == pytest.approx(
        left * (steps["before"] - steps["healthy"]), abs=1e-9
    )


def test_more_work_than_cores_sets_the_pace() -> None:
    config = Config(fault="none", ranks=32, slow_rank=0)
    assert (
        predict(config, {"usable_cores": 2}).expected()["step_s"]
        > 2 * predict(config, {}).expected()["step_s"]
    )


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_predicts_the_cause_that_it_is_named_after(name: str) -> None:
    wanted = {"quick": "compute", "worked_example": "input", "equalised": "compute", "contention": "host", "throttled": "host",
              "slow_link": "communication", "pauses": "host", "rotating": "imbalance", "late": "startup", "healthy": "healthy"}  # fmt: skip
    prediction = predict(PRESETS[name])
    assert prediction.cause == wanted[name]
    assert all(value.low <= value.expected <= value.high for value in prediction.values.values())
