"""Ranks as processes: start them, watch them, stop them; the caller's side.

The caller never imports torch for it: ranks fork from a warm server (`mlsyslab.warm`) that is started once per
process and has torch imported already. What ranks say goes through the run directory, so a live run, a crashed run
and a run under torchrun are read in the same way.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from mlsyslab.contract import LabError, RunError
from mlsyslab.devicelock import DeviceLock, Turn
from mlsyslab.failures import explain_failure
from mlsyslab.ranks import RankContext, init_process_group, rank_context
from mlsyslab.records import write_json

__all__ = ["RankContext", "RankJob", "call", "init_process_group", "rank_context", "start", "warm_up"]

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class WarmServer:
    """The caller's handle on its `mlsyslab.warm` process."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.events: dict[str, queue.SimpleQueue[dict[str, Any]]] = {}
        self.broken = ""
        self._write = threading.Lock()
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the server
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlsyslab.warm"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={
                **os.environ,
                **ONE_THREAD,
                "PYTHONPATH": os.pathsep.join(
                    filter(None, [_package_parent(), os.environ.get("PYTHONPATH", "")])
                ),
            },
        )
        threading.Thread(target=self._listen, name="mlsyslab-warm", daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            if event["event"] == "broken":
                self.broken = event["message"]
            waiting = self.events.get(event.get("job", ""))
            if waiting:
                waiting.put(event)
        self.process.wait()
        self.broken = (
            self.broken or f"the rank server ended with code {self.process.returncode}: {self._last_error()}"
        )
        for waiting in list(self.events.values()):
            waiting.put({"event": "broken", "message": self.broken})

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no message"

    @property
    def usable(self) -> bool:
        return self.process.poll() is None and self.owner == os.getpid()

    def send(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            with self._write:
                self.process.stdin.write((json.dumps(request) + "\n").encode())
                self.process.stdin.flush()
        except OSError as error:
            raise RunError(f"cannot start ranks: {self.broken or error}; run `mlsyslab doctor`") from error

    def close(self) -> None:
        """End the server and every rank with it."""
        with contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        self.process.wait(timeout=10)


def _package_parent() -> str:
    return str(Path(__file__).resolve().parent.parent)


_server: WarmServer | None = None
_server_lock = threading.Lock()


def warm_up() -> WarmServer:
    """The warm server of this process, started if it is not running; returns before torch is imported there."""
    global _server  # noqa: PLW0603  one server a process is the point
    with _server_lock:
        if _server is None or not _server.usable:
            _server = WarmServer()
        return _server


def shut_down() -> None:
    """End the warm server of this process, and with it every rank."""
    global _server  # noqa: PLW0603  the same one
    with _server_lock:
        if _server is not None and _server.owner == os.getpid():
            _server.close()
        _server = None


class Ranks:
    """One group of rank processes. `wait` returns when all have ended, and raises RunError if one failed."""

    def __init__(
        self, worker: str, payload: dict[str, Any], out: Path, world: int, env: dict[str, str] | None = None
    ) -> None:
        self.out, self.world, self.name = out, world, uuid.uuid4().hex
        self.exits: list[dict[str, Any]] = []
        self.server = warm_up()
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.server.events[self.name] = self._events
        self.server.send(
            {
                "op": "run",
                "job": self.name,
                "worker": worker,
                "config": payload,
                "out": str(out.resolve()),
                "world": world,
                "env": env or {},
                "path": [entry for entry in sys.path if entry],
            }
        )

    def stop(self) -> None:
        """SIGTERM to every rank, SIGKILL shortly after."""
        with contextlib.suppress(RunError):
            self.server.send({"op": "stop", "job": self.name})

    def wait(self, timeout_s: float | None = None) -> bool:
        """True when every rank ended well, False when they were stopped."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while True:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                try:
                    event = self._events.get(timeout=left)
                except queue.Empty:
                    self.stop()
                    self._drain()
                    raise RunError(
                        f"the ranks did not finish within {timeout_s:g} s and were stopped; raise the limit or run fewer steps"
                    ) from None
                if event["event"] in ("broken", "nofork"):
                    raise RunError(f"{event['message']}; run `mlsyslab doctor`")
                if event["event"] == "exit":
                    self.exits.append(event)
                if event["event"] == "end":
                    return self._verdict(event)
        finally:
            self.server.events.pop(self.name, None)

    def _drain(self) -> None:
        with contextlib.suppress(queue.Empty):
            while self._events.get(timeout=3)["event"] not in ("end", "broken"):
                pass

    def _verdict(self, end: dict[str, Any]) -> bool:
        interrupted = any(event["code"] in (130, 143) and not event["ours"] for event in self.exits)
        if end["stopped"] or (interrupted and not any(event["error"] for event in self.exits)):
            return False
        if end["failed"]:
            raise RunError(explain_failure(self.out, self.exits))
        return True


class RankJob:
    """An experiment under way: queue for the device, run each world size in turn, keep status.json true."""

    def __init__(
        self,
        worker: str,
        payload: dict[str, Any],
        out: Path,
        worlds: Sequence[int],
        *,
        device: str,
        what: str,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self.worker, self.payload, self.out, self.worlds = worker, payload, out, tuple(worlds)
        self.lock = DeviceLock(device, what)
        self._prepare = prepare
        self._cancel = threading.Event()
        self._ranks: Ranks | None = None
        self._guard = threading.Lock()
        self._ended = (
            threading.Event()
        )  # Thread.join forgets its thread when Ctrl-C interrupts it (Python 3.11)
        self._status("queued", "waiting for the device")
        threading.Thread(target=self._drive, name="mlsyslab-run", daemon=True).start()

    def _status(self, state: str, message: str, **more: Any) -> None:
        who = {"pid": os.getpid(), "host": socket.gethostname(), "time_s": time.time()}
        self.status = {"state": state, "message": message, **who, **more}
        write_json(self.out / "status.json", self.status)

    def _waiting(self, turn: Turn) -> None:
        self._status("queued", f"waiting behind {turn.holder}", position=turn.position, holder=turn.holder)

    def _drive(self) -> None:
        try:
            ended = self._run()
        except LabError as error:
            ended = ("failed", "the run failed", str(error))
        except Exception as error:  # a bug of ours must end the run with its name, not hang the panel
            ended = ("failed", "the run failed", f"{type(error).__name__}: {error}")
        finally:
            self.lock.release()
        try:
            self._status(ended[0], ended[1], error=ended[2])
        except LabError:
            pass  # a full disk keeps the file from being written, not the status itself
        finally:
            self._ended.set()

    def _run(self) -> tuple[str, str, str]:
        stopped = ("stopped", "stopped by request; what was recorded stays readable", "")
        if not self.lock.acquire(self._waiting, self._cancel):
            return stopped
        if self._prepare:
            self._status("preparing", "measuring this machine")
            self._prepare()
        if not self._work():
            return stopped
        return ("done", "finished", "")

    def _work(self) -> bool:
        """The experiment itself, once the device is ours: True when it is done, False when it was stopped."""
        for world in self.worlds:
            self._status("running", f"{world} rank{'s' if world > 1 else ''}", world=world)
            with self._guard:
                if self._cancel.is_set():
                    return False
                self._ranks = Ranks(self.worker, self.payload, self.out, world)
            if not self._ranks.wait():
                return False
        return True

    def stop(self) -> None:
        """Ask for the end; `wait` tells when it has come."""
        with self._guard:
            self._cancel.set()
            if self._ranks:
                self._ranks.stop()

    @property
    def finished(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout_s: float | None) -> None:
        """Raises RunError when the time is over; the run is then stopped. Ctrl-C stops it too."""
        try:
            self._ended.wait(timeout_s)
        except KeyboardInterrupt:
            self.stop()
            self._ended.wait(5)
            raise
        if not self.finished:
            self.stop()
            self._ended.wait(5)
            raise RunError(
                f"the run did not finish within {timeout_s:g} s and was stopped; raise timeout_s or lower steps"
            )


def start(
    worker: str,
    payload: dict[str, Any],
    out: Path,
    worlds: Sequence[int],
    *,
    device: str,
    what: str,
    prepare: Callable[[], None] | None = None,
) -> RankJob:
    """Run `worker` ("package.module:function") in `worlds[0]` ranks, then in `worlds[1]`, ...; returns at once.

    The worker gets (payload: dict, out: Path). device is what the experiment needs for itself ("cpu", "cuda:0").
    `prepare` runs once the device is ours.
    """
    return RankJob(worker, payload, out, worlds, device=device, what=what, prepare=prepare)


def call(worker: str, payload: dict[str, Any], *, ranks: int = 1, timeout_s: float = 60.0) -> list[Any]:
    """Run `worker` in `ranks` processes and return what each returned (JSON values; None for nothing).

    Raises RunError that names the rank which failed.
    """
    with tempfile.TemporaryDirectory(prefix="mlsyslab-call-") as folder:
        out = Path(folder)
        if not Ranks(worker, payload, out, ranks).wait(timeout_s):
            raise RunError("the ranks were interrupted; run it again")
        results = [out / f"result-{rank}.json" for rank in range(ranks)]
        return [json.loads(path.read_text()) if path.exists() else None for path in results]
