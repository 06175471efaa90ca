"""A day of traffic and up to thousands of replicas, second by second: what an autoscaler costs and what it saves. Pure.

A fluid: requests are an amount that flows in and is worked off at the ready replicas' rate, without single batches. It
shows backlogs that last for seconds and more; what happens within a second is not in it (`simulate` has that).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlsyslab.contract import ConfigError, Origin
from mlsyslab.labs.serving.arrivals import Array, day_shape
from mlsyslab.labs.serving.core import RECENT_S
from mlsyslab.labs.serving.policies import Autoscaler, Load
from mlsyslab.options import check_options, option


@dataclass(frozen=True, kw_only=True)
class Day:
    """The traffic, one replica, and the policy."""

    rate_per_s: float = option(50_000.0, "mean arrivals", unit="requests/s", low=0.001, high=1e9)
    peak_factor: float = option(2.0, "the day's peak over its mean", low=1.0, high=100.0)
    scatter_frac: float = option(
        0.02, "standard deviation of a second's rate over it, beyond what chance does", low=0.0, high=1.0
    )
    surge_at_s: float = option(0.0, "when a surge begins; 0: none", unit="s", low=0.0, high=1e7)
    surge_s: float = option(600.0, "how long it lasts", unit="s", low=1.0, high=1e7)
    surge_factor: float = option(1.0, "the rate in it over the day's at that moment", low=0.0, high=100.0)
    capacity_per_s: float = option(133.0, "of one replica, at its largest batch", unit="requests/s", low=1e-3, high=1e7)  # fmt: skip
    batch_s: float = option(0.060, "seconds of a full batch", unit="s", low=1e-6, high=3600.0)
    cold_s: float = option(30.0, "until a new replica is ready", unit="s", low=0.0, high=86_400.0)
    slo_s: float = option(0.250, "answers later than this are late", unit="s", low=1e-6, high=3600.0)
    autoscale: bool = option(
        True, "let the replicas follow the load; else there are always `ceiling` of them"
    )
    floor: int = option(10, "replicas that are always there", low=0, high=1_000_000)
    ceiling: int = option(1000, "most replicas", low=1, high=1_000_000)
    target_frac: float = option(0.7, "load that the autoscaler aims at", low=0.01, high=1.0)
    down_after_s: float = option(
        300.0, "a lower need must last for so long", unit="s", low=0.0, high=86_400.0
    )
    duration_s: int = option(86_400, "seconds to simulate", unit="s", low=10, high=10_000_000)
    seed: int = option(0, "of the scatter", low=0, high=2**31 - 1)

    def __post_init__(self) -> None:
        check_options(self)
        if self.floor > self.ceiling:
            raise ConfigError(f"floor={self.floor} is above ceiling={self.ceiling}; change one of them")


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What the day was like. Arrays have a value for each second: arrivals (requests), ready and starting (replicas),
    backlog (requests that wait at the second's end), wait_s (what a request that comes then waits; infinity while no
    replica is ready).

    replica_s: replica-seconds, those that start included. late_frac: share of the requests answered later than slo_s.
    p50_s, p95_s, p99_s: seconds of an answer. reversals: how often the number of replicas turned from rising to falling or back.
    """

    day: Day
    arrivals: Array
    ready: NDArray[np.int64]
    starting: NDArray[np.int64]
    backlog: Array
    wait_s: Array
    replica_s: float
    late_frac: float
    p50_s: float
    p95_s: float
    p99_s: float
    reversals: int
    origin: Origin = "simulated"
    assumptions: tuple[str, ...] = field(
        default=(
            "A fluid, second by second: queues that form and go within a second are not in it.",
            "A request takes one and a half full batches beside its wait: the rest of the one that runs, and its own.",
            "Replicas are alike, and new ones come at once when asked for, after cold_s.",
        )
    )

    def __str__(self) -> str:
        return (
            f"simulated, {self.day.duration_s / 3600:.3g} h: {self.arrivals.sum():.3g} requests, {self.ready.min()} to "
            f"{self.ready.max()} replicas, {self.replica_s / 3600:.0f} replica-hours; p95 {self.p95_s * 1e3:.0f} ms, "
            f"late {self.late_frac:.2%}, largest backlog {self.backlog.max():.3g} requests"
        )


