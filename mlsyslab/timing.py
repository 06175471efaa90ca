"""StepTimer: where a training step's seconds go, in three lines of anyone's own loop.

    timer = StepTimer(model, optimizer, out="runs/mine")
    for batch in timer(loader):
        loss = loss_fn(model(batch)); loss.backward(); optimizer.step(); optimizer.zero_grad()
    timer.close()

A step is a list of marks on one clock. Each mark closes the running phase and opens the next, so the seven
phases sum to the step by construction. Hooks on the model, its output and the optimizer set the marks:

    next(loader)  "data" | batch is here  "other" | model called  "forward" | backward() called  "backward"
    | last gradient  "sync" | DDP has finished  "other" | optimizer.step()  "optimizer" | it returned  "other"

The loss is part of `forward`, its gradient of `backward`, and so is every backward() after the model's first
forward, also another model's. Under DDP `sync` is exposed communication: a hook on the model's output queues
a callback, which the autograd engine runs as soon as no gradient is left to compute, and DDP queues its own,
the one that waits for the buckets, in between. So our first callback is "last gradient", and a second one,
queued by the first, is "DDP has finished": no hook on any parameter, nothing on the communication stream.
A single rank drops the hook on the output once it has seen a gradient there.
Communication elsewhere is not separated: FSDP's waits, and the buffers that DDP broadcasts in forward, are
part of the phase in which they happen.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar

from mlsyslab.clocks import Clock, clock_of
from mlsyslab.contract import ConfigError, RunError
from mlsyslab.marks import Marks
from mlsyslab.records import PHASES, StepRecord
from mlsyslab.steps import (
    RESERVED,
    WRITE_EVERY_S,
    Step,
    fold,
    one_number,
    open_lines,
    rank_and_world,
    record_of,
    row_of,
)
from mlsyslab.wiring import check_fired, check_wiring

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

WARMUP_STEPS = 3
"""Steps marked as warm-up by default: DDP rebuilds its buckets and the optimizer makes its state in the
first step, the allocator settles in the second, and the loader's prefetch queue drains over the next."""


class _Phase:
    """`with timer.phase("h2d"):` sets the phase and puts back the one before it."""

    __slots__ = ("_before", "_marks", "_name", "_timer")

    def __init__(self, timer: StepTimer, name: str) -> None:
        self._timer, self._name = timer, name

    def __enter__(self) -> None:
        self._marks = marks = self._timer._marks
        self._before = marks[-2] if marks else ""
        self._timer._mark(self._name)

    def __exit__(self, *error: object) -> None:
        # A block that outlives its step must not write into the next one.
        if self._marks is not None and self._timer._marks is self._marks:
            self._timer._mark(self._before)


