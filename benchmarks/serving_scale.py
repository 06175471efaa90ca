"""How the batcher and the simulation grow: throughput per batch must not depend on how much waits or how long it runs.

    python benchmarks/serving_scale.py [--queued 10,100,1000,10000] [--batches 100000,1000000] [--repeat 3]

"queued" keeps so many requests waiting while batches are taken and the batcher is refilled, for both bindings.
"batches" simulates so many batches without a pause, half of the requests with a queue timeout, some of which expire; at the end
every counter must be zero, and in virtual time no tenth of the batches may run slower than another. "requests" is a million requests at 80 % load on 1
and on 1,000 replicas. Times are CPU seconds of this thread, the queued medians over the repeats. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np

from mlsyslab.labs.serving.arrivals import Schedule
from mlsyslab.labs.serving.config import Config
from mlsyslab.labs.serving.policies import BINDINGS, Batcher, Request
from mlsyslab.labs.serving.simulate import simulate

S = 0.002 + 0.0005 * np.arange(1, 9)  # seconds of a batch of 1..8 rows
TAKES = 20_000
LEAST_RATIO = 0.8  # slowest over fastest; below it the growth is not flat
TARGET_S = 10.0  # for a million requests


def take(binding: str, queued: int) -> float:
    """CPU seconds of TAKES batches, each refilled, while `queued` requests of two priorities wait."""
    batcher = Batcher(8, 0.005, binding)
    number, now = 0, 0.0

    def refill() -> None:
        nonlocal number
        while batcher.count < queued:
            batcher.add(Request(number, now, priority=number % 2, deadline_s=now + 1e6))
            number += 1

    refill()
    assert batcher.take(10.0) is not None
    refill()
    gc.collect()
    gc.disable()  # as timeit does: what the collector costs depends on what else lives in the process
    began_s = time.thread_time()
    for index in range(TAKES):
        now = index * 0.001
        assert batcher.take(now + 10.0) is not None
        refill()
    took_s = time.thread_time() - began_s
    gc.enable()
    return took_s


def batches(number: int) -> dict[str, Any]:
    """About so many batches; half of the requests give up after 4 ms in the queue."""
    n = 4 * number  # batches of about 4 rows
    rng = np.random.default_rng(0)
    rate_per_s = 960.0
    time_s = np.cumsum(rng.exponential(1 / rate_per_s, n))
    late_s = np.where(rng.random(n) < 0.5, time_s + 0.004, np.inf)
    config = Config(rate_per_s=rate_per_s, duration_s=1.0, warmup_s=0.0, max_wait_s=0.0, admission=False)
    one = np.ones(n, np.int64)
    plan = Schedule(time_s=time_s, rows=one, priority=one, deadline_s=late_s)
    began_s = time.thread_time()
    run = simulate(config, S, plan)
    took_s = time.thread_time() - began_s
    ends_s = np.sort(run.batches["started_s"] + run.batches["service_s"])
    marks = np.linspace(0, len(ends_s) - 1, 11).astype(int)
    per_s = np.diff(marks) / np.diff(ends_s[marks])
    return {
        "batches": len(ends_s),
        "cpu_s": took_s,
        "batches_per_cpu_s": len(ends_s) / took_s,
        "expired_frac": float((run.columns["outcome"] == "expired").mean()),
        "virtual_ratio": float(per_s.min() / per_s.max()),
        "left": dict(run.left),
    }


def requests(replicas: int) -> float:
    """CPU seconds of a million requests at 80 % load."""
    curve = S * max(1.0, replicas / 64)  # so that the rate stays within the option's range
    rate_per_s = 0.8 * replicas * 8 / float(curve[-1])
    config = replace(
        Config(), rate_per_s=rate_per_s, duration_s=1e6 / rate_per_s, warmup_s=0.0, admission=False
    )
    began_s = time.thread_time()
    simulate(config, curve, replicas=replicas)
    return time.thread_time() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--queued", default="10,100,1000,10000", help="waiting requests, rising")
    parser.add_argument("--batches", default="100000,1000000", help="simulated batches, rising")
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args()
    found: dict[str, Any] = {"queued": {}, "batches": [], "requests_cpu_s": {}}
    ratios = []
    for binding in BINDINGS:
        rates = {}
        for queued in map(int, given.queued.split(",")):
            rates[queued] = TAKES / statistics.median(take(binding, queued) for _ in range(given.repeat))
            print(f"{binding:6}{queued:>8} queued  {rates[queued]:10.0f} batches a CPU second", flush=True)
        ratios.append(min(rates.values()) / max(rates.values()))
        print(f"{binding:6}   ratio slowest / fastest {ratios[-1]:.2f}")
        found["queued"][binding] = rates
    for number in map(int, given.batches.split(",")):
        one = batches(number)
        found["batches"].append(one)
        print(
            f"simulated {one['batches']:>9} batches in {one['cpu_s']:6.1f} CPU s: {one['batches_per_cpu_s']:8.0f} a second, "
            f"expired {one['expired_frac']:.1%}, tenths in virtual time {one['virtual_ratio']:.3f}, left {sum(one['left'].values())}",
            flush=True,
        )
    speeds = [one["batches_per_cpu_s"] for one in found["batches"]]
    ratios.append(min(speeds) / max(speeds))
    print(f"         ratio slowest / fastest {ratios[-1]:.2f}")
    for replicas in (1, 1000):
        took_s = requests(replicas)
        found["requests_cpu_s"][replicas] = took_s
        print(
            f"a million requests on {replicas:>4} replicas: {took_s:.1f} CPU s (target {TARGET_S:.0f} s)",
            flush=True,
        )
    lost = sum(sum(one["left"].values()) for one in found["batches"])
    print(
        json.dumps(
            {
                **found,
                "ratios": ratios,
                "flat": min(ratios) >= LEAST_RATIO,
                "lost": lost,
                "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "load_1min": os.getloadavg()[0],
            }
        )
    )


if __name__ == "__main__":
    main()
