"""Ray Serve under our policies: each adapter alone, with what Ray would hand it played, and all of them in a real Ray."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from serving_stand import play

from mlsyslab.contract import ConfigError
from mlsyslab.labs.serving import ray_cluster, ray_engine, ray_guard, ray_hooks
from mlsyslab.labs.serving.arrivals import schedule
from mlsyslab.labs.serving.config import Config
from mlsyslab.labs.serving.measure import start
from mlsyslab.labs.serving.protocol import CLASSES, Answer
from mlsyslab.runs import Run, open_run

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="the extra ray is not installed"
)
SMALL = {"width": 32, "layers": 1, "duration_s": 3.0, "warmup_s": 0.5, "rate_per_s": 100.0}
PACED = {"paced": True, "paced_base_s": 0.02, "paced_row_s": 0.0}
GONE_WITHIN_S = 10.0


class TooMany(Exception):
    """What a handle raises when too many requests wait at it."""


# ---- the router
class TestRouter:
    def test_the_replica_with_the_fewest_requests_comes_first_and_each_has_its_rank(self):
        assert ray_hooks.ranked([3, 0, 2, 0]) == [1, 3, 2, 0]

    def test_ray_is_given_its_own_replicas_and_an_unknown_load_is_none(self):
        loads = {"a": 2, "b": None, "c": 1}
        cache = types.SimpleNamespace(get=loads.__getitem__)
        router = types.SimpleNamespace(replica_queue_len_cache=cache)
        replicas = [types.SimpleNamespace(replica_id=name) for name in loads]
        chosen = asyncio.run(ray_hooks.LeastLoaded.choose_replicas(router, replicas, None))
        assert [[one.replica_id for one in rank] for rank in chosen] == [["b"], ["c"], ["a"]]


# ---- the autoscaler
def context(now_s: float, replicas: dict[str, dict[str, float]], target: int, queued: float = 0.0) -> Any:
    """What Ray's controller hands to a policy: custom metrics as name -> replica -> value."""
    names = {name for said in replicas.values() for name in said}
    return types.SimpleNamespace(
        current_time=now_s,
        current_num_replicas=len(replicas),
        target_num_replicas=target,
        total_queued_requests=queued,
        aggregated_metrics={
            name: {tag: said[name] for tag, said in replicas.items() if name in said} for name in names
        },
    )


def load(**more: float) -> dict[str, float]:
    """A replica that could do 1000 rows a second."""
    return {
        "queued_rows": 0.0,
        "rate_per_s": 0.0,
        "capacity_per_s": 1000.0,
        "busy_frac": 0.0,
        "p95_s": 0.01,
        **more,
    }


class TestScaling:
    def test_the_load_is_the_sum_of_what_replicas_say_and_of_what_waits_at_the_handles(self):
        said = {
            "a": load(queued_rows=3.0, rate_per_s=400.0, busy_frac=0.5),
            "b": load(rate_per_s=200.0, p95_s=0.2),
            "new": load(capacity_per_s=0.0),
        }
        found = ray_hooks.total_load(context(0.0, said, target=4, queued=5.0))
        assert (found.ready, found.starting, found.queued_rows) == (3, 1, 8)
        assert (found.rate_per_s, found.capacity_per_s, found.p95_s) == (600.0, 1000.0, 0.2)
        assert found.busy_frac == pytest.approx(0.5 / 3)

    def test_it_goes_up_at_once_and_down_only_when_the_load_was_low_for_long(self):
        policy = ray_hooks.ScalingPolicy(floor=1, ceiling=4, slo_p95_s=0.05)
        busy = {"a": load(rate_per_s=1300.0)}
        assert policy(context(100.0, busy, target=1)) == (2, {})
        calm = {"a": load(rate_per_s=10.0), "b": load(rate_per_s=10.0)}
        counts = [policy(context(101.0 + second, calm, target=2))[0] for second in range(10)]
        assert counts[0] == 2
        assert counts[-1] == 1

    def test_from_zero_it_starts_one_for_what_waits_at_the_handle(self):
        policy = ray_hooks.ScalingPolicy(floor=0, ceiling=2, slo_p95_s=0.05)
        assert policy(context(0.0, {}, target=0))[0] == 0
        assert policy(context(1.0, {}, target=0, queued=1.0))[0] == 1


