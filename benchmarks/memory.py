"""The memory of a rank as the parallelism lab predicts it, beside what real ranks hold and what other estimators say.

    python benchmarks/memory.py [--rivals-python PATH] [--models 1M,4M] [--batch 12 --seq 160] [--keep FOLDER]

Every row trains for real on CPU ranks and counts the storages of its tensors; errors are predicted / measured - 1 for the rank with
the highest peak, of its model state (parameters, gradients, Adam) and of its peak. The closed form was written against runs at the
default shapes; --batch and --seq choose others. Resumable: with --keep, runs that are there are read.

The rivals are no dependency of the project: PATH is a Python that has torch, what this project needs, and those of accelerate,
deepspeed and mlsysim that are to be compared; what it lacks is reported as absent. Each is asked for what it offers: accelerate knows
no split and calls its figure a peak; DeepSpeed counts model state alone, of ZeRO-2 and ZeRO-3 (its ZeRO-2 stands beside our ZeRO-1,
which it has not); mlsysim's attention keeps no scores ("selective"), as ours, it adds float32 master weights to float32 weights, and
1F1B is one microbatch to it. Prints tables; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlsyslab import open_run, parallelism
from mlsyslab.labs.parallelism.config import Config, layout_of
from mlsyslab.labs.parallelism.evidence import facts_of
from mlsyslab.labs.parallelism.ledger import STATE, largest

OURS = "ours"
RIVALS = ("accelerate", "deepspeed", "mlsysim")
BATCH = {"1M": 8, "4M": 8, "17M": 4}
WAYS: tuple[dict[str, Any], ...] = (
    *({"strategy": strategy} for strategy in ("ddp", "zero1", "fsdp", "tp", "pp")),
    {"strategy": "ddp", "precision": "mixed"},
    {"strategy": "fsdp", "precision": "mixed"},
    {"strategy": "pp", "precision": "mixed"},
    {"strategy": "ddp", "checkpointing": True},
    {"strategy": "fsdp", "checkpointing": True},
    {"strategy": "fsdp", "reshard": False},
    {"strategy": "pp", "schedule": "gpipe"},
    {"strategy": "fsdp", "ranks": 4},
    {"strategy": "fsdp+tp", "ranks": 4},
)
Estimate = Mapping[str, float | None]  # "state" and "peak", bytes


# ---- the rivals' side: runs in --rivals-python
def accelerate(config: Config) -> Estimate:
    """What `accelerate estimate-memory` prints for training with Adam: the largest of its four figures, for the whole model."""
    import torch
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    from mlsyslab.labs.parallelism.gpt import GPT

    with torch.device("meta"):
        model = GPT(config.shape)
    total_bytes, _ = calculate_maximum_sizes(model)
    kind = "float32" if config.precision == "fp32" else "bfloat16"
    most = float(max(estimate_training_usage(total_bytes, kind).values()))
    return {"state": most, "peak": most}


def deepspeed(config: Config) -> Estimate:
    """Its estimators without offloading; the largest layer is the largest single module that owns parameters."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as zero3
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as zero2

    model, state = config.shape, None
    if config.strategy == "fsdp":
        layer = max(model.vocab_params, model.width * model.ffn)
        state = zero3(model.params, layer, num_gpus_per_node=config.ranks, cpu_offload=False, cpu_offload_params=False)[1]  # fmt: skip
    elif config.strategy == "zero1":
        state = zero2(model.params, num_gpus_per_node=config.ranks, cpu_offload=False)[1]
    return {"state": state, "peak": None}


def mlsysim(config: Config) -> Estimate:
    """Its TrainingMemoryModel, on a device large enough not to matter."""
    from mlsysim import Hardware
    from mlsysim.core.units import ureg
    from mlsysim.engine.solvers.training import TrainingMemoryModel
    from mlsysim.models.types import TransformerWorkload

    model, layout = config.shape, layout_of(config)
    found = TrainingMemoryModel().solve(
        TransformerWorkload(name=model.name, architecture="Transformer", parameters=model.params * ureg.count, layers=model.layers,
                            hidden_dim=model.width, heads=model.heads, kv_heads=model.kv_heads),
        Hardware.Cloud.H100, layout.batch, seq_len=layout.seq, precision="fp32" if layout.precision == "fp32" else "fp16",
        activation_checkpointing="full" if layout.checkpointing else "selective", tp_size=layout.tp, pp_size=layout.pp,
        dp_size=layout.dp, zero_stage={"none": 0, "zero1": 1, "fsdp": 3}[layout.shard],
        gradient_accumulation_steps=layout.microbatches if layout.schedule == "1f1b" else 1,
    )  # fmt: skip
    state = found.weights + found.gradients + found.optimizer_state
    return {name: float(one.to("byte").magnitude) for name, one in (("state", state), ("peak", found.total_memory))}  # fmt: skip


def estimate() -> None:
    """Read configurations from standard input; the last line printed is what each rival says of each, None where it is absent."""
    asked = [Config(**{**given, "stage_split": tuple(given["stage_split"])}) for given in json.load(sys.stdin)]  # fmt: skip
    said: dict[str, Any] = {}
    for name, ask in (("accelerate", accelerate), ("deepspeed", deepspeed), ("mlsysim", mlsysim)):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            said[name] = None
            continue
        said[name] = {"version": version, "estimates": [ask(config) for config in asked]}
    print("\n" + json.dumps(said))


