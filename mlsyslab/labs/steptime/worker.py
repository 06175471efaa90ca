"""One rank of the step-time experiment: a training loop over JPEG files, timed by StepTimer.

Started by `measure`, or by hand on one node or many:
    torchrun --nproc-per-node 2 -m mlsyslab.labs.steptime.worker --out RUN_DIR --preset quick
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mlsyslab import jpegs, telemetry, training, workloads
from mlsyslab.labs.steptime.config import PRESETS, Config, faults_of
from mlsyslab.labs.steptime.measure import preset
from mlsyslab.options import from_json
from mlsyslab.ranks import RankContext, init_process_group, leave, rank_context
from mlsyslab.records import SCHEMA, StepRecord, Stream
from mlsyslab.timing import StepTimer
from mlsyslab.training import (
    COLLECTIVE_TIMEOUT_S,
    GarbageSeconds,
    gpu_name,
    pick_backend,
    pick_device,
    run_queue_s,
)

ONE_BUCKET_MB = 1 << 20


def build_loader(config: Config, context: RankContext, notes: Stream) -> Any:
    """The data set on disk (made if absent) and a DataLoader over this rank's batches."""
    began = time.perf_counter()

    def tell(made: int, missing: int) -> None:
        notes.write(
            {"kind": "note", "rank": context.rank, "says": f"making the data set: {made} of {missing} images"}
        )

    folder = jpegs.jpeg_files(config.images, tell if context.local_rank == 0 else None)
    limit = jpegs.ReadLimit(config.storage_mb_per_s * 1e6) if config.storage_mb_per_s else None
    dataset = jpegs.JpegFolder(
        folder, config.images, cost_s=config.input_cost_s, limit=limit, seed=config.seed
    )
    # More batches than steps, so that the loader is still at work during the last recorded step.
    batches = config.steps + max(1, config.workers) * config.prefetch + 1
    sampler = jpegs.StepSampler(
        config.images, config.batch_size, batches, rank=context.rank, world=context.world, seed=config.seed
    )
    if config.cache == "memory":
        dataset.fill_cache([index for batch in sampler for index in batch])
    notes.write(
        {
            "kind": "note",
            "rank": context.rank,
            "says": "data ready",
            "data_ready_s": time.perf_counter() - began,
        }
    )
    return jpegs.make_loader(
        dataset,
        sampler,
        workers=config.workers,
        prefetch=config.prefetch,
        pinned=config.pinned and torch.cuda.is_available(),
    )


def build_model(config: Config, device: torch.device) -> tuple[workloads.PatchModel, dict[str, float]]:
    """The model with its extra work set; and what the calibration measured."""
    torch.manual_seed(config.seed)
    blocks = 4
    pacer = workloads.Pacer(config.compute_s, blocks) if config.paced else None
    model = workloads.PatchModel(
        config.width, blocks=blocks, gradient_bytes=config.gradient_mb * 1e6, pacer=pacer
    ).to(device)
    measured = {} if pacer else workloads.calibrate(model, config.batch_size, config.compute_s, device)
    return model, measured


def wrap(model: nn.Module, config: Config, context: RankContext) -> nn.Module:
    """DDP with buckets that overlap backward, or with one bucket that cannot."""
    if context.world == 1:
        return model
    cap_mb = 25 if config.overlap else ONE_BUCKET_MB
    return DistributedDataParallel(
        model, bucket_cap_mb=cap_mb, gradient_as_bucket_view=True, broadcast_buffers=False
    )


def train(config: Config, out: Path, context: RankContext) -> None:
    """The experiment of one rank. Order matters: loader workers fork before any communication thread exists."""
    torch.set_num_threads(1)
    device = pick_device(config.device, context)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # events and streams without a device of their own mean the current one
    notes = Stream(out / f"rank-{context.rank}.jsonl")
    loader = build_loader(config, context, notes)
    backend = pick_backend(device, context) if context.world > 1 else "none"
    header = {
        "kind": "header",
        "schema": SCHEMA,
        "rank": context.rank,
        "world": context.world,
        "pid": os.getpid(),
    }
    iterator = iter(loader)
    # After the workers have forked: one that held the sampler's stdin would keep it from ending.
    sampler = telemetry.start(os.getpid(), out, rank=context.rank, tree=os.getppid(), gpu=gpu_name(device))
    try:
        model, calibration = build_model(config, device)
        flops = 0.0 if config.paced else model.matmul_flops(config.batch_size)
        if context.world > 1:
            init_process_group(context, backend=backend, timeout_s=COLLECTIVE_TIMEOUT_S)
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        notes.write(
            {
                **header,
                "device": str(device),
                "backend": backend,
                "paced": config.paced,
                "matmul_flops": flops,
                "gradient_bytes": size,
                **calibration,
            }
        )
        loop(wrap(model, config, context), iterator, config, device, notes)
        notes.write({"kind": "end", "rank": context.rank, "world": context.world})
    finally:
        sampler.stop()
        jpegs.close_loader(iterator)


def loop(model: nn.Module, batches: Any, config: Config, device: torch.device, stream: Stream) -> None:
    """The training loop, timed: the three lines of StepTimer around a step as people write it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    collected = GarbageSeconds()

    def write(record: StepRecord) -> None:
        stream.write({**record.to_json(), "time_s": time.time()})  # to find the telemetry of the same moment

    with StepTimer(model, optimizer, on_record=write, warmup=config.warmup, pressure=run_queue_s) as timer:
        for host_images, host_labels, spent in timer(batches, steps=config.steps):
            with timer.phase("h2d"):
                images = host_images.to(device, non_blocking=config.pinned)
                labels = host_labels.to(device, non_blocking=config.pinned)
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if config.host_s:
                workloads.python_work(config.host_s)
            read_s, cpu_s, wall_s, size = spent.sum(0).tolist()
            timer.add(samples=len(images), bytes=int(size), loss=loss.detach(), gc_s=collected.take())
            timer.add(load_read_s=read_s, load_cpu_s=cpu_s, load_wall_s=wall_s)


def main(payload: dict[str, Any], out: Path) -> None:
    """What `launch` calls in each rank; under torchrun the module's command line does the same."""
    train(from_json(Config, payload), out, rank_context())
    leave(0)


def command_line(argv: list[str]) -> int:
    """For torchrun and srun; see `training.command_line`."""
    return training.command_line(
        argv,
        lab="steptime",
        config_class=Config,
        preset=preset,
        presets=PRESETS,
        faults_of=faults_of,
        train=train,
        fixed={"scaling": ()},
    )


if __name__ == "__main__":
    sys.exit(command_line(sys.argv[1:]))
