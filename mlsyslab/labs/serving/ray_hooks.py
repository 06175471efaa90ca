"""What hangs in Ray Serve's hooks (2.60, alpha, so each adapter is small): a replica that runs our batcher, and a router
and an autoscaling policy that ask ours.

All that reaches a replica lies in our batcher there (`max_ongoing_requests` is beyond what admission lets in): it binds
late, by priority and deadline, for which Ray has no hook. Imported after `ray_cluster.start`, which says how Ray is to be.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import json
import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mlsyslab.contract import ConfigError
from mlsyslab.labs.serving import ray_cluster
from mlsyslab.labs.serving.config import Config
from mlsyslab.labs.serving.policies import Autoscaler, Batch, Load, ReplicaState, Router
from mlsyslab.labs.serving.protocol import MODEL, Answer
from mlsyslab.labs.serving.service import Service
from mlsyslab.labs.serving.wire import Frames
from mlsyslab.options import from_json

PUSH_S = 0.25  # how often replicas and handle tell the controller of their load; Ray's default is 10 s
LOOK_BACK_S = 1.0  # over which Ray averages what replicas report of themselves
HEALTH_S = 0.5  # how often a replica is asked whether it lives

_RequestRouter: Any = object
with contextlib.suppress(ImportError):  # without Ray the adapters can still be read and tested
    _RequestRouter = importlib.import_module("ray.serve.request_router").RequestRouter


# ---- in a replica
class Lane:
    """A replica's model in a thread of its own; for `Service` the line to a replica process."""

    def __init__(self, service: Service, model: Any) -> None:
        self.service, self.model = service, model
        self.thread = ThreadPoolExecutor(1)

    def send(self, batch: Batch) -> None:
        """Run this batch; torch and a paced model's wait let the loop go on meanwhile."""
        from mlsyslab.labs.serving.worker import answer

        rows = [request.rows for request in batch.requests]
        body = bytearray(b"".join(request.payload[0] for request in batch.requests))
        self.service.loop.run_in_executor(self.thread, answer, self.model, rows, body).add_done_callback(
            self._finished
        )

    def _finished(self, ran: asyncio.Future[bytes]) -> None:
        ((head, body),) = Frames().feed(ran.result())
        self.service.finished(0, head, body)

    def close(self) -> None:
        """Nothing: Ray ends the process."""


class Replica:
    """The deployment: `Service` with admission, batcher and deadlines around the model of its own process."""

    def __init__(self, config: dict[str, Any], loopback: bool) -> None:
        from mlsyslab.labs.serving.model import Model
        from mlsyslab.labs.serving.worker import batch_sizes, tokens_of

        if loopback:
            ray_cluster.listen_on_loopback()
        self.config = from_json(Config, config)
        start_s = time.monotonic()
        self.model = Model(self.config)
        loaded_s = time.monotonic()
        for size in batch_sizes(self.config.max_batch) if not self.config.paced else (1,):
            self.model(tokens_of(self.config, size))
        hello = {"pid": os.getpid(), "load_s": loaded_s - start_s, "warm_up_s": time.monotonic() - loaded_s}
        self.tag = introduce({**hello, "device": str(self.model.device), "paced": self.config.paced})

    @functools.cached_property
    def service(self) -> Service:
        """Made in the loop that will run it."""
        service = Service(self.config, lambda **_: None)
        service.now = time.monotonic  # Ray's loop is uvloop, whose clock counts in whole milliseconds
        service.watches = False  # whether a replica lives is Ray's to find out
        service.links[0] = Lane(service, self.model)  # type: ignore[assignment]  # it has send and close, and no socket
        service.core.add_replica(0, service.now())
        return service

    async def __call__(self, tokens: bytes, rows: int, priority: int, timeout_s: float) -> tuple[str, Answer]:
        """Ray's id of this replica, and how the request ended. Times travel as durations: clocks differ."""
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        request = self.service.submit(
            tokens, rows, answered.set_result, priority=priority, timeout_s=timeout_s
        )
        try:
            return self.tag, await answered
        except asyncio.CancelledError:  # the client is gone
            self.service.cancel(request)
            raise

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Ray's hook: the load of this replica, for `ScalingPolicy`."""
        return dataclasses.asdict(self.service.core.load(self.service.now()))


