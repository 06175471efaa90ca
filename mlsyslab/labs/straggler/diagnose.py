"""Which rank holds the job up and why, or why nobody is to be blamed. Pure.

Who comes first (`blame`), then why: the rule that explains at least CLEAR_FRAC of the excess. Where none does, the
rank is named and the cause is "unknown", with the two best candidates and the check that would separate them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mlsyslab.contract import Diagnosis, Evidence, Finding, Range
from mlsyslab.labs.straggler.actions import ABOVE, BELOW, actions_for, kind_of
from mlsyslab.labs.straggler.blame import ENOUGH_STEPS
from mlsyslab.labs.straggler.checks import checks
from mlsyslab.labs.straggler.evidence import Facts, facts_of
from mlsyslab.labs.straggler.rules import BESIDES, CLEAR_FRAC, OWNER, RULES

if TYPE_CHECKING:
    from mlsyslab.runs import Run

CLEAR_LEAD = 0.30  # of the healthy work: what contention alone explains, or comes from an overloaded host, must be so much
RESTLESS_FRAC = 0.12  # of the healthy work; own work that scatters by more, beside busy others, shows nothing
OTHERS_FRAC = 0.15  # of the machine's cores; what others use below it does not overload the host
LEAD = 2.5  # a cause that explains less than CLEAR_FRAC must explain so many times what the second does


def diagnose(run: Run) -> Diagnosis:
    """The verdict on a run, or an abstention with its reason. Raises RunError where nothing was recorded."""
    verdict = decide(facts_of(run))
    return verdict if run.origin == "measured" else verdict.recorded()


def decide(facts: Facts) -> Diagnosis:
    """The verdict on facts."""
    evidence, kind = checks(facts), facts.blame.kind
    doubt = _doubt(facts)
    besides = [finding for rule in BESIDES if (finding := rule.test(facts))]
    # An overloaded host does not fake these; and what changes places is nothing beside a link that costs more.
    if besides and (
        kind in ("healthy", "shared")
        or (kind == "rotates" and besides[0].weight_frac > facts.blame.gain_frac)
    ):
        return _beside(besides, facts, evidence)
    if doubt:
        return Diagnosis(cause="unknown", reason=doubt, evidence=evidence)
    if kind in ("rank", "stage"):
        return _accuse(facts, evidence)
    return _rotation(facts, evidence) if kind == "rotates" else _healthy(facts, evidence)


def _doubt(facts: Facts) -> str:
    """Why nothing can be said at all; "" where something can."""
    blame = facts.blame
    if blame.kind == "few steps":
        return (
            f"only {facts.steps} steady {'step' if facts.steps == 1 else 'steps'} can be compared and {ENOUGH_STEPS} are needed; "
            "one slow step accuses nobody"
        )
    # Ranks that outnumber the cores wait for each other's bursts; that is the job's own load and no doubt.
    by_others = facts.others_frac is None or facts.others_frac > OTHERS_FRAC
    crowded = by_others and 2 * len(facts.overloaded) > len(facts.ranks)
    if crowded and (blame.kind != "rank" or blame.excess_s < CLEAR_LEAD * blame.base_s):
        return (
            f"{len(facts.overloaded)} of {len(facts.ranks)} ranks waited for a core in most steps: "
            "the host was overloaded; run again when it is quiet"
        )
    busy = facts.others_frac is not None and facts.others_frac > OTHERS_FRAC
    if busy and blame.kind == "healthy" and blame.noise_s > RESTLESS_FRAC * blame.base_s:
        return (
            f"own work is scattered by {blame.noise_s * 1e3:.0f} ms a step, while other programs used "
            f"{facts.others_frac:.0%} of the cores: the host was overloaded; run again when it is quiet"
        )
    return ""


def _healthy(facts: Facts, evidence: tuple[Evidence, ...]) -> Diagnosis:
    """No rank stands out; all may have become slower together."""
    blame = facts.blame
    if blame.kind == "shared":
        said = (
            f"from step {facts.since} on every rank's steps are longer at once, so the cause is one that all share; "
            "no rank stands out"
        )
        return _nobody("shared", said, facts, evidence)
    return Diagnosis(
        cause="healthy",
        reason=f"no rank stands out: the ranks' own work is {min(facts.own_s.values()) * 1e3:.0f} to "
        f"{max(facts.own_s.values()) * 1e3:.0f} ms a step, scattered by {blame.noise_s * 1e3:.0f} ms",
        evidence=evidence,
    )


def _who(facts: Facts) -> str:
    named = ", ".join(map(str, facts.named))
    return f"rank {named}" if len(facts.named) == 1 else f"ranks {named}"


def _head(facts: Facts) -> str:
    """Who, by how much, and since when."""
    often = "" if facts.blame.slow.all() else f" in {facts.blame.slow.mean():.0%} of the steps"
    since = f", since step {facts.since}" if facts.since else ""
    verb = "does" if len(facts.named) == 1 else "do"
    return (
        f"{_who(facts)} {verb} {facts.excess_s * 1e3:.0f} ms more own work than the others{often}{since}, and waits "
        "least"
    )


def _accuse(facts: Facts, evidence: tuple[Evidence, ...]) -> Diagnosis:
    if facts.blame.kind == "stage":
        said = f"{_head(facts)}; they are one whole pipeline stage, so the partition is uneven and no machine is slow"
        return _nobody("stage", said, facts, evidence)
    fired = sorted((f for rule in RULES if (f := rule.test(facts))), key=lambda f: -f.weight_frac)
    paced = "; the accelerator was paced" if facts.paced else ""
    if not fired or not _clear(fired):
        said = f"{_head(facts)}, and no cause explains {CLEAR_FRAC:.0%} of it"
        if len(fired) > 1:
            said += f": {fired[0].rule} {fired[0].weight_frac:.0%}, {fired[1].rule} {fired[1].weight_frac:.0%}; to separate them: {fired[0].next_check}"
        elif fired:
            said += f": {fired[0].rule} {fired[0].weight_frac:.0%}; {fired[0].next_check}"
        return Diagnosis(
            cause="unknown",
            reason=said + paced,
            where=_who(facts),
            owner="host operations",
            findings=tuple(fired),
            evidence=evidence,
            actions=(found := actions_for("unknown", "", facts)),
            gain=found[0].gain_frac,
        )
    chosen = fired[0]
    if chosen.rule == "neighbours" and facts.excess_s < CLEAR_LEAD * facts.blame.base_s:
        said = (
            f"{_head(facts)}, but all of it is waiting for a core, which a busy host can do to any rank; "
            "run again when it is quiet"
        )
        return Diagnosis(cause="unknown", reason=said, findings=tuple(fired), evidence=evidence)
    kind = kind_of(chosen, facts)
    actions = actions_for(chosen.cause, kind, facts)
    return Diagnosis(
        cause=chosen.cause,
        kind=kind,
        reason=f"{_head(facts)}; {chosen.says}{paced}",
        where=_who(facts),
        owner=OWNER[chosen.cause],
        findings=tuple(fired),
        evidence=evidence,
        actions=actions,
        gain=actions[0].gain_frac,
    )


def _clear(fired: list[Finding]) -> bool:
    """Whether the first explains enough; a little less does where the second explains nearly nothing."""
    first, second = fired[0].weight_frac, fired[1].weight_frac if len(fired) > 1 else 0.0
    return first >= CLEAR_FRAC or (first >= 0.75 * CLEAR_FRAC and first >= LEAD * second)


def _rotation(facts: Facts, evidence: tuple[Evidence, ...]) -> Diagnosis:
    longer = facts.length_corr is not None and facts.length_corr > 0.5
    said = (
        f"the slowest rank is another one from step to step (no rank is it in more than {facts.blame.share:.0%} of the "
        f"{int(facts.blame.slow.sum())} slow steps): no machine is at fault"
    )
    if longer:
        said += f"; own work follows the length of the samples (correlation {facts.length_corr:.2f})"
    verdict = _nobody("imbalance", said, facts, evidence)
    gain = Range.around(facts.blame.gain_frac, BELOW, ABOVE)
    return replace(verdict, kind="sample length" if longer else "", gain=gain)


def _beside(besides: list[Finding], facts: Facts, evidence: tuple[Evidence, ...]) -> Diagnosis:
    chosen = besides[0]
    if chosen.cause == "imbalance":
        said = f"{chosen.says}: no link is at fault alone"
        verdict = _nobody("imbalance", said, facts, evidence)
        return replace(verdict, kind="links", owner=OWNER["communication"], findings=tuple(besides))
    values = facts.link_s if chosen.cause == "communication" else {r: -s for r, s in facts.join_s.items()}
    actions = actions_for(chosen.cause, "", facts)
    return Diagnosis(
        cause=chosen.cause,
        kind=kind_of(chosen, facts),
        reason=chosen.says,
        where=f"rank {max(values, key=lambda rank: values[rank])}",
        owner=OWNER[chosen.cause],
        findings=tuple(besides),
        evidence=evidence,
        actions=actions,
        gain=actions[0].gain_frac if actions else None,
    )


def _nobody(cause: str, said: str, facts: Facts, evidence: tuple[Evidence, ...]) -> Diagnosis:
    return Diagnosis(
        cause=cause, reason=said, owner=OWNER[cause], evidence=evidence, actions=actions_for(cause, "", facts)
    )
