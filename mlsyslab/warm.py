"""The warm server: one process with torch imported, from which ranks fork in milliseconds.

It is a child of the caller (kernel, command, test), in the caller's process group, and speaks JSON Lines: requests
on stdin, events on stdout. It starts no thread and runs no tensor operation, so forking is safe. When stdin ends
the caller is gone, and every rank is killed; when the server is killed, the kernel kills the ranks.

Run by `mlsyslab.launch`; not by hand.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlsyslab.contract import LabError
from mlsyslab.ranks import die_with_parent
from mlsyslab.records import write_json

# What a rank needs. The labs stay out, so that an edited one is seen by the next run.
PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data",
    "numpy",
    "PIL.Image",
    "PIL.JpegImagePlugin",
    "psutil",
    "concurrent.futures.process",
    "multiprocessing.queues",
)
GRACE_S = 0.4  # for the other ranks to report their own error before they are stopped
TIMEOUT_GRACE_S = (
    1.0  # after a collective timed out: ranks that arrived report within this, the others never do
)
KILL_AFTER_S = 0.4  # from SIGTERM to SIGKILL
PARENT_CHECK_S = 2.0


@dataclass
class Job:
    """The ranks of one request."""

    name: str
    out: Path
    store: Path
    ranks: dict[int, int] = field(default_factory=dict)  # pid -> rank
    pipes: dict[int, int] = field(default_factory=dict)  # rank -> what it says when it fails
    failed: bool = False
    stopping: bool = False
    term_at: float | None = None
    kill_at: float | None = None


def emit(**event: Any) -> None:
    """One event to the caller; a caller that is gone is noticed elsewhere."""
    with contextlib.suppress(OSError):
        os.write(1, (json.dumps(event) + "\n").encode())


def load(worker: str) -> Any:
    """The function that "package.module:function" names."""
    module, _, name = worker.partition(":")
    return getattr(importlib.import_module(module), name)


def headline(error: BaseException) -> str:
    """The first line of what an exception says; of one that a loader worker passed on, the worker's own line."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()] or [type(error).__name__]
    if not lines[0].startswith("Caught "):
        return lines[0]
    return lines[-1].partition(": ")[2] or lines[-1]


def run_rank(request: dict[str, Any], rank: int, store: Path) -> dict[str, Any] | None:
    """The life of one rank: call the worker and keep its result; what went wrong, or None."""
    out = Path(request["out"])
    try:
        become_rank(request, rank, store)
        result = load(request["worker"])(request["config"], out)
        if result is not None:
            write_json(out / f"result-{rank}.json", result)
    except BaseException as error:
        own = (
            error.__traceback__.tb_next if error.__traceback__ else None
        )  # our own frame tells nobody anything
        with contextlib.suppress(OSError):  # the log lies on the disk that may be full
            traceback.print_exception(error.with_traceback(own))
        text = headline(error)
        return {
            "type": type(error).__name__,
            "message": text[:600],
            "for_people": isinstance(error, LabError),
            "timeout": "imed out" in text or "imeout" in type(error).__name__,
            "peer_lost": "onnection closed" in text or "onnection reset" in text or "roken pipe" in text,
            "time_s": time.time(),
        }
    return None


