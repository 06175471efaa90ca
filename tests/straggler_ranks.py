"""Workers and a caller for the straggler's tests of processes; run as a script it plays a kernel that calls recover."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from mlsyslab.labs.straggler.config import Config
from mlsyslab.labs.straggler.elastic import recover

SMALL = Config(
    ranks=2, steps=30, warmup=2, fault="none", slow_rank=1, magnitude=1.5, compute_s=0.03, cpu_s=0.002,
    images=64, gradient_mb=0.5,
)  # fmt: skip


class Nobody:
    """A detector that names nobody."""

    def __init__(self, ranks: int) -> None:
        pass

    def feed(self, record: Any) -> None:
        return None


def model_and_optimizer(seed: int = 0) -> tuple[Any, Any]:
    """A small model whose optimizer has moved it once, so that there is momentum to keep."""
    import torch

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def killed_while_saving(payload: dict[str, Any], out: Path) -> None:
    """Two ranks keep the state after 5 steps; while they write the one after 10, rank 0 is killed."""
    import torch.distributed as dist
    from torch.distributed.checkpoint import FileSystemWriter

    from mlsyslab.labs.straggler import resume
    from mlsyslab.ranks import init_process_group, rank_context

    context = rank_context()
    init_process_group(context)
    folder = Path(payload["folder"])
    model, optimizer = model_and_optimizer()
    resume.save(folder, model, optimizer, 5, rank=context.rank)
    if context.rank == 0:  # each has written its part, the table of contents is due
        FileSystemWriter.finish = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    resume.save(folder, model, optimizer, 10, rank=context.rank)
    dist.barrier()


def rank_1_may_not_leave_the_network(payload: dict[str, Any], out: Path) -> None:
    """The lab's worker, where the kernel refuses one rank a network namespace."""
    from mlsyslab import netns
    from mlsyslab.labs.straggler import worker

    if os.environ["RANK"] == "1":
        netns.CLONE_NEWNET = 1  # no flag that unshare knows: EINVAL
    worker.main(payload, out)


if __name__ == "__main__":
    recover(SMALL, out=sys.argv[1], detector=Nobody)
