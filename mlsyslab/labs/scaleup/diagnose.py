"""Is it the optimiser or the system? The verdict on a run, or on a small and a large one. Pure."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from mlsyslab.contract import Diagnosis, Evidence, Finding
from mlsyslab.labs.scaleup.actions import actions_for
from mlsyslab.labs.scaleup.answers import GATE_STEPS, Answer, gate_steps
from mlsyslab.labs.scaleup.config import SYSTEM, bucket_of
from mlsyslab.labs.scaleup.evidence import Facts, facts_of
from mlsyslab.labs.scaleup.rules import QUESTIONS, finding_of, owner_of

if TYPE_CHECKING:
    from mlsyslab.runs import Run


def diagnose(run: Run, large: Run | None = None) -> Diagnosis:
    """The verdict on a run; or, with a second one, on `large` against the small run that is given first.

    At the same global batch the first run is the control, at a smaller one it is the small run. Raises RunError where nothing
    was recorded, ConfigError for runs that cannot be compared.
    """
    judged = run if large is None else large
    verdict = decide(facts_of(judged, None if large is None else run))
    return verdict if judged.origin == "measured" else verdict.recorded()


def decide(facts: Facts) -> Diagnosis:
    """The verdict on facts: one question after the other, up to the first thing that is wrong."""
    evidence: list[Evidence] = []
    for question in QUESTIONS:
        answer = question.ask(facts)
        evidence.append(answer.figure)
        found = finding_of(question, answer)
        if found is not None:
            return _verdict(facts, answer, found, tuple(evidence))
    return Diagnosis(
        cause="healthy", reason=_all_well(facts), evidence=tuple(evidence), findings=harmless(facts)
    )


def _verdict(facts: Facts, answer: Answer, found: Finding, evidence: tuple[Evidence, ...]) -> Diagnosis:
    if answer.cause == "unknown":
        reason = f"{answer.says}. To tell: {answer.experiment}"
        return Diagnosis(
            cause="unknown", kind=answer.bucket, reason=reason, findings=(found,), evidence=evidence
        )
    actions = actions_for(answer.cause, facts)
    return Diagnosis(
        cause=answer.cause,
        kind=bucket_of(answer.cause),
        reason=answer.says,
        where=answer.where or ("every rank" if answer.cause in SYSTEM else None),
        owner=owner_of(answer.cause),
        findings=(found,),
        evidence=evidence,
        actions=actions,
        gain=actions[0].gain_frac if actions else None,
    )


def _all_well(facts: Facts) -> str:
    if facts.control is None:
        return "within this run nothing is wrong; whether its curve is the right one takes a control: one worker at the same global batch"
    gap = facts.norm_gap(gate_steps(facts)).max(initial=0.0)
    compared = (
        "its ranks draw random numbers of their own, so the curve is compared by its end alone"
        if facts.large.draws
        else f"its gradient norms are the control's {f'within {gap:.0e}' if gap else 'to the last bit'}"
    )
    against = ", and it ends as well as the small run" if facts.base is not None else ""
    return f"every sample is seen once, the ranks agree, {compared}{against}"


def harmless(facts: Facts) -> tuple[Finding, ...]:
    """Differences that are no fault, and are named so that nobody hunts them."""
    part, found = facts.large, []

    def note(rule: str, says: str, name: str, value: float, unit: str = "") -> None:
        figure = Evidence(name=name, value=value, unit=unit)
        found.append(Finding(rule=rule, cause="healthy", says=says, evidence=(figure,)))

    if len(part.ranks) > 1 and part.middle("fp16_frac", GATE_STEPS) > 0.99:
        note("reduction in float16", "gradients are reduced in float16 and scaled well: harmless", "reduced gradients that fit float16", 1.0, "frac")  # fmt: skip
    buffers = part.get("bn_crc")[-1]
    if np.isfinite(buffers).all() and len(set(buffers.tolist())) > 1:
        note("BatchNorm buffers differ", "running statistics differ among the ranks, as plain DDP leaves them: evaluate one rank's", "different sets of buffers", float(len(set(buffers.tolist()))))  # fmt: skip
    padded = _padded(facts)
    if padded:
        note("padded", f"{padded} samples are drawn twice an epoch, so that all shards are as long: harmless in training, not in a metric", "padded samples", float(padded))  # fmt: skip
    return tuple(found)


def _padded(facts: Facts) -> int:
    """Samples that a sampler repeats at the end of an epoch to make shards equal."""
    part, size = facts.large, facts.large.header.get("samples")
    if not size or part.ids(0, part.ranks[0]) is None:
        return 0
    drawn = [
        i for s in range(part.steps) if part.epochs[s] == 0 for r in part.ranks for i in part.ids(s, r) or []
    ]
    twice = len(drawn) - len(set(drawn))
    return twice if twice < len(part.ranks) else 0


def chart(run: Run, large: Run | None = None) -> list[Evidence]:
    """Every figure of the procedure, whatever is wrong, and no verdict: what a blind run shows."""
    facts = facts_of(run if large is None else large, None if large is None else run)
    return [question.ask(facts).figure for question in QUESTIONS]


def walk(run: Run, large: Run | None = None) -> list[tuple[str, Evidence, bool]]:
    """The procedure as it went: (question, its figure, whether it was the one that stopped it)."""
    facts = facts_of(run if large is None else large, None if large is None else run)
    steps = []
    for question in QUESTIONS:
        answer = question.ask(facts)
        steps.append((question.name, dataclasses.replace(answer.figure), bool(answer.cause)))
        if answer.cause:
            break
    return steps
