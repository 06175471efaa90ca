"""The rank's side: who am I, how do I reach the others, how do I leave.

The same worker runs under `mlsyslab.launch`, under torchrun (one or many nodes) and under srun.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

from mlsyslab.contract import RunError

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """rank of world, local_rank of local_world (the ranks on this machine); `init` is torch's init_method."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    init: str = "env://"


def rank_context(environ: dict[str, str] | None = None) -> RankContext:
    """Read the place of this process from the environment: ours and torchrun's names first, then Slurm's.

    Raises RunError where several ranks are announced and nobody says how to find rank 0.
    """
    env = os.environ if environ is None else environ
    if "RANK" in env:
        world = int(env.get("WORLD_SIZE", "1"))
        local = int(env.get("LOCAL_RANK", env["RANK"]))
        local_world = int(env.get("LOCAL_WORLD_SIZE", str(world)))
        found = RankContext(
            rank=int(env["RANK"]),
            world=world,
            local_rank=local,
            local_world=local_world,
            init=env.get("MLSYSLAB_INIT", "env://"),
        )
    elif "SLURM_PROCID" in env and int(env.get("SLURM_NTASKS", "1")) > 1:
        found = RankContext(
            rank=int(env["SLURM_PROCID"]),
            world=int(env["SLURM_NTASKS"]),
            local_rank=int(env.get("SLURM_LOCALID", "0")),
            local_world=int(
                env.get("SLURM_TASKS_PER_NODE", env.get("SLURM_NTASKS_PER_NODE", "1"))
                .split("(")[0]
                .split(",")[0]
            ),
        )
    else:
        return RankContext()
    if found.world > 1 and found.init == "env://" and not ("MASTER_ADDR" in env and "MASTER_PORT" in env):
        raise RunError(
            f"rank {found.rank} of {found.world} does not know MASTER_ADDR and MASTER_PORT; "
            "start with torchrun, or export both (any free port of the first node)"
        )
    return found


def init_process_group(context: RankContext, *, backend: str = "gloo", timeout_s: float = 60.0) -> None:
    """Join the process group. A collective that waits longer than `timeout_s` raises in the ranks that arrived."""
    import torch.distributed as dist

    if sys.platform == "linux" and context.init.startswith("file://"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here; the host name may not resolve
    dist.init_process_group(
        backend,
        init_method=context.init,
        rank=context.rank,
        world_size=context.world,
        timeout=timedelta(seconds=timeout_s),
    )


def die_with_parent() -> None:
    """End this process when its parent dies, however it dies: by the kernel on Linux, elsewhere by a thread that
    looks twice a second."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        return

    def watch(parent: int) -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, args=(os.getppid(),), daemon=True).start()


def leave(code: int = 0) -> None:
    """End this rank now. Records are on disk already (line by line), so nothing is lost.

    An orderly interpreter exit can hang for ever: DDP's reducer destroys the gloo group while it holds the GIL,
    and a gloo thread that frees its last work waits for the GIL (torch 2.13).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
