"""A discrete-event simulation of the service with its real policy objects, in virtual time. Pure.

What it takes to be true: a batch takes curve(rows) seconds on every replica, times a random factor where noise is given;
deciding, sending and receiving take no time, but for overhead_s on each answer.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mlsyslab.labs.serving.arrivals import Schedule
from mlsyslab.labs.serving.arrivals import schedule as schedule_of
from mlsyslab.labs.serving.config import Config
from mlsyslab.labs.serving.core import Core, assemble
from mlsyslab.labs.serving.curves import Array, Curve, seconds_of
from mlsyslab.labs.serving.policies import EARLY, Batch, ReplicaState, Request
from mlsyslab.labs.serving.simulated import ERROR, EXPIRED, REJECTED, Simulated, simulated

COLD_S = 5.0  # interpreter, torch and model from nothing
START_S = 0.4  # from a process that stands by with torch imported
DECIDE_S = 0.25  # how often the autoscaler is asked
BACK_OFF_S = 0.01  # of a closed-loop client that was not answered


def simulate(
    config: Config,
    curve: Curve,
    schedule: Schedule | None = None,
    *,
    noise: float | Array | None = None,
    cold_s: float = COLD_S,
    start_s: float = START_S,
    overhead_s: float = 0.0,
    replicas: int | None = None,
) -> Simulated:
    """Run a configuration in virtual time: a million requests in seconds, a thousand replicas too.

    curve: seconds of a batch by its rows (`curves.seconds_of`). schedule: default `arrivals.schedule(config)`. noise:
    the spread of a lognormal factor of mean 1 on each batch's seconds, or factors to draw from. cold_s, start_s: until
    a new replica is ready, from nothing (config.cold) or from a process that stands by. overhead_s: added to each
    answer, as transport would. replicas: at the start, instead of config.replicas, which has the bound of one machine.

    With config.clients so many closed-loop clients send until duration_s is over, each as soon as it has its answer; the
    schedule only says what they send. A stall keeps them from sending, and so hides the requests that would have met it
    (coordinated omission; Tene 2013, "How NOT to Measure Latency").
    Raises ConfigError for a curve that does not reach max_batch.
    """
    planned = schedule_of(config) if schedule is None else schedule
    seconds = seconds_of(curve, config.max_batch)
    world = World(config, seconds, planned, noise, cold_s if config.cold else start_s)
    world.run(config.replicas if replicas is None else replicas)
    return simulated(world, overhead_s)


class World:
    """The event loop and what it notes down. A handler is called with (now, payload) at its time."""

    def __init__(
        self,
        config: Config,
        seconds: Array,
        planned: Schedule,
        noise: float | Array | None,
        ready_after_s: float,
    ) -> None:
        self.config, self.planned, self.ready_after_s = config, planned, ready_after_s
        left_s = (planned.deadline_s - planned.time_s).tolist()
        self.asked = list(zip(planned.rows.tolist(), planned.priority.tolist(), left_s, strict=True))
        self.seconds = [0.0, *seconds.tolist()]
        self.core: Core = assemble(config)
        self.events: list[tuple[float, int, Callable[[float, Any], None], Any]] = []
        self.pushed = 0
        # A value for each request that was sent, in that order.
        self.sent_s: list[float] = []
        self.batch_of: list[int] = []
        self.held_s: list[float] = []
        self.ended: dict[int, tuple[int, float]] = {}  # of requests without an answer: (outcome, when)
        self.retried: list[int] = []
        self.started: list[tuple[float, float, int, int, int, str]] = []
        self.notes: list[dict[str, Any]] = []
        self.born_s: dict[int, float] = {}
        self.names = 0
        self.replica_s, self.end_s = 0.0, config.duration_s
        self.factors = _factors(noise, len(planned), config.seed)

    def push(self, at_s: float, handler: Callable[[float, Any], None], payload: Any = None) -> None:
        self.pushed += 1
        heapq.heappush(self.events, (at_s, self.pushed, handler, payload))

    def run(self, replicas: int) -> None:
        """Until nothing can happen any more. At one moment, replicas come before requests, requests before timers."""
        config, core, events = self.config, self.core, self.events
        for _ in range(replicas):
            self.add(0.0, ready=True)
        if config.autoscale:
            self.push(0.0, self.tick)
        if config.kill_at_s:
            self.push(config.kill_at_s, self.kill)
        for _ in range(config.clients if self.asked else 0):
            self.push(0.0, self.arrive)
        arrivals = [*(() if config.clients else self.planned.time_s.tolist()), math.inf]
        early, i, due_s = config.binding == EARLY, 0, math.inf
        while True:
            arrival_s = arrivals[i]
            if events and events[0][0] <= arrival_s and events[0][0] <= due_s:
                now, _, handler, payload = heapq.heappop(events)
                handler(now, payload)
            elif arrival_s <= due_s:
                if arrival_s == math.inf:
                    return
                now = arrival_s
                self.arrive(now)
                i += 1
            else:
                now = due_s
                for request in core.expire(now):
                    self.leave(request, EXPIRED, now)
            if core.free or early:
                for replica, batch in core.dispatch(now):
                    self.start(now, replica, batch)
            due_s = core.due_s()

    # ---- requests
    def arrive(self, now: float, _: Any = None) -> None:
        number = len(self.sent_s)
        rows, priority, left_s = self.asked[number % len(self.asked)]
        request = Request(number, now, rows, priority, now + left_s)
        self.sent_s.append(now)
        self.batch_of.append(-1)
        self.held_s.append(0.0)
        if self.core.arrive(request, now):
            self.leave(request, REJECTED, now)

    def leave(self, request: Request, outcome: int, now: float) -> None:
        self.ended[request.id] = outcome, now
        self.again(now + BACK_OFF_S)

    def again(self, at_s: float) -> None:
        """A closed-loop client, if there are any, sends its next request."""
        if self.config.clients and at_s < self.config.duration_s:
            self.push(at_s, self.arrive)

    def start(self, now: float, replica: ReplicaState, batch: Batch) -> None:
        took_s = self.seconds[batch.rows]
        if self.factors is not None:
            took_s *= self.factors[len(self.started) % len(self.factors)]
        index, held_s, batch_of = len(self.started), self.held_s, self.batch_of
        for request in batch.requests:
            batch_of[request.id] = index
            held_s[request.id] = request.batch_wait_s
        took_s = self.stalled(now, took_s)
        self.started.append((now, took_s, batch.rows, len(batch.requests), replica.name, batch.reason))
        self.push(now + took_s, self.finish, (replica, batch))

    def finish(self, now: float, running: tuple[ReplicaState, Batch]) -> None:
        replica, batch = running
        if replica.running is not batch or replica.state == "gone":
            return  # it died meanwhile
        core, closed = self.core, self.config.clients
        core.finished(replica.name, now)
        self.end_s = now if now > self.end_s else self.end_s
        for request in batch.requests:
            request.state = "ok"
            if closed:
                self.again(now)
        if core.autoscaler:
            for request in batch.requests:
                core.answered(now, now - request.arrival_s)
        if replica.state == "draining":
            self.remove(replica, now)

    def stalled(self, now: float, took_s: float) -> float:
        """Seconds of a batch that starts now, the time for which its replica stands still included."""
        begin_s, end_s = self.config.stall_at_s, self.config.stall_at_s + self.config.stall_s
        if now < begin_s < now + took_s:
            return took_s + self.config.stall_s
        return end_s - now + took_s if begin_s <= now < end_s else took_s

    # ---- replicas
    def note(self, what: str, name: int, now: float) -> None:
        """An event in the form of a measured run's."""
        self.notes.append({"kind": "event", "event": what, "replica": name, "time_s": now})

    def add(self, now: float, *, ready: bool) -> None:
        name, self.names = self.names, self.names + 1
        self.born_s[name] = now
        self.core.add_replica(name, now, ready=ready)
        self.note("asked", name, now)
        if ready:
            self.note("ready", name, now)
        else:
            self.push(now + self.ready_after_s, self.ready, name)

    def ready(self, now: float, name: int) -> None:
        if name in self.core.replicas and self.core.replicas[name].state == "starting":
            self.core.ready(name, now)
            self.note("ready", name, now)

    def remove(self, replica: ReplicaState, now: float, what: str = "retired") -> list[Request]:
        """The replica is gone; gives the requests that end with it."""
        again, given_up = self.core.lost(replica.name, now)
        self.retried += [request.id for request in again]
        self.replica_s += now - self.born_s.pop(replica.name)
        self.note(what, replica.name, now)
        return given_up

    def kill(self, now: float, _: Any) -> None:
        """One replica dies, one that works where there is one, and another is started in its place."""
        ready = [one for one in self.core.replicas.values() if one.state == "ready"]
        if not ready:
            return
        victim = next((one for one in ready if one.running), ready[0])
        for request in self.remove(victim, now, "lost"):
            self.leave(request, ERROR, now)
        if not self.config.autoscale:  # else it says so itself
            self.add(now, ready=False)

    def tick(self, now: float, _: Any) -> None:
        """Ask the autoscaler and do what it says."""
        core = self.core
        wanted = core.scale(now)
        alive = [one for one in core.replicas.values() if one.state in ("ready", "starting")]
        if wanted is not None and wanted != len(alive):
            for _ in range(wanted - len(alive)):
                self.add(now, ready=False)
            idle_last = sorted(
                alive, key=lambda one: (one.state == "ready", one.running is not None, -one.name)
            )
            for replica in idle_last[: max(0, len(alive) - wanted)]:
                core.retire(replica.name, now)
                self.note("retire", replica.name, now)
                if replica.running is None:
                    self.remove(replica, now)
        if now < self.config.duration_s or core.batcher.count:
            self.push(now + DECIDE_S, self.tick)


def _factors(noise: float | Array | None, number: int, seed: int) -> list[float] | None:
    """Factors on the batches' seconds, to be used one after the other."""
    if noise is None or (isinstance(noise, (int, float)) and noise == 0):
        return None
    rng = np.random.default_rng((seed, 1))
    many = max(1, min(number, 2**18))
    if isinstance(noise, (int, float)):
        factors = rng.lognormal(-(noise**2) / 2, noise, many)
    else:
        factors = rng.choice(np.asarray(noise, float), many)
    return list(map(float, factors))
