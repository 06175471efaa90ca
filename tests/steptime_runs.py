"""Run directories with known content, as a real run would have left them, for the tests of the diagnosis."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mlsyslab import open_run
from mlsyslab.labs.steptime.config import Config
from mlsyslab.records import PHASES, StepRecord, Stream, write_json
from mlsyslab.runs import Run, create_run

PROBE = {"matmul_flops_per_s": 60e9, "gpu_float32_matmul_flops_per_s": 50e12}


def write_run(
    path: Path,
    phases: Mapping[str, float] | Callable[[int, int], Mapping[str, float]],
    *,
    config: Config | None = None,
    ranks: int = 1,
    steps: int = 20,
    warmup: int = 2,
    noise: float = 0.02,
    seed: int = 0,
    telemetry: Mapping[str, Any] | None = None,
    header: Mapping[str, Any] | None = None,
    usable_cores: float = 8.0,
    **fields: Any,
) -> Run:
    """phases: seconds by phase, or a function of (rank, step); the rest of a step is a millisecond of other_s."""
    config = config or Config(ranks=ranks)
    create_run("steptime", config, out=path, truth=[], expected=steps * ranks)
    write_json(path / "environment.json", {"probe": PROBE, "limits": {"usable_cores": usable_cores}})
    write_json(path / "status.json", {"state": "done", "message": "finished"})
    add_world(
        path, phases, ranks=ranks, steps=steps, warmup=warmup, noise=noise, seed=seed, header=header, **fields
    )
    if telemetry is not None:
        stream = Stream(path / "telemetry-0.jsonl")
        for _ in range(4):
            stream.write({"kind": "telemetry", "rank": 0, **telemetry})
    return open_run(path)


def add_world(path, phases, *, ranks, steps=20, warmup=2, noise=0.02, seed=0, header=None, **fields) -> None:
    """The records of one world size."""
    rng = np.random.default_rng(seed)
    for rank in range(ranks):
        stream = Stream(path / f"rank-{rank}.jsonl")
        stream.write(
            {
                "kind": "header",
                "rank": rank,
                "world": ranks,
                "device": "cpu",
                "paced": False,
                **(header or {}),
            }
        )
        for step in range(steps):
            given = phases(rank, step) if callable(phases) else phases
            values = {name: given.get(name, 0.001 if name == "other_s" else 0.0) for name in PHASES}
            values = {name: value * (1 + noise * rng.standard_normal()) for name, value in values.items()}
            record = StepRecord(
                rank=rank, step=step, world=ranks, warmup=step < warmup, **values, step_s=sum(values.values()),
                samples=8, bytes=600_000, cpu_s=values["forward_s"] + values["backward_s"], **fields,
            )  # fmt: skip
            stream.write(record.to_json())


def config_for(**changes: Any) -> Config:
    return dataclasses.replace(Config(), **changes)
