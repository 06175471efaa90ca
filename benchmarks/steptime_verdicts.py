"""How often each preset of the step-time lab is diagnosed as its name says, quiet and beside busy loops.

    python benchmarks/steptime_verdicts.py --repeat 10 --busy 2 --keep /tmp/verdicts

Resumable: with --keep, runs that are there already are read, not measured again. Prints a table, one JSON line last.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import multiprocessing
import os
import tempfile
from pathlib import Path

from mlsyslab import open_run, steptime
from mlsyslab.contract import LabError
from mlsyslab.runs import Run

EXPECTED = {
    "worked_example": "input",
    "quick": "input",
    "compute_bound": "compute",
    "communication_bound": "communication",
    "host_bound": "host",
    "healthy": "healthy",
    "scaling": "communication",
}


def burn() -> None:
    while True:
        sum(range(1000))


def one_run(preset: str, path: Path) -> Run:
    """The run in `path`, measured now unless it is there and done."""
    if path.is_dir():
        run = open_run(path)
        if run.status["state"] == "done":
            return run
        path = path.with_name(f"{path.name}-again-{os.getpid()}")
    return steptime.measure(dataclasses.replace(steptime.preset(preset)), out=path, timeout_s=300)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--busy", type=int, default=0, help="busy loops beside the lab")
    parser.add_argument("--presets", default=",".join(EXPECTED))
    parser.add_argument("--keep", type=Path, help="folder for the runs; default a temporary one")
    given = parser.parse_args()
    folder = given.keep or Path(tempfile.mkdtemp(prefix="verdicts-"))
    loops = [
        multiprocessing.get_context("spawn").Process(target=burn, daemon=True) for _ in range(given.busy)
    ]
    for loop in loops:
        loop.start()
    seen: dict[str, collections.Counter[str]] = {
        preset: collections.Counter() for preset in given.presets.split(",")
    }
    waits: dict[str, list[float]] = collections.defaultdict(list)
    for k in range(given.repeat):
        for preset, counts in seen.items():
            try:
                run = one_run(preset, folder / f"{preset}-busy{given.busy}-{k}")
                counts[steptime.diagnose(run).cause] += 1
                waits[preset].append(run.summary()["data_frac"])
            except LabError as error:
                counts["error"] += 1
                print(f"{preset} {k}: {error}", flush=True)
    for loop in loops:
        loop.terminate()
    for preset, counts in seen.items():
        low, high = min(waits[preset], default=0), max(waits[preset], default=0)
        right = counts[EXPECTED[preset]]
        print(
            f"{preset:20} right {right}/{given.repeat}  {dict(counts)}  data wait {low:.0%}..{high:.0%} of the step"
        )
    print(
        json.dumps(
            {
                "busy_loops": given.busy,
                "load_1min": os.getloadavg()[0],
                "verdicts": {k: dict(v) for k, v in seen.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
