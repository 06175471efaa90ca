"""The questions that take a control: one worker at the same global batch. Pure."""

from __future__ import annotations

import numpy as np

from mlsyslab.contract import Evidence
from mlsyslab.labs.scaleup.answers import (
    GATE_FRAC,
    GATE_STEPS,
    HALF_PRECISION_FRAC,
    LOW_PRECISION_GATE_FRAC,
    MATCH_FRAC,
    STANDS_OUT,
    SWITCHED_FRAC,
    UNSTABLE_FRAC,
    Answer,
    gate_steps,
    is_worse,
    place_of,
    sixteen_bits,
    switched_frac,
    wire_bits,
)
from mlsyslab.labs.scaleup.evidence import Facts


def own_gradients(facts: Facts) -> Answer:
    """Each rank's own gradient against that of the same samples in the control."""
    gap = facts.rank_gap(gate_steps(facts))
    name = "a rank's own gradient apart from the control's, relative"
    if gap is None or facts.large.draws or facts.large.skips:
        return Answer(Evidence(name=name, value=None))
    coarse = sixteen_bits(facts) or wire_bits(facts.large)
    gap = gap[:1] if coarse else gap  # rounding in 16 bits moves all that follows
    # Only the first step that differs is judged: later ones begin with other weights. And after step 0 weights differ by rounding,
    # which can switch a unit and so move one rank's gradient a little.
    limit = HALF_PRECISION_FRAC if sixteen_bits(facts) else 3 * GATE_FRAC
    above = (gap > limit).any(axis=1)
    at = int(np.argmax(above))
    middle = np.sort(gap[at])[(gap.shape[1] - 1) // 2]  # of two ranks the better one
    least = max(limit, SWITCHED_FRAC if at else 0.0, STANDS_OUT * max(middle, gap[:at].max(initial=0.0)))
    off = gap[at] > least
    figure = Evidence(name=name, value=float(gap[at].max() if above.any() else gap.max(initial=0.0)),
                      points_at="the rank whose first step differs", confused_with="weights that differ since an earlier step")  # fmt: skip
    guilty = [r for r, is_off in zip(facts.large.ranks, off, strict=True) if is_off]
    if not above.any() or not guilty or len(guilty) == len(facts.large.ranks):
        return Answer(figure)
    assert facts.control is not None
    j = facts.large.ranks.index(guilty[0])
    ours, theirs = facts.large.get("local_probe")[at, j], facts.control.get("local_probe")[at, j]
    factor = float(ours @ theirs / (theirs @ theirs))
    if np.linalg.norm(ours - factor * theirs) < MATCH_FRAC * np.linalg.norm(theirs) * max(1.0, abs(factor)):
        cause = "gradient missing" if abs(factor) < MATCH_FRAC else "gradient scaled wrongly"
        says = f"in step {at} rank {guilty[0]} computes {factor:.3g} times the gradient that its samples give in the control"
        return Answer(figure, cause, place_of(guilty), says)
    says = f"in step {at} rank {guilty[0]} computes another gradient from the same samples and weights than the control, and no multiple of it"
    return Answer(figure, "corrupted rank", place_of(guilty), says)


def lone_norms(facts: Facts) -> Answer:
    """Without a control: a rank whose own norm is off all the time, or in jumps."""
    part = facts.large
    name = "largest norm of a rank, times the others' middle"
    if facts.control is not None or len(part.ranks) < 3 or not part.sees_local:
        return Answer(Evidence(name=name, value=None))
    norms = part.get("local_norm")[: 3 * GATE_STEPS]
    ratio = norms / np.maximum(np.median(norms, axis=1, keepdims=True), 1e-30)
    steady = np.nanmedian(ratio, axis=0)
    j = int(np.argmax(np.abs(np.log(np.maximum(steady, 1e-6)))))
    figure = Evidence(name=name, value=float(steady[j]), points_at="gradient scaled wrongly",
                      confused_with="a shard with harder samples")  # fmt: skip
    if steady[j] < 1e-3:
        return Answer(
            figure, "gradient missing", f"rank {part.ranks[j]}", f"rank {part.ranks[j]} computes zeros"
        )
    if steady[j] > 2 or steady[j] < 0.5:
        says = f"rank {part.ranks[j]}'s own gradient has {steady[j]:.2g} times the norm of the others', step after step"
        return Answer(figure, "gradient scaled wrongly", f"rank {part.ranks[j]}", says)
    return Answer(figure)


def normalisation(facts: Facts) -> Answer:
    """BatchNorm with the statistics of each rank, against those of the whole batch in the control."""
    part, control = facts.large, facts.control
    gap = facts.norm_gap(GATE_STEPS)
    buffers = part.get("bn_crc")
    name = "gradient norm apart from BatchNorm over the whole batch, relative"
    if control is None or not np.isfinite(buffers).any() or len(part.ranks) == 1:
        return Answer(Evidence(name=name, value=None))
    each = part.batch // len(part.ranks)
    value = float(gap.max(initial=0.0))
    figure = Evidence(name=name, value=value, points_at="batchnorm statistics",
                      confused_with="buffers that differ among ranks, which plain DDP always has")  # fmt: skip
    if value < GATE_FRAC or not is_worse(part, control):
        return Answer(figure)
    says = f"with statistics of {each} samples on each rank the gradient norm is {value:.0%} off and the result worse than with those of all {part.batch}"
    return Answer(figure, "batchnorm statistics", None, says)


def same_curve(facts: Facts) -> Answer:
    """The gate: the same global batch gives the same gradient norms in the first steps."""
    many = gate_steps(facts)
    gap = facts.norm_gap(many)
    name = "gradient norm apart from the control's in the first steps, relative"
    if facts.control is None or not len(gap):
        return Answer(Evidence(name=name, value=None))
    value = float(gap.max())
    figure = Evidence(name=name, value=value, points_at="the system",
                      confused_with="random draws, and low precision, which have wider bands")  # fmt: skip
    coarse = sixteen_bits(facts) or wire_bits(facts.large)
    limit = LOW_PRECISION_GATE_FRAC if coarse else GATE_FRAC
    normed = np.isfinite(facts.large.get("bn_crc")).any()
    compared = not (facts.large.draws or facts.large.skips or normed)
    at = int(np.argmax(gap > limit))
    least = switched_frac(facts.large.batch) if many == GATE_STEPS else UNSTABLE_FRAC
    if value < limit or not compared or (at and gap[at] < least):
        return Answer(figure)
    ratio = float(facts.large.norm[0] / facts.control.norm[0])  # later steps have other weights
    if not facts.large.sees_local and abs(ratio - round(ratio)) < 1e-3 and round(ratio) > 1:
        says = f"the gradient is {ratio:.0f} times the control's: a sum over the ranks, or over micro-batches, instead of a mean"
        return Answer(
            figure,
            "unknown",
            None,
            says,
            "record the ranks' own gradients: only summed micro-batches show in them",
            "system",
        )
    says = f"at the same global batch the gradient norm differs by {value:.1%} within {many} steps: something in the system changes the training"
    return Answer(
        figure,
        "unknown",
        None,
        says,
        "run both in float64, and with dropout and normalisation off: what is left is in the data or the reduction",
        "system",
    )
