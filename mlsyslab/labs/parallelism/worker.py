"""One rank of the parallelism experiment: real training of a small GPT that is split over the ranks.

Started by `measure`, or by hand on one node or many:
    torchrun --nproc-per-node 4 -m mlsyslab.labs.parallelism.worker --out RUN_DIR --preset quick --strategy fsdp
"""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mlsyslab import training
from mlsyslab.labs.parallelism import memory, traffic
from mlsyslab.labs.parallelism.collectives import Meter
from mlsyslab.labs.parallelism.config import PRESETS, Config, faults_of, layout_of
from mlsyslab.labs.parallelism.gpt import batch_of
from mlsyslab.labs.parallelism.job import Job, clip
from mlsyslab.labs.parallelism.measure import preset
from mlsyslab.labs.parallelism.split import build
from mlsyslab.options import from_json
from mlsyslab.ranks import RankContext, init_process_group, leave, rank_context
from mlsyslab.records import SCHEMA, StepRecord, Stream, Tail
from mlsyslab.training import COLLECTIVE_TIMEOUT_S, pick_backend, pick_device, run_queue_s

SETTLED = 2  # steps until all that stays is there: the optimizer's state after the first, DDP's rebuilt buckets in the second
PEER_S = 3.0  # how long a rank whose peer is gone looks for that peer's own words


