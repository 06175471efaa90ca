"""The checks of the serving lab in their order, each a rule: what it looks at, its look-alike, the next check. Pure.

A rule's `weight_frac` is the share of the missed requests that it explains. The first that explains at least CLEAR_FRAC
names the cause: overload makes every other symptom too, so it comes first.
"""

from __future__ import annotations

from mlsyslab.contract import Evidence, Finding, Rule
from mlsyslab.labs.serving.evidence import Facts
from mlsyslab.labs.serving.policies import EARLY

LAG_FRAC = 0.1  # of p99: a generator that is later than this measures itself
CLEAR_FRAC = 0.5  # of the missed requests that a cause must explain
SEEN_FRAC = 0.1  # what explains less is not worth a finding
FULL = 0.95  # of the saturation: from here on the queue is the load's own
NEAR = 0.80  # of the saturation: the queue of a Poisson process is long already
BURSTY = 2.0  # variance over mean of the arrivals in short windows
LOOSE = 0.85  # of a batch: less is filled though others wait

OWNER = {
    "healthy": "nobody",
    "batch wait too long": "serving",
    "batch too large for the target": "serving",
    "saturated": "serving",
    "bursts exceed warm capacity": "serving",
    "cold starts": "serving",
    "no admission control": "serving",
    "tester-bound": "nobody",
    "head of line blocking": "serving",
    "unknown": "nobody",
}


def tester_bound(facts: Facts) -> Finding | None:
    """The generator was late, or it waited for the answers; then nothing else may be said."""
    lag_s, p99_s = facts.figure("lag_p99_s"), facts.figure("p99_s")
    if not facts.config.clients:
        if lag_s <= LAG_FRAC * p99_s or not p99_s:
            return None
        return Finding(
            rule="tester", cause="tester-bound",
            says=f"the generator sent {lag_s * 1e3:.1f} ms late (p99), more than a tenth of the p99 of {p99_s * 1e3:.1f} ms: it measured itself",
            evidence=(Evidence(name="lag, p99", value=lag_s, unit="s", points_at="tester-bound"),),
            confused_with="a slow service, whose lag stays small in an open loop",
            next_check="lower the rate, or give the generator a core of its own", weight_frac=1.0,
        )  # fmt: skip
    open_s = facts.open_p99_s or 0.0
    if open_s < 1.5 * p99_s:
        return None
    return Finding(
        rule="tester", cause="tester-bound",
        says=f"{facts.config.clients} closed-loop clients waited for their answers and sent nothing meanwhile: they saw a p99 of "
        f"{p99_s * 1e3:.1f} ms, an open loop would have seen about {open_s * 1e3:.0f} ms (coordinated omission)",
        evidence=(Evidence(name="p99 as an open loop would have seen it", value=open_s, unit="s", origin="predicted", points_at="coordinated omission"),),
        confused_with="a fast service", next_check="send the same load by a fixed schedule: clients = 0", weight_frac=1.0,
    )  # fmt: skip


def _overload(facts: Facts) -> Finding | None:
    """More comes than full batches can answer."""
    bounded = facts.config.admission or facts.config.deadline_s > 0
    if facts.load_frac < FULL:
        return None
    stands = f"{facts.load_frac:.0%} of what full batches can answer came"
    cause = "saturated" if bounded else "no admission control"
    says = (
        f"{stands}, and {facts.refused / facts.n:.0%} were refused or expired"
        if bounded
        else f"{stands}, nobody was refused, and the queue grew to {facts.growth:.0f} times its beginning"
    )
    return Finding(
        rule="overload", cause=cause, says=says, weight_frac=1.0,
        evidence=(
            Evidence(name="rows that came over the saturation", value=facts.load_frac, unit="frac", points_at=cause),
            Evidence(name="queue's growth", value=facts.growth, points_at="no admission control"),
        ),
        confused_with="a burst, which is over: here the mean is too much",
        next_check="divide the rate by two: if the queue still grows, it is not the load",
    )  # fmt: skip


