"""StepTimer: where a training step's seconds go, in three lines of anyone's own loop.

    timer = StepTimer(model, optimizer, out="runs/mine")
    for batch in timer(loader):
        loss = loss_fn(model(batch)); loss.backward(); optimizer.step(); optimizer.zero_grad()
    timer.close()

A step is a list of marks on one clock. Each mark closes the running phase and opens the next, so the seven
phases sum to the step by construction. Hooks on the model, its output and the optimizer set the marks:

    next(loader)  "data" | batch is here  "other" | model called  "forward" | output's gradient  "backward"
    | last gradient  "sync" | DDP has finished  "other" | optimizer.step()  "optimizer" | it returned  "other"

The loss is part of `forward`. Under DDP `sync` is exposed communication: the autograd engine runs a callback
that was queued when backward began as soon as no gradient is left to compute, and DDP queues its own, the
one that waits for the buckets, in between. So our first callback is "last gradient", and a second one, queued
by the first, is "DDP has finished": no hook on any parameter, nothing on the communication stream.
Communication elsewhere is not separated: FSDP's waits, and the buffers that DDP broadcasts in forward, are
part of the phase in which they happen.
"""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from mlsyslab.contract import ConfigError, RunError
from mlsyslab.records import PHASES, StepRecord, Stream, disk_error

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

WARMUP_STEPS = 3
"""Steps marked as warm-up by default: DDP rebuilds its buckets and the optimizer makes its state in the
first step, the allocator settles in the second, and the loader's prefetch queue drains over the next."""

OVERLOADED_FRAC = 0.2
"""A step is overloaded when the thread waited for a core longer than this share of it. The diagnoses act on
shares of 10 % and more, and a wait of a fifth can move any one phase across that."""

WRITE_EVERY_S = 0.1
"""Records of steps shorter than this are written together, at most so late: one by one, with cold caches and
a system call each, they cost three times as much. Longer steps are written as they end."""

RESERVED = frozenset(StepRecord.__slots__) | {"kind", "own_s", "startup_s", "loss_finite"}


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
    laps = dict.fromkeys(PHASES, 0.0)
    tokens = [*marks[1::2], end]
    for i, phase in enumerate(marks[::2]):
        lap = seconds(tokens[i], tokens[i + 1])
        laps[phase] += 0.0 if lap < 0 else lap
    return laps


class _Step:
    """One step while it runs, and until its tokens are ready. Class attributes are what most steps never set."""

    end: Any = None
    guard: Any = None  # the moment that must have passed before the step can be read
    cpu_s: float | None = None
    waited_s: float | None = None
    drained: bool | None = None
    samples = 0
    bytes = 0
    loss: Any = None
    extra: Mapping[str, float | None] = MappingProxyType({})

    def __init__(self, number: int, warmup: bool, start: Any) -> None:
        self.number, self.warmup = number, warmup
        # Flat, since a list of strings and floats is nothing for the garbage collector to walk.
        self.marks: list[Any] = ["data_s", start]


class _Lines(Stream):
    """The record file, for rows known to be finite, many at a time: a third of the cost of `write`."""

    _FIELDS = tuple(name for name in StepRecord.__slots__ if name != "extra")
    _LINE = '{"kind":"step",' + "".join(f'"{name}":%s,' for name in _FIELDS) + '"own_s":%s%s}'
    _WORD: ClassVar = {None: "null", True: "true", False: "false"}

    def write_rows(self, rows: list[dict[str, Any]]) -> None:
        """Append the lines that StepRecord(**row).to_json() stands for, in one call to the kernel."""
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

    def _line(self, row: dict[str, Any]) -> str:
        word, loss, cpu_s, extra = self._WORD, row["loss"], row["cpu_s"], row["extra"]
        more = "," + json.dumps(extra, separators=(",", ":"))[1:-1] if extra else ""
        rank, step, world, warmup, *numbers, _, _, drained, overloaded, _ = row.values()
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
            row["step_s"] - row["sync_s"],
            more,
        )


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


