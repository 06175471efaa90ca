"""The serving lab beside MOSEC, LitServe and Ray Serve: one model, one load generator, one run, engines interleaved.

    python benchmarks/serving.py --rivals-python PATH [--cycles 5] [--segment-s 2] [--engines http,mosec,...] [--models paced,torch]
    python benchmarks/serving.py --overload-s 60      # instead: five times saturation, with admission

The rivals are no dependency of the project: PATH is a Python that has those of mosec, litserve and ray[serve]==2.60.0 that are to be
compared, and torch, numpy, psutil and aiohttp. What it does not have is reported as absent.

Batches of at most 8, a wait of at most 5 ms, one replica, JSON of 8 tokens over loopback. In a cycle every engine, in an order drawn
anew, gets: 32 closed-loop clients (its saturation), then open-loop Poisson traffic at 50 and 80 % of that, and at 50 and 80 % of MOSEC's. The limit
max_batch / s(max_batch) is measured in every cycle by the model alone. The model is the lab's transformer ("torch"), and one that waits as
a device of its own would ("paced"): there the CPU of all processes of a server is its own cost. Figures are medians over the cycles, with the lowest and the highest.
"ray" is the lab's engine="ray" (our front, a handle, our batcher in the replica), "ray batch" a front of a few lines, a handle, and @serve.batch.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rivals.processes import Limit, Server, load_process, missing

from mlsyslab.labs import serving
from mlsyslab.labs.serving.arrivals import schedule
from mlsyslab.labs.serving.config import Config
from mlsyslab.labs.serving.queueing import wait_bound_s

BASE = Config(max_batch=8, max_wait_s=0.005, duration_s=2.0, warmup_s=0.3, device="cpu")
CLIENTS = 32
SHARES = (0.5, 0.8)
IN_PROCESS = "in process"
RIVALS = {"mosec": "mosec", "litserve": "litserve", "ray": "ray", "ray batch": "ray"}  # engine -> its package
ENGINES = (IN_PROCESS, "http", *RIVALS)
IDLE = "no_request"
GROWN_BYTES = 2 * 2**20  # of the service's memory in a minute of overload, at most


# ---- one segment
def figures(records: pd.DataFrame, config: Config) -> dict[str, float]:
    """Of the requests after the warm-up."""
    counted = records[~records["warmup"].astype(bool)]
    good = counted[counted["outcome"] == "ok"]
    ended = good["intended_s"] + good["total_s"]
    inside = good[(ended <= config.duration_s)]
    total_ms = good["total_s"].to_numpy() * 1e3
    p50, p95, p99 = np.percentile(total_ms, [50, 95, 99]) if len(good) else (np.nan,) * 3
    return {
        "answers_per_s": len(inside) / (config.duration_s - config.warmup_s),
        "p50_ms": p50, "p95_ms": p95, "p99_ms": p99,
        "lag_p99_ms": float(np.percentile(counted["lag_s"] * 1e3, 99)) if len(counted) else np.nan,
        "not_ok": len(counted) - len(good),
    }  # fmt: skip


def segment(server: Server | None, config: Config, folder: Path) -> dict[str, float]:
    """One load on one engine; None: ours in the generator's process."""
    if server is None:
        with tempfile.TemporaryDirectory(dir=folder) as out:
            run = serving.measure(replace(config, engine=IN_PROCESS), out=f"{out}/run", timeout_s=60.0)
            return figures(run.records, config)
    out = folder / "requests.jsonl"
    out.unlink(missing_ok=True)
    with load_process(config, server, out) as load:
        assert load.stdout
        load.stdout.readline()
        before_s = server.cpu_s()
        load.stdout.readline()
        used_s = server.cpu_s() - before_s
    records = pd.read_json(out, lines=True)
    return {**figures(records, config), "cpu_ms": used_s * 1e3 / max(1, len(records))}


def loads(config: Config, saturation_per_s: float, what: str, seed: int) -> dict[str, Config]:
    """The open-loop segments at shares of a saturation."""
    return {
        f"{what}{share * 100:.0f}": replace(config, rate_per_s=max(1.0, share * saturation_per_s), seed=seed)
        for share in SHARES
    }


def cycle(servers: dict[str, Server | None], limit: Limit, config: Config, folder: Path, seed: int) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Every engine once, in an order of this cycle's own."""
    found: dict[str, dict[str, Any]] = {name: {} for name in servers}
    before = {name: server.cpu_s() for name, server in servers.items() if server}
    time.sleep(config.duration_s)
    for name, server in servers.items():
        if server:
            found[name][IDLE] = {"cores": (server.cpu_s() - before[name]) / config.duration_s}
    order = list(servers)
    random.Random(seed).shuffle(order)
    found["limit"] = {"full": {"answers_per_s": limit.rows_per_s(config.duration_s / 2)}}
    full = replace(config, clients=CLIENTS, rate_per_s=1000.0, seed=seed)
    for name in order:
        found[name]["full"] = segment(servers[name], full, folder)
        if not config.paced:
            own = found[name]["full"]["answers_per_s"]
            for what, load in loads(config, own, "own", seed).items():
                found[name][what] = segment(servers[name], load, folder)
    if "mosec" in servers and not config.paced:
        theirs = found["mosec"]["full"]["answers_per_s"]
        for name in [one for one in order if one in (IN_PROCESS, "http", "mosec")]:
            for what, load in loads(config, theirs, "same", seed).items():
                found[name][what] = segment(servers[name], load, folder)
    again = limit.rows_per_s(config.duration_s / 2)
    found["limit"]["full"]["answers_per_s"] = (found["limit"]["full"]["answers_per_s"] + again) / 2
    return found


