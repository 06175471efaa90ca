"""The serving policies: rules that hold after every event of a random sequence, and what people met as small tests."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from mlsyslab.contract import ConfigError
from mlsyslab.labs.serving.config import Config
from mlsyslab.labs.serving.core import Core
from mlsyslab.labs.serving.policies import (
    BINDINGS,
    EARLY,
    EVERYBODY,
    LATE,
    Admission,
    Autoscaler,
    Backlog,
    Batcher,
    Load,
    Request,
    Router,
)

LEFT = ("ok", "rejected", "expired", "cancelled", "error")


class World:
    """Drives a Core through random events and checks, after each, what must always hold."""

    def __init__(self, seed: int, binding: str) -> None:
        self.dice = dice = random.Random(seed)
        self.batcher = Batcher(
            dice.choice([1, 2, 4, 8]),
            dice.choice([0.0, 0.001, 0.01]),
            binding,
            aging_s=dice.choice([0.0, 0.005, 0.1]),
        )
        admission = dice.choice([EVERYBODY, Admission(max_queue_rows=dice.randint(8, 40))])
        self.core = Core(
            self.batcher, admission, Router(), batch_seconds=dice.choice([None, lambda rows: 0.003])
        )
        self.requests: list[Request] = []
        self.ends: dict[int, float] = {}  # of running replicas
        self.names = 0
        self.now = 0.0
        self.left = 0
        for _ in range(dice.randint(1, 4)):
            self.birth()

    def birth(self) -> None:
        self.core.add_replica(self.names, self.now)
        self.names += 1

    def live(self, events: int) -> None:
        dice = self.dice
        for _ in range(events):
            self.now += dice.choice([0.0, dice.expovariate(1000), dice.expovariate(200)])
            dice.choices(
                (self.arrive, self.cancel, self.finish, self.death, self.retire, self.wake),
                weights=(10, 1, 5, 0.2, 0.1, 3),
            )[0]()
            self.settle()
        while self.batcher.count or self.ends:  # the drain
            self.core.draining = True
            if not any(one.state == "ready" for one in self.core.replicas.values()):
                self.birth()
            self.now += 0.001
            self.finish()
            self.settle()

    def arrive(self) -> None:
        dice = self.dice
        request = Request(
            len(self.requests), self.now, dice.randint(1, self.batcher.max_batch), dice.choice([0, 1, 1, 2]),
            self.now + dice.choice([math.inf, dice.expovariate(50)]),
        )  # fmt: skip
        self.requests.append(request)
        if self.core.arrive(request, self.now):
            self.left += 1

    def cancel(self) -> None:
        if self.requests:
            request = self.dice.choice(self.requests[-20:])
            waited = request.state in ("waiting", "bound")
            assert self.core.cancel(request) == waited
            self.left += waited

    def finish(self) -> None:
        if self.ends:
            name = self.dice.choice(sorted(self.ends))
            del self.ends[name]
            for request in self.core.finished(name, self.now).requests:
                assert request.state == "running"
                request.state = "ok"
                self.left += 1
            if self.core.replicas[name].state == "draining":
                self.core.lost(name, self.now)

    def death(self) -> None:
        if self.core.replicas:
            name = self.dice.choice(sorted(self.core.replicas))
            running = self.core.replicas[name].running
            again, given_up = self.core.lost(name, self.now)
            assert sorted(one.id for one in again + given_up) == sorted(
                one.id for one in (running.requests if running else ())
            )
            assert all(one.retries == 1 and one.state == "waiting" for one in again)
            self.left += len(given_up)
            self.ends.pop(name, None)
            self.birth()

    def retire(self) -> None:
        ready = [name for name, one in self.core.replicas.items() if one.state == "ready"]
        if len(ready) > 1:
            self.core.retire(self.dice.choice(ready), self.now)

    def wake(self) -> None:
        """What the driver does at `due_s`."""
        due_s = self.core.due_s()
        if math.isfinite(due_s):
            self.now = max(self.now, due_s)
        for request in self.core.expire(self.now):
            assert request.deadline_s <= self.now
            assert request.state == "expired"
            self.left += 1

    def settle(self) -> None:
        before = {id(one): one for one in self.batcher.waiting()}
        started = self.core.dispatch(self.now)
        for replica, batch in started:
            assert 1 <= batch.rows <= self.batcher.max_batch
            assert batch.rows == sum(one.rows for one in batch.requests)
            assert replica.running is batch
            assert replica.name not in self.ends
            for request in batch.requests:
                assert id(request) in before, "only what waits is computed"
                assert request.state == "running"
                assert -1e-12 <= request.batch_wait_s <= self.now - request.arrival_s + 1e-12
            self.ends[replica.name] = self.now
        self.in_order([one for _, batch in started for one in batch.requests])
        waiting = self.batcher.waiting()
        assert self.batcher.count == len(waiting)
        assert self.batcher.rows == sum(one.rows for one in waiting)
        assert self.left + len(waiting) + sum(len(self.running(name)) for name in self.ends) == len(
            self.requests
        )
        free = [one for one in self.core.replicas.values() if one.free]
        assert self.core.free == len(free)
        ready = sum(one.state == "ready" for one in self.core.replicas.values())
        assert self.core.backlog(self.now).replicas == ready
        held = [one for one in waiting if one.state == "waiting"]
        if free:
            assert len(held) == len(waiting), "a batch that is fixed waits for no free replica"
        if free or self.batcher.binding == EARLY:
            assert all(self.now < one.arrival_s + self.batcher.max_wait_s for one in held)
            assert sum(one.rows for one in held) < self.batcher.max_batch
            due_s = min((one.arrival_s for one in held), default=math.inf) + self.batcher.max_wait_s
            assert self.core.due_s() <= due_s
        self.sizes()

    def in_order(self, started: Sequence[Request]) -> None:
        """Nobody starts before one that comes first by arrival + priority × aging, nor, within a priority, by arrival."""
        if self.batcher.binding == EARLY:  # a retried request finds the batches after it fixed already
            waiting = [one for one in self.batcher.waiting() if not one.retries]
            for level in {one.priority for one in started}:
                last = max(one.arrival_s for one in started if one.priority == level)
                assert all(one.arrival_s >= last for one in waiting if one.priority == level)
            return

        def key(one: Request) -> float:
            return one.arrival_s + one.priority * self.batcher.aging_s

        waiting = self.batcher.waiting()
        if started and waiting:
            assert max(map(key, started)) <= min(map(key, waiting)) + 1e-12

    def running(self, name: int) -> tuple[Request, ...]:
        batch = self.core.replicas[name].running
        assert batch is not None
        return batch.requests

    def sizes(self) -> None:
        """What is kept is bounded by what waits."""
        kept = [*self.batcher._lines.values(), self.batcher._deadlines, self.batcher._bound]
        assert all(len(one) <= 2 * self.batcher.count + 100 for one in kept)
        assert len(self.core.router._free) <= self.names


@pytest.mark.parametrize("binding", BINDINGS)
@pytest.mark.parametrize("seed", range(24))
def test_what_must_hold_after_every_event(seed: int, binding: str) -> None:
    world = World(seed, binding)
    world.live(500)
    assert all(request.state in LEFT for request in world.requests)
    assert world.left == len(world.requests)
    batcher, core = world.batcher, world.core
    assert (batcher.count, batcher.rows, batcher._loose, batcher.waiting()) == (0, 0, 0, [])
    assert core.due_s() == math.inf
    assert not core._running
    assert all(one.running is None for one in core.replicas.values())


@pytest.mark.parametrize("binding", BINDINGS)
def test_nothing_piles_up_while_no_replica_is_free(binding: str) -> None:
    """Clients that give up, again and again, in front of a replica that hangs."""
    batcher = Batcher(4, 0.001, binding)
    core = Core(batcher, EVERYBODY, Router())
    core.add_replica(0, 0.0)
    core.arrive(Request(0, 0.0), 0.0)
    core.dispatch(0.001)
    for i in range(1, 2000):
        request = Request(i, i * 0.01, deadline_s=i * 0.01 + 600)
        core.arrive(request, request.arrival_s)
        core.dispatch(request.arrival_s + 0.005)
        assert core.cancel(request)
    assert batcher.count == 0
    assert max(len(one) for one in (*batcher._lines.values(), batcher._deadlines, batcher._bound)) < 200


def test_the_router_keeps_one_entry_for_a_free_replica() -> None:
    """A replica that is always free again when it is asked for must not be remembered once more each time."""
    core = Core(Batcher(8, 0.0), EVERYBODY, Router())
    core.add_replica(0, 0.0)
    for i in range(1000):
        core.arrive(Request(i, float(i)), float(i))
        (_, batch), *_ = core.dispatch(float(i))
        assert batch.rows == 1
        core.finished(0, i + 0.5)
    assert len(core.router._free) <= 2


def test_the_least_loaded_replica_is_taken_and_a_dead_one_never() -> None:
    router, core = Router(), Core(Batcher(1, 0.0), EVERYBODY, Router())
    core.router = router
    for name in range(3):
        core.add_replica(name, 0.0)
    took = []
    for i in range(6):
        core.arrive(Request(i, float(i)), float(i))
        (replica, _), *_ = core.dispatch(float(i))
        took.append(replica.name)
        core.finished(replica.name, i + (0.5 if replica.name else 0.9))
    assert took == [0, 1, 2, 1, 2, 0]
    core.lost(1, 6.0)
    core.add_replica(1, 6.0)  # the same name again
    core.retire(2, 6.0)
    for i in range(6, 9):
        core.arrive(Request(i, 6.5), 6.5)
    assert sorted(replica.name for replica, _ in core.dispatch(6.5)) == [0, 1]


def test_a_retried_request_goes_back_to_its_place_with_its_priority_and_deadline() -> None:
    """triton#7116: what a request carries goes with it through every stage."""
    core = Core(Batcher(2, 0.0, aging_s=0.0), EVERYBODY, Router())
    core.add_replica(0, 0.0)
    first = [Request(i, i * 0.001, priority=i, deadline_s=9.0 + i) for i in range(2)]
    for request in first:
        core.arrive(request, 0.001)
    core.dispatch(0.001)
    for i in range(2, 6):
        core.arrive(Request(i, 0.002 * i, priority=i % 2), 0.02)
    again, _ = core.lost(0, 0.03)
    assert again == first
    core.add_replica(1, 0.03)
    ((_, batch),) = core.dispatch(0.03)
    assert batch.requests == tuple(first)
    assert [(one.priority, one.deadline_s, one.retries) for one in batch.requests] == [
        (0, 9.0, 1),
        (1, 10.0, 1),
    ]
    assert core.lost(1, 0.04) == ([], first), "a second loss ends it"


