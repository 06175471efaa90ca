"""A job that loses ranks and hosts goes on as if nothing had been, and nobody outlives its caller."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from straggler_ranks import SMALL, Nobody, model_and_optimizer

from mlsyslab import launch, open_run
from mlsyslab.contract import ConfigError, RunError
from mlsyslab.jpegs import StepSampler
from mlsyslab.labs.straggler import resume
from mlsyslab.labs.straggler.config import Config, acts
from mlsyslab.labs.straggler.elastic import Elastic, Lookout, recover
from mlsyslab.labs.straggler.recovery import Interventions, Named, Recovery, recovery_of
from mlsyslab.ranks import RankContext
from mlsyslab.records import PHASES, StepRecord, Stream
from mlsyslab.runs import create_run

TESTS = Path(__file__).parent
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled"
)  # one process saves alone here


def parameters(model, optimizer) -> list[torch.Tensor]:
    """What a checkpoint must bring back: weights and momenta, copied."""
    momenta = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    return [tensor.detach().clone() for tensor in [*model.parameters(), *momenta]]


class TestCheckpoints:
    def test_weights_and_momenta_come_back(self, tmp_path):
        model, optimizer = model_and_optimizer(1)
        path = resume.save(tmp_path, model, optimizer, 7)
        other = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 4))
        fresh = torch.optim.SGD(other.parameters(), lr=0.5, momentum=0.9)
        resume.load(path, other, fresh)
        assert all(map(torch.equal, parameters(other, fresh), parameters(model, optimizer)))
        assert fresh.param_groups[0]["lr"] == 0.01
        assert resume.steps_of(path) == 7

    def test_the_last_two_are_kept(self, tmp_path):
        model, optimizer = model_and_optimizer()
        for done in (8, 9, 10, 100):
            resume.save(tmp_path, model, optimizer, done)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000100"]

    @pytest.mark.parametrize(
        "how", ["unfinished", "no table of contents", "half of one", "half a part", "a part gone"]
    )
    def test_one_that_is_not_whole_is_passed_over(self, tmp_path, how):
        model, optimizer = model_and_optimizer()
        good = resume.save(tmp_path, model, optimizer, 5)
        bad = resume.save(tmp_path, model, optimizer, 10)
        assert resume.newest(tmp_path) == bad
        part = next(bad.glob("*.distcp"))
        if how == "unfinished":
            bad.rename(bad.with_suffix(".part"))
        elif how == "no table of contents":
            (bad / ".metadata").unlink()
        elif how == "a part gone":
            part.unlink()
        else:
            path = part if how == "half a part" else bad / ".metadata"
            os.truncate(path, path.stat().st_size // 2)
        assert resume.newest(tmp_path) == good

    def test_no_checkpoint_is_a_start_from_the_beginning(self, tmp_path):
        assert resume.newest(tmp_path / "absent") is None

    def test_one_that_was_found_broken_is_written_anew(self, tmp_path):
        model, optimizer = model_and_optimizer()
        bad = resume.save(tmp_path, model, optimizer, 10)
        (bad / ".metadata").unlink()
        resume.save(tmp_path, model, optimizer, 10)
        assert resume.newest(tmp_path) == bad

    def test_a_state_under_a_wrong_name_is_refused(self, tmp_path):
        model, optimizer = model_and_optimizer()
        path = resume.save(tmp_path, model, optimizer, 5).rename(tmp_path / "step-00000006")
        with pytest.raises(RunError, match="holds the state after 5 steps; give it its own name back"):
            resume.load(path, model, optimizer)

    def test_one_that_cannot_be_read_is_named_with_a_remedy(self, tmp_path):
        model, optimizer = model_and_optimizer()
        path = resume.save(tmp_path, model, optimizer, 5)
        part = next(path.glob("*.distcp"))
        part.write_bytes(bytes(part.stat().st_size))
        with pytest.raises(RunError, match=r"cannot load .*step-00000005: .*delete that folder"):
            resume.load(path, model, optimizer)

    @pytest.mark.ranks
    def test_the_one_being_written_when_a_rank_was_killed_is_not_loaded(self, tmp_path):
        with pytest.raises(RunError, match="rank 0 was killed by SIGKILL"):
            launch.call("straggler_ranks:killed_while_saving", {"folder": str(tmp_path)}, ranks=2)
        found = resume.newest(tmp_path)
        assert found is not None
        assert found.name == "step-00000005"
        assert len(list(tmp_path.iterdir())) == 2  # the other was under way
        resume.tidy(tmp_path)
        assert list(tmp_path.iterdir()) == [found]


class TestKeeper:
    def keeper(self, out: Path, every: int = 2, steps: int = 10) -> resume.Keeper:
        out.mkdir()
        model, optimizer = model_and_optimizer()
        config = dataclasses.replace(SMALL, steps=steps)
        notes = Stream(out / "rank-0.jsonl")
        trainer = SimpleNamespace(
            out=out, rank=0, config=config, model=model, optimizer=optimizer, notes=notes
        )
        return resume.Keeper(trainer, out / "checkpoints", 0, every)

    def test_it_notes_each_steps_samples_and_saves_when_it_is_due(self, tmp_path):
        keeper = self.keeper(tmp_path / "run")
        took = [keeper.after_step(step, [step, 9], torch.tensor(0.5 + step)) for step in range(10)]
        keeper.write()
        lines = (tmp_path / "run" / "samples-0.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert [(row["indices"], row["loss"]) for row in rows] == [
            ([step, 9], 0.5 + step) for step in range(10)
        ]
        assert [step for step, extra in enumerate(took) if extra] == [1, 3, 5, 7]  # none after the last step
        found = resume.newest(keeper.folder)
        assert found is not None
        assert resume.steps_of(found) == 8

    def test_the_history_of_a_step_is_on_disk_before_the_checkpoint_that_has_it_behind_it(self, tmp_path):
        keeper, written = self.keeper(tmp_path / "run", every=4), []
        path = tmp_path / "run" / "samples-0.jsonl"
        keeper.save = lambda done: written.append(len(path.read_text().splitlines()))
        for step in range(10):
            keeper.after_step(step, [step], 0.5)
        assert written == [4, 8]

    def test_a_full_disk_costs_that_checkpoint_alone(self, tmp_path):
        keeper = self.keeper(tmp_path / "run")
        for step in (0, 1):
            keeper.after_step(step, [], 0.0)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        try:
            for step in (2, 3):
                keeper.after_step(step, [], 0.0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert [path.name for path in keeper.folder.iterdir()] == ["step-00000002"]  # no half one either
        note = json.loads((tmp_path / "run" / "rank-0.jsonl").read_text())
        assert note["kind"] == "checkpoint"
        assert note["says"].startswith("no checkpoint after 4 steps: rank 0: ")
        assert "training goes on" in note["says"]
        for step in (4, 5):
            keeper.after_step(step, [], 0.0)
        assert sorted(path.name for path in keeper.folder.iterdir()) == ["step-00000002", "step-00000006"]


class TestPlaces:
    def test_the_fault_follows_the_host_and_not_the_rank(self):
        config = dataclasses.replace(SMALL, ranks=3, fault="slow_forward", slow_rank=1)

        def slow(*hosts: str) -> list[bool]:
            return [acts(resume.on_host(config, rank, host), rank, 5) for rank, host in enumerate(hosts)]

        assert slow("host-0", "host-1", "host-2") == [False, True, False]
        assert slow("host-1", "host-2", "host-0") == [True, False, False]
        assert slow("host-0", "host-2", "host-3") == [False, False, False]
        assert slow("", "", "") == [False, True, False]

    def test_a_half_line_of_a_killed_writer_spoils_no_other(self, tmp_path):
        path = tmp_path / "rank-0.jsonl"
        path.write_text('{"step":0}\n{"st')
        for _ in range(2):
            resume.begin_line(path)
        Stream(path).write({"step": 1})
        assert path.read_text().splitlines() == ['{"step":0}', '{"st', '{"step":1}']
        resume.begin_line(tmp_path / "absent")
        assert not (tmp_path / "absent").exists()

    def settle(self, out: Path, *words: str, world: int = 2) -> Config:
        import argparse

        from mlsyslab.options import add_arguments

        parser = argparse.ArgumentParser()
        parser.add_argument("--preset")
        add_arguments(parser, Config)
        arguments = parser.parse_args(words)
        arguments.out = out
        return resume.settle(arguments, RankContext(rank=0, world=world))

    def test_a_second_start_takes_the_settings_of_the_first(self, run_dir):
        given = self.settle(run_dir, "--preset", "quick", "--steps", "12")
        assert given.steps == 12
        assert self.settle(run_dir) == given
        assert self.settle(run_dir, "--preset", "quick", "--steps", "12") == given

    def test_other_settings_on_the_same_folder_are_refused(self, run_dir):
        create_run("straggler", SMALL, out=run_dir, truth=[], expected=1)
        with pytest.raises(RunError, match="holds a run with other settings; choose a new folder"):
            self.settle(run_dir, "--steps", "31")
        with pytest.raises(RunError, match="a run of 2 ranks and 3 were started; start as many as it has"):
            self.settle(run_dir, world=3)


def write_steps(path: Path, attempt: int, steps: range, own_s: list[float], *, clock_s: float = 0.0) -> None:
    """Records of a synchronous job whose ranks work `own_s` and wait for the slowest; steps follow each other."""
    for rank, mine in enumerate(own_s):
        lines, samples = Stream(path / f"rank-{rank}.jsonl"), Stream(path / f"samples-{rank}.jsonl")
        for step in steps:
            laps = {**dict.fromkeys(PHASES, 0.0), "backward_s": mine, "sync_s": max(own_s) - mine + 0.01}
            total_s = sum(laps.values())
            record = StepRecord(
                rank=rank, step=step, world=2, warmup=False, **laps, step_s=total_s, loss=rank + step
            )
            ended_s = clock_s + (step - steps[0] + 1) * total_s
            lines.write({**record.to_json(), "attempt": attempt, "time_s": ended_s})
            seen = {"rank": rank, "step": step, "attempt": attempt, "loss": rank + step + 10.0 * attempt}
            samples.write({**seen, "indices": [100 * attempt + rank]})
    hosts = ["host-0", "host-1" if attempt == 0 else "host-2"]
    said = [{"host": host, "pid": 1, "parent": 1, "first": steps[0]} for host in hosts]
    Stream(path / "attempts.jsonl").write({"attempt": attempt, "first": steps[0], "ranks": said})


class TestRecovery:
    @pytest.fixture
    def interrupted(self, run_dir) -> Recovery:
        """Slow for 12 steps of 0.21 s, 5 s of nothing, then from step 10 on 0.11 s a step."""
        create_run("straggler", dataclasses.replace(SMALL, steps=20), out=run_dir, truth=[], expected=40)
        write_steps(run_dir, 0, range(12), [0.1, 0.2])
        write_steps(run_dir, 1, range(10, 20), [0.1, 0.1], clock_s=12 * 0.21 + 5)
        Interventions(named=Named(rank=1, host="host-1", step=9)).write(run_dir)
        return recovery_of(open_run(run_dir))

    def test_promise_gain_and_loss_of_time(self, interrupted):
        assert interrupted.step_before_s == pytest.approx(0.21)
        assert interrupted.step_after_s == pytest.approx(0.11)
        assert interrupted.gain_frac == pytest.approx(1 - 0.11 / 0.21)
        assert interrupted.promised_frac == pytest.approx(interrupted.gain_frac)
        assert interrupted.down_s == pytest.approx(5)
        assert interrupted.lost_steps == 2
        assert interrupted.resumed_steps == (10,)
        assert interrupted.cordoned == "host-1"
        assert interrupted.hosts == (("host-0", "host-1"), ("host-0", "host-2"))
        assert str(interrupted) == (
            "named rank 1 on host-1 in step 9; 5.0 s down, 2 steps done again; "
            "step 210 ms before, 110 ms after: 48% gained, 48% promised"
        )

    def test_of_a_step_done_twice_the_last_counts(self, interrupted):
        assert list(interrupted.samples) == list(range(20))
        assert interrupted.samples[9] == (0, 1)
        assert interrupted.samples[10] == (100, 101)
        assert (interrupted.losses[9], interrupted.losses[11]) == (9.5, 21.5)

    def test_what_is_not_there_is_none(self, run_dir):
        create_run("straggler", dataclasses.replace(SMALL, steps=20), out=run_dir, truth=[], expected=40)
        write_steps(run_dir, 0, range(20), [0.1, 0.1])
        nothing = recovery_of(open_run(run_dir))
        assert (nothing.named, nothing.cordoned, nothing.killed) == (None, "", "")
        assert (nothing.step_before_s, nothing.step_after_s, nothing.gain_frac, nothing.promised_frac) == (
            None,
        ) * 4
        assert (nothing.down_s, nothing.lost_steps, nothing.checkpoint_s) == (0, 0, None)
        assert str(nothing) == "undisturbed"

    def test_a_run_that_was_not_elastic_is_refused(self, run_dir):
        create_run("straggler", SMALL, out=run_dir, truth=[], expected=1)
        with pytest.raises(RunError, match=r"no steps of an elastic job; make one with recover"):
            recovery_of(open_run(run_dir))

    def test_the_seconds_of_a_checkpoint_belong_to_no_step(self, interrupted):
        path = interrupted.run.path / "rank-0.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            if row["step"] == 4:
                took = {name: row[name] + 3.0 for name in ("other_s", "own_s", "step_s")}
                row.update(took, checkpoint_s=3.0)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        again = recovery_of(open_run(interrupted.run.path))
        assert again.step_before_s == pytest.approx(interrupted.step_before_s)
        assert again.promised_frac == pytest.approx(interrupted.promised_frac)
        assert again.checkpoint_s == pytest.approx(3.0)


class Log:
    """A detector that keeps what it is fed, and names rank 0 in step 3."""

    def __init__(self) -> None:
        self.fed: list[tuple[int, int]] = []

    def feed(self, record):
        self.fed.append((record["step"], record["rank"]))
        return SimpleNamespace(rank=0, step=3) if record["step"] == 3 else None


class TestLookout:
    def test_each_attempt_has_a_detector_of_its_own_fed_in_order(self, run_dir):
        create_run("straggler", SMALL, out=run_dir, truth=[], expected=1)
        made: list[Log] = []

        def new() -> Log:
            made.append(Log())
            return made[-1]

        lookout = Lookout(open_run(run_dir), new)
        assert lookout.look() is None
        write_steps(run_dir, 0, range(3), [0.1, 0.2])
        write_steps(run_dir, 1, range(1, 3), [0.1, 0.1])
        assert lookout.look() is None
        assert [log.fed for log in made] == [
            [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)],
            [(1, 0), (1, 1), (2, 0), (2, 1)],
        ]
        assert lookout.where(1)["host"] == "host-2"

    def test_it_says_who_is_slow(self, run_dir):
        create_run("straggler", SMALL, out=run_dir, truth=[], expected=1)
        write_steps(run_dir, 0, range(5), [0.1, 0.2])
        verdict = Lookout(open_run(run_dir), Log).look()
        assert verdict is not None
        assert (verdict.rank, verdict.step) == (0, 3)

    def test_what_a_restart_would_not_mend_ends_the_job_with_its_own_sentence(self, run_dir):
        create_run("straggler", SMALL, out=run_dir, truth=[], expected=1)
        Stream(run_dir / "errors.jsonl").write({"kind": "error", "says": "workers=-1 is below 0; choose 0"})
        with pytest.raises(RunError, match=r"^workers=-1 is below 0; choose 0$"):
            Lookout(open_run(run_dir), Log).look()


class TestArguments:
    @pytest.mark.parametrize(
        ("given", "says"),
        [
            ({"every": 0}, "every=0 is below 1"),
            ({"kill": "rack"}, "kill='rack' is not one of rank, host"),
            ({"kill_at": 30}, r"kill_at=30 is outside 0..29"),
        ],
    )
    def test_what_cannot_be_is_said_before_anything_starts(self, run_dir, given, says):
        with pytest.raises(ConfigError, match=says):
            recover(SMALL, out=run_dir, **given)
        assert not run_dir.exists()

    def test_a_used_folder_is_refused(self, run_dir):
        run_dir.mkdir()
        (run_dir / "mine").touch()
        with pytest.raises(RunError, match="is not empty; choose a new folder"):
            recover(SMALL, out=run_dir)


class Played:
    """Hosts without processes; `start` keeps the names."""

    def __init__(self, code: int) -> None:
        self.all = [
            SimpleNamespace(name="host-1", ended=True, asked_to_end=False, code=code, error="rank 0 failed")
        ]
        self.started: list[str] = []

    def start(self, name: str) -> None:
        self.started.append(name)


class TestCare:
    def job(self, out: Path, *, spare: bool) -> Elastic:
        create_run("straggler", SMALL, out=out, truth=[], expected=1)
        return Elastic(SMALL, out, spare=spare, every=5, new_detector=Log)

    def test_a_lost_host_is_replaced_once(self, run_dir):
        job, hosts = self.job(run_dir, spare=True), Played(code=-9)
        for _ in range(2):
            job.care(hosts)
        assert hosts.started == ["host-2"]
        assert not job.watching  # a second verdict would find no spare
        assert job.status["message"] == "host-1 was lost, host-2 takes its place"

    def test_without_a_spare_a_lost_host_ends_the_job(self, run_dir):
        says = r"host-1 was lost \(its launcher was killed by signal 9\) and there is no spare host; give spare=True"
        with pytest.raises(RunError, match=says):
            self.job(run_dir, spare=False).care(Played(code=-9))

    def test_a_host_that_gave_up_is_not_replaced(self, run_dir):
        with pytest.raises(RunError, match="host-1 gave up before the last step: rank 0 failed"):
            self.job(run_dir, spare=True).care(Played(code=1))

    def test_one_that_is_done_is_left_alone(self, run_dir):
        hosts = Played(code=0)
        self.job(run_dir, spare=True).care(hosts)
        assert hosts.started == []


# ---- real jobs


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Recovery:
    """The job that nothing happens to."""
    return recover(SMALL, out=tmp_path_factory.mktemp("whole") / "run", detector=Nobody, every=5)


def same_history(recovery: Recovery, whole: Recovery) -> None:
    """The same samples in every step, and the same losses within rounding."""
    assert recovery.samples == whole.samples
    assert recovery.losses == pytest.approx(whole.losses, rel=1e-5)


@pytest.mark.ranks
class TestJobs:
    def test_undisturbed_it_sees_what_its_sampler_deals(self, undisturbed):
        dealt = [
            list(
                StepSampler(SMALL.images, SMALL.batch_size, SMALL.steps, rank=rank, world=2, seed=SMALL.seed)
            )
            for rank in range(2)
        ]
        assert list(undisturbed.samples.values()) == [tuple(a + b) for a, b in zip(*dealt, strict=True)]
        epoch = [index for step in range(16) for index in undisturbed.samples[step]]
        assert sorted(epoch) == list(range(64))  # none twice, none skipped
        assert undisturbed.lost_steps == 0
        assert undisturbed.hosts == (("host-0", "host-1"),)
        assert open_run(undisturbed.run.path).status["state"] == "done"
        assert undisturbed.losses[29] < undisturbed.losses[0]  # it learns, so that losses can differ

    @pytest.mark.parametrize("kill", ["rank", "host"])
    def test_kill_9_changes_nothing_in_the_history(self, undisturbed, run_dir, kill):
        got = recover(SMALL, out=run_dir, detector=Nobody, every=5, kill_at=12, kill=kill)
        same_history(got, undisturbed)
        assert len(got.hosts) == 2
        assert set(got.hosts[1]) == ({"host-0", "host-1"} if kill == "rank" else {"host-0", "host-2"})
        assert got.resumed_steps[0] >= 10
        assert got.resumed_steps[0] % 5 == 0
        assert got.down_s > 0
        assert "host-1" in got.killed

    def test_the_slow_ranks_host_is_cordoned_and_the_promised_gain_comes(self, undisturbed, run_dir):
        slow = dataclasses.replace(SMALL, fault="slow_backward")
        got = recover(slow, out=run_dir, every=5)
        assert got.named is not None
        assert (got.named.rank, got.named.host) == (1, "host-1")
        assert set(got.hosts[-1]) == {"host-0", "host-2"}
        same_history(got, undisturbed)
        assert got.gain_frac is not None
        assert got.promised_frac is not None
        assert 0.2 < got.gain_frac < 0.9
        assert 0.2 < got.promised_frac < 0.9
        assert open_run(run_dir).truth[0]["rank"] == 1
        assert recovery_of(open_run(run_dir)).named == got.named

    def test_without_a_spare_the_job_ends_with_the_name_and_a_remedy(self, run_dir):
        with pytest.raises(
            RunError, match=r"rank 0 on host-0 is slow \(seen in step 3\) and there is no spare host"
        ):
            recover(SMALL, out=run_dir, spare=False, detector=lambda ranks: Log())
        assert open_run(run_dir).status["state"] == "failed"

    def test_a_time_limit_ends_it(self, run_dir):
        with pytest.raises(RunError, match=r"did not finish within 0.1 s and was stopped; raise timeout_s"):
            recover(SMALL, out=run_dir, timeout_s=0.1)

    @pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
    def test_nobody_outlives_the_caller(self, run_dir, how):
        caller = subprocess.Popen(
            [sys.executable, TESTS / "straggler_ranks.py", run_dir],
            start_new_session=True,
            stderr=subprocess.DEVNULL,
        )
        started = wait_for(run_dir / "samples-0.jsonl", caller)
        family = psutil.Process(caller.pid).children(recursive=True)
        assert started
        assert len(family) >= 8  # warm server, rendezvous, two launchers, two ranks, two loader workers
        os.kill(caller.pid, how)  # the caller alone; a terminal's Ctrl-C reaches the others too
        caller.wait(30)
        _, alive = psutil.wait_procs(family, timeout=10)
        assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
        if how == signal.SIGINT:
            assert open_run(run_dir).status["state"] == "stopped"


def wait_for(path: Path, caller: subprocess.Popen[bytes], within_s: float = 120.0) -> bool:
    """Whether `path` comes to be while `caller` lives."""
    until = time.monotonic() + within_s
    while time.monotonic() < until and caller.poll() is None and not path.exists():
        time.sleep(0.02)
    return path.exists()


@pytest.mark.ranks
def test_under_a_plain_torchrun_a_job_that_was_lost_as_a_whole_goes_on_when_it_is_started_again(run_dir):
    words = ["--nnodes", "1", "--nproc-per-node", "2", "--max-restarts", "1", "--rdzv-backend", "c10d"]
    words += ["--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", "--log-dir", str(run_dir.parent)]
    job = ["--out", str(run_dir), "--preset", "quick", "--steps", "20", "--warmup", "1", "--images", "64"]
    module = ["-m", "mlsyslab.labs.straggler.elastic_worker", *job, "--every", "4"]
    command = [sys.executable, "-m", "torch.distributed.run", *words, *module]
    environment = {**os.environ, **launch.ONE_THREAD, "GLOO_SOCKET_IFNAME": "lo"}
    launcher = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    assert wait_for(run_dir / "checkpoints" / "step-00000004", launcher)
    ranks = psutil.Process(launcher.pid).children(recursive=True)
    launcher.kill()
    launcher.wait()
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-2000:]
    got = recovery_of(open_run(run_dir))
    assert list(got.losses) == list(got.samples) == list(range(20))
    assert got.resumed_steps[0] >= 4
    assert open_run(run_dir).status["state"] == "done"
