"""Schedules: their mean, their shape, their seed, and traces good and bad."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlsyslab.contract import ConfigError
from mlsyslab.labs.serving.arrivals import Schedule, day_shape, read_trace, schedule
from mlsyslab.labs.serving.config import Config

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces" / "serving"
BASE = Config(rate_per_s=500.0, duration_s=40.0)
KINDS = ("poisson", "bursts", "on/off", "diurnal")


def dispersion(plan: Schedule, window_s: float, end_s: float) -> float:
    """Variance over mean of the counts in windows: 1 for a Poisson process."""
    counts = np.histogram(plan.time_s, np.arange(0, end_s + window_s / 2, window_s))[0]
    return float(counts.var() / counts.mean())


@pytest.mark.parametrize("factor", [1.0, 1.5, 4.0, 10.0])
@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_rate_is_the_wished_one_and_times_are_sorted(kind: str, factor: float) -> None:
    config = replace(BASE, arrivals=kind, burst_factor=factor)
    plan = schedule(config)
    assert len(plan) == pytest.approx(20_000, abs=4 * np.sqrt(20_000))
    assert (np.diff(plan.time_s) >= 0).all()
    assert plan.time_s[0] >= 0
    assert plan.time_s[-1] < config.duration_s


@pytest.mark.parametrize("kind", KINDS)
def test_the_peak_is_burst_factor_times_the_mean(kind: str) -> None:
    counts = np.histogram(schedule(replace(BASE, arrivals=kind)).time_s, np.arange(0, 40.05, 0.1))[0]
    peak = np.sort(counts)[-8:].mean() / 50  # 8 of 400 windows of 100 ms
    assert peak == pytest.approx(1.35 if kind == "poisson" else 4.0, rel=0.2)


def test_poisson_is_poisson_and_bursts_are_not() -> None:
    assert dispersion(schedule(BASE), 0.1, 40.0) == pytest.approx(1.0, abs=0.25)
    gaps = np.diff(schedule(BASE).time_s)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.05)
    for kind in ("bursts", "on/off"):
        assert dispersion(schedule(replace(BASE, arrivals=kind)), 0.1, 40.0) > 10


def test_half_of_the_requests_come_in_bursts_and_none_in_an_off_phase() -> None:
    counts = np.histogram(schedule(replace(BASE, arrivals="bursts")).time_s, np.arange(0, 40.01, 0.02))[0]
    assert counts[counts > 20].sum() == pytest.approx(10_000, rel=0.1)  # 40 in a burst, 5.7 between
    counts = np.histogram(schedule(replace(BASE, arrivals="on/off")).time_s, np.arange(0, 40.01, 0.02))[0]
    assert (counts == 0).mean() == pytest.approx(0.75, abs=0.02)


def test_a_day_begins_at_its_trough() -> None:
    counts = np.histogram(schedule(replace(BASE, arrivals="diurnal", burst_factor=2.0)).time_s, 8, (0, 40))[0]
    assert counts.argmax() in (3, 4)
    assert counts[0] < 0.2 * counts.max()
    at = np.linspace(0, 1, 10_001)
    for factor in (1.0, 1.3, 2.0, 5.0, 50.0):
        shape = day_shape(at, factor)
        assert shape[:-1].mean() == pytest.approx(1.0, rel=1e-3)
        assert shape.max() == pytest.approx(factor, rel=1e-6)
        assert shape.min() >= 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides(kind: str) -> None:
    config = replace(BASE, arrivals=kind, rows=4, urgent_frac=0.3, duration_s=3.0)
    one, same, other = (schedule(replace(config, seed=seed)) for seed in (1, 1, 2))
    for name in ("time_s", "rows", "priority", "deadline_s"):
        assert np.array_equal(getattr(one, name), getattr(same, name))
    assert not np.array_equal(one.time_s, other.time_s)


def test_rows_priorities_and_deadlines() -> None:
    plan = schedule(replace(BASE, rows=4, urgent_frac=0.25, deadline_s=0.5))
    assert np.bincount(plan.rows)[1:] == pytest.approx([len(plan) / 4] * 4, rel=0.06)
    assert (plan.priority == 0).mean() == pytest.approx(0.25, abs=0.02)
    assert set(plan.priority) == {0, 1}
    assert np.allclose(plan.deadline_s - plan.time_s, 0.5)
    assert np.isinf(schedule(BASE).deadline_s).all()


def test_an_endless_schedule_is_refused() -> None:
    with pytest.raises(ConfigError, match="20,000,000 requests; lower one"):
        schedule(replace(BASE, rate_per_s=1e5, duration_s=86_400.0))


# ---- traces
def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return str(path)


def test_a_trace_keeps_its_shape_at_the_wished_rate_and_begins_again_at_its_end(tmp_path: Path) -> None:
    path = write(tmp_path, "arrival_s,rows,priority\n10,1,0\n11,2,1\n14,3,1\n")
    config = Config(arrivals="trace", trace=path, rate_per_s=3.0, duration_s=2.0, rows=1)
    plan = schedule(config)
    assert len(plan) == 6
    assert np.diff(plan.time_s) == pytest.approx(np.array([1, 3, 2, 1, 3]) / 6)  # 2 is the mean gap
    assert plan.time_s[0] == 0
    assert plan.rows.tolist() == [1, 2, 3] * 2
    assert plan.priority.tolist() == [0, 1, 1] * 2


def test_a_trace_may_be_unsorted_and_hold_dates(tmp_path: Path) -> None:
    path = write(
        tmp_path, "TIMESTAMP,x\n2023-11-16 18:17:05.5,1\n2023-11-16 18:17:03,2\n2023-11-16 18:17:04,3\n"
    )
    assert read_trace(path)["arrival_s"].tolist() == [0.0, 1.0, 2.5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "has the columns a, b; it needs arrival_s"),
        ("arrival_s\n", "no line after its header"),
        ("", "is no CSV"),
        ("arrival_s\n1\nsoon\n", "line 3: arrival_s='soon' is not a time"),
        ("arrival_s\n1\ninf\n", "line 3: arrival_s=inf is not a time"),
        ("TIMESTAMP\nyesterday-ish\n", "TIMESTAMP='yesterday-ish' is not a time"),
        ("arrival_s,rows\n1,1\n2,0\n", "line 3: rows=0 is not a whole number, 1 to 1024"),
        ("arrival_s,rows\n1,1\n2,1.5\n", "rows=1.5 is not a whole number"),
        ("arrival_s,priority\n1,1\n2,12\n", "priority=12 is not a whole number, 0 to 9"),
        ("arrival_s,rows\n1,1\n2,9\n", "9 rows, which does not fit into max_batch=8"),
        ("arrival_s\n1\n1\n1\n", "all requests come at one moment"),
    ],
)
def test_a_bad_trace_is_refused_with_the_remedy(text: str, message: str, tmp_path: Path) -> None:
    config = Config(arrivals="trace", trace=write(tmp_path, text))
    with pytest.raises(ConfigError, match=message):
        schedule(config)


def test_a_trace_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="No such file or directory; give a CSV file that exists"):
        schedule(Config(arrivals="trace", trace="nowhere.csv"))


@pytest.mark.skipif(not TRACES.is_dir(), reason="the Azure traces are not beside this checkout")
def test_the_azure_traces_keep_their_character() -> None:
    """One is nearly Poisson, one is bursty: coefficient of variation of the gaps 1.1 and 13."""
    for name, rows, cv in (("conv", 19_366, 1.09), ("code", 8819, 13.2)):
        path = TRACES / f"AzureLLMInferenceTrace_{name}.csv"
        table = read_trace(path)
        assert len(table) == rows
        config = Config(arrivals="trace", trace=str(path), rate_per_s=rows / 20.0, duration_s=20.0)
        plan = schedule(config)
        gaps = np.diff(plan.time_s)
        assert len(plan) == rows
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.02)
