"""The decisions of a serving system as pure objects: state and events in, decisions out; no clock, no I/O.

The same objects run in the simulation, in the live service and inside Ray Serve. Times are seconds on the caller's
clock, sizes are rows (one request may carry several).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from mlsyslab.contract import ConfigError
from mlsyslab.labs.serving.scaling import Autoscaler, Load

__all__ = [
    "BINDINGS",
    "EARLY",
    "EVERYBODY",
    "LATE",
    "LEVELS",
    "Admission",
    "Autoscaler",
    "Backlog",
    "Batch",
    "Batcher",
    "Load",
    "Refusal",
    "ReplicaState",
    "Request",
    "Router",
]

LATE, EARLY = "late", "early"
BINDINGS = (LATE, EARLY)
LEVELS = 10  # priorities 0 (most urgent) to 9
WAITING = ("waiting", "bound")
SLACK = 64  # entries of requests that have left may lie about; beyond twice the waiting and these they are swept out


@dataclass(eq=False, slots=True)
class Request:
    """One request as the policies see it. deadline_s: the moment at which an answer is worth nothing any more.

    state: "new", "waiting", "bound" (into a batch that waits for a replica), "running", or how it ended. Once it
    runs: started_s, and batch_wait_s, the seconds for which the batcher held it back (the rest of its wait was for a
    replica).
    """

    id: int
    arrival_s: float
    rows: int = 1
    priority: int = 1
    deadline_s: float = math.inf
    payload: Any = None
    state: str = "new"
    retries: int = 0
    started_s: float = 0.0
    batch_wait_s: float = 0.0


class Batch(NamedTuple):
    """Requests that run together, and why they were released: "full", "waited" or "drain"."""

    requests: tuple[Request, ...]
    rows: int
    reason: str
    formed_s: float


class Batcher:
    """Which requests run together, and when.

    max_batch: rows of a batch. max_wait_s: how long the oldest request may be held back for company while a replica is
    free. binding: "late" forms a batch when a replica takes it, so that everything which came meanwhile is in it;
    "early" forms it by count or by the clock, whether or not a replica is free, as Ray's `@serve.batch` and LitServe
    do. aging_s: order is by arrival + priority × aging_s: first come, first served within a priority, and a request
    is overtaken only by those of a higher priority that come less than aging_s a level later, so none starves.
    """

    def __init__(
        self, max_batch: int = 8, max_wait_s: float = 0.005, binding: str = LATE, aging_s: float = 0.1
    ) -> None:
        if max_batch < 1 or max_wait_s < 0 or aging_s < 0 or binding not in BINDINGS:
            raise ConfigError(
                f"Batcher(max_batch={max_batch}, max_wait_s={max_wait_s:g}, binding={binding!r}, aging_s={aging_s:g}): "
                f"max_batch must be at least 1, times must not be negative, and binding is one of {', '.join(BINDINGS)}"
            )
        self.max_batch, self.max_wait_s, self.binding, self.aging_s = max_batch, max_wait_s, binding, aging_s
        self.rows = self.count = 0  # of all that wait, bound or not
        self._loose = 0  # rows that are not bound
        self._lines: dict[int, deque[Request]] = {}
        self._bound: deque[Batch] = deque()
        self._deadlines: list[tuple[float, int, Request]] = []

    def add(self, request: Request) -> None:
        """Take a request in; raises ConfigError where it has more rows than a batch may have."""
        if not 1 <= request.rows <= self.max_batch:
            raise ConfigError(
                f"a request of {request.rows} rows does not fit into a batch of at most {self.max_batch}; split it"
            )
        line = self._lines.get(request.priority)
        if line is None:
            line = self._lines[request.priority] = deque()
        if line and line[-1].arrival_s > request.arrival_s:  # a retried one goes back to its own place
            line.append(request)
            self._lines[request.priority] = deque(sorted(line, key=lambda one: one.arrival_s))
        else:
            if len(line) > 2 * self.count + SLACK:
                line = self._lines[request.priority] = deque(one for one in line if one.state == "waiting")
            line.append(request)
        request.state = "waiting"
        self.rows += request.rows
        self._loose += request.rows
        self.count += 1
        if request.deadline_s != math.inf:
            if len(self._deadlines) > 2 * self.count + SLACK:
                self._deadlines = [entry for entry in self._deadlines if entry[2].state in WAITING]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (request.deadline_s, request.id, request))

    def discard(self, request: Request, state: str = "cancelled") -> bool:
        """Forget a waiting request, bound or not; False where it does not wait. Constant time."""
        if request.state not in WAITING:
            return False
        if request.state == "waiting":
            self._loose -= request.rows
        request.state = state
        self.rows -= request.rows
        self.count -= 1
        return True

    def expire(self, now: float) -> list[Request]:
        """Take out the requests whose deadline has come, earliest first."""
        gone = []
        while self.deadline_s() <= now:
            request = heapq.heappop(self._deadlines)[2]
            self.discard(request, "expired")
            gone.append(request)
        return gone

    def take(self, now: float, *, drain: bool = False) -> Batch | None:
        """The batch for a replica that is free now, or None: nothing waits, or it still waits for company.

        drain: hold nothing back.
        """
        if self.binding == EARLY:
            self.bind(now, drain=drain)
            while self._bound:
                bound = self._bound.popleft()
                kept = tuple(one for one in bound.requests if one.state == "bound")
                if kept:
                    return self._release(kept, bound.reason, bound.formed_s)
            return None
        reason = self._reason(now, drain)
        return self._release(self._next(), reason, now) if reason else None

    def bind(self, now: float, *, drain: bool = False) -> None:
        """Early binding only: form the batches that count or clock ask for."""
        while reason := self._reason(now, drain):
            chosen = self._next()
            for request in chosen:
                request.state = "bound"
            if len(self._bound) > 2 * self.count + SLACK:
                self._bound = deque(
                    batch for batch in self._bound if any(one.state == "bound" for one in batch.requests)
                )
            self._bound.append(Batch(chosen, sum(one.rows for one in chosen), reason, now))

    def due_s(self) -> float:
        """When waiting alone completes a batch; infinity where it will not."""
        return self._oldest_s() + self.max_wait_s if self._loose else math.inf

    def deadline_s(self) -> float:
        """The next deadline of a waiting request; infinity where there is none."""
        while self._deadlines and self._deadlines[0][2].state not in WAITING:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else math.inf

    def waiting(self) -> list[Request]:
        """The requests that wait, bound ones first."""
        bound = [one for batch in self._bound for one in batch.requests]
        loose = [one for level in sorted(self._lines) for one in self._lines[level]]
        return [one for one in bound + loose if one.state in WAITING]

    def _reason(self, now: float, drain: bool) -> str:
        if not self._loose:
            return ""
        if self._loose >= self.max_batch:
            return "full"
        if now >= self._oldest_s() + self.max_wait_s:
            return "waited"
        return "drain" if drain else ""

    def _oldest_s(self) -> float:
        """Arrival of the oldest loose request; infinity without one. What has left since goes out of the lines here."""
        oldest_s = math.inf
        for line in self._lines.values():
            while line and line[0].state != "waiting":
                line.popleft()
            if line and line[0].arrival_s < oldest_s:
                oldest_s = line[0].arrival_s
        return oldest_s

    def _first(self) -> deque[Request] | None:
        """The line whose head is next: by arrival + priority × aging_s, then by priority; None where nobody waits."""
        first, least = None, (math.inf, 0)
        for level, line in self._lines.items():
            while line and line[0].state != "waiting":
                line.popleft()
            if line and (line[0].arrival_s + level * self.aging_s, level) < least:
                first, least = line, (line[0].arrival_s + level * self.aging_s, level)
        return first

    def _next(self) -> tuple[Request, ...]:
        """Take the first requests out of the lines, in order, while they fit. One that does not fit is not overtaken."""
        chosen: list[Request] = []
        room = self.max_batch
        while room and (line := self._first()) and line[0].rows <= room:
            chosen.append(line.popleft())
            room -= chosen[-1].rows
        self._loose -= self.max_batch - room
        return tuple(chosen)

    def _release(self, chosen: tuple[Request, ...], reason: str, formed_s: float) -> Batch:
        rows = 0
        for request in chosen:
            request.state = "running"
            rows += request.rows
        self.rows -= rows
        self.count -= len(chosen)
        return Batch(chosen, rows, reason, formed_s)


class Backlog(NamedTuple):
    """What stands before a new request. batch_s: seconds of a full batch; 0 while unknown. left_s: until the next
    replica is free."""

    queued_rows: int
    replicas: int
    max_batch: int
    batch_s: float
    left_s: float = 0.0

    def wait_s(self) -> float:
        """Seconds until a request that comes now would start: full batches before it over the replicas. Infinity
        without a replica."""
        if self.replicas == 0:
            return math.inf
        return self.left_s + self.queued_rows // self.max_batch * self.batch_s / self.replicas


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not let in ("queue full" or "deadline"), and when to come again, in seconds."""

    reason: str
    retry_after_s: float


