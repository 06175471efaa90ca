"""The service: one process in which the policies decide and asyncio carries out. Replicas hang on a unix socket.

It sleeps until something happens or the core is due; nothing polls. What it cannot do itself, starting processes, it
asks of its caller over the control line.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlsyslab.labs.serving.config import Config
from mlsyslab.labs.serving.core import Core, assemble
from mlsyslab.labs.serving.metrics import BOUNDS_ROWS, BOUNDS_S, Histogram
from mlsyslab.labs.serving.policies import Batch, Request
from mlsyslab.labs.serving.protocol import CLASSES, EXPIRED, FAILED, GONE, REJECTED, Answer
from mlsyslab.labs.serving.wire import REPLICAS, Control, Frames, pack, run_until_told
from mlsyslab.options import from_json
from mlsyslab.ranks import leave

SCALE_EVERY_S = 0.25
DRAIN_S = 10.0  # after this a drain gives up on what is left
HUNG_S, HUNG_TIMES = (
    5.0,
    10.0,
)  # a batch that takes longer than both, the latter in full batches, will not come back

Done = Callable[[Answer], None]


class Link(asyncio.Protocol):
    """The service's end of the line to one replica."""

    def __init__(self, service: Service) -> None:
        self.service, self.frames, self.name = service, Frames(), -1
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        for head, body in self.frames.feed(data):
            if self.name < 0:
                self.name = int(head["name"])
                self.service.joined(self, head)
            else:
                self.service.finished(self.name, head, body)

    def connection_lost(self, _: Exception | None) -> None:
        if self.name >= 0:
            self.service.left(self.name)

    def send(self, batch: Batch) -> None:
        """A batch for this replica."""
        assert self.transport is not None
        rows = [request.rows for request in batch.requests]
        self.transport.write(pack({"rows": rows}, b"".join(request.payload[0] for request in batch.requests)))

    def close(self) -> None:
        """Let the replica end."""
        if self.transport:
            self.transport.close()


