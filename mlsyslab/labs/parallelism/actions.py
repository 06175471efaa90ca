"""What to do about it, each with its promise from the closed forms. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlsyslab.contract import Action, ConfigError, Range
from mlsyslab.labs.parallelism.config import Config, layout_of, stages
from mlsyslab.labs.parallelism.evidence import Facts, link_seconds
from mlsyslab.labs.parallelism.ledger import largest
from mlsyslab.labs.parallelism.rules import next_simpler
from mlsyslab.labs.parallelism.schedule import orders, play
from mlsyslab.labs.parallelism.traffic import traffic

BELOW, ABOVE = 0.5, 0.25  # of a promised gain in time
# of forward and backward of a layer for each microbatch, however small it is: operators that are called, tensors that are sent
# (2-core machine, 2 to 16 microbatches; docs/log.md)
LAYER_S = 0.75e-3
ROOM = 0.95  # of a cap that a plan may fill
MOST_OFFERED = 3


def failed_bytes(facts: Facts) -> float | None:
    """What a run that ran out of memory would have needed at that moment: what was live and what it wanted."""
    return (
        None
        if facts.oom is None
        else float(facts.oom["live"]["total"]) + float(facts.oom.get("wanted_bytes") or 0)
    )


def actions_for(cause: str, facts: Facts) -> tuple[Action, ...]:
    """What to do, best first."""
    return {
        "memory": _less_memory,
        "bubble": _more_microbatches,
        "imbalance": _even_stages,
        "placement": _exchange_axes,
        "communication": _less_communication,
    }.get(cause, lambda facts: ())(facts)


def changed(before: Config, after: Config) -> dict[str, Any]:
    """The fields in which two configs differ."""
    return {
        f.name: getattr(after, f.name)
        for f in dataclasses.fields(after)
        if getattr(after, f.name) != getattr(before, f.name)
    }


def _less_memory(facts: Facts) -> tuple[Action, ...]:
    """The simplest splits over the same ranks whose predicted peak fits."""
    config, needed = facts.config, failed_bytes(facts)
    cap = (facts.oom or {}).get(
        "cap_bytes"
    ) or needed  # of a device without a cap it is known that this was too much
    found = []
    for other in next_simpler(config):
        peak = largest(other.shape, layout_of(other)).peak_bytes
        if not cap or not needed or peak > ROOM * cap:
            continue
        recompute = " with checkpointing" if other.checkpointing else ""
        saved = max(0.0, 1 - peak / needed)
        found.append(
            Action(
                name=f"{other.strategy}{recompute}",
                says=f"split by {other.strategy}{recompute}: a peak of {peak / 1e6:.0f} MB predicted, under {cap / 1e6:.0f}",
                change=changed(config, other),
                step_s=Range.around(peak, 0.1, 0.1),
                gain_frac=Range(
                    max(0.0, 1 - 1.1 * peak / needed), saved, max(saved, 1 - 0.9 * peak / needed)
                ),
                figure="peak_bytes",
                of="the memory that was needed",
            )
        )
    if not found:
        says = "no split over these ranks fits by the ledger: take more ranks, a smaller batch or shorter sequences"
        return (Action(name="more ranks", says=says),)
    return tuple(found[:MOST_OFFERED])


def _work(facts: Facts) -> tuple[float, list[float]]:
    """Seconds of a layer in a step, and what each stage does besides: the head and the loss of the last, or a slow machine's excess."""
    cut = stages(facts.config.shape, facts.layout)
    calls_s = facts.layout.microbatches * LAYER_S
    work = [max(0.0, seconds - layers * calls_s) for seconds, layers in zip(facts.stage_s, cut, strict=True)]
    layer_s = min(seconds / layers for seconds, layers in zip(work, cut, strict=True))
    return layer_s, [seconds - layers * layer_s for seconds, layers in zip(work, cut, strict=True)]


def _replayed(facts: Facts, after: Config) -> float:
    """Seconds of the step when the measured seconds of a layer are played in another schedule."""
    layout, (layer_s, besides_s) = layout_of(after), _work(facts)
    each = [
        (layers * layer_s + more_s) / layout.microbatches + layers * LAYER_S
        for layers, more_s in zip(stages(after.shape, layout), besides_s, strict=True)
    ]
    third = [seconds / 3 for seconds in each]
    return play(orders(layout.schedule, layout.pp, layout.microbatches), third, [2 * s for s in third]).step_s


