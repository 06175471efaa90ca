"""What to do about missed requests, and what each action is worth in a simulation with the run's own curve. Pure.

In this lab an action's `step_s` is the p95 after it, and its `gain_frac` is the share of the missed requests that it saves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlsyslab.contract import Action, ConfigError, Finding, Range
from mlsyslab.labs.serving.config import Config
from mlsyslab.labs.serving.evidence import Facts
from mlsyslab.labs.serving.policies import EARLY, LATE
from mlsyslab.labs.serving.simulate import COLD_S, START_S, simulate

BELOW, ABOVE = 0.25, 0.10  # of a promised gain; the next bottleneck is near more often than not
P95_BELOW, P95_ABOVE = 0.15, 0.30
ENOUGH, LONG = 6000, 40_000  # requests of a simulated effect; of one in which replicas come and go
LEAST_GAIN = 0.01  # an action that saves less is not offered, unless it is the only one
ROOM = 0.7  # load of the replicas that an action asks for

Change = Mapping[str, Any]


def kind_of(chosen: Finding, facts: Facts) -> str:
    """What kind of the cause it is."""
    if chosen.rule == "head of line":
        return facts.blocked_by or ("packing" if "do not fit" in chosen.says else "large requests")
    if chosen.rule == "starts":
        return "scale to zero" if facts.config.floor == 0 and facts.config.autoscale else "slow starts"
    return {"early binding": "early binding", "near saturation": "near saturation"}.get(chosen.rule, "")


def actions_for(cause: str, kind: str, facts: Facts) -> tuple[Action, ...]:
    """What to do, best first. Where a change cannot be made here (or changes nothing) the advice stands alone."""
    candidates = _candidates(cause, kind, facts)
    if not candidates:
        return ()
    before = _shortened(facts.config)
    missed, _, cost_s = _effect(before, facts)
    actions = []
    for name, says, change in candidates:
        try:
            after = replace(before, **change) if change else before
        except ConfigError:
            after = before
        if after == before or facts.config.clients:
            # A closed loop's load is another load; nothing is promised for it.
            actions.append(Action(name=name, says=says, change=change if after != before else {}))
            continue
        left, p95_s, new_cost_s = _effect(after, facts)
        gain = max(0.0, 1 - left / missed) if missed else 0.0
        effect = f"missed {missed:.0%} → {left:.0%}, p95 {p95_s * 1e3:.0f} ms, replica-seconds × {new_cost_s / cost_s:.2g}"
        actions.append(
            Action(
                name=name,
                says=f"{says} (simulated: {effect})",
                change=change,
                step_s=Range(p95_s * (1 - P95_BELOW), p95_s, p95_s * (1 + P95_ABOVE)),
                figure="p95_s",
                of="the missed requests",
                gain_frac=Range(gain * (1 - BELOW), gain, min(1.0, gain * (1 + ABOVE))),
            )
        )
    useful = [one for one in actions if one.gain_frac is None or one.gain_frac.expected >= LEAST_GAIN]
    return tuple(useful or actions[:1])


def _shortened(config: Config) -> Config:
    """So long that there are ENOUGH requests; the shape of the arrivals is kept by its first part."""
    most = LONG if config.autoscale else ENOUGH
    most_s = max(most / config.rate_per_s, 2 * config.warmup_s)
    if config.duration_s <= most_s or config.arrivals == "diurnal":
        return config
    return replace(config, duration_s=most_s, kill_at_s=0.0, stall_s=0.0)


def _effect(config: Config, facts: Facts) -> tuple[float, float, float]:
    """(share missed, p95_s, replica-seconds), simulated with what the run showed."""
    curve = [*facts.curve.tolist()]
    if config.max_batch > len(curve):
        # A run disturbed while it ran small batches may show a curve that falls; more rows never take less.
        step_s = max(0.0, (curve[-1] - curve[0]) / max(1, len(curve) - 1))
        curve += [curve[-1] + step_s * (n + 1) for n in range(config.max_batch - len(curve))]
    start_s = facts.start_s
    run = simulate(
        config, curve, noise=facts.noise, overhead_s=facts.overhead_s,
        cold_s=start_s if start_s and facts.config.cold else COLD_S,
        start_s=start_s if start_s and not facts.config.cold else START_S,
    )  # fmt: skip
    found = run.summary()
    return 1 - (found["goodput_frac"] or 0.0), found["p95_s"] or 0.0, run.replica_s


def _candidates(cause: str, kind: str, facts: Facts) -> list[tuple[str, str, Change]]:
    """(name, what it says, what it changes), best first."""
    config = facts.config
    of_one = config.max_batch / float(facts.curve[-1])
    peak = facts.demand_per_s * (config.burst_factor if cause.startswith("bursts") else 1.0)
    wanted = min(64, max(config.replicas + 1, math.ceil(peak / of_one / ROOM)))
    warm = max(1, config.floor, math.ceil(facts.replicas))
    most = max(warm, config.replicas, config.ceiling)
    bounds = {"floor": wanted, "ceiling": max(wanted, config.ceiling)} if config.autoscale else {}
    more: Change = {"replicas": wanted, **bounds}
    replicas = ("more replicas", f"{wanted} replicas, for a load of about {ROOM:.0%} of them", more)
    double = 2 * config.max_batch
    larger = (
        "larger batch",
        f"batches of {double} rows",
        {"max_batch": double, "max_queue": max(config.max_queue, double)},
    )
    early = (
        [("bind late", "fix a batch only when a replica takes it", {"binding": LATE})]
        if config.binding == EARLY
        else []
    )
    queue = _queue_for_target(facts)
    refuse = (
        "refuse early",
        f"let {queue} rows wait, which can be answered in time, and refuse the others at once",
        {"admission": True, "max_queue": queue},
    )
    fitting, beside = _fitting(facts)
    smaller = f"batches of {fitting} rows" + (f" on {beside} replicas" if beside > config.replicas else "")
    whole_rate = min(1e5, config.rate_per_s * (config.rows + 1) / 2)
    offers: dict[str, list[tuple[str, str, Change]]] = {
        "tester-bound": [
            ("open loop", "send by a fixed schedule, whatever is answered", {"clients": 0})
            if config.clients
            else ("less load", "send at half the rate, or from another machine", {"rate_per_s": max(0.1, config.rate_per_s / 2)})
        ],
        "saturated": [*early, replicas, refuse, larger],
        "no admission control": [
            refuse,
            replicas,
            *early,
        ],
        "bursts exceed warm capacity": [("warm replicas", f"keep {wanted} replicas ready for the peaks", more), larger],
        "cold starts": [
            ("warm floor", f"keep at least {warm} {'replica' if warm == 1 else 'replicas'} ready", {"floor": warm, "replicas": max(warm, config.replicas), "ceiling": most}),
            ("stand by", "start replicas from a process that stands by with everything imported", {"cold": False}),
        ],
        "batch wait too long": [("no hold", "release a batch as soon as a replica is free", {"max_wait_s": 0.0, "binding": LATE})],
        "batch too large for the target": [("smaller batch", smaller, {"max_batch": fitting, "replicas": max(beside, config.replicas)}), replicas],
        "head of line blocking": [
            ("overtake", "let an urgent request overtake for longer", {"aging_s": max(1.0, 10 * config.aging_s)})
            if kind == "less urgent requests"
            else ("split", "send the rows of a large request one by one", {"rows": 1, "rate_per_s": whole_rate} if config.rows > 1 else {}),
            larger,
            replicas,
        ],
    }  # fmt: skip
    return offers.get(cause, [])


def _queue_for_target(facts: Facts) -> int:
    """Rows that may wait so that the last of them is still answered in time: what full batches work off in the target
    less the hold, the batch that runs, and the own one."""
    config, batch_s = facts.config, float(facts.curve[-1])
    left_s = config.slo_p95_s - config.max_wait_s - facts.overhead_s - 2 * batch_s
    rounds = max(1, math.floor(left_s / batch_s))
    return max(config.max_batch, rounds * config.max_batch * max(1, math.floor(facts.replicas)))


def _fitting(facts: Facts) -> tuple[int, int]:
    """(rows, replicas): the largest batch of which two fit into the target, and the replicas that carry the load with it."""
    config, curve = facts.config, facts.curve
    left_s = 0.9 * config.slo_p95_s - facts.overhead_s
    fits = [n for n in range(config.rows, config.max_batch) if 2 * curve[n - 1] <= left_s]
    rows = max(fits, default=max(config.rows, config.max_batch // 2))
    return rows, min(64, math.ceil(1.1 * facts.demand_per_s * float(curve[rows - 1]) / rows))
