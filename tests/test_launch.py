"""Ranks are real processes: they start warm, fail with their name, and never outlive their caller."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from mlsyslab import launch
from mlsyslab.contract import RunError
from mlsyslab.failures import explain_failure
from mlsyslab.ranks import rank_context
from mlsyslab.runs import Run

TESTS = Path(__file__).parent


def gone(pid: int, within_s: float = 10.0) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def pids_in(out: Path, ranks: int = 2, within_s: float = 60.0) -> list[int]:
    """The ranks and their children, once all have said who they are."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        texts = [path.read_text().split() for path in out.glob("pids-*")]
        if len(texts) == ranks and all(len(text) == 2 for text in texts):
            return [int(pid) for text in texts for pid in text]
        time.sleep(0.05)
    raise AssertionError(f"ranks did not start: {[p.name for p in out.iterdir()]}")


@pytest.mark.ranks
class TestRanks:
    @pytest.mark.parametrize("world", [1, 2, 4])
    def test_each_rank_returns_its_result_in_the_order_of_ranks(self, world):
        results = launch.call("rank_workers:add_up", {"x": 7}, ranks=world)
        assert [r["rank"] for r in results] == list(range(world))
        assert {r["sum"] for r in results} == {world * (world + 1) / 2}
        assert len({r["pid"] for r in results}) == world
        assert results[0]["given"] == {"x": 7}
        assert results[0]["threads"] == 1

    def test_ranks_of_two_calls_fork_from_the_same_warm_server(self):
        launch.call("rank_workers:add_up", {})
        server = launch.warm_up().process.pid
        launch.call("rank_workers:add_up", {})
        assert launch.warm_up().process.pid == server

    def test_the_warm_server_has_one_thread_so_that_forking_is_safe(self):
        launch.call("rank_workers:add_up", {})
        assert psutil.Process(launch.warm_up().process.pid).num_threads() == 1

    def test_an_exception_names_the_rank_what_it_raised_and_its_last_lines(self):
        with pytest.raises(
            RunError, match=r"rank 1 failed: ValueError: bad luck; last lines: .*about to fail"
        ):
            launch.call("rank_workers:raise_in", {"rank": 1}, ranks=3)

    def test_the_first_failure_ends_the_others_long_before_they_would_end(self):
        began = time.monotonic()
        with pytest.raises(RunError):
            launch.call("rank_workers:raise_in", {"rank": 0}, ranks=2)
        assert time.monotonic() - began < 20  # the other rank sleeps for 60 s

    def test_a_lab_error_is_passed_on_as_its_own_sentence(self):
        with pytest.raises(RunError) as caught:
            launch.call("rank_workers:config_error", {}, ranks=2)
        assert str(caught.value) == "workers=-1 is below 0; choose 0 or more"

    @pytest.mark.parametrize("absent", [[2], [0, 1]])
    def test_a_hung_collective_names_the_ranks_that_did_not_arrive(self, absent):
        with pytest.raises(RunError, match=rf"timed out: rank {', '.join(map(str, absent))} did not arrive"):
            launch.call("rank_workers:never_arrives", {"absent": absent}, ranks=4)

    def test_a_stopped_rank_is_named_and_does_not_survive(self):
        with pytest.raises(RunError, match="rank 1 did not arrive"):
            launch.call("rank_workers:stops_itself", {}, ranks=2)

    @pytest.mark.parametrize("rank", [0, 2])
    def test_a_killed_rank_is_named_not_its_victims(self, rank):
        with pytest.raises(RunError, match=rf"rank {rank} was killed by SIGKILL"):
            launch.call("rank_workers:killed", {"rank": rank}, ranks=3)

    def test_an_abort_is_named_with_its_signal(self):
        with pytest.raises(RunError, match="killed by SIGABRT"):
            launch.call("rank_workers:abort", {})

    def test_a_worker_that_does_not_exist_is_an_error_with_its_name(self):
        with pytest.raises(RunError, match="no_such_module"):
            launch.call("no_such_module:f", {})

    def test_a_time_limit_stops_the_ranks(self, tmp_path):
        ranks = launch.Ranks("rank_workers:sleep", {}, tmp_path, 2)
        pids = pids_in(tmp_path)
        with pytest.raises(RunError, match="did not finish within"):
            ranks.wait(0.2)
        assert all(gone(pid) for pid in pids)

    def test_stop_ends_ranks_and_their_children(self, tmp_path):
        job = launch.start("rank_workers:sleep", {}, tmp_path, (2,), device="test-stop", what="test")
        pids = pids_in(tmp_path)
        job.stop()
        job.wait(20)
        assert Run(tmp_path).status["state"] == "stopped"
        assert all(gone(pid) for pid in pids)

    def test_sigint_ends_ranks_quietly(self, tmp_path):
        job = launch.start("rank_workers:sleep", {}, tmp_path, (2,), device="test-int", what="test")
        pids = pids_in(tmp_path)
        for rank in (0, 1):
            os.kill(int((tmp_path / f"pids-{rank}").read_text().split()[0]), signal.SIGINT)
        job.wait(20)
        assert Run(tmp_path).status["state"] == "stopped"
        assert "Traceback" not in (tmp_path / "rank-0.log").read_text()
        assert all(gone(pid) for pid in pids)

    def test_when_the_server_is_killed_no_rank_survives_and_the_run_fails_with_a_message(self, tmp_path):
        job = launch.start("rank_workers:sleep", {}, tmp_path, (2,), device="test-server", what="test")
        pids = pids_in(tmp_path)
        os.kill(launch.warm_up().process.pid, signal.SIGKILL)
        job.wait(20)
        assert Run(tmp_path).status["state"] == "failed"
        assert "rank server ended" in Run(tmp_path).status["error"]
        assert all(gone(pid) for pid in pids)
        assert launch.call("rank_workers:add_up", {})[0]["rank"] == 0  # the next run has a new server


