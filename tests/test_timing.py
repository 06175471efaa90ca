"""StepTimer: marks on a fake clock, real loops on the CPU, two real gloo ranks, a modelled device.

Run as a script, this file is one rank of the two-rank tests: `python test_timing.py RANK FOLDER`.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from mlsyslab.clocks import CudaClock, HostClock
from mlsyslab.contract import ConfigError, RunError
from mlsyslab.records import PHASES, StepRecord
from mlsyslab.steps import OVERLOADED_FRAC, fold
from mlsyslab.timing import StepTimer

torch = pytest.importorskip("torch")
nn = torch.nn
STEPS, SLOW_S, SKIP = 16, 0.08, 4


class FakeClock(HostClock):
    """A host clock that the test turns by hand; exact binary fractions of a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def stamp(self) -> float:
        return self.now


class Device:
    """A clock that is a device with a queue: the host launches and runs ahead, a stamp passes when the queue gets there."""

    host = False

    def __init__(self) -> None:
        self.now = self.free = 0.0
        self.waits = 0

    def launch(self, work_s: float, host_s: float = 0.0) -> None:
        self.now += host_s
        self.free = max(self.free, self.now) + work_s

    def stamp(self) -> float:
        self.free = max(self.free, self.now)
        return self.free

    def ready(self, token: float) -> bool:
        return token <= self.now

    def seconds(self, start: float, stop: float) -> float:
        return stop - start

    def wait(self, token: float) -> None:
        self.waits += 1
        self.now = max(self.now, token)

    def release(self, tokens: list[float]) -> None:
        pass


def small() -> tuple[Any, Any]:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def update(model: Any, optimizer: Any, batch: Any) -> Any:
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def batches(n: int) -> list[Any]:
    return [torch.ones(4, 8)] * n


def phases(record: StepRecord) -> list[float]:
    return [getattr(record, name) for name in PHASES]


@pytest.fixture
def records() -> list[StepRecord]:
    return []