class Laps:
    """Own seconds of each part of a step, and the wait in all of them together.

    On the CPU wait is what is neither CPU time of this thread nor waiting for a core. On CUDA the device is synchronised at the
    end of each part, and the wait inside it is not told apart (0).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.own_s: dict[str, float] = {}
        self.wait_s = 0.0
        self.begin_s, self._cpu_s, self._queue_s = self._now()
        self.last_s = self.begin_s

    def _now(self) -> tuple[float, float, float]:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.monotonic(), time.thread_time(), run_queue_s() or 0.0

    def lap(self, name: str) -> None:
        """The end of a part, which may come in several pieces."""
        now_s, cpu_s, queue_s = self._now()
        wall_s = now_s - self.last_s
        busy_s = wall_s if self.device.type == "cuda" else cpu_s - self._cpu_s + queue_s - self._queue_s
        wait_s = max(0.0, wall_s - busy_s)
        self.own_s[name] = self.own_s.get(name, 0.0) + wall_s - wait_s
        self.wait_s += wait_s
        self.last_s, self._cpu_s, self._queue_s = now_s, cpu_s, queue_s


class Trainer:
    """One rank's run: it joins, builds its share, and records what each step costs."""

    def __init__(self, config: Config, out: Path, context: RankContext) -> None:
        self.config, self.out, self.context = config, out, context
        self.layout, self.phase = layout_of(config), "building the model"
        self.notes = Stream(out / f"rank-{context.rank}.jsonl")
        self.storages = memory.Storages()
        self.cap_bytes = round(config.memory_cap_mb * 1e6)
        self.job: Job | None = None

    def open(self) -> None:
        """Join the others and build; the header tells how."""
        torch.set_num_threads(1)
        config, context = self.config, self.context
        self.device = pick_device(config.device, context)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        link = self._enter_node()
        self.backend = pick_backend(self.device, context)
        init_process_group(context, backend=self.backend, timeout_s=COLLECTIVE_TIMEOUT_S)
        dist.barrier()
        if self.cap_bytes:
            memory.cap_memory(self.cap_bytes, self.device)
        self.job = build(config, self.device)
        self.meter = Meter(self.storages, self.job.groups)
        shared = self.device.type == "cuda" and context.local_world > torch.cuda.device_count()
        self.notes.write(
            {
                "kind": "header",
                "schema": SCHEMA,
                "rank": context.rank,
                "world": context.world,
                "pid": os.getpid(),
                "device": str(self.device),
                "backend": self.backend,
                "strategy": config.strategy,
                "axes": {
                    axis: dist.get_process_group_ranks(group) for axis, (group, _) in self.job.axes.items()
                },
                "stage": self.job.stage,
                "layers": self.job.layers,
                "shared_device": shared,
                "link": link,
                "memory": "storages" if self.device.type == "cpu" else "allocator",
            }
        )

    def _enter_node(self) -> str:
        """Where nodes are asked for, move into this rank's. Returns how the link between them is made slow, or ""."""
        if self.config.nodes == 1:
            return ""
        from mlsyslab import netns

        return netns.enter_node(
            self.context,
            nodes=self.config.nodes,
            bytes_per_s=self.config.link_mb_per_s * 1e6,
            timeout_s=COLLECTIVE_TIMEOUT_S,
        )

    def train(self) -> None:
        """The steps. Counting costs at each operator, so the steps that are timed are not counted: the first ones are, until all
        that stays has been made, and the last one."""
        config = self.config
        for step in range(config.steps):
            metered = step < max(config.warmup, SETTLED) or step == config.steps - 1
            self._step(step, metered=metered)
        self.notes.write({"kind": "end", "rank": self.context.rank, "world": config.ranks})
        if config.nodes > 1:
            from mlsyslab import netns

            netns.leave_last(self.context, timeout_s=COLLECTIVE_TIMEOUT_S)

    def _step(self, step: int, *, metered: bool) -> None:
        config, job = self.config, self.job
        assert job is not None
        tokens, targets = (t.to(self.device) for t in batch_of(step, config.shape, config.batch, config.seed))
        dist.barrier()  # so that a step begins at the same time everywhere, and its waits are its own
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.storages.reset()
        laps, before_s = Laps(self.device), run_queue_s()
        cpu_s = time.thread_time()
        mine = [job.my_part(t, self.layout) for t in (tokens, targets)]
        laps.lap("data")

        def mark(name: str) -> None:
            if metered:
                self.storages.mark(name)
            laps.lap(name)
            self.storages.moment = self.phase = {"forward": "backward", "backward": "optimizer"}.get(
                name, name
            )

        self.storages.moment = self.phase = "forward"
        if metered:
            self.storages.adopt(job.modules, job.optimizer)
            self.storages.inputs(*mine)
            self.meter.take()
            self.meter.__enter__()
        try:
            loss = job.forward_backward(mine[0], mine[1], mark)
            if config.clip_norm:
                clip(job, config)
            job.optimizer.step()
            mark("optimizer")
            job.optimizer.zero_grad()
        finally:
            if metered:
                self.meter.__exit__(None, None, None)
        laps.lap("other")
        queue_s = None if before_s is None else (run_queue_s() or 0.0) - before_s
        extra = {"queue_s": queue_s, "metered": metered, "cpu_s": time.thread_time() - cpu_s}
        extra |= self._counted(step) if metered else {}
        self._write(step, laps, self._whole_loss(loss), extra)

    def _write(self, step: int, laps: Laps, loss: float, extra: dict[str, Any]) -> None:
        if self.job and self.job.ops and not extra["metered"]:
            self._pipeline_ops(step, laps.begin_s)
            # inside a schedule the phases are interleaved: what each microbatch took is known from its own marks
            for op, name in (("F", "forward"), ("B", "backward")):
                laps.own_s[name] = sum(o["cpu_s"] for o in self.job.ops if o["op"] == op)
        own = {name: laps.own_s.get(name, 0.0) for name in ("data", "forward", "backward", "optimizer")}
        step_s = laps.last_s - laps.begin_s
        other_s = max(0.0, step_s - sum(own.values()) - laps.wait_s)
        record = StepRecord(
            rank=self.context.rank,
            step=step,
            world=self.context.world,
            warmup=step < self.config.warmup or extra["metered"],
            data_s=own["data"],
            h2d_s=0.0,
            forward_s=own["forward"],
            backward_s=own["backward"],
            sync_s=max(0.0, step_s - sum(own.values()) - other_s),
            optimizer_s=own["optimizer"],
            other_s=other_s,
            step_s=step_s,
            samples=self.layout.batch // self.layout.dp,
            loss=loss,
        )
        self.notes.write({**record.to_json(), **extra, "time_s": time.time()})

    def _pipeline_ops(self, step: int, begin_s: float) -> None:
        """The microbatches of a step on the clock that all ranks of a machine share, from the earliest rank's begin."""
        assert self.job is not None
        earliest = torch.tensor([begin_s], dtype=torch.float64)
        if self.backend == "gloo":
            dist.all_reduce(earliest, op=dist.ReduceOp.MIN)
        for op in self.job.ops:
            times = {name: op[name] - earliest.item() for name in ("begin_s", "end_s")}
            self.notes.write(
                {
                    "kind": "op",
                    "rank": self.context.rank,
                    "step": step,
                    "stage": self.job.stage,
                    **op,
                    **times,
                }
            )

    def _counted(self, step: int) -> dict[str, Any]:
        """The memory and the collectives of a step that was metered; in full as notes, as sums for its record."""
        storages, rows = self.storages, self.meter.take()
        storages.mark("end")
        moments = {**storages.moments, "peak": storages.peak}
        rank = self.context.rank
        self.notes.write(
            {
                "kind": "ledger",
                "rank": rank,
                "step": step,
                "moments": moments,
                "peak_moment": storages.peak_moment,
            }
        )
        self.notes.write({"kind": "traffic", "rank": rank, "step": step, "collectives": rows})
        state, forward, end = (storages.moments[name] for name in ("optimizer", "forward", "end"))
        allocated = memory.allocated_bytes(self.device)
        sizes = (
            {axis: dist.get_world_size(group) for axis, (group, _) in self.job.axes.items()}
            if self.job
            else {}
        )
        sent = [traffic.Collective(**row, size=sizes.get(row["axis"], self.context.world)) for row in rows]
        return {
            "params_bytes": state["params"],
            "grads_bytes": state["grads"],
            "optimizer_bytes": state["optimizer"],
            "activations_bytes": forward["other"] - end["other"],
            "peak_bytes": allocated[1] if allocated else storages.peak["total"],
            "comm_bytes": traffic.comm_bytes(sent, self.backend),
            "comm_payload_bytes": sum(row["bytes"] for row in rows if row["kind"] != "recv"),
            "comm_count": sum(row["count"] for row in rows if row["kind"] != "recv"),
        }

    def _whole_loss(self, loss: torch.Tensor | None) -> float:
        """The loss of the whole job, on every rank: the mean over data-parallel ranks, or the last stage's."""
        assert self.job is not None
        mine = torch.zeros(1, device=self.device) if loss is None else loss.float().reshape(1).clone()
        if "dp" in self.job.axes:
            group = self.job.axes["dp"][0]
            dist.all_reduce(mine, group=group)
            mine /= dist.get_world_size(group)
        if "pp" in self.job.axes and self.context.world > 1:
            dist.broadcast(mine, src=self.context.world - 1)
        return mine.item()

    def out_of_memory(self, error: BaseException) -> None:
        """An out-of-memory is a result: what was live when it came, and what was wanted."""
        wanted = re.search(r"tried to allocate ([\d.]+) ?(bytes|MiB|GiB|KiB)?", str(error))
        scale = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}.get(wanted[2] or "", 1) if wanted else 1
        self.notes.write(
            {
                "kind": "oom",
                "rank": self.context.rank,
                "phase": self.phase,
                "wanted_bytes": round(float(wanted[1]) * scale) if wanted else None,
                "cap_bytes": self.cap_bytes or None,
                "live": self.storages.by_role(),
                "says": str(error).splitlines()[0][:200],
            }
        )