def _promise(facts: Facts, after: Config, name: str, says: str) -> tuple[Action, ...]:
    """On devices of their own the replay would tell; ranks that share cores cannot gain what idle cores would."""
    assert facts.replay is not None
    busy_s = sum(facts.stage_s) / min(facts.usable_cores or facts.layout.pp, facts.layout.pp)
    before_s, after_s = max(facts.replay.step_s, busy_s), max(_replayed(facts, after), busy_s)
    saved = max(0.0, 1 - after_s / before_s)
    gain = Range(saved * (1 - BELOW), saved, min(1.0, saved * (1 + ABOVE)))
    return (Action(name=name, says=says, change=changed(facts.config, after), gain_frac=gain),)


def _more_microbatches(facts: Facts) -> tuple[Action, ...]:
    config = facts.config
    more = [m for m in (2, 4, 8, 16) if config.batch % (m * config.microbatches) == 0]
    finer = [replace(config, microbatches=m * config.microbatches) for m in more]
    if not finer:
        says = f"cut the batch into more microbatches; {config.batch} sequences do not divide into twice as many, so raise the batch with it"
        return (Action(name="more microbatches", says=says),)
    after = min(finer, key=lambda one: _replayed(facts, one))
    says = f"cut the batch into {after.microbatches} microbatches instead of {config.microbatches}"
    return _promise(facts, after, "more microbatches", says)


def _even_stages(facts: Facts) -> tuple[Action, ...]:
    """Layers so dealt that stages take equally long: one after the other to the stage that has least to do."""
    config, (layer_s, besides_s) = facts.config, _work(facts)
    cut = [1] * len(besides_s)
    for _ in range(config.shape.layers - len(cut)):
        least = min(range(len(cut)), key=lambda stage: cut[stage] * layer_s + besides_s[stage])
        cut[least] += 1
    after = replace(config, stage_split=tuple(cut))
    if stages(after.shape, layout_of(after)) == stages(config.shape, facts.layout):
        says = "no other split of the layers is more even: look at the machine of the slow stage, or give its head and loss a stage of their own"
        return (Action(name="even stages", says=says),)
    return _promise(facts, after, "even stages", f"split the layers {', '.join(map(str, cut))}")


def _exchange_axes(facts: Facts) -> tuple[Action, ...]:
    config = facts.config
    after = replace(config, tp_across=not config.tp_across)
    now_s = sum(facts.link_s.values())
    then_s = sum(link_seconds(after, traffic(config.shape, facts.layout), facts.backend).values())
    saved = max(0.0, (now_s - then_s) / facts.step_s) if facts.step_s else 0.0
    gain = Range(saved * (1 - BELOW), saved, min(1.0, saved * (1 + ABOVE)))
    says = "keep the tensor-parallel axis inside a node, and let the data axis cross the link"
    return (
        Action(name="exchange the axes", says=says, change={"tp_across": after.tp_across}, gain_frac=gain),
    )


def _less_communication(facts: Facts) -> tuple[Action, ...]:
    config = facts.config
    found: list[Mapping[str, Any]] = []
    if facts.layout.tp > 1 and config.tp_plan == "plain":
        found.append({"tp_plan": "shared input"})
    if config.strategy == "fsdp" and config.reshard:
        found.append({"reshard": False})
    if facts.layout.shard != "none" or facts.layout.tp == 1:
        found.append({"batch": 2 * config.batch})
    words = {"tp_plan": "sum the gradients of a shared input before one all-reduce",
             "reshard": "keep gathered parameters from forward to backward: a third fewer bytes, more memory",
             "batch": "double the batch: parameters and gradients that are sent stay as many"}  # fmt: skip
    actions = []
    for change in found:
        try:
            replace(config, **change)
        except ConfigError:
            continue
        name = next(iter(change))
        actions.append(Action(name=words[name].split(":")[0], says=words[name], change=change))
    return tuple(actions)