def test_a_lost_batch_takes_nobody_along_who_has_left_and_its_hold_is_not_counted_twice() -> None:
    core = Core(Batcher(2, 0.1), EVERYBODY, Router())
    for name in range(2):
        core.add_replica(name, 0.0)
    kept, gone = Request(0, 0.0), Request(1, 0.1)
    core.arrive(kept, 0.0)
    core.arrive(gone, 0.1)
    ((replica, _),) = core.dispatch(0.1)
    assert kept.batch_wait_s == pytest.approx(0.1)
    gone.state = "cancelled"
    assert core.lost(replica.name, 0.5) == ([kept], [])
    ((_, batch),) = core.dispatch(0.5)
    assert batch.requests == (kept,)
    assert kept.batch_wait_s == pytest.approx(0.1), "it was held back only once; then it ran"


def test_a_hold_counts_from_the_oldest_and_a_full_batch_never_waits() -> None:
    batcher = Batcher(3, 0.010)
    batcher.add(Request(0, 1.000))
    assert batcher.take(1.009) is None
    assert batcher.due_s() == pytest.approx(1.010)
    batcher.add(Request(1, 1.009))
    batch = batcher.take(1.010)
    assert batch is not None
    assert (batch.rows, batch.reason) == (2, "waited")
    for i in range(3):
        batcher.add(Request(2 + i, 2.0))
    full = batcher.take(2.0)
    assert full is not None
    assert (full.rows, full.reason) == (3, "full")


