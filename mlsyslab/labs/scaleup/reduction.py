"""The questions about numbers: formats, and whether the reduced gradient is the mean of the ranks'. Pure."""

from __future__ import annotations

import numpy as np

from mlsyslab.contract import Evidence
from mlsyslab.labs.scaleup.answers import (
    EXTRA_ZERO_FRAC,
    GATE_FRAC,
    GATE_STEPS,
    LOST_FRAC,
    MATCH_FRAC,
    MOST,
    PROBE_FRAC,
    SPIKE,
    Answer,
    place_of,
    sixteen_bits,
    wire_bits,
)
from mlsyslab.labs.scaleup.evidence import Facts, Part


def finite_values(facts: Facts) -> Answer:
    """Whether a number format overflowed while the loss was sane."""
    part = facts.large
    local = np.asarray(part.get("local_nonfinite") > 0)
    bad = np.asarray(local.any(axis=1) | (part.get("nonfinite") > 0).any(axis=1))
    first = bad[:GATE_STEPS]
    figure = Evidence(name="steps with non-finite gradients", value=float(bad.mean()), unit="frac", points_at="fp16 overflow",
                      confused_with="divergence, in which loss and norm climb first; a loss scaler that searches its scale")  # fmt: skip
    if not bad.any():
        return Answer(figure)
    at = int(np.argmax(bad))
    climbed = bool(np.nan_to_num(part.loss[: at + 1], nan=0.0).max() > SPIKE * part.loss[0])
    guilty = [r for r, is_bad in zip(part.ranks, local[at], strict=True) if is_bad]
    if climbed or (first.mean() < 0.3 and at < GATE_STEPS and not bad[GATE_STEPS:].any()):
        return Answer(figure)  # divergence, or a scale that was found
    if len(guilty) == 1 and len(part.ranks) > 1 and not sixteen_bits(facts):
        says = f"in step {at} rank {guilty[0]} alone computed non-finite gradients, from a loss that was sane"
        return Answer(figure, "corrupted rank", place_of(guilty), says)
    says = f"gradients are not finite in step {at}, while the loss was sane: a number format overflowed, with a loss scale of {part.get('loss_scale')[at, 0]:g}"
    return Answer(figure, "fp16 overflow", None, says)


def small_gradients(facts: Facts) -> Answer:
    """Whether gradients are rounded to zero, more of them than in the control."""
    part, control = facts.large, facts.control
    zeros = part.middle("local_zero_frac", 5)
    normal = control.middle("local_zero_frac", 5) if control is not None else None
    figure = Evidence(name="gradients that are zero, more than in the control" if normal is not None else "gradients that are zero",
                      value=max(0.0, zeros - (normal or 0.0)), unit="frac", points_at="fp16 underflow",
                      confused_with="units that are dead, which later steps have as well")  # fmt: skip
    most = EXTRA_ZERO_FRAC if normal is not None else 0.5
    if not sixteen_bits(facts) or zeros - (normal or 0.0) < most:
        return Answer(figure)
    says = f"{zeros:.0%} of the first gradients are zero{f' instead of {normal:.0%}' if normal is not None else ''}: they are too small for float16 at a loss scale of {part.get('loss_scale')[0, 0]:g}"
    return Answer(figure, "fp16 underflow", None, says)


def small_updates(facts: Facts) -> Answer:
    """Whether updates are rounded away by the weights."""
    part = facts.large
    lost = part.middle("lost_frac", 5)
    coarse = part.middle("weight_bf16_frac", 5)
    figure = Evidence(name="updates that change nothing", value=lost, unit="frac", points_at="bf16 weights",
                      confused_with="a learning rate near zero")  # fmt: skip
    if coarse < 0.99 or lost < LOST_FRAC:
        return Answer(figure)
    says = (
        f"all weights are bfloat16 numbers, and {lost:.0%} of the first updates were too small to change them"
    )
    return Answer(figure, "bf16 weights", None, says)


def coarse_reduction(facts: Facts) -> Answer:
    """Whether gradients came through bfloat16."""
    part = facts.large
    coarse = part.middle("bf16_frac", GATE_STEPS)
    figure = Evidence(name="reduced gradients that fit bfloat16", value=coarse, unit="frac", points_at="bf16 reduction",
                      confused_with="a reduction in float16, which keeps eight times more digits")  # fmt: skip
    weights = part.middle("weight_bf16_frac", GATE_STEPS)
    if coarse < 0.99 or weights > 0.99 or len(part.ranks) == 1 or sixteen_bits(facts):
        return Answer(figure)
    says = "every element of the reduced gradient is a bfloat16 number: the ranks sum with three digits"
    return Answer(figure, "bf16 reduction", None, says)


