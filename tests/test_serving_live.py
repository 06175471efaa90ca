"""Real services under real load: one outcome for each request, whatever dies, and nothing left afterwards."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.request
from pathlib import Path

import numpy as np
import psutil
import pytest
from serving_stand import exchange, infer, post

from mlsyslab import launch
from mlsyslab.contract import ConfigError, RunError
from mlsyslab.labs.serving import worker
from mlsyslab.labs.serving.arrivals import schedule
from mlsyslab.labs.serving.children import Children
from mlsyslab.labs.serving.config import Config
from mlsyslab.labs.serving.job import ServingJob
from mlsyslab.labs.serving.measure import mitigate, service_curve, standing, start
from mlsyslab.labs.serving.protocol import CLASSES
from mlsyslab.labs.serving.serve import address, serve
from mlsyslab.labs.serving.wire import Frames
from mlsyslab.runs import Run, open_run

SMALL = {"width": 32, "layers": 1, "duration_s": 1.5, "warmup_s": 0.3, "rate_per_s": 150.0}
SLOW = {**SMALL, "paced": True, "paced_base_s": 0.01, "paced_row_s": 0.001}  # 8 rows in 18 ms: 444 rows/s

needs_aiohttp = pytest.mark.skipif(
    importlib.util.find_spec("aiohttp") is None, reason="the extra serving is not installed"
)
ENGINES = [pytest.param("http", marks=needs_aiohttp), "in process"]


def measured(run_dir: Path, **fields: object) -> Run:
    run = start(Config(**fields), out=run_dir, probe=False)
    return run.wait(60)


def events(run: Run, *kinds: str) -> list[dict]:
    return [note for note in run.notes if note["event"] in kinds]


def descendants() -> list[psutil.Process]:
    return psutil.Process(launch.warm_up().process.pid).children(recursive=True)


def assert_one_outcome_each(run: Run) -> None:
    frame, plan = run.records, schedule(run.config)
    assert sorted(frame.id) == list(range(len(plan)))
    assert set(frame.outcome) <= {"ok", "rejected", "expired", "error"}
    in_order = frame.sort_values("id")
    assert np.allclose(in_order.intended_s, plan.time_s, atol=1e-5)
    assert (in_order.rows.to_numpy() == plan.rows).all()
    assert (in_order.priority.to_numpy() == plan.priority).all()
    assert (frame.total_s >= frame.lag_s).all()
    assert (frame.lag_s >= -1e-5).all()
    ran = frame[frame.outcome == "ok"]
    assert (ran.status == 200).all()
    assert (ran.batch_size <= run.config.max_batch).all()
    assert (ran.queue_s + ran.batch_wait_s + ran.service_s + ran.lag_s <= ran.total_s + 1e-5).all()


@pytest.mark.ranks
class TestRuns:
    @pytest.mark.parametrize("engine", ENGINES)
    def test_each_intended_request_has_one_outcome_and_the_directory_tells_it_all(self, run_dir, engine):
        run = measured(run_dir, engine=engine, urgent_frac=0.3, rows=3, **SMALL)
        assert_one_outcome_each(run)
        assert set(run.records.outcome) == {"ok"}
        assert (run.status["state"], run.progress) == ("done", 1.0)
        assert [note["event"] for note in run.notes if note["event"] in ("asked", "ready", "end")] == ["asked", "ready", "end"]  # fmt: skip
        assert events(run, "drained")[0]["outcomes"]["ok"] == len(run.records)
        assert events(run, "end")[0]["replica_s"] == pytest.approx(events(run, "end")[0]["time_s"])
        read = open_run(run_dir)
        assert (len(read.records), read.origin, len(read.notes)) == (
            len(run.records),
            "recorded",
            len(run.notes),
        )

    def test_within_a_priority_first_come_first_served(self, run_dir):
        run = measured(run_dir, engine="in process", urgent_frac=0.5, **{**SMALL, "rate_per_s": 600.0})
        for _, lines in run.records.groupby("priority"):  # in the order of their answers
            assert (lines.outcome == "ok").all()
            assert lines.id.is_monotonic_increasing

    @pytest.mark.parametrize("engine", ENGINES)
    def test_a_killed_replica_loses_nothing_and_is_replaced(self, run_dir, engine):
        run = measured(run_dir, engine=engine, replicas=2, kill_at_s=0.7, **{**SLOW, "rate_per_s": 300.0})
        assert_one_outcome_each(run)
        assert {note["event"] for note in run.notes} >= {"killed", "lost"}
        assert len(events(run, "ready")) == 3
        frame = run.records
        assert (frame[frame.outcome == "error"].status == 503).all()
        assert (frame.outcome == "ok").mean() > 0.9
        back_s = events(run, "ready")[-1]["time_s"]
        assert (frame[frame.intended_s > back_s].outcome == "ok").all()

    def test_the_only_replica_killed_is_replaced_and_its_batch_tried_again(self, run_dir):
        run = measured(run_dir, engine="in process", kill_at_s=0.7, admission=False, **SLOW)
        assert_one_outcome_each(run)
        assert set(run.records.outcome) == {"ok"}
        assert run.records.retries.sum() >= 1

    def test_five_times_overload_with_admission_refuses_the_rest_and_bounds_the_queue(self, run_dir):
        run = measured(run_dir, engine="in process", max_queue=32, **{**SLOW, "rate_per_s": 2200.0})
        assert_one_outcome_each(run)
        frame = run.records
        assert (frame[frame.outcome == "rejected"].status == 429).all()
        assert 0.5 < (frame.outcome == "rejected").mean() < 0.95
        ok = frame[frame.outcome == "ok"]
        # 32 rows wait at most: four batches before a request's own, and what is left of the one that runs.
        assert (ok.queue_s + ok.batch_wait_s).max() < 6 * ok.service_s.max()

    def test_a_request_that_misses_its_deadline_is_a_504_and_not_computed(self, run_dir):
        run = measured(
            run_dir, engine="in process", admission=False, deadline_s=0.05, **{**SLOW, "rate_per_s": 900.0}
        )
        assert_one_outcome_each(run)
        expired = run.records[run.records.outcome == "expired"]
        assert len(expired) > 100
        assert (expired.status == 504).all()
        assert expired.batch_size.isna().all()
        assert run.records.deadline_s.eq(0.05).all()

    def test_a_stall_shows_in_the_open_loop_and_hides_from_the_closed_one(self, run_dir):
        stall = {"stall_at_s": 0.5, "stall_s": 0.5, "engine": "in process", "admission": False}
        opened = measured(run_dir / "open", **stall, **SMALL)
        closed = measured(run_dir / "closed", **stall, clients=4, **SMALL)
        assert_one_outcome_each(opened)
        assert opened.records.total_s.gt(0.1).mean() > 0.15  # all that were intended in most of the stall
        assert closed.records.total_s.gt(0.1).sum() <= 4

    def test_the_autoscaler_gets_a_second_replica_for_a_load_above_one(self, run_dir):
        fields = {**SLOW, "rate_per_s": 600.0, "duration_s": 3.0}
        run = measured(run_dir, engine="in process", autoscale=True, floor=1, ceiling=2, **fields)
        assert_one_outcome_each(run)
        assert len(events(run, "ready")) == 2
        asked, ready = events(run, "asked")[1], events(run, "ready")[1]
        assert ready["start_s"] == pytest.approx(ready["time_s"] - asked["time_s"], abs=1e-6)
        end = events(run, "end")[0]
        assert end["time_s"] < end["replica_s"] < 2 * end["time_s"]

    def test_scale_to_zero_makes_the_first_requests_wait_for_a_cold_start(self, run_dir):
        fields = {**SMALL, "duration_s": 3.0, "warmup_s": 0.0, "rate_per_s": 20.0}
        run = measured(
            run_dir,
            engine="in process",
            replicas=0,
            autoscale=True,
            floor=0,
            cold=True,
            admission=False,
            **fields,
        )
        assert_one_outcome_each(run)
        ready = events(run, "ready")[0]
        assert ready["time_s"] > 0
        first = run.records.sort_values("id").iloc[0]
        assert first.queue_s + first.batch_wait_s >= ready["time_s"] - first.intended_s - 1e-3

    def test_stop_ends_everything_and_keeps_what_was_recorded(self, run_dir):
        run = start(
            Config(engine="in process", cold=True, **{**SMALL, "duration_s": 60.0}), out=run_dir, probe=False
        )
        until = time.monotonic() + 30
        while not run.poll() and time.monotonic() < until:
            time.sleep(0.05)
        run.stop().wait(20)
        assert run.status["state"] == "stopped"
        assert len(open_run(run_dir).records) > 0
        assert not [
            p for p in psutil.Process().children(recursive=True) if "serving.worker" in " ".join(p.cmdline())
        ]

    def test_a_service_that_is_killed_fails_the_run_with_its_name(self, run_dir):
        run = start(Config(engine="in process", **{**SMALL, "duration_s": 60.0}), out=run_dir, probe=False)
        until = time.monotonic() + 30
        while not run.poll() and time.monotonic() < until:
            time.sleep(0.05)
        for process in descendants():
            if Path(f"/proc/{process.pid}/fd/1").readlink().parent.name == "service":
                process.kill()
        with pytest.raises(RunError, match="service was killed by SIGKILL"):
            run.wait(20)
        assert run.status["state"] == "failed"

    def test_a_replica_that_cannot_start_fails_the_run_with_its_name_and_reason(self, run_dir, monkeypatch):
        real = Children.fork
        monkeypatch.setattr(
            Children,
            "fork",
            lambda self, who, module, *args, **more: real(
                self, who, {"worker": "absent"}.get(module, module), *args, **more
            ),
        )
        with pytest.raises(RunError, match=r"replica 0 failed: ModuleNotFoundError: .*absent"):
            measured(run_dir, engine="in process", **SMALL)

    @needs_aiohttp
    def test_a_load_generator_that_comes_late_is_still_told_to_begin(self, run_dir, monkeypatch):
        real = Children.fork

        def fork(self, who, *args, **more):
            if who == "load":
                time.sleep(1.0)  # the service is ready before
            real(self, who, *args, **more)

        monkeypatch.setattr(Children, "fork", fork)
        assert_one_outcome_each(measured(run_dir, **SMALL))

    @pytest.mark.parametrize("how", ["kill -9", "Ctrl-C"])
    def test_no_process_survives_its_caller(self, tmp_path, how):
        script = textwrap.dedent(f"""
            from mlsyslab.labs.serving.measure import start
            from mlsyslab.labs.serving.config import Config
            run = start(Config(engine="in process", cold=True, duration_s=60.0), out={str(tmp_path / "run")!r}, probe=False)
            while not run.poll(): pass
            print("running", flush=True)
            run.wait()
        """)
        caller = subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert caller.stdout is not None
        assert caller.stdout.readline() == "running\n"
        family = psutil.Process(caller.pid).children(recursive=True)
        assert len(family) >= 3  # the warm server, the service, the cold replica
        if how == "kill -9":
            os.kill(caller.pid, signal.SIGKILL)
        else:
            time.sleep(0.5)  # it shall be in run.wait()
            os.killpg(caller.pid, signal.SIGINT)  # as a terminal does it: everybody hears it
        caller.communicate(timeout=20)
        _, alive = psutil.wait_procs(family, timeout=5)
        assert alive == []
        left = open_run(tmp_path / "run")
        assert left.status["state"] == ("interrupted" if how == "kill -9" else "stopped")
        assert len(left.records) > 0


class Standing:
    """A standing service for a test, stopped afterwards."""

    def __init__(self, out: Path, **fields: object) -> None:
        self.job: ServingJob = standing(Config(**{**SMALL, **fields}), out=out)

    def __enter__(self) -> Standing:
        self.url = address(self.job)
        assert self.url, self.job.status
        self.port = int(self.url.rpartition(":")[2])
        return self

    def __exit__(self, *_: object) -> None:
        self.job.stop()
        self.job.wait(20)


@pytest.mark.ranks
@needs_aiohttp
class TestStanding:
    def test_one_poisoned_item_of_eight_fails_alone_in_the_real_model(self, tmp_path):
        async def body(port):
            tokens = [*range(7), 1000]
            return await asyncio.gather(*(exchange(port, post(infer(token=token))) for token in tokens))

        with Standing(tmp_path, max_wait_s=1.0) as service:
            answers = asyncio.run(body(service.port))
        assert [status for status, _, _ in answers] == [200] * 7 + [500]
        good = [json.loads(text) for _, _, text in answers[:7]]
        assert {answer["parameters"]["batch_size"] for answer in good} == {8}  # they ran together
        assert "index out of range" in json.loads(answers[7][2])["error"]

    def test_a_drain_answers_all_who_were_let_in(self, tmp_path):
        async def body(service):
            asked = [asyncio.ensure_future(exchange(service.port, post(infer(token=k)))) for k in range(20)]
            await asyncio.sleep(0.3)
            service.job.drain()
            return await asyncio.gather(*asked)

        slow = {"paced": True, "paced_base_s": 0.2, "max_batch": 4}
        with Standing(tmp_path, **slow) as service:
            answers = asyncio.run(body(service))
            service.job.wait(20)
            assert service.job.status["state"] == "done"
        assert [status for status, _, _ in answers] == [200] * 20

    def test_a_drain_before_it_serves_ends_it_too(self, tmp_path):
        job = standing(Config(**SMALL), out=tmp_path)
        job.drain()
        job.wait(20)
        assert job.status["state"] == "done"

    def test_an_idle_service_costs_next_to_nothing(self, tmp_path):
        with Standing(tmp_path):
            time.sleep(0.5)
            processes = descendants()
            assert len(processes) >= 2
            before = sum(sum(process.cpu_times()[:2]) for process in processes)
            time.sleep(2)
            spent = sum(sum(process.cpu_times()[:2]) for process in processes) - before
        assert spent / 2 < 0.02

    def test_a_stopped_replica_is_ended_and_replaced_and_its_batch_is_done_by_another(self, tmp_path):
        async def body(port):
            asked = [exchange(port, post(infer(token=token))) for token in range(40)]
            return await asyncio.wait_for(asyncio.gather(*asked), 60)

        with Standing(tmp_path, replicas=2, max_wait_s=0.0) as service:
            stuck = service.job.replicas[0].pid
            os.kill(stuck, signal.SIGSTOP)
            answers = asyncio.run(body(service.port))
            until = time.monotonic() + 30
            while (
                psutil.pid_exists(stuck) or len(service.job.replicas) < 3 or not service.job.replicas[2].pid
            ):
                assert time.monotonic() < until, service.job.replicas
                time.sleep(0.05)
            assert service.job.replicas[0].lost
            after = asyncio.run(body(service.port))
        assert {status for status, _, _ in answers + after} == {200}
        said = [json.loads(text)["parameters"] for _, _, text in answers]
        again = [one for one in said if one["retries"]]
        assert 1 <= len(again) <= 8  # the batch that hung
        assert {one["replica"] for one in said} <= {1, 2}
        kinds = [note["event"] for note in map(json.loads, (tmp_path / "events.jsonl").open()) if note.get("replica") == 0]  # fmt: skip
        assert kinds == ["asked", "ready", "hung", "lost"]

    def test_a_flood_that_mostly_disconnects_is_not_computed_and_harms_nobody_after_it(self, tmp_path):
        """ray-project/ray#50046. The replica is stopped meanwhile, so that who waits and who runs is known."""
        get = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"

        async def count(port, name):
            _, _, text = await exchange(port, get)
            return float(re.search(rf"^{re.escape(name)} (\S+)$", text.decode(), re.MULTILINE)[1])

        async def wait_for(port, name, number):
            while await count(port, name) != number:
                await asyncio.sleep(0.01)

        async def flood(port, pid):
            ready = await exchange(port, post(infer()))
            os.kill(pid, signal.SIGSTOP)
            stay = [asyncio.ensure_future(exchange(port, post(infer(token=k)))) for k in range(20)]
            await wait_for(port, "mlsyslab_queued_rows", 19)  # the first one runs, or would
            leave = [asyncio.ensure_future(exchange(port, post(infer(token=k)))) for k in range(80)]
            await wait_for(port, "mlsyslab_queued_rows", 99)
            for one in leave:
                one.cancel()  # closes its connection
            await wait_for(port, 'mlsyslab_requests_total{outcome="cancelled"}', 80)
            os.kill(pid, signal.SIGCONT)
            answers = [ready, *await asyncio.gather(*stay)]
            await asyncio.sleep(0.5)
            calm = [await exchange(port, post(infer(token=k))) for k in range(40)]
            return [status for status, _, _ in answers + calm], await count(port, "mlsyslab_batch_rows_sum")

        # stall_s: a replica that is stopped for a while is not taken for one that hangs
        with Standing(tmp_path, max_wait_s=0.0, admission=False, stall_at_s=1e4, stall_s=60.0) as service:
            pid = service.job.replicas[0].pid
            statuses, computed = asyncio.run(asyncio.wait_for(flood(service.port, pid), 50))
        assert statuses == [200] * 61
        assert computed == 61

    def test_a_busy_port_is_one_clear_error(self, tmp_path):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(
                RunError,
                match=rf"^cannot listen on 127.0.0.1:{port}: Address already in use; choose another port, or 0",
            ):
                serve(Config(**SMALL), port=port, out=tmp_path)

    def test_ctrl_c_on_the_command_drains_it_and_its_logs_go_with_it(self, monkeypatch):
        short = tempfile.mkdtemp(prefix="t")  # tmp_path is too long for a socket's path
        monkeypatch.setenv("TMPDIR", short)
        command = [
            sys.executable,
            "-m",
            "mlsyslab.labs.serving.serve",
            "--port",
            "0",
            "--width",
            "32",
            "--layers",
            "1",
        ]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})  # fmt: skip
        assert process.stdout is not None
        said = process.stdout.readline()
        url = said.split(" at ")[1].split()[0]
        with urllib.request.urlopen(f"{url}/v2/health/ready") as answer:
            assert json.load(answer) == {"ready": True}
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: everybody hears it
        assert process.wait(20) == 0
        assert "draining" in process.stdout.read()
        assert not list(Path(short).glob("mlsyslab-service-*"))
        shutil.rmtree(short)

    def test_tritonclient_gets_the_answer_that_json_gets(self, tmp_path):
        client = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")
        tokens = np.arange(16, dtype=np.int64).reshape(2, 8)
        with Standing(tmp_path) as service:
            triton = client.InferenceServerClient(service.url.removeprefix("http://"))
            assert triton.is_server_live()
            assert triton.is_model_ready("encoder")
            asked = client.InferInput("tokens", [2, 8], "INT64")
            asked.set_data_from_numpy(tokens)
            got = triton.infer("encoder", [asked], request_id="seven", priority=1, timeout=5_000_000)
            body = infer(rows=2, data=tokens.ravel().tolist())
            _, _, text = asyncio.run(exchange(service.port, post(body)))
            triton.close()
        assert got.get_response()["id"] == "seven"
        plain = np.array(json.loads(text)["outputs"][0]["data"]).reshape(2, CLASSES)
        assert np.allclose(got.as_numpy("logits"), plain, atol=1e-5)


