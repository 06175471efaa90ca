"""The HTTP front of the service: Open Inference Protocol v2 and Prometheus metrics, with aiohttp (extra `serving`)."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from mlsyslab.contract import RunError
from mlsyslab.hardware import version_of
from mlsyslab.labs.serving import protocol
from mlsyslab.labs.serving.metrics import registry
from mlsyslab.labs.serving.protocol import MODEL, VERSION, Answer, ProtocolError

if TYPE_CHECKING:
    from aiohttp import web

    from mlsyslab.labs.serving.service import Service

BODY_WITHIN_S = 5.0  # a slower body is given up (408)
IDLE_S = 75.0  # a connection without a request, or with half a head of one, is closed after this
LINGER_S = (
    2.0  # how long the rest of a refused body is read and thrown away, so that its sender sees the answer
)
CLOSE_S = 2.0  # for connections that do not end by themselves
LENGTH = "Inference-Header-Content-Length"
ROOT = f"/v2/models/{MODEL}"


class Front:
    """Turns HTTP requests into calls of the service. One handler, no framework on the way: it runs on every request."""

    def __init__(self, service: Service) -> None:
        from aiohttp import web

        self.web, self.service, self.config = web, service, service.config
        self.limit = protocol.body_limit(self.config)
        self.infer_paths = {f"{ROOT}/infer", f"{ROOT}/versions/{VERSION}/infer"}
        self.gets: dict[str, Callable[[], web.Response]] = {
            "/v2": lambda: self._json(protocol.server_metadata(version_of("mlsyslab") or "unknown")),
            "/v2/health/live": lambda: self._json({"live": True}),
            "/v2/health/ready": self._ready,
            "/metrics": self._metrics,
        }
        for path in (ROOT, f"{ROOT}/versions/{VERSION}"):
            self.gets[path] = lambda: self._json(protocol.model_metadata(self.config))
            self.gets[f"{path}/ready"] = self._ready
        self.registry = registry(service)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Any request."""
        try:
            if request.path in self.infer_paths and request.method == "POST":
                return await self._infer(request)
            return self._other(request)
        except ProtocolError as error:
            response = self._error(error.status, str(error))
            if error.status in (408, 413):
                response.force_close()
            return response

    async def _infer(self, request: web.BaseRequest) -> web.Response:
        body = await self._body(request)
        if encoding := request.headers.get("Content-Encoding"):
            body = protocol.unpack(body, encoding, self.limit)
        asked = protocol.parse_infer(body, request.headers.get(LENGTH), self.config)
        answered: asyncio.Future[Answer] = self.service.loop.create_future()
        waiting = self.service.submit(
            asked.tokens, asked.rows, answered.set_result, priority=asked.priority, timeout_s=asked.timeout_s
        )
        try:
            answer = await answered
        except asyncio.CancelledError:  # aiohttp's word for a client that is gone
            self.service.cancel(waiting)
            raise
        if answer.status != 200:
            response = self._error(answer.status, answer.error)
            if answer.retry_after_s:
                response.headers["Retry-After"] = str(math.ceil(answer.retry_after_s))
            return response
        text, length = protocol.infer_body(asked, answer, paced=self.config.paced)
        if length is None:
            return self.web.Response(body=text, headers={"Content-Type": "application/json"})
        return self.web.Response(
            body=text, headers={"Content-Type": "application/octet-stream", LENGTH: str(length)}
        )

    async def _body(self, request: web.BaseRequest) -> bytes:
        if (request.content_length or 0) > self.limit:
            raise protocol.too_large(self.limit)
        content = request.content
        came = (
            content.is_eof() or content.total_bytes == request.content_length
        )  # with the head, as nearly always
        try:
            async with asyncio.timeout(None if came else BODY_WITHIN_S):
                return await request.read()
        except TimeoutError:
            raise ProtocolError(408, f"the body did not come within {BODY_WITHIN_S:g} s") from None
        except self.web.HTTPRequestEntityTooLarge:  # one that did not say its length
            raise protocol.too_large(self.limit) from None

    def _other(self, request: web.BaseRequest) -> web.Response:
        path = request.path.rstrip("/")
        answer = self.gets.get(path)
        if answer and request.method in ("GET", "HEAD"):
            return answer()
        if answer or path in self.infer_paths:
            right = "GET" if answer else "POST"
            response = self._error(405, f"{path} takes {right}, not {request.method}")
            response.headers["Allow"] = right
            return response
        parts = path.split("/")
        if path.startswith("/v2/models/") and len(parts) > 3 and parts[3] != MODEL:
            return self._error(404, f"unknown model {parts[3]!r}; this service has {MODEL!r}")
        return self._error(404, f"nothing is at {path!r}; see /v2")

    def _ready(self) -> web.Response:
        core = self.service.core
        ready = not core.draining and any(one.state == "ready" for one in core.replicas.values())
        return self._json({"ready": ready}, 200 if ready else 503)

    def _json(self, value: Any, status: int = 200) -> web.Response:
        return self.web.Response(
            body=json.dumps(value).encode(), status=status, headers={"Content-Type": "application/json"}
        )

    def _error(self, status: int, message: str) -> web.Response:
        return self._json({"error": message}, status)

    def _metrics(self) -> web.Response:
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return self.web.Response(
            body=generate_latest(self.registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )


async def open_front(service: Service, host: str, port: int) -> tuple[Callable[[], Awaitable[None]], int]:
    """Listen: (what closes the front when its answers are out, the port). port 0: any free one.

    Raises RunError where the port is taken or the address is not ours.
    """
    from aiohttp import web

    front = Front(service)

    def make(message: Any, payload: Any, connection: Any, writer: Any, task: Any) -> web.BaseRequest:
        return web.BaseRequest(
            message, payload, connection, writer, task, service.loop, client_max_size=front.limit
        )

    server = web.Server(
        front.handle,
        request_factory=make,
        handler_cancellation=True,
        keepalive_timeout=IDLE_S,
        lingering_time=LINGER_S,
        auto_decompress=False,
        access_log=None,
    )
    try:
        listener = await service.loop.create_server(server, host, port, backlog=4096)
    except OSError as error:
        raise RunError(
            f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}; choose another port, or 0 for a free one"
        ) from error

    async def close() -> None:
        listener.close()
        server.pre_shutdown()
        await server.shutdown(CLOSE_S)

    return close, int(listener.sockets[0].getsockname()[1])
