"""The arithmetic of a synchronous step: the slowest rank's work plus the exchange. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlsyslab.contract import Prediction, Range
from mlsyslab.labs.straggler.config import BURST_FRAC, FRAMEWORK_S, MECHANISMS, Config

ALLREDUCE_BYTES_PER_S = 0.9e9  # where no probe has run: a 2-core machine's, docs/log.md
DECODE_S = 0.004  # CPU seconds of a sample in the loader, the same
BELOW, ABOVE = 0.10, 0.25


def predict(config: Config, machine: Mapping[str, Any] | None = None) -> Prediction:
    """What the job should do on this machine.

    own_s: a healthy rank's work; slow_own_s: the slow rank's; step_s: the job's, on every rank alike =
    max(own_s, slow_own_s) + transfer_s; wait_frac: the share of the step that a healthy rank waits; gain_frac: the
    share of the step that mending the slow rank saves. transfer_s = 2 (n - 1) / n x bytes / rate (ring all-reduce,
    Patarasuk and Yuan 2009), at the rate of the probe's two ranks.
    """
    rate = float((machine or {}).get("allreduce_bytes_per_s") or ALLREDUCE_BYTES_PER_S)
    ranks = config.ranks
    transfer_s = 2 * (ranks - 1) / ranks * config.gradient_mb * 1e6 / rate
    cores = float((machine or {}).get("usable_cores") or 0) or None
    own_s, extra_s = config.base_s, mean_extra_s(config)
    one = config.where in ("constant", "intermittent") and config.relief != "spare host"
    slow_s = own_s + (extra_s if one else 0.0)
    link_s = extra_s if config.fault == "slow_link" and one else 0.0
    busy_s = ranks * (config.cpu_s + FRAMEWORK_S + DECODE_S * config.batch_size)
    step_s = max(own_s, own_s + extra_s) + transfer_s
    if cores:
        step_s = max(step_s, busy_s / cores)
    if config.fault == "slow_link":
        slow_s = own_s
    wait_s = step_s - own_s
    healthy_s = own_s + transfer_s
    values = {
        "step_s": Range.around(step_s, BELOW, ABOVE),
        "own_s": Range.around(own_s, BELOW, ABOVE),
        "slow_own_s": Range.around(slow_s, BELOW, ABOVE),
        "transfer_s": Range(0.3 * (transfer_s + link_s), transfer_s + link_s, 6 * transfer_s + 1.5 * link_s),
        "wait_frac": Range(
            max(0.0, wait_s / step_s - 0.12), wait_s / step_s, min(1.0, wait_s / step_s + 0.12)
        ),
        "gain_frac": Range.around(max(0.0, 1 - healthy_s / step_s), 0.2, 0.2),
    }
    assumptions = (
        "a step takes as long as the slowest rank's own work and the exchange; nothing of the exchange is hidden",
        "the ranks do not take cores from each other: beside a busy neighbour own work grows on every rank",
        f"samples cost {DECODE_S * 1e3:.0f} ms to decode where they are not made heavier",
    )
    return Prediction(values=values, assumptions=assumptions, cause=_cause(config))


def mean_extra_s(config: Config) -> float:
    """Mean seconds that the fault adds to a step of the job, over all steps from its start on."""
    if config.fault in ("none", "late_start") or config.relief == "spare host":
        return 0.0
    share = BURST_FRAC if config.where == "intermittent" else 1.0
    left = {"cache": 0.0 if MECHANISMS[config.fault][0] == "input" else 1.0, "less contention": 0.5}
    extra_s = config.extra_s * left.get(config.relief, 1.0)
    if config.relief == "less preprocessing" and config.fault == "slow_input":
        extra_s = max(0.0, (config.base_s + config.extra_s) / 2 - config.base_s)
    return share * extra_s


def _cause(config: Config) -> str:
    if config.fault == "none" or config.magnitude == 0 or config.relief == "spare host":
        return "healthy"
    return {"rotating": "imbalance", "everywhere": "shared"}.get(config.where, MECHANISMS[config.fault][0])
