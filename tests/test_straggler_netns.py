"""A link that is really slow: the ranks in network namespaces, what they fall back to, and that nothing stays behind."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlsyslab import launch, netns, straggler
from mlsyslab.contract import RunError
from mlsyslab.labs.straggler import links
from mlsyslab.labs.straggler.config import Config, acts
from mlsyslab.ranks import RankContext
from mlsyslab.runs import Run

SMALL: dict[str, Any] = {
    "ranks": 3,
    "fault": "slow_link",
    "slow_rank": 1,
    "steps": 16,
    "warmup": 3,
    "images": 200,
}
ALLOWED = """ip link add bridge type bridge && ip link add veth type veth peer name port master bridge &&
tc qdisc add dev veth root tbf rate 1gbit burst 16kb limit 1mb"""


def why_not() -> str:
    """Why this machine does not let the ranks have networks of their own; empty where it does."""
    if not all(map(shutil.which, ("ip", "tc", "unshare"))):
        return "ip, tc or unshare is missing"
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", ALLOWED], capture_output=True, text=True, check=False
    )
    return done.stderr.strip() or ("unshare failed" if done.returncode else "")


REFUSED = why_not()
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are of Linux")
real = [pytest.mark.ranks, pytest.mark.skipif(bool(REFUSED), reason=f"no network namespaces here: {REFUSED}")]


def networks() -> tuple[set[str], set[str]]:
    """The network namespaces of this session's processes, and what ours would be called outside of them."""
    session, inside = os.environ["MLSYSLAB_TEST_SESSION"].encode(), set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is not ours to read
            if session in (process / "environ").read_bytes() or process.name == str(os.getpid()):
                inside.add(str((process / "ns/net").readlink()))
    interfaces = {
        name for name in os.listdir("/sys/class/net") if re.fullmatch(r"link0|bridge|port\d+", name)
    }
    return inside, interfaces | set(map(str, Path("/run/netns").glob("*")))


@pytest.fixture
def nothing_left(no_orphans: None) -> Iterator[None]:
    before = networks()
    yield
    deadline = time.monotonic() + 3
    while networks() != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert networks() == before


def headers(run: Run) -> list[dict[str, Any]]:
    return [note for note in run.notes if note.get("kind") == "header"]


def begun(path: Path) -> bool:
    """Whether every rank has recorded a step."""
    files = list(path.glob("rank-*.jsonl"))
    return len(files) == SMALL["ranks"] and all('"step_s"' in file.read_text() for file in files)


