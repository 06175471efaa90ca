"""What to do about a cause, and the gain that each action promises on the run's own numbers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlsyslab.contract import Action, Finding, Range
from mlsyslab.labs.steptime.breakdown import WAIT_FRAC
from mlsyslab.labs.steptime.evidence import Facts
from mlsyslab.labs.steptime.predict import Parts, what_if_parts

BUSY_WORKER_FRAC = 0.75  # of a core; a loader worker above it is limited by CPU, not by storage
MOST_WORKERS = 64  # the option's own limit
GAIN_BELOW, GAIN_ABOVE = 0.25, 0.10


def kind_of(chosen: Finding, facts: Facts) -> str:
    """What kind of the cause it is, from the loader's and the host's side of the evidence."""
    if chosen.rule == "data wait":
        if facts.config.workers == 0:
            return "no prefetching"
        blocked = facts.worker_cpu_frac is not None and facts.worker_cpu_frac < BUSY_WORKER_FRAC
        if (facts.read_frac is not None and facts.read_frac > 0.5) or (facts.read_frac is None and blocked):
            return "storage"
        return "too few workers" if (facts.idle_cores or 0.0) >= 0.8 else "per-sample CPU cost"
    if chosen.rule == "host work between phases":
        return "GC" if facts.gc_s > 0.5 * facts.step.host_worst_s else "Python"
    return {
        "host-to-device copy": "transfer",
        "device idle without a wait": "launch-bound",
        "exposed communication": "bandwidth",
    }.get(chosen.rule, "")


def parts_of(facts: Facts) -> Parts:
    """The measured step as the predictor's five numbers, for what-if arithmetic on this very run.

    Where the loader is the limit it sets the pace: load_s is the step. What one rank waits for another is left
    out of sync_s, since it goes away with its reason.
    """
    step, workers = facts.step, facts.config.workers
    starved = step.data_worst_s > WAIT_FRAC * step.step_s
    ahead_s = step.step_s if starved else (facts.load_s or 0.0) / max(workers, 1)
    return Parts(
        load_s=ahead_s if workers else step.data_worst_s,
        compute_s=step.compute_s + step.phases_s["h2d_s"],
        sync_s=step.transfer_s,
        host_s=step.phases_s["other_s"],
        cores_s=0.0,
        cores=1.0,
        ahead=workers > 0,
    )


def _gain(before: Parts, after: Parts) -> tuple[Range, Range]:
    """The step after the action, and the share of the step that it saves. What comes is more often less than
    promised (the next bottleneck is near) than more."""
    saved = max(0.0, 1 - after.step_s / before.step_s)
    gain = Range(saved * (1 - GAIN_BELOW), saved, min(1.0, saved * (1 + GAIN_ABOVE)))
    return Range(before.step_s * (1 - gain.high), after.step_s, before.step_s * (1 - gain.low)), gain


def actions_for(cause: str, kind: str, facts: Facts) -> tuple[Action, ...]:
    """What to do, best first, each with the step and the gain that it promises on this run's own numbers.

    Where the lab has no knob for it (nothing in the configuration would change) the advice stands without a
    change to apply and without a promise.
    """
    return tuple(
        action
        if replace(facts.config, **action.change) != facts.config
        else replace(action, change={}, step_s=None, gain_frac=None)
        for action in _candidates(cause, kind, facts)
    )


def _candidates(cause: str, kind: str, facts: Facts) -> tuple[Action, ...]:
    step, config = parts_of(facts), facts.config
    futures = what_if_parts(step)

    def action(name: str, says: str, change: Mapping[str, Any], after: Parts) -> Action:
        step_s, gain = _gain(step, after)
        return Action(name=name, says=says, change=change, step_s=step_s, gain_frac=gain)

    more = action(
        "more workers",
        f"use {min(MOST_WORKERS, max(1, 2 * config.workers))} loader workers a rank",
        {"workers": min(MOST_WORKERS, max(1, 2 * config.workers))},
        futures["2x loader workers"],
    )
    cache = action(
        "cache", "keep decoded samples in memory", {"cache": "memory"}, futures["decoded samples cached"]
    )
    cheaper = action("cheaper preprocessing", "halve the work on a sample: smaller files, faster decoder, fewer augmentations",
                     {"input_cost_s": config.input_cost_s / 2}, replace(step, load_s=step.load_s / 2))  # fmt: skip
    if cause == "input":
        return {
            "transfer": (action("pinned memory", "copy from page-locked memory, ahead of time", {"pinned": True}, replace(step, compute_s=step.compute_s - facts.step.phases_s["h2d_s"])),),
            "too few workers": (more, cache, cheaper),
            "no prefetching": (more, cache),
            "storage": (cache,),
        }.get(kind, (cache, cheaper))  # fmt: skip
    if cause == "communication":
        halved = replace(step, sync_s=step.sync_s / 2)
        half = action(
            "fewer bytes",
            "halve the gradient: bf16 reduction, or accumulate two micro-batches",
            {"gradient_mb": config.gradient_mb / 2},
            halved,
        )
        hidden_s = min(step.sync_s, facts.step.phases_s["backward_s"] * 0.75)
        overlap = action(
            "overlap",
            "reduce in buckets while backward goes on",
            {"overlap": True},
            replace(step, sync_s=step.sync_s - hidden_s),
        )
        return (half,) if config.overlap else (overlap, half)
    if kind == "launch-bound":
        larger = min(2 * config.batch_size, 4096, config.images)
        shorter = replace(step, compute_s=step.compute_s / 2, host_s=step.host_s / 2)
        return (
            action(
                "larger batch",
                "give each kernel more work, or fuse them; seconds are per half of the new batch",
                {"batch_size": larger},
                shorter,
            ),
        )
    if cause == "host":
        less_s = config.host_s if kind == "Python" else facts.step.host_worst_s
        return (
            action(
                "less host work",
                "log and compute metrics every tenth step",
                {"host_s": config.host_s / 10},
                replace(step, host_s=step.host_s - 0.9 * min(less_s, step.host_s)),
            ),
        )
    if facts.paced or facts.model_alone_s is None:
        return (
            action(
                "faster device",
                "a device twice as fast, or half the compute",
                {"compute_s": config.compute_s / 2},
                futures["2x faster device"],
            ),
        )
    saved_s = max(0.0, config.compute_s - facts.model_alone_s)
    return (
        action(
            "fuse kernels",
            "fuse the elementwise passes (torch.compile), or drop them",
            {"compute_s": 0.0},
            replace(step, compute_s=max(step.compute_s - saved_s, 0.0)),
        ),
    )
