"""Ranks in network namespaces of their own, so that a link can really be slow. Linux, as root, with iproute2.

Each rank (or node of several) leaves the machine's network for a namespace with one interface; its other end is a port of a bridge in a
namespace that rank 0 keeps open. Nothing has a name outside: the kernel takes a namespace back, and every interface
in it, when its last process has ended, however it ended. So rank 0 leaves last (`leave_last`). Nobody else on the machine sees any of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta

from mlsyslab.contract import RunError
from mlsyslab.ranks import RankContext

CLONE_NEWNET = 0x40000000  # Linux include/uapi/linux/sched.h
OWN = "/proc/thread-self/ns/net"
INTERFACE = "link0"
BURST_S, LEAST_BURST_BYTES = 0.0005, 16 << 10  # may go out at once after a pause: little, but whole packets
WIRE = 1514 / 1448  # bytes of a full frame over those that it carries; the token bucket counts both
QUEUE_BYTES = 4 << 20  # more than the kernel lets a connection queue here, so the slow link drops nothing
UNSHAPE = f"qdisc del dev {INTERFACE} root"


def enter(context: RankContext, *, timeout_s: float) -> str:
    """Move every rank into a network namespace of its own, or none. Returns "" if they moved, else why they did not;
    the answer is the same on every rank.

    It moves the calling thread and what that starts afterwards, so call it before anything else runs. gloo then
    speaks through the new interface. Raises torch's DistStoreError when a rank does not come within `timeout_s`.
    """
    if sys.platform != "linux" or not context.init.startswith("file://"):
        return "it takes Linux, and ranks that one caller started on this machine"
    from torch.distributed import FileStore

    store = FileStore(context.init.removeprefix("file://") + "-links", context.world)
    store.set_timeout(timedelta(seconds=timeout_s))
    home = os.open(OWN, os.O_RDONLY)
    switch, said = None, str(os.getpid())
    try:
        if context.rank == 0:
            _system_call("unshare", CLONE_NEWNET)
            switch = os.open(OWN, os.O_RDONLY)  # stays open: it is what keeps the bridge
        _system_call("unshare", CLONE_NEWNET)
    except OSError as error:
        said = str(error.strerror)
    store.set(f"rank-{context.rank}", said)
    if context.rank == 0:
        each = [store.get(f"rank-{rank}").decode() for rank in range(context.world)]
        store.set("built", _try_to_build(f"/proc/{os.getpid()}/fd/{switch}", each))
    why = store.get("built").decode().removeprefix("yes")
    if not why:
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    else:
        with contextlib.suppress(OSError):  # who was not allowed to leave is still at home
            _system_call("setns", home, CLONE_NEWNET)
        if switch is not None:
            os.close(switch)
    os.close(home)
    return why


def enter_node(context: RankContext, *, nodes: int, bytes_per_s: float, timeout_s: float) -> str:
    """Move this rank into the network namespace of its node, which `world / nodes` neighbouring ranks share; what a node sends to
    another passes a token bucket of `bytes_per_s`. Returns how the link is made slow. Call it before anything else runs.

    Raises RunError, the same on every rank, where the machine does not allow it.
    """
    if sys.platform != "linux" or not context.init.startswith("file://"):
        raise RunError(
            "nodes above 1 take Linux, and ranks that one caller started on this machine; choose nodes=1"
        )
    from torch.distributed import FileStore

    store = FileStore(context.init.removeprefix("file://") + "-nodes", context.world)
    store.set_timeout(timedelta(seconds=timeout_s))
    per_node, switch = context.world // nodes, -1
    node, place = divmod(context.rank, per_node)
    if place == 0:
        said = str(os.getpid())
        try:
            if context.rank == 0:
                _system_call("unshare", CLONE_NEWNET)
                switch = os.open(OWN, os.O_RDONLY)  # stays open: it is what keeps the bridge
            _system_call("unshare", CLONE_NEWNET)
        except OSError as error:
            said = str(error.strerror)
        store.set(f"node-{node}", said)
    if context.rank == 0:
        each = [store.get(f"node-{at}").decode() for at in range(nodes)]
        store.set("built", _try_to_build(f"/proc/{os.getpid()}/fd/{switch}", each, shape(bytes_per_s)))
    why = store.get("built").decode().removeprefix("yes")
    if why:
        raise RunError(
            f"nodes={nodes} cannot be had here ({why}); run as root with iproute2, or choose nodes=1"
        )
    if place:
        leader = os.open(f"/proc/{store.get(f'node-{node}').decode()}/ns/net", os.O_RDONLY)
        _system_call("setns", leader, CLONE_NEWNET)
        os.close(leader)
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    return Link.how


def leave_last(context: RankContext, *, timeout_s: float) -> None:
    """To be called by every rank when its last collective is done, after `enter` or `enter_node` have moved them: rank 0, whose
    process keeps the bridge, waits until all others are done. A rank that ended earlier would cut off those that still wait for a message.

    It waits through a file, not through the network. Raises torch's DistStoreError when a rank does not come within `timeout_s`.
    """
    from torch.distributed import FileStore

    store = FileStore(context.init.removeprefix("file://") + "-leaving", context.world)
    store.set_timeout(timedelta(seconds=timeout_s))
    store.set(f"rank-{context.rank}", "done")
    if context.rank == 0:
        for rank in range(context.world):
            store.get(f"rank-{rank}")


def _try_to_build(switch: str, each: Sequence[str], shaped: str = "") -> str:
    """each: the pid of each process that has left the machine's network, or why it could not; shaped: the line for `tc` that slows
    the link of each. Returns "yes" or why not."""
    refused = [said for said in each if not said.isdigit()]
    if refused:
        return refused[0]
    try:
        build(switch, [int(pid) for pid in each])
        for pid in each if shaped else ():
            with _inside(f"/proc/{pid}/ns/net"):
                command("tc", shaped)
    except (OSError, RunError) as error:
        return str(error)
    return "yes"


def build(switch: str, pids: Sequence[int]) -> None:
    """Join the namespaces of `pids` (rank by rank) by a bridge in the one whose file is `switch`: rank r becomes
    10.0.0.(r + 1). Raises RunError for what the kernel refuses, OSError for a process that has ended."""
    with _inside(
        switch
    ):  # the bridge first: a veth whose number is its peer's too, 2, comes up a second late
        command("ip", "link add bridge type bridge", "link set bridge up")
    for rank, pid in enumerate(pids):
        with _inside(f"/proc/{pid}/ns/net"):
            pair = f"link add {INTERFACE} type veth peer name port{rank} netns {switch}"
            address = f"addr add 10.0.0.{rank + 1}/24 dev {INTERFACE}"
            command("ip", "link set lo up", pair, address, f"link set {INTERFACE} up")
    ports = [f"link set port{rank} master bridge up" for rank in range(len(pids))]
    with _inside(switch):
        command("ip", *ports)
    command("tc", shape(1e9), UNSHAPE)  # a kernel without tbf must refuse it now


@contextlib.contextmanager
def _inside(namespace: str) -> Iterator[None]:
    """What this thread starts in the block runs in another network namespace, named by its file."""
    back, there = os.open(OWN, os.O_RDONLY), os.open(namespace, os.O_RDONLY)
    try:
        _system_call("setns", there, CLONE_NEWNET)
        yield
    finally:
        _system_call("setns", back, CLONE_NEWNET)
        os.close(back)
        os.close(there)


def _system_call(name: str, *arguments: int) -> None:
    """A call that `os` has only from Python 3.12 on. Raises OSError."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def command(tool: str, *lines: str) -> None:
    """Let `ip` or `tc` carry out `lines`. Raises RunError with the line that failed and why."""
    text = "".join(line + "\n" for line in lines)
    try:
        done = subprocess.run([tool, "-batch", "-"], input=text, capture_output=True, text=True, check=False)
    except OSError as error:
        raise RunError(f"cannot run {tool}: {error.strerror}; install iproute2") from None
    if done.returncode:
        raise RunError(failure(tool, lines, done.stderr))