def capacity(day: Day) -> Capacity:
    """Live through a day with the Autoscaler deciding each second; about 5 µs a second.

    backlog' = max(0, backlog + arrivals - ready × capacity): Lindley's recursion in seconds (Newell 1982,
    "Applications of Queueing Theory": the fluid approximation holds where backlogs are large beside chance).
    """
    arrivals = _traffic(day)
    number = len(arrivals)
    scaler = Autoscaler(
        day.floor, day.ceiling, day.slo_s, target_frac=day.target_frac, down_after_s=day.down_after_s
    )
    ready, starting = (day.floor if day.autoscale else day.ceiling), 0
    coming: deque[tuple[float, int]] = deque()  # (when, how many) replicas become ready
    readies, startings = np.zeros(number, np.int64), np.zeros(number, np.int64)
    backlogs, waits_s = np.zeros(number), np.zeros(number)
    backlog, recent = 0.0, deque([0.0], maxlen=max(1, round(RECENT_S)))
    for second, came in enumerate(arrivals.tolist()):
        while coming and coming[0][0] <= second:
            fresh = coming.popleft()[1]
            ready, starting = ready + fresh, starting - fresh
        rate_per_s = ready * day.capacity_per_s
        before, backlog = backlog, max(0.0, backlog + came - rate_per_s)
        # The mean over those who come in this second: the queue at its middle over the rate.
        wait_s = (before + backlog) / 2 / rate_per_s if rate_per_s else math.inf
        readies[second], startings[second], backlogs[second], waits_s[second] = (
            ready,
            starting,
            backlog,
            wait_s,
        )
        if not day.autoscale:
            continue
        recent.append(came)
        busy = min(1.0, (before + came - backlog) / rate_per_s) if rate_per_s else 0.0
        load = Load(
            ready, starting, math.ceil(backlog), sum(recent) / len(recent), day.capacity_per_s, busy,
            wait_s + 1.5 * day.batch_s if ready else 0.0,
        )  # fmt: skip
        change = scaler.decide(float(second), load) - ready - starting
        if change > 0:
            coming.append((second + 1 + day.cold_s, change))
            starting += change
        while change < 0:  # those that have not begun to work go first
            if coming:
                when, fresh = coming.pop()
                gone = min(fresh, -change)
                starting -= gone
                if fresh > gone:
                    coming.append((when, fresh - gone))
            else:
                gone = -change
                ready -= gone
            change += gone
    return _whole(day, arrivals, (readies, startings), backlogs, waits_s)


def day(**changes: Any) -> Capacity:
    """`capacity` of a Day with these fields; raises ConfigError on a bad one."""
    return capacity(Day(**changes))


def _traffic(day: Day) -> Array:
    """Requests of each second."""
    rng = np.random.default_rng(day.seed)
    at = (np.arange(day.duration_s) + 0.5) / day.duration_s
    rates = day.rate_per_s * day_shape(at, day.peak_factor)
    if day.surge_at_s:
        began = np.arange(day.duration_s) - day.surge_at_s
        rates = np.where((began >= 0) & (began < day.surge_s), rates * day.surge_factor, rates)
    if day.scatter_frac:
        rates = rates * np.maximum(0.0, 1 + day.scatter_frac * rng.standard_normal(day.duration_s))
    return rng.poisson(rates).astype(float)


def _whole(
    day: Day,
    arrivals: Array,
    replicas: tuple[NDArray[np.int64], NDArray[np.int64]],
    backlog: Array,
    wait_s: Array,
) -> Capacity:
    ready, starting = replicas
    answer_s = wait_s + 1.5 * day.batch_s
    order = np.argsort(answer_s)
    share = np.cumsum(arrivals[order]) / max(1.0, arrivals.sum())
    places = np.minimum(np.searchsorted(share, [0.50, 0.95, 0.99]), len(order) - 1)
    tops = answer_s[order][places].tolist()
    moves = np.sign(np.diff(ready + starting))
    moves = moves[moves != 0]
    return Capacity(
        day=day, arrivals=arrivals, ready=ready, starting=starting, backlog=backlog, wait_s=wait_s,
        replica_s=float((ready + starting).sum()),
        late_frac=float(arrivals[answer_s > day.slo_s].sum() / max(1.0, arrivals.sum())),
        p50_s=tops[0], p95_s=tops[1], p99_s=tops[2], reversals=int((np.diff(moves) != 0).sum()),
    )  # fmt: skip