class Service:
    """Admission, batches, replicas and deadlines, for whoever calls `submit` in this process.

    tell: says one thing to the caller (keyword arguments), which starts and counts replicas.
    """

    def __init__(self, config: Config, tell: Callable[..., None], core: Core | None = None) -> None:
        self.config, self.tell = config, tell
        self.core = core or assemble(config)
        self.loop = asyncio.get_running_loop()
        self.now = self.loop.time
        self.links: dict[int, Link] = {}
        self.names = itertools.count()
        self.ready = asyncio.Event()
        self.outcomes = dict.fromkeys(("ok", "rejected", "expired", "error", "cancelled"), 0)
        self.total_s, self.queue_s = Histogram(BOUNDS_S), Histogram(BOUNDS_S)
        self.batch_rows = Histogram(BOUNDS_ROWS)
        self._ids = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._armed_s = math.inf
        self._empty: asyncio.Future[None] | None = None
        self.watches = True  # for replicas that hang
        self._watch: asyncio.TimerHandle | None = None
        self._slowest_s = config.paced_base_s + config.paced_row_s * config.max_batch if config.paced else 0.0

    async def open(self, folder: str) -> None:
        """Listen for replicas and ask for the first ones."""
        await self.loop.create_unix_server(lambda: Link(self), f"{folder}/{REPLICAS}")
        for _ in range(self.config.replicas):
            self._ask()
        if not self.config.replicas:
            self.ready.set()
        if self.config.autoscale:
            self.loop.call_later(SCALE_EVERY_S, self._scale)

    # ---- requests
    def submit(
        self, tokens: bytes, rows: int, done: Done, *, priority: int = 1, timeout_s: float = math.inf
    ) -> Request:
        """Take a request: `done` is called exactly once with its answer, unless it is cancelled before."""
        now = self.now()
        request = Request(next(self._ids), now, rows, priority, now + timeout_s, (tokens, done))
        refusal = self.core.arrive(request, now)
        if refusal:
            status = GONE if self.core.draining else REJECTED
            again_s = max(refusal.retry_after_s, 0.001)  # 0 would say that it was no refusal
            self._end(request, Answer(status, f"not let in: {refusal.reason}", retry_after_s=again_s), now)
        else:
            self._step(now)
        return request

    def cancel(self, request: Request) -> None:
        """The client is gone: the request leaves the queue, or its answer is thrown away."""
        if self.core.cancel(request) or request.state == "running":
            request.state = "cancelled"
            self.outcomes["cancelled"] += 1
            self._step(self.now())

    def _end(self, request: Request, answer: Answer, now: float) -> None:
        outcome = answer.outcome
        self.outcomes[outcome] += 1
        if outcome == "ok":
            total_s = now - request.arrival_s
            self.core.answered(now, total_s)
            self.total_s.observe(total_s)
            self.queue_s.observe(request.started_s - request.arrival_s)
        request.payload[1](answer)

    def _step(self, now: float) -> None:
        """Carry out what the core wants now, and wake when it will next want something."""
        for request in self.core.expire(now):
            waited_s = now - request.arrival_s
            self._end(request, Answer(EXPIRED, f"the deadline passed after {waited_s:.3f} s in the queue", queue_s=waited_s, retries=request.retries), now)  # fmt: skip
        for replica, batch in self.core.dispatch(now):
            self.links[replica.name].send(batch)
            self.batch_rows.observe(batch.rows)
            if self.watches and self._watch is None:
                self._watch = self.loop.call_later(self.patience_s(), self._look)
        due_s = self.core.due_s()
        if due_s != self._armed_s:
            if self._timer:
                self._timer.cancel()
            self._timer = self.loop.call_at(due_s, self._due) if due_s < math.inf else None
            self._armed_s = due_s
        if self._empty and self._idle() and not self._empty.done():
            self._empty.set_result(None)

    def _due(self) -> None:
        # A timer may come early by the clock's resolution; then nothing would be due yet, and it would be armed again.
        now = max(self.now(), self._armed_s)
        self._timer, self._armed_s = None, math.inf
        self._step(now)

    # ---- replicas
    def _ask(self) -> None:
        name = next(self.names)
        self.core.add_replica(name, self.now(), ready=False)
        self.tell(op="start", name=name, at_s=self.now())

    def joined(self, link: Link, hello: dict[str, Any]) -> None:
        """A replica has loaded its model and is warm."""
        now, name = self.now(), link.name
        self.links[name] = link
        replica = self.core.replicas.get(name)
        if replica is None or replica.state != "starting":  # not wanted any more
            link.close()
            return
        self.tell(op="ready", at_s=now, **hello)
        self._slowest_s = max(self._slowest_s, hello["warm_up_s"])  # it has run every size once
        self.core.ready(name, now)
        ready = sum(one.state == "ready" for one in self.core.replicas.values())
        if ready >= self.config.replicas:
            self.ready.set()
        self._step(now)

    def finished(self, name: int, head: dict[str, Any], body: bytearray) -> None:
        """A replica is done with its batch: the next one starts before the answers of this one are written."""
        now = self.now()
        batch = self.core.finished(name, now)
        replica = self.core.replicas[name]
        if replica.state == "draining":
            self.links[name].close()
        self._step(now)
        errors, offset, width = head["errors"], 0, CLASSES * 4
        for place, request in enumerate(batch.requests):
            error = errors.get(str(place))
            output = b"" if error else body[offset : offset + request.rows * width]
            offset += len(output)
            if request.state == "cancelled":
                continue
            request.state = "done"
            answer = Answer(
                FAILED if error else 200,
                error or "",
                output,
                queue_s=request.started_s - request.arrival_s - request.batch_wait_s,
                batch_wait_s=request.batch_wait_s,
                service_s=now - request.started_s,
                batch_size=batch.rows,
                replica=name,
                retries=request.retries,
            )
            self._end(request, answer, now)
        if self._empty:
            self._step(now)

    def left(self, name: int) -> None:
        """A replica's line has ended: it was told to, or it died."""
        now = self.now()
        self.links.pop(name, None)
        replica = self.core.replicas.get(name)
        if replica is None:
            return
        wanted = replica.running is None and (replica.state == "draining" or self.core.draining)
        _, given_up = self.core.lost(name, now)
        self.tell(op="retired" if wanted else "lost", name=name, at_s=now)
        for request in given_up:
            self._end(request, Answer(GONE, "two replicas were lost under it", retries=request.retries), now)
        if not (wanted or self.core.draining or self.config.autoscale):
            self._ask()
        self._step(now)

    def patience_s(self) -> float:
        """After this a batch is taken from its replica, which is then ended: longer than any that still runs would take."""
        slowest_s = max(self._slowest_s, self.core.full_batch_s)
        return max(HUNG_S, HUNG_TIMES * slowest_s) + self.config.stall_s  # a stall is not to be cut short

    def _look(self) -> None:
        """Give up the replicas that hang. There is a timer only while a batch runs, and one for all of them."""
        self._watch, now = None, self.now()
        while oldest := self.core.oldest():
            left_s = oldest.started_s + self.patience_s() - now
            if left_s > 0:
                self._watch = self.loop.call_later(left_s, self._look)
                return
            self.tell(op="hung", name=oldest.name, at_s=now)
            self.links[oldest.name].close()
            self.left(oldest.name)

    def _scale(self) -> None:
        now = self.now()
        wanted = self.core.scale(now)
        alive = [one for one in self.core.replicas.values() if one.state in ("starting", "ready")]
        if wanted is not None and not self.core.draining:
            for _ in range(wanted - len(alive)):
                self._ask()
            # The youngest go first: those that are not even ready cost without serving.
            for replica in sorted(alive, key=lambda one: -one.name)[: max(0, len(alive) - wanted)]:
                self.retire(replica.name, now)
        self.loop.call_later(SCALE_EVERY_S, self._scale)

    def retire(self, name: int, now: float) -> None:
        """Let a replica go when it is done with what it runs."""
        starting = self.core.replicas[name].state == "starting"
        self.core.retire(name, now)
        self.tell(op="retire", name=name, at_s=now)
        if starting:
            self.core.lost(name, now)
        elif self.core.replicas[name].running is None:
            self.links[name].close()

    # ---- the end
    def _idle(self) -> bool:
        running = any(one.running for one in self.core.replicas.values())
        return not running and not self.core.batcher.count

    async def drain(self) -> None:
        """Let nobody in any more, and return when everybody who was let in has an answer."""
        self.core.draining = True
        self._empty = self.loop.create_future()
        self._step(self.now())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._empty, DRAIN_S)
        stuck = [one.running.requests for one in self.core.replicas.values() if one.running]
        for request in itertools.chain(self.core.batcher.waiting(), *stuck):
            if self.core.cancel(request) or request.state == "running":
                request.state = "cancelled"
                answer = Answer(GONE, f"no replica answered within the {DRAIN_S:g} s of the drain")
                self._end(request, answer, self.now())