@pytest.fixture
def ticking(
    records: list[StepRecord],
) -> Iterator[tuple[FakeClock, StepTimer, Callable[[], None], Callable[[Any], Any]]]:
    """A timer on a fake clock whose model, backward and optimizer each take a known time."""
    clock = FakeClock()

    class Work(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            clock.now += 2.0
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            clock.now += 4.0
            return gradient

    class Model(nn.Linear):
        def forward(self, x: Any) -> Any:
            return Work.apply(super().forward(x))

    class Optimizer(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            clock.now += 8.0

    model = Model(8, 1)
    optimizer = Optimizer(model.parameters(), lr=0.1)
    timer = StepTimer(model, optimizer, clock=clock, on_record=records.append)

    def loader(n: int = 1) -> Iterator[Any]:
        for _ in range(n):
            clock.now += 1.0
            yield torch.ones(4, 8)

    yield clock, timer, lambda: update(model, optimizer, torch.ones(4, 8)), loader
    timer._shut()  # what a test leaves open would watch the backward of the next


# ---- marks


def test_fold_sums_laps_by_phase_and_counts_a_backward_lap_as_nothing() -> None:
    marks = ["data_s", 0.0, "forward_s", 1.0, "data_s", 3.0, "sync_s", 7.0]
    laps = fold(marks, 6.5, lambda a, b: b - a)
    assert tuple(laps) == PHASES
    assert laps["data_s"] == 1.0 + 4.0
    assert laps["forward_s"] == 2.0
    assert laps["sync_s"] == 0.0


def test_each_phase_gets_its_own_seconds(ticking: Any, records: list[StepRecord]) -> None:
    clock, timer, step, loader = ticking
    for _ in timer(loader(2)):
        clock.now += 0.5
        with timer.phase("h2d"):
            clock.now += 0.25
        step()
        clock.now += 0.125
    timer.close()
    for record in records:
        assert phases(record) == [1.0, 0.25, 2.0, 4.0, 0.0, 8.0, 0.625]
        assert record.step_s == sum(phases(record))
        assert record.own_s == record.step_s
    assert [r.step for r in records] == [0, 1]


def test_the_loss_is_part_of_forward(ticking: Any, records: list[StepRecord]) -> None:
    clock, timer, _, loader = ticking
    model = nn.Linear(8, 1)
    timer = StepTimer(model, None, clock=clock, on_record=records.append)
    for batch in timer(loader(1)):
        output = model(batch)
        clock.now += 16.0
        output.sum().backward()
    timer.close()
    assert records[0].forward_s == 16.0


def test_an_explicit_phase_puts_the_one_before_it_back(ticking: Any, records: list[StepRecord]) -> None:
    clock, timer, step, loader = ticking
    for _ in timer(loader(1)):
        with timer.phase("h2d"):
            clock.now += 1.0
            with timer.phase("sync"):
                clock.now += 2.0
            clock.now += 4.0
        clock.now += 8.0
        step()
    timer.close()
    assert (records[0].h2d_s, records[0].sync_s, records[0].other_s) == (5.0, 2.0, 8.0)


def test_a_phase_outside_a_step_or_across_its_end_does_nothing(
    ticking: Any, records: list[StepRecord]
) -> None:
    clock, timer, step, loader = ticking
    with timer.phase("h2d"):
        clock.now += 1.0
    around, left_open = timer.phase("sync"), timer.phase("h2d")
    for i, _ in enumerate(timer(loader(2))):
        if i == 0:
            around.__enter__()
            left_open.__enter__()
        else:
            left_open.__exit__(None, None, None)
            clock.now += 0.5
        step()
    timer.close()
    assert phases(records[1]) == [1.0, 0.0, 2.0, 4.0, 0.0, 8.0, 0.5]


def test_a_phase_that_does_not_exist_is_refused(ticking: Any) -> None:
    with pytest.raises(ConfigError, match=r"phase='load' .*data, h2d"):
        ticking[1].phase("load")


def test_writing_records_is_in_nobodys_phase(ticking: Any, records: list[StepRecord]) -> None:
    clock, timer, step, loader = ticking

    def slow_reader(record: StepRecord) -> None:
        records.append(record)
        timer._due_s = 0.0  # write after each step, so that there is a between to look at
        clock.now += 1000.0

    timer._on_record = slow_reader
    for _ in timer(loader(3)):
        step()
    timer.close()
    assert [r.step_s for r in records] == [15.0, 15.0, 15.0]


# ---- loops that are not a plain loop


def test_a_break_leaves_no_half_step_and_the_numbers_go_on(ticking: Any, records: list[StepRecord]) -> None:
    clock, timer, step, loader = ticking
    for i, _ in enumerate(timer(loader(5))):
        step()
        if i == 2:
            break
    clock.now += 500.0
    for _ in timer(loader(1)):
        step()
    timer.close()
    assert [r.step for r in records] == [0, 1, 2]
    assert {r.step_s for r in records} == {15.0}


def test_steps_ends_the_loop_with_every_step_recorded(ticking: Any, records: list[StepRecord]) -> None:
    _, timer, step, loader = ticking
    for _ in timer(loader(50), steps=3):
        step()
    timer.close()
    assert [r.step for r in records] == [0, 1, 2]


@pytest.mark.parametrize("where", ["body", "loader", "backward"])
def test_an_exception_passes_and_leaves_the_finished_steps(where: str, records: list[StepRecord]) -> None:
    model, optimizer = small()

    def loader() -> Iterator[Any]:
        yield from batches(2)
        if where == "loader":
            raise ValueError("loader")
        yield from batches(1)

    def failing(gradient: Any) -> None:
        raise ValueError("backward")

    with (  # noqa: PT012 - the loop is the statement
        pytest.raises(ValueError, match=where),
        StepTimer(model, optimizer, on_record=records.append) as timer,
    ):
        for i, batch in enumerate(timer(loader())):
            if i == 2 and where == "body":
                raise ValueError("body")
            if i == 2:
                model[2].bias.register_hook(failing)
            update(model, optimizer, batch)
    assert [r.step for r in records] == [0, 1]
    assert not model._forward_hooks


def test_a_step_after_a_caught_backward_failure_is_timed_again(records: list[StepRecord]) -> None:
    model, optimizer = small()
    with StepTimer(model, optimizer, on_record=records.append) as timer:
        for i, batch in enumerate(timer(batches(3))):
            if i == 1:
                handle = model[2].bias.register_hook(lambda _: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    update(model, optimizer, batch)
                handle.remove()
            else:
                update(model, optimizer, batch)
    assert records[1].optimizer_s == 0.0
    assert all(r.forward_s > 0 and r.backward_s > 0 and r.optimizer_s > 0 for r in (records[0], records[2]))


def test_a_loop_inside_the_loop_takes_over_and_harms_no_record(
    ticking: Any, records: list[StepRecord]
) -> None:
    _, timer, step, loader = ticking
    for i, _ in enumerate(timer(loader(3))):
        step()
        if i == 1:
            for _ in timer(loader(2)):
                step()
    timer.close()
    assert [r.step_s for r in records] == [15.0] * 4


def test_accumulation_counts_a_step_without_an_update(ticking: Any, records: list[StepRecord]) -> None:
    clock, _, _, loader = ticking
    model = nn.Linear(8, 1)
    timer = StepTimer(model, None, clock=clock, on_record=records.append)
    for batch in timer(loader(2)):
        for _ in range(2):
            model(batch).sum().backward()
            clock.now += 1.0
            timer.add(samples=4, bytes=10)
    timer.close()
    assert [(r.samples, r.bytes, r.optimizer_s, r.other_s) for r in records] == [(8, 20, 0.0, 2.0)] * 2


def test_evaluation_without_gradients_is_forward_and_no_error(records: list[StepRecord]) -> None:
    model, _ = small()
    with torch.no_grad(), StepTimer(model, on_record=records.append) as timer:
        for batch in timer(batches(3)):
            model(batch)
    assert len(records) == 3
    assert all(r.forward_s > 0 and r.backward_s == 0 for r in records)


def test_recomputed_forward_belongs_to_backward(ticking: Any, records: list[StepRecord]) -> None:
    from torch.utils.checkpoint import checkpoint

    clock, _, _, loader = ticking

    class Slow(nn.Linear):
        def forward(self, x: Any) -> Any:
            clock.now += 2.0
            return super().forward(x).relu()

    model = Slow(8, 8)
    timer = StepTimer(model, None, clock=clock, on_record=records.append)
    for batch in timer(loader(1)):
        checkpoint(model, batch, use_reentrant=False).sum().backward()
    timer.close()
    assert (records[0].forward_s, records[0].backward_s) == (2.0, 2.0)


@pytest.mark.parametrize("wrap", [dict, tuple, list])
def test_backward_is_found_behind_any_container(wrap: Any, records: list[StepRecord]) -> None:
    class Model(nn.Linear):
        def forward(self, x: Any) -> Any:
            y = super().forward(x)
            return {"logits": y} if wrap is dict else wrap([None, y])

    model = Model(8, 1)
    with StepTimer(model, on_record=records.append) as timer:
        for batch in timer(batches(2)):
            output = model(batch)
            (output["logits"] if wrap is dict else output[1]).sum().backward()
    assert all(r.backward_s > 0 for r in records)


# ---- epochs


def test_the_first_step_of_each_epoch_is_start_up(ticking: Any, records: list[StepRecord]) -> None:
    _, timer, step, loader = ticking
    timer.warmup = 2
    for _ in range(2):
        for _ in timer(loader(3)):
            step()
    timer.close()
    assert [r.step for r in records] == list(range(6))
    assert [r.warmup for r in records] == [True, True, False, True, False, False]
    assert ["startup_s" in r.extra for r in records] == [True, False, False, True, False, False]


def test_start_up_includes_the_making_of_the_iterator(records: list[StepRecord]) -> None:
    model, optimizer = small()

    class Loader:
        def __iter__(self) -> Iterator[Any]:
            time.sleep(0.05)  # worker processes start
            return iter(batches(2))

    with StepTimer(model, optimizer, on_record=records.append, warmup=0) as timer:
        for batch in timer(Loader()):
            update(model, optimizer, batch)
    startup_s = records[0].extra["startup_s"]
    assert startup_s is not None
    assert startup_s >= 0.05 > records[0].data_s


def test_a_batch_is_not_kept_alive_while_the_next_is_fetched() -> None:
    class Batch:
        pass

    alive: list[Any] = []

    def loader() -> Iterator[Any]:
        for _ in range(3):
            assert [ref() for ref in alive] == [None] * len(alive)
            batch = Batch()
            alive.append(weakref.ref(batch))
            yield batch
            del batch

    model, _ = small()
    timer = StepTimer(model)
    loop = timer(loader())
    for _ in range(3):
        next(loop)
    timer._shut()


# ---- numbers


def test_added_numbers_reach_the_record(records: list[StepRecord]) -> None:
    model, optimizer = small()
    with StepTimer(model, optimizer, on_record=records.append) as timer:
        for batch in timer(batches(2)):
            loss = update(model, optimizer, batch)
            timer.add(samples=4, bytes=128, loss=loss, norm=float("nan"), tokens=7)
            assert timer._step
            assert not timer._step.loss.requires_grad  # the graph is not kept
    assert records[1].loss == pytest.approx(float(loss.detach()))
    assert (records[1].samples, records[1].bytes, records[1].extra) == (4, 128, {"norm": None, "tokens": 7})


def test_a_loss_that_is_not_a_number_is_said_and_never_written(
    tmp_path: Path, records: list[StepRecord]
) -> None:
    model, optimizer = small()
    with StepTimer(model, optimizer, out=tmp_path, on_record=records.append) as timer:
        for batch in timer(batches(2)):
            update(model, optimizer, batch)
            timer.add(loss=torch.tensor(float("inf")))
    assert records[1].loss is None
    assert records[1].extra["loss_finite"] == 0.0
    assert "nan" not in (tmp_path / "rank-0.jsonl").read_text().lower()


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"step_s": 1.0}, "step_s is a field"),
        ({"loss": torch.ones(2)}, "loss has 2 elements"),
        ({"norm": torch.ones(1)}, "norm is a tensor"),
    ],
)
def test_numbers_that_cannot_be_kept_are_refused(numbers: Any, message: str) -> None:
    model, optimizer = small()
    timer = StepTimer(model, optimizer)
    for _ in timer(batches(1)):
        with pytest.raises(ConfigError, match=message):
            timer.add(**numbers)
    with pytest.raises(RunError, match="inside"):
        timer.add(samples=1)
    timer._shut()


