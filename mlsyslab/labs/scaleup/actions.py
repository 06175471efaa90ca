"""What to do about it, and what that promises. Pure."""

from __future__ import annotations

import math
from typing import Any

from mlsyslab.contract import Action, Range
from mlsyslab.labs.scaleup.config import SYSTEM, Config
from mlsyslab.labs.scaleup.evidence import Facts, Part

WARMUP_EPOCHS = 5.0
# What a repaired run's loss is expected to end at, as a share of the reference's: the seeds of one config differ by less.
BAND = (0.85, 1.25)

SAYS = {
    "samples duplicated": "give every rank its own share: DistributedSampler",
    "set_epoch forgotten": "call sampler.set_epoch(epoch) at the start of each epoch",
    "samples skipped": "make all shards equally long, or let the epoch end for all ranks together",
    "seed shared by all ranks": "add the rank to the seed of augmentation and dropout",
    "ranks start with different weights": "broadcast rank 0's weights before the first step, as DDP does",
    "gradients not synchronised": "call the wrapped module, never module.module",
    "parameters diverge": "let all ranks make a step, or none: share the loss scaler's verdict",
    "fp16 overflow": "let a GradScaler find the loss scale",
    "fp16 underflow": "let a GradScaler find the loss scale",
    "bf16 weights": "keep float32 weights, and compute in bfloat16",
    "bf16 reduction": "reduce gradients in float32",
    "sum instead of mean": "divide by the number of ranks",
    "gradient missing": "take the rank out, and find out why its part is not sent",
    "gradient stale": "wait for the reduction before the optimizer's step",
    "gradient scaled wrongly": "divide by the tokens of all ranks, everywhere alike",
    "corrupted rank": "take the rank's host out, and test its memory and its processor",
    "accumulation averaged per micro-batch": "divide the summed loss by the tokens of the whole batch",
    "batchnorm statistics": "normalise by what does not depend on the batch (GroupNorm), or synchronise the statistics",
}


def actions_for(cause: str, facts: Facts) -> tuple[Action, ...]:
    """What to do, best first; the change is empty for a job that is not this lab's."""
    ours = not facts.large.header.get("own")
    if cause in SYSTEM:
        change = _repair(cause) if ours else {}
        return (_action("repair", SAYS[cause], change, facts, facts.control),)
    return tuple(
        _action(name, says, change if ours else {}, facts, facts.base)
        for name, says, change in _optimiser(cause, facts.config)
    )


def _repair(cause: str) -> dict[str, Any]:
    more: dict[str, dict[str, Any]] = {
        "fp16 overflow": {"loss_scale": 0.0},
        "fp16 underflow": {"loss_scale": 0.0},
        "bf16 reduction": {"wire": "fp32"},
        "batchnorm statistics": {"norm": "group"},
    }
    return {"cause": "healthy", **more.get(cause, {})}


def _optimiser(cause: str, config: Config) -> list[tuple[str, str, dict[str, Any]]]:
    warm = {"warmup_epochs": max(config.warmup_epochs, WARMUP_EPOCHS)}
    healthy: dict[str, Any] = {"cause": "healthy"}
    half = {"global_batch": max(config.ranks, config.whole_batch // 2 // config.ranks * config.ranks)}
    return {
        "learning rate not scaled": [
            ("linear rule with warm-up", f"multiply the learning rate by {config.growth:g}, and reach it over {WARMUP_EPOCHS:g} epochs", {**healthy, **warm, "scaling": "linear"}),
        ],
        "no warm-up": [("warm-up", f"climb to the learning rate over {WARMUP_EPOCHS:g} epochs", {**healthy, **warm})],
        "learning rate too high for the curvature": [
            ("square-root rule", f"a peak of {config.lr * math.sqrt(config.growth):.2g} instead of {config.peak_lr:.2g}, with warm-up", {**healthy, **warm, "scaling": "sqrt"}),
        ],
        "beyond the critical batch": [
            ("train longer", "twice the epochs: what larger batches save in steps is gone, so it costs samples", {**healthy, "epochs": 2 * config.epochs}),
            ("half the batch", "use fewer workers, or smaller shares", {**healthy, **half}),
        ],
        "schedule counted in steps": [("count samples", "give the schedule in samples or epochs", healthy)],
        "too few steps": [("as many samples", "train as many epochs as the small run", healthy)],
    }[cause]  # fmt: skip


def _action(name: str, says: str, change: dict[str, Any], facts: Facts, reference: Part | None) -> Action:
    """Promised: that the repaired run ends at the reference's test loss, within what seeds do."""
    now = facts.large.last("val_loss")
    then = reference.last("val_loss") if reference is not None else None
    gain = step = None
    if now and then and math.isfinite(now) and facts.large.steps > 1:
        low, high = (max(-1.0, 1 - factor * then / now) for factor in reversed(BAND))
        gain = Range(low, max(low, min(high, 1 - then / now)), high)
        step = Range(BAND[0] * then, then, BAND[1] * then)
    return Action(name=name, says=says, change=change, step_s=step, gain_frac=gain, figure="val_loss",
                  of="the test loss")  # fmt: skip
