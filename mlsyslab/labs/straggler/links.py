"""What a rank sends to others, made slow where the kernel cannot do it, and the check that tells whose link is slow."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from mlsyslab import netns
from mlsyslab.labs.straggler.config import LINK_BYTES, Config

TURNS = 8  # checks of links that change
SETTLES_S = 0.05  # until a change of the traffic control is in force
AnyLink: TypeAlias = "Link | netns.Link"


class Link:
    """What this rank sends to others; slow when told, then each message waits for its bytes at `bytes_per_s` first.

    The way for every machine; `netns.Link` has the same methods and a link that is really slow.
    """

    how = "delayed sends by a communication hook"

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s, self.slow = bytes_per_s, False
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="link")

    def delay(self, size_bytes: int) -> None:
        """Wait as the first byte of a message of that size would behind the rest."""
        if self.slow:
            time.sleep(size_bytes / self.bytes_per_s)

    def reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """DDP's communication hook: mean over the ranks, sent in order from a thread, while backward goes on."""
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        buffer = bucket.buffer().div_(dist.get_world_size())

        def send() -> None:
            try:
                self.delay(buffer.numel() * buffer.element_size())
                dist.all_reduce(buffer)
                done.set_result(buffer)
            except Exception as error:  # the rank's own thread must raise it
                done.set_exception(error)  # type: ignore[arg-type]  # torch's annotation is wrong

        self._sender.submit(send)
        return done

    def close(self) -> None:
        """Nothing: a change is in force at once."""


def exchange_s(size_bytes: int, repeats: int = 3) -> float:
    """Seconds in which the ranks all-reduce so many bytes while no link is slow, best of `repeats`. All take part."""
    gradient, best_s = torch.zeros(size_bytes // 4), float("inf")
    for _ in range(repeats):
        dist.barrier()
        began_s = time.perf_counter()
        dist.all_reduce(gradient)
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s


def check(link: AnyLink, rank: int, world: int, size_bytes: int = LINK_BYTES, repeats: int = 8) -> float:
    """Seconds in which this rank's message reaches its neighbour and is acknowledged; each rank in its turn, best
    of `repeats`. The test that tells whose link is slow, which the all-reduce cannot: there everybody waits."""
    message, ack = torch.zeros(size_bytes, dtype=torch.uint8), torch.zeros(1)
    best_s = float("inf")
    for sender in [turn for _ in range(repeats) for turn in range(world)]:
        receiver = (sender + 1) % world
        if rank == sender:
            began_s = time.perf_counter()
            link.delay(size_bytes)
            dist.send(message, receiver)
            dist.recv(ack, receiver)
            best_s = min(best_s, time.perf_counter() - began_s)
        elif rank == receiver:
            dist.recv(message, sender)
            dist.send(ack, sender)
    return best_s


def turns(config: Config) -> list[int]:
    """The steps whose state the link checks find: the last one, or several over the run where the state changes."""
    if config.fault != "slow_link" or config.where not in ("intermittent", "rotating"):
        return [config.steps - 1]
    first = max(config.warmup, config.start_step)
    return [first + (config.steps - first) * turn // TURNS for turn in range(TURNS)]