async def listen(control: Control, heard: Callable[[dict[str, Any]], None]) -> None:
    """Pass on what the caller says, until the caller is gone; then this process has no reason to live."""
    reader, _ = await asyncio.open_unix_connection(sock=control.socket)
    while line := await reader.readline():
        heard(json.loads(line))
    os._exit(1)


def main(payload: dict[str, Any], out: Path) -> None:
    """What `launch` calls. payload: config, folder (of the sockets), host, port, standing (no load comes from us)."""
    config: Config = from_json(Config, payload["config"])
    if payload["standing"]:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller drains
    control = Control(payload["folder"], "service")

    async def body() -> None:
        service = Service(config, control.tell)
        told = asyncio.Event()
        line = asyncio.ensure_future(listen(control, lambda _: told.set()))  # the one thing it says is: drain
        close = None
        if config.engine == "http" or payload["standing"]:
            front = importlib.import_module("mlsyslab.labs.serving.front")
            close, port = await front.open_front(service, payload["host"], payload["port"])
            control.tell(op="listening", port=port)
        await service.open(payload["folder"])
        await service.ready.wait()
        control.tell(op="serving", at_s=service.now())
        if close is None:
            load = importlib.import_module("mlsyslab.labs.serving.load")
            await load.in_process(config, service, control.tell, out.parent)
        await told.wait()
        await service.drain()
        if close:
            await close()
        control.tell(op="drained", at_s=service.now(), outcomes=service.outcomes)
        for link in service.links.values():
            link.close()
        line.cancel()

    run_until_told(body)
    leave(0)
