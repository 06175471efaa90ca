"""The same policies in Ray Serve: the lab's own HTTP front, and behind it a deployment of Ray's instead of our replicas.

The front calls the deployment through a handle: Ray's HTTP proxy costs several times the CPU of the model. Admission,
batches and deadlines are the replica's (`ray_hooks`); here are the retry, the count of replicas, and the drain.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import signal
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mlsyslab.contract import RunError
from mlsyslab.hardware import version_of
from mlsyslab.labs.serving import ray_cluster
from mlsyslab.labs.serving.config import Config
from mlsyslab.labs.serving.core import Core
from mlsyslab.labs.serving.policies import EVERYBODY, Batcher, Request, Router
from mlsyslab.labs.serving.protocol import EXPIRED, GONE, MODEL, REJECTED, Answer
from mlsyslab.labs.serving.service import DRAIN_S, Done, Service, listen
from mlsyslab.labs.serving.wire import Control, run_until_told
from mlsyslab.options import from_json
from mlsyslab.ranks import leave

WATCH_S = 0.25  # how often we look which replicas there are
AGAIN_S = 0.05  # a request that Ray's own bound refuses may come again after this


class Gateway(Service):
    """What the front calls: each request is one call of the deployment, tried again once where its replica died.

    too_many: what the handle raises when too many requests wait at it.
    """

    def __init__(
        self, config: Config, tell: Callable[..., None], handle: Any, too_many: type[Exception]
    ) -> None:
        super().__init__(config, tell, Core(Batcher(config.max_batch), EVERYBODY, Router()))
        self.handle, self.too_many = handle, too_many
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.numbers: dict[str, int] = {}  # Ray's id of a replica -> ours
        self.told: set[str] = set()  # of the living ones

    def submit(
        self, tokens: bytes, rows: int, done: Done, *, priority: int = 1, timeout_s: float = math.inf
    ) -> Request:
        """As `Service.submit`; admission is the replica's."""
        now = self.now()
        request = Request(next(self._ids), now, rows, priority, now + timeout_s, (tokens, done), "running")
        if self.core.draining:
            self._finish(request, Answer(GONE, "not let in: shutting down", retry_after_s=1.0))
            return request
        task = self.tasks[request.id] = self.loop.create_task(self._carry(request))
        task.add_done_callback(lambda _: self.tasks.pop(request.id))
        if timeout_s < math.inf:
            timer = self.loop.call_later(timeout_s, self._late, request)
            task.add_done_callback(lambda _: timer.cancel())
        return request

    def cancel(self, request: Request) -> None:
        """As `Service.cancel`; the replica hears of it too."""
        if request.state == "running":
            request.state = "cancelled"
            self.outcomes["cancelled"] += 1
            self.tasks[request.id].cancel()

    async def _carry(self, request: Request) -> None:
        tokens, _ = request.payload
        while True:
            left_s = request.deadline_s - self.now()
            response = self.handle.remote(tokens, request.rows, request.priority, left_s)
            try:
                tag, answer = await response
                answer.replica = self._number(tag) if answer.replica is not None else None
            except asyncio.CancelledError:  # the client is gone, or the drain is over
                response.cancel()
                self._finish(
                    request, Answer(GONE, f"no replica answered within the {DRAIN_S:g} s of the drain")
                )
                raise
            except self.too_many:
                answer = Answer(REJECTED, "not let in: queue full", retry_after_s=AGAIN_S)
            except Exception as error:  # each of Ray's transports has its own words for a replica that died
                if not request.retries:
                    request.retries = 1
                    continue
                answer = Answer(GONE, f"two replicas were lost under it: {type(error).__name__}")
            answer.retries = request.retries
            self._finish(request, answer)
            return

    def _finish(self, request: Request, answer: Answer) -> None:
        if request.state == "running":
            now, request.state = self.now(), "done"
            request.started_s = request.arrival_s + (answer.queue_s or 0.0) + (answer.batch_wait_s or 0.0)
            self._end(request, answer, now)

    def _late(self, request: Request) -> None:
        """The deadline passed; where replicas are ready, they say so themselves, if it still waits."""
        if not any(one.state == "ready" for one in self.core.replicas.values()):
            self._finish(request, Answer(EXPIRED, "the deadline passed before a replica was ready"))
            self.tasks[request.id].cancel()

    # ---- which replicas there are
    def _number(self, tag: str) -> int:
        if tag not in self.numbers:
            self.numbers[tag] = next(self.names)
        return self.numbers[tag]

    def seen(
        self, found: Iterable[tuple[str, str, float]], hello: Callable[[str], dict[str, Any] | None]
    ) -> None:
        """The replicas that there are now: (Ray's id, state, age in seconds). hello: what a replica
        said of itself, and for how many seconds it is ready (age_s)."""
        now, present = self.now(), set()
        for tag, state, age_s in found:
            if state not in ("STARTING", "RUNNING"):
                continue
            name = self._number(tag)
            present.add(tag)
            if tag not in self.told:
                self.told.add(tag)
                self.core.add_replica(name, now, ready=False)
                self.tell(op="start", name=name, at_s=now - age_s)
            starting = self.core.replicas[name].state == "starting"
            if state == "RUNNING" and starting and (said := hello(tag)):
                self.core.ready(name, now)
                self.tell(op="ready", name=name, at_s=now - said.pop("age_s"), **said)
        for tag in self.told - present:
            self.told.remove(tag)
            self.core.lost(self.numbers[tag], now)
            self.tell(op="retired" if self.config.autoscale else "lost", name=self.numbers[tag], at_s=now)
        if sum(one.state == "ready" for one in self.core.replicas.values()) >= self.config.replicas:
            self.ready.set()

    async def drain(self) -> None:
        """As `Service.drain`."""
        self.core.draining = True
        if self.tasks:
            await asyncio.wait(self.tasks.values(), timeout=DRAIN_S)
        stuck = list(self.tasks.values())
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)


