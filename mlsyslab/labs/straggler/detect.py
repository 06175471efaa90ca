"""The detector for a running job: names a rank from the last few rounds, step by step. Pure.

It keeps WINDOW rounds and names a rank that exceeded the others in all but one of them, by more than the job's
own scatter. Constant cost a record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlsyslab.labs.straggler.blame import AFTER, BEFORE, median_of_others

WINDOW = 8  # rounds; a +20 % fault is named within 10 steps
LIMIT_FRAC = 0.09  # of a healthy rank's work, on average over the window
EACH_FRAC = 0.045  # of it, in each round but one


@dataclass(frozen=True, kw_only=True)
class Named:
    """A rank that holds the job up since about `step`; excess_frac of a healthy rank's own work."""

    rank: int
    step: int
    excess_frac: float


class Detector:
    """Feed it step records as they come, in any order of ranks; it answers with `Named` once a rank stands out.

    ranks: of the job. Records marked as warm-up are passed over. A step counts when every rank has reported it.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._open: dict[int, dict[int, Mapping[str, Any]]] = {}
        self._after: list[float] | None = None
        self._own: list[list[float]] = []

    def feed(self, record: Mapping[str, Any]) -> Named | None:
        """Take one record (rank, step, warmup and the phases); the verdict after it, or None."""
        step = int(record["step"])
        rows = self._open.setdefault(step, {})
        rows[int(record["rank"])] = record
        if len(rows) < self.ranks:
            return None
        del self._open[step]
        ordered = [rows[rank] for rank in sorted(rows)]
        after = [sum(float(row[name]) for name in AFTER) for row in ordered]
        before, self._after = self._after, after
        if before is None or any(row["warmup"] for row in ordered):
            return None
        mine = [sum(float(row[name]) for name in BEFORE) for row in ordered]
        self._own = [*self._own, [a + b for a, b in zip(before, mine, strict=True)]][-WINDOW:]
        return self._judge(sorted(rows), step)

    def _judge(self, ranks: list[int], step: int) -> Named | None:
        if len(self._own) < WINDOW:
            return None
        own = np.array(self._own)
        excess = own - median_of_others(own)
        base_s = float(np.median(own.min(1) if self.ranks == 2 else np.median(own, 1)))
        often = (excess > EACH_FRAC * base_s).sum(0) >= WINDOW - 1
        middle = np.median(excess, 0)
        found = np.flatnonzero(often & (middle > LIMIT_FRAC * base_s))
        if not len(found):
            return None
        worst = int(found[np.argmax(middle[found])])
        return Named(rank=ranks[worst], step=step, excess_frac=float(middle[worst] / base_s))
