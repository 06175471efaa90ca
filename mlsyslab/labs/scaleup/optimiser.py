"""The questions about the optimiser, asked when the system is cleared. Pure."""

from __future__ import annotations

import math

import numpy as np

from mlsyslab.contract import Evidence
from mlsyslab.labs.scaleup.answers import Answer, diverged, is_worse
from mlsyslab.labs.scaleup.config import MOMENTUM
from mlsyslab.labs.scaleup.evidence import Facts


def schedule_by_samples(facts: Facts) -> Answer:
    """Whether the learning rate follows the samples, as the small run's does."""
    name = "learning rate at the end, as a share of its peak, apart from the small run's"
    if facts.base is None or facts.base.steps < 2:
        return Answer(Evidence(name=name, value=None, unit="frac"))
    large, base = (p.lr / max(float(p.lr.max()), 1e-30) for p in (facts.large, facts.base))
    ended = facts.large.seen_samples > 0.9 * facts.base.seen_samples
    value = float(large[-1] - base[-1]) if ended else 0.0
    half = float(large[len(large) // 2] - base[len(base) // 2])
    figure = Evidence(name=name, value=value, unit="frac", points_at="schedule counted in steps",
                      confused_with="a schedule that was changed on purpose")  # fmt: skip
    early = half < -0.25 and large[-1] <= large[len(large) // 2]
    if abs(value) < 0.25 and not early:
        return Answer(figure)
    says = (
        f"after the same samples the small run's learning rate is at {base[-1]:.0%} of its peak, this run's at {large[-1]:.0%}"
        if not early
        else "halfway through the samples this run's learning rate has fallen further than the small run's"
    )
    return Answer(figure, "schedule counted in steps", None, says + ": the schedule counts steps")


def enough_samples(facts: Facts) -> Answer:
    """Whether the large run saw as many samples as the small run."""
    name = "samples seen, as a share of the small run's"
    if facts.base is None:
        return Answer(Evidence(name=name, value=None, unit="frac"))
    share = facts.large.seen_samples / max(1.0, facts.base.seen_samples)
    figure = Evidence(name=name, value=share, unit="frac", points_at="too few steps",
                      confused_with="the same samples in larger batches, which are fewer steps too")  # fmt: skip
    if share > 0.75:
        return Answer(figure)
    says = f"{facts.large.steps} steps saw {share:.0%} of the samples that the small run saw"
    return Answer(figure, "too few steps", None, says)


SHARP = 2.0  # times the limit: sharp enough at the start to ruin a run whose loss does not climb


def limit_of(lr: float) -> float:
    """The sharpness above which gradient descent with momentum is unstable: 2 (1 + momentum) / lr."""
    return 2 * (1 + MOMENTUM) / lr


def stable(facts: Facts) -> Answer:
    """Whether the loss climbed, and whether a warm-up would have kept it from that: by the sharpness."""
    part = facts.large
    peak = float(part.lr.max())
    limit = limit_of(peak)
    measured = facts.base.sharpness if facts.base else []
    at_start = measured[0][1] if measured else None
    figure = Evidence(name="sharpness at the start, as a share of the limit 2 (1 + momentum) / lr",
                      value=None if at_start is None else at_start / limit, points_at="no warm-up",
                      confused_with="the critical batch, which is noise and not curvature")  # fmt: skip
    if facts.base is None:
        return Answer(figure)
    soon = next((value for step, value in measured if step >= 8), None)
    climbs = part.lr[0] < 0.9 * peak
    rough = (
        at_start is not None and soon is not None and not climbs and at_start > SHARP * limit > SHARP * soon
    )
    if not diverged(part) and not (rough and is_worse(part, facts.base)):
        return Answer(figure)
    if at_start is None or soon is None:
        return Answer(figure, "unknown", None, "the loss climbed: no warm-up, or a learning rate that no warm-up helps",
                      "measure the sharpness (largest Hessian eigenvalue) at the start and after some steps at the small learning rate",
                      "optimiser" if facts.control else "")  # fmt: skip
    later = max(value for _, value in measured)
    if not climbs and at_start > limit > soon:
        says = (
            f"the first steps are unstable: at the start the sharpness is {at_start:.0f}, above the limit of {limit:.1f} at this learning rate; "
            f"after 8 gentle steps it is {soon:.0f}, below it. A warm-up gives it that time"
        )
        return Answer(figure, "no warm-up", None, says)
    why = (
        f"after 8 gentle steps the sharpness is still {soon:.0f}" if soon > limit
        else f"it is {at_start:.1f} at first, and rises to {later:.0f} later, when a warm-up is over"
    )  # fmt: skip
    says = f"the loss climbed, and the limit on the sharpness at this learning rate is {limit:.1f}; {why}: warm-up cannot help, only a lower rate"
    return Answer(figure, "learning rate too high for the curvature", None, says)


def rate_scaled(facts: Facts) -> Answer:
    """Whether a worse run has a learning rate that did not grow with the batch, though it could."""
    name = "learning rate, as a multiple of the small run's"
    if facts.base is None or not facts.base.batch or facts.large.batch <= facts.base.batch:
        return Answer(Evidence(name=name, value=None))
    growth = facts.large.batch / facts.base.batch
    ratio = float(facts.large.lr.max() / facts.base.lr.max())
    figure = Evidence(name=name, value=ratio, points_at="learning rate not scaled",
                      confused_with="a batch beyond the critical one, at which no learning rate makes up for the steps")  # fmt: skip
    if ratio > 0.75 * growth or not is_worse(facts.large, facts.base):
        return Answer(figure)
    later = [value for step, value in facts.base.sharpness if step >= 8]
    linear = growth * float(facts.base.lr.max())
    if later and float(np.median(later)) > limit_of(linear):
        return Answer(figure)  # the linear rule is not to be had
    says = f"the batch grew {growth:.3g} times and the learning rate {ratio:.3g} times: steps are as short, and there are fewer of them"
    return Answer(figure, "learning rate not scaled", None, says)


def critical_batch(facts: Facts) -> Answer:
    """What is left where all is in order and the result is worse: larger batches that save no steps."""
    noise = facts.noise
    ratio = facts.large.batch / noise.batch if noise is not None and math.isfinite(noise.batch) else None
    figure = Evidence(name="batch, as a multiple of the gradient noise scale", value=ratio, points_at="beyond the critical batch",
                      confused_with="a learning rate that could still grow")  # fmt: skip
    if facts.base is None or not is_worse(facts.large, facts.base):
        return Answer(figure)
    if facts.control is None:
        return Answer(figure, "unknown", None, "it ended worse than the small run, and nothing within the run is wrong",
                      "train one worker at the same global batch: the same curve means the optimiser, another one the system")  # fmt: skip
    said = f"about {noise.batch:.0f}" if noise is not None and ratio is not None else "not known"
    says = (
        f"one worker at the same batch of {facts.large.batch} ends as badly; the rate is scaled and stable. The gradient noise scale is "
        f"{said}: beyond it a larger batch no longer saves steps, and there are {facts.large.steps} instead of {facts.base.steps}"
    )
    return Answer(figure, "beyond the critical batch", None, says)