def _early(facts: Facts) -> Finding | None:
    """An early binder at its limit: busy with small batches that were fixed while the replicas worked."""
    busy, batch = facts.figure("utilisation_frac"), facts.figure("mean_batch_rows")
    if facts.config.binding != EARLY or busy < FULL or batch > 0.8 * facts.config.max_batch:
        return None
    return Finding(
        rule="early binding", cause="saturated", weight_frac=facts.queued_frac,
        says=f"the replicas are {busy:.0%} busy with batches of {batch:.1f} rows though requests wait: batches are fixed by a timer while the replicas work",
        evidence=(Evidence(name="mean batch", value=batch, unit="rows", points_at="early binding"),),
        confused_with="real saturation, where batches are full",
        next_check="bind late: the same load then runs in larger batches",
    )  # fmt: skip


def _cold(facts: Facts) -> Finding | None:
    if facts.starting_frac < SEEN_FRAC or not (facts.start_s or facts.replicas < 1):
        return None
    return Finding(
        rule="starts", cause="cold starts", weight_frac=facts.starting_frac,
        says=f"{facts.starting_frac:.0%} of the missed requests came while a replica was starting, which took {facts.start_s or 0:.1f} s, or while none was ready",
        evidence=(Evidence(name="a start", value=facts.start_s, unit="s", points_at="cold starts"),),
        confused_with="a burst, which warm replicas in the same number would not have answered either",
        next_check="keep as many replicas ready as it had at the end, and send the same schedule",
    )  # fmt: skip


def _bursts(facts: Facts) -> Finding | None:
    if facts.dispersion < BURSTY or facts.peaks_frac < SEEN_FRAC:
        return None
    return Finding(
        rule="bursts", cause="bursts exceed warm capacity", weight_frac=facts.peaks_frac,
        says=f"the mean load is {facts.load_frac:.0%}, but {facts.peaks_frac:.0%} of the missed requests came in peaks above what the ready replicas can do "
        f"(variance over mean of the arrivals {facts.dispersion:.0f}; Poisson has 1)",
        evidence=(Evidence(name="variance over mean of the arrivals", value=facts.dispersion, points_at="bursts"),),
        confused_with="a replica that stood still, behind which the same queue forms",
        next_check="send the same number evenly: if it is in time, it is the bursts",
    )  # fmt: skip


def _blocked(facts: Facts) -> Finding | None:
    """Who does not fit, or takes long, holds up those behind it: three ways to see it, the clearest first."""
    config = facts.config
    packed = facts.packed_frac if facts.packed_frac is not None else 1.0
    real = facts.load_frac / packed
    loose = packed < LOOSE and config.max_batch > 1 and real > NEAR and config.binding != EARLY
    # A batch cannot be smaller than the largest request, so that the batch's limit is not what is too large.
    alone_s = float(facts.curve[facts.largest_rows - 1]) if facts.largest_rows > config.max_batch / 2 else 0.0
    if facts.blocked_frac >= SEEN_FRAC:
        says = f"{facts.blocked_frac:.0%} of the missed requests waited behind {facts.blocked_by}; their like alone would have been in time"
        weight = facts.blocked_frac
    elif loose:
        says = f"requests of many rows do not fit into what is left of a batch, so it leaves {packed:.0%} full though others wait: {facts.load_frac:.0%} load is then {real:.0%}"
        weight = facts.queued_frac
    elif 2 * alone_s >= 0.9 * config.slo_p95_s:
        says = f"a request of {facts.largest_rows} rows takes {alone_s * 1e3:.0f} ms, which the small ones beside and behind it wait for"
        weight = facts.service_frac
    else:
        return None
    return Finding(
        rule="head of line", cause="head of line blocking", says=says, weight_frac=weight,
        evidence=(
            Evidence(name="missed that their like alone would not have been", value=facts.blocked_frac, unit="frac", origin="simulated"),
            Evidence(name="rows of a batch that left others behind, of max_batch", value=facts.packed_frac, unit="frac", points_at="packing"),
            Evidence(name="seconds of a large request", value=alone_s or None, unit="s", points_at="large requests"),
        ),
        confused_with="saturation, where every batch that leaves others behind is full",
        next_check="send the small or urgent ones alone; then split the large ones",
    )  # fmt: skip


