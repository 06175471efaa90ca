"""Which part of the step is the bottleneck, of which kind, and who acts first. Pure.

The first question is always the breakdown. A share below WAIT_FRAC is not worth acting on; the largest share above
it names the cause, and further evidence names the kind. Where the evidence is thin the verdict is "unknown".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlsyslab.contract import Diagnosis, Evidence, Finding
from mlsyslab.labs.steptime.actions import actions_for, kind_of
from mlsyslab.labs.steptime.breakdown import WAIT_FRAC
from mlsyslab.labs.steptime.evidence import ENOUGH_STEPS, Facts, facts_of, general_evidence
from mlsyslab.labs.steptime.rules import OWNER, RULES

if TYPE_CHECKING:
    from mlsyslab.runs import Run

OVERLOADED_FRAC = 0.5  # of steps in which the rank waited for a core; beyond it a close call is no call
CROWDED_FRAC = 0.4  # of a loader worker's time spent ready but without a core
CLEAR_LEAD = 1.5  # on an overloaded machine the first share must be this many times the second


def diagnose(run: Run) -> Diagnosis:
    """The verdict on a run, or an abstention with its reason. Raises RunError where nothing was recorded."""
    verdict = decide(facts_of(run))
    return verdict if run.origin == "measured" else verdict.recorded()


def decide(facts: Facts) -> Diagnosis:
    """The verdict on facts: the heaviest finding that may be acted on."""
    evidence = tuple(general_evidence(facts))
    if facts.step.steps < ENOUGH_STEPS:
        return _abstain(
            f"only {facts.step.steps} steady steps were recorded; {ENOUGH_STEPS} are needed", (), evidence
        )
    fired = [finding for rule in RULES if (finding := rule.test(facts))]
    waits = sorted((f for f in fired if f.cause != "compute"), key=lambda f: -f.weight_frac)
    waits = _drop_victims(waits, facts)
    if waits and _too_close(waits, facts):
        return _abstain(
            "the machine was overloaded by others and two causes are too close to call; run again when it is quiet",
            tuple(waits),
            evidence,
        )
    chosen = waits[0] if waits else next((f for f in fired if f.cause == "compute"), None)
    if chosen is None:
        return _without_a_finding(facts, evidence)
    if chosen.cause == "unknown":
        return _abstain(f"{chosen.says}; {chosen.next_check}", tuple(waits), evidence)
    kind = kind_of(chosen, facts)
    actions = actions_for(chosen.cause, kind, facts)
    return Diagnosis(
        cause=chosen.cause,
        kind=kind,
        reason=_sentence(chosen, facts),
        where=_where(chosen, facts),
        owner=OWNER[chosen.cause],
        findings=(chosen, *(f for f in fired if f is not chosen)),
        evidence=evidence,
        actions=actions,
        gain=actions[0].gain_frac if actions else None,
    )


def _without_a_finding(facts: Facts, evidence: tuple[Evidence, ...]) -> Diagnosis:
    """Healthy, where that was measured; an abstention where waits remain or the roof is unknown."""
    waits = facts.step.frac("data_s", "h2d_s", "sync_s", "other_s")
    if waits >= 2 * WAIT_FRAC:
        said = f"waits take {waits:.0%} of the step, but their reason changes with step and rank"
        return _abstain(f"{said}; record more steps on a quiet machine", (), evidence)
    if facts.efficiency_frac is None:
        said = "nothing but compute takes time, and whether it is well used cannot be said"
        return _abstain(
            f"{said}: this machine's matmul rate was not measured, run `mlsyslab doctor`", (), evidence
        )
    return Diagnosis(
        cause="healthy",
        reason=f"no phase outside compute takes {WAIT_FRAC:.0%} of the step, "
        f"and compute runs at {facts.efficiency_frac:.0%} of the measured matmul rate",
        where="every rank",
        evidence=evidence,
    )


def _drop_victims(waits: list[Finding], facts: Facts) -> list[Finding]:
    """A rank that is starved makes the others wait: then the wait is its symptom, not a second cause."""
    starved = any(f.cause == "input" for f in waits) and 0 < len(facts.step.waits) < facts.step.ranks
    busy = any(f.cause == "host" for f in waits)
    if starved or busy:
        return [f for f in waits if f.rule != "waiting for a rank"]
    return waits


def _too_close(waits: list[Finding], facts: Facts) -> bool:
    crowded = (facts.worker_delay_frac or 0.0) > CROWDED_FRAC
    overloaded = (facts.step.overloaded_frac or 0.0) >= OVERLOADED_FRAC
    if len(waits) < 2 or not (crowded or overloaded):
        return False
    return waits[0].cause != waits[1].cause and waits[0].weight_frac < CLEAR_LEAD * waits[1].weight_frac


def _abstain(reason: str, findings: tuple[Finding, ...], evidence: tuple[Evidence, ...]) -> Diagnosis:
    return Diagnosis(cause="unknown", reason=reason, findings=findings, evidence=evidence)


def _where(chosen: Finding, facts: Facts) -> str:
    if chosen.rule == "data wait" and 0 < len(facts.step.waits) < facts.step.ranks:
        ranks = ", ".join(map(str, facts.step.waits))
        return f"rank {ranks}" if len(facts.step.waits) == 1 else f"ranks {ranks}"
    return "every rank"


def _sentence(chosen: Finding, facts: Facts) -> str:
    said = chosen.says
    if facts.slower_after is not None:
        said += f"; it became so at step {facts.slower_after}, and only the steps since then are counted"
    crowded = facts.worker_delay_frac is not None and facts.worker_delay_frac > CROWDED_FRAC
    if chosen.cause == "input" and crowded:
        said += f"; its workers waited for a core {facts.worker_delay_frac:.0%} of the time, since others use them too"
    return said + ("; compute was paced, like an accelerator" if facts.paced else "")
