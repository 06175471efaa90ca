"""The service without its plumbing: admission, batcher, router and autoscaler put together, driven by events. Pure.

Whoever drives it (the simulation, the live service) tells what happened and when, and carries out what comes back.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable

from mlsyslab.labs.serving.config import Config
from mlsyslab.labs.serving.policies import (
    EARLY,
    EVERYBODY,
    Admission,
    Autoscaler,
    Backlog,
    Batch,
    Batcher,
    Load,
    Refusal,
    ReplicaState,
    Request,
    Router,
)

RECENT_S = 2.0  # what the autoscaler calls recent
RECENT_ROWS = 10  # fewer say little about a rate
SMOOTH = 0.2  # weight of the newest batch in the running estimate of a batch's seconds


class Core:
    """Decides; never waits and never looks at a clock. `now`, seconds, must not go backwards.

    Every request that is let in leaves exactly once: answered after `finished`, by `expire`, by `cancel`, or given up
    by `lost`. batch_seconds: rows -> seconds, where a curve was measured; else it is learnt from the batches.
    """

    def __init__(
        self,
        batcher: Batcher,
        admission: Admission,
        router: Router,
        autoscaler: Autoscaler | None = None,
        batch_seconds: Callable[[int], float] | None = None,
    ) -> None:
        self.batcher, self.admission, self.router, self.autoscaler = batcher, admission, router, autoscaler
        self.replicas: dict[int, ReplicaState] = {}
        self.draining = False
        self.full_batch_s = batch_seconds(batcher.max_batch) if batch_seconds else 0.0
        self._learns = batch_seconds is None
        self._running: OrderedDict[int, ReplicaState] = OrderedDict()  # oldest batch first
        self._ready = self._free = 0
        self._idle_s, self._idle_since_s = 0.0, math.inf  # a clock that runs while a replica is free
        self._arrived: deque[tuple[float, int]] = deque()
        self._answered: deque[tuple[float, float]] = deque()
        self._busy: deque[tuple[float, float]] = deque()

    # ---- requests
    def arrive(self, request: Request, now: float) -> Refusal | None:
        """A request knocks; None lets it in. Raises ConfigError where it fits into no batch."""
        request.priority = self.router.priority(request, now)
        if self.autoscaler:
            self._arrived.append((now, request.rows))
        refusal = (
            Refusal("shutting down", 1.0)
            if self.draining
            else self.admission.refuse(request, now, self.backlog(now))
        )
        if refusal:
            request.state = "rejected"
            return refusal
        self.batcher.add(request)
        request.batch_wait_s = -self._idle(now)
        if self.batcher.binding == EARLY:
            self.batcher.bind(now)
        return None

    def cancel(self, request: Request) -> bool:
        """The client is gone: a waiting request leaves the queue. False where it runs already."""
        return self.batcher.discard(request)

    def expire(self, now: float) -> list[Request]:
        """The requests whose deadline has come while they waited; they are not computed."""
        return self.batcher.expire(now)

    def dispatch(self, now: float) -> list[tuple[ReplicaState, Batch]]:
        """The batches to start now, each with its replica. Call it after every other event, and at `due_s()`."""
        started: list[tuple[ReplicaState, Batch]] = []
        idle_s = self._idle(now)
        early = self.batcher.binding == EARLY
        while self._free:
            batch = self.batcher.take(now, drain=self.draining)
            if batch is None:
                return started
            replica = self.router.pick()
            assert replica is not None  # _free counts what it was offered
            replica.running, replica.started_s = batch, now
            self._running[replica.name] = replica
            self._count_free(-1, now)
            for request in batch.requests:
                request.started_s = now
                held_s = batch.formed_s - request.arrival_s if early else request.batch_wait_s + idle_s
                request.batch_wait_s = min(max(0.0, held_s), now - request.arrival_s)
            started.append((replica, batch))
        if early:
            self.batcher.bind(now, drain=self.draining)
        return started

    @property
    def free(self) -> int:
        """Ready replicas that run nothing."""
        return self._free

    def due_s(self) -> float:
        """When to call `expire` and `dispatch` though nothing happens before; infinity where never. What waits only
        for a replica has no such moment."""
        if not self.batcher.rows:
            return math.inf
        held = self._free or self.batcher.binding == EARLY
        return min(self.batcher.deadline_s(), self.batcher.due_s() if held else math.inf)

    # ---- replicas
    def add_replica(self, name: int, now: float, *, ready: bool = True) -> ReplicaState:
        """A replica that starts, or that is ready."""
        replica = self.replicas[name] = ReplicaState(name, "starting")
        if ready:
            self.ready(name, now)
        return replica

    def ready(self, name: int, now: float) -> None:
        """A replica that was starting takes work from now on; one that was retired meanwhile does not."""
        replica = self.replicas[name]
        if replica.state == "starting":
            replica.state = "ready"
            self._ready += 1
            self._offer(replica, now)

    def finished(self, name: int, now: float) -> Batch:
        """A replica is done with its batch; what its requests' state becomes is the caller's to say."""
        replica = self.replicas[name]
        batch, replica.running = replica.running, None
        assert batch is not None
        del self._running[name]
        took_s = now - replica.started_s
        replica.busy_s += took_s
        replica.served_rows += batch.rows
        if self.autoscaler:
            self._busy.append((now, took_s))
        if self._learns:
            guess_s = took_s * (self.batcher.max_batch / batch.rows) ** 0.5  # between no and full cost a row
            self.full_batch_s += (SMOOTH if self.full_batch_s else 1.0) * (guess_s - self.full_batch_s)
        if replica.state == "ready":
            self._offer(replica, now)
        return batch

    def oldest(self) -> ReplicaState | None:
        """The replica whose batch has run for longest."""
        return next(iter(self._running.values()), None)

    def answered(self, now: float, total_s: float) -> None:
        """An answer went out after total_s; the autoscaler's recent p95 is made of these."""
        if self.autoscaler:
            self._answered.append((now, total_s))

    def retire(self, name: int, now: float) -> None:
        """No new batch for this replica; it may end when nothing runs on it."""
        replica = self.replicas[name]
        if replica.state == "ready":
            self._ready -= 1
            self._count_free(-1 if replica.running is None else 0, now)
        replica.state = "draining"

    def lost(self, name: int, now: float) -> tuple[list[Request], list[Request]]:
        """A replica is gone: (requests that go back into the queue, requests given up, whose second replica it was)."""
        self.retire(name, now)
        replica = self.replicas.pop(name)
        replica.state = "gone"
        self._running.pop(name, None)
        again, given_up = [], []
        for request in replica.running.requests if replica.running else ():
            if request.state != "running":
                continue  # its client has gone meanwhile
            if request.retries:
                request.state = "error"
                given_up.append(request)
            else:
                request.retries += 1
                self.batcher.add(request)
                request.batch_wait_s -= self._idle(now)
                again.append(request)
        return again, given_up

    def scale(self, now: float) -> int | None:
        """How many replicas there should be now, those that start included; None without an autoscaler."""
        return self.autoscaler.decide(now, self.load(now)) if self.autoscaler else None

    # ---- what the policies look at
    def backlog(self, now: float) -> Backlog:
        """What stands before a new request. Constant time."""
        left_s = 0.0
        if (oldest := self.oldest()) and not self._free:
            left_s = max(0.0, oldest.started_s + self.full_batch_s - now)
        return Backlog(self.batcher.rows, self._ready, self.batcher.max_batch, self.full_batch_s, left_s)

    def load(self, now: float) -> Load:
        """What the autoscaler looks at, over the last RECENT_S, or RECENT_ROWS rows of one replica if they take longer."""
        recent_s = max(RECENT_S, RECENT_ROWS * self.full_batch_s / self.batcher.max_batch)
        for recent in (self._arrived, self._answered, self._busy):
            while recent and recent[0][0] < now - recent_s:
                recent.popleft()
        states = [replica.state for replica in self.replicas.values()]
        under_way_s = sum(min(now - replica.started_s, recent_s) for replica in self._running.values())
        busy_s = sum(took_s for _, took_s in self._busy) + under_way_s
        totals = sorted(total_s for _, total_s in self._answered)
        return Load(
            ready=self._ready,
            starting=states.count("starting"),
            queued_rows=self.batcher.rows,
            rate_per_s=sum(rows for _, rows in self._arrived) / recent_s,
            capacity_per_s=self.batcher.max_batch / self.full_batch_s if self.full_batch_s else 0.0,
            busy_frac=min(1.0, busy_s / recent_s / self._ready) if self._ready else 0.0,
            p95_s=totals[math.ceil(0.95 * len(totals)) - 1] if totals else 0.0,
        )

    def _offer(self, replica: ReplicaState, now: float) -> None:
        self.router.offer(replica)
        self._count_free(1, now)

    def _count_free(self, change: int, now: float) -> None:
        """Keep the idle clock: it runs while at least one replica is free."""
        self._idle_s = self._idle(now)
        self._free += change
        self._idle_since_s = now if self._free else math.inf

    def _idle(self, now: float) -> float:
        return self._idle_s + (now - self._idle_since_s if self._free else 0.0)


def assemble(config: Config, batch_seconds: Callable[[int], float] | None = None) -> Core:
    """The core that a configuration asks for, without replicas. batch_seconds: see Core."""
    return Core(
        Batcher(config.max_batch, config.max_wait_s, config.binding, config.aging_s),
        Admission(max_queue_rows=config.max_queue) if config.admission else EVERYBODY,
        Router(config.urgent_slack_s),
        Autoscaler(config.floor, config.ceiling, config.slo_p95_s) if config.autoscale else None,
        batch_seconds,
    )