# ---- our side
def rivals(python: str | None, configs: list[Config]) -> dict[str, Any]:
    """What the rivals say, asked in the other Python. Raises CalledProcessError, its errors shown, where that fails."""
    if python is None:
        return dict.fromkeys(RIVALS)
    root = str(Path(__file__).resolve().parents[1])
    asked = json.dumps([dataclasses.asdict(config) for config in configs])
    # an absolute path without resolving links: a virtual environment's Python is one
    done = subprocess.run(
        [os.path.abspath(python), __file__, "--estimate"], input=asked, stdout=subprocess.PIPE, text=True, check=True,
        env={**os.environ, "PYTHONPATH": root},
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(config: Config, path: Path) -> dict[str, float]:
    """State and peak, bytes, of the rank with the highest peak; measured now unless `path` has the run."""
    run = open_run(path) if path.is_dir() else None
    if run is None or run.status["state"] != "done":
        fresh = path if run is None else path.with_name(f"{path.name}-again-{os.getpid()}")
        run = parallelism.start(config, out=fresh, probe=False).wait(300)
    held = max(facts_of(run).memory.values(), key=lambda one: one["peak_bytes"])
    return {"state": sum(held[f"{name}_bytes"] for name in STATE), "peak": held["peak_bytes"]}


def ours(config: Config) -> Estimate:
    """The closed form for the heaviest rank."""
    found = largest(config.shape, layout_of(config))
    return {"state": found.state_bytes, "peak": found.peak_bytes}


def error(said: float | None, is_bytes: float) -> float | None:
    """predicted / measured - 1; None where nothing was predicted."""
    return None if said is None else said / is_bytes - 1


def title(config: Config) -> str:
    """The row's name: strategy, ranks, and what is not the default."""
    extras = (
        ("mixed", config.precision == "mixed"),
        ("checkpointing", config.checkpointing),
        ("no reshard", not config.reshard),
        ("gpipe", config.strategy == "pp" and config.schedule == "gpipe"),
    )
    return " ".join(
        [
            config.model,
            f"{config.batch}x{config.shape.seq}",
            config.strategy,
            f"on {config.ranks}",
            *(name for name, is_so in extras if is_so),
        ]
    )


def spread(rows: list[dict[str, Any]], who: str, what: str) -> dict[str, float] | None:
    """Median and largest size of an estimator's errors over the rows that it has an answer for."""
    sizes = [abs(row[who][what]) for row in rows if who in row and row[who][what] is not None]
    return {"median": statistics.median(sizes), "most": max(sizes), "rows": len(sizes)} if sizes else None


def shown(value: float | None) -> str:
    """An error in percent, in a column."""
    return f"{'-':>8}" if value is None else f"{value:+8.1%}"


def compare(configs: list[Config], theirs: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Measure every configuration and print its row: bytes, and each estimator's errors of state and peak."""
    there = [OURS, *(name for name in RIVALS if theirs[name])]
    print(f"{'errors of state, peak':36} {'state MB':>9} {'peak MB':>9}" + "".join(f"  {who:>16}" for who in there))  # fmt: skip
    rows = []
    for k, config in enumerate(configs):
        held = measured(config, folder / title(config).replace(" ", "-"))
        said = {OURS: ours(config)} | {name: theirs[name]["estimates"][k] for name in there[1:]}
        errors = {who: {what: error(said[who][what], held[what]) for what in held} for who in there}
        rows.append({"row": title(config), "strategy": config.strategy, "state_bytes": held["state"], "peak_bytes": held["peak"], **errors})  # fmt: skip
        cells = "".join(f"  {shown(errors[who]['state'])}{shown(errors[who]['peak'])}" for who in there)
        print(f"{title(config):36} {held['state'] / 1e6:9.1f} {held['peak'] / 1e6:9.1f}{cells}", flush=True)
    return rows


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and largest error of every estimator, and of ours by strategy, as they are printed."""
    strategies = {
        row["strategy"]: [one for one in rows if one["strategy"] == row["strategy"]] for row in rows
    }
    found = {who: {what: spread(rows, who, what) for what in ("state", "peak")} for who in (OURS, *RIVALS)}
    for strategy, some in strategies.items():
        found[f"{OURS}, {strategy}"] = {what: spread(some, OURS, what) for what in ("state", "peak")}
    for who, errors in found.items():
        for what, one in errors.items():
            if one:
                print(f"{who:14} {what:6} median {one['median']:7.2%}, most {one['most']:7.2%} of {one['rows']} rows")  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rivals-python", help="a Python that has the rivals; default none")
    parser.add_argument("--models", default="1M,4M")
    parser.add_argument(
        "--batch", type=int, default=0, help="sequences of a step; 0 is the model's default here"
    )
    parser.add_argument("--seq", type=int, default=0, help="tokens of a sequence; 0 is the model's own")
    parser.add_argument("--keep", type=Path, help="folder for the runs; default a temporary one")
    parser.add_argument("--estimate", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.estimate:
        estimate()
        return
    folder = given.keep or Path(tempfile.mkdtemp(prefix="memory-"))
    common: dict[str, Any] = {"ranks": 2, "steps": 4, "device": "cpu", "seq": given.seq}
    configs = [
        Config(**common | {"model": model, "batch": given.batch or BATCH.get(model, 8)} | way)
        for model in given.models.split(",")
        for way in WAYS
    ]
    theirs = rivals(given.rivals_python, configs)
    rows = compare(configs, theirs, folder)
    found = summarise(rows)
    for name in RIVALS:
        print(f"{name}: {theirs[name]['version'] if theirs[name] else 'absent'}")
    versions = {name: theirs[name] and theirs[name]["version"] for name in RIVALS}
    print(json.dumps({"versions": versions, "summary": found, "rows": rows}))


if __name__ == "__main__":
    main()