def test_late_binding_takes_what_came_meanwhile_and_early_does_not() -> None:
    """One arrival each 2.5 ms, 20 ms a batch, a hold of 2 ms: early runs them one by one, late in full batches."""
    sizes = {}
    for binding in BINDINGS:
        core = Core(Batcher(8, 0.002, binding), EVERYBODY, Router())
        core.add_replica(0, 0.0)
        ends, sizes[binding] = math.inf, []
        for i in range(400):
            now = i * 0.0025
            for at in (now, now + 0.002):
                if at >= ends:
                    core.finished(0, ends)
                    ends = math.inf
                if at == now:
                    core.arrive(Request(i, now), now)
                for _, batch in core.dispatch(at):
                    sizes[binding].append(batch.rows)
                    ends = at + 0.020
    assert set(sizes[EARLY]) == {1}
    assert sizes[LATE][5:] == [8] * len(sizes[LATE][5:])


def test_no_request_starves_and_the_bound_is_the_aging() -> None:
    """An endless flood of urgent requests above capacity: the other one is overtaken only by those of aging_s."""
    batcher = Batcher(1, 0.0, aging_s=0.1)
    batcher.add(Request(0, 0.0, priority=1))
    served: list[Request] = []
    for i in range(1, 400):
        batcher.add(Request(i, i * 0.001, priority=0))
        if i % 2 == 0:  # half of what comes is served
            batch = batcher.take(i * 0.001)
            assert batch is not None
            served += batch.requests
    place = [one.id for one in served].index(0)
    assert all(one.arrival_s <= 0.1 for one in served[:place])
    assert any(one.arrival_s > 0.1 for one in served[place:])