def test_lines_are_what_the_records_say(tmp_path: Path, records: list[StepRecord]) -> None:
    model, optimizer = small()
    pressure = iter([0.0, None, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    timer = StepTimer(
        model,
        optimizer,
        out=tmp_path / "new",
        on_record=records.append,
        warmup=1,
        pressure=lambda: next(pressure),
    )
    for batch in timer(batches(4)):
        timer.add(loss=update(model, optimizer, batch), samples=4, tokens=None)
    timer.close()
    lines = (tmp_path / "new" / "rank-0.jsonl").read_text().splitlines()
    assert len(lines) == len(records)
    for line, record in zip(lines, records, strict=True):
        assert json.loads(line) == pytest.approx(record.to_json(), abs=1e-9)
    assert [r.overloaded for r in records][-1] is True
    assert all(isinstance(json.loads(line)["warmup"], bool) for line in lines)


def test_overloaded_follows_the_threshold(ticking: Any, records: list[StepRecord]) -> None:
    _, timer, step, loader = ticking
    limit_s = OVERLOADED_FRAC * 15.0
    waited = iter([0.0, limit_s * 0.9, limit_s * 2.0, None, 99.0])
    timer._pressure, timer._due_s = lambda: next(waited), float("inf")
    for _ in timer(loader(4)):
        step()
    timer.close()
    assert [r.overloaded for r in records] == [False, True, None, None]


def test_cpu_seconds_stay_below_the_steps_wall_time(records: list[StepRecord]) -> None:
    model, optimizer = small()
    with StepTimer(model, optimizer, on_record=records.append) as timer:
        for batch in timer(batches(4)):
            time.sleep(0.02)
            update(model, optimizer, batch)
    assert all(r.cpu_s is not None and 0 < r.cpu_s < r.step_s for r in records)
    assert all(r.drained is None for r in records)


def test_short_steps_are_written_together_and_the_end_writes_the_rest(tmp_path: Path) -> None:
    model, optimizer = small()
    timer, file = StepTimer(model, optimizer, out=tmp_path), tmp_path / "rank-0.jsonl"
    for i, batch in enumerate(timer(batches(6))):
        update(model, optimizer, batch)
        if i == 3:
            timer._due_s = 0.0  # the time to write has come
        if i == 4:
            assert len(file.read_text().splitlines()) == 4
    assert len(file.read_text().splitlines()) == 6
    timer.close()


def test_an_earlier_runs_file_is_not_written_over(tmp_path: Path) -> None:
    model, optimizer = small()
    for _ in range(1):
        with StepTimer(model, optimizer, out=tmp_path) as timer:
            for batch in timer(batches(1)):
                update(model, optimizer, batch)
    with pytest.raises(ConfigError, match="earlier run; choose another folder"):
        StepTimer(model, optimizer, out=tmp_path)
    with pytest.raises(RunError, match="choose another folder"):
        StepTimer(model, optimizer, out=tmp_path / "rank-0.jsonl" / "below")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_one_clear_error_and_hides_no_other(tmp_path: Path) -> None:
    def loop(mine: bool) -> None:
        model, optimizer = small()
        with StepTimer(model, optimizer, out=tmp_path) as timer:
            assert timer._lines
            timer._lines._file = open("/dev/full", "a", buffering=1)  # noqa: SIM115 - the timer closes it
            for batch in timer(batches(2)):
                update(model, optimizer, batch)
                if mine:
                    raise KeyError("mine")

    with pytest.raises(RunError, match="the disk is full"):
        loop(mine=False)
    with pytest.raises(KeyError, match="mine"):
        loop(mine=True)


def test_rank_and_world_come_from_torchrun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    timer = StepTimer(*small(), out=tmp_path)
    timer.close()
    assert (timer.rank, timer.world) == (3, 4)
    assert (tmp_path / "rank-3.jsonl").exists()


# ---- wiring and the end


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((object(), None), "model=object"), ((nn.Linear(1, 1), object()), "optimizer=object has no step hooks")],
)
def test_what_cannot_be_hooked_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StepTimer(*arguments)


