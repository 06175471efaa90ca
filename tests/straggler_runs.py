"""Run directories of the straggler lab with known content, as a real run would have left them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mlsyslab import open_run
from mlsyslab.labs.straggler.config import Config
from mlsyslab.records import PHASES, StepRecord, Stream, write_json
from mlsyslab.runs import Run, create_run

HEALTHY = {"data_s": 0.004, "forward_s": 0.030, "backward_s": 0.060, "optimizer_s": 0.001, "other_s": 0.012}
CPU_S, TRANSFER_S = 0.025, 0.006
More = Callable[[int, int], Mapping[str, float]]


def nothing(rank: int, step: int) -> Mapping[str, float]:
    return {}


def write_run(
    path: Path,
    more: More = nothing,
    *,
    ranks: int = 4,
    steps: int = 26,
    warmup: int = 2,
    noise: float = 0.03,
    seed: int = 0,
    notes: Callable[[int], list[dict[str, Any]]] = lambda rank: [],
    telemetry: Callable[[int], dict[str, Any]] | None = None,
    stage: Callable[[int], int] | None = None,
    config: Config | None = None,
    device_clock: bool = False,
) -> Run:
    """more(rank, step): seconds that are added to phases ("data_s", ...) or to counters (cpu_s, queue_s, gc_s, load_*).

    device_clock: nobody counts CPU seconds and run-queue wait, as where the phases are a GPU's.
    Steps are laid out as a synchronous job would: a rank's sync lasts until the slowest has come, and what a rank
    does after the exchange is waited for in the next step.
    """
    rng = np.random.default_rng(seed)
    config = config or Config(
        ranks=ranks, fault="none", slow_rank=0, steps=max(steps, 5), warmup=min(warmup, 4)
    )
    create_run("straggler", config, out=path, truth=[], expected=steps * ranks)
    write_json(path / "environment.json", {"probe": {}, "limits": {"usable_cores": 8.0}})
    write_json(path / "status.json", {"state": "done", "message": "finished"})
    streams = [Stream(path / f"rank-{rank}.jsonl") for rank in range(ranks)]
    for rank, stream in enumerate(streams):
        stream.write(
            {
                "kind": "header",
                "rank": rank,
                "world": ranks,
                "gradient_bytes": 4e6,
                "join_s": 0.05,
                "paced": True,
            }
        )
        if telemetry:
            lines = Stream(path / f"telemetry-{rank}.jsonl")
            for _ in range(4):
                lines.write({"kind": "telemetry", "rank": rank, **telemetry(rank)})
    free = np.zeros(ranks)  # when each rank has finished what came after the last exchange
    for step in range(steps):
        laps = [
            {name: HEALTHY.get(name, 0.0) * (1 + noise * abs(rng.standard_normal())) + more(rank, step).get(name, 0.0) for name in PHASES}
            for rank in range(ranks)
        ]  # fmt: skip
        ready = np.array(
            [
                free[r] + sum(laps[r][n] for n in ("data_s", "h2d_s", "forward_s", "backward_s"))
                for r in range(ranks)
            ]
        )
        done = ready.max() + TRANSFER_S
        for rank, stream in enumerate(streams):
            laps[rank]["sync_s"] = float(done - ready[rank]) + more(rank, step).get("sync_s", 0.0)
            extra = more(rank, step)
            record = StepRecord(
                rank=rank, step=step, world=ranks, warmup=step < warmup, **laps[rank], step_s=sum(laps[rank].values()),
                samples=2, bytes=150_000, cpu_s=CPU_S + extra.get("cpu_s", 0.0), overloaded=bool(extra.get("overloaded", False)),
                extra={
                    "queue_s": 0.002 + extra.get("queue_s", 0.0), "gc_s": extra.get("gc_s", 0.0),
                    "load_cpu_s": 0.008 + extra.get("load_cpu_s", 0.0), "load_read_s": 0.001 + extra.get("load_read_s", 0.0),
                    "load_wall_s": 0.010 + extra.get("load_wall_s", 0.0), "length": 1.0 + extra.get("length", 0.0),
                    **({"stage": float(stage(rank))} if stage else {}),
                },
            )  # fmt: skip
            row = record.to_json()
            stream.write({**row, "cpu_s": None, "queue_s": None} if device_clock else row)
        free = np.array([done + laps[r]["optimizer_s"] + laps[r]["other_s"] for r in range(ranks)])
    for rank, stream in enumerate(streams):
        for note in notes(rank):
            stream.write({"rank": rank, **note})
    return open_run(path)


def slow(rank: int, start: int = 0, **seconds: float) -> More:
    """`seconds` more on `rank` from step `start` on."""
    return lambda r, step: seconds if r == rank and step >= start else {}
