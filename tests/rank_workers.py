"""Workers that the launcher's tests run in real ranks."""

import os
import signal
import sys
import time
from pathlib import Path

from mlsyslab import launch
from mlsyslab.contract import ConfigError


def _join(timeout_s: float = 30.0):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    context = launch.rank_context()
    launch.init_process_group(context, timeout_s=timeout_s)
    return context, torch, dist


def add_up(config: dict, out: Path) -> dict:
    context, torch, dist = _join()
    total = torch.tensor([float(context.rank + 1)])
    dist.all_reduce(total)
    return {
        "rank": context.rank,
        "sum": total.item(),
        "pid": os.getpid(),
        "given": config,
        "threads": torch.get_num_threads(),
    }


def raise_in(config: dict, out: Path) -> None:
    context, torch, dist = _join()
    if context.rank == config["rank"]:
        print("about to fail", flush=True)
        raise ValueError("bad luck")
    dist.all_reduce(torch.ones(1))
    time.sleep(60)


def config_error(config: dict, out: Path) -> None:
    raise ConfigError("workers=-1 is below 0; choose 0 or more")


def never_arrives(config: dict, out: Path) -> None:
    context, torch, dist = _join(timeout_s=2.0)
    if context.rank in config["absent"]:
        time.sleep(60)
    dist.all_reduce(torch.ones(1))


def stops_itself(config: dict, out: Path) -> None:
    context, torch, dist = _join(timeout_s=2.0)
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(1))


def killed(config: dict, out: Path) -> None:
    context, torch, dist = _join()
    if context.rank == config["rank"]:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def abort(config: dict, out: Path) -> None:
    os.abort()


def sleep(config: dict, out: Path) -> None:
    """Write the pid of this rank and of a child of its, then sleep."""
    import multiprocessing

    from mlsyslab.ranks import die_with_parent

    child = multiprocessing.get_context("fork").Process(
        target=_sleep_child, args=(die_with_parent,), daemon=True
    )
    child.start()
    (out / f"pids-{os.environ['RANK']}").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(config.get("seconds", 60))


def _sleep_child(tie) -> None:
    tie()
    time.sleep(60)


def main() -> None:
    """Stand-in for a notebook kernel: start sleeping ranks, say their run directory, wait."""
    out = Path(sys.argv[1])
    launch.start("rank_workers:sleep", {}, out, (2,), device="test", what="test")
    print("started", flush=True)
    time.sleep(60)


if __name__ == "__main__":
    main()


def exchange_without_rank_0(config: dict, out: Path) -> float | str:
    """Ranks 1 and 2 still talk through the bridge a second after rank 0 has nothing more to do."""
    from mlsyslab import netns
    from mlsyslab.ranks import rank_context

    context = rank_context()
    why = netns.enter(context, timeout_s=20)
    if why:
        return why
    context, torch, dist = _join(timeout_s=10.0)
    pair = dist.new_group([1, 2])
    total = torch.tensor([float(context.rank)])
    dist.barrier()
    if context.rank:
        time.sleep(1.0)
        dist.all_reduce(total, group=pair)
    netns.leave_last(context, timeout_s=20)
    return total.item()