class StepTimer(Marks):
    """Times the phases of each training step and writes one StepRecord a step, seconds.

    model: the module that the loop calls, DDP-wrapped or plain. optimizer: whose step() is timed, or None.
    out: folder for rank-<r>.jsonl, made if absent. warmup: steps below this number are marked.
    clock: None takes the model's device (CUDA events, else the wall clock).
    on_record: called with each StepRecord, between steps. pressure: gives the run-queue wait in seconds so
    far, or None; without it `overloaded` stays None.

    A step runs from one next() on the loader to the following one; records are written between the two, in
    nobody's phase. A step that a break or an exception ends is not recorded: to stop after n steps, use
    `timer(loader, steps=n)`. The first step of each epoch is marked as warm-up and carries `startup_s`, the
    seconds of starting the loader and getting its first batch.
    On CUDA nothing is synchronised before `close`; a record comes when its events are done, a step or two late.

    Raises ConfigError for a model or optimizer that cannot be hooked, and at `close` when steps ran in which
    the model's forward or backward never did; RunError where `out` cannot be written.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        out: str | Path | None = None,
        warmup: int = WARMUP_STEPS,
        clock: Clock | None = None,
        on_record: Callable[[StepRecord], None] | None = None,
        pressure: Callable[[], float | None] | None = None,
    ) -> None:
        check_wiring(model, optimizer, warmup)
        self.rank, world = rank_and_world()
        self.clock = clock or clock_of(model)
        self.warmup = warmup
        self.dropped = 0
        self._on_record, self._pressure = on_record, pressure
        self._lines = open_lines(out, self.rank) if out is not None else None
        self._step: Step | None = None
        self._pending: deque[Step] = deque()
        self._steps = 0
        self._cpu_s, self._due_s = 0.0, 0.0
        self._waited_s: float | None = None
        self._closed = False
        self._wired_optimizer = optimizer is not None
        super().__init__(model, optimizer, world, self.clock.stamp)

    # ---- the loop
    def __call__(self, loader: Iterable[T], *, steps: int | None = None) -> Generator[T, None, None]:
        """The batches of `loader`, at most `steps` of them; calling it again is the next epoch."""
        self._refuse_closed()
        if steps is not None and steps < 1:
            raise ConfigError(f"steps={steps} is below 1; leave it out to run the whole loader")
        return self._epoch(loader, steps)

    def _epoch(self, loader: Iterable[T], steps: int | None) -> Generator[T, None, None]:
        started_s, self._thread = time.perf_counter(), get_ident()
        batches = iter(loader)
        self._read_host()
        done, step = 0, None
        handed: list[
            T
        ] = []  # no name for the batch: it would keep the batch alive while the next one is fetched
        try:
            while steps is None or done < steps:
                # Written out here: a call more costs a microsecond where caches are cold.
                if self._closed:
                    self._refuse_closed()
                if self._step is not None:
                    self._abandon()
                number = self._steps
                self._step = step = Step(number, done == 0 or number < self.warmup, self._stamp())
                self._marks, self._in_backward, self._asked = step.marks, False, False
                try:
                    handed.append(next(batches))
                except StopIteration:
                    return
                if self._marks is not None:
                    self._marks += "other_s", self._stamp()
                if not done and self._step:
                    self._step.extra = {"startup_s": time.perf_counter() - started_s}
                yield handed.pop()
                done += 1
                if self._step is step:
                    self._end(step)
                else:  # another loop of this timer has taken over, and this step is lost
                    self._read_host()
        finally:
            if self._step is step:
                self._abandon()
            self._resolve()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RunError("this timer is closed; make a new StepTimer for the next loop")

    def _read_host(self) -> None:
        """Where the host's own counters stand before the next step."""
        if self.clock.host:
            self._cpu_s = time.thread_time()
        if self._pressure:
            self._waited_s = self._pressure()

    def _end(self, step: Step) -> None:
        host = self.clock.host
        if not host:
            # Asked of the last mark before the end: the end itself was never queued until now.
            step.drained = self.clock.ready(step.marks[-1])
        step.end = step.guard = self._stamp()
        if host:
            before_s, self._cpu_s = self._cpu_s, time.thread_time()
            step.cpu_s = self._cpu_s - before_s
        elif getattr(step.loss, "is_cuda", False):
            # Queued behind the step, into pinned memory; read when the guard after it has passed.
            step.loss = step.loss.to("cpu", non_blocking=True)
            step.guard = self._stamp()
        if self._pressure:
            was_s, self._waited_s = self._waited_s, self._pressure()
            if was_s is not None and self._waited_s is not None:
                step.waited_s = self._waited_s - was_s
        self._step = self._marks = None
        self._steps += 1
        self._pending.append(step)
        if time.perf_counter() >= self._due_s:
            self._resolve()
            self._read_host()

    def _abandon(self) -> None:
        """Forget a step that was begun and not ended."""
        if self._step is not None:
            self.clock.release(self._step.marks[1::2])
        self._step = self._marks = None

    # ---- what the loop says itself
    def phase(self, name: str) -> _Phase:
        """A block of the step that belongs to phase `name` ("h2d", "sync", ...); the one before it comes back after.

        Outside a step it does nothing. Raises ConfigError for a name that is no phase.
        """
        if f"{name}_s" not in PHASES:
            names = ", ".join(phase.removesuffix("_s") for phase in PHASES)
            raise ConfigError(f"phase={name!r} is not a phase of a step; choose one of {names}")
        return _Phase(self, f"{name}_s")

    def add(self, *, samples: int = 0, bytes: int = 0, loss: Any = None, **extra: float | None) -> None:
        """Put numbers into the running step's record.

        samples and bytes add up over the calls in one step. loss, a number or a tensor of one element (read
        after the step, never waited for), and `extra`, names with a unit suffix, keep their last value.
        Raises ConfigError for a name that the record has already, RunError outside a step.
        """
        step = self._step
        if step is None:
            raise RunError("add() belongs to a running step; call it inside `for batch in timer(loader):`")
        if taken := RESERVED.intersection(extra):
            raise ConfigError(f"{min(taken)} is a field of every record; choose another name")
        if tensors := [name for name, value in extra.items() if hasattr(value, "detach")]:
            raise ConfigError(f"{tensors[0]} is a tensor, which only loss may be; give a number")
        step.samples += samples
        step.bytes += bytes
        if loss is not None:
            step.loss = one_number(loss)
        if extra:
            step.extra = {**step.extra, **extra}

    # ---- records
    def _resolve(self) -> None:
        """Emit the steps whose moments have passed, oldest first."""
        rows = []
        while self._pending and self.clock.ready(self._pending[0].guard):
            rows += self._read(self._pending.popleft())
        if rows and self._lines:
            self._lines.write_rows(rows)
        if self._on_record:
            for row in rows:
                self._on_record(record_of(row))
        self._due_s = time.perf_counter() + WRITE_EVERY_S

    def _read(self, step: Step) -> list[tuple[Any, ...]]:
        """The step's row; none where the clock gave no number."""
        laps = fold(step.marks, step.end, self.clock.seconds)
        if not self.clock.host:
            self.clock.release(
                [*step.marks[1::2], step.end, *([] if step.guard is step.end else [step.guard])]
            )
        step_s = sum(laps.values())
        if math.isfinite(step_s):
            return [row_of(step, laps, step_s, self.rank, self.world)]
        self.dropped += 1
        return []

    # ---- the end
    def close(self) -> None:
        """Remove every hook, write the steps still on the device (this may wait for it), close the file.

        A second call does nothing. Raises ConfigError when steps ran and the hooks never fired.
        """
        if self._shut() and self._steps:
            check_fired(self._steps, self._forwards, self._backwards or not self._awaited)
            if self._wired_optimizer and self._backwards and not self._updates:
                warnings.warn("the optimizer given to StepTimer never stepped", stacklevel=2)

    def _shut(self) -> bool:
        if self._closed:
            return False
        self._closed = True
        self._abandon()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        try:
            if self._pending:
                self.clock.wait(self._pending[-1].guard)
            self._resolve()
        finally:
            if self._lines:
                self._lines.close()
        return True

    def __enter__(self) -> StepTimer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # the loop's own exception is the news: not the wiring, nor a disk or a device that fails again
            with suppress(Exception):
                self._shut()