# ---- the replica
@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ray_hooks.Replica]:
    """Makes a replica that introduces itself to nobody."""
    monkeypatch.setattr(ray_hooks, "introduce", lambda hello: "r-1")

    def make(**fields: object) -> ray_hooks.Replica:
        config = Config(**{"width": 32, "layers": 1, "max_wait_s": 0.0, **PACED, **fields})
        return ray_hooks.Replica(vars(config), loopback=False)

    return make


def tokens(replica: ray_hooks.Replica, rows: int = 1) -> bytes:
    return np.ones((rows, replica.config.tokens), np.int64).tobytes()


class TestReplica:
    def test_all_that_came_while_the_model_ran_is_one_batch(self, replica):
        async def body():
            one = replica()
            asked = [one(tokens(one), 1, 1, float("inf")) for _ in range(6)]
            answers = [answer for _, answer in await asyncio.gather(*asked)]
            assert sorted(answer.batch_size for answer in answers) == [1, 5, 5, 5, 5, 5]
            assert all(len(answer.output) == CLASSES * 4 for answer in answers)

        play(body)

    def test_an_urgent_request_overtakes_and_one_whose_time_is_over_is_not_computed(self, replica):
        async def body():
            one, order = replica(max_batch=1), []

            async def ask(name: str, priority: int, timeout_s: float) -> None:
                tag, answer = await one(tokens(one), 1, priority, timeout_s)
                assert tag == "r-1"
                order.append((name, answer.status))

            inf = float("inf")
            await asyncio.gather(
                ask("first", 1, inf), ask("low", 1, inf), ask("urgent", 0, inf), ask("late", 1, 0.01)
            )
            assert order == [("late", 504), ("first", 200), ("urgent", 200), ("low", 200)]

        play(body)

    def test_what_its_queue_cannot_hold_is_refused_and_says_when_to_come_again(self, replica):
        async def body():
            one = replica(max_queue=8)
            answers = await asyncio.gather(*(one(tokens(one), 1, 1, float("inf")) for _ in range(12)))
            assert [answer.status for _, answer in answers] == [200] * 9 + [429] * 3
            assert answers[-1][1].retry_after_s > 0

        play(body)

    def test_a_client_that_is_gone_leaves_the_queue(self, replica):
        async def body():
            one = replica(max_batch=1)
            running, queued = (asyncio.ensure_future(one(tokens(one), 1, 1, float("inf"))) for _ in "ab")
            await asyncio.sleep(0)
            queued.cancel()
            await running
            assert queued.cancelled()
            assert one.service.outcomes["ok"] == one.service.outcomes["cancelled"] == 1

        play(body)

    def test_what_it_reports_to_the_autoscaler_are_numbers_under_the_names_of_a_load(self, replica):
        async def body():
            one = replica(autoscale=True)
            await one(tokens(one), 1, 1, float("inf"))
            said = await one.record_autoscaling_stats()
            assert ray_hooks.total_load(context(0.0, {"a": said}, target=1)).rate_per_s > 0
            assert all(isinstance(value, int | float) for value in said.values())

        play(body)


# ---- the front's side
class Handle:
    """Plays a deployment handle: answers, at once or after some seconds, or raises, what the test says, in turn."""

    def __init__(self, *turns: Any) -> None:
        self.turns, self.asked = list(turns), []
        self.calls: list[asyncio.Future[tuple[str, Answer]]] = []

    def remote(self, *arguments: Any) -> asyncio.Future[tuple[str, Answer]]:
        self.asked.append(arguments)
        self.calls.append(asyncio.ensure_future(self._turn(self.turns.pop(0))))
        return self.calls[-1]

    async def _turn(self, turn: Any) -> tuple[str, Answer]:
        if isinstance(turn, Exception):
            raise turn
        if isinstance(turn, float):
            await asyncio.sleep(turn)
        return "r-7", good() if isinstance(turn, float) else turn


def good() -> Answer:
    return Answer(200, output=b"", queue_s=0.0, batch_wait_s=0.0, service_s=0.0, batch_size=1, replica=0)


