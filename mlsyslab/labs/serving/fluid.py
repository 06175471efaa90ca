"""The traffic against the replicas that were ready, as a fluid: when more came than could be done. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlsyslab.labs.serving.config import Config
from mlsyslab.labs.serving.curves import Array

CELLS = 4000  # of a run's time


class Lives:
    """When each replica was asked for, ready and gone, from a run's events; without events config.replicas all along.

    starts: (asked, ready) of those asked for after the beginning. losses: (lost, when the next one was ready).
    """

    def __init__(self, events: Sequence[Mapping[str, Any]], replicas: int, end_s: float) -> None:
        asked: dict[Any, float] = {}
        ready: dict[Any, float] = {}
        gone: dict[Any, float] = {}
        lost: list[float] = []
        self.replica_s: float | None = None
        for event in events:
            name, at_s = event.get("replica"), float(event.get("time_s") or 0.0)
            what = event.get("event")
            if what == "asked":
                asked[name] = at_s
            elif what == "ready":
                ready[name] = at_s
            elif what in ("retire", "lost", "killed"):
                gone.setdefault(name, at_s)
                lost += [at_s] if what == "lost" else []
            elif what == "end":
                self.replica_s = event.get("replica_s")
        if not asked:
            ready = dict.fromkeys(range(replicas), 0.0)
        if self.replica_s is None and not asked:
            self.replica_s = replicas * end_s
        self.spans = [(at_s, gone.get(name, math.inf)) for name, at_s in ready.items()]
        self.starts = [(asked[name], at_s) for name, at_s in ready.items() if asked.get(name, 0.0) > 0]
        self.losses = [(at_s, min((r for a, r in self.starts if a >= at_s), default=at_s)) for at_s in lost]

    def ready_at(self, when_s: Array) -> NDArray[np.int64]:
        """Ready replicas at each moment."""
        begins = np.sort([begin_s for begin_s, _ in self.spans])
        ends = np.sort([end_s for _, end_s in self.spans])
        return np.searchsorted(begins, when_s, side="right") - np.searchsorted(ends, when_s, side="right")

    def mean_ready(self, begin_s: float, end_s: float) -> float:
        """Mean over a stretch of time."""
        overlaps = [max(0.0, min(b, end_s) - max(a, begin_s)) for a, b in self.spans]
        return sum(overlaps) / (end_s - begin_s)

    @staticmethod
    def within(when_s: Array, spans: Sequence[tuple[float, float]], more_s: float) -> NDArray[np.bool_]:
        """Which moments lie in one of the spans, or up to more_s after it."""
        inside = np.zeros(len(when_s), bool)
        for begin_s, end_s in spans:
            inside |= (when_s >= begin_s) & (when_s <= end_s + more_s)
        return inside


class Fluid:
    """Arrivals in cells of time against the ready replicas' rate: Lindley's recursion on the cells' sums."""

    def __init__(self, config: Config, lives: Lives, curve: Array) -> None:
        self.config = config
        self.edges_s = np.linspace(0.0, max(config.duration_s, 1e-9), CELLS + 1)
        middles = (self.edges_s[1:] + self.edges_s[:-1]) / 2
        self.rate_per_s = np.maximum(0, lives.ready_at(middles)) * config.max_batch / float(curve[-1])

    def late(self, when_s: Array, rows: Array) -> NDArray[np.bool_]:
        """Which requests meet a backlog that takes more than half of the target to work off, or that the admission's
        queue does not hold, if these were all. Half: a batch or two are in the target already."""
        config = self.config
        came = np.histogram(when_s, self.edges_s, weights=rows)[0]
        over = np.cumsum(came - self.rate_per_s * np.diff(self.edges_s))
        backlog = over - np.minimum(0.0, np.minimum.accumulate(over))
        most = config.slo_p95_s / 2 * self.rate_per_s
        if config.admission:
            most = np.minimum(most, config.max_queue)
        cell = np.clip(np.searchsorted(self.edges_s, when_s, side="right") - 1, 0, CELLS - 1)
        return np.asarray((backlog > most)[cell])


def dispersion(when_s: Array, window_s: float) -> float:
    """Variance over mean of the counts in windows: 1 for a Poisson process, whatever its rate. Windows hold at least
    about 5 requests; 1 where there are not ten of them."""
    if len(when_s) < 50:
        return 1.0
    lasts_s = float(when_s[-1] - when_s[0])
    number = min(int(lasts_s / window_s) if window_s > 0 else 0, len(when_s) // 5)
    if number < 10:
        return 1.0
    counts = np.histogram(when_s, number)[0]
    return float(counts.var() / counts.mean())