def second_replica(config: Config, limit_per_s: float, folder: Path) -> float:
    """Seconds from the autoscaler's decision until the replica takes requests, under a load that needs it."""
    grown = replace(
        config, autoscale=True, ceiling=2, rate_per_s=1.5 * limit_per_s, duration_s=3.0, clients=0
    )
    with tempfile.TemporaryDirectory(dir=folder) as out:
        serving.measure(grown, out=f"{out}/run", timeout_s=60.0)
        lines = [json.loads(line) for line in Path(f"{out}/run/events.jsonl").read_text().splitlines()]
    return next((e["start_s"] for e in lines if e["event"] == "ready" and e["replica"] == 1), float("nan"))


# ---- five times overload
def overload(lasts_s: float, folder: Path) -> dict[str, Any]:
    """Five times saturation with admission: what becomes of the requests, and of the memory of the service's processes.

    The model is paced and slow, so that the two cores of a small machine can send five times what it can do.
    """
    config = replace(
        BASE, paced=True, paced_base_s=0.008, paced_row_s=0.002, duration_s=lasts_s, warmup_s=2.0, rate_per_s=5 * 8 / 0.024
    )  # fmt: skip
    seconds = config.paced_base_s + config.paced_row_s * np.arange(1, config.max_batch + 1)
    bound_s = wait_bound_s(seconds, config.max_wait_s, config.max_queue) + float(seconds[-1])
    server, out, rss = Server("http", config, "", folder), folder / "requests.jsonl", []
    try:
        with load_process(config, server, out) as load:
            while load.poll() is None:
                rss.append(sum(server.rss_bytes().values()))
                time.sleep(1.0)
    finally:
        server.end()
    records, expected = pd.read_json(out, lines=True), len(schedule(config))
    third = max(1, len(rss) // 3)
    grown = statistics.median(rss[-third:]) - statistics.median(rss[1 : 1 + third])
    counts = records["outcome"].value_counts().to_dict()
    good = records[(records["outcome"] == "ok") & ~records["warmup"].astype(bool)]
    found = {
        "requests": expected, "outcomes": counts, "lost": expected - int(records["id"].nunique()),
        "p95_ms": float(good["total_s"].quantile(0.95) * 1e3), "p95_aim_ms": bound_s * 1e3,
        "lag_p99_ms": float(records["lag_s"].quantile(0.99) * 1e3),
        "rss_bytes": statistics.median(rss), "rss_grown_bytes": grown, "rss_grown_aim_bytes": GROWN_BYTES,
    }  # fmt: skip
    print(f"{expected} requests in {lasts_s:g} s: {counts}; lost {found['lost']} (aim 0)")
    print(
        f"accepted p95 {found['p95_ms']:.0f} ms, aim <= {bound_s * 1e3:.0f} (the formula's bound); lag p99 {found['lag_p99_ms']:.1f} ms"
    )
    print(
        f"memory {found['rss_bytes'] / 2**20:.0f} MiB, last third less first {grown / 2**20:+.1f} (aim <= {GROWN_BYTES / 2**20:g})"
    )
    return found


# ---- the whole
def summary(cycles: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, list[float]]]:
    """engine -> "segment/figure" -> [lowest, median, highest]."""
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in cycles:
        for engine, segments in one.items():
            for what, found in segments.items():
                for name, value in found.items():
                    values[engine][f"{what}/{name}"].append(value)
    return {e: {k: [min(v), statistics.median(v), max(v)] for k, v in some.items()} for e, some in values.items()}  # fmt: skip


def ratio(cycles: list[dict[str, dict[str, Any]]], one: tuple[str, str, str], other: tuple[str, str, str]) -> list[float] | None:  # fmt: skip
    """Of two figures (engine, segment, name) within each cycle: [lowest, median, highest]."""
    pairs = [
        c[one[0]][one[1]][one[2]] / c[other[0]][other[1]][other[2]]
        for c in cycles if one[1] in c.get(one[0], {}) and other[1] in c.get(other[0], {})
    ]  # fmt: skip
    return spread(pairs)


