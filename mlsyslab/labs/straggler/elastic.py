"""Cordon and replace, for real: the job runs under torch's elastic launcher, one launcher a host. Imports no torch.

The fault sits on a host. `recover` reads the records while the job runs, names the slow rank, ends its host's
launcher and starts a spare's; the others meet it in the rendezvous, and training resumes from the last whole
checkpoint, at the sampler's position. A rank that is killed is started again by its launcher, a host that is killed
is replaced. On a cluster the same ranks run under torchrun: see `elastic_worker`.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from mlsyslab import hardware
from mlsyslab.contract import ConfigError, RunError
from mlsyslab.devicelock import DeviceLock
from mlsyslab.labs.straggler import recovery
from mlsyslab.labs.straggler.config import Config, faults_of
from mlsyslab.labs.straggler.detect import Detector
from mlsyslab.labs.straggler.hosts import Host, Hosts
from mlsyslab.labs.straggler.measure import refuse_impossible
from mlsyslab.labs.straggler.recovery import Recovery
from mlsyslab.records import Tail, write_json
from mlsyslab.runs import Run, create_run

POLL_S = 0.05
GRACE_S = 5.0  # for the launchers of a finished job to end by themselves
KILLS = ("rank", "host")
STOPPED = "stopped by request; what was recorded stays readable"


class Verdict(Protocol):
    """What a detector answers with: the rank, and the step at which it is sure."""

    @property
    def rank(self) -> int: ...
    @property
    def step(self) -> int: ...


class Watcher(Protocol):
    """A detector: takes records one by one, step after step."""

    def feed(self, record: Mapping[str, Any], /) -> Verdict | None: ...


class Lookout:
    """Follows a run's records; each attempt has a detector of its own, since ranks may have moved between hosts."""

    def __init__(self, run: Run, new_detector: Callable[[], Watcher]) -> None:
        self.run, self.new_detector = run, new_detector
        self.attempts: list[dict[str, Any]] = []
        self.attempt, self.step = -1, -1
        self._attempts = Tail(run.path / "attempts.jsonl")
        self._errors = Tail(run.path / "errors.jsonl")
        self._detector: Watcher | None = None

    def look(self) -> Verdict | None:
        """Take in what has come; the verdict, if there is one. Raises RunError with what a rank gave up for."""
        for error in self._errors.read():
            raise RunError(str(error["says"]))
        rows = self.run.poll()
        self.attempts += self._attempts.read()
        for row in sorted(rows, key=lambda row: (row["attempt"], row["step"], row["rank"])):
            if row["attempt"] > self.attempt or self._detector is None:
                self.attempt, self._detector = row["attempt"], self.new_detector()
            self.step = row["step"]
            if verdict := self._detector.feed(recovery.without_checkpoint(row)):
                return verdict
        return None

    def where(self, rank: int) -> dict[str, Any]:
        """Host, pid and parent of a rank in the attempt whose records came last."""
        return dict(self.attempts[self.attempt]["ranks"][rank])