def failure(tool: str, lines: Sequence[str], says: str) -> str:
    """What `tool` says about the line at which it stopped, in one line."""
    at = re.search(r"Command failed -:(\d+)", says)
    line = lines[int(at[1]) - 1] if at else "; ".join(lines)
    return f"`{tool} {line}` failed: {(says.strip() or 'it does not say why').splitlines()[0]}"


def shape(bytes_per_s: float) -> str:
    """The line for `tc` that lets a rank send no faster; bytes without headers."""
    burst = max(LEAST_BURST_BYTES, round(BURST_S * bytes_per_s))
    rate = f"rate {8 * WIRE * bytes_per_s:.0f}bit burst {burst} limit {QUEUE_BYTES}"
    return f"qdisc replace dev {INTERFACE} root tbf {rate}"


class Link:
    """What this rank sends through its interface; while `slow`, a token bucket in the kernel lets `bytes_per_s` pass.

    tc waits for its lines from the start, since starting it takes milliseconds, and `slow` changes inside a timed
    step. So an error comes with a later change or with `close`, as RunError.
    """

    how = "traffic control on a veth between network namespaces"

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s, self._slow, self._lines = bytes_per_s, False, list[str]()
        self._tc: subprocess.Popen[str] | None = subprocess.Popen(
            ["tc", "-batch", "-"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
        )

    @property
    def slow(self) -> bool:
        """Whether the token bucket is in force, a few milliseconds after it was set."""
        return self._slow

    @slow.setter
    def slow(self, wanted: bool) -> None:
        if wanted == self._slow or self._tc is None or self._tc.stdin is None:
            return
        self._slow = wanted
        self._lines.append(shape(self.bytes_per_s) if wanted else UNSHAPE)
        try:
            self._tc.stdin.write(self._lines[-1] + "\n")
        except OSError:  # tc has ended at an earlier line
            self.close()

    def delay(self, size_bytes: int) -> None:
        """Nothing: the kernel delays what is sent."""

    def close(self) -> None:
        """Wait until the last change is in force; it stays so. Raises RunError for a change that was refused."""
        tc, self._tc = self._tc, None
        if tc is None:
            return
        _, says = tc.communicate()
        if tc.returncode:
            raise RunError(failure("tc", self._lines, says))
