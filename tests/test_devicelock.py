"""Experiments queue for a device; a crash cannot jam the queue."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from mlsyslab.contract import RunError
from mlsyslab.devicelock import DeviceLock, Turn, queue_dir

HOLDER = """
import sys, time
from mlsyslab.devicelock import DeviceLock
lock = DeviceLock(sys.argv[1], "holder")
lock.acquire()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def own_queue(tmp_path, monkeypatch):
    monkeypatch.setenv("MLSYSLAB_LOCKS", str(tmp_path))


def hold() -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, "cpu"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "held"
    return process


def wait_in_thread(lock: DeviceLock, order: list[str], name: str, told: list[Turn]) -> threading.Thread:
    queued = threading.Event()

    def on_wait(turn: Turn) -> None:
        told.append(turn)
        queued.set()

    def work() -> None:
        if lock.acquire(on_wait):
            order.append(name)
            lock.release()

    thread = threading.Thread(target=work)
    thread.start()
    assert queued.wait(20)
    return thread


def test_a_free_device_is_had_at_once():
    lock = DeviceLock("cpu", "a")
    assert lock.acquire()
    assert lock.turn() == Turn(position=0, holder="")
    lock.release()
    lock.release()
    assert not list(queue_dir("cpu").glob("[0-9]*"))


def test_the_second_waits_and_learns_its_position_and_the_holder():
    holder = hold()
    told: list[Turn] = []
    cancel = threading.Event()

    def on_wait(turn: Turn) -> None:
        told.append(turn)
        cancel.set()

    assert not DeviceLock("cpu", "b").acquire(on_wait, cancel)
    holder.kill()
    holder.wait()
    assert told[0].position == 1
    assert f"process {holder.pid}, holder" in told[0].holder


def test_a_dead_holders_turn_is_over():
    holder = hold()
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    lock = DeviceLock("cpu", "b")
    assert lock.acquire()
    lock.release()


def test_turns_come_in_the_order_of_asking_and_positions_fall():
    first = DeviceLock("cpu", "first")
    first.acquire()
    order: list[str] = []
    told_b: list[Turn] = []
    told_c: list[Turn] = []
    b = wait_in_thread(DeviceLock("cpu", "b"), order, "b", told_b)
    c = wait_in_thread(DeviceLock("cpu", "c"), order, "c", told_c)
    first.release()
    b.join(20)
    c.join(20)
    assert order == ["b", "c"]
    assert told_c[0].position == 2
    assert told_b[0].position == 1


def test_one_who_gives_up_leaves_the_queue():
    first = DeviceLock("cpu", "first")
    first.acquire()
    cancel = threading.Event()
    cancel.set()
    assert not DeviceLock("cpu", "b").acquire(cancel=cancel)
    assert len(list(queue_dir("cpu").glob("[0-9]*"))) == 1
    first.release()


def test_two_devices_do_not_wait_for_each_other():
    first, other = DeviceLock("cuda:0", "a"), DeviceLock("cuda:1", "b")
    assert first.acquire()
    assert other.acquire()
    first.release()
    other.release()


def test_a_queue_that_cannot_be_written_is_one_clear_error(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("MLSYSLAB_LOCKS", str(blocked))
    with pytest.raises(RunError, match="MLSYSLAB_LOCKS"):
        DeviceLock("cpu", "a").acquire()