def others_ran_out(out: Path, seconds: float = PEER_S) -> bool:
    """Whether some rank has noted an out-of-memory, looked for until `seconds` are over."""
    until = time.monotonic() + seconds
    while True:
        if any(row.get("kind") == "oom" for path in out.glob("rank-*.jsonl") for row in Tail(path).read()):
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.05)


def train(config: Config, out: Path, context: RankContext) -> None:
    """The experiment of one rank. A rank that runs out of memory, or whose peer did, ends without an error."""
    trainer = Trainer(config, out, context)
    try:
        trainer.open()
        trainer.train()
    except Exception as error:
        if memory.is_out_of_memory(error):
            trainer.out_of_memory(error)
        elif not others_ran_out(out):
            raise


def main(payload: dict[str, Any], out: Path) -> None:
    """What `launch` calls in each rank; under torchrun the module's command line does the same."""
    train(from_json(Config, payload), out, rank_context())
    leave(0)


def command_line(argv: list[str]) -> int:
    """For torchrun and srun; see `training.command_line`."""
    return training.command_line(
        argv,
        lab="parallelism",
        config_class=Config,
        preset=preset,
        presets=PRESETS,
        faults_of=faults_of,
        train=train,
    )


if __name__ == "__main__":
    sys.exit(command_line(sys.argv[1:]))
