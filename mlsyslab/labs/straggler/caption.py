"""The straggler lab's figures in words: the verdict as a title, and the lanes for people who do not see them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mlsyslab.contract import Diagnosis, LabError, RunError
from mlsyslab.labs.straggler.blame import Array, Rounds, rounds
from mlsyslab.labs.straggler.diagnose import diagnose
from mlsyslab.labs.straggler.evidence import steady

if TYPE_CHECKING:
    from mlsyslab.runs import Run

EACH = 16  # ranks that are told one by one; of more, the named ones and what the others span
ALIKE_FRAC = 0.03  # what differs less is one figure
MORE_FRAC = 0.05  # own work that is not so much above the others' is no contrast


def verdict_of(run: Run) -> Diagnosis | str:
    """The diagnosis, or the one line that says why there is none."""
    try:
        return diagnose(run)
    except LabError as error:
        return str(error)


def title_of(run: Run, verdict: Diagnosis | str | None = None) -> str:
    """The verdict as a sentence, with the figures of the trap, or why there is none."""
    found = verdict or verdict_of(run)
    return found if isinstance(found, str) else sentence(found, steady_rounds(run))


def steady_rounds(run: Run) -> Rounds:
    """The rounds that the diagnosis looks at; RunError where there is none."""
    found = rounds(steady(run.records))
    if not len(found.own):
        raise RunError("no two steady steps were recorded by every rank; record more steps")
    return found


def named_ranks(found: Diagnosis | str, steps: Rounds) -> tuple[int, ...]:
    """Global numbers of the ranks that the verdict names and the run has."""
    where = (found.where or "") if isinstance(found, Diagnosis) else ""
    return tuple(rank for rank in map(int, re.findall(r"\d+", where)) if rank in steps.ranks)


def sentence(found: Diagnosis | str, steps: Rounds) -> str:
    """The verdict, and the trap: what every rank's step takes, beside the own work of those named and of the others."""
    if isinstance(found, str):
        return found
    named, step_s = named_ranks(found, steps), (steps.own + steps.wait).mean(0)
    trap = f"every rank's step takes {alike(step_s * 1e3)} ms"
    if not named:
        head = {
            "healthy": "Healthy, no rank stands out",
            "imbalance": "No machine is at fault, the slowest rank is another one each time",
            "shared": "No rank stands out, all became slower at once",
            "stage": "No machine is at fault, a whole stage is slow",
            "unknown": f"No verdict, {found.reason}",
        }.get(found.cause, f"{found.cause.capitalize()}, {found.reason}")
        return f"{head}: {trap}" if found.cause != "unknown" else head
    who, many = (found.where or "").capitalize(), len(named) > 1
    kind = f" ({found.kind})" if found.kind else ""
    does = f"hold{'' if many else 's'} the job up: {found.cause}{kind}"
    if found.cause in ("unknown", "startup"):
        does = "started late" if found.cause == "startup" else does.replace(found.cause, "why is not clear")
    own_ms = steps.own.mean(0) * 1e3
    theirs = [own_ms[steps.ranks.index(rank)] for rank in named]
    rest = [own_ms[at] for at, rank in enumerate(steps.ranks) if rank not in named]
    if min(theirs) > (1 + MORE_FRAC) * max(rest, default=0):
        trap += f", but {'their' if many else 'its'} own work is {_span(theirs)} ms and the others' {_span(rest)} ms"
    return f"{who} {does}. {trap[0].upper() + trap[1:]}"


def alike(values: Array) -> str:
    """One figure for what is the same within ALIKE_FRAC, else what the values span."""
    middle = float(values.mean())
    return f"{middle:.0f}" if np.ptp(values) <= ALIKE_FRAC * middle else _span(values)


def _span(values: Iterable[float]) -> str:
    values = list(values)
    low, high = (f"{value:.0f}" for value in (min(values, default=0), max(values, default=0)))
    return low if low == high else f"{low} to {high}"


def describe(steps: Rounds, named: Sequence[int]) -> str:
    """The lanes in words."""
    own, wait = steps.own.mean(0), steps.wait.mean(0)
    return f"Mean of {len(steps.own)} steady step(s): {in_words(steps.ranks, own, wait, named)}."


def in_words(ranks: Sequence[int], own_s: Array, wait_s: Array, named: Sequence[int] = ()) -> str:
    """Own work and wait of each of few ranks; of many those of the named ones, and what the others span."""
    rows = {
        rank: f"rank {rank} own work {own * 1e3:.0f} ms, wait {wait * 1e3:.0f} ms"
        for rank, own, wait in zip(ranks, own_s, wait_s, strict=True)
    }
    if len(ranks) <= EACH:
        return "; ".join(rows.values())
    rest = [at for at, rank in enumerate(ranks) if rank not in named]
    span = ", ".join(
        f"{word} {_span(values[rest] * 1e3)} ms" for word, values in (("own work", own_s), ("wait", wait_s))
    )
    least, most = ranks[int(wait_s.argmin())], ranks[int(own_s.argmax())]
    both = f"most own work on rank {most}, least wait on rank {least}"
    return "; ".join(
        [*(rows[rank] for rank in named), f"{len(rest)} {'other ' if named else ''}ranks {span}", both]
    )
