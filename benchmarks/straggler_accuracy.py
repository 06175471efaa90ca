"""How often the straggler lab names the right rank and the right cause: 60 real, seeded runs.

    python benchmarks/straggler_accuracy.py [--runs 60] [--out FILE.jsonl] [--seed 0]

42 runs with a fault (every fault in turn; 2 to 4 ranks; magnitudes from +20 % to three times as long; constant, or
in bursts), 12 healthy ones, 6 in which the slow rank rotates. Each line of FILE is one run, written as it ends, and a run that
stands there already is not repeated: interrupt it and call it again. Aims: of the runs in which a rank is named the
right one in 95 %; named in 85 % of the faulty ones; nobody named in a healthy or rotating run; the right cause in
85 % of the named. Printed at the end: the confusion matrix, the figures beside their aims, and one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from mlsyslab import launch, straggler
from mlsyslab.contract import LabError
from mlsyslab.labs.straggler.config import MECHANISMS, Config

FAULTY = tuple(name for name in MECHANISMS if name not in ("none", "data_imbalance"))
MAGNITUDES = (0.2, 0.35, 0.6, 1.0, 2.0)
BURSTS = (
    "slow_forward",
    "slow_backward",
    "slow_optimizer",
)  # what can act in bursts without a prefetch queue hiding it
STEPS = 26


def cases(runs: int, seed: int) -> list[Config]:
    """The configurations, the same for a seed: a fifth healthy, a tenth rotating, the rest faulty."""
    draw, found = random.Random(seed), []
    healthy, rotating = round(runs / 5), round(runs / 10)
    for number in range(runs):
        ranks = draw.choice((2, 3, 3, 4))
        common: dict[str, Any] = {
            "ranks": ranks,
            "slow_rank": draw.randrange(ranks),
            "steps": STEPS,
            "seed": seed + number,
        }
        magnitude = draw.choice(MAGNITUDES)
        if number < healthy:
            found.append(Config(fault="none", **common))
        elif number < healthy + rotating:
            how = draw.choice(("data_imbalance", "slow_forward", "slow_backward"))
            found.append(Config(fault=how, pattern="rotating", magnitude=max(0.6, magnitude), **common))
        else:
            fault = FAULTY[number % len(FAULTY)]
            bursts = fault in BURSTS and magnitude >= 0.6 and draw.random() < 0.5
            if fault == "periodic_pause":
                common["steps"] = 44
            if bursts:
                common["steps"] = 36
            found.append(
                Config(
                    fault=fault,
                    magnitude=magnitude,
                    pattern="intermittent" if bursts else "constant",
                    **common,
                )
            )
    draw.shuffle(found)
    return found


def one(config: Config) -> dict[str, Any]:
    """Run it, judge it, and set the verdict beside the truth; the run directory is thrown away."""
    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = straggler.measure(config, out=Path(folder) / "run", timeout_s=180)
        except LabError as error:
            return {"error": str(error)}
        verdict = straggler.diagnose(run)
        truth = run.truth[0] if run.truth else {"cause": "healthy", "rank": None}
        online = watch(run.records.to_dict("records"), config.ranks)
    faulty = truth["rank"] is not None
    return {
        "fault": config.fault,
        "pattern": config.where,
        "magnitude": config.magnitude,
        "ranks": config.ranks,
        "true_rank": truth["rank"],
        "true_cause": truth["cause"],
        "faulty": faulty,
        "where": verdict.where,
        "cause": verdict.cause,
        "kind": verdict.kind,
        "reason": verdict.reason,
        **online,
        "load": os.getloadavg()[0],
        "run_s": time.perf_counter() - began_s,
    }


def watch(records: list[dict[str, Any]], ranks: int) -> dict[str, Any]:
    """What the online detector would have said while the run went on: whom it named first, after how many counted
    steps, and in how many steps it named anybody."""
    detector, named = straggler.Detector(ranks), []
    for row in sorted(records, key=lambda row: (row["step"], row["rank"])):
        if found := detector.feed(row):
            named.append(found)
    counted = [row["step"] for row in records if not row["warmup"]]
    return {
        "online_rank": named[0].rank if named else None,
        "online_after_steps": named[0].step - min(counted) + 1 if named else None,
        "online_steps": len({found.step for found in named}),
        "counted_steps": len(set(counted)),
    }


def done_in(path: Path, key: str) -> dict[int, dict[str, Any]]:
    """The runs that stand in the file already, by number."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return {row["number"]: row for row in rows if row.get("key") == key and "error" not in row}


