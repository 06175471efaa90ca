"""What a service should do before it is run: closed forms for rates and means, an event simulation for percentiles. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mlsyslab.contract import Prediction, Range
from mlsyslab.labs.serving.config import Config
from mlsyslab.labs.serving.curves import Array, seconds_of
from mlsyslab.labs.serving.diagnose import decide
from mlsyslab.labs.serving.evidence import facts_from
from mlsyslab.labs.serving.policies import EARLY
from mlsyslab.labs.serving.queueing import (
    best_batch,
    early_limit_per_s,
    in_system,
    requests_needed,
    saturation_per_s,
    wait_bound_s,
    warm_needed,
)
from mlsyslab.labs.serving.simulate import COLD_S, START_S, simulate
from mlsyslab.labs.serving.simulated import Simulated

REQUESTS = 20_000  # simulated for a prediction, in all
MOST_RUNS = 8  # of the same configuration with other seeds
MATMUL_FLOPS_PER_S = 65e9  # where no probe has run: a 2-core machine's, docs/log.md
LAYER_S = 0.0002  # of a transformer layer that computes nothing: calls and small tensors
OVERHEAD_S = {
    "http": 0.0015,
    "in process": 0.0005,
    "ray": 0.006,
}  # of an answer, outside of queue and replica
SHARE_SPREAD = 0.005  # of all requests: what a run of some thousands can tell
PERCENTILES = ("p50_s", "p95_s", "p99_s", "mean_s")


@dataclass(frozen=True, kw_only=True)
class Known:
    """The curve, how far it may be off (as shares of itself), and where it comes from."""

    seconds: Array
    below: float
    above: float
    says: str


def curve_for(config: Config, machine: Mapping[str, Any]) -> Known:
    """The service-time curve: measured (`curve_s`), paced, or guessed from the probe. Raises ConfigError where a measured
    one does not reach max_batch."""
    if config.paced:
        sizes = np.arange(1, config.max_batch + 1)
        seconds: Array = np.maximum(config.paced_base_s + config.paced_row_s * sizes, 1e-5)
        return Known(
            seconds=seconds,
            below=0.0,
            above=0.08,
            says="the model is paced: a batch takes what it is told to",
        )
    if machine.get("curve_s") is not None:
        seconds = seconds_of(machine["curve_s"], config.max_batch)
        return Known(
            seconds=seconds, below=0.05, above=0.15,
            says="the service-time curve was measured with the model alone; beside a front and a load generator it is slower",
        )  # fmt: skip
    rate = 0.65 * float(machine.get("matmul_flops_per_s") or MATMUL_FLOPS_PER_S)
    row_s = (
        24 * config.layers * config.width**2 * config.tokens / rate
    )  # 12 width² weights a layer, 2 FLOPs each
    seconds = LAYER_S * config.layers + row_s * np.arange(1.0, config.max_batch + 1)
    return Known(
        seconds=seconds, below=0.5, above=1.0,
        says="no curve was measured: the model's time is guessed from the probe's matrix products, within a factor of two",
    )  # fmt: skip


def predict(config: Config, machine: Mapping[str, Any] | None = None) -> Prediction:
    """What the service should do on this machine.

    machine: curve_s, seconds of a batch by its rows (any form of `curves.Curve`); optionally overhead_s of an answer,
    cold_s and start_s of a replica, and the probe's matmul_flops_per_s.

    p50_s, p95_s, p99_s, mean_s: of the answers; throughput_per_s, mean_batch_rows, utilisation_frac, goodput_frac,
    rejected_frac, expired_frac, replica_s: all from the simulation of the very configuration with its policies, about
    20,000 requests, with a slower and a faster curve for the range. From closed forms: saturation_per_s = replicas × B /
    s(B) in requests a second; load_frac; wait_bound_s, the longest wait that admission allows; in_system, by Little's law;
    with autoscale also warm_needed, replicas for the peak.
    """
    known = dict(machine or {})
    curve = curve_for(config, known)
    overhead_s = float(known.get("overhead_s", OVERHEAD_S[config.engine]))
    starts = {"cold_s": float(known.get("cold_s", COLD_S)), "start_s": float(known.get("start_s", START_S))}

    def runs(factor: float, share: float) -> list[Simulated]:
        """The configuration with a curve that is `factor` times the known one, with `share` of the requests."""
        shown, number = _affordable(config, share)
        return [
            simulate(
                replace(shown, seed=(shown.seed + i) % 2**31), curve.seconds * factor, overhead_s=overhead_s,
                cold_s=starts["cold_s"], start_s=starts["start_s"],
            )
            for i in range(number)
        ]  # fmt: skip

    middle = runs(1.0, 0.5)
    summaries = {1: [run.summary() for run in middle]}
    for side, factor in ((0, 1 - curve.below), (2, 1 + curve.above)):
        summaries[side] = [run.summary() for run in runs(factor, 0.25)] if factor != 1 else summaries[1]
    values = {name: _range(summaries, name) for name in summaries[1][0] if name not in ("n", "lag_p99_s", "queue_s", "batch_wait_s", "service_s")}  # fmt: skip
    values = {name: value for name, value in values.items() if value is not None}
    values |= _on_paper(config, curve, values.get("mean_s"))
    judged = [run for run in middle if (~run.columns["warmup"]).any()]
    cause = "unknown"  # of a run that is too short for a single request
    if judged:
        cause = decide(facts_from(judged[0].config, judged[0].columns, judged[0].events), act=False).cause
    return Prediction(
        values={name: value for name, value in values.items() if value is not None},
        assumptions=_assumptions(config, curve, overhead_s, starts),
        cause=cause,
        origin="simulated",
    )


def _affordable(config: Config, share: float) -> tuple[Config, int]:
    """(what to simulate, with how many seeds) for a share of REQUESTS. A longer run is shortened to its beginning, a day
    keeps its shape."""
    budget = REQUESTS * share
    if config.clients:
        return replace(config, duration_s=min(config.duration_s, config.warmup_s + 3.0)), 1
    wanted = config.rate_per_s * config.duration_s
    if wanted <= budget:
        return config, max(1, min(MOST_RUNS, int(budget / max(wanted, 1.0))))
    # Bursts have a length of their own: a run of less than two of them would be another traffic.
    cycles_s = config.burst_factor if config.arrivals in ("bursts", "on/off") else 0.0
    duration_s = min(
        config.duration_s, max(budget / config.rate_per_s, min(cycles_s, 5 * budget / config.rate_per_s), 0.2)
    )
    return replace(
        config, duration_s=duration_s, warmup_s=0.0 if cycles_s else min(config.warmup_s, duration_s / 4),
        kill_at_s=config.kill_at_s if config.kill_at_s < duration_s else 0.0,
        stall_s=config.stall_s if config.stall_at_s < duration_s else 0.0,
    ), 1  # fmt: skip


def _range(summaries: Mapping[int, list[dict[str, float | None]]], name: str) -> Range | None:
    """The median of the middle curve's runs, with what the other curves and the seeds make of it."""
    every = {side: [one[name] for one in found if one[name] is not None] for side, found in summaries.items()}
    if not every[1]:
        return None
    expected = float(np.median(np.array(every[1], float)))
    all_of_them = [float(one or 0.0) for found in every.values() for one in found]
    spread = SHARE_SPREAD if name.endswith("_frac") else (0.05 if name in PERCENTILES else 0.02) * expected
    low, high = max(0.0, min(all_of_them) - spread), max(all_of_them) + spread
    return Range(low, expected, min(1.0, high) if name.endswith("_frac") else high)


