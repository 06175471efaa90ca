"""A noisy neighbour, or a throttle: a process of its own that burns a core, computes on a GPU, or stops others.

    python -m mlsyslab.labs.straggler.noise burn CPU
    python -m mlsyslab.labs.straggler.noise duty ON_S OFF_S PID...
    python -m mlsyslab.labs.straggler.noise compete DEVICE ON_S OFF_S

It leaves its parent's process tree, as a neighbour on a shared host would stand outside of it, obeys "1" (act) and "0" (rest)
on stdin, and ends when stdin does, which is when the rank that started it is gone. Started by `inject`.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from mlsyslab.contract import RunError

NAME = "noisy-neighbour"
PR_SET_NAME = 15
GONE_WITHIN_S = 10.0  # beyond it the core is so crowded that it ends later, by itself
BURST_S = 0.02  # between two looks at stdin while burning
READY_WITHIN_S = 120.0  # a process that imports torch and wakes a device
MATRIX = 2048  # rows of what competes on a device: a kernel well below a millisecond on today's GPUs


class Noise:
    """The handle of the rank that started it; `act(True)` and `act(False)` say when, `close` ends it."""

    def __init__(self, *words: object) -> None:
        command = [sys.executable, "-m", __name__, *map(str, words)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except OSError as error:
            raise RunError(
                f"cannot start {' '.join(command)}: {error.strerror}; end other processes"
            ) from error
        self._acting = False
        if words[0] == "compete":
            self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        assert self._process.stdout is not None
        come, _, _ = select.select([self._process.stdout], [], [], READY_WITHIN_S)
        if not come or not self._process.stdout.read(1):
            self.close()
            raise RunError(
                "the competing process could not use the device; look at its memory, or choose another fault"
            )

    def act(self, on: bool) -> None:
        """Begin or rest; says it only when it changes."""
        if on != self._acting:
            self._acting = on
            self._say(b"1" if on else b"0")

    def _say(self, word: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # somebody has ended it: then there is no noise
            self._process.stdin.write(word)
            self._process.stdin.flush()

    def close(self) -> None:
        """End it, and let go on what it stopped; returns when it is gone, which its end of stdout tells."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(OSError):
            process.stdin.close()
        select.select([process.stdout], [], [], GONE_WITHIN_S)
        process.stdout.close()
        process.wait()


def _wait(seconds: float) -> bool | None:
    """Wait so long for a word on stdin: True act, False rest, None nothing came. Raises EOFError at its end."""
    if not select.select([0], [], [], seconds)[0]:
        return None
    word = os.read(0, 64)
    if not word:
        raise EOFError
    return word[-1:] == b"1"


def obey(work: Callable[[], None]) -> None:
    """Call `work` while told to act, until stdin ends."""
    acting = False
    with suppress(EOFError):
        while True:
            word = _wait(0 if acting else 3600)
            acting = acting if word is None else word
            if acting:
                work()


def burn(cpu: int) -> None:
    """Burn core `cpu` while told to."""
    os.sched_setaffinity(0, {cpu})

    def work() -> None:
        until = time.perf_counter() + BURST_S
        while time.perf_counter() < until:
            pass

    obey(work)


def duty(on_s: float, off_s: float, pids: Sequence[int]) -> None:
    """Stop the processes for `off_s` and let them run for `on_s`, in turn, while told to."""

    def tell(number: signal.Signals) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def work() -> None:
        tell(signal.SIGSTOP)
        try:
            time.sleep(off_s)
        finally:
            tell(signal.SIGCONT)
        time.sleep(on_s)

    obey(work)


def compete(device: str, on_s: float, off_s: float) -> None:
    """Multiply matrices on `device` for `on_s` and rest for `off_s`, in turn, while told to: a stream that takes its
    share of the kernels' time, as another job on the same GPU would."""
    import torch

    torch.set_num_threads(1)
    mine = torch.ones(MATRIX, MATRIX, device=device)
    result = torch.empty_like(mine)

    def multiply() -> None:
        torch.mm(mine, mine, out=result)
        if mine.is_cuda:
            torch.cuda.synchronize(device)  # so that no queue of kernels outlives the word to rest

    def work() -> None:
        until = time.perf_counter() + on_s
        while time.perf_counter() < until:
            multiply()
        time.sleep(off_s)

    multiply()
    os.write(sys.stdout.fileno(), b"!")
    obey(work)


def main(words: Sequence[str]) -> None:
    """Leave the parent's tree, then do as told."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # Ctrl-C is for the ranks; stdin ends with them
    if os.fork():
        os._exit(0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NAME, NAME.encode(), 0, 0, 0)
    if words[0] == "burn":
        burn(int(words[1]))
    elif words[0] == "compete":
        compete(words[1], float(words[2]), float(words[3]))
    else:
        duty(float(words[1]), float(words[2]), [int(pid) for pid in words[3:]])


if __name__ == "__main__":
    main(sys.argv[1:])