def test_big_requests_are_not_passed_by_small_ones_for_ever() -> None:
    batcher = Batcher(4, 0.0)
    batcher.add(Request(0, 0.0, rows=2))
    batcher.add(Request(1, 0.0, rows=4))
    for i in range(2, 10):
        batcher.add(Request(i, 0.0, rows=1))
    batches = [batcher.take(0.0) for _ in range(4)]
    assert [[one.id for one in batch.requests] for batch in batches if batch] == [
        [0],
        [1],
        [2, 3, 4, 5],
        [6, 7, 8, 9],
    ]


def test_rows_are_capped_and_an_oversized_request_is_refused() -> None:
    """BentoML#3710, #3859: the cap is on rows, not on requests."""
    batcher = Batcher(8, 0.0)
    for i in range(3):
        batcher.add(Request(i, 0.0, rows=3))
    batch = batcher.take(0.0)
    assert batch is not None
    assert batch.rows == 6
    for rows in (0, 9):
        with pytest.raises(ConfigError, match=f"{rows} rows does not fit"):
            batcher.add(Request(9, 0.0, rows=rows))
    assert (batcher.count, batcher.rows) == (1, 3)


def test_140_at_once_are_one_batch_and_a_cap_below_the_batch_is_refused() -> None:
    """ray#43288: max_batch 256, a hold of 5 s, 140 at once; a cap below the batch size is said when it is built."""
    core = Core(Batcher(256, 5.0), EVERYBODY, Router())
    core.add_replica(0, 0.0)
    for i in range(140):
        core.arrive(Request(i, 0.0), 0.0)
    assert core.dispatch(4.999) == []
    assert core.due_s() == 5.0
    assert [batch.rows for _, batch in core.dispatch(5.0)] == [140]
    with pytest.raises(ConfigError, match="max_queue=64 cannot fill a batch of max_batch=256"):
        Config(max_batch=256)
    assert Config(max_batch=256, admission=False).max_queue == 64