@pytest.mark.ranks
class TestCallers:
    def start_kernel(self, out: Path) -> subprocess.Popen[str]:
        """A process that plays the notebook kernel, in a process group of its own, as Jupyter starts one."""
        process = subprocess.Popen(
            [sys.executable, TESTS / "rank_workers.py", out],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "started"
        return process

    @pytest.mark.parametrize("how", ["kill -9", "kernel restart (the group is killed)"])
    def test_no_rank_survives_its_kernel(self, tmp_path, how):
        kernel = self.start_kernel(tmp_path)
        pids = pids_in(tmp_path)
        server = psutil.Process(pids[0]).ppid()
        (os.kill if how == "kill -9" else os.killpg)(kernel.pid, signal.SIGKILL)
        kernel.wait()
        assert all(gone(pid) for pid in [*pids, server])
        assert Run(tmp_path).status["state"] == "interrupted"

    def test_ranks_belong_to_the_kernels_process_group(self, tmp_path):
        kernel = self.start_kernel(tmp_path)
        try:
            assert {os.getpgid(pid) for pid in pids_in(tmp_path)} == {kernel.pid}
        finally:
            os.killpg(kernel.pid, signal.SIGKILL)
            kernel.wait()

    def test_a_script_without_a_main_guard_is_not_run_again_in_the_ranks_and_imports_no_torch(self, tmp_path):
        script = tmp_path / "script.py"
        script.write_text(
            textwrap.dedent(f"""
            import sys
            sys.path.insert(0, {str(TESTS)!r})
            print("script runs", flush=True)
            from mlsyslab import launch
            print(launch.call("rank_workers:add_up", {{}}, ranks=2)[1]["sum"], "torch" in sys.modules)
            """)
        )
        done = subprocess.run(
            [sys.executable, script], capture_output=True, text=True, timeout=120, check=True
        )
        assert done.stdout.split("\n")[:2] == ["script runs", "3.0 False"]


class TestExplainFailure:
    def exit(self, rank: int, message: str = "", code: int = 1, ours: bool = False, **flags: object) -> dict:
        error = {
            "type": "RuntimeError",
            "message": message,
            "for_people": False,
            "timeout": False,
            "peer_lost": False,
        }
        said = {**error, "time_s": 1.0 + rank, **flags} if message else {}
        return {"rank": rank, "code": code, "ours": ours, "error": said}

    def test_a_lost_peer_is_a_consequence_not_the_cause(self, tmp_path):
        exits = [
            self.exit(0, "Connection closed by peer", peer_lost=True, time_s=0.5),
            self.exit(1, "bad luck"),
        ]
        assert explain_failure(tmp_path, exits).startswith("rank 1 failed")

    def test_the_earliest_of_two_real_errors_is_named(self, tmp_path):
        exits = [self.exit(0, "second", time_s=9.0), self.exit(1, "first", time_s=3.0)]
        assert "rank 1 failed: RuntimeError: first" in explain_failure(tmp_path, exits)

    def test_a_rank_that_we_killed_is_not_the_cause(self, tmp_path):
        exits = [self.exit(1, "bad luck"), self.exit(0, code=-9, ours=True)]
        assert explain_failure(tmp_path, exits).startswith("rank 1 failed")

    def test_a_bus_error_is_explained_by_shared_memory(self, tmp_path):
        assert "/dev/shm" in explain_failure(tmp_path, [self.exit(0, code=-7)])

    def test_nccls_watchdog_ends_those_who_waited_so_the_others_are_named(self, tmp_path):
        for rank in (0, 2):
            (tmp_path / f"rank-{rank}.log").write_text(
                "[E] Watchdog caught collective operation timeout: WorkNCCL\n"
            )
        exits = [self.exit(0, code=-6), self.exit(2, code=-6), self.exit(1, code=-9, ours=True)]
        assert "rank 1 did not arrive" in explain_failure(tmp_path, exits)

    def test_without_any_error_the_exit_codes_are_told(self, tmp_path):
        assert "rank 0 exit 3" in explain_failure(tmp_path, [self.exit(0, code=3)])


class TestRankContext:
    def test_alone_without_a_launcher(self):
        assert rank_context({}).world == 1

    def test_torchrun_on_two_nodes(self):
        env = {
            "RANK": "5",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "4",
            "MASTER_ADDR": "a",
            "MASTER_PORT": "1",
        }
        found = rank_context(env)
        assert (found.rank, found.world, found.local_rank, found.local_world, found.init) == (
            5,
            8,
            1,
            4,
            "env://",
        )

    def test_slurm(self):
        env = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "2"}
        found = rank_context({**env, "MASTER_ADDR": "a", "MASTER_PORT": "1"})
        assert (found.rank, found.world, found.local_rank, found.local_world) == (3, 4, 1, 2)

    def test_slurm_without_tasks_per_node_on_the_command_line(self):
        env = {
            "SLURM_PROCID": "3",
            "SLURM_NTASKS": "4",
            "SLURM_LOCALID": "1",
            "SLURM_TASKS_PER_NODE": "2(x2)",
        }
        assert rank_context({**env, "MASTER_ADDR": "a", "MASTER_PORT": "1"}).local_world == 2

    def test_several_ranks_without_an_address_are_told_what_to_export(self):
        with pytest.raises(RunError, match="MASTER_ADDR and MASTER_PORT"):
            rank_context({"RANK": "0", "WORLD_SIZE": "2"})


def test_a_kernel_that_forks_does_not_share_its_server():
    """A forked child (old multiprocessing) must not talk into its parent's pipe."""
    first = launch.warm_up()
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, b"1" if not first.usable else b"0")
        os._exit(0)
    os.wait()
    assert os.read(read, 1) == b"1"


@pytest.mark.ranks
def test_jobs_from_several_threads_do_not_mix_their_results():
    seen: dict[int, list[dict]] = {}

    def work(k: int) -> None:
        seen[k] = launch.call("rank_workers:add_up", {"k": k}, ranks=2)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {k: [r["given"]["k"] for r in results] for k, results in seen.items()} == {
        k: [k, k] for k in range(3)
    }