class Elastic:
    """A run under hosts; what `Run` asks of a job, and the loop that keeps it going."""

    def __init__(
        self, config: Config, path: Path, *, spare: bool, every: int, new_detector: Callable[[], Watcher]
    ) -> None:
        self.config, self.path, self.every = config, path, every
        self.spares = [f"host-{config.ranks}"] if spare else []
        self.run = Run(path, job=self)
        self.lookout = Lookout(self.run, new_detector)
        self.named: recovery.Named | None = None
        self.killed = ""
        self.watching = True  # until the spare is used: there is no second one to act with
        self._cancel = threading.Event()
        self.note()
        self.say("queued", "waiting for the device")

    def note(self) -> None:
        """Keep what was done to the job, for who reads the run directory later."""
        recovery.Interventions(named=self.named, killed=self.killed).write(self.path)

    def say(self, state: str, message: str, **more: Any) -> None:
        who = {"pid": os.getpid(), "host": socket.gethostname(), "time_s": time.time()}
        self.status: dict[str, Any] = {"state": state, "message": message, **who, **more}
        write_json(self.path / "status.json", self.status)

    # ---- what `Run` asks
    def stop(self) -> None:
        """Ask for the end; `recover` then raises RunError."""
        self._cancel.set()

    @property
    def finished(self) -> bool:
        return self.status["state"] in ("done", "failed", "stopped")

    def wait(self, timeout_s: float | None) -> None:
        """Nothing to wait for: `recover` returns when the run has ended."""

    # ---- the loop
    def drive(self, *, device: str, kill_at: int | None, kill: str, timeout_s: float) -> None:
        """Run to the end. Raises RunError when that cannot be."""
        lock = DeviceLock(device, "straggler")
        try:
            if not lock.acquire(
                lambda turn: self.say("queued", f"waiting behind {turn.holder}"), self._cancel
            ):
                raise RunError(STOPPED)
            self._drive(kill_at, kill, time.monotonic() + timeout_s, timeout_s)
        except BaseException as error:
            failed = isinstance(error, Exception) and not self._cancel.is_set()
            with suppress(RunError):  # the disk may be full, and the error is the news
                self.say("failed" if failed else "stopped", "the run was ended", error=str(error))
            raise
        finally:
            lock.release()

    def _drive(self, kill_at: int | None, kill: str, until: float, timeout_s: float) -> None:
        self.say("running", f"{self.config.ranks} hosts")
        hosts = Hosts(self.path, ranks=self.config.ranks, every=self.every)
        try:
            for number in range(self.config.ranks):
                hosts.start(f"host-{number}")
            while not (self.path / "finished.json").exists():
                if self._cancel.is_set():
                    raise RunError(STOPPED)
                if time.monotonic() > until:
                    raise RunError(
                        f"the job did not finish within {timeout_s:g} s and was stopped; raise timeout_s or lower steps"
                    )
                verdict = self.lookout.look()
                if verdict and self.watching:
                    self.cordon(hosts, verdict)
                if kill_at is not None and not self.killed and self.lookout.step >= kill_at:
                    self.kill(hosts, kill)
                self.care(hosts)
                time.sleep(POLL_S)
            hosts.wait(GRACE_S)
            self.lookout.look()
            self.say("done", "finished")
        finally:
            hosts.close()

    def cordon(self, hosts: Hosts, verdict: Verdict) -> None:
        """Take the named rank's host out and the spare in."""
        host = self.lookout.where(verdict.rank)["host"]
        who = f"rank {verdict.rank} on {host} is slow (seen in step {verdict.step})"
        self.named = recovery.Named(
            rank=verdict.rank, host=host, step=verdict.step, attempt=self.lookout.attempt
        )
        self.note()
        if not self.spares:
            raise RunError(
                f"{who} and there is no spare host; give spare=True, or mend the host: {self.goes_on}"
            )
        hosts.named(host).end()
        self.replace(hosts, f"{who}: cordoned")

    def replace(self, hosts: Hosts, why: str) -> None:
        """Start the spare."""
        self.watching = False
        self.say("running", f"{why}, {self.spares[0]} takes its place")
        hosts.start(self.spares.pop(0))

    @property
    def goes_on(self) -> str:
        """How a job that ended here is continued."""
        worker = "mlsyslab.labs.straggler.elastic_worker"
        words = f"torchrun --nproc-per-node {self.config.ranks} -m {worker} --out {self.path}"
        return f"`{words}` goes on from the last checkpoint"

    def kill(self, hosts: Hosts, kill: str) -> None:
        """kill -9 of the rank that the faulty host has now, or of that host's launcher."""
        name = f"host-{self.config.slow_rank}"
        ranks = self.lookout.attempts[self.lookout.attempt]["ranks"]
        mine = next((rank for rank in ranks if rank["host"] == name), ranks[0])
        self.killed = f"rank of {mine['host']}" if kill == "rank" else str(mine["host"])
        self.note()
        with suppress(ProcessLookupError):
            os.kill(mine["pid"] if kill == "rank" else mine["parent"], signal.SIGKILL)

    def care(self, hosts: Hosts) -> None:
        """Replace hosts that were killed; raise RunError for one that gave up."""
        for host in hosts.all:
            if not host.ended or host.asked_to_end or host.code == 0:
                continue
            if host.code > 0:
                raise RunError(_gave_up(host))
            if not self.spares:
                raise RunError(
                    f"{host.name} was lost (its launcher was killed by signal {-host.code}) and there is no spare host; "
                    f"give spare=True, or start it again: {self.goes_on}"
                )
            host.asked_to_end = True
            self.replace(hosts, f"{host.name} was lost")


def _gave_up(host: Host) -> str:
    return f"{host.name} gave up before the last step: {host.error or 'no message'}"


def recover(
    config: Config,
    *,
    out: str | Path | None = None,
    spare: bool = True,
    detector: Callable[[int], Watcher] | None = None,
    every: int = 10,
    kill_at: int | None = None,
    kill: str = "rank",
    timeout_s: float = 180.0,
) -> Recovery:
    """Run the job on `config.ranks` hosts with a detector, take the named rank's host out, and say what that gained.

    The fault sits on host-<slow_rank>. out: the run directory (absent or empty). spare: whether there is one more
    host. detector: called with the number of ranks, gives an object whose `feed(record)` answers with `.rank` and
    `.step` or None; default `detect.Detector`. every: steps between two checkpoints. kill_at: step from which on
    the faulty host's `kill` ("rank", or the whole "host") is ended by kill -9, once. timeout_s: for all of it.

    Raises ConfigError for what cannot be run, RunError when the job cannot go on, for want of a spare for example;
    what was recorded stays in the run directory.
    """
    refuse_impossible(config)
    if every < 1:
        raise ConfigError(f"every={every} is below 1; choose the steps between two checkpoints")
    if kill not in KILLS:
        raise ConfigError(f"kill={kill!r} is not one of {', '.join(KILLS)}; choose one of them")
    if kill_at is not None and not 0 <= kill_at < config.steps:
        raise ConfigError(f"kill_at={kill_at} is outside 0..{config.steps - 1}; choose a step of this run")
    usable = hardware.cuda_usable()
    if config.device == "cuda" and not usable:
        raise ConfigError("device='cuda' but torch can use no NVIDIA GPU here; choose device='auto' or 'cpu'")
    device = "cuda" if usable and config.device != "cpu" else "cpu"
    truth = [fault.to_json() for fault in faults_of(config)]
    path = create_run("straggler", config, out=out, truth=truth, expected=config.steps * config.ranks)
    write_json(path / "environment.json", hardware.environment(device))
    new_detector = detector or Detector
    job = Elastic(config, path, spare=spare, every=every, new_detector=lambda: new_detector(config.ranks))
    job.drive(device=device, kill_at=kill_at, kill=kill, timeout_s=timeout_s)
    return recovery.recovery_of(job.run)