def fork_rank(request: dict[str, Any], rank: int, store: Path) -> tuple[int, int]:
    """Fork one rank: its pid, and a pipe on which it says what went wrong (a full disk cannot swallow that)."""
    server = os.getpid()
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write_end)
        os.set_blocking(read_end, False)
        return pid, read_end
    code = 1
    try:
        die_with_parent()
        if os.getppid() != server:
            os._exit(1)
        error = run_rank(request, rank, store)
        code = 1 if error else 0
        if error:
            os.write(write_end, json.dumps(error).encode())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def become_rank(request: dict[str, Any], rank: int, store: Path) -> None:
    """Signals, standard streams, environment and import path of a rank."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    log = os.open(f"{request['out']}/rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    world = str(request["world"])
    os.environ.update(
        request.get("env", {}),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=world,
        LOCAL_WORLD_SIZE=world,
        MLSYSLAB_INIT=f"file://{store}/rendezvous",
    )
    sys.path[:0] = [folder for folder in request.get("path", []) if folder not in sys.path]


def read_error(pipe: int) -> dict[str, Any] | None:
    """What an ended rank left in its pipe."""
    with contextlib.suppress(BlockingIOError, ValueError):
        said = os.read(pipe, 1 << 16)
        return json.loads(said) if said else None
    return None


class Server:
    """Forks ranks on request, reaps them, and stops the rest of a job when one of its ranks fails."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.parent = os.getppid()
        self.wake_r, wake_w = os.pipe()
        for end in (self.wake_r, wake_w):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Interrupt is for the ranks
        self.pending = b""

    def serve(self) -> None:
        while True:
            readable, _, _ = select.select([0, self.wake_r], [], [], self.next_wait_s())
            if self.wake_r in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(self.wake_r, 4096)
            self.reap()
            if (0 in readable and not self.read_requests()) or os.getppid() != self.parent:
                self.kill_everything()
                return
            self.enforce_deadlines()

    def next_wait_s(self) -> float:
        marks = [at for job in self.jobs.values() for at in (job.term_at, job.kill_at) if at is not None]
        return max(0.0, min([PARENT_CHECK_S, *(at - time.monotonic() for at in marks)]))

    def read_requests(self) -> bool:
        chunk = os.read(0, 1 << 20)
        self.pending += chunk
        *lines, self.pending = self.pending.split(b"\n")
        for line in lines:
            self.handle(json.loads(line))
        return bool(chunk)

    def handle(self, request: dict[str, Any]) -> None:
        if request["op"] == "stop":
            job = self.jobs.get(request["job"])
            if job:
                job.stopping = True
                self.schedule_stop(job, 0.0)
            return
        store = Path(tempfile.mkdtemp(prefix="mlsyslab-"))
        job = Job(name=request["job"], out=Path(request["out"]), store=store)
        self.jobs[job.name] = job
        for rank in range(request["world"]):
            try:
                pid, job.pipes[rank] = fork_rank(request, rank, store)
                job.ranks[pid] = rank
            except OSError as error:
                job.failed = True
                self.schedule_stop(job, 0.0)
                emit(
                    event="nofork",
                    job=job.name,
                    rank=rank,
                    message=f"cannot start rank {rank}: {error.strerror}",
                )
                break
        self.finish_if_empty(job)

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for job in list(self.jobs.values()):
                if pid in job.ranks:
                    self.rank_ended(job, job.ranks.pop(pid), os.waitstatus_to_exitcode(status))

    def rank_ended(self, job: Job, rank: int, code: int) -> None:
        ours = job.term_at is None and job.kill_at is not None  # we had already sent the signal
        error = read_error(job.pipes[rank]) or {}
        os.close(job.pipes.pop(rank))
        emit(event="exit", job=job.name, rank=rank, code=code, ours=ours, error=error)
        if code != 0 and not job.failed and not job.stopping:
            job.failed = True
            self.schedule_stop(job, TIMEOUT_GRACE_S if error.get("timeout") else GRACE_S)
        self.finish_if_empty(job)

    def finish_if_empty(self, job: Job) -> None:
        if not job.ranks:
            shutil.rmtree(job.store, ignore_errors=True)
            self.jobs.pop(job.name, None)
            emit(event="end", job=job.name, failed=job.failed, stopped=job.stopping)

    def schedule_stop(self, job: Job, grace_s: float) -> None:
        if job.kill_at is None:
            job.term_at = time.monotonic() + grace_s

    def enforce_deadlines(self) -> None:
        now = time.monotonic()
        for job in self.jobs.values():
            if job.term_at is not None and now >= job.term_at:
                job.term_at, job.kill_at = None, now + KILL_AFTER_S
                self.signal_ranks(job, signal.SIGTERM)
            elif job.kill_at is not None and now >= job.kill_at:
                job.kill_at = now + KILL_AFTER_S
                self.signal_ranks(job, signal.SIGKILL)

    def signal_ranks(self, job: Job, number: signal.Signals) -> None:
        for pid in job.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill_everything(self) -> None:
        for job in self.jobs.values():
            self.signal_ranks(job, signal.SIGKILL)
            shutil.rmtree(job.store, ignore_errors=True)


def main() -> int:
    """Import what ranks need, say so, serve until stdin ends."""
    sys.path.insert(0, os.getcwd())
    try:
        for name in PRELOAD:
            importlib.import_module(name)
    except Exception as error:
        emit(event="broken", message=f"cannot import {name}: {error}")
        return 1
    emit(event="ready", pid=os.getpid())
    Server().serve()
    os._exit(0)  # tearing torch down takes seconds, and nothing here needs it


if __name__ == "__main__":
    sys.exit(main())
