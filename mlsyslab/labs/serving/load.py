"""The load generator: a process that sends each request of a schedule at its time, whatever became of the earlier ones.

Latency counts from the intended time, so that a request which could not even be sent is as late as it was for its user
(no coordinated omission: https://github.com/giltene/wrk2). It also records its own lag, to be blamed where it must be.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlsyslab.labs.serving.arrivals import Schedule, schedule
from mlsyslab.labs.serving.client import INPUTS, Client, inputs
from mlsyslab.labs.serving.config import Config
from mlsyslab.labs.serving.protocol import Answer
from mlsyslab.labs.serving.service import Service
from mlsyslab.labs.serving.wire import Control, run_until_told
from mlsyslab.options import from_json
from mlsyslab.ranks import leave
from mlsyslab.records import Stream, disk_error

LEAD_S = 0.05  # from the decision to begin to time 0
FLUSH_S = 0.1  # how often records are written
QUIET_S = 10.0  # nothing came for so long after the last request was sent: the rest gets no answer any more
YIELD_EVERY = 32  # sends in a row, when we are late, before answers are read
BACK_OFF_S = 0.01  # of a closed-loop client that was refused

Send = Callable[[int, int, int, float, Callable[[Answer], None]], None]
"""(id, rows, priority, timeout_s, done): send a request; `done` is called once, with its answer."""


class RequestLines(Stream):
    """requests.jsonl: a line for each intended request, written many at a time."""

    _LINE = (
        '{"kind":"request","id":%d,"intended_s":%.6f,"sent_s":%.6f,"lag_s":%.6f,"queue_s":%s,"batch_wait_s":%s,'
        '"service_s":%s,"total_s":%.6f,"batch_size":%s,"replica":%s,"rows":%d,"priority":%d,"deadline_s":%s,'
        '"outcome":"%s","status":%s,"warmup":%s,"retries":%d%s}\n'
    )

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._lines: list[str] = []

    def add(
        self,
        number: int,
        times_s: tuple[float, float, float],
        asked: tuple[int, int, float],
        answer: Answer,
        *,
        warmup: bool,
    ) -> None:
        """times_s: intended, sent, ended, from the run's start. asked: rows, priority, deadline_s (infinity: none)."""
        intended_s, sent_s, ended_s = times_s
        parts = (answer.queue_s, answer.batch_wait_s, answer.service_s)
        self._lines.append(
            self._LINE
            % (
                number,
                intended_s,
                sent_s,
                sent_s - intended_s,
                *("null" if part is None else f"{part:.6f}" for part in parts),
                ended_s - intended_s,
                "null" if answer.batch_size is None else answer.batch_size,
                "null" if answer.replica is None else answer.replica,
                asked[0],
                asked[1],
                "null" if asked[2] == float("inf") else f"{asked[2]:.6f}",
                answer.outcome,
                answer.status or "null",
                "true" if warmup else "false",
                answer.retries,
                f',"error":{json.dumps(answer.error)}' if answer.error else "",
            )
        )

    def flush(self) -> None:
        """Write what has gathered, in one call to the kernel."""
        lines, self._lines = self._lines, []
        try:
            self._file.write("".join(lines))
            self._file.flush()
        except OSError as error:
            raise disk_error(error, self.path) from error