def test_hooks_on_a_module_that_never_runs_are_an_error_at_close() -> None:
    model, optimizer = small()
    timer = StepTimer(nn.Linear(8, 1), optimizer)
    for batch in timer(batches(2)):
        update(model, optimizer, batch)
    with pytest.raises(ConfigError, match=r"2 steps.*forward never ran.*give StepTimer the module"):
        timer.close()
    timer.close()


def test_hooks_on_a_module_without_gradients_are_an_error_at_close() -> None:
    model, optimizer = small()
    other = nn.Linear(8, 1)
    timer = StepTimer(other, optimizer)
    for batch in timer(batches(2)):
        other(batch)
        update(model, optimizer, batch)
    with pytest.raises(ConfigError, match="no gradient reached"):
        timer.close()


def test_another_optimizer_is_a_warning() -> None:
    model, optimizer = small()
    timer = StepTimer(model, small()[1])
    for batch in timer(batches(2)):
        update(model, optimizer, batch)
    with pytest.warns(UserWarning, match="never stepped"):
        timer.close()


def test_the_loops_own_exception_is_not_masked_by_the_wiring() -> None:
    with pytest.raises(KeyError), StepTimer(nn.Linear(8, 1)) as timer:  # noqa: PT012 - the loop is the statement
        for i, _ in enumerate(timer(batches(3))):
            if i == 2:
                raise KeyError("mine")