class TestReplica:
    def test_it_has_run_each_batch_size_once_before_it_says_that_it_is_ready(self, monkeypatch):
        """ray-project/ray#61649."""
        ran: list[int] = []

        class Recorded:
            device = "cpu"

            def __init__(self, config: Config) -> None:
                pass

            def __call__(self, tokens: np.ndarray) -> None:
                ran.append(len(tokens))

        class Ready(Exception):
            pass

        def connect(path: str) -> None:
            raise Ready

        monkeypatch.setattr(worker, "Model", Recorded)
        monkeypatch.setattr(worker, "connect", connect)
        with pytest.raises(Ready):
            worker.serve(Config(max_batch=16), "", 0)
        assert ran == list(range(1, 17))

    @pytest.mark.parametrize("largest", [1, 7, 32, 33, 256, 1024])
    def test_the_sizes_go_from_one_to_the_largest_without_a_large_gap(self, largest):
        sizes = worker.batch_sizes(largest)
        assert (sizes[0], sizes[-1]) == (1, largest)
        assert all(after <= max(before + 1, before * 1.3) for before, after in itertools.pairwise(sizes))
        assert len(sizes) < 50

    def test_a_bad_request_of_several_fails_with_all_its_rows_and_alone(self):
        class Model:
            config = Config(tokens=2)

            def __call__(self, tokens: np.ndarray) -> np.ndarray:
                if tokens.max() > 100:
                    raise IndexError("out of range")
                return tokens.astype(np.float32)

        tokens = np.array([[1, 1], [2, 2], [3, 101], [4, 4]])
        ((head, body),) = Frames().feed(worker.answer(Model(), [1, 2, 1], tokens.tobytes()))  # type: ignore[arg-type]  # it plays one
        assert head["errors"] == {"1": "IndexError: out of range"}
        assert np.frombuffer(body, np.float32).tolist() == [1, 1, 4, 4]

    @pytest.mark.ranks
    def test_the_measured_curve_has_a_time_for_each_batch_size(self):
        curve = service_curve(Config(**SMALL))
        assert list(curve) == list(range(1, 9))
        assert min(curve.values()) > 0


