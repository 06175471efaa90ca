"""Clocks that a step is marked on: the host's, or a device's through events that are never waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class Clock(Protocol):
    """Where the marks are read. A token is one moment; `host` is False where it is a device's moment."""

    host: bool

    def stamp(self) -> Any:
        """A token for now, in the order of the work that was launched; never waits."""

    def ready(self, token: Any) -> bool:
        """Whether the moment has passed; never waits."""

    def seconds(self, start: Any, stop: Any) -> float:
        """Seconds between two ready tokens."""

    def wait(self, token: Any) -> None:
        """Return when the moment has passed; only `close` calls it."""

    def release(self, tokens: list[Any]) -> None:
        """Take tokens back that nobody will ask about again."""


class HostClock:
    """Wall clock of the host, resolution below a microsecond: right where the CPU does the work."""

    host = True
    stamp = staticmethod(time.perf_counter)

    def ready(self, token: float) -> bool:
        return True

    def seconds(self, start: float, stop: float) -> float:
        return stop - start

    def wait(self, token: float) -> None:
        pass

    def release(self, tokens: list[float]) -> None:
        pass


class CudaClock:
    """Timed events on the current compute stream, pooled; resolution 0.5 microseconds (CUDA runtime manual).

    The pair around next() brackets no device work, so its seconds are the time for which the device had
    nothing queued: 0 while prefetch keeps up, however long next() took on the host.
    """

    host = False

    def __init__(self, new_event: Callable[[], Any] | None = None) -> None:
        self._new_event = new_event or _cuda_event
        self._pool: list[Any] = []

    def stamp(self) -> Any:
        event = self._pool.pop() if self._pool else self._new_event()
        event.record()
        return event

    def ready(self, token: Any) -> bool:
        return bool(token.query())

    def seconds(self, start: Any, stop: Any) -> float:
        return float(start.elapsed_time(stop)) / 1e3

    def wait(self, token: Any) -> None:
        token.synchronize()

    def release(self, tokens: list[Any]) -> None:
        self._pool.extend(tokens)


def _cuda_event() -> Any:
    import torch

    return torch.cuda.Event(enable_timing=True)


def clock_of(model: torch.nn.Module) -> Clock:
    """The clock of the device that holds the model's first parameter."""
    first = next(model.parameters(), None)
    return CudaClock() if first is not None and first.device.type == "cuda" else HostClock()
