"""Seconds from `start` to the first step record: the first run of a process, and the following ones.

python benchmarks/start_latency.py --repeat 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from mlsyslab import steptime


def first_step_s(config: steptime.Config, out: Path) -> float:
    """Start a run, wait for its first record, stop it."""
    began = time.perf_counter()
    run = steptime.start(config, out=out, probe=False)
    while not run.poll() and not run.finished:
        time.sleep(0.005)
    took = time.perf_counter() - began
    run.stop()
    run.wait(20)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5)
    given = parser.parse_args()
    config = steptime.Config(ranks=2, steps=200, batch_size=2, compute_s=0.02, width=32, paced=True)
    with tempfile.TemporaryDirectory() as folder:
        times = [first_step_s(config, Path(folder) / str(k)) for k in range(given.repeat + 1)]
    print(
        f"first run {times[0]:.2f} s; later runs median {statistics.median(times[1:]):.2f} s, worst {max(times[1:]):.2f} s"
    )
    print(json.dumps({"first_s": times[0], "later_s": times[1:], "torch_in_caller": "torch" in sys.modules}))


if __name__ == "__main__":
    main()