def test_close_removes_every_hook_and_lets_the_model_go() -> None:
    model, optimizer = small()
    timer = StepTimer(model, optimizer)
    for batch in timer(batches(2)):
        update(model, optimizer, batch)
    timer.close()
    timer.close()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None
    with pytest.raises(RunError, match="closed"):
        timer([])


def test_closing_inside_the_loop_is_said_at_the_next_step() -> None:
    model, optimizer = small()
    timer = StepTimer(model, optimizer)
    with pytest.raises(RunError, match="closed"):  # noqa: PT012 - the loop is the statement
        for batch in timer(batches(3)):
            update(model, optimizer, batch)
            timer.close()


def test_a_number_that_the_clock_does_not_have_drops_the_step() -> None:
    model, optimizer = small()
    clock = FakeClock()
    clock.seconds = lambda start, stop: float("nan")
    timer = StepTimer(model, optimizer, clock=clock, on_record=lambda _: pytest.fail("a record of NaN"))
    for batch in timer(batches(2)):
        update(model, optimizer, batch)
    timer.close()
    assert timer.dropped == 2


def test_the_module_imports_without_torch() -> None:
    code = "import sys, mlsyslab.timing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- a device with a queue


def device_loop(device: Device, next_s: float, work_s: float, steps: int, out: list[StepRecord]) -> StepTimer:
    """A loop whose loader takes `next_s` on the host and whose forward launches `work_s` of device work."""

    class Model(nn.Linear):
        def forward(self, x: Any) -> Any:
            device.launch(work_s, host_s=0.001)
            return super().forward(x)

    def loader() -> Iterator[Any]:
        for _ in range(steps):
            device.now += next_s
            yield torch.ones(4, 8)

    model = Model(8, 1)
    timer = StepTimer(model, None, clock=device, on_record=out.append, warmup=0)
    timer._due_s = 0.0
    for batch in timer(loader()):
        timer._due_s = 0.0
        model(batch).sum().backward()
    return timer