class StepTimer:
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
        import torch

        _check(model, optimizer, warmup)
        self.rank, self.world = rank_and_world()
        self.clock = clock or clock_of(model)
        self.warmup = warmup
        self.dropped = 0
        self._on_record, self._pressure = on_record, pressure
        self._lines = _open(out, self.rank) if out is not None else None
        self._stamp = self.clock.stamp
        engine: Any = torch.autograd.Variable._execution_engine
        self._after_backward = engine.queue_callback
        self._marks: list[Any] | None = None  # the running step's, None between steps
        self._step: _Step | None = None
        self._pending: deque[_Step] = deque()
        self._steps = 0
        self._forwards = self._awaited = self._backwards = self._updates = False
        self._cpu_s, self._due_s = 0.0, 0.0
        self._waited_s: float | None = None
        self._in_backward = self._closed = False
        self._wired_optimizer = optimizer is not None
        self._handles = self._hook(model, optimizer)

    # ---- the loop
    def __call__(self, loader: Iterable[T], *, steps: int | None = None) -> Generator[T, None, None]:
        """The batches of `loader`, at most `steps` of them; calling it again is the next epoch."""
        self._refuse_closed()
        if steps is not None and steps < 1:
            raise ConfigError(f"steps={steps} is below 1; leave it out to run the whole loader")
        return self._epoch(loader, steps)

    def _epoch(self, loader: Iterable[T], steps: int | None) -> Generator[T, None, None]:
        started_s = time.perf_counter()
        batches = iter(loader)
        self._read_host()
        done, step = 0, None
        try:
            while steps is None or done < steps:
                step = self._begin(first=done == 0)
                try:
                    # No local name for the batch: it would keep the batch alive while the next one is fetched.
                    yield self._fetch(batches, None if done else started_s)
                except StopIteration:
                    return
                done += 1
                if self._step is step:
                    self._end(step)
                else:  # another loop of this timer has taken over, and this step is lost
                    self._read_host()
        finally:
            if self._step is step:
                self._abandon()
            self._resolve()

    def _begin(self, *, first: bool) -> _Step:
        if self._closed:
            self._refuse_closed()
        if self._step is not None:
            self._abandon()
        number = self._steps
        self._step = step = _Step(number, first or number < self.warmup, self._stamp())
        self._marks, self._in_backward = step.marks, False
        return step

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RunError("this timer is closed; make a new StepTimer for the next loop")

    def _read_host(self) -> None:
        """Where the host's own counters stand before the next step."""
        if self.clock.host:
            self._cpu_s = time.thread_time()
        if self._pressure:
            self._waited_s = self._pressure()

    def _fetch(self, batches: Iterator[T], started_s: float | None) -> T:
        batch = next(batches)
        self._mark("other_s")
        if started_s is not None and self._step:
            self._step.extra = {"startup_s": time.perf_counter() - started_s}
        return batch

    def _end(self, step: _Step) -> None:
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

    # ---- marks
    def _mark(self, phase: str) -> None:
        marks = self._marks
        if marks is not None and marks[-2] != phase:
            marks += phase, self._stamp()

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
            step.loss = _one_number(loss)
        if extra:
            step.extra = {**step.extra, **extra}

    def _hook(self, model: Any, optimizer: Any) -> list[Any]:
        handles = [
            model.register_forward_pre_hook(self._on_forward),
            model.register_forward_hook(self._on_output),
        ]
        if optimizer is not None:
            handles.append(optimizer.register_step_pre_hook(self._on_optimizer))
            handles.append(optimizer.register_step_post_hook(self._on_updated))
        return handles

    def _on_forward(self, module: object, args: object) -> None:
        if not self._in_backward:  # activation checkpointing calls forward again: part of backward's own work
            self._mark("forward_s")

    def _on_output(self, module: object, args: object, output: Any) -> None:
        if self._marks is None:
            return
        self._forwards = True
        # A hook on the tensors, not a full backward hook: that one copies each output, and misses dicts.
        for tensor in (output,) if getattr(output, "requires_grad", False) else _differentiable(output):
            self._awaited = True
            _hook_gradient(tensor, self._on_backward)

    def _on_backward(self, gradient: object) -> None:
        if self._marks is not None and not self._in_backward:
            self._backwards = self._in_backward = True
            self._mark("backward_s")
            self._after_backward(self._on_last_gradient)

    def _on_last_gradient(self) -> None:
        if self.world > 1:
            self._mark("sync_s")
            self._after_backward(self._on_backward_end)
        else:
            self._on_backward_end()

    def _on_backward_end(self) -> None:
        self._in_backward = False
        self._mark("other_s")

    def _on_optimizer(self, *_: object) -> None:
        self._updates = True
        self._mark("optimizer_s")

    def _on_updated(self, *_: object) -> None:
        self._mark("other_s")

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
                self._on_record(StepRecord(**row))
        self._due_s = time.perf_counter() + WRITE_EVERY_S

    def _read(self, step: _Step) -> list[dict[str, Any]]:
        """The step's row; none where the clock gave no number."""
        laps = fold(step.marks, step.end, self.clock.seconds)
        self.clock.release([*step.marks[1::2], step.end, *([] if step.guard is step.end else [step.guard])])
        step_s = sum(laps.values())
        if math.isfinite(step_s):
            return [self._row(step, laps, step_s)]
        self.dropped += 1
        return []

    def _row(self, step: _Step, laps: dict[str, float], step_s: float) -> dict[str, Any]:
        """The fields of the StepRecord, in its order."""
        loss = None if step.loss is None else float(step.loss)
        extra = {name: _finite(value) for name, value in step.extra.items()} if step.extra else {}
        if loss is not None and not math.isfinite(loss):
            extra["loss_finite"], loss = 0.0, None
        return {
            "rank": self.rank,
            "step": step.number,
            "world": self.world,
            "warmup": step.warmup,
            **laps,
            "step_s": step_s,
            "samples": step.samples,
            "bytes": step.bytes,
            "loss": loss,
            "cpu_s": step.cpu_s,
            "drained": step.drained,
            "overloaded": None if step.waited_s is None else step.waited_s > OVERLOADED_FRAC * step_s,
            "extra": extra,
        }

    # ---- the end
    def close(self) -> None:
        """Remove every hook, write the steps still on the device (this may wait for it), close the file.

        A second call does nothing. Raises ConfigError when steps ran and the hooks never fired.
        """
        if self._shut():
            self._check_wiring()

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

    def _check_wiring(self) -> None:
        if not self._steps:
            return
        if not self._forwards:
            raise ConfigError(
                f"{self._steps} steps were timed and the model's forward never ran in one; "
                "give StepTimer the module that your loop calls (the DDP wrapper, not the module inside it)"
            )
        if self._awaited and not self._backwards:
            raise ConfigError(
                f"{self._steps} steps were timed and no gradient reached the model's output; "
                "give StepTimer the module whose output your loss uses, or run the loop under torch.no_grad()"
            )
        if self._wired_optimizer and self._backwards and not self._updates:
            warnings.warn("the optimizer given to StepTimer never stepped", stacklevel=3)

    def __enter__(self) -> StepTimer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # the loop's own exception is the news: not the wiring, nor a disk or a device that fails again
            with suppress(Exception):
                self._shut()


