"""The run directory: what an experiment writes while it happens, and how it is read back after any crash.

    config.json        lab, schema, every field of the Config
    environment.json   machine, versions, probe, limits
    truth.json         the faults that were injected
    status.json        queued | preparing | running | done | stopped | failed, and why
    rank-<r>.jsonl     one line a step, written as the step ends
    telemetry-<r>.jsonl  host and device samples
    rank-<r>.log       what the rank printed; error-<r>.json what it raised

JSON and JSON Lines only: reading a directory from a stranger executes nothing.
"""

from __future__ import annotations

import dataclasses
import errno
import importlib
import json
import math
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from mlsyslab.contract import ConfigError, Origin, RunError
from mlsyslab.options import from_json

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 1
LABS = ("steptime", "straggler", "parallelism", "serving", "scaleup")
PHASES = ("data_s", "h2d_s", "forward_s", "backward_s", "sync_s", "optimizer_s", "other_s")
FINAL = ("done", "stopped", "failed", "interrupted")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One training step of one rank. The seven phases sum to `step_s`; seconds.

    data_s: exposed wait for the loader. h2d_s: copies to the device. backward_s: own work. sync_s: exposed
    communication, from the last gradient to the end of backward. other_s: the rest (Python between phases).
    cpu_s: CPU seconds of the training thread, None where the clock is a device's.
    drained: the device had finished before the host asked for the next batch (CUDA only).
    extra: further numbers of the lab (loader-side seconds and the like), stored flat.
    """

    rank: int
    step: int
    world: int
    warmup: bool
    data_s: float
    h2d_s: float
    forward_s: float
    backward_s: float
    sync_s: float
    optimizer_s: float
    other_s: float
    step_s: float
    samples: int = 0
    bytes: int = 0
    loss: float | None = None
    cpu_s: float | None = None
    drained: bool | None = None
    overloaded: bool | None = None
    extra: dict[str, float | None] = dataclasses.field(default_factory=dict)

    @property
    def own_s(self) -> float:
        """Seconds of the step that this rank worked or waited for its own input: step_s - sync_s."""
        return self.step_s - self.sync_s

    def to_json(self) -> dict[str, Any]:
        """A flat object, `extra` merged in, with `own_s` and the kind of line."""
        row = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "extra"}
        return {"kind": "step", **row, "own_s": self.own_s, **self.extra}


def disk_error(error: OSError, path: Path) -> RunError:
    """One sentence for a path that cannot be written."""
    remedy = {
        errno.ENOSPC: "the disk is full: free space or choose another folder with out=",
        errno.EACCES: "you may not write there: choose another folder with out=",
        errno.EROFS: "the file system is read-only: choose another folder with out=",
        errno.ENOTDIR: "a part of the path is a file: choose another folder with out=",
        errno.EDQUOT: "your disk quota is used up: free space or choose another folder with out=",
    }.get(error.errno or 0, "choose another folder with out=")
    return RunError(f"cannot write {path}: {error.strerror}; {remedy}")


def write_json(path: Path, value: Any) -> None:
    """Write `value` so that a reader sees the old file or the new one, never half of one."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(json.dumps(value, indent=1, default=str) + "\n")
        part.replace(path)
    except OSError as error:
        raise disk_error(error, path) from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, {} where the file is absent or broken."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


class Stream:
    """An append-only JSON Lines file; each line reaches the kernel before `write` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: IO[str] = path.open("a", buffering=1)
        except OSError as error:
            raise disk_error(error, path) from error

    def write(self, row: dict[str, Any]) -> None:
        """Append one object; not-a-number becomes null, since JSON has none."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        try:
            self._file.write(json.dumps(clean, separators=(",", ":")) + "\n")
        except OSError as error:
            raise disk_error(error, self.path) from error

    def close(self) -> None:
        self._file.close()


class Tail:
    """Reads the complete lines that a growing JSON Lines file has gained since the last call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self.broken_lines = 0

    def read(self) -> Iterator[dict[str, Any]]:
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                chunk = file.read()
        except OSError:
            return
        whole = chunk.rfind(b"\n") + 1
        self._offset += whole
        for line in chunk[:whole].splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                self.broken_lines += 1
                continue
            if isinstance(row, dict):
                yield row


class Job(Protocol):
    """What `launch` gives to a live Run."""

    def stop(self) -> None: ...
    def wait(self, timeout_s: float | None) -> None: ...
    @property
    def finished(self) -> bool: ...


class Run:
    """An experiment: its configuration, its records, and, while it goes on, its handle.

    `records` is a DataFrame with a row for each (rank, step), `telemetry` one with a row for each sample.
    `origin` is "measured" for a run of this process and "recorded" for one read from disk.
    """

    def __init__(self, path: Path, *, job: Job | None = None) -> None:
        self.path = path
        self.origin: Origin = "measured" if job else "recorded"
        self._job = job
        self._tails: dict[Path, Tail] = {}
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
        module = importlib.import_module(f"mlsyslab.labs.{stored['lab']}.config")
        try:
            return from_json(module.Config, stored.get("config", {}))
        except ConfigError as error:
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
        stored = read_json(self.path / "status.json") or {
            "state": "interrupted",
            "message": "no status was written",
        }
        here = stored.get("host") in (None, socket.gethostname())
        if stored["state"] not in FINAL and here and not _alive(stored.get("pid")):
            stored = {**stored, "state": "interrupted", "message": "the process that ran it is gone"}
        return stored

    # ---- reading
    def poll(self) -> list[dict[str, Any]]:
        """The step records that came since the last call, oldest first; never waits."""
        fresh: list[dict[str, Any]] = []
        for path in sorted(self.path.glob("rank-*.jsonl")):
            for row in self._tail(path):
                (fresh if row.get("kind") == "step" else self.notes).append(row)
        for path in sorted(self.path.glob("telemetry-*.jsonl")):
            self._telemetry.extend(self._tail(path))
        fresh.sort(key=lambda row: (row.get("world", 0), row.get("step", 0), row.get("rank", 0)))
        self._steps.extend(fresh)
        return fresh

    def _tail(self, path: Path) -> list[dict[str, Any]]:
        return list(self._tails.setdefault(path, Tail(path)).read())

    @property
    def records(self) -> pd.DataFrame:
        """A row for each rank and step; seconds, bytes. Empty while nothing has been recorded."""
        import pandas as pd

        self.poll()
        frame = pd.DataFrame(self._steps)
        return frame.drop(columns="kind", errors="ignore")

    @property
    def telemetry(self) -> pd.DataFrame:
        """A row for each sample: host and device counters; None where a sensor is absent."""
        import pandas as pd

        self.poll()
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
        """Share of the expected steps that the slowest rank has recorded, 0..1."""
        self.poll()
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
        self.poll()
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
    except ProcessLookupError:
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
    if stored.get("schema", 0) > SCHEMA:
        raise RunError(
            f"{path} has schema {stored['schema']}, this mlsyslab reads up to {SCHEMA}; upgrade it"
        )
    run = Run(path)
    run.poll()
    return run
