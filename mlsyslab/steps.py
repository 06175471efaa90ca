"""A step while it runs, and the row that it becomes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlsyslab.contract import ConfigError
from mlsyslab.records import PHASES, StepLines, StepRecord, disk_error

OVERLOADED_FRAC = 0.2
"""A step is overloaded when the thread waited for a core longer than this share of it. The diagnoses act on
shares of 10 % and more, and a wait of a fifth can move any one phase across that."""

WRITE_EVERY_S = 0.1
"""Records of steps shorter than this are written together, at most so late: one by one, with cold caches and
a system call each, they cost three times as much. Longer steps are written as they end."""

NO_LAPS = dict.fromkeys(PHASES, 0.0)
NOTHING: Mapping[str, float | None] = MappingProxyType({})

RESERVED = frozenset(StepRecord.__slots__) | {"kind", "own_s", "startup_s", "loss_finite"}


def rank_and_world() -> tuple[int, int]:
    """This process' global rank and the number of ranks: torch.distributed's, else torchrun's variables, else 0, 1."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def fold(marks: list[Any], end: Any, seconds: Callable[[Any, Any], float]) -> dict[str, float]:
    """Seconds by phase, all seven, from marks [phase, token, phase, token, ...] and the token that ends the last.

    A lap that tokens of two streams make negative counts as 0; not-a-number is passed on.
    """
    laps = NO_LAPS.copy()
    pairs = iter(marks)
    phase, start = next(pairs), next(pairs)
    for following, stop in zip(pairs, pairs, strict=True):
        lap = seconds(start, stop)
        laps[phase] += 0.0 if lap < 0 else lap
        phase, start = following, stop
    lap = seconds(start, end)
    laps[phase] += 0.0 if lap < 0 else lap
    return laps


class Step:
    """One step while it runs, and until its tokens are ready. Class attributes are what most steps never set."""

    end: Any = None
    guard: Any = None  # the moment that must have passed before the step can be read
    cpu_s: float | None = None
    waited_s: float | None = None
    drained: bool | None = None
    samples = 0
    bytes = 0
    loss: Any = None
    extra: Mapping[str, float | None] = NOTHING

    def __init__(self, number: int, warmup: bool, start: Any) -> None:
        self.number, self.warmup = number, warmup
        # Flat, since a list of strings and floats is nothing for the garbage collector to walk.
        self.marks: list[Any] = ["data_s", start]


def row_of(step: Step, laps: dict[str, float], step_s: float, rank: int, world: int) -> tuple[Any, ...]:
    """The fields of the StepRecord, in its order: a tuple costs a third of the record."""
    loss = None if step.loss is None else float(step.loss)
    extra = {name: finite(value) for name, value in step.extra.items()} if step.extra else NOTHING
    if loss is not None and not math.isfinite(loss):
        extra, loss = {**extra, "loss_finite": 0.0}, None
    overloaded = None if step.waited_s is None else step.waited_s > OVERLOADED_FRAC * step_s
    head = (rank, step.number, world, step.warmup, *laps.values(), step_s)
    return (*head, step.samples, step.bytes, loss, step.cpu_s, step.drained, overloaded, extra)


def record_of(row: tuple[Any, ...]) -> StepRecord:
    """The StepRecord of a row."""
    values = dict(zip(StepRecord.__slots__, row, strict=True))
    return StepRecord(**{**values, "extra": dict(values["extra"])})


def open_lines(out: str | Path, rank: int) -> StepLines:
    """The record file of a rank in folder `out`, made if absent; ConfigError where it holds steps already."""
    path = Path(out) / f"rank-{rank}.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        used = path.exists() and b'"kind":"step"' in path.read_bytes()
    except OSError as error:
        raise disk_error(error, path) from error
    if used:
        raise ConfigError(f"{path} holds the steps of an earlier run; choose another folder with out=")
    return StepLines(path)


def one_number(loss: Any) -> Any:
    """`loss` cut off from its graph, unread."""
    if not hasattr(loss, "detach"):
        return float(loss)
    if loss.numel() != 1:
        raise ConfigError(f"loss has {loss.numel()} elements; give one number, loss.mean() for example")
    return loss.detach()


def finite(value: float | None) -> float | None:
    """`value`, None where it is infinite or not a number."""
    return value if value is not None and math.isfinite(value) else None
