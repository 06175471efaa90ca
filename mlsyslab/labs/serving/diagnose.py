"""Why requests missed the target, or why nothing can be said. Pure.

First whether the measurement holds at all (the tester, the number of requests), then whether anything is wrong, then the
first rule that explains at least half of what was missed. Standing still and dying replicas are named, and are `unknown`:
no change of the configuration mends them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mlsyslab.contract import Diagnosis, Finding
from mlsyslab.labs.serving.actions import actions_for, kind_of
from mlsyslab.labs.serving.evidence import Facts, checks, facts_of
from mlsyslab.labs.serving.queueing import requests_needed
from mlsyslab.labs.serving.rules import CLEAR_FRAC, OWNER, RULES, tester_bound

if TYPE_CHECKING:
    from mlsyslab.runs import Run

MISS_FRAC = 0.05  # the target is a p95
Z = 1.96  # 95 %, two-sided
WHERE = {
    "overload": "replicas",
    "early binding": "batcher",
    "starts": "replicas",
    "head of line": "queue",
    "bursts": "replicas",
    "hold": "batcher",
    "batch": "batcher",
    "near saturation": "replicas",
}


def diagnose(run: Run) -> Diagnosis:
    """The verdict on a run, or an abstention with its reason. Raises RunError where nothing was recorded."""
    verdict = decide(facts_of(run))
    return verdict if run.origin == "measured" else verdict.recorded()


def decide(facts: Facts, *, act: bool = True) -> Diagnosis:
    """The verdict on facts. act=False leaves the actions out, which are simulated."""
    evidence = checks(facts)
    tester = tester_bound(facts)
    # A late generator makes latencies longer, since they count from the intended arrival: what is in time is so all the more.
    if tester and (facts.config.clients or facts.missed_frac > MISS_FRAC):
        return Diagnosis(
            cause="tester-bound", reason=f"{tester.says}; nothing can be said about the service", findings=(tester,), where="tester",
            kind="coordinated omission" if facts.config.clients else "", owner=OWNER["tester-bound"], evidence=evidence,
            actions=actions_for("tester-bound", "", facts) if act else (),
        )  # fmt: skip
    doubt = _doubt(facts)
    if doubt:
        return Diagnosis(cause="unknown", reason=doubt, evidence=evidence)
    if facts.missed_frac <= MISS_FRAC:
        return Diagnosis(cause="healthy", reason=_healthy(facts), evidence=evidence)
    fired = [finding for rule in RULES if (finding := rule.test(facts))]
    chosen = next((finding for finding in fired if finding.weight_frac >= CLEAR_FRAC), None)
    # More than full batches can answer is too much whatever else happened; a stall is at most the last straw.
    halted = "" if chosen and chosen.rule == "overload" else _interrupted(facts)
    abstains = halted or _out_of_reach(facts, chosen) or ("" if chosen else _undecided(facts, fired))
    if abstains or chosen is None:
        owner = "host operations" if halted else "nobody"
        return Diagnosis(
            cause="unknown", reason=abstains, owner=owner, findings=tuple(fired), evidence=evidence
        )
    kind = kind_of(chosen, facts)
    actions = actions_for(chosen.cause, kind, facts) if act else ()
    return Diagnosis(
        cause=chosen.cause,
        kind=kind,
        reason=f"{_missed(facts)}: {chosen.says}{_paced(facts)}",
        where=WHERE[chosen.rule],
        owner=OWNER[chosen.cause],
        findings=(chosen, *(finding for finding in fired if finding is not chosen)),
        evidence=evidence,
        actions=actions,
        gain=next((action.gain_frac for action in actions if action.gain_frac), None),
    )


def _missed(facts: Facts) -> str:
    return f"{facts.missed_frac:.0%} of {facts.n} requests missed the target of {facts.config.slo_p95_s * 1e3:.0f} ms"


def _paced(facts: Facts) -> str:
    return "; the model was paced" if facts.config.paced else ""


def _doubt(facts: Facts) -> str:
    """Why nothing can be said at all; "" where something can: the share that missed is told from 5 %."""
    enough = requests_needed(0.95)
    if facts.n >= enough:
        return ""
    # Wilson's interval of the missed share (Wilson 1927).
    n, share = facts.n, facts.missed_frac
    middle = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2)) / (1 + Z**2 / n)
    if middle - half > MISS_FRAC or middle + half < MISS_FRAC:
        return ""
    return (
        f"only {n} requests after the warm-up, of which {share:.0%} missed: that does not tell a p95 from its target; "
        f"a p95 needs about {enough}, a p99 {requests_needed(0.99)}: send for longer, or at a higher rate"
    )


def _healthy(facts: Facts) -> str:
    saw = facts.figures
    tops = ", ".join(f"p{q} {facts.figure(f'p{q}_s') * 1e3:.1f} ms" for q in (50, 95, 99))
    few = requests_needed(0.99)
    weak = f"; a p99 needs about {few} requests, these are {facts.n}" if facts.n < few else ""
    closed, clients = "", facts.config.clients
    if clients:
        closed = f"; {clients} closed-loop clients sent them, which says little of a load that does not wait"
        if clients < facts.config.max_batch:
            closed += f", and no batch can hold more than their {clients} requests"
    batch = saw.get("mean_batch_rows") or 0.0
    lag = "; they include the generator's own lag" if tester_bound(facts) else ""
    return f"{1 - facts.missed_frac:.1%} of {facts.n} requests were answered within {facts.config.slo_p95_s * 1e3:.0f} ms ({tops}; mean batch {batch:.1f}){weak}{lag}{closed}{_paced(facts)}"


def _interrupted(facts: Facts) -> str:
    """A stretch in which replicas did not work explains most of it."""
    if facts.stuck_s and facts.stuck_frac >= CLEAR_FRAC:
        begin_s, end_s = facts.stuck_s
        return f"{_missed(facts)}, {facts.stuck_frac:.0%} of them around one stretch, {begin_s:.2f} to {end_s:.2f} s, in which replicas stood still; look for what stopped their host"
    if facts.lost_frac >= CLEAR_FRAC:
        return (
            f"{_missed(facts)}, {facts.lost_frac:.0%} of them while a lost replica was replaced; read its log"
        )
    return ""


def _out_of_reach(facts: Facts, chosen: Finding | None) -> str:
    """One row alone takes too long; then neither hold nor batch is to blame."""
    alone_s, target_s = float(facts.curve[0]) + facts.overhead_s, facts.config.slo_p95_s
    if alone_s <= target_s or (chosen and chosen.rule not in ("batch", "hold")):
        return ""
    return (
        f"{_missed(facts)}, which is out of reach: one row alone takes {alone_s * 1e3:.0f} ms; take a smaller model, a faster "
        "device, or a looser target"
    )


def _undecided(facts: Facts, fired: list[Finding]) -> str:
    best = sorted(fired, key=lambda finding: -finding.weight_frac)[:2]
    if not best:
        return f"{_missed(facts)}, and no rule explains it"
    shares = ", ".join(f"{finding.rule} {finding.weight_frac:.0%}" for finding in best)
    return f"{_missed(facts)}, and no cause explains {CLEAR_FRAC:.0%} of it: {shares}; to separate them: {best[0].next_check}"
