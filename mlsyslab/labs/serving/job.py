"""A served run, seen from the caller: service, load generator and replicas from the first to the last of them."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlsyslab import launch
from mlsyslab.contract import RunError
from mlsyslab.labs.serving.children import PACKAGE, Children, Message
from mlsyslab.labs.serving.config import Config
from mlsyslab.records import SCHEMA, Stream

MOST_LOSSES = 20  # of replicas in a run; more is no fault of the machine's but a replica that cannot work


@dataclass
class Replica:
    """What the caller knows of one replica. Times are seconds of time.monotonic()."""

    asked_s: float
    pid: int = 0
    ended_s: float | None = None
    lost: bool = False


class ServingJob(launch.RankJob):
    """A service under load, or a standing one: started, watched, and ended as a whole.

    status has state and message, as of any run, and the address of the front while it runs. standing: without a load
    generator, until `drain` or `stop`.
    """

    def __init__(
        self,
        config: Config,
        out: Path,
        *,
        device: str,
        prepare: Callable[[], None] | None = None,
        standing: bool = False,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.config, self.standing, self.host, self.port = config, standing, host, port
        self.messages: queue.SimpleQueue[tuple[str, Message]] = queue.SimpleQueue()
        self.replicas: dict[int, Replica] = {}
        self.begin_s: float | None = None
        self.plan: list[tuple[float, Callable[[], None]]] = []  # what we do to the replicas, and when
        self.serving = self.draining = self.drained = False
        self._early: list[Message] = []  # events from before time 0 was known
        super().__init__(
            f"{PACKAGE}.service:main", {}, out, (), device=device, what="serving", prepare=prepare
        )

    def stop(self) -> None:
        """Ask for the end at once; `wait` tells when it has come."""
        super().stop()
        self.messages.put(("caller", {"op": "stop"}))

    def drain(self) -> None:
        """Ask for the end when everybody who was let in has an answer."""
        self.messages.put(("caller", {"op": "drain"}))

    # ---- the life of a run, in the thread of the job
    def _work(self) -> bool:
        self.events = Stream(self.out / "events.jsonl")
        self.children = Children(self.out, self.messages)
        try:
            self._status("running", "starting the service")
            service = "ray_engine" if self.config.engine == "ray" else "service"
            self._fork("service", service, host=self.host, port=self.port)
            if self.config.engine != "in process" and not self.standing:
                self._fork("load", "load")
            return self._follow()
        finally:
            self.children.end(orderly=self.drained)
            self.events.close()

    def _follow(self) -> bool:
        while True:
            who, message = self._next()
            if message["op"] == "stop":
                return False
            if message["op"] != "ended":
                act = getattr(self, f"_on_{message['op']}")
                act(message)
            elif message["error"] and self._matters(who):
                raise RunError(message["error"])
            elif who == "service":
                return self.drained
            elif who == "load":
                if not message["ok"]:
                    return False
                self._over(time.monotonic())

    def _next(self) -> tuple[str, Message]:
        """The next message; meanwhile, what is planned is done."""
        while True:
            try:
                return self.children.next(self.plan[0][0] - time.monotonic() if self.plan else None)
            except queue.Empty:
                self.plan.pop(0)[1]()

    def _fork(self, who: str, module: str, **more: Any) -> None:
        payload = {"config": asdict(self.config), "standing": self.standing, **more}
        self.children.fork(who, module, payload, cold=module == "worker" and self.config.cold)

    def _matters(self, who: str) -> bool:
        """Whether this process's failure is the run's: a replica that once was ready may die, the service replaces it."""
        kind, _, name = who.partition(" ")
        if kind != "replica":
            return True
        replica = self.replicas[int(name)]
        lost = sum(one.lost for one in self.replicas.values())
        return (not replica.pid and replica.ended_s is None) or lost > MOST_LOSSES

    # ---- what the processes say
    def _on_hello(self, _: Message) -> None:
        """Whoever has just got its line may be waiting for what was to be said before."""
        self._go()
        if self.draining:
            self.children.say("service", op="drain")

    def _go(self) -> None:
        if self.serving and not self.standing:
            self.children.say("load", op="go", host=self.host, port=self.port)

    def _on_start(self, message: Message) -> None:
        name = message["name"]
        self.replicas[name] = Replica(message["at_s"])
        self._event("asked", message["at_s"], replica=name, cold=self.config.cold)
        if self.config.engine != "ray":  # Ray has started it already
            self._fork(f"replica {name}", "worker", name=name)

    def _on_ready(self, message: Message) -> None:
        replica = self.replicas[message["name"]]
        replica.pid = message["pid"]
        more = {key: message[key] for key in ("pid", "load_s", "warm_up_s", "device", "paced")}
        self._event(
            "ready",
            message["at_s"],
            replica=message["name"],
            start_s=message["at_s"] - replica.asked_s,
            **more,
        )

    def _on_retire(self, message: Message) -> None:
        self._event("retire", message["at_s"], replica=message["name"])
        if not self.replicas[message["name"]].pid:  # it was never ready, and ends as soon as it would be
            self._on_retired(message)

    def _on_retired(self, message: Message) -> None:
        self._gone(message, "retired")

    def _on_hung(self, message: Message) -> None:
        """It may be stopped, or at work for ever: it does not end by itself."""
        self._event("hung", message["at_s"], replica=message["name"])
        if process := self.children.alive.get(f"replica {message['name']}"):
            process.stop()

    def _on_lost(self, message: Message) -> None:
        self.replicas[message["name"]].lost = True
        self._gone(message, "lost")

    def _gone(self, message: Message, how: str) -> None:
        self.replicas[message["name"]].ended_s = message["at_s"]
        self._event(how, message["at_s"], replica=message["name"])

    def _on_engine(self, message: Message) -> None:
        more = {name: value for name, value in message.items() if name not in ("op", "at_s")}
        self._event("engine", message["at_s"], **more)

    def _on_listening(self, message: Message) -> None:
        self.port = message["port"]

    def _on_serving(self, _: Message) -> None:
        address = {"url": f"http://{self.host}:{self.port}"} if self.port else {}
        self._status("running", "serving" if self.standing else "sending requests", **address)
        self.serving = True
        if self.standing:
            self._on_begin({"at_s": time.monotonic()})
        self._go()

    def _on_begin(self, message: Message) -> None:
        self.begin_s = float(message["at_s"])
        for early in self._early:
            self._write(early)
        config, actions = self.config, []
        if config.kill_at_s:
            actions.append((config.kill_at_s, self._kill))
        if config.stall_s:
            actions.append((config.stall_at_s, lambda: self._signal_all(signal.SIGSTOP, "stalled")))
            actions.append(
                (config.stall_at_s + config.stall_s, lambda: self._signal_all(signal.SIGCONT, "continued"))
            )
        self.plan = sorted(((self.begin_s + at_s, act) for at_s, act in actions), key=lambda item: item[0])

    def _on_loaded(self, message: Message) -> None:
        self._over(message["at_s"])

    def _on_drain(self, _: Message) -> None:
        self.draining = True
        self._status("running", "draining")
        self.children.say("service", op="drain")

    def _on_drained(self, message: Message) -> None:
        self.drained = True
        self._event("drained", message["at_s"], outcomes=message["outcomes"])

    def _over(self, end_s: float) -> None:
        """The load has its last answer."""
        begin_s = self.begin_s or end_s
        cost_s = sum(
            max(0.0, (one.ended_s or end_s) - max(one.asked_s, begin_s)) for one in self.replicas.values()
        )
        self._event("end", end_s, replica_s=cost_s)
        self._on_drain({})

    # ---- what we do to the replicas
    def _alive(self) -> dict[int, int]:
        return {name: one.pid for name, one in self.replicas.items() if one.pid and one.ended_s is None}

    def _kill(self) -> None:
        for name, pid in list(self._alive().items())[:1]:
            self._event("killed", time.monotonic(), replica=name)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _signal_all(self, number: signal.Signals, what: str) -> None:
        for name, pid in self._alive().items():
            self._event(what, time.monotonic(), replica=name)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    # ---- plumbing
    def _event(self, what: str, at_s: float, **more: Any) -> None:
        event = {"kind": "event", "schema": SCHEMA, "event": what, "at_s": at_s, **more}
        if self.begin_s is None:
            self._early.append(event)
        else:
            self._write(event)

    def _write(self, event: Message) -> None:
        assert self.begin_s is not None
        at_s = event.pop("at_s")
        self.events.write({**event, "time_s": at_s - self.begin_s})
