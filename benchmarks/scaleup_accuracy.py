"""How often the scale-up clinic tells the optimiser from the system, and names the cause: real, seeded runs of every cause.

    python benchmarks/scaleup_accuracy.py [--seeds 5] [--first-seed 0] [--worlds 2,4,8,64] [--out FILE.jsonl]

Every cause and eight kinds of healthy run, on 2 and 4 gloo processes and on 8 and 64 virtual ranks, each with every seed. Each
line of FILE is one run, written as it ends, and a run that stands there already is not repeated: interrupt it and call it
again. Aims: the right bucket (optimiser, system, healthy) in 95 % of the runs; the right cause in 90 % of those in which one is
named; no accusation of a healthy run. Printed at the end: the confusion matrix, the figures beside their aims, the
stories of divergence and recovery, and one JSON object. Exit code 1 where an aim is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlsyslab import launch, scaleup
from mlsyslab.contract import LabError

REAL = (2, 4)  # worlds of processes; larger ones are virtual
HEALTHY: dict[str, dict[str, Any]] = {
    "healthy": {},
    "healthy, seeds differ before DDP": {"init_seeds": "per rank"},
    "healthy, reduced in float16": {"wire": "fp16"},
    "healthy, float16 with a scaler": {"precision": "fp16"},
    "healthy, AdamW": {"optimizer": "adamw", "lr": 0.001},
    "healthy, augmented": {"augment": 0.15},
    "healthy, cosine": {"schedule": "cosine"},
}
ADAMW = {"optimizer": "adamw", "lr": 0.001}


def cases(worlds: list[int], seeds: range) -> Iterator[tuple[str, scaleup.Config]]:
    """(name, config) of every run; the name is the injected cause, or the kind of healthy run."""
    for seed in seeds:
        for ranks in worlds:
            engine = "processes" if ranks in REAL else "virtual"
            common = {"ranks": ranks, "seed": seed, "engine": engine}
            for cause in (*scaleup.OPTIMISER, *scaleup.SYSTEM):
                yield cause, scaleup.config_for(cause, **common)  # type: ignore[arg-type]  # values of several fields
            healthy = scaleup.config_for("healthy", **common)  # type: ignore[arg-type]  # values of several fields
            for name, change in HEALTHY.items():
                yield name, dataclasses.replace(healthy, **change)
            grown = scaleup.config_for("too few steps", **common)  # type: ignore[arg-type]  # values of several fields
            yield "healthy, scaled four times", dataclasses.replace(grown, cause="healthy")
            summed = scaleup.config_for("sum instead of mean", **common)  # type: ignore[arg-type]  # values of several fields
            yield "sum instead of mean, AdamW", dataclasses.replace(summed, **ADAMW)  # type: ignore[arg-type]  # values of several fields


def one(name: str, config: scaleup.Config) -> dict[str, Any]:
    """Run it, judge it, and set the verdict beside the truth; the run directory is thrown away."""
    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = scaleup.measure(config, out=Path(folder) / "run", timeout_s=300)
        except LabError as error:
            return {"error": str(error)}
        ran_s = time.perf_counter() - began_s
        verdict, summary = scaleup.diagnose(run), run.summary()
    return {
        "true_cause": config.cause,
        "true_rank": config.fault_rank if name.split(",", maxsplit=1)[0] in scaleup_on_one_rank() else None,
        "cause": verdict.cause,
        "bucket": verdict.kind or scaleup.bucket_of(verdict.cause),
        "where": verdict.where,
        "reason": verdict.reason,
        "run_s": ran_s,
        "judged_s": time.perf_counter() - began_s - ran_s,
        **{k: summary[k] for k in ("norm_ratio", "norm_gap", "val_acc_frac", "small_acc_frac", "acc_gap_frac", "final_loss", "record_frac")},
    }  # fmt: skip


def scaleup_on_one_rank() -> tuple[str, ...]:
    """Causes that sit on one rank."""
    from mlsyslab.labs.scaleup.config import ON_ONE_RANK

    return ON_ONE_RANK


def done_in(path: Path) -> dict[str, dict[str, Any]]:
    """The runs that stand in the file already, by their key."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return {row["key"]: row for row in rows if "error" not in row}


def score(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The figures, as shares and counts."""
    named = [row for row in rows if row["cause"] not in ("healthy", "unknown")]
    buckets = [row["bucket"] == scaleup.bucket_of(row["true_cause"]) for row in rows]
    ranked = [row for row in rows if row["true_rank"] is not None and row["cause"] == row["true_cause"]]
    return {
        "runs": float(len(rows)),
        "right_bucket_frac": sum(buckets) / max(1, len(rows)),
        "right_cause_frac": sum(row["cause"] == row["true_cause"] for row in named) / max(1, len(named)),
        "false_accusations": float(sum(row["true_cause"] == "healthy" and row["cause"] != "healthy" for row in rows)),
        "right_rank_frac": sum(row["where"] == f"rank {row['true_rank']}" for row in ranked) / max(1, len(ranked)),
    }  # fmt: skip


def show(rows: list[dict[str, Any]]) -> None:
    """The confusion matrix as pairs, the misses, and the two stories of the learning rate."""
    table = Counter((row["name"], row["cause"]) for row in rows)
    for name in dict.fromkeys(row["name"] for row in rows):
        said = ", ".join(f"{cause} {count}" for (n, cause), count in table.most_common() if n == name)
        print(f"{name:42} -> {said}")
    for row in rows:
        if row["cause"] != row["true_cause"]:
            print(f"  MISS {row['key']}: {row['cause']} {row['where']}: {row['reason'][:180]}")
    for name in ("no warm-up", "healthy, scaled four times"):
        found = [row["val_acc_frac"] for row in rows if row["name"] == name]
        print(f"{name}: test accuracy {', '.join(f'{value:.3f}' for value in found)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--worlds", default="2,4,8,64")
    parser.add_argument("--out", type=Path, default=Path("scaleup_accuracy.jsonl"))
    options = parser.parse_args()
    rows = done_in(options.out)
    worlds = [int(part) for part in options.worlds.split(",")]
    wanted = []
    for name, config in cases(worlds, range(options.first_seed, options.first_seed + options.seeds)):
        key = f"{name}/{config.ranks}/{config.seed}"
        wanted.append(key)
        if key in rows:
            continue
        rows[key] = {"key": key, "name": name, **one(name, config)}
        with options.out.open("a") as file:
            file.write(json.dumps(rows[key]) + "\n")
        if "error" in rows[key]:
            print(f"{key} failed: {rows.pop(key)['error']}", flush=True)
    launch.shut_down()
    found = [rows[key] for key in wanted if key in rows]
    show(found)
    figures = score(found)
    print(json.dumps(figures))
    good = (
        figures["right_bucket_frac"] >= 0.95
        and figures["right_cause_frac"] >= 0.90
        and not figures["false_accusations"]
    )
    return 0 if good and len(found) == len(wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
