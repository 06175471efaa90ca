"""Run: an experiment's directory, read live while it happens and read back after any crash."""

from __future__ import annotations

import dataclasses
import importlib
import os
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mlsyslab.contract import ConfigError, Origin, RunError
from mlsyslab.options import from_json
from mlsyslab.records import SCHEMA, Tail, disk_error, read_json, write_json

if TYPE_CHECKING:
    import pandas as pd

LABS = ("steptime", "straggler", "parallelism", "serving", "scaleup")
FINAL = ("done", "stopped", "failed", "interrupted")


class Job(Protocol):
    """What `launch` gives to a live Run."""

    status: dict[str, Any]

    def stop(self) -> None: ...
    def wait(self, timeout_s: float | None) -> None: ...
    @property
    def finished(self) -> bool: ...


class Run:
    """An experiment: its configuration, its records, and, while it goes on, its handle.

    `records` is a DataFrame with a row for each (rank, step), or each request; `telemetry` one with a row for each sample.
    `origin` is "measured" for a run of this process and "recorded" for one read from disk.
    """

    def __init__(self, path: Path, *, job: Job | None = None) -> None:
        self.path = path
        self.origin: Origin = "measured" if job else "recorded"
        self._job = job
        self._tails: dict[Path, Tail] = {}
        self._reading = threading.Lock()  # a panel's thread and a notebook cell may read at the same time
        self._polled = 0
        self._steps: list[dict[str, Any]] = []
        self._telemetry: list[dict[str, Any]] = []
        self.notes: list[dict[str, Any]] = []

    # ---- what was asked, where, and what was injected
    @property
    def lab(self) -> str:
        """The lab's name."""
        return str(read_json(self.path / "config.json").get("lab", ""))

    @property
    def config(self) -> Any:
        """The lab's Config; raises RunError where the file cannot be understood."""
        stored = read_json(self.path / "config.json")
        if stored.get("lab") not in LABS:
            raise RunError(
                f"{self.path}/config.json names no lab of {', '.join(LABS)}; it is not a run directory"
            )
        try:
            module = importlib.import_module(f"mlsyslab.labs.{stored['lab']}.config")
            return from_json(module.Config, stored.get("config", {}))
        except (ConfigError, ImportError) as error:
            raise RunError(f"{self.path}/config.json cannot be used: {error}") from error

    @property
    def environment(self) -> dict[str, Any]:
        return read_json(self.path / "environment.json")

    @property
    def truth(self) -> list[dict[str, Any]]:
        """The injected faults, as dicts; a mystery run hides them until they are revealed."""
        stored = read_json(self.path / "truth.json")
        if stored.get("hidden"):
            raise RunError("the truth of a mystery run is hidden; commit your verdict first, then reveal it")
        return list(stored.get("faults", []))

    @property
    def status(self) -> dict[str, Any]:
        """state, message, error, holder and position in the queue. A run whose process is gone is `interrupted`."""
        if self._job:
            return self._job.status
        stored = read_json(self.path / "status.json")
        if "state" not in stored:
            stored = {"state": "interrupted", "message": "no status was written"}
        here = stored.get("host") in (None, socket.gethostname())
        if stored["state"] not in FINAL and here and not _alive(stored.get("pid")):
            stored = {**stored, "state": "interrupted", "message": "the process that ran it is gone"}
        return stored

    # ---- reading
    def poll(self) -> list[dict[str, Any]]:
        """The step or request records that came since the last call of `poll`, oldest first; never waits. What other
        properties have read meanwhile is among them."""
        self._read()
        with self._reading:
            fresh, self._polled = self._steps[self._polled :], len(self._steps)
        return fresh

    def _read(self) -> None:
        """Take in what the files have gained."""
        with self._reading:
            fresh: list[dict[str, Any]] = []
            for path in sorted(self.path.glob("rank-*.jsonl")):
                for row in self._tail(path):
                    (fresh if row.get("kind") == "step" else self.notes).append(row)
            for path in sorted(self.path.glob("requests.jsonl")):
                fresh.extend(self._tail(path))
            for path in sorted(self.path.glob("events.jsonl")):
                self.notes.extend(self._tail(path))
            for path in sorted(self.path.glob("telemetry-*.jsonl")):
                self._telemetry.extend(self._tail(path))
            fresh.sort(key=lambda row: (row.get("world", 0), row.get("step", 0), row.get("rank", 0)))
            self._steps.extend(fresh)

    def _tail(self, path: Path) -> list[dict[str, Any]]:
        return list(self._tails.setdefault(path, Tail(path)).read())

    def rows(self) -> list[dict[str, Any]]:
        """The records as they were written, without a table."""
        self._read()
        return list(self._steps)

    @property
    def records(self) -> pd.DataFrame:
        """A row for each rank and step, or for each request in the order of their outcomes; seconds, bytes. Empty while nothing has been recorded."""
        import pandas as pd

        self._read()
        frame = pd.DataFrame(self._steps)
        return frame.drop(columns="kind", errors="ignore")

    @property
    def telemetry(self) -> pd.DataFrame:
        """A row for each sample: host and device counters; None where a sensor is absent."""
        import pandas as pd

        self._read()
        return pd.DataFrame(self._telemetry)

    def summary(self) -> dict[str, Any]:
        """The lab's own summary of this run: means over the steady steps, keys with units."""
        return dict(importlib.import_module(f"mlsyslab.labs.{self.lab}").summary(self))

    # ---- the live handle
    @property
    def finished(self) -> bool:
        return self._job.finished if self._job else True

    @property
    def progress(self) -> float:
        """Share of the expected records that has come, 0..1."""
        self._read()
        if self.status["state"] == "done":
            return 1.0
        expected = float(read_json(self.path / "config.json").get("records_expected") or 0)
        return min(1.0, len(self._steps) / expected) if expected else 0.0

    def stop(self) -> Run:
        """End the experiment; what was recorded stays readable."""
        if self._job:
            self._job.stop()
        return self

    def wait(self, timeout_s: float | None = None) -> Run:
        """Wait for the end; raises RunError when the run failed, or when `timeout_s` is over (it is then stopped)."""
        if self._job:
            self._job.wait(timeout_s)
        self._read()
        status = self.status
        if self._job and status["state"] == "failed":
            raise RunError(str(status.get("error") or "the run failed without a message"))
        return self

    def __repr__(self) -> str:
        return (
            f"<Run {self.lab} {self.status['state']} {len(self._steps)} records, {self.origin}, {self.path}>"
        )


