"""Who holds the job up: own work and wait, rank by rank, against the others. Pure numpy, no clock alignment.

In a synchronous job every rank's step takes as long as the slowest rank's, and all-reduce makes even backward look
alike. What differs is what a rank does itself (own, seconds) and how long it then waits for the others (wait). The
rank that holds the job up has the MOST own work AND the LEAST wait. Both are durations on its own clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mlsyslab.records import PHASES

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]

BEFORE = ("data_s", "h2d_s", "forward_s", "backward_s")  # of a round: before the exchange
AFTER = ("optimizer_s", "other_s")  # after the last one
ENOUGH_STEPS = 5  # below it nobody is accused
EXCESS_FRAC = 0.08  # of the healthy own work; smaller differences are not worth a cordon
SLOW_FRAC = 0.10  # a step is slow when its first rank is so far ahead of the others
STEADY_FRAC = 0.70  # of the steps in which a constant straggler must exceed the others
LEAD_FRAC = 0.90  # of the lead of the slow steps; the steps that hold it are counted
SAME_FRAC = 0.80  # of the slow steps that must be one rank's, for an intermittent straggler
CHANCE = 0.01  # the most that chance may explain of an intermittent straggler
COST_FRAC = 0.04  # of the job's time that a straggler or a rotation must cost
SHARED_FRAC = 0.20  # rise of every rank's own work at once


@dataclass(frozen=True, kw_only=True)
class Blame:
    """The finding. kind: "rank" (`ranks` named), "stage" (`ranks` are a stage), "rotates", "shared", "healthy" or
    "few steps". slow: the steps that count against `ranks`, a mask. excess_s: mean seconds that they exceed the
    others by in those steps. gain_frac: the share of the job's time that replaying it with their own work at the
    others' median saves (0..1). base_s: a healthy rank's own work. noise_s: one rank's scatter. share: of the
    slow steps, or of all, that are `ranks`'."""

    kind: str
    ranks: tuple[int, ...] = ()
    slow: NDArray[np.bool_]
    excess_s: float = 0.0
    gain_frac: float = 0.0
    base_s: float = 0.0
    noise_s: float = 0.0
    share: float = 0.0
    since: int = 0


def median_of_others(own: Array) -> Array:
    """For each [step, rank] the median of the other ranks' values in that step, exact; O(n log n) in the ranks."""
    ranks = own.shape[1]
    order = np.argsort(own, axis=1, kind="stable")
    ranked = np.take_along_axis(own, order, 1)
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.broadcast_to(np.arange(ranks), own.shape), 1)
    others = ranks - 1
    below, above = (others - 1) // 2, others // 2
    low = np.where(place > below, ranked[:, [below]], ranked[:, [below + 1]])
    high = low if below == above else np.where(place > above, ranked[:, [above]], ranked[:, [above + 1]])
    return (low + high) / 2


def job_seconds(own: Array, wait: Array) -> Array:
    """[step] seconds of each step of the job: the most own work, and the transfer that nobody can avoid (the least wait)."""
    return own.max(1) + wait.min(1)


def replay_gain(own: Array, wait: Array, ranks: Sequence[int]) -> float:
    """Share of the job's time (0..1) that is saved when `ranks` do the others' median of own work in each step.

    The what-if of Lin et al. 2025 (ByteDance, "Understanding Stragglers in Large Model Training Using What-if
    Analysis"): replay with the straggler's work at its ideal.
    """
    kept = [rank for rank in range(own.shape[1]) if rank not in set(ranks)]
    healed = own.copy()
    healed[:, list(ranks)] = np.minimum(own[:, list(ranks)], np.median(own[:, kept], 1)[:, None])
    return float(1 - job_seconds(healed, wait).sum() / job_seconds(own, wait).sum())


def usual_scatter(own: Array) -> float:
    """The scatter of own work over steps with the slowest rank of each step left out.

    A fault that rotates meets each of three ranks in a third of the steps, enough to widen a median absolute deviation
    that it is then measured by; among the others of each step it is not.
    """
    slowest = own.argmax(1)[:, None] == np.arange(own.shape[1])
    rest = np.where(slowest, np.nan, own)
    usual = rest - np.nanmedian(rest)
    return float(1.4826 * np.nanmedian(np.abs(usual)))


