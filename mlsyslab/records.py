"""What an experiment writes while it happens: one record a step, in files that survive a crash.

    config.json        lab, schema, every field of the Config
    environment.json   machine, versions, probe, limits
    truth.json         the faults that were injected
    status.json        queued | preparing | running | done | stopped | failed, and why
    rank-<r>.jsonl     one line a step, written as the step ends
    telemetry-<r>.jsonl  host and device samples
    rank-<r>.log       what the rank printed
    requests.jsonl     of a service under load: one line a request, written when its outcome is known
    events.jsonl       of a service: when replicas were asked for, ready, retired, lost

JSON and JSON Lines only: reading a directory from a stranger executes nothing.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

from mlsyslab.contract import RunError

SCHEMA = 1
PHASES = ("data_s", "h2d_s", "forward_s", "backward_s", "sync_s", "optimizer_s", "other_s")


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


_STEP_S, _SYNC_S = len(PHASES), PHASES.index("sync_s")


class StepLines(Stream):
    """The record file, for rows known to be finite, many at a time: a third of the cost of `write`."""

    # Seconds to the nanosecond, which costs a third of writing every digit.
    _FIELDS = "".join(
        f'"{name}":{"%.9f" if name in (*PHASES, "step_s") else "%s"},'
        for name in StepRecord.__slots__
        if name != "extra"
    )
    _LINE = '{"kind":"step",' + _FIELDS + '"own_s":%.9f%s}'
    _WORD: ClassVar = {None: "null", True: "true", False: "false"}

    def write_rows(self, rows: list[tuple[Any, ...]]) -> None:
        """Append the lines of StepRecord.to_json() for rows of its fields in their order, in one call to the kernel."""
        try:
            self._file.write("\n".join(map(self._line, rows)) + "\n")
        except OSError as error:
            raise disk_error(error, self.path) from error

    def close(self) -> None:
        """Close the file; RunError where what was left cannot be written."""
        try:
            super().close()
        except OSError as error:
            raise disk_error(error, self.path) from error

    def _line(self, row: tuple[Any, ...]) -> str:
        word = self._WORD
        rank, step, world, warmup, *numbers, loss, cpu_s, drained, overloaded, extra = row
        return self._LINE % (
            rank,
            step,
            world,
            word[warmup],
            *numbers,
            "null" if loss is None else loss,
            "null" if cpu_s is None else cpu_s,
            word[drained],
            word[overloaded],
            numbers[_STEP_S] - numbers[_SYNC_S],
            "," + json.dumps(dict(extra), separators=(",", ":"))[1:-1] if extra else "",
        )


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