def _alive(pid: object) -> bool:
    if not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def create_run(
    lab: str, config: Any, *, out: str | Path | None, truth: list[dict[str, Any]], expected: int
) -> Path:
    """Make the run directory and write what is known before the start.

    out: the directory itself (must be absent or empty), or None for runs/<lab>-<time>-<pid> under the
    current folder. Raises RunError where it cannot be written.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path = (
        Path(out) if out else Path("runs") / f"{lab}-{stamp}-{os.getpid()}-{time.monotonic_ns() % 10**6:06d}"
    )
    try:
        path.mkdir(parents=True, exist_ok=True)
        used = any(path.iterdir())
    except OSError as error:
        raise disk_error(error, path) from error
    if used:
        raise RunError(f"{path} is not empty; choose a new folder, so that no record is overwritten")
    write_json(
        path / "config.json",
        {"schema": SCHEMA, "lab": lab, "config": dataclasses.asdict(config), "records_expected": expected},
    )
    write_json(path / "truth.json", {"schema": SCHEMA, "faults": truth})
    return path


def open_run(path: str | Path) -> Run:
    """Read a run directory back, whatever became of the run; also one made on another machine.

    Raises RunError where `path` is no run directory or its schema is newer than this library.
    """
    path = Path(path)
    stored = read_json(path / "config.json")
    if not stored:
        raise RunError(f"{path} has no readable config.json; give the folder that holds it")
    if stored.get("lab") not in LABS or not isinstance(stored.get("schema"), int):
        raise RunError(
            f"{path}/config.json names no lab and schema that this mlsyslab knows; it is not a run directory"
        )
    if stored["schema"] > SCHEMA:
        raise RunError(
            f"{path} has schema {stored['schema']}, this mlsyslab reads up to {SCHEMA}; upgrade it"
        )
    run = Run(path)
    run._read()
    return run
