"""How a timer learns of backward: by the call, by the gradient, and of whose."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mlsyslab.clocks import HostClock
from mlsyslab.records import StepRecord
from mlsyslab.timing import StepTimer

torch = pytest.importorskip("torch")
nn = torch.nn


class Turned(HostClock):
    """A host clock that the test turns by hand; exact binary fractions of a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def stamp(self) -> float:
        return self.now


clock = Turned()


class Work(torch.autograd.Function):
    """One second forward, four backward."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        clock.now += 1.0
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        clock.now += 4.0
        return gradient


class Model(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: Any) -> Any:
        return Work.apply(super().forward(x))


BATCH = torch.ones(2, 8)
torchs_own = torch.autograd.backward


@pytest.fixture(autouse=True)
def unwrapped() -> Iterator[None]:
    yield
    assert torch.autograd.backward is torchs_own


@pytest.fixture
def records() -> list[StepRecord]:
    return []


def timer_of(model: Any, records: list[StepRecord]) -> StepTimer:
    return StepTimer(model, clock=clock, on_record=records.append)


def test_the_losss_gradient_is_backward(records: list[StepRecord]) -> None:
    model = Model()
    with timer_of(model, records) as timer:
        for batch in timer([BATCH] * 3):
            Work.apply(model(batch)).sum().backward()
    assert [(r.forward_s, r.backward_s) for r in records] == [(2.0, 8.0)] * 3


def test_a_gradient_that_no_call_of_backward_brought_is_backward_every_step(
    records: list[StepRecord],
) -> None:
    model = Model()
    with timer_of(model, records) as timer:
        for batch in timer([BATCH] * 3):
            torch.autograd.grad(model(batch).sum(), list(model.parameters()))
            clock.now += 0.5
    assert [(r.backward_s, r.other_s) for r in records] == [(4.0, 0.5)] * 3


def test_a_single_rank_hooks_no_output_once_a_gradient_was_seen(records: list[StepRecord]) -> None:
    model, outputs = Model(), []
    with timer_of(model, records) as timer:
        for batch in timer([BATCH] * 3):
            outputs.append(model(batch))
            outputs[-1].sum().backward()
    assert [bool(output._backward_hooks) for output in outputs] == [True, False, False]


def test_another_models_backward_counts_once_this_one_has_run(records: list[StepRecord]) -> None:
    model, other = Model(), Model()
    with timer_of(model, records) as timer:
        for batch in timer([BATCH] * 2):
            other(batch).sum().backward()
            model(batch).sum().backward()
    assert [(r.backward_s, r.forward_s) for r in records] == [(4.0, 1.0), (8.0, 1.0)]


@pytest.mark.parametrize(("reentrant", "again_s"), [(True, 1.0), (False, 0.0)])  # the latter stops early
def test_backward_inside_backward_does_not_end_it(
    reentrant: bool, again_s: float, records: list[StepRecord]
) -> None:
    from torch.utils.checkpoint import checkpoint

    model = Model()
    with timer_of(model, records) as timer:
        for batch in timer([BATCH] * 2):
            x = Work.apply(batch.clone().requires_grad_())
            Work.apply(checkpoint(model, x, use_reentrant=reentrant)).sum().backward()
    assert [r.backward_s for r in records] == [4.0 * 3 + again_s] * 2


def test_a_backward_in_another_thread_is_not_the_loops(records: list[StepRecord]) -> None:
    model, other = Model(), Model()
    with timer_of(model, records) as timer:
        for batch in timer([BATCH] * 2):
            model(batch).sum().backward()
            aside = threading.Thread(target=lambda: other(BATCH).sum().backward())
            aside.start()
            aside.join()
    assert [r.backward_s for r in records] == [4.0] * 2


def test_a_backward_that_fails_is_over(records: list[StepRecord]) -> None:
    model = Model()
    with timer_of(model, records) as timer:
        for batch in timer([BATCH] * 2):
            loss = model(batch).sum()
            loss.backward()
            with pytest.raises(RuntimeError, match="second time"):
                loss.backward()
            clock.now += 0.5
            with timer.phase("h2d"):
                clock.now += 0.25
            clock.now += 0.5
    assert [(r.other_s, r.h2d_s) for r in records] == [(1.0, 0.25)] * 2


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_timers_closed_in_any_order_leave_torch_as_it_was(order: tuple[int, int]) -> None:
    timers = [StepTimer(Model(), clock=clock) for _ in range(2)]
    assert torch.autograd.backward is not torchs_own
    timers[order[0]].close()
    assert torch.autograd.backward is not torchs_own
    timers[order[1]].close()
    assert torch.autograd.backward is torchs_own


def test_somebody_elses_wrapper_is_left_in_place(records: list[StepRecord]) -> None:
    model, calls = Model(), []
    timer = timer_of(model, records)
    ours = torch.autograd.backward

    def theirs(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        ours(*args, **kwargs)

    torch.autograd.backward = theirs
    try:
        timer.close()
        assert torch.autograd.backward is theirs
        with timer_of(model, records) as second:
            for batch in second([BATCH]):
                model(batch).sum().backward()
        assert torch.autograd.backward is theirs
    finally:
        torch.autograd.backward = torchs_own
    assert calls == [1]
    assert [r.backward_s for r in records] == [4.0]