def test_what_has_a_deadline_is_not_computed_after_it_and_nothing_of_it_stays() -> None:
    """ray#50046, #41057: a flood of requests whose clients give up, then calm load again."""
    core = Core(Batcher(4, 0.0), EVERYBODY, Router(), batch_seconds=lambda rows: 0.1)
    core.add_replica(0, 0.0)
    flood = [Request(i, 0.0, deadline_s=0.05) for i in range(1000)]
    for request in flood:
        core.arrive(request, 0.0)
    ((_, first),) = core.dispatch(0.0)
    assert core.due_s() == 0.05
    assert len(core.expire(0.05)) == 996
    core.finished(0, 0.1)
    assert core.dispatch(0.1) == []
    late = Request(1000, 5.0)
    assert core.arrive(late, 5.0) is None
    ((_, batch),) = core.dispatch(5.0)
    assert batch.requests == (late,)
    assert {one.state for one in flood[4:]} == {"expired"}
    assert len(first.requests) == 4


def test_a_low_goal_does_not_refuse_everybody_for_ever() -> None:
    """BentoML PR 3646, #1530: goal 1 s, a batch of 5 s; work is done, and the estimate can mend itself."""
    core = Core(Batcher(8, 0.0), Admission(), Router())
    core.add_replica(0, 0.0)
    for i in range(3):
        now = 10.0 * i
        assert core.arrive(Request(i, now, deadline_s=now + 1), now) is None
        assert len(core.dispatch(now)) == 1
        refused = core.arrive(Request(100 + i, now + 0.1, deadline_s=now + 1.1), now + 0.1)
        assert (refused is None) == (i == 0), "before the first batch has ended nothing is known"
        core.expire(now + 1.1)
        core.finished(0, now + 5.0)


def test_admission_bounds_the_queue_and_says_when_to_come_again() -> None:
    admission = Admission(max_queue_rows=16)
    room = Backlog(queued_rows=10, replicas=2, max_batch=8, batch_s=0.1, left_s=0.05)
    assert room.wait_s() == pytest.approx(0.05 + 0.1 / 2)
    assert admission.refuse(Request(0, 0.0, rows=6), 0.0, room) is None
    full = admission.refuse(Request(0, 0.0, rows=7), 0.0, room)
    assert full is not None
    assert (full.reason, full.retry_after_s) == ("queue full", pytest.approx(0.1))
    in_time = Request(0, 0.0, deadline_s=0.21)
    assert admission.refuse(in_time, 0.0, room) is None
    late = admission.refuse(in_time, 0.02, room)
    assert late is not None
    assert late.reason == "deadline"
    nobody = Backlog(queued_rows=0, replicas=0, max_batch=8, batch_s=0.1)
    assert admission.refuse(in_time, 0.02, nobody) is None
    assert Admission(limit_wait_s=0.05).refuse(Request(0, 0.0), 0.0, room) is not None


def test_bad_policies_are_refused() -> None:
    for bad in ({"max_batch": 0}, {"max_wait_s": -1.0}, {"binding": "never"}, {"aging_s": -0.1}):
        with pytest.raises(ConfigError):
            Batcher(**bad)  # type: ignore[arg-type]  # one bad value each
    for floor, ceiling in ((3, 2), (-1, 2), (0, 0)):
        with pytest.raises(ConfigError):
            Autoscaler(floor, ceiling)


# ---- the autoscaler
def load(**changes: float) -> Load:
    return Load(**{"ready": 1, "starting": 0, "queued_rows": 0, "rate_per_s": 0.0, "capacity_per_s": 10.0, "busy_frac": 0.5, "p95_s": 0.0, **changes})  # type: ignore[arg-type]  # fmt: skip  # counts are whole numbers


def test_the_backlog_counts_and_not_what_is_in_flight() -> None:
    """ray#20977, #24793, #22601: a scaler that sees only capped in-flight work never scales."""
    scaler = Autoscaler(1, 8, drain_s=1.0)
    assert scaler.need(load(rate_per_s=5.0)) == 1
    assert scaler.need(load(rate_per_s=5.0, queued_rows=30)) == 4
    assert scaler.need(load(rate_per_s=5.0, queued_rows=10_000)) == 8
    assert scaler.need(load(rate_per_s=0.0, queued_rows=1, capacity_per_s=0.0)) == 1
    assert Autoscaler(0, 8).need(load()) == 0