def gateway(handle: Any) -> tuple[ray_engine.Gateway, list[dict], list[Answer]]:
    told: list[dict] = []
    made = ray_engine.Gateway(Config(), lambda **said: told.append(said), handle, TooMany)
    return made, told, []


class TestGateway:
    def test_priority_and_the_time_that_is_left_go_with_the_request(self):
        async def body():
            handle = Handle(good())
            made, _, answers = gateway(handle)
            made.submit(b"tokens", 3, answers.append, priority=0, timeout_s=5.0)
            await asyncio.sleep(0.01)
            (asked,) = handle.asked
            assert asked[:3] == (b"tokens", 3, 0)
            assert 4.9 < asked[3] <= 5.0
            assert (answers[0].status, answers[0].replica, made.outcomes["ok"]) == (200, 0, 1)

        play(body)

    @pytest.mark.parametrize(
        ("turns", "status", "retries"),
        [
            ((OSError("gone"), good()), 200, 1),
            ((OSError("gone"), OSError("gone")), 503, 1),
            ((TooMany(),), 429, 0),
        ],
    )
    def test_a_lost_replica_is_tried_again_once_and_a_full_handle_is_a_refusal(self, turns, status, retries):
        async def body():
            made, _, answers = gateway(Handle(*turns))
            made.submit(b"", 1, answers.append)
            await asyncio.sleep(0.01)
            assert [(one.status, one.retries) for one in answers] == [(status, retries)]
            assert not made.tasks

        play(body)

    def test_without_a_replica_a_deadline_is_kept_all_the_same(self):
        async def body():
            made, _, answers = gateway(Handle(60.0))
            made.submit(b"", 1, answers.append, timeout_s=0.02)
            await asyncio.sleep(0.05)
            assert [one.status for one in answers] == [504]
            assert not made.tasks

        play(body)

    def test_a_client_that_is_gone_takes_its_call_back_and_gets_no_answer(self):
        async def body():
            handle = Handle(60.0)
            made, _, answers = gateway(handle)
            request = made.submit(b"", 1, answers.append)
            await asyncio.sleep(0)
            made.cancel(request)
            await asyncio.sleep(0.01)
            assert (answers, made.tasks, made.outcomes["cancelled"]) == ([], {}, 1)
            assert handle.calls[0].cancelled()

        play(body)

    def test_a_drain_lets_nobody_in_and_answers_who_was(self):
        async def body():
            made, _, answers = gateway(Handle(0.05))
            made.submit(b"", 1, answers.append)
            draining = asyncio.ensure_future(made.drain())
            await asyncio.sleep(0.01)
            made.submit(b"", 1, answers.append)
            await draining
            assert [one.status for one in answers] == [503, 200]

        play(body)

    def test_the_caller_hears_when_replicas_were_asked_for_are_ready_and_are_gone(self):
        async def body():
            made, told, _ = gateway(Handle())
            hello = {"age_s": 0.5, "pid": 5, "load_s": 0.1, "warm_up_s": 0.1, "device": "cpu", "paced": False}
            made.seen([("a", "STARTING", 2.0)], lambda tag: None)
            assert not made.ready.is_set()
            made.seen([("a", "RUNNING", 3.0)], lambda tag: hello)
            assert made.ready.is_set()
            made.seen([("a", "STOPPING", 4.0), ("b", "STARTING", 0.5)], lambda tag: None)
            assert [(one["op"], one["name"]) for one in told] == [("start", 0), ("ready", 0), ("start", 1), ("lost", 0)]  # fmt: skip
            assert told[1]["at_s"] - told[0]["at_s"] == pytest.approx(1.5, abs=0.5)
            assert [one.state for one in made.core.replicas.values()] == ["starting"]

        play(body)


# ---- the processes
def test_without_ray_the_engine_says_what_to_install(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "ray" else real(name, *a)
    )
    with pytest.raises(ConfigError, match=r"pip install 'mlsyslab\[ray\]'"):
        start(Config(engine="ray"))