def test_next_that_is_hidden_behind_device_work_is_no_data_wait(records: list[StepRecord]) -> None:
    # ray#66034, lightly-train#749: host time in next() is 30 of 100 ms, the device never waits for it.
    device = Device()
    device_loop(device, next_s=0.03, work_s=0.1, steps=20, out=records).close()
    assert len(records) == 20
    assert all(r.data_s == 0.0 and r.drained is False for r in records[1:])
    assert all(r.step_s == pytest.approx(0.1) for r in records[1:])
    assert all(r.cpu_s is None for r in records)


def test_next_that_starves_the_device_is_data_wait(records: list[StepRecord]) -> None:
    device = Device()
    device_loop(device, next_s=0.25, work_s=0.1, steps=20, out=records).close()
    steady = records[1:]
    assert all(0.14 <= r.data_s <= 0.25 for r in steady)
    assert all(sum(phases(r)) == r.step_s for r in steady)


def test_a_device_that_had_finished_is_drained(records: list[StepRecord]) -> None:
    device = Device()
    device_loop(device, next_s=0.0, work_s=0.0, steps=5, out=records).close()
    assert all(r.drained is True for r in records)


def test_only_close_waits_for_the_device(records: list[StepRecord]) -> None:
    device = Device()
    timer = device_loop(device, next_s=0.01, work_s=1.0, steps=5, out=records)
    assert device.waits == 0
    assert len(records) < 5
    timer.close()
    assert device.waits == 1
    assert [r.step for r in records] == list(range(5))


class Event:
    """What CudaClock needs of torch.cuda.Event."""

    made: list[Event]

    def __init__(self) -> None:
        self.at_ms, self.done = 0.0, True
        Event.made.append(self)

    def record(self) -> None:
        self.at_ms += 1.0

    def query(self) -> bool:
        return self.done

    def elapsed_time(self, other: Event) -> float:
        return 2.0

    def synchronize(self) -> None:
        self.done = True


def test_cuda_events_are_pooled_and_read_in_seconds(records: list[StepRecord]) -> None:
    Event.made = []
    model, optimizer = small()
    timer = StepTimer(model, optimizer, clock=CudaClock(Event), on_record=records.append)
    for batch in timer(batches(40)):
        timer._due_s = 0.0
        update(model, optimizer, batch)
    timer.close()
    assert len(records) == 40
    assert len(Event.made) < 20  # two steps' worth, whatever the number of steps
    assert records[0].data_s == 0.002


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_on_cuda_a_prefetched_batch_costs_no_data_wait(records: list[StepRecord]) -> None:
    model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(8)]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    batch = torch.randn(4096, 4096, device="cuda")

    def loader(wait_s: float) -> Iterator[Any]:
        for _ in range(12):
            time.sleep(wait_s)
            yield batch

    timer = StepTimer(model, optimizer, on_record=records.append, warmup=0)
    for wait_s in (0.0, 0.2):
        for x in timer(loader(wait_s)):
            timer.add(loss=update(model, optimizer, x))
        torch.cuda.synchronize()
    timer.close()
    assert isinstance(timer.clock, CudaClock)
    fed, starved = records[4:12], records[16:24]
    assert median(r.data_s for r in fed) < 0.1 * median(r.step_s for r in fed)
    assert median(r.data_s for r in starved) > 0.1
    assert all(r.loss is not None for r in records)
    assert all(sum(phases(r)) == r.step_s for r in records)