def wait_for_steps(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not begun(path):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return straggler.measure(Config(**SMALL), out=tmp_path_factory.mktemp("netns") / "run", timeout_s=150)


class TestReal:
    pytestmark = real

    def test_the_rank_whose_link_is_shaped_is_named(self, shaped: Run, tmp_path: Path) -> None:
        assert {note["link"] for note in headers(shaped)} == {netns.Link.how}
        verdict = straggler.diagnose(shaped)
        if (
            verdict.cause != "communication"
        ):  # others used the cores, and starved a loader as well; twice is no accident
            shaped = straggler.measure(Config(**SMALL), out=tmp_path / "again", timeout_s=150)
            verdict = straggler.diagnose(shaped)
        if verdict.cause == "unknown" and "overloaded" in verdict.reason:
            pytest.skip("the machine is too busy for a verdict")
        assert (verdict.cause, verdict.where) == ("communication", "rank 1")
        sends = {note["rank"]: note["send_s"] for note in shaped.notes if note.get("kind") == "link"}
        assert max(sends, key=lambda rank: sends[rank]) == 1

    def test_the_link_is_slow_in_the_steps_of_the_fault_alone(
        self, tmp_path: Path, nothing_left: None
    ) -> None:
        config = Config(**{**SMALL, "pattern": "intermittent", "steps": 24})
        frame = straggler.measure(config, out=tmp_path / "run", timeout_s=150).records
        exchange_s = frame[~frame["warmup"]].groupby("step")["sync_s"].min()
        on = exchange_s.index.map(lambda step: acts(config, 1, step)).to_numpy(bool)
        assert on.any()
        assert not on.all()
        assert exchange_s[on].median() > 3 * exchange_s[~on].median()

    def test_a_rank_counts_the_bytes_of_its_own_network(self, shaped: Run) -> None:
        sent = shaped.telemetry.groupby("rank")["net_bytes_per_s"].mean()
        assert 0 < sent.max() < 1.5 * sent.min()  # rank 0 does not count what passes through the bridge

    def test_traffic_control_is_no_loader_worker(self, shaped: Run) -> None:
        assert shaped.telemetry["workers"].max() == shaped.config.workers

    def test_a_killed_caller_leaves_no_network(self, tmp_path: Path, nothing_left: None) -> None:
        code = (
            "import sys; from mlsyslab import straggler; from mlsyslab.labs.straggler.config import Config\n"
            f"straggler.measure(Config(**{ {**SMALL, 'steps': 500} }), out=sys.argv[1])"
        )
        caller = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")])
        wait_for_steps(tmp_path / "run")
        assert len(networks()[0]) == 1 + SMALL["ranks"]
        caller.send_signal(signal.SIGKILL)
        caller.wait()

    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_killed_rank_leaves_no_network(self, rank: int, tmp_path: Path, nothing_left: None) -> None:
        run = straggler.start(Config(**{**SMALL, "steps": 500}), out=tmp_path / "run")
        wait_for_steps(tmp_path / "run")
        run.poll()
        os.kill(next(note["pid"] for note in headers(run) if note["rank"] == rank), signal.SIGKILL)
        with pytest.raises(RunError, match=f"rank {rank} was killed"):
            run.wait(60)


@pytest.mark.ranks
def test_where_one_rank_may_not_leave_all_delay_their_sends(
    tmp_path: Path, nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = sys.modules["mlsyslab.labs.straggler.measure"]  # the lab binds the function by this name
    monkeypatch.setattr(measure, "WORKER", "straggler_ranks:rank_1_may_not_leave_the_network")
    run = straggler.measure(Config(**SMALL), out=tmp_path / "run", timeout_s=150)
    assert [note["link"] for note in headers(run)] == [links.Link.how] * 3
    assert all(note["no_veth"] for note in headers(run))
    verdict = straggler.diagnose(run)
    assert verdict.where == "rank 1" or "overloaded" in verdict.reason


@pytest.mark.ranks
@pytest.mark.skipif(bool(REFUSED), reason=f"no network namespaces here: {REFUSED}")
def test_rank_0_that_keeps_the_bridge_leaves_last() -> None:
    """Two ranks that still wait for each other when rank 0 has finished."""
    assert launch.call("rank_workers:exchange_without_rank_0", {}, ranks=3, timeout_s=40) == [0.0, 3.0, 3.0]


def test_ranks_that_torchrun_started_stay_in_their_network() -> None:
    before = os.readlink(netns.OWN)
    assert "one caller" in netns.enter(RankContext(world=2, init="env://"), timeout_s=1)
    assert os.readlink(netns.OWN) == before


@pytest.fixture
def stubborn_tc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `tc` that refuses the second line."""
    tool = tmp_path / "tc"
    tool.write_text(
        "#!/bin/sh\nread a; read b; echo 'Error: no such qdisc.' >&2; echo 'Command failed -:2' >&2; exit 1\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


def test_a_refused_line_is_one_clear_error(stubborn_tc: None) -> None:
    with pytest.raises(RunError, match=r"^`tc qdisc two` failed: Error: no such qdisc\.$"):
        netns.command("tc", "qdisc one", "qdisc two")


def test_a_tool_that_is_missing_is_one_clear_error() -> None:
    with pytest.raises(RunError, match=r"^cannot run no-such-tool: .*; install iproute2$"):
        netns.command("no-such-tool", "link show")


def test_a_change_of_the_link_that_is_refused_is_told_once(stubborn_tc: None) -> None:
    link = netns.Link(1e6)
    link.slow = True
    link.slow = False
    with pytest.raises(RunError, match=rf"^`tc {netns.UNSHAPE}` failed: Error: no such qdisc\.$"):
        link.close()
    link.close()


def test_a_later_change_tells_of_an_earlier_one_that_was_refused(stubborn_tc: None) -> None:
    link = netns.Link(1e6)
    link.slow = True
    link.slow = False
    assert link._tc is not None
    link._tc.wait(5)
    with pytest.raises(RunError, match="failed: Error: no such qdisc"):
        link.slow = True


def test_the_link_is_told_only_what_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "tc"
    tool.write_text(f"#!/bin/sh\ncat > {tmp_path}/said\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    link = netns.Link(1e6)
    for wanted in (False, True, True, False, False, True):
        link.slow = wanted
    link.close()
    said = (tmp_path / "said").read_text().splitlines()
    assert said == [netns.shape(1e6), netns.UNSHAPE, netns.shape(1e6)]
    assert f"rate {8e6 * netns.WIRE:.0f}bit" in said[0]