@dataclass(frozen=True)
class Admission:
    """Whom to let in. max_queue_rows: the queue's bound, in rows. deadline_aware: refuse at once what could not be
    answered in time. limit_wait_s: refuse what would wait longer than this."""

    max_queue_rows: int = 64
    deadline_aware: bool = True
    limit_wait_s: float = math.inf

    def refuse(self, request: Request, now: float, backlog: Backlog) -> Refusal | None:
        """None lets the request in."""
        if backlog.queued_rows + request.rows > self.max_queue_rows:
            known_s = backlog.wait_s() if backlog.replicas else 1.0
            return Refusal("queue full", max(known_s, backlog.batch_s))
        bounded = self.limit_wait_s != math.inf or request.deadline_s != math.inf
        if backlog.replicas == 0 or not bounded:
            return (
                None  # without a replica: how long a start takes is not known here; the queue's bound holds
            )
        wait_s = backlog.wait_s()
        if wait_s > self.limit_wait_s:
            return Refusal("queue full", wait_s - self.limit_wait_s)
        # Who finds nobody before it is let in: a batch's seconds are an estimate, and who refuses everybody never learns.
        alone = backlog.queued_rows == 0 and wait_s == 0
        if self.deadline_aware and not alone and now + wait_s + backlog.batch_s > request.deadline_s:
            return Refusal("deadline", wait_s)
        return None


