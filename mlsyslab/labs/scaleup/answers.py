"""What an answer of the procedure is, and what several questions look at. Pure."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from mlsyslab.contract import Evidence
from mlsyslab.labs.scaleup.evidence import Facts, Part

GATE_STEPS = 20
UNSTABLE_STEPS = 5
UNSTABLE_FRAC = (
    1e-3  # at which a difference must begin where training diverges, which amplifies rounding at once
)
GATE_FRAC = (
    1e-5  # of the gradient norm in float32 (docs/log.md: clean runs stay below 1e-6, faults begin at 2e-3)
)
LOW_PRECISION_GATE_FRAC = 0.05  # where forward runs in 16 bits
PROBE_FRAC = 2e-5  # of a projection: clean sums agree within 1e-6
MATCH_FRAC = 2e-2  # within which a mechanism explains what is missing from a sum
MOST = 0.8  # share of the steps that a mechanism must explain
DUPLICATE_FRAC = 0.02
EXTRA_ZERO_FRAC = 0.05
LOST_FRAC = 0.3
WORSE_ACC = 0.025
WORSE_LOSS = 0.10  # relative, where there is no accuracy
SPIKE = 1.5  # times the first loss: training that is stable never climbs so far
STANDS_OUT = 20.0  # times the middle rank's difference
HALF_PRECISION_FRAC = 0.2  # of a rank's first gradient in 16 bits
# Of a rank's gradient: what switched units moved stayed below, 16 flipped bits began above (docs/log.md).
SWITCHED_FRAC = 0.015
SWITCHED_SAMPLES = (
    0.5  # of a sample's gradient: what a unit that rounding has switched may move (docs/log.md)
)
STUCK = 0.45  # of the loss of a model that knows nothing: 1.04 with ten classes (docs/log.md)
NOTHING_LEARNED = 0.9
SEED_CAUSE = "seed shared by all ranks"


@dataclass(frozen=True)
class Answer:
    """A question's answer: its figure, and where something is wrong the cause, its place and a sentence.

    experiment: what would separate the candidates, where the cause is "unknown"; bucket: what is known of it all the same."""

    figure: Evidence
    cause: str = ""
    where: str | None = None
    says: str = ""
    experiment: str = ""
    bucket: str = ""


def place_of(ranks: list[int]) -> str | None:
    """The place of a fault that few ranks have."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else None


def minority(part: Part, values: list[float]) -> str | None:
    """The rank whose value differs where all the others agree; of two nobody can tell."""
    counts = Counter(values).most_common()
    if len(values) > 2 and len(counts) == 2 and counts[1][1] == 1:
        return f"rank {part.ranks[values.index(counts[1][0])]}"
    return None


def sixteen_bits(facts: Facts) -> bool:
    """Whether forward and backward run in 16 bits: as the header says, else as a loss scale tells."""
    told = facts.large.header.get("precision")
    scales = facts.large.get("loss_scale")
    return told in ("fp16", "bf16") or bool(np.nanmax(np.where(np.isfinite(scales), scales, 1.0)) != 1.0)


def wire_bits(part: Part) -> bool:
    """Whether the reduced gradients came through float16."""
    return part.middle("fp16_frac", GATE_STEPS) > 0.99


def diverged(part: Part, stuck: float = STUCK) -> bool:
    """Whether the loss climbed above what it began with, stayed above `stuck` of that of a model that knows nothing, or is no
    number."""
    loss = part.loss
    if not np.isfinite(loss).all():
        return True
    knows_nothing = min(float(loss[0]), part.header.get("chance_loss") or math.inf)
    return bool(loss.max() > SPIKE * loss[0]) or part.final_loss() > stuck * knows_nothing


def gate_steps(facts: Facts) -> int:
    """Steps in which a run and its control must be equal: few where both diverge, which amplifies rounding step by step."""
    diverges = facts.control is not None and diverged(facts.control, NOTHING_LEARNED)
    return UNSTABLE_STEPS if diverges else GATE_STEPS


def switched_frac(samples: float) -> float:
    """What one switched unit may move of a gradient over so many samples, relative; faults begin above it."""
    return SWITCHED_SAMPLES / max(1.0, samples)


def is_worse(part: Part, than: Part) -> bool:
    """Whether a run ended worse than another, beyond what seeds do: by accuracy, else by loss."""
    mine, theirs = part.last("val_acc_frac"), than.last("val_acc_frac")
    if mine is not None and theirs is not None:
        return theirs - mine > WORSE_ACC
    ours = part.final_loss()
    return not math.isfinite(ours) or ours > (1 + WORSE_LOSS) * than.final_loss()
