"""How many replicas there should be: the autoscaler as a pure object. Load in, number out; no clock, no I/O."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from mlsyslab.contract import ConfigError

LOOK_ROWS = 30  # in the time that one replica takes for fewer, chance looks like load
DRAIN_ROWS = 5  # a queue is not worked off faster than one replica answers so many
FORGET = 10  # look-backs after which a number of replicas that was too small may be tried again


@dataclass(frozen=True, slots=True)
class Load:
    """What an autoscaler looks at. rate_per_s and capacity_per_s (of one replica at its largest batch) in rows;
    busy_frac of the ready replicas; p95_s of recent answers (0 while there are none)."""

    ready: int
    starting: int
    queued_rows: int
    rate_per_s: float
    capacity_per_s: float
    busy_frac: float
    p95_s: float


@dataclass
class Autoscaler:
    """How many replicas there should be: up at once, down slowly.

    floor and ceiling bound it; floor=0 is scale-to-zero. Up: when arrivals, and the queue to be worked off within
    drain_s (or the time that one replica takes for DRAIN_ROWS rows), need more than target_frac of the capacity; or
    when the recent p95 misses slo_p95_s while replicas are busy. Down: one replica at a time, never while requests
    queue, and when the largest need of the last down_after_s (or of LOOK_ROWS rows of one replica) is lower by the
    square root of the replicas, by which chance moves a load. Where it had to go up again after that, it stays up for
    a while. So chance does not make it go up and down.
    """

    floor: int = 1
    ceiling: int = 4
    slo_p95_s: float = math.inf
    target_frac: float = 0.7
    drain_s: float = 1.0
    down_after_s: float = 5.0
    _needs: deque[tuple[float, int]] = field(default_factory=deque, repr=False)
    _changed_s: float = field(default=-math.inf, repr=False)
    _fewer_s: float = field(default=-math.inf, repr=False)  # when it last went down
    _too_few: tuple[float, int] = field(
        default=(-math.inf, 0), repr=False
    )  # until when so many are not tried again

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= self.ceiling or self.ceiling < 1:
            raise ConfigError(
                f"Autoscaler(floor={self.floor}, ceiling={self.ceiling}): 0 <= floor <= ceiling and ceiling >= 1 must hold"
            )

    def need(self, load: Load) -> int:
        """Replicas that this load needs, whatever there is now."""
        if load.capacity_per_s <= 0:  # not measured yet: one replica to find out
            return max(self.floor, min(self.ceiling, 1 if load.queued_rows or load.rate_per_s else 0))
        drain_s = max(self.drain_s, DRAIN_ROWS / load.capacity_per_s)
        rows_per_s = load.rate_per_s / self.target_frac + load.queued_rows / drain_s
        wanted = math.ceil(rows_per_s / load.capacity_per_s - 1e-9)
        if load.p95_s > self.slo_p95_s and load.busy_frac > self.target_frac:
            wanted = max(wanted, load.ready + 1)
        return max(self.floor, min(self.ceiling, wanted))

    def decide(self, now: float, load: Load) -> int:
        """How many replicas to have from now on, those that are starting included."""
        have = load.ready + load.starting
        look_s = max(self.down_after_s, LOOK_ROWS / load.capacity_per_s if load.capacity_per_s > 0 else 0.0)
        if self._changed_s == -math.inf:
            self._changed_s = now
        needed = self.need(load)
        while self._needs and self._needs[-1][1] <= needed:
            self._needs.pop()  # a later and larger need outlives it, so that the first is always the largest
        self._needs.append((now, needed))
        while self._needs[0][0] < now - look_s:
            self._needs.popleft()
        if needed > have:
            if now < max(self._fewer_s + FORGET * look_s, self._too_few[0]):  # going down was a mistake
                self._too_few = now + FORGET * look_s, needed - 1
            self._changed_s = now
            return needed
        least = max(self.floor, self._too_few[1] + 1 if now < self._too_few[0] else 0)
        quiet = self._needs[0][1] <= have - math.isqrt(have) and now - self._changed_s >= look_s
        if quiet and not load.queued_rows and have > least:
            self._changed_s = now - look_s * 0.8  # the next one goes a fifth of that later
            self._fewer_s = now
            return have - 1
        return have
