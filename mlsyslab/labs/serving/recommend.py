"""The cheapest configuration that meets a p95 target under a given traffic, found by simulation. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mlsyslab.contract import ConfigError, Origin
from mlsyslab.labs.serving.config import Config
from mlsyslab.labs.serving.curves import Array, Curve, seconds_of
from mlsyslab.labs.serving.policies import LATE
from mlsyslab.labs.serving.queueing import saturation_per_s
from mlsyslab.labs.serving.simulate import simulate

WAITS_S = (0.0, 0.001, 0.002, 0.005, 0.010, 0.020)
REQUESTS = 4000  # of a point; enough for a p95, see queueing.requests_needed
FULLEST = 0.98  # of the saturation; beyond it no point is simulated
MARGIN_FRAC = 0.15  # of the target: a real run's p95 is up to so much above the simulated one
SPARE = 3  # replica counts tried beyond the first that could carry the load


@dataclass(frozen=True, kw_only=True)
class Point:
    """A configuration and what it does: seconds of the answers, answers a second, share of all requests that missed the
    target, replica-seconds a second (cost) and seconds that replicas work a second (busy)."""

    config: Config
    p50_s: float
    p95_s: float
    p99_s: float
    throughput_per_s: float
    missed_frac: float
    cost: float
    busy: float

    def __str__(self) -> str:
        config = self.config
        return (
            f"{config.replicas} × batches of {config.max_batch}, hold {config.max_wait_s * 1e3:g} ms: p50 {self.p50_s * 1e3:.1f}, "
            f"p95 {self.p95_s * 1e3:.1f}, p99 {self.p99_s * 1e3:.1f} ms, {self.throughput_per_s:.0f}/s, missed {self.missed_frac:.1%}, "
            f"{self.cost:.2g} replica-seconds a second, {self.busy:.2g} of them busy"
        )


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """best: the points that meet the target, cheapest first, then the fastest; empty where none does. points: all that were tried, the curve. reason: in a sentence."""

    slo_p95_s: float
    best: tuple[Point, ...]
    points: tuple[Point, ...]
    reason: str
    origin: Origin = "simulated"

    @property
    def config(self) -> Config | None:
        """The first choice; None where nothing meets the target."""
        return self.best[0].config if self.best else None

    def __str__(self) -> str:
        return f"simulated: {self.reason}"


def recommend(
    slo_p95_s: float,
    traffic: Config,
    curve: Curve,
    *,
    waits_s: Sequence[float] = WAITS_S,
    most_batch: int = 32,
    most_replicas: int = 16,
    noise: float | Array | None = None,
    overhead_s: float = 0.0,
) -> Recommendation:
    """Try max_wait_s × max_batch × replicas on the traffic of `traffic` (its rate, arrivals, rows, priorities, admission),
    about 4,000 requests a point with late binding, and keep what answers 95 % of all requests within slo_p95_s,
    with a margin of 15 % for what a real run adds.

    curve: seconds of a batch by its rows; batches go up to most_batch, or as far as an array reaches. For each batch size
    the replica counts begin where the load is below the saturation. About 30 ms a point. Raises ConfigError for a target
    or a curve that makes no sense.
    """
    base = replace(
        traffic, slo_p95_s=slo_p95_s, binding=LATE, autoscale=False, kill_at_s=0.0, stall_s=0.0, clients=0
    )
    reach = most_batch
    if not callable(curve) and not isinstance(curve, Mapping):
        reach = min(most_batch, len(curve))
    if reach < base.rows:
        raise ConfigError(
            f"the curve reaches batches of {reach} rows, requests have up to {base.rows}; measure it further"
        )
    seconds = seconds_of(curve, reach)
    base = _beginning(base)
    demand = base.rate_per_s * (1 + base.rows) / 2
    points = []
    for max_batch in sorted({min(2**n, reach) for n in range(math.ceil(math.log2(reach)) + 1)}):
        if max_batch < base.rows or seconds[0] + overhead_s > slo_p95_s:
            continue
        first = max(1, math.ceil(demand / saturation_per_s(seconds[:max_batch]) / FULLEST))
        for replicas in range(first, min(first + SPARE, most_replicas + 1)):
            for max_wait_s in waits_s if max_batch > 1 else (0.0,):
                point = replace(
                    base, max_batch=max_batch, replicas=replicas, max_wait_s=max_wait_s, max_queue=max(base.max_queue, max_batch)
                )  # fmt: skip
                points.append(_point(point, seconds, noise, overhead_s))
    met = [
        point
        for point in points
        if point.missed_frac <= 0.05 and point.p95_s <= (1 - MARGIN_FRAC) * slo_p95_s
    ]
    best = sorted(
        met, key=lambda point: (round(point.cost, 2), round(point.p95_s, 4), point.config.max_batch)
    )
    return Recommendation(
        slo_p95_s=slo_p95_s, best=tuple(best), points=tuple(points), reason=_reason(slo_p95_s, best, points, seconds)
    )  # fmt: skip


def _beginning(config: Config) -> Config:
    """As much of it as has REQUESTS after the warm-up."""
    warmup_s = min(config.warmup_s, 500 / config.rate_per_s)
    most_s = warmup_s + REQUESTS / config.rate_per_s
    if config.arrivals == "diurnal":
        return config
    return replace(
        config,
        duration_s=max(0.2, min(config.duration_s, most_s)),
        warmup_s=min(warmup_s, config.duration_s / 4),
    )


def _point(config: Config, seconds: Array, noise: float | Array | None, overhead_s: float) -> Point:
    run = simulate(config, seconds, noise=noise, overhead_s=overhead_s)
    found = run.summary()
    lasts_s = max(run.end_s, 1e-9)
    numbers = {
        name: found[name] if found[name] is not None else math.inf for name in ("p50_s", "p95_s", "p99_s")
    }
    return Point(
        config=config,
        throughput_per_s=found["throughput_per_s"] or 0.0,
        missed_frac=1 - (found["goodput_frac"] or 0.0),
        cost=run.replica_s / lasts_s,
        busy=float(np.sum(run.batches["service_s"])) / lasts_s,
        **{name: float(value or 0.0) for name, value in numbers.items()},
    )


def _reason(slo_s: float, best: Sequence[Point], points: Sequence[Point], seconds: Array) -> str:
    target = f"95 % within {slo_s * 1e3:g} ms"
    if best:
        return f"{len(best)} of {len(points)} configurations keep {target}; the cheapest: {best[0]}"
    if not points:
        return f"nothing keeps {target}: one row alone takes {seconds[0] * 1e3:.1f} ms, or the load needs more replicas than allowed"
    nearest = min(points, key=lambda point: point.missed_frac)
    return f"nothing keeps {target}; the nearest: {nearest}"
