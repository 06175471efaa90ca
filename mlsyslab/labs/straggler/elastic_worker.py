"""A rank under torch's elastic launcher, on one machine (`recover` does it) or on a cluster, once on each host:

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 4:4 --nproc-per-node 8 --max-restarts 20 \\
        --rdzv-backend c10d --rdzv-endpoint HEAD:29400 --rdzv-id JOB \\
        --rdzv-conf keep_alive_interval=1,keep_alive_max_attempt=4,join_timeout=600 \\
        -m mlsyslab.labs.straggler.elastic_worker --out SHARED_DIR --preset worked_example --every 50

MLSYSLAB_HOST=host-<i> beside it gives a host the name by which the config's fault finds it (host-<slow_rank>);
without, the fault sits on the rank. To cordon a host there, keep the scheduler off it (Kubernetes: `kubectl cordon NODE`, then delete its pod; Slurm:
`scontrol update NodeName=NODE State=DRAIN Reason=straggler`), end its torchrun, and start the same command on a
spare. The others meet it in the rendezvous, and all go on from the last checkpoint. HEAD must not be the host that
goes: it holds the rendezvous. The variable makes rank 0 open a new store each time; with torch's default (2.13)
hosts that keep their place go on asking the store of the host that is gone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from mlsyslab.ranks import die_with_parent, leave

_kept: list[Any] = []


def main(argv: Sequence[str]) -> None:
    """Die with the launcher, however it dies; train; end the process with the code that tells the launcher more."""
    parent = multiprocessing.parent_process()
    die_with_parent()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)  # it died before we asked
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # a fork has its launcher's handlers
    from mlsyslab.labs.straggler import resume  # torch, seconds: only when nobody can be orphaned any more

    code, trainer = resume.command_line(argv)
    if code or parent is None:
        leave(code)
    _kept.append(trainer)  # a fork must return to its launcher, which waits for the function's value


if __name__ == "__main__":
    main(sys.argv[1:])
