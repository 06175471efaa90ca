"""The processes of a service, seen from the caller: forked, heard over one unix socket, ended.

Each is a group of one rank, so that a replica that dies takes nobody with it. All of them die with the caller: forks
with the warm server, cold replicas by the kernel, and each when its line ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Protocol

from mlsyslab import launch
from mlsyslab.contract import RunError
from mlsyslab.failures import last_lines
from mlsyslab.labs.serving.wire import CONTROL

PACKAGE = "mlsyslab.labs.serving"
LEAVE_S = 2.0  # for processes that have no work any more to end by themselves
KILLED_S = 5.0  # for those that were told to

Message = dict[str, Any]


class _Process(Protocol):
    def stop(self) -> None: ...
    def wait(self) -> bool: ...


class ColdReplica:
    """A replica from nothing: an interpreter of its own, as where no process stands by. Same interface as launch.Ranks.

    Made by a thread that outlives it, since Linux counts a thread's end as its parent's.
    """

    def __init__(self, payload: Message, out: Path) -> None:
        self.out, self.stopped = out, False
        parent = str(Path(launch.__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, [parent, os.environ.get("PYTHONPATH", "")]))
        with (out / "rank-0.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", f"{PACKAGE}.worker", json.dumps({**payload, "parent": os.getpid()})],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **launch.ONE_THREAD, "PYTHONPATH": path},
            )

    def stop(self) -> None:
        """End it now; it holds nothing that could be lost."""
        self.stopped = True
        self.process.kill()

    def wait(self) -> bool:
        """True when it ended well, False when it was stopped; RunError when it failed."""
        code = self.process.wait()
        if code not in (0, 130) and not self.stopped:  # 130: Ctrl-C, which everybody hears
            raise RunError(f"rank 0 ended with code {code}; last lines: {last_lines(self.out, 0)}")
        return code == 0


class Children:
    """The processes below one folder `out`, each logging into a subfolder with its name.

    `messages` has what they say and (who, {"op": "ended", "error", "ok"}) when one is gone. Belongs to one thread.
    """

    def __init__(self, out: Path, messages: queue.SimpleQueue[tuple[str, Message]]) -> None:
        self.out, self.messages = out, messages
        self.alive: dict[str, _Process] = {}
        self.lines: dict[str, socket.socket] = {}
        self.folder = tempfile.mkdtemp(prefix="mlsyslab-")
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(f"{self.folder}/{CONTROL}")
        self.listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def fork(self, who: str, module: str, payload: Message, *, cold: bool = False) -> None:
        """Start `main` of a module of this package; cold: as an interpreter of its own."""
        out = self.out / who.replace(" ", "-")
        out.mkdir(exist_ok=True)
        payload = {**payload, "folder": self.folder}
        process: _Process = (
            ColdReplica(payload, out) if cold else launch.Ranks(f"{PACKAGE}.{module}:main", payload, out, 1)
        )
        self.alive[who] = process
        threading.Thread(target=self._watch, args=(who, process), daemon=True).start()

    def say(self, who: str, **message: Any) -> None:
        """Tell one of them something."""
        with contextlib.suppress(OSError, KeyError):  # one that is gone has ended, which is another message
            self.lines[who].sendall((json.dumps(message) + "\n").encode())

    def next(self, within_s: float | None) -> tuple[str, Message]:
        """The next message; raises queue.Empty when none comes within that time."""
        who, message = self.messages.get(timeout=None if within_s is None else max(0.0, within_s))
        if message["op"] == "ended":
            self.alive.pop(who, None)
        return who, message

    def end(self, *, orderly: bool) -> None:
        """Wait for those that end by themselves (orderly), end the others, and wait for these."""
        for wait_s in (LEAVE_S if orderly else 0.0, KILLED_S):
            until = time.monotonic() + wait_s
            while self.alive and (left_s := until - time.monotonic()) > 0:
                with contextlib.suppress(queue.Empty):
                    self.next(left_s)
            for process in self.alive.values():
                process.stop()
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        for line in (self.listener, *self.lines.values()):
            line.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _watch(self, who: str, process: _Process) -> None:
        error, ok = "", False
        try:
            ok = process.wait()
        except RunError as failure:
            error = str(failure).replace("rank 0", who, 1)
        self.messages.put((who, {"op": "ended", "error": error, "ok": ok}))

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                line, _ = self.listener.accept()
                threading.Thread(target=self._listen, args=(line,), daemon=True).start()

    def _listen(self, line: socket.socket) -> None:
        who = ""
        with contextlib.suppress(OSError, ValueError), line.makefile() as text:
            for said in text:
                message = json.loads(said)
                if message["op"] == "hello":
                    who = message["who"]
                    self.lines[who] = line
                self.messages.put((who, message))
