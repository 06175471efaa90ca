"""The load generator's own HTTP client: keep-alive connections, one request at a time on each, as many as it takes.

A library's client would cost more CPU than the request itself, on cores that the service needs.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import asdict

import numpy as np

from mlsyslab.labs.serving.arrivals import Schedule
from mlsyslab.labs.serving.config import Config
from mlsyslab.labs.serving.protocol import INPUT, MODEL, VOCABULARY, Answer

INPUTS = 16  # different inputs for each number of rows
SOCKETS = 16  # connections opened beforehand

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_AGAIN = re.compile(rb"\r\nretry-after: *(\d+)", re.IGNORECASE)
_TIMES = b'"parameters":'
_KNOWN = set(asdict(Answer(0)))


class Connection(asyncio.Protocol):
    """One keep-alive connection of the client; it carries one request at a time."""

    def __init__(self, client: Client) -> None:
        self.client, self.got = client, b""
        self.done: Callable[[Answer], None] | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def request(self, data: bytes, done: Callable[[Answer], None]) -> None:
        """Send one request; `done` gets its answer."""
        assert self.transport is not None
        self.done, self.got = done, b""
        self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        self.got += data
        end = self.got.find(b"\r\n\r\n")
        length = _LENGTH.search(self.got, 0, end) if end >= 0 else None
        if length is None or len(self.got) < end + 4 + int(length[1]):
            return
        answer, done = read_answer(self.got[:end], self.got[end + 4 :]), self.done
        self.done = None
        self.client.idle.append(self)
        if done:
            done(answer)

    def connection_lost(self, error: Exception | None) -> None:
        if self in self.client.idle:
            self.client.idle.remove(self)
        if self.done:
            self.done(Answer(0, f"the connection was lost: {error or 'closed by the service'}"))


def read_answer(head: bytes, body: bytes) -> Answer:
    """What the service said."""
    status = int(head[9:12])
    if status == 200:
        start = body.index(_TIMES) + len(_TIMES)
        times = json.loads(body[start : body.index(b"}", start) + 1])
        return Answer(status, **{name: value for name, value in times.items() if name in _KNOWN})
    again = _AGAIN.search(head)
    try:
        error = str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        error = body[:200].decode(errors="replace")
    return Answer(status, error, retry_after_s=float(again[1]) if again else 0.0)


class Client:
    """A pool of connections to the service that grows when all are busy."""

    def __init__(self, config: Config, plan: Schedule, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.loop = asyncio.get_running_loop()
        self.idle: list[Connection] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._tensors = {
            rows: [self._tensor(one) for one in some] for rows, some in inputs(config, plan).items()
        }
        self._head = f"POST /v2/models/{MODEL}/infer HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: "

    @staticmethod
    def _tensor(tokens: np.ndarray) -> str:
        data = json.dumps(tokens.ravel().tolist(), separators=(",", ":"))
        return (
            f'"inputs":[{{"name":"{INPUT}","datatype":"INT64","shape":{list(tokens.shape)},"data":{data}}}]}}'
        )

    async def open(self) -> None:
        """The first connections."""
        for _ in range(SOCKETS):
            _, connection = await self.loop.create_connection(lambda: Connection(self), self.host, self.port)
            self.idle.append(connection)

    def send(
        self, number: int, rows: int, priority: int, timeout_s: float, done: Callable[[Answer], None]
    ) -> None:
        """A `Send`, over HTTP."""
        timeout = "" if timeout_s == float("inf") else f',"timeout":{max(1, round(timeout_s * 1e6))}'
        body = f'{{"id":"{number}","parameters":{{"priority":{priority + 1}{timeout}}},{self._tensors[rows][number % INPUTS]}'
        data = f"{self._head}{len(body)}\r\n\r\n{body}".encode()
        if self.idle:
            self.idle.pop().request(data, done)
        else:
            task = self.loop.create_task(self._send_new(data, done))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _send_new(self, data: bytes, done: Callable[[Answer], None]) -> None:
        try:
            _, connection = await self.loop.create_connection(lambda: Connection(self), self.host, self.port)
        except OSError as error:
            done(Answer(0, f"cannot connect: {error.strerror or error}"))
        else:
            connection.request(data, done)


def inputs(config: Config, plan: Schedule) -> dict[int, list[np.ndarray]]:
    """Some inputs for each number of rows that the schedule has."""
    rng = np.random.default_rng(config.seed)
    sizes = sorted({int(rows) for rows in np.unique(plan.rows)})
    return {n: [rng.integers(0, VOCABULARY, (n, config.tokens)) for _ in range(INPUTS)] for n in sizes}
