"""One rank of the step-time experiment: a training loop over JPEG files, timed by StepTimer.

Started by `measure`, or by hand on one node or many:
    torchrun --nproc-per-node 2 -m mlsyslab.labs.steptime.worker --out RUN_DIR --preset quick
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mlsyslab import hardware, jpegs, processes, telemetry, workloads
from mlsyslab.contract import LabError, RunError
from mlsyslab.labs.steptime.config import PRESETS, Config, faults_of
from mlsyslab.labs.steptime.measure import preset
from mlsyslab.options import add_arguments, config_from_arguments, from_json
from mlsyslab.ranks import RankContext, init_process_group, leave, rank_context
from mlsyslab.records import SCHEMA, StepRecord, Stream, write_json
from mlsyslab.runs import create_run
from mlsyslab.timing import StepTimer

COLLECTIVE_TIMEOUT_S = 60.0
ONE_BUCKET_MB = 1 << 20


def pick_device(config: Config, context: RankContext) -> torch.device:
    """The device of this rank; several ranks share a GPU where there are more ranks than GPUs."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
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
    device = pick_device(config, context)
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


def run_queue_s() -> float | None:
    """Seconds that this thread has waited for a core so far; None where the kernel does not say."""
    seen = processes.run_delay_s()
    return seen[1] if seen else None


def gpu_name(device: torch.device) -> str | None:
    """What telemetry needs to find the GPU of this rank."""
    return str(device.index or 0) if device.type == "cuda" else None


def main(payload: dict[str, Any], out: Path) -> None:
    """What `launch` calls in each rank; under torchrun the module's command line does the same."""
    train(from_json(Config, payload), out, rank_context())
    leave(0)


def command_line(argv: list[str]) -> int:
    """`--out DIR [--preset NAME] [--field value ...]`, for torchrun and srun: rank 0 makes the run directory."""
    parser = argparse.ArgumentParser(prog="python -m mlsyslab.labs.steptime.worker", description=__doc__)
    parser.add_argument("--preset", default="worked_example", choices=sorted(PRESETS))
    parser.add_argument(
        "--out", type=Path, required=True, help="run directory on a file system that all ranks share"
    )
    add_arguments(parser, Config)
    arguments = parser.parse_args(argv)
    try:
        context = rank_context()
        given = config_from_arguments(arguments, preset(arguments.preset))
        config = dataclasses.replace(given, ranks=context.world, scaling=())  # the world is the launcher's
        share_run(config, arguments.out, context)
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


def share_run(config: Config, out: Path, context: RankContext) -> None:
    """Rank 0 writes what `measure` writes elsewhere; the others wait until it is there."""
    if (out / f"rank-{context.rank}.jsonl").exists():
        raise RunError(f"{out} holds an earlier run; choose a new folder, so that no record is overwritten")
    if context.rank == 0:
        truth = [fault.to_json() for fault in faults_of(config)]
        create_run("steptime", config, out=out, truth=truth, expected=config.steps * context.world)
        who = {"pid": os.getpid(), "host": socket.gethostname(), "time_s": time.time()}
        write_json(out / "status.json", {"state": "running", "message": f"{context.world} ranks", **who})
        write_json(out / "environment.json", hardware.environment(str(pick_device(config, context))))
        return
    until = time.monotonic() + COLLECTIVE_TIMEOUT_S
    while not (out / "environment.json").exists():
        if time.monotonic() > until:
            raise RunError(
                f"rank {context.rank} does not see {out}; --out must lie on a file system that all nodes share"
            )
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(command_line(sys.argv[1:]))
