"""The ranks of the scale-up clinic: a small run and its control by rank 0, and then the large run by all.

Started by `measure`, or by hand on one node or many:
    torchrun --nproc-per-node 4 -m mlsyslab.labs.scaleup.worker --out RUN_DIR --preset missing
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch

from mlsyslab import training
from mlsyslab.labs.scaleup.config import CLASSES, Config, base_of, control_of, faults_of, has_base
from mlsyslab.labs.scaleup.data import data_sets
from mlsyslab.labs.scaleup.job import Part
from mlsyslab.labs.scaleup.measure import preset
from mlsyslab.labs.scaleup.presets import PRESETS
from mlsyslab.options import from_json
from mlsyslab.ranks import RankContext, init_process_group, leave, rank_context
from mlsyslab.records import SCHEMA, Stream
from mlsyslab.training import pick_backend, pick_device

PATIENCE_S = 600.0  # the other ranks wait for rank 0, which trains the small run and the control first


def train(config: Config, out: Path, context: RankContext) -> None:
    """The experiment of one rank."""
    torch.set_num_threads(1)
    device = pick_device(config.device, context)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    notes = Stream(out / f"rank-{context.rank}.jsonl")
    data = data_sets(config)

    def part(name: str, of: Config, *, rank: int | None = None, backend: str = "none") -> None:
        notes.write(
            {"kind": "header", "schema": SCHEMA, "part": name, "rank": context.rank, "world": of.ranks, "own": False,
             "virtual": rank is None, "samples": of.samples, "batch": of.whole_batch, "precision": of.precision,
             "device": str(device), "backend": backend, "task": of.task, "seed": of.seed,
             "chance_loss": math.log(CLASSES[of.task])}
        )  # fmt: skip
        Part(name, of, data, notes.write, device, rank=rank).run()

    if context.rank == 0 and has_base(config):
        part("base", base_of(config))
    if context.rank == 0 and config.compare:
        part("control", control_of(config))
    if context.world == 1:
        part("large", config)
    else:
        backend = pick_backend(device, context)
        init_process_group(context, backend=backend, timeout_s=PATIENCE_S)
        part("large", config, rank=context.rank, backend=backend)
    notes.write({"kind": "end", "rank": context.rank, "world": context.world})


def main(payload: dict[str, Any], out: Path) -> None:
    """What `launch` calls in each rank; under torchrun the module's command line does the same."""
    train(from_json(Config, payload), out, rank_context())
    leave(0)


def command_line(argv: list[str]) -> int:
    """For torchrun and srun; see `training.command_line`."""
    return training.command_line(
        argv,
        lab="scaleup",
        config_class=Config,
        preset=preset,
        presets=PRESETS,
        faults_of=faults_of,
        train=train,
    )


if __name__ == "__main__":
    sys.exit(command_line(sys.argv[1:]))
