"""One rank of the straggler experiment: synchronous training in which one rank is made slow.

Started by `measure`, or by hand on one node or many:
    torchrun --nproc-per-node 4 -m mlsyslab.labs.straggler.worker --out RUN_DIR --preset worked_example
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mlsyslab import hostlog, jpegs, netns, telemetry, training, workloads
from mlsyslab.labs.straggler import inject, links
from mlsyslab.labs.straggler.config import LATE_S, PRESETS, Config, faults_of
from mlsyslab.labs.straggler.measure import preset
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

AfterStep = Callable[[int, list[int], torch.Tensor], Mapping[str, Any]]


class Trainer:
    """One rank's job: its loader, model, optimizer and link, and the loop over them.

    Order matters in `open`: a rank enters its network before it starts anything, and loader workers fork before any
    thread of communication or noise exists.
    first: the step to begin with, where an earlier attempt of the job got so far. tags: stand in each record.
    """

    def __init__(
        self,
        config: Config,
        out: Path,
        context: RankContext,
        *,
        first: int = 0,
        tags: Mapping[str, Any] | None = None,
    ) -> None:
        self.config, self.out, self.context, self.first = config, out, context, first
        self.tags = dict(tags or {})
        self.rank, self.world = context.rank, context.world
        self.notes = Stream(out / f"rank-{self.rank}.jsonl")

    def open(self) -> None:
        """Build everything and join the others; what it cost goes into the header."""
        torch.set_num_threads(1)
        config = self.config
        self.device = pick_device(config.device, self.context)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if config.fault == "late_start" and self.rank == config.slow_rank and not self.first:
            time.sleep(config.magnitude * LATE_S)
        no_veth = self._enter_network()
        self.dataset, load_s = self._data()
        self.iterator = iter(self._loader())
        loaders = [process.pid for process in getattr(self.iterator, "_workers", [])]
        self.cores = inject.stay_apart(config, self.rank)
        self.sampler = telemetry.start(
            os.getpid(), self.out, rank=self.rank, tree=os.getppid(), gpu=gpu_name(self.device)
        )
        torch.manual_seed(config.seed)
        costs = inject.Costs(config, self.device)
        model = inject.Model(config, costs).to(self.device)
        self.optimizer = inject.Optimizer(model.parameters(), lr=0.01, momentum=0.9)
        self.optimizer.costs = costs
        self.backend = pick_backend(self.device, self.context)
        began_s = time.perf_counter()
        init_process_group(self.context, backend=self.backend, timeout_s=COLLECTIVE_TIMEOUT_S)
        torch.distributed.barrier()
        joined_s = time.perf_counter() - began_s
        self.size = sum(p.numel() * p.element_size() for p in model.parameters())
        self.model = DistributedDataParallel(model, bucket_cap_mb=25, broadcast_buffers=False)
        self.link = self._link(veth=not no_veth)
        self.injector = inject.Injector(
            config,
            self.rank,
            costs=costs,
            link=self.link,
            loaders=loaders,
            load_s=load_s,
            gpu=str(self.device) if self.device.type == "cuda" else "",
        )
        self.log, self.began_s = hostlog.read(), time.monotonic()
        self.notes.write(
            {
                "kind": "header",
                "schema": SCHEMA,
                "rank": self.rank,
                "world": self.world,
                "pid": os.getpid(),
                "host": os.environ.get("MLSYSLAB_HOST", ""),
                "device": str(self.device),
                "backend": self.backend,
                "paced": config.paced,
                "gradient_bytes": self.size,
                "join_s": joined_s,
                "link": self.link.how if config.fault == "slow_link" else "",
                "no_veth": no_veth if config.fault == "slow_link" else "",
                **self.tags,
            }
        )

    def _enter_network(self) -> str:
        """Where the link is to be slow, let this rank have one of its own. Returns "" or why it has none."""
        if self.config.fault != "slow_link":
            return "no link is to be slow"
        if self.device.type != "cpu":
            return "the ranks are on GPUs, which have links of their own"
        return netns.enter(self.context, timeout_s=COLLECTIVE_TIMEOUT_S)

    def _link(self, *, veth: bool) -> links.AnyLink:
        """What makes the exchange of the gradient take extra_s longer while it is slow."""
        extra_s = max(self.config.extra_s, 1e-3)
        if veth:
            # A ring all-reduce sends 2 (n - 1) / n of the bytes, which take some time on a fast link too.
            sent = 2 * (self.world - 1) / self.world * self.size
            return netns.Link(sent / (links.exchange_s(self.size) + extra_s))
        link = links.Link(self.size / extra_s)
        if self.config.fault == "slow_link":
            self.model.register_comm_hook(None, lambda _, bucket: link.reduce(bucket))
        return link

    def _data(self) -> tuple[inject.Samples, float]:
        """The data set (made if absent), and the CPU seconds that a healthy batch takes the loader."""
        config = self.config

        def tell(made: int, missing: int) -> None:
            text = f"making the data set: {made} of {missing} images"
            self.notes.write({"kind": "note", "rank": self.rank, "says": text})

        folder = jpegs.jpeg_files(config.images, tell if self.context.local_rank == 0 else None)
        dataset = inject.Samples(folder, config)
        began_s = time.thread_time()
        for index in range(2):
            dataset.decode(dataset.read(index), index)
        load_s = (time.thread_time() - began_s) / 2 * config.batch_size
        if config.relief == "cache" and self.rank == config.slow_rank:
            wanted = {spec[0] for batch in inject.Specs(config, self.rank) for spec in batch}
            dataset.fill_cache(sorted(wanted))
        return dataset, load_s

    def _loader(self) -> Any:
        return jpegs.make_loader(
            self.dataset,
            inject.Specs(self.config, self.rank, self.first),
            workers=self.config.workers,
            prefetch=self.config.prefetch,
        )

    def train(self, after_step: AfterStep | None = None) -> None:
        """The loop, timed. `after_step(step, indices of its samples, loss)` runs inside the step, in `other_s`, when
        its update is done; what it returns goes into the record."""
        config, collected = self.config, GarbageSeconds()

        def write(record: StepRecord) -> None:
            row = record.to_json()
            row["step"] += self.first
            self.notes.write({**row, "time_s": time.time(), **self.tags})

        self.injector.begin(self.first)
        queued_s, step = run_queue_s(), self.first
        timer = StepTimer(
            self.model, self.optimizer, on_record=write, warmup=config.warmup, pressure=run_queue_s
        )
        with timer:
            for images, labels, spent in timer(self.iterator, steps=config.steps - self.first):
                with timer.phase("h2d"):
                    batch, wanted = images.to(self.device), labels.to(self.device)
                loss = nn.functional.cross_entropy(self.model(batch), wanted)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                workloads.python_work(config.cpu_s)
                self.injector.pause(step, self.out)
                if after_step:
                    timer.add(**after_step(step, spent[:, 4].int().tolist(), loss.detach()))
                read_s, cpu_s, wall_s, size = spent[:, :4].sum(0).tolist()
                before_s, queued_s = queued_s, run_queue_s()
                queue_s = None if before_s is None or queued_s is None else queued_s - before_s
                timer.add(samples=len(images), bytes=int(size), loss=loss.detach(), gc_s=collected.take())
                timer.add(load_read_s=read_s, load_cpu_s=cpu_s, load_wall_s=wall_s, queue_s=queue_s)
                timer.add(length=float(images.shape[-1] / jpegs.CROP))
                step += 1
                self.injector.begin(step)
        self.injector.quiet()

    def finish(self) -> None:
        """The checks that the steps cannot give: each rank's link, and what the host logged meanwhile."""
        config = self.config
        if self.backend == "gloo" and self.device.type == "cpu":
            if self.cores:
                os.sched_setaffinity(0, self.cores)  # the link is to be measured, not the core
            self._check_links()
        host = hostlog.difference(self.log, hostlog.read())
        kernel = hostlog.kernel_log(self.began_s) if self.context.local_rank == 0 else None
        self.notes.write({"kind": "host", "rank": self.rank, **host, "kernel": kernel})
        self.notes.write({"kind": "end", "rank": self.rank, "world": config.ranks})
        if isinstance(self.link, netns.Link):
            netns.leave_last(self.context, timeout_s=COLLECTIVE_TIMEOUT_S)

    def _check_links(self) -> None:
        """Each rank's link alone, in the state that it had in the steps of `links.turns`."""
        turns = links.turns(self.config)
        for turn, step in enumerate(turns):
            self.injector.begin(step)
            torch.distributed.barrier()
            time.sleep(links.SETTLES_S)
            send_s = links.check(self.link, self.rank, self.world, repeats=max(3, 8 // len(turns)))
            self.notes.write(
                {"kind": "link", "rank": self.rank, "world": self.world, "turn": turn, "send_s": send_s}
            )

    def close(self) -> None:
        """Stop what runs beside the rank."""
        if hasattr(self, "injector"):
            self.injector.close()
        if hasattr(self, "sampler"):
            self.sampler.stop()
        if hasattr(self, "iterator"):
            jpegs.close_loader(self.iterator)


def train(config: Config, out: Path, context: RankContext) -> None:
    """The experiment of one rank."""
    trainer = Trainer(config, out, context)
    try:
        trainer.open()
        trainer.train()
        trainer.finish()
    finally:
        trainer.close()


def main(payload: dict[str, Any], out: Path) -> None:
    """What `launch` calls in each rank; under torchrun the module's command line does the same."""
    train(from_json(Config, payload), out, rank_context())
    leave(0)


def command_line(argv: list[str]) -> int:
    """For torchrun and srun; see `training.command_line`."""
    return training.command_line(
        argv,
        lab="straggler",
        config_class=Config,
        preset=preset,
        presets=PRESETS,
        faults_of=faults_of,
        train=train,
    )


if __name__ == "__main__":
    sys.exit(command_line(sys.argv[1:]))
