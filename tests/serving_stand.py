"""A service without processes for the tests: the real policies and front, replicas that are played in the same loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from mlsyslab.labs.serving.config import Config
from mlsyslab.labs.serving.protocol import CLASSES, VOCABULARY, Answer
from mlsyslab.labs.serving.service import Service
from mlsyslab.labs.serving.wire import new_loop

HEAD = "POST /v2/models/encoder/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n"


class Played:
    """A replica that answers when it is told to, or after took_s; a row's logits are its first token, CLASSES times."""

    def __init__(self, service: Service, name: int, took_s: float | None = None) -> None:
        self.service, self.name, self.took_s = service, name, took_s
        self.batches: list[list[int]] = []  # first token of each row, as they were computed
        self.closed = False
        self.waiting: Any = None

    def send(self, batch: Any) -> None:
        self.waiting = batch
        self.batches.append([int(np.frombuffer(r.payload[0], np.int64)[0]) for r in batch.requests])
        if self.took_s is not None:
            self.service.loop.call_later(self.took_s, self.finish)

    def finish(self) -> None:
        errors, parts = {}, []
        for place, request in enumerate(self.waiting.requests):
            tokens = np.frombuffer(request.payload[0], np.int64).reshape(request.rows, -1)
            if tokens.max() >= VOCABULARY:
                errors[str(place)] = "IndexError: index out of range in self"
            else:
                parts.append(np.repeat(tokens[:, :1], CLASSES, 1).astype(np.float32).tobytes())
        self.service.finished(self.name, {"errors": errors}, bytearray(b"".join(parts)))

    def close(self) -> None:
        self.closed = True


class Stand:
    """A service with played replicas, and a list of what it told its caller."""

    def __init__(self, config: Config, took_s: float | None = None) -> None:
        self.told: list[dict[str, Any]] = []
        self.service = Service(config, lambda **said: self.told.append(said))
        self.config, self.took_s = config, took_s
        self.replicas: list[Played] = []
        self.answers: dict[int, Answer] = {}
        for name in range(config.replicas):
            self.service._ask()
            self.join(name)

    def join(self, name: int) -> Played:
        replica = Played(self.service, name, self.took_s)
        self.replicas.append(replica)
        self.service.joined(replica, {"name": name, "pid": 0, "warm_up_s": 0.0})  # type: ignore[arg-type]  # it plays one
        return replica

    def ask(self, token: int, rows: int = 1, **more: Any) -> Any:
        """Submit a request whose first token is `token`; its answer will be in `answers[token]`, once."""

        def done(answer: Answer) -> None:
            assert token not in self.answers, "answered twice"
            self.answers[token] = answer

        tokens = np.full((rows, self.config.tokens), token, np.int64).tobytes()
        return self.service.submit(tokens, rows, done, **more)

    def statuses(self) -> dict[int, int]:
        return {token: answer.status for token, answer in self.answers.items()}


def play(body: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run a test's coroutine on the service's own kind of loop."""
    loop = new_loop()
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(asyncio.wait_for(body(), 30))
    finally:
        loop.close()
        asyncio.set_event_loop(None)


def infer(tokens: int = 8, rows: int = 1, token: int = 3, **changes: Any) -> bytes:
    """The JSON body of a good request, with changes to its tensor; `top` changes the object itself."""
    top = changes.pop("top", {})
    tensor = {
        "name": "tokens",
        "datatype": "INT64",
        "shape": [rows, tokens],
        "data": [token] * (rows * tokens),
    }
    return json.dumps({"inputs": [{**tensor, **changes}], **top}).encode()


def post(body: bytes, *headers: str) -> bytes:
    """A whole HTTP request."""
    head = HEAD.format(len(body))
    return head[:-2].encode() + "".join(f"{line}\r\n" for line in headers).encode() + b"\r\n" + body


async def read_response(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """(status, headers in lower case, body)."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:] if line)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return int(head[0].split()[1]), headers, body


async def exchange(port: int, data: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send bytes on a connection of their own, and read one response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        return await read_response(reader)
    finally:
        writer.close()