def introduce(hello: dict[str, Any]) -> str:
    """Leave what the front wants to know of this replica where it looks for it; Ray's id of the replica."""
    from ray import serve
    from ray.experimental.internal_kv import _internal_kv_put

    tag = str(serve.get_replica_context().replica_tag)
    _internal_kv_put(f"{MODEL}/{tag}", json.dumps({**hello, "time_s": time.time()}).encode())
    return tag


# ---- in Ray's controller
class ScalingPolicy:
    """Ray's autoscaling policy: our Autoscaler, asked ten times a second."""

    def __init__(self, floor: int, ceiling: int, slo_p95_s: float) -> None:
        self.autoscaler = Autoscaler(floor, ceiling, slo_p95_s)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The number of replicas to have, and no state that Ray would have to keep."""
        return self.autoscaler.decide(context.current_time, total_load(context)), {}


def total_load(context: Any) -> Load:
    """What all replicas say of themselves, and what waits at the handles, as one load."""
    said = {name: list(values.values()) for name, values in (context.aggregated_metrics or {}).items()}
    capacities = [value for value in said.get("capacity_per_s", ()) if value > 0]
    busy = said.get("busy_frac", [])
    ready = context.current_num_replicas
    return Load(
        ready=ready,
        starting=max(0, context.target_num_replicas - ready),
        queued_rows=round(sum(said.get("queued_rows", ())) + (context.total_queued_requests or 0)),
        rate_per_s=sum(said.get("rate_per_s", ())),
        capacity_per_s=sum(capacities) / len(capacities) if capacities else 0.0,
        busy_frac=sum(busy) / len(busy) if busy else 0.0,
        p95_s=max(said.get("p95_s", ()), default=0.0),
    )


# ---- at the handle
class LeastLoaded(_RequestRouter):
    """Ray's request router: our Router on the requests that each replica has of this handle's."""

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """One rank a replica, the least loaded first."""
        known = self.replica_queue_len_cache
        order = ranked([known.get(one.replica_id) or 0 for one in candidate_replicas])
        return [[candidate_replicas[place]] for place in order]


def ranked(loads: Sequence[float]) -> list[int]:
    """Places of replicas with such loads, in the order in which our Router picks them."""
    router, order = Router(), []
    for place, load in enumerate(loads):
        router.offer(ReplicaState(place, busy_s=load))
    while (replica := router.pick()) is not None:
        order.append(replica.name)
    return order


# ---- all of it
def application(config: Config, cluster: ray_cluster.Cluster) -> Any:
    """The Ray Serve application of a configuration. Raises ConfigError for a GPU that the cluster does not have."""
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

    most = config.ceiling if config.autoscale else config.replicas
    gpus = cluster.share("GPU", most) if config.device != "cpu" else 0.0
    if config.device == "cuda" and not gpus:
        raise ConfigError("device='cuda' but Ray finds no GPU; choose device='auto' or 'cpu'")
    # Each replica has a queue of its own, so each gets its part of the rows that may wait.
    queue = max(config.max_batch, math.ceil(config.max_queue / max(1, config.replicas)))
    policy = {"floor": config.floor, "ceiling": config.ceiling, "slo_p95_s": config.slo_p95_s}
    size: dict[str, Any] = {"num_replicas": config.replicas}
    if config.autoscale:
        scaling = AutoscalingConfig(
            min_replicas=config.floor,
            initial_replicas=config.replicas,
            max_replicas=config.ceiling,
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            metrics_interval_s=PUSH_S,  # deprecated, and in 2.60 still the only one that is read
            look_back_period_s=LOOK_BACK_S,
            policy=AutoscalingPolicy(policy_function=ScalingPolicy, policy_kwargs=policy),
        )
        size = {"autoscaling_config": scaling}
    deployment = serve.deployment(
        Replica,
        name=MODEL,
        max_ongoing_requests=queue + 2 * config.max_batch if config.admission else 2**31 - 1,
        max_queued_requests=config.max_queue if config.admission else -1,
        request_router_config=RequestRouterConfig(request_router_class=LeastLoaded),
        ray_actor_options={"num_cpus": cluster.share("CPU", most), "num_gpus": gpus},
        health_check_period_s=HEALTH_S,
        max_constructor_retry_count=1,
        graceful_shutdown_wait_loop_s=0.1,
        logging_config={"enable_access_log": False},
        **size,
    )
    return deployment.bind(dataclasses.asdict(dataclasses.replace(config, max_queue=queue)), cluster.own)