def test_when_its_stdin_ends_the_guard_kills_what_is_marked_and_removes_the_folder(tmp_path):
    folder = tmp_path / "ray"
    folder.mkdir()
    marked, other = (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={**os.environ, ray_guard.MARK: mark})
        for mark in (str(folder), "another run")
    )  # fmt: skip
    guard = ray_cluster._guard("folder", str(folder))
    assert guard.stdin is not None
    guard.stdin.close()
    assert guard.wait(GONE_WITHIN_S) == 0
    assert marked.wait(1) == -signal.SIGKILL
    assert other.poll() is None
    assert not folder.exists()
    other.communicate(b"\n")


def assert_gone(folder: str, started: list[psutil.Process]) -> None:
    """None of these processes of a run that had this folder is alive soon, nor any other; nor is the folder there."""

    def alive() -> list[psutil.Process]:
        running = [one for one in started if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        return running + ray_guard.belonging(folder)

    until = time.monotonic() + GONE_WITHIN_S
    while (alive() or Path(folder).exists()) and time.monotonic() < until:
        time.sleep(0.1)
    assert alive() == []
    assert not Path(folder).exists()


def under_way() -> tuple[str, list[psutil.Process]]:
    """The folder of the one Ray that this test started, and all of its processes."""
    folders = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            environ = process.environ()
            if environ.get("MLSYSLAB_TEST_SESSION") == os.environ["MLSYSLAB_TEST_SESSION"]:
                folders.add(environ.get(ray_guard.MARK))
    (folder,) = folders - {None}
    return folder, ray_guard.belonging(folder)


def listen_elsewhere(pids: set[int]) -> list[str]:
    """Sockets of these processes that listen, and not on the loopback interface."""
    return [
        f"{one.pid} {one.laddr}"
        for one in psutil.net_connections("inet")
        if one.pid in pids and one.status == psutil.CONN_LISTEN and one.laddr.ip not in ("127.0.0.1", "::ffff:127.0.0.1")
    ]  # fmt: skip


@needs_ray
@pytest.mark.ranks
class TestRay:
    def test_a_run_has_one_outcome_a_request_and_leaves_nothing(self, run_dir):
        fields = {**SMALL, "urgent_frac": 0.3, "rows": 3, "deadline_s": 2.0, "replicas": 2, "kill_at_s": 1.5}
        run = start(Config(engine="ray", **fields), out=run_dir, probe=False)
        while run.status["message"] != "sending requests" and not run.finished:
            time.sleep(0.05)
        folder, started = under_way()
        assert len(started) >= 10  # two replicas, the controller, two agents and Ray's daemons
        assert listen_elsewhere({process.pid for process in started}) == []
        run.wait(90)
        assert_one_outcome_each(run)
        frame = open_run(run_dir).records
        assert (frame.outcome == "ok").mean() > 0.95
        assert set(frame.replica.dropna()) >= {0, 1}
        notes = [note["event"] for note in run.notes if "event" in note]
        assert {"asked", "ready", "killed", "lost", "drained", "end"} <= set(notes)
        assert notes.count("asked") == 3  # the lost one is replaced
        assert_gone(folder, started)

    def test_no_process_and_no_folder_survives_a_caller_that_is_killed(self, tmp_path):
        script = textwrap.dedent(f"""
            from mlsyslab.labs.serving.measure import start
            from mlsyslab.labs.serving.config import Config
            config = Config(engine="ray", width=32, layers=1, duration_s=60.0)
            run = start(config, out={str(tmp_path / "run")!r}, probe=False)
            while not run.poll(): pass
            print("running", flush=True)
            run.wait()
        """)
        caller = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert caller.stdout is not None
        assert caller.stdout.readline() == "running\n"
        folder, started = under_way()
        assert len(started) >= 9
        os.kill(caller.pid, signal.SIGKILL)
        caller.wait()
        assert_gone(folder, started)


def assert_one_outcome_each(run: Run) -> None:
    frame, plan = run.records.sort_values("id"), schedule(run.config)
    assert list(frame.id) == list(range(len(plan)))
    assert (frame.priority.to_numpy() == plan.priority).all()
    ran = frame[frame.outcome == "ok"]
    assert (ran.batch_size <= run.config.max_batch).all()
    assert (ran.queue_s + ran.batch_wait_s + ran.service_s + ran.lag_s <= ran.total_s + 1e-5).all()