def _on_paper(config: Config, curve: Known, mean_s: Range | None) -> dict[str, Range]:
    """The closed forms."""
    rows = (config.rows + 1) / 2
    replicas = config.ceiling if config.autoscale else config.replicas
    saturation = saturation_per_s(curve.seconds, replicas) / rows
    if config.binding == EARLY:
        saturation = early_limit_per_s(config.max_wait_s, curve.seconds, replicas) / rows
    found = {
        "saturation_per_s": Range(saturation / (1 + curve.above), saturation, saturation / (1 - curve.below)),
        "load_frac": Range(
            *(config.rate_per_s / saturation * (1 + off) for off in (-curve.below, 0, curve.above))
        ),
    }
    if config.admission and not config.autoscale and config.binding != EARLY:
        bound_s = wait_bound_s(curve.seconds, config.max_wait_s, config.max_queue, replicas, config.rows)
        found["wait_bound_s"] = Range(bound_s * (1 - curve.below), bound_s, bound_s * (1 + curve.above))
    if mean_s:
        found["in_system"] = Range(*(in_system(config.rate_per_s, value) for value in mean_s))
    if config.autoscale:
        one = saturation_per_s(curve.seconds) / rows
        peak = config.rate_per_s * (1.0 if config.arrivals in ("poisson", "trace") else config.burst_factor)
        needed = warm_needed(peak, 0, one, COLD_S if config.cold else START_S, config.slo_p95_s)
        found["warm_needed"] = Range(
            *(float(math.ceil(needed * (1 + off))) for off in (-curve.below, 0, curve.above))
        )
    return found


def _assumptions(
    config: Config, curve: Known, overhead_s: float, starts: Mapping[str, float]
) -> tuple[str, ...]:
    said = [
        curve.says,
        f"an answer takes {overhead_s * 1e3:.1f} ms beside queue and replica, and deciding takes none: wrong where the front has no core of its own",
        "every batch of a size takes as long as any other: on a machine that others use the tail is longer",
    ]
    if config.rate_per_s * config.duration_s > REQUESTS:
        said.append(
            "only the beginning of the run is simulated: a queue that grows throughout gets longer than that"
        )
    if config.autoscale or config.kill_at_s:
        start_s = starts["cold_s"] if config.cold else starts["start_s"]
        said.append(f"a replica is ready {start_s:.1f} s after it is asked for")
    enough = requests_needed(0.99)
    sent = config.rate_per_s * (config.duration_s - config.warmup_s)
    if sent < enough:
        said.append(f"a p99 needs about {enough} requests, the run has {sent:.0f}: its p99 will scatter")
    if config.deadline_s and config.deadline_s < float(curve.seconds[0]) + overhead_s:
        said.append(
            f"deadline_s={config.deadline_s:g} is less than one row alone takes: no answer can come in time"
        )
    if config.slo_p95_s < float(curve.seconds[0]) + overhead_s:
        said.append(
            f"slo_p95_s={config.slo_p95_s:g} is less than one row alone takes: the target is out of reach"
        )
    if best_batch(curve.seconds) == 1 and config.max_batch > 1:
        said.append("batching does not pay with this curve: n rows take at least n times as long as one")
    if config.clients:
        said.append(
            "closed-loop clients wait for their answers: what they report leaves out what they did not send"
        )
    return tuple(said)
