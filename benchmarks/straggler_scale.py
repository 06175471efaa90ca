"""How long it takes to find the straggler among many ranks: from a table of step records to who is to blame.

    python benchmarks/straggler_scale.py [--ranks 1024,4096,16384] [--steps 200] [--repeat 5]

For each number of ranks three simulated jobs, each with its right answer: one slow rank, a healthy job, and a slow
rank that is another one in each step. "rounds" turns the table (a row for each rank and step) into arrays, "blame"
says who. Printed are the median and the range over the repeats, in CPU seconds of this one thread, which other
processes disturb less than wall time; the ratio to the next smaller job, where 4 times the ranks in 4 times the time
is linear; and the exponent of growth over all sizes. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd

from mlsyslab.labs.straggler.blame import Array, blame, rounds
from mlsyslab.labs.straggler.simulate import Job, records
from mlsyslab.records import PHASES

CASES = {"one slow rank": "rank", "healthy": "healthy", "another each step": "rotates"}
TARGET_S = 10.0  # "in seconds": rounds and blame of the largest job together


def job(case: str, ranks: int, steps: int) -> tuple[Array, Array]:
    """(own, wait), [steps, ranks] seconds."""
    if case == "one slow rank":
        return records(Job(ranks=ranks, steps=steps, slow_factor=1.2))
    own, wait = records(Job(ranks=ranks, steps=steps, slow_ranks=0))
    if case == "healthy":
        return own, wait
    own[np.arange(steps), np.random.default_rng(1).integers(0, ranks, steps)] *= 1.5
    return own, own.max(1)[:, None] - own + wait.min()


def table(own: Array, wait: Array) -> pd.DataFrame:
    """Step records as a run's `records` holds them, one rank after the other; own work is all forward."""
    steps, ranks = own.shape
    frame = pd.DataFrame(0.0, index=range(steps * ranks), columns=list(PHASES))
    frame["forward_s"], frame["sync_s"] = own.T.ravel(), wait.T.ravel()
    frame["rank"], frame["step"] = np.repeat(np.arange(ranks), steps), np.tile(np.arange(steps), ranks)
    return frame


def timed(work: Callable[[], object], repeat: int) -> list[float]:
    """CPU seconds of each of `repeat` calls; one call before them is dropped."""
    seconds = []
    for _ in range(repeat + 1):
        gc.collect()
        began_s = time.thread_time()
        work()
        seconds.append(time.thread_time() - began_s)
    return seconds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="1024,4096,16384", help="numbers of ranks, rising")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=5)
    given = parser.parse_args()
    sizes = [int(part) for part in given.ranks.split(",")]
    found: dict[str, dict[int, list[float]]] = {name: {} for name in ("rounds", *CASES)}
    wrong = []
    print(f"{given.steps} steps, {given.repeat} repeats, CPU seconds")
    print(f"{'what':20}{'ranks':>8}{'median s':>11}{'range':>17}{'ratio':>8}  verdict")
    for ranks in sizes:
        for case, expected in CASES.items():
            own, wait = job(case, ranks, given.steps)
            verdict = blame(own, wait)
            if verdict.kind != expected:
                wrong.append(f"{case}, {ranks} ranks: {verdict.kind}")
            found[case][ranks] = timed(partial(blame, own, wait), given.repeat)
            show(case, found[case], f"{verdict.kind} {', '.join(map(str, verdict.ranks))}".strip())
        frame = table(own, wait)
        found["rounds"][ranks] = timed(partial(rounds, frame), given.repeat)
        show("rounds", found["rounds"], "")
        del frame, own, wait
    medians = {
        name: {n: statistics.median(times) for n, times in rows.items()} for name, rows in found.items()
    }
    slowest = max(medians[case][sizes[-1]] for case in CASES)
    whole_s = medians["rounds"][sizes[-1]] + slowest
    print(f"rounds and blame of {sizes[-1]} ranks: {whole_s:.1f} s (target {TARGET_S:.0f} s)")
    growth = {name: exponent(rows) for name, rows in medians.items()} if len(sizes) > 1 else {}
    if growth:
        print("time = c × ranks^p: " + ", ".join(f"p = {p:.2f} ({name})" for name, p in growth.items()))
    print(
        json.dumps(
            {
                "steps": given.steps,
                "repeat": given.repeat,
                "cpu_s": {
                    name: {str(n): [round(t, 4) for t in times] for n, times in rows.items()}
                    for name, rows in found.items()
                },
                "growth_exponent": growth,
                "largest_whole_s": whole_s,
                "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "target_s": TARGET_S,
                "wrong": wrong,
                "load_1min": os.getloadavg()[0],
            }
        )
    )


def exponent(medians: dict[int, float]) -> float:
    """p of time = c × ranks^p, by least squares in logarithms."""
    return float(np.polyfit([math.log(n) for n in medians], [math.log(s) for s in medians.values()], 1)[0])


def show(name: str, rows: dict[int, list[float]], verdict: str) -> None:
    *before, (ranks, times) = rows.items()
    middle, bounds = statistics.median(times), f"{min(times):.3f}..{max(times):.3f}"
    ratio = f"{middle / statistics.median(before[-1][1]):.1f}" if before else ""
    print(f"{name:20}{ranks:8}{middle:11.3f}{bounds:>17}{ratio:>8}  {verdict}", flush=True)


if __name__ == "__main__":
    main()
