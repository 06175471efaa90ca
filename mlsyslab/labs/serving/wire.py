"""What the processes of the service share: frames between service and replicas, lines between them and the caller,
and an event loop that wakes on time.

A frame is two lengths, a JSON head, and raw bytes: tensors travel uncopied, and nothing that comes in is executed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import resource
import select
import selectors
import socket
import struct
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from mlsyslab.contract import RunError

LENGTHS = struct.Struct("<II")  # of the head and of the body
CONTROL, REPLICAS = "control.sock", "replicas.sock"  # in a folder of its own, since a path may have 108 bytes
ANSWER_S = 60.0  # within which the other side must have opened its socket
RETRY_S = 0.01

Frame = tuple[dict[str, Any], bytearray]


def pack(head: dict[str, Any], body: bytes = b"") -> bytes:
    """One frame."""
    text = json.dumps(head).encode()
    return b"".join((LENGTHS.pack(len(text), len(body)), text, body))


class Frames:
    """Cuts a stream of bytes, however it was chopped, into frames."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that these bytes complete."""
        self._pending += data
        while len(self._pending) >= LENGTHS.size:
            head, body = LENGTHS.unpack_from(self._pending)
            end = LENGTHS.size + head + body
            if len(self._pending) < end:
                return
            text = self._pending[LENGTHS.size : LENGTHS.size + head]
            raw = self._pending[LENGTHS.size + head : end]
            del self._pending[:end]
            yield json.loads(text), raw


def connect(path: str, *, within_s: float = ANSWER_S) -> socket.socket:
    """A connection to a unix socket that somebody opens soon; RunError where nobody does."""
    until = time.monotonic() + within_s
    while True:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            client.connect(path)
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError) as error:
            client.close()
            if time.monotonic() > until:
                raise RunError(
                    f"nobody listens on {path} after {within_s:g} s: {error.strerror}; run it again"
                ) from error
            time.sleep(RETRY_S)
        else:
            return client


class Control:
    """A process's line to the caller that supervises it: JSON Lines, both ways. `who` names the process."""

    def __init__(self, folder: str, who: str) -> None:
        self.socket = connect(f"{folder}/{CONTROL}")
        self.tell(op="hello", who=who)

    def tell(self, **message: Any) -> None:
        """Say one thing; a caller that is gone is noticed by the end of the line."""
        try:
            self.socket.sendall((json.dumps(message) + "\n").encode())
        except OSError:
            return


if hasattr(selectors, "EpollSelector"):

    class _OnTime(selectors.EpollSelector):
        """epoll_wait counts in whole milliseconds, rounded up, so a wait of 5 ms would be one of 6; select does not."""

        def select(self, timeout: float | None = None) -> Any:
            if timeout is not None and timeout > 0:
                select.select([self.fileno()], [], [], timeout)
                timeout = 0
            return super().select(timeout)

    _selector: type[selectors.BaseSelector] = _OnTime
else:
    _selector = selectors.DefaultSelector


def new_loop() -> asyncio.AbstractEventLoop:
    """An event loop whose timers are late by the kernel's slack (tens of microseconds) only. Its clock is
    time.monotonic, one for all processes of a machine."""
    return asyncio.SelectorEventLoop(_selector())


def run_until_told(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a process's coroutine on the loop that is on time, with many sockets allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
    gc.collect()
    gc.freeze()  # what was imported is never garbage, so no collection has to look at it
    loop = new_loop()
    asyncio.set_event_loop(loop)
    loop.run_until_complete(body())