EVERYBODY = Admission(max_queue_rows=2**62, deadline_aware=False)
"""No admission control: what overload does to such a queue is a lesson of its own."""


@dataclass(eq=False, slots=True)
class ReplicaState:
    """A replica as the router sees it. state: "starting", "ready", "draining" or "gone"."""

    name: int
    state: str = "ready"
    running: Batch | None = None
    started_s: float = 0.0
    served_rows: int = 0
    busy_s: float = 0.0

    @property
    def free(self) -> bool:
        return self.state == "ready" and self.running is None


class Router:
    """Which replica gets a batch, and which request is urgent.

    urgent_slack_s: a request with less time than this until its deadline gets priority 0 when it comes.
    """

    def __init__(self, urgent_slack_s: float = 0.0) -> None:
        self.urgent_slack_s = urgent_slack_s
        self._free: list[tuple[float, int, int, ReplicaState]] = []
        self._offers = 0

    def offer(self, replica: ReplicaState) -> None:
        """A replica that has become free. O(log replicas)."""
        self._offers += 1  # a name may come back after its replica has died
        heapq.heappush(self._free, (replica.busy_s, replica.name, self._offers, replica))

    def pick(self) -> ReplicaState | None:
        """Take the least loaded free replica, the one that has worked least; None where none is free."""
        while self._free:
            replica = heapq.heappop(self._free)[3]
            if replica.free:
                return replica
        return None

    def priority(self, request: Request, now: float) -> int:
        """The priority that holds for this request."""
        return 0 if request.deadline_s - now < self.urgent_slack_s else request.priority