def mean_of_ranks(facts: Facts) -> Answer:
    """Whether the reduced gradient is the mean of the ranks' own, by their projections; and if not, what it is instead."""
    part = facts.large
    name = "reduced gradient apart from the mean of the ranks', relative"
    if len(part.ranks) == 1 or not part.sees_local:
        return Answer(Evidence(name=name, value=None))
    own, got = part.get("local_probe"), part.get("probe")[:, 0]
    usable = np.isfinite(own).all(axis=(1, 2)) & np.isfinite(got).all(axis=1)
    own, got = own[usable][: 3 * GATE_STEPS], got[usable][: 3 * GATE_STEPS]
    mean = own.mean(axis=1)
    size = np.linalg.norm(mean, axis=1)
    gap = np.linalg.norm(got - mean, axis=1) / np.maximum(size, 1e-30)
    figure = Evidence(name=name, value=float(gap.max(initial=0.0)), points_at="the reduction",
                      confused_with="gradients that are clipped or scaled between reduction and optimizer")  # fmt: skip
    tolerance = 100 * PROBE_FRAC if wire_bits(part) or sixteen_bits(facts) else PROBE_FRAC
    off = gap > tolerance
    if off.mean() < 0.1:
        return Answer(figure)
    ranks = len(part.ranks)
    if (np.linalg.norm(got - ranks * mean, axis=1) < MATCH_FRAC * ranks * size).mean() > MOST:
        says = f"the reduced gradient is {ranks} times the mean of the ranks': their sum"
        return Answer(figure, "sum instead of mean", None, says)
    return _which_rank(part, own, got - mean, off, figure)


def _which_rank(part: Part, own: np.ndarray, excess: np.ndarray, off: np.ndarray, figure: Evidence) -> Answer:
    """Which rank's part of the mean explains `excess` (steps, probes): left out, of the step before, or scaled."""
    ranks = len(part.ranks)
    steps = np.flatnonzero(off)

    def explained(j: int, wanted: np.ndarray, among: np.ndarray) -> float:
        gap = np.linalg.norm(excess[among] - wanted, axis=1)
        return float((gap < MATCH_FRAC * np.linalg.norm(own[among, j] / ranks, axis=1)).mean())

    for j, rank in enumerate(part.ranks):
        if explained(j, -own[steps, j] / ranks, steps) > MOST:
            says = f"the reduced gradient is what is left when rank {rank}'s part is zero"
            return Answer(figure, "gradient missing", f"rank {rank}", says)
        later = steps[steps > 0]
        if len(later) and explained(j, (own[later - 1, j] - own[later, j]) / ranks, later) > MOST:
            says = f"the reduced gradient holds rank {rank}'s part of the step before"
            return Answer(figure, "gradient stale", f"rank {rank}", says)
        parts = own[steps, j] / ranks
        factor = float((excess[steps] * parts).sum() / max((parts * parts).sum(), 1e-30))
        if explained(j, factor * parts, steps) > MOST:
            says = f"the reduced gradient holds {1 + factor:.3g} times rank {rank}'s part"
            return Answer(figure, "gradient scaled wrongly", f"rank {rank}", says)
    return Answer(
        figure, "unknown", None,
        f"in {len(steps)} steps the reduced gradient is not the mean of the ranks', and no one rank explains it",
        "reduce the same tensor twice, by all-reduce and by gathering and adding up on one rank: network and memory against code",
        "system",
    )  # fmt: skip


def by_tokens(facts: Facts) -> Answer:
    """Whether the loss weighs micro-batches, or ranks, instead of tokens."""
    part = facts.large
    tokens, micro = part.get("tokens"), part.get("loss_by_micro").mean(axis=1)
    weighted, loss = (tokens * part.get("loss_by_tokens")).sum(axis=1) / tokens.sum(axis=1), part.loss
    apart = np.abs(weighted - micro) / np.abs(weighted)
    name = "mean of micro-batches apart from the mean of tokens"
    if not np.isfinite(apart).any():
        return Answer(Evidence(name=name, value=None, unit="frac"))
    value = float(np.nanmedian(apart))
    figure = Evidence(name=name, value=value, unit="frac", points_at="accumulation averaged per micro-batch",
                      confused_with="lengths that happen to be equal, which hide it")  # fmt: skip
    nearer = np.abs(loss - micro) < 0.1 * np.abs(loss - weighted)
    if value < GATE_FRAC or float(np.nanmean(nearer)) < MOST:
        return Answer(figure)
    says = f"the loss is the mean of the micro-batches' means, although they differ in tokens: {value:.1%} off in the middle"
    return Answer(figure, "accumulation averaged per micro-batch", None, says)