def line(
    model: str, what: str, found: list[float] | None, aim: float, *, least: bool = False
) -> dict[str, Any]:
    """One figure beside its aim; found: lowest, median, highest, None where it was not measured."""
    met = None if found is None else bool(found[1] >= aim if least else found[1] <= aim)
    return {"model": model, "what": what, "found": found, "aim": aim, "least": least, "met": met}


def spread(values: list[float]) -> list[float] | None:
    return [min(values), statistics.median(values), max(values)] if values else None


def aims(model: str, cycles: list[dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The figures that have an aim."""
    rate = "answers_per_s"
    top = ("limit", "full", rate)
    lines = [
        line(
            model,
            "saturation / limit, in process",
            ratio(cycles, (IN_PROCESS, "full", rate), top),
            0.90,
            least=True,
        ),
        line(model, "saturation / limit, http", ratio(cycles, ("http", "full", rate), top), 0.80, least=True),
    ]
    for rival in RIVALS:
        pair = ratio(cycles, ("http", "full", rate), (rival, "full", rate))
        lines.append(line(model, f"saturation / that of {rival}", pair, 1.0, least=True))
    if model == "paced":
        cpu = [c["http"]["full"]["cpu_ms"] for c in cycles if "http" in c]
        idle = [c["http"][IDLE]["cores"] for c in cycles if "http" in c]
        return [
            *lines,
            line(model, "CPU a request, http, ms", spread(cpu), 0.15),
            line(model, "idle, http, cores", spread(idle), 0.02),
        ]
    for what, name in (("own", "each its own saturation"), ("same", "the same rate")):
        for share, figure, aim in ((80, "p99_ms", 1.15), (50, "p50_ms", 0.85)):
            pair = ratio(cycles, ("http", f"{what}{share}", figure), ("mosec", f"{what}{share}", figure))
            lines.append(line(model, f"{figure[:3]} at {share} % of {name} / MOSEC's", pair, aim))
    return lines


def show(found: dict[str, dict[str, list[float]]], lines: list[dict[str, Any]]) -> None:
    for engine, values in found.items():
        for what in dict.fromkeys(key.split("/")[0] for key in values):
            row = {k.split("/")[1]: v for k, v in values.items() if k.startswith(what + "/")}
            text = "  ".join(f"{k} {v[1]:.4g} ({v[0]:.4g}..{v[2]:.4g})" for k, v in row.items())
            print(f"{engine:11}{what:11}{text}")
    for one in lines:
        found_text = "absent" if one["found"] is None else "{1:.3f} ({0:.3f}..{2:.3f})".format(*one["found"])
        sign = ">=" if one["least"] else "<="
        verdict = {None: "", True: "met", False: "MISSED"}[one["met"]]
        print(
            f"{one['model']:6} {one['what']:54} {found_text:24} {sign} {one['aim']:<6g}{verdict}", flush=True
        )


def compare(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = {"cycles": given.cycles, "segment_s": given.segment_s, "absent": {}, "figures": {}, "aims": []}  # fmt: skip
    for model in given.models.split(","):
        config = replace(BASE, paced=model == "paced", duration_s=given.segment_s + BASE.warmup_s)
        servers: dict[str, Server | None] = {}
        limit = Limit(config)
        try:
            for engine in given.engines.split(","):
                reason = "" if engine not in RIVALS else missing(RIVALS[engine], given.rivals_python)
                try:
                    if not reason:
                        servers[engine] = None if engine == IN_PROCESS else Server(engine, config, given.rivals_python, folder)  # fmt: skip
                except RuntimeError as error:
                    reason = str(error)
                if reason:
                    result["absent"][engine] = reason
                    print(f"{engine}: absent: {reason}", flush=True)
            cycles = []
            for seed in range(given.cycles):
                cycles.append(cycle(servers, limit, config, folder, seed))
                print(
                    f"{model} cycle {seed + 1} of {given.cycles}, load {os.getloadavg()[0]:.1f}", flush=True
                )
        finally:
            limit.end()
            for server in servers.values():
                if server:
                    server.end()
        lines = aims(model, cycles)
        if model == "torch":
            top = statistics.median(c["limit"]["full"]["answers_per_s"] for c in cycles)
            times = [second_replica(config, top, folder) for _ in range(min(3, given.cycles))]
            lines.append(line(model, "second warm replica, s after the decision", spread(times), 1.0))
        result["figures"][model] = summary(cycles)
        result["aims"] += lines
        show(result["figures"][model], lines)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rivals-python", default="", help="a Python that has the rivals")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--models", default="paced,torch")
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--segment-s", type=float, default=2.0, help="of each load, after a warm-up of 0.3 s")
    parser.add_argument(
        "--overload-s", type=float, default=0.0, help="instead: five times saturation for so long"
    )
    given = parser.parse_args()
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        result = (
            overload(given.overload_s, Path(folder)) if given.overload_s else compare(given, Path(folder))
        )
    print(json.dumps({**result, "load_1min": [before, os.getloadavg()[0]], "unix_s": time.time()}))


if __name__ == "__main__":
    main()
