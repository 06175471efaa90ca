"""Hosts of a job, played by processes of this machine: each is one elastic launcher of torch with its rank below it.

The launchers fork from the warm server (`mlsyslab.launch`), which spares each the import of torch, and run
`torch.distributed.run` as `torchrun` does. They die with the caller, and the ranks with them. The rendezvous is a
process of its own, as a cluster's head node is: no host that goes takes it along.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from mlsyslab.contract import RunError
from mlsyslab.launch import Ranks
from mlsyslab.records import read_json, write_json

KEEP_ALIVE_S, KEEP_ALIVE_TRIES = 1, 4  # a host that is silent for so long is dead to the others
JOIN_S = 60
MAX_RESTARTS = 4
START_S = 120.0  # the warm server may have to import torch first
ADDRESS = "127.0.0.1"
FROM_THE_SERVER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MLSYSLAB_INIT")
ENVIRONMENT = {
    "MLSYSLAB_ONE_MACHINE": "1",  # the hosts share this machine's devices
    # Each rendezvous opens its own store: torch 2.13 otherwise sends hosts that stay to that of one that is gone.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
}


def serve_rendezvous(payload: dict[str, Any], out: Path) -> None:
    """The process that holds the rendezvous: its port goes to out/port.json. Ends when it is stopped."""
    from torch.distributed import TCPStore

    store = TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    write_json(out / "port.json", {"port": store.port})
    while True:
        time.sleep(3600)


def launch_rank(payload: dict[str, Any], out: Path) -> None:
    """The process that is a host: torchrun, with one rank. payload: port, ranks, run (directory), every."""
    for name in FROM_THE_SERVER:  # this process is no rank
        os.environ.pop(name, None)
    from torch.distributed import run

    from mlsyslab.labs.straggler import elastic_worker

    ranks = payload["ranks"]
    settings = {
        "is_host": 0,
        "keep_alive_interval": KEEP_ALIVE_S,
        "keep_alive_max_attempt": KEEP_ALIVE_TRIES,
        "join_timeout": JOIN_S,
    }
    options = {
        "nnodes": f"{ranks}:{ranks}",
        "nproc-per-node": 1,
        "rdzv-backend": "c10d",
        "rdzv-endpoint": f"{ADDRESS}:{payload['port']}",
        "rdzv-id": "mlsyslab",
        "rdzv-conf": ",".join(f"{name}={value}" for name, value in settings.items()),
        "local-addr": ADDRESS,
        "max-restarts": MAX_RESTARTS,
        "shutdown-timeout": 1,
        "log-dir": out / "torchelastic",
        "start-method": "fork",  # and run-path: the rank is a fork too, which spares it torch's import
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    worker = [elastic_worker.__file__, "--out", payload["run"], "--every", str(payload["every"])]
    run.main([*words, "--run-path", *worker])


class Host:
    """One host's launcher: `ended` and then `code` (0 done, below 0 the signal that killed it, else it gave up)."""

    def __init__(self, name: str, worker: str, payload: dict[str, Any], folder: Path) -> None:
        self.name, self.folder = name, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.ranks = Ranks(
            f"{__name__}:{worker}", payload, folder, 1, env={"MLSYSLAB_HOST": name, **ENVIRONMENT}
        )
        self.asked_to_end = False
        self.code, self.error = 0, ""
        self._thread = threading.Thread(target=self._wait, name=f"mlsyslab-{name}", daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        try:
            self.ranks.wait()
        except RunError as error:
            self.error = str(error)
            self.code = next((event["code"] for event in self.ranks.exits), 1)

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def end(self, *, wait_s: float = 5.0) -> None:
        """SIGTERM, so that it ends its rank; SIGKILL shortly after, and the rank dies with it."""
        self.asked_to_end = True
        self.ranks.stop()
        self._thread.join(wait_s)


class Hosts:
    """The hosts of a run, by name, in the order of their start; `close` ends all."""

    def __init__(self, out: Path, *, ranks: int, every: int) -> None:
        self.folder = out / "hosts"
        self.payload = {"ranks": ranks, "run": str(out.resolve()), "every": every}
        self.all: list[Host] = []
        self.rendezvous = Host("rendezvous", "serve_rendezvous", {}, self.folder / "rendezvous")

    def port(self) -> int:
        """Where the rendezvous listens. Raises RunError when it does not start."""
        until = time.monotonic() + START_S
        while not (found := read_json(self.folder / "rendezvous" / "port.json")):
            if self.rendezvous.ended or time.monotonic() > until:
                why = self.rendezvous.error or f"nothing within {START_S:g} s"
                raise RunError(f"the rendezvous of the hosts did not start: {why}; run `mlsyslab doctor`")
            time.sleep(0.02)
        return int(found["port"])

    def start(self, name: str) -> Host:
        """Start a host; it waits in the rendezvous until the job needs it."""
        host = Host(name, "launch_rank", {**self.payload, "port": self.port()}, self.folder / name)
        self.all.append(host)
        return host

    def wait(self, within_s: float) -> None:
        """Until all have ended, at most so long."""
        until = time.monotonic() + within_s
        while time.monotonic() < until and not all(host.ended for host in self.all):
            time.sleep(0.02)

    def named(self, name: str) -> Host:
        return next(host for host in self.all if host.name == name)

    def close(self) -> None:
        """End every process, the rendezvous last."""
        for host in [*self.all, self.rendezvous]:
            host.asked_to_end = True
            host.ranks.stop()
        for host in [*self.all, self.rendezvous]:
            host.end()