class Load:
    """Drives `send` through a schedule, in this process's event loop."""

    def __init__(self, config: Config, plan: Schedule, send: Send, lines: RequestLines) -> None:
        self.config, self.send, self.lines = config, send, lines
        self.time_s, self.deadline_s = plan.time_s.tolist(), plan.deadline_s.tolist()
        self.rows, self.priority = plan.rows.tolist(), plan.priority.tolist()
        self.loop = asyncio.get_running_loop()
        self.now = self.loop.time
        self.begin_s = 0.0
        self.under_way: dict[int, tuple[float, float]] = {}  # id -> intended, sent
        self.answers = self.sent = 0
        self.sending = True
        self.over = asyncio.Event()

    async def run(self, begin_s: float) -> None:
        """Send everything, and return when each request has its outcome in the file."""
        self.begin_s = begin_s
        flushing = asyncio.ensure_future(self._flush())
        await (self._closed() if self.config.clients else self._open())
        self.sending = False
        while self.under_way:
            before = self.answers
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.over.wait(), QUIET_S + self.config.stall_s)
            if self.answers == before:
                break
        for number in list(self.under_way):
            self._done(number, Answer(0, f"no answer for {QUIET_S + self.config.stall_s:g} s; given up"))
        flushing.cancel()
        self.lines.flush()

    async def _open(self) -> None:
        for number, time_s in enumerate(self.time_s):
            while (left_s := self.begin_s + time_s - self.now()) > 0:
                await asyncio.sleep(left_s)
            self._send(number, time_s)
            if number % YIELD_EVERY == 0:
                await asyncio.sleep(0)

    async def _closed(self) -> None:
        """So many clients, each sending its next request when it has the answer to its last: what is intended is then
        what was sent, and a stall hides the requests that it kept from being sent."""
        await asyncio.sleep(self.begin_s - self.now())
        for _ in range(self.config.clients if self.time_s else 0):
            self._again()
        await asyncio.sleep(self.begin_s + self.config.duration_s - self.now())

    def _again(self) -> None:
        if self.sending:
            self._send(self.sent, self.now() - self.begin_s)

    def _send(self, number: int, intended_s: float) -> None:
        now = self.now()
        self.under_way[number] = (intended_s, now - self.begin_s)
        self.sent += 1
        place = number % len(self.rows)
        left_s = self.deadline_s[place] - self.time_s[place] + intended_s + self.begin_s - now
        self.send(
            number,
            self.rows[place],
            self.priority[place],
            max(left_s, 1e-6),  # one that is too late already is still sent, and expires there
            lambda answer: self._done(number, answer),
        )

    def _done(self, number: int, answer: Answer) -> None:
        known = self.under_way.pop(number, None)
        if known is None:  # it was given up before
            return
        self.answers += 1
        intended_s, sent_s = known
        place = number % len(self.rows)
        self.lines.add(
            number,
            (intended_s, sent_s, self.now() - self.begin_s),
            (self.rows[place], self.priority[place], self.deadline_s[place] - self.time_s[place]),
            answer,
            warmup=intended_s < self.config.warmup_s,
        )
        if not (self.under_way or self.sending):
            self.over.set()
        if self.config.clients and self.sending:
            self.loop.call_later(0.0 if answer.outcome == "ok" else BACK_OFF_S, self._again)

    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            self.lines.flush()


async def in_process(config: Config, service: Service, tell: Callable[..., None], out: Path) -> None:
    """The same load without HTTP, in the service's own process: `service.submit` is called, nothing else."""
    plan = schedule(config)
    raw = {rows: [one.tobytes() for one in some] for rows, some in inputs(config, plan).items()}

    def send(number: int, rows: int, priority: int, timeout_s: float, done: Callable[[Answer], None]) -> None:
        service.submit(raw[rows][number % INPUTS], rows, done, priority=priority, timeout_s=timeout_s)

    load = Load(config, plan, send, RequestLines(out / "requests.jsonl"))
    begin_s = service.now() + LEAD_S
    tell(op="begin", at_s=begin_s)
    await load.run(begin_s)
    tell(op="loaded", at_s=service.now())


def main(payload: dict[str, Any], out: Path) -> None:
    """What `launch` calls. payload: config, folder (of the sockets). The caller says when the service is ready."""
    config: Config = from_json(Config, payload["config"])
    control = Control(payload["folder"], "load")
    plan = schedule(config)
    lines = RequestLines(out.parent / "requests.jsonl")

    async def body() -> None:
        go = json.loads(control.socket.makefile().readline())
        client = Client(config, plan, go["host"], go["port"])
        await client.open()
        load = Load(config, plan, client.send, lines)
        begin_s = load.now() + LEAD_S
        control.tell(op="begin", at_s=begin_s)
        await load.run(begin_s)

    run_until_told(body)
    leave(0)