def test_it_goes_up_at_once_down_slowly_and_never_while_requests_queue() -> None:
    scaler = Autoscaler(1, 8, down_after_s=5.0)
    assert scaler.decide(0.0, load(rate_per_s=28.0)) == 4
    for tenth in range(1, 300):
        wanted = scaler.decide(tenth / 10, load(ready=4, rate_per_s=5.0, queued_rows=1))
        assert wanted >= 4
    went_down = [
        tenth / 10
        for tenth in range(300, 400)
        if scaler.decide(tenth / 10, load(ready=4, rate_per_s=5.0)) < 4
    ]
    assert went_down
    assert went_down[0] >= 30.0


def test_it_goes_down_one_at_a_time_with_a_pause() -> None:
    scaler = Autoscaler(1, 8, down_after_s=5.0)
    have = scaler.decide(0.0, load(rate_per_s=50.0))
    assert have == 8
    times = []
    for tenth in range(1, 400):
        wanted = scaler.decide(tenth / 10, load(ready=have, rate_per_s=5.0))
        if wanted < have:
            assert wanted == have - 1
            times.append(tenth / 10)
        have = wanted
    assert have == 1
    assert times[0] >= 5.0
    assert min(b - a for a, b in itertools.pairwise(times)) >= 0.99


def test_a_number_that_proved_too_small_is_not_tried_again_for_a_while() -> None:
    """A load that comes for 10 s and goes for 10 s, longer than the look-back."""
    scaler, have, moves = Autoscaler(1, 8, down_after_s=5.0), 1, []
    for tenth in range(450):
        busy = tenth // 100 % 2 == 0
        wanted = scaler.decide(tenth / 10, load(ready=have, rate_per_s=28.0 if busy else 5.0))
        moves += [wanted - have] if wanted != have else []
        have = wanted
    assert moves[0] == 3
    assert moves.count(-1) == sum(move for move in moves[1:] if move > 0), "it went down once, and up again"
    assert sum(a * b < 0 for a, b in itertools.pairwise(moves)) == 2


@pytest.mark.parametrize("seed", range(20))
def test_a_step_of_the_load_turns_it_at_most_once(seed: int) -> None:
    """ray#18925, #26455: up, the average queue falls, down, and again. A fluid with a cold start; the load steps once."""
    dice = random.Random(seed)
    scaler = Autoscaler(dice.choice([0, 1, 2]), 12, down_after_s=dice.choice([2.0, 5.0]))
    rates = dice.uniform(1, 80), dice.uniform(1, 80)
    cold_s, tick_s, capacity = dice.choice([0.5, 3.0, 10.0]), 0.25, 10.0
    ready, coming, backlog = max(1, scaler.floor), [], 0.0
    moves: list[int] = []
    for tick in range(1200):
        now = tick * tick_s
        rate = rates[tick >= 600]
        ready += sum(many for when, many in coming if when <= now)
        coming = [(when, many) for when, many in coming if when > now]
        backlog = max(0.0, backlog + (rate - ready * capacity) * tick_s)
        starting = sum(many for _, many in coming)
        seen = load(
            ready=ready, starting=starting, queued_rows=int(backlog), rate_per_s=rate, capacity_per_s=capacity,
            busy_frac=min(1.0, rate / capacity / ready) if ready else 0.0, p95_s=backlog / capacity / ready if ready else 0.0,
        )  # fmt: skip
        change = scaler.decide(now, seen) - ready - starting
        if backlog >= 1:
            assert change >= 0
        if change > 0:
            coming.append((now + cold_s, change))
        ready += min(0, change)
        if change:
            moves.append(1 if change > 0 else -1)
        if tick == 599:
            first, moves = moves, []
    for one in (first, moves):
        assert sum(a != b for a, b in itertools.pairwise(one)) <= 1
    assert ready * capacity > rates[1] or ready == 12