class TestWithoutTheExtra:
    def test_http_says_what_to_install_and_what_works_without(self, monkeypatch):
        found = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: None if name == "aiohttp" else found(name)
        )
        with pytest.raises(
            ConfigError,
            match=r"needs aiohttp; run: pip install 'mlsyslab\[serving\]', or choose engine='in process'",
        ):
            start(Config())

    def test_the_callers_side_loads_neither_torch_nor_aiohttp(self):
        code = "import sys, mlsyslab.labs.serving.measure, mlsyslab.labs.serving.serve; print(*(m for m in ('torch', 'aiohttp', 'prometheus_client') if m in sys.modules))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout.split()) == (0, [])

    @pytest.mark.ranks
    def test_in_process_needs_no_more_than_the_base(self, run_dir):
        blocked = textwrap.dedent(f"""
            import sys
            sys.path.insert(0, {str(run_dir.parent / "blocked")!r})
            from mlsyslab.labs.serving.measure import start
            from mlsyslab.labs.serving.config import Config
            run = start(Config(engine="in process", duration_s=0.6, warmup_s=0.1, width=32, layers=1), out={str(run_dir)!r}, probe=False).wait(60)
            print(run.status["state"], set(run.records.outcome))
        """)
        for name in ("aiohttp", "prometheus_client"):
            package = run_dir.parent / "blocked" / name
            package.mkdir(parents=True)
            (package / "__init__.py").write_text("raise ModuleNotFoundError('blocked')")
        done = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, timeout=60)
        assert done.stdout == "done {'ok'}\n", done.stderr


@pytest.mark.ranks
def test_an_action_is_applied_and_measured_beside_its_promise(tmp_path: Path) -> None:
    """A replica that does 49 rows a second, and 100 that come: more replicas are what helps, and they do."""
    before = measured(
        tmp_path / "before",
        engine="in process", paced=True, max_batch=1, paced_base_s=0.02, rate_per_s=100.0, duration_s=3.0, warmup_s=0.5,
    )  # fmt: skip
    found = mitigate(before, out=tmp_path / "after", timeout_s=60)
    assert found.action.name == "more replicas"
    assert found.after.config.replicas > before.config.replicas
    assert found.promised is not None
    assert found.came_frac > 0
    assert "of the missed requests" in str(found)