def _check(model: Any, optimizer: Any, warmup: int) -> None:
    if not hasattr(model, "register_forward_pre_hook"):
        raise ConfigError(
            f"model={type(model).__name__} cannot be hooked; give the torch.nn.Module of your loop"
        )
    if optimizer is not None and not hasattr(optimizer, "register_step_pre_hook"):
        raise ConfigError(
            f"optimizer={type(optimizer).__name__} has no step hooks; give a torch.optim.Optimizer, or None "
            'and put its step into `with timer.phase("optimizer"):`'
        )
    if warmup < 0:
        raise ConfigError(f"warmup={warmup} is below 0; give the number of first steps to mark")


def _open(out: str | Path, rank: int) -> _Lines:
    path = Path(out) / f"rank-{rank}.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        used = path.exists() and b'"kind":"step"' in path.read_bytes()
    except OSError as error:
        raise disk_error(error, path) from error
    if used:
        raise ConfigError(f"{path} holds the steps of an earlier run; choose another folder with out=")
    return _Lines(path)


def _hook_gradient(tensor: Any, hook: Callable[[Any], None]) -> None:
    """`tensor.register_hook(hook)` without the handle, which nobody keeps and which is half of its cost."""
    node = tensor.grad_fn
    if node is None or tensor._backward_hooks is not None or not hasattr(node, "_register_hook_dict"):
        tensor.register_hook(hook)
    else:  # what register_hook itself does (torch/_tensor.py); handles count from 0
        tensor._backward_hooks = OrderedDict([(-1, hook)])
        node._register_hook_dict(tensor)


def _differentiable(output: Any) -> Iterator[Any]:
    """The tensors of a module's output that a gradient can reach, through tuples, lists, dicts and dataclasses."""
    if getattr(output, "requires_grad", False):
        yield output
    elif isinstance(output, (tuple, list)):
        for item in output:
            yield from _differentiable(item)
    elif isinstance(output, Mapping):
        yield from _differentiable(list(output.values()))
    elif hasattr(output, "__dataclass_fields__"):
        yield from _differentiable([getattr(output, name) for name in output.__dataclass_fields__])


def _one_number(loss: Any) -> Any:
    """`loss` cut off from its graph, unread."""
    if not hasattr(loss, "detach"):
        return float(loss)
    if loss.numel() != 1:
        raise ConfigError(f"loss has {loss.numel()} elements; give one number, loss.mean() for example")
    return loss.detach()


def _finite(value: float | None) -> float | None:
    """`value`, None where it is infinite or not a number."""
    return value if value is not None and math.isfinite(value) else None