def chance(hits: int, trials: int, p: float) -> float:
    """P(at least `hits` of `trials`) for independent trials of probability p."""
    return sum(math.comb(trials, k) * p**k * (1 - p) ** (trials - k) for k in range(hits, trials + 1))


def blame(own: Array, wait: Array, *, stages: Sequence[int] | None = None) -> Blame:
    """Who holds the job up. own, wait: [steps, ranks] seconds, steady steps only. stages: of each rank, where the
    job is a pipeline: then a stage that is slow as a whole is a partition's fault and not a machine's.

    Own work is compared within a step, so what happens to all ranks at once accuses nobody.
    """
    own, wait = np.asarray(own, float), np.asarray(wait, float)
    steps, ranks = own.shape
    nobody = np.zeros(steps, bool)
    if steps < ENOUGH_STEPS or ranks < 2:
        return Blame(kind="few steps", slow=nobody)
    base_s = float(np.median(own.min(1) if ranks == 2 else np.median(own, 1)))
    excess = own - median_of_others(own)
    noise_s = usual_scatter(own)
    limit_s = max(EXCESS_FRAC * base_s, 4 * noise_s / math.sqrt(steps))

    def named(kind: str, who: tuple[int, ...], slow: NDArray[np.bool_], share: float) -> Blame:
        lead = own[slow][:, list(who)] - np.median(np.delete(own, list(who), 1)[slow], 1)[:, None]
        return Blame(
            kind=kind,
            ranks=who,
            slow=slow,
            excess_s=float(lead.mean()),
            gain_frac=replay_gain(own, wait, who),
            base_s=base_s,
            noise_s=noise_s,
            share=share,
            since=int(np.argmax(slow)),
        )

    steady = (excess > limit_s / 2).mean(0)
    constant = np.flatnonzero((np.median(excess, 0) > limit_s) & (steady >= STEADY_FRAC))
    constant = constant[_waits_less(wait, excess, constant)]
    first, lead = np.argmax(excess, 1), excess.max(1)
    slow = _weightiest(lead, lead > max(SLOW_FRAC * base_s, 4 * noise_s))
    # Of two ranks that take turns by chance, one has most of the turns; in the rest the other is as far ahead.
    theirs = np.isin(first, constant)[slow].mean() if slow.any() else 1.0
    if 0 < len(constant) <= max(1, ranks // 2) and theirs >= SAME_FRAC:
        who = tuple(int(rank) for rank in constant)
        kind = "stage" if _is_stage(who, stages) else "rank"
        return named(kind, who, np.ones(steps, bool), float(steady[constant].mean()))
    if slow.sum() >= 2:
        votes = np.bincount(first[slow], minlength=ranks)
        who = (int(votes.argmax()),)
        share = float(votes.max() / slow.sum())
        unlikely = chance(int(votes.max()), int(slow.sum()), 1 / ranks) < CHANCE
        mine = slow & (first == who[0])
        costs = lead[mine].sum() > COST_FRAC * job_seconds(own, wait).sum()
        if (
            share >= SAME_FRAC
            and unlikely
            and costs
            and _waits_less(wait[mine], excess[mine], np.array(who)).any()
        ):
            return named("rank", who, mine, share)
        spread = lead[slow].sum() > COST_FRAC * job_seconds(own, wait).sum()
        if spread and slow.mean() > 0.2 and share < SAME_FRAC:
            return Blame(kind="rotates", slow=slow, base_s=base_s, noise_s=noise_s, share=share,
                         excess_s=float(lead[slow].mean()), gain_frac=_all_alike(own, wait))  # fmt: skip
    rise = _rise(own.min(1)) or _rise(job_seconds(own, wait))
    if rise:
        after = np.arange(steps) >= rise
        return Blame(kind="shared", slow=after, base_s=base_s, noise_s=noise_s, since=rise)
    return Blame(kind="healthy", slow=nobody, base_s=base_s, noise_s=noise_s)


def _weightiest(lead: Array, slow: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The fewest of the slow steps that hold LEAD_FRAC of their lead: two hiccups of 20 ms, one on each rank, have no
    vote beside eight pauses of 300."""
    order = np.argsort(-lead * slow, kind="stable")
    held = np.cumsum((lead * slow)[order])
    kept = np.zeros_like(slow)
    kept[order[: np.searchsorted(held, LEAD_FRAC * held[-1]) + 1]] = True
    return kept & slow


def _waits_less(wait: Array, excess: Array, who: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each of `who` waits less than the others' median, by at least a third of what it works more."""
    less = np.median(median_of_others(wait) - wait, 0)
    return np.asarray(less[who] > np.median(excess, 0)[who] / 3)


def _is_stage(who: tuple[int, ...], stages: Sequence[int] | None) -> bool:
    if stages is None or len(who) < 2:
        return False
    of = {stages[rank] for rank in who}
    return len(of) == 1 and set(who) == {rank for rank, stage in enumerate(stages) if stage in of}


def _all_alike(own: Array, wait: Array) -> float:
    """Share of the job's time that is saved when in each step every rank does the mean of the ranks' own work."""
    even = own.mean(1) + wait.min(1)
    return float(1 - even.sum() / job_seconds(own, wait).sum())


def _rise(least: Array) -> int | None:
    """The step from which on these seconds, such as the fastest rank's own work, are SHARED_FRAC more than before,
    cleanly; else None."""
    found = [
        (float(before.var() * len(before) + after.var() * len(after)), at)
        for at in range(ENOUGH_STEPS, len(least) - ENOUGH_STEPS + 1)
        for before, after in [(least[:at], least[at:])]
        if np.median(after) > (1 + SHARED_FRAC) * np.median(before)
        and np.quantile(after, 0.1) > np.quantile(before, 0.9)
    ]
    return min(found)[1] if found else None


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """A job's rounds, from the end of one exchange of gradients to the end of the next: [rounds, ranks] seconds.

    A round is what the ranks really wait for each other with. It begins with the optimizer and whatever follows it
    in one step and ends with the sync of the next, so a pause after the exchange of step 7 is waited for in step 8.
    phases: own work by phase. steps: the step in which each round ends. ranks: the global rank of each column.
    """

    own: Array
    wait: Array
    phases: dict[str, Array]
    steps: NDArray[np.int64]
    ranks: tuple[int, ...]
    frame: pd.DataFrame
    rows: NDArray[np.int64]

    def column(self, name: str) -> Array:
        """[rounds, ranks] of another column of the records, in the step in which the round ends."""
        return self.steps_of(name)[1:]

    def steps_of(self, name: str) -> Array:
        """[steps, ranks] of a column of the records, one row more than there are rounds."""
        return self.frame[name].to_numpy(float)[self.rows]


def rounds(frame: pd.DataFrame) -> Rounds:
    """The rounds of step records (columns rank, step and the phases); steps that some rank lacks are left out."""
    ranks, column = np.unique(frame["rank"].to_numpy(), return_inverse=True)
    steps, row = np.unique(frame["step"].to_numpy(np.int64), return_inverse=True)
    rows = np.full((len(steps), len(ranks)), -1, np.int64)
    rows[row, column] = np.arange(len(frame))  # of a step that was done again the last record stays
    whole = (rows >= 0).all(1)
    steps, rows = steps[whole], rows[whole]
    laps = {name: frame[name].to_numpy(float)[rows] for name in PHASES}
    phases = {name: laps[name][1:] for name in BEFORE} | {name: laps[name][:-1] for name in AFTER}
    return Rounds(
        own=np.sum(list(phases.values()), axis=0),
        wait=laps["sync_s"][1:],
        phases=phases,
        steps=steps[1:],
        ranks=tuple(int(rank) for rank in ranks),
        frame=frame,
        rows=rows,
    )