# ---- two real ranks


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the two ranks of `rank_main` found, by rank."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        output = [rank.communicate(timeout=180)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], output
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(2)]


def middle(rows: list[dict[str, Any]], key: str) -> float:
    return median(row[key] for row in rows[SKIP:])


@pytest.mark.ranks
def test_the_rank_that_is_slow_in_backward_has_the_work_and_the_other_the_wait(two_ranks: Any) -> None:
    # traceml#252: step and backward look alike on all ranks, because all-reduce makes them so.
    fast, slow = (rank["slow backward"] for rank in two_ranks)
    assert middle(slow, "backward_s") >= SLOW_S
    assert middle(slow, "own_s") > 2 * middle(fast, "own_s")
    assert middle(fast, "sync_s") > 0.5 * SLOW_S
    assert middle(fast, "sync_s") > 2 * middle(slow, "sync_s")


@pytest.mark.ranks
def test_steps_take_equally_long_on_both_ranks(two_ranks: Any) -> None:
    fast, slow = (rank["slow backward"][SKIP:] for rank in two_ranks)
    # Lock-step: over the run the two can differ by what lies between two all-reduces, at most by one step.
    longest_s = max(row["step_s"] for row in fast + slow)
    assert abs(sum(r["step_s"] for r in fast) - sum(r["step_s"] for r in slow)) <= longest_s
    for row in fast + slow:
        assert sum(row[name] for name in PHASES) == row["step_s"]


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["plain", "static graph", "unused parameters"])
def test_the_marks_enclose_ddps_wait(two_ranks: Any, kind: str) -> None:
    for rank in two_ranks:
        assert len(rank["order " + kind]) == 4
        for moments in rank["order " + kind]:
            names = [name for name, _ in sorted(moments, key=lambda moment: moment[1])]
            assert names == [
                "last gradient",
                "sync begins",
                "last all-reduce",
                "sync ends",
                "backward returned",
            ]


@pytest.mark.ranks
def test_overlap_hides_communication_and_one_bucket_exposes_it(two_ranks: Any) -> None:
    for rank in two_ranks:
        transfer_s = rank["transfer_s"]
        assert middle(rank["one bucket"], "sync_s") >= 0.9 * transfer_s
        assert middle(rank["overlap"], "sync_s") < 0.7 * middle(rank["one bucket"], "sync_s")


@pytest.mark.ranks
def test_accumulation_under_no_sync_exposes_nothing(two_ranks: Any) -> None:
    for rank in two_ranks:
        rows = rank["no_sync"][SKIP:]
        silent = [row["sync_s"] for row in rows if row["step"] % 2 == 0]
        synced = [row["sync_s"] for row in rows if row["step"] % 2 == 1]
        assert median(silent) < 0.1 * median(synced)


class Burn(torch.autograd.Function):
    """Passes its input on; in backward the gradient takes at least `seconds` of work or of waiting for a device."""

    @staticmethod
    def forward(ctx: Any, x: Any, seconds: float, paced: bool) -> Any:
        ctx.seconds, ctx.paced = seconds, paced
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        end = time.perf_counter() + ctx.seconds
        if ctx.paced:
            time.sleep(ctx.seconds)
        a = torch.ones(64, 64)
        while time.perf_counter() < end:
            a = (a @ a).clamp(0, 1)
        return gradient, None, None


class Layers(nn.Module):
    """Linear layers, each with `seconds` more in its backward."""

    def __init__(self, n: int, seconds: float, paced: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(n))
        self.seconds, self.paced = seconds, paced

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = Burn.apply(layer(x), self.seconds, self.paced).relu()
        return x


