"""The processes of `benchmarks/serving.py`: the engines, the model alone, and the load (this file, run by its path)."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import asdict
from pathlib import Path

import psutil

from mlsyslab.labs.serving.arrivals import schedule
from mlsyslab.labs.serving.client import Client
from mlsyslab.labs.serving.config import Config
from mlsyslab.labs.serving.load import Load, RequestLines
from mlsyslab.labs.serving.protocol import INPUT, MODEL
from mlsyslab.labs.serving.wire import run_until_told
from mlsyslab.options import from_json

HERE = Path(__file__).parent
READY_S, END_S = 60.0, 40.0  # Ray takes 20 s to start and 30 to end
SCRIPTS = {"mosec": "mosec_server.py", "litserve": "litserve_server.py", "ray batch": "ray_server.py"}
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE)]),
    "OMP_NUM_THREADS": "1",
}


class Server:
    """A running engine: its address, and the CPU and memory of all its processes."""

    def __init__(self, engine: str, config: Config, python: str, folder: Path) -> None:
        self.port = free_port()
        (folder / engine).mkdir(exist_ok=True)
        given = json.dumps({"config": asdict(config), "port": self.port})
        self.log = (folder / f"{engine}.log").open("wb")
        self.process = subprocess.Popen(
            self._command(engine, config, python),
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            # A queue for the device of its own: it stands beside the others, and mostly does nothing.
            env={**ENVIRONMENT, "MLSYSLAB_RIVAL": given, "MLSYSLAB_LOCKS": str(folder / engine)},
            cwd=folder,
        )
        self.top = psutil.Process(self.process.pid)
        self.known: dict[int, psutil.Process] = {}
        self._wait_ready(config)

    def _command(self, engine: str, config: Config, python: str) -> list[str]:
        if engine in SCRIPTS:
            return [python, str(HERE / SCRIPTS[engine])]
        python = python if engine == "ray" else sys.executable
        asked = {**asdict(config), "engine": engine, "rate_per_s": 1.0, "clients": 0}
        known = asdict(Config())
        changed = {name: value for name, value in asked.items() if value != known[name]}
        knobs = [f"--{name.replace('_', '-')}={str(value).lower()}" for name, value in changed.items()]
        return [python, "-m", "mlsyslab.labs.serving.serve", "--port", str(self.port), *knobs]

    def _wait_ready(self, config: Config) -> None:
        tensor = {
            "name": INPUT,
            "datatype": "INT64",
            "shape": [1, config.tokens],
            "data": [1] * config.tokens,
        }
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v2/models/{MODEL}/infer",
            json.dumps({"inputs": [tensor]}).encode(),
            {"Content-Type": "application/json"},
        )
        until = time.monotonic() + READY_S
        while time.monotonic() < until and self.process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(asked, timeout=5.0).read()
                return
            time.sleep(0.2)
        self.end()
        raise RuntimeError(f"it did not come; last lines: {Path(self.log.name).read_text()[-2000:]}")

    def processes(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            for one in (self.top, *self.top.children(recursive=True)):
                self.known.setdefault(one.pid, one)
        return list(self.known.values())

    def cpu_s(self) -> float:
        """Of all its processes that still live."""
        total = 0.0
        for one in self.processes():
            with contextlib.suppress(psutil.Error):
                total += sum(one.cpu_times()[:2])
        return total

    def rss_bytes(self) -> dict[str, int]:
        """Its processes by pid."""
        found = {}
        for one in self.processes():
            with contextlib.suppress(psutil.Error):
                found[f"{one.pid}"] = one.memory_info().rss
        return found

    def end(self) -> None:
        """Ask it to end; end what is left of it."""
        left = self.processes()
        with contextlib.suppress(psutil.Error):
            self.top.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        _, left = psutil.wait_procs(left, timeout=5.0)
        for one in left:
            with contextlib.suppress(psutil.Error):
                one.kill()
        psutil.wait_procs(left, timeout=5.0)
        self.log.close()


class Limit:
    """The model alone in a process, run on demand: rows a second of full batches."""

    CODE = """
import json, sys, time
from rival import warm
from mlsyslab.labs.serving.arrivals import schedule
from mlsyslab.labs.serving.client import Client
from mlsyslab.labs.serving.config import Config
from mlsyslab.labs.serving.load import Load, RequestLines
from mlsyslab.labs.serving.worker import tokens_of
config = Config(**json.loads(sys.argv[1]))
model, rows = warm(config), tokens_of(config, config.max_batch)
for line in sys.stdin:
    began, taken = time.perf_counter(), []
    while time.perf_counter() - began < float(line):
        one = time.perf_counter(); model(rows); taken.append(time.perf_counter() - one)
    print(config.max_batch * len(taken) / (time.perf_counter() - began), flush=True)
"""

    def __init__(self, config: Config) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.CODE, json.dumps(asdict(config))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=ENVIRONMENT,
        )  # fmt: skip

    def rows_per_s(self, seconds: float) -> float:
        assert self.process.stdin
        assert self.process.stdout
        print(seconds, file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())

    def end(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(10.0)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def missing(package: str, python: str) -> str:
    """Why a rival cannot be run here; empty where it can."""
    if not python:
        return "no --rivals-python"
    done = subprocess.run([python, "-c", f"import {package}"], check=False, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def load_process(config: Config, server: Server, out: Path) -> subprocess.Popen[str]:
    """The generator, at work on a server; it says "begin" and "end"."""
    command = [sys.executable, __file__, json.dumps([asdict(config), server.port, str(out)])]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def generate(config: Config, port: int, out: Path) -> None:
    """Send the schedule of `config`, say when it begins and ends, and leave a record of every request."""
    plan = schedule(config)

    async def body() -> None:
        client = Client(config, plan, "127.0.0.1", port)
        await client.open()
        load = Load(config, plan, client.send, RequestLines(out))
        print("begin", flush=True)
        await load.run(load.now() + 0.05)
        print("end", flush=True)

    run_until_told(body)
    os._exit(0)


if __name__ == "__main__":
    given, at, where = json.loads(sys.argv[1])
    generate(from_json(Config, given), at, Path(where))