async def watch(gateway: Gateway, name: str, *, own: bool) -> None:
    """Tell the gateway again and again which replicas the application `name` has. own: they are on this machine."""
    from ray.experimental.internal_kv import _internal_kv_get
    from ray.serve.context import _get_global_client

    controller: Any = _get_global_client()._controller

    def hello(tag: str) -> dict[str, Any] | None:
        said = _internal_kv_get(f"{MODEL}/{tag}")
        found = json.loads(said) if said else None
        if found:
            found["age_s"] = time.time() - found.pop("time_s")
            found["pid"] = found["pid"] if own else 0  # another machine's means somebody else here
        return found

    while True:
        details = await controller.get_serve_instance_details.remote()
        there = details["applications"][name]["deployments"][MODEL]["replicas"]
        now_s = time.time()
        gateway.seen([(one["replica_id"], one["state"], now_s - one["start_time_s"]) for one in there], hello)
        await asyncio.sleep(WATCH_S)


async def unless_failed(watching: asyncio.Task[None], event: asyncio.Event) -> None:
    """Wait for the event; raises what `watching` raised, if that comes first."""
    waiting = asyncio.ensure_future(event.wait())
    await asyncio.wait({waiting, watching}, return_when=asyncio.FIRST_COMPLETED)
    if watching.done():
        watching.result()


def deployed(config: Config, name: str, cluster: ray_cluster.Cluster) -> Any:
    """Start the application `name`: its handle, when its replicas are ready. Raises RunError where they do not come."""
    from ray import serve

    from mlsyslab.labs.serving.ray_hooks import application

    app = application(config, cluster)
    serve.start(http_options={"location": "Disabled"})
    try:
        return serve.run(app, name=name, route_prefix=None)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise RunError(f"Ray Serve could not start the replicas: {reason}") from error


def main(payload: dict[str, Any], out: Path) -> None:
    """What `launch` calls instead of `service.main`: it says the same to the caller. payload: as there."""
    config: Config = from_json(Config, payload["config"])
    if payload["standing"]:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller drains
    control = Control(payload["folder"], "service")
    name = f"mlsyslab-{uuid.uuid4().hex[:8]}"
    cluster = ray_cluster.start(name)
    handle = deployed(config, name, cluster)

    async def body() -> None:
        from ray.serve.exceptions import BackPressureError

        gateway, told = Gateway(config, control.tell, handle, BackPressureError), asyncio.Event()
        line = asyncio.ensure_future(listen(control, lambda _: told.set()))  # the one thing it says is: drain
        watching = asyncio.ensure_future(watch(gateway, name, own=cluster.own))
        front = importlib.import_module("mlsyslab.labs.serving.front")
        close, port = await front.open_front(gateway, payload["host"], payload["port"])
        control.tell(op="listening", port=port)
        control.tell(
            op="engine", at_s=gateway.now(), ray=version_of("ray"), calls="through a handle, not Ray's proxy"
        )
        await unless_failed(watching, gateway.ready)
        control.tell(op="serving", at_s=gateway.now())
        await unless_failed(watching, told)
        await gateway.drain()
        await close()
        control.tell(op="drained", at_s=gateway.now(), outcomes=gateway.outcomes)
        watching.cancel()
        line.cancel()

    run_until_told(body)
    cluster.end()
    leave(0)