def score(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The four figures, as shares."""
    faulty = [row for row in rows if row["faulty"]]
    named = [row for row in faulty if row["where"]]
    right = [row for row in named if row["where"] == f"rank {row['true_rank']}"]
    false = [row for row in rows if not row["faulty"] and row["where"]]
    causes = [row for row in right if row["cause"] == row["true_cause"]]
    accused = len(named) + len(false)
    return {
        "right_rank_frac": len(right) / max(1, accused),
        "named_frac": len(named) / max(1, len(faulty)),
        "false_alarms": float(len(false)),
        "right_cause_frac": len(causes) / max(1, len(named)),
        "runs": float(len(rows)),
        **online_score(rows),
    }


def online_score(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The detector's own figures: constant faults in own work that it named rightly and how soon, and its false alarms."""
    hidden = (
        "slow_link",
        "late_start",
        "periodic_pause",
    )  # nobody's own work is longer, or only now and then
    steady = [
        row for row in rows if row["faulty"] and row["pattern"] == "constant" and row["fault"] not in hidden
    ]
    right = [row for row in steady if row["online_rank"] == row["true_rank"]]
    quiet = [row for row in rows if not row["faulty"]]
    delays = sorted(row["online_after_steps"] for row in right)
    return {
        "online_named_frac": len(right) / max(1, len(steady)),
        "online_median_steps": float(delays[len(delays) // 2]) if delays else float("nan"),
        "online_within_10_frac": sum(delay <= 10 for delay in delays) / max(1, len(delays)),
        "online_false_alarm_runs": float(sum(row["online_rank"] is not None for row in quiet)),
        "online_false_alarm_steps_frac": sum(row["online_steps"] for row in quiet)
        / max(1, sum(row["counted_steps"] for row in quiet)),
    }


def show(rows: list[dict[str, Any]]) -> None:
    """The confusion matrix (rows: what was injected, columns: the verdict's cause) and the misses."""
    table = Counter((row["fault"] if row["faulty"] else row["true_cause"], row["cause"]) for row in rows)
    columns = sorted({cause for _, cause in table})
    print(f"\n{'injected':18}" + "".join(f"{cause:>15}" for cause in columns))
    for fault in sorted({fault for fault, _ in table}):
        print(f"{fault:18}" + "".join(f"{table[fault, cause] or '':>15}" for cause in columns))
    for row in rows:
        wrong = row["faulty"] and (
            row["where"] != f"rank {row['true_rank']}" or row["cause"] != row["true_cause"]
        )
        if wrong or (not row["faulty"] and row["where"]):
            print(f"  {row['fault']} {row['pattern']} x{row['magnitude']} on rank {row['true_rank']} of {row['ranks']}, load "
                  f"{row['load']:.1f}: {row['where']}, {row['cause']} ({row['kind']}): {row['reason']}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("straggler_accuracy.jsonl"))
    options = parser.parse_args()
    began_s, key = time.perf_counter(), f"{options.runs}/{options.seed}"
    rows = done_in(options.out, key)
    for number, config in enumerate(cases(options.runs, options.seed)):
        if number in rows:
            continue
        row = {"key": key, "number": number, **one(config)}
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if "error" in row:
            print(f"{number:3} failed: {row['error']}", flush=True)
            continue
        rows[number] = row
        print(f"{number:3} {row['fault']:16} {row['pattern']:13} x{row['magnitude']:<5} rank {row['true_rank']} of {row['ranks']}"
              f" -> {row['where']}, {row['cause']} {row['kind']}  ({row['run_s']:.0f} s)", flush=True)  # fmt: skip
    launch.shut_down()
    ordered = [rows[number] for number in sorted(rows)]
    figures = score(ordered)
    show(ordered)
    aims = {"right_rank_frac": 0.95, "named_frac": 0.85, "false_alarms": 0.0, "right_cause_frac": 0.85}
    for name, aim in aims.items():
        print(f"{name:18} {figures[name]:6.3f}   aim {'at least' if aim else 'at most'} {aim:g}")
    print(
        "online detector: "
        + ", ".join(
            f"{k.removeprefix('online_')} {v:.3g}" for k, v in figures.items() if k.startswith("online_")
        )
    )
    print(json.dumps({**figures, "seconds": time.perf_counter() - began_s, "seed": options.seed}))


if __name__ == "__main__":
    main()
