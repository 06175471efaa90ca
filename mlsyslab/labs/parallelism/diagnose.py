"""Does it fit, and what does the split cost? The verdict on a run, or an abstention with its reason. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlsyslab.contract import Diagnosis, Evidence, Finding, format_value
from mlsyslab.labs.parallelism.actions import actions_for
from mlsyslab.labs.parallelism.evidence import BYTES, Facts, facts_of
from mlsyslab.labs.parallelism.predict import COMMUNICATION_FRAC
from mlsyslab.labs.parallelism.rules import OWNER, RULES, out_of_memory_term, surprises

if TYPE_CHECKING:
    from mlsyslab.runs import Run

BUSY_FRAC = (
    0.3  # of the step spent waiting for a core, where there is one for each rank: others use the machine
)


def diagnose(run: Run) -> Diagnosis:
    """The verdict on a run. Raises RunError where nothing was recorded."""
    verdict = decide(facts_of(run))
    return verdict if run.origin == "measured" else verdict.recorded()


def decide(facts: Facts) -> Diagnosis:
    """The verdict on facts: the first rule that fires, in their order, since each makes the later ones' symptoms."""
    evidence = _evidence(facts)
    fired = [finding for rule in RULES if (finding := rule.test(facts))]
    besides = surprises(facts)
    if not fired:
        return _nothing(facts, evidence, besides)
    chosen = fired[0]
    actions = actions_for(chosen.cause, facts)
    return Diagnosis(
        cause=chosen.cause,
        kind=out_of_memory_term(facts) if chosen.cause == "memory" else "",
        reason=chosen.says,
        where=_where(chosen, facts),
        owner=OWNER[chosen.cause],
        findings=(*fired, *besides),
        evidence=evidence if facts.oom is None else chosen.evidence,  # it never came to the figures of a step
        actions=actions,
        gain=actions[0].gain_frac if actions else None,
    )


def _where(chosen: Finding, facts: Facts) -> str:
    if chosen.cause == "memory" and facts.oom and facts.layout.pp > 1:
        return f"stage {facts.oom['rank']}"
    if chosen.cause == "imbalance":
        return f"stage {max(range(len(facts.stage_s)), key=lambda stage: facts.stage_s[stage])}"
    return "every rank"


def _nothing(facts: Facts, evidence: tuple[Evidence, ...], besides: tuple[Finding, ...]) -> Diagnosis:
    if facts.step_s is None:
        reason = "no steady step was recorded; record more steps than warmup"
        return Diagnosis(cause="unknown", reason=reason, evidence=evidence)
    busy = facts.queue_frac is not None and facts.queue_frac > BUSY_FRAC and not facts.crowded
    waits = facts.transfer_frac or 0.0
    if busy and waits > COMMUNICATION_FRAC / 2 and facts.layout.pp == 1:
        reason = (
            f"ranks waited {facts.queue_frac:.0%} of the step for a core, and {waits:.0%} for each other: communication, or a busy "
            "machine; run again when it is quiet"
        )
        return Diagnosis(cause="unknown", reason=reason, evidence=evidence, findings=besides)
    peak = max((held["peak_bytes"] for held in facts.memory.values()), default=None)
    sent = max((held["comm_bytes"] for held in facts.memory.values()), default=None)
    reason = f"it fits: the largest rank peaks at {format_value(peak, 'bytes')} and sends {format_value(sent, 'bytes')} a step"
    if facts.crowded:
        reason += f"; {facts.config.ranks} ranks share {facts.shared}, so the step says nothing about speed"
    return Diagnosis(cause="healthy", reason=reason, evidence=evidence, findings=besides)


def _evidence(facts: Facts) -> tuple[Evidence, ...]:
    """The figures of the largest rank, and how the step went."""
    names = {"params_bytes": "parameters", "grads_bytes": "gradients", "optimizer_bytes": "optimizer state",
             "activations_bytes": "kept by forward", "peak_bytes": "peak", "comm_bytes": "sent in a step"}  # fmt: skip
    held = [
        Evidence(
            name=f"{names[name]}, largest rank",
            value=max((of[name] for of in facts.memory.values()), default=None),
            unit="bytes",
            points_at="communication" if name == "comm_bytes" else "memory",
            confused_with="resident memory, which keeps what was freed" if name == "peak_bytes" else "",
        )
        for name in BYTES
    ]
    waits = facts.transfer_frac
    return (
        *held,
        Evidence(name="step", value=facts.step_s, unit="s"),
        Evidence(name="least wait of a rank", value=waits, unit="frac", points_at="communication",
                 confused_with="a schedule's bubble, or ranks that share a core"),
        Evidence(name="waiting for a core", value=facts.queue_frac, unit="frac", points_at="a busy machine, or more ranks than cores"),
        Evidence(name="idle share of the schedule", value=facts.replay.bubble_frac if facts.replay else None, unit="frac",
                 origin="simulated", points_at="bubble", confused_with="unequal stages"),
    )  # fmt: skip
