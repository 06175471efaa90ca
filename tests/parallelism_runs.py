"""Runs of the parallelism lab for its tests: real ranks started once for each configuration, and made-up run directories."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from mlsyslab import launch
from mlsyslab.labs.parallelism.config import Config, faults_of
from mlsyslab.runs import Run, create_run, open_run

WORKER = "mlsyslab.labs.parallelism.worker:main"


@cache
def rows_of(config: Config) -> tuple[dict[str, Any], ...]:
    """Every line that the ranks of a real run wrote; a configuration runs once a session."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        assert launch.Ranks(WORKER, dataclasses.asdict(config), out, config.ranks).wait(120)
        files = [(out / f"rank-{rank}.jsonl").read_text() for rank in range(config.ranks)]
    return tuple(json.loads(line) for text in files for line in text.splitlines())


def write_run(
    path: Path,
    config: Config,
    *,
    held: Mapping[str, float] | None = None,
    sent: Sequence[Mapping[str, Any]] = (),
    step_s: float = 0.1,
    wait_s: Sequence[float] = (),
    queue_s: float = 0.0,
    stage_s: Sequence[float] = (),
    oom: Mapping[str, Any] | None = None,
    cores: float = 16.0,
) -> Run:
    """A run directory with known records. held: bytes of each rank; sent: its collectives; wait_s by rank; stage_s: CPU seconds of a
    microbatch, forward and backward together, by stage; oom: the note of a rank that ran out of memory."""
    create_run(
        "parallelism", config, out=path, truth=[fault.to_json() for fault in faults_of(config)], expected=1
    )
    (path / "environment.json").write_text(json.dumps({"limits": {"usable_cores": cores}}))
    (path / "status.json").write_text(json.dumps({"state": "done", "message": "finished"}))
    names = (
        "params_bytes",
        "grads_bytes",
        "optimizer_bytes",
        "activations_bytes",
        "peak_bytes",
        "comm_bytes",
    )
    memory = dict.fromkeys(names, 1e6) | dict(held or {})
    axis = {"tp": "tp", "pp": "pp"}.get(config.strategy, "dp")
    everybody = list(range(config.ranks))
    axes = (
        {axis: everybody}
        if config.strategy != "fsdp+tp"
        else {"dp": everybody[:: config.tp], "tp": everybody[: config.tp]}
    )
    for rank in range(config.ranks):
        lines: list[dict[str, Any]] = [
            {
                "kind": "header",
                "schema": 1,
                "rank": rank,
                "world": config.ranks,
                "device": "cpu",
                "backend": "gloo",
                "axes": axes,
            }
        ]
        wait = wait_s[rank] if wait_s else 0.0
        for step in range(4):
            counted = step in (0, 3)
            phases = dict.fromkeys(
                ("data_s", "h2d_s", "forward_s", "backward_s", "optimizer_s", "other_s"), (step_s - wait) / 6
            )
            lines.append(
                {"kind": "step", "rank": rank, "step": step, "world": config.ranks, "warmup": counted, **phases, "sync_s": wait,
                 "step_s": step_s, "own_s": step_s - wait, "queue_s": queue_s, "loss": 7.0, "metered": counted, **(memory if counted else {})}
            )  # fmt: skip
        if oom is not None:
            lines = [lines[0], *([{"kind": "oom", "rank": rank, **oom}] if rank == 0 else [])]
        else:
            lines.append({"kind": "traffic", "rank": rank, "step": 3, "collectives": list(sent)})
            state = {
                "params": memory["params_bytes"],
                "grads": memory["grads_bytes"],
                "optimizer": memory["optimizer_bytes"],
                "inputs": 0.0,
            }
            peak = {
                **state,
                "other": memory["peak_bytes"] - sum(state.values()),
                "total": memory["peak_bytes"],
            }
            forward = {
                **state,
                "other": memory["activations_bytes"],
                "total": sum(state.values()) + memory["activations_bytes"],
            }
            moments = {
                "forward": forward,
                "optimizer": {**state, "other": 0.0, "total": sum(state.values())},
                "peak": peak,
            }
            lines.append(
                {"kind": "ledger", "rank": rank, "step": 3, "moments": moments, "peak_moment": "backward"}
            )
        if stage_s:
            for microbatch in range(config.microbatches):
                for op, part in (("F", 1 / 3), ("B", 2 / 3)):
                    at = microbatch * 0.1 + (op == "B") * 0.04
                    lines.append({"kind": "op", "rank": rank, "step": 2, "stage": rank, "op": op, "microbatch": microbatch,
                                  "cpu_s": stage_s[rank] * part, "begin_s": at, "end_s": at + stage_s[rank] * part})  # fmt: skip
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (path / f"rank-{rank}.jsonl").write_text(text)
    return open_run(path)
