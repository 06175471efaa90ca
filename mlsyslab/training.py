"""What the labs' training workers share: devices, counters of a rank, and the command line under torchrun or srun."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from mlsyslab import hardware, processes
from mlsyslab.contract import LabError, RunError
from mlsyslab.faults import Fault
from mlsyslab.options import add_arguments, config_from_arguments
from mlsyslab.ranks import RankContext, leave, rank_context
from mlsyslab.records import write_json
from mlsyslab.runs import create_run

COLLECTIVE_TIMEOUT_S = 60.0


def pick_device(wanted: str, context: RankContext) -> torch.device:
    """The device of this rank; several ranks share a GPU where there are more ranks than GPUs.

    wanted: "auto", "cpu" or "cuda". Raises RunError for a GPU that is not there.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RunError(
            "device='cuda' but torch sees no GPU here; choose device='auto' or 'cpu', or install a CUDA build of torch"
        )
    return torch.device("cuda", context.local_rank % torch.cuda.device_count())


def pick_backend(device: torch.device, context: RankContext) -> str:
    """NCCL where each rank has its own GPU, else gloo (NCCL refuses two ranks on one GPU)."""
    own_gpu = device.type == "cuda" and context.local_world <= torch.cuda.device_count()
    return "nccl" if own_gpu else "gloo"


def gpu_name(device: torch.device) -> str | None:
    """What telemetry needs to find the GPU of this rank."""
    return str(device.index or 0) if device.type == "cuda" else None


def run_queue_s() -> float | None:
    """Seconds that this thread has waited for a core so far; None where the kernel does not say."""
    seen = processes.run_delay_s()
    return seen[1] if seen else None


class GarbageSeconds:
    """Seconds that Python's garbage collector has taken since the last `take`."""

    def __init__(self) -> None:
        self.total_s, self._began_s = 0.0, 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._began_s = time.perf_counter()
        else:
            self.total_s += time.perf_counter() - self._began_s

    def take(self) -> float:
        taken, self.total_s = self.total_s, 0.0
        return taken


def command_line(
    argv: list[str],
    *,
    lab: str,
    config_class: type[Any],
    preset: Callable[[str], Any],
    presets: Mapping[str, Any],
    faults_of: Callable[[Any], list[Fault]],
    train: Callable[[Any, Path, RankContext], None],
    fixed: Mapping[str, Any] | None = None,
) -> int:
    """`--out DIR [--preset NAME] [--field value ...]` for torchrun and srun: rank 0 makes the run directory.

    fixed: fields that the launcher decides, beside `ranks`. Ends the process: 0 done, 2 bad input, 1 a bug.
    """
    parser = argparse.ArgumentParser(prog=f"python -m mlsyslab.labs.{lab}.worker")
    parser.add_argument("--preset", default="worked_example", choices=sorted(presets))
    parser.add_argument(
        "--out", type=Path, required=True, help="run directory on a file system that all ranks share"
    )
    add_arguments(parser, config_class)
    arguments = parser.parse_args(argv)
    try:
        context = rank_context()
        given = config_from_arguments(arguments, preset(arguments.preset))
        config = dataclasses.replace(given, ranks=context.world, **(fixed or {}))  # the launcher's world
        share_run(lab, config, arguments.out, context, faults_of)
        train(config, arguments.out, context)
    except LabError as error:
        print(f"mlsyslab: {error}", file=sys.stderr)
        leave(2)
    except Exception:
        traceback.print_exc()
        leave(1)
    if context.rank == 0:
        write_json(arguments.out / "status.json", {"state": "done", "message": "finished"})
    leave(0)
    return 0


def share_run(
    lab: str, config: Any, out: Path, context: RankContext, faults_of: Callable[[Any], list[Fault]]
) -> None:
    """Rank 0 writes what `measure` writes elsewhere; the others wait until it is there."""
    if (out / f"rank-{context.rank}.jsonl").exists():
        raise RunError(f"{out} holds an earlier run; choose a new folder, so that no record is overwritten")
    if context.rank == 0:
        truth = [fault.to_json() for fault in faults_of(config)]
        create_run(lab, config, out=out, truth=truth, expected=config.steps * context.world)
        who = {"pid": os.getpid(), "host": socket.gethostname(), "time_s": time.time()}
        write_json(out / "status.json", {"state": "running", "message": f"{context.world} ranks", **who})
        write_json(out / "environment.json", hardware.environment(str(pick_device(config.device, context))))
        return
    until = time.monotonic() + COLLECTIVE_TIMEOUT_S
    while not (out / "environment.json").exists():
        if time.monotonic() > until:
            raise RunError(
                f"rank {context.rank} does not see {out}; --out must lie on a file system that all nodes share"
            )
        time.sleep(0.05)