class SlowLink:
    """A DDP communication hook over a link that carries one bucket at a time, `per_layer_s` for a layer's gradients."""

    def __init__(self, per_layer_s: float) -> None:
        from concurrent.futures import ThreadPoolExecutor

        self.per_layer_s, self.arrived = per_layer_s, 0.0
        self.pool = ThreadPoolExecutor(1)

    def take(self, bucket: Any) -> Any:
        # Launched here, not in the pool: collectives must come in one order on all ranks.
        work, future = torch.distributed.all_reduce(bucket.buffer(), async_op=True), torch.futures.Future()
        self.pool.submit(self.carry, work, bucket.buffer(), future)
        return future

    def carry(self, work: Any, buffer: Any, future: Any) -> None:
        work.wait()
        time.sleep(self.per_layer_s * buffer.numel() / (256 * 257))
        self.arrived = time.perf_counter()
        future.set_result(buffer.div_(2))


class Stamps(HostClock):
    """The host clock, with a list of what it said."""

    def __init__(self) -> None:
        self.said: list[float] = []

    def stamp(self) -> float:
        self.said.append(time.perf_counter())
        return self.said[-1]


def ddp(model: Any, link: SlowLink | None = None, **options: Any) -> tuple[Any, Any]:
    wrapped = nn.parallel.DistributedDataParallel(model, **options)
    if link:
        wrapped.register_comm_hook(None, lambda state, bucket: link.take(bucket))
    return wrapped, torch.optim.SGD(model.parameters(), lr=1e-4)


def timed(
    model: Any, optimizer: Any, quiet: Callable[[int], bool] = lambda step: False
) -> list[dict[str, Any]]:
    """The records of STEPS steps; where `quiet(step)` gradients are not exchanged."""
    rows: list[dict[str, Any]] = []
    from contextlib import nullcontext

    with StepTimer(model, optimizer, on_record=lambda r: rows.append(r.to_json())) as timer:
        for i, batch in enumerate(timer([torch.randn(8, 256)] * STEPS)):
            with model.no_sync() if quiet(i) else nullcontext():
                model(batch).square().mean().backward()
            if not quiet(i):
                optimizer.step()
                optimizer.zero_grad()
    return rows


def order(**options: Any) -> list[list[tuple[str, float]]]:
    """The moments of four backward passes beside the timer's marks."""
    link, clock, gradients, found = SlowLink(0.01), Stamps(), [0.0], []
    model, optimizer = ddp(Layers(3, 0.0, True), link, bucket_cap_mb=0.25, **options)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: gradients.append(time.perf_counter()))
    with StepTimer(model, optimizer, clock=clock) as timer:
        for batch in timer([torch.randn(8, 256)] * 4):
            loss = model(batch).square().mean()
            before = len(clock.said)
            loss.backward()
            returned = time.perf_counter()
            _, begins, ends = clock.said[before:]
            names = ("last gradient", "sync begins", "last all-reduce", "sync ends", "backward returned")
            found.append(list(zip(names, (gradients[-1], begins, link.arrived, ends, returned), strict=True)))
            optimizer.step()
            optimizer.zero_grad()
    return found


def rank_main(rank: int, folder: Path) -> None:
    import datetime

    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    n, per_layer_s = 6, 0.012
    result: dict[str, Any] = {
        "slow backward": timed(*ddp(Layers(1, SLOW_S if rank == 1 else 0.0, False))),
        "order plain": order(),
        "order static graph": order(static_graph=True),
        "order unused parameters": order(find_unused_parameters=True),
        "transfer_s": n * per_layer_s,
        "one bucket": timed(*ddp(Layers(n, 0.015, True), SlowLink(per_layer_s), bucket_cap_mb=1000)),
        "overlap": timed(*ddp(Layers(n, 0.015, True), SlowLink(per_layer_s), bucket_cap_mb=0.25)),
        "no_sync": timed(*ddp(Layers(1, 0.0, True), SlowLink(0.02)), quiet=lambda step: step % 2 == 0),
    }
    (folder / f"result-{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    try:
        rank_main(int(sys.argv[1]), Path(sys.argv[2]))
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)  # a gloo group that is torn down under DDP can hang for ever