def _hold(facts: Facts) -> Finding | None:
    if facts.wait_frac < SEEN_FRAC:
        return None
    held_s = facts.figure("batch_wait_s")
    return Finding(
        rule="hold", cause="batch wait too long", weight_frac=facts.wait_frac,
        says=f"{facts.wait_frac:.0%} of the missed requests would be in time without the batcher's hold (mean {held_s * 1e3:.1f} ms of max_wait_s = {facts.config.max_wait_s * 1e3:g} ms)",
        evidence=(Evidence(name="mean hold", value=held_s, unit="s", points_at="batch wait too long"),),
        confused_with="waiting for a replica, which a shorter hold makes no shorter",
        next_check="set max_wait_s = 0: with late binding the tail can only fall",
    )  # fmt: skip


def _large(facts: Facts) -> Finding | None:
    target_s, config = facts.config.slo_p95_s, facts.config
    if config.max_batch == 1 or 2 * float(facts.curve[-1]) < target_s or facts.service_frac < SEEN_FRAC:
        return None
    return Finding(
        rule="batch", cause="batch too large for the target", weight_frac=facts.service_frac,
        says=f"a batch of {config.max_batch} takes {facts.curve[-1] * 1e3:.0f} ms; who waits for one and then runs in one has {2 * facts.curve[-1] * 1e3:.0f} ms of the target's {target_s * 1e3:.0f}",
        evidence=(Evidence(name="seconds of a full batch", value=float(facts.curve[-1]), unit="s", points_at="batch too large for the target"),),
        confused_with="a queue of many batches, which a smaller batch makes longer",
        next_check="halve max_batch: the saturation falls less than the batch's seconds do",
    )  # fmt: skip


def _near(facts: Facts) -> Finding | None:
    if facts.load_frac < NEAR or facts.dispersion >= BURSTY:
        return None
    weight = facts.queued_frac
    return Finding(
        rule="near saturation", cause="saturated", weight_frac=weight,
        says=f"{facts.load_frac:.0%} of what full batches can answer came evenly, and {weight:.0%} of what was missed is due to the queue: chance alone makes it so long",
        evidence=(Evidence(name="rows that came over the saturation", value=facts.load_frac, unit="frac", points_at="saturated"),),
        confused_with="bursts, in which arrivals vary far more than chance",
        next_check="a tenth less load: near saturation the tail falls by far more than a tenth",
    )  # fmt: skip


RULES: tuple[Rule[Facts], ...] = (
    Rule(name="tester", checks="the generator's lag; open or closed loop", why="a late or waiting tester measures itself",
         confused_with="a slow service", next_check="a fixed schedule, a lower rate", test=tester_bound),
    Rule(name="overload", checks="rows that come against rows that full batches answer", why="above that every queue grows, whatever the policy",
         confused_with="a burst", next_check="half the rate", test=_overload),
    Rule(name="early binding", checks="busy replicas, small batches, a queue", why="a batch that is fixed early misses who comes while it waits",
         confused_with="saturation", next_check="bind late", test=_early),
    Rule(name="starts", checks="misses while replicas start", why="a replica that loads answers nobody",
         confused_with="a burst", next_check="the same schedule with all replicas ready", test=_cold),
    Rule(name="head of line", checks="small or urgent requests behind others; room left in batches", why="who does not fit holds up who would",
         confused_with="saturation", next_check="the small or urgent ones alone", test=_blocked),
    Rule(name="bursts", checks="peaks of the arrivals against the ready replicas", why="a mean below the capacity says nothing of its peaks",
         confused_with="a replica that stood still", next_check="the same number evenly", test=_bursts),
    Rule(name="hold", checks="the batcher's hold in the missed requests", why="a hold is paid by every request that is not followed by others",
         confused_with="waiting for a replica", next_check="max_wait_s = 0", test=_hold),
    Rule(name="batch", checks="seconds of a full batch against the target", why="one waits for a batch, then runs in one",
         confused_with="a long queue", next_check="half of max_batch", test=_large),
    Rule(name="near saturation", checks="load against saturation, evenness of the arrivals", why="the queue grows as 1 / (1 - load)",
         confused_with="bursts", next_check="a tenth less load", test=_near),
)  # fmt: skip
"""The rules in the order of the checks."""
