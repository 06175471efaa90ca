"""The processes that disturb a rank: they act when told, rest when told, and end with whoever started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from mlsyslab import hardware
from mlsyslab.contract import RunError
from mlsyslab.labs.straggler.noise import NAME, Noise

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(sys.platform != "linux", reason="signals and /proc of Linux"),
]


def until(what: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if what():
            return True
        time.sleep(0.01)
    return False


def neighbours() -> list[psutil.Process]:
    found = [p for p in psutil.process_iter(["name", "status"]) if p.info["name"] == NAME]
    return [p for p in found if p.info["status"] != psutil.STATUS_ZOMBIE]  # ended, and not yet reaped by init


@pytest.fixture
def victim(no_orphans: None):
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield psutil.Process(process.pid)
    process.kill()
    process.wait()


def test_a_burner_stands_outside_the_tree_and_burns_only_when_told(no_orphans: None) -> None:
    before = set(neighbours())
    noise = Noise("burn", max(os.sched_getaffinity(0)))
    assert until(lambda: len(set(neighbours()) - before) == 1)
    (burner,) = set(neighbours()) - before
    assert burner not in psutil.Process().children(recursive=True)
    noise.act(True)
    assert until(lambda: burner.cpu_times().user > 0.3)
    assert burner.cpu_affinity() == [max(os.sched_getaffinity(0))]
    noise.act(False)
    time.sleep(0.2)
    rested = burner.cpu_times().user
    time.sleep(0.5)
    assert burner.cpu_times().user - rested < 0.1
    noise.act(True)
    noise.close()
    assert burner not in neighbours()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_a_rival_computes_on_the_device_once_it_is_ready_and_only_when_told(
    device: str, no_orphans: None
) -> None:
    if device != "cpu" and not hardware.cuda_usable():
        pytest.skip("no CUDA device here")
    before = set(neighbours())
    noise = Noise("compete", device, 0.015, 0.005)
    (rival,) = set(neighbours()) - before
    rested = rival.cpu_times().user
    time.sleep(0.3)
    assert rival.cpu_times().user - rested < 0.1
    noise.act(True)
    assert until(lambda: rival.cpu_times().user > rested + 0.3)
    noise.close()
    assert rival not in neighbours()


def test_a_rival_that_cannot_use_its_device_is_one_error(no_orphans: None) -> None:
    before = set(neighbours())
    with pytest.raises(RunError, match="could not use the device"):
        Noise("compete", "cuda:99", 0.015, 0.005)
    assert set(neighbours()) == before


def test_a_duty_cycle_stops_and_continues_and_lets_go_at_the_end(victim: psutil.Process) -> None:
    noise = Noise("duty", 0.02, 0.06, victim.pid)
    noise.act(True)
    assert until(lambda: victim.status() == psutil.STATUS_STOPPED)
    used, began = victim.cpu_times().user, time.monotonic()
    time.sleep(1.5)
    share = (victim.cpu_times().user - used) / (time.monotonic() - began)
    assert 0.02 < share < 0.6  # a quarter, if nobody else wants the core
    noise.close()
    assert until(lambda: victim.status() == psutil.STATUS_RUNNING)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_the_rank_that_started_it_and_continues_what_it_stopped(
    victim: psutil.Process, number: signal.Signals
) -> None:
    before = set(neighbours())
    code = (
        "import sys, time\nfrom mlsyslab.labs.straggler.noise import Noise\n"
        f"noise = Noise('duty', 0.01, 0.5, {victim.pid}); noise.act(True); print('up', flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    parent.stdout.readline()
    assert until(lambda: victim.status() == psutil.STATUS_STOPPED)
    parent.send_signal(number)
    parent.wait()
    assert until(lambda: not set(neighbours()) - before)
    assert until(lambda: victim.status() == psutil.STATUS_RUNNING)
