"""Arrivals, records and loads that never happened, for checking the serving exercises, and the right answers.

Synthetic, and only for checks. The right answers here are written another way than the library and the solutions are:
the batcher as an event loop that is moved from moment to moment.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mlsyslab.teach.checks import hidden_seeds

if TYPE_CHECKING:
    import pandas as pd

Curve = Callable[[int], float]
COLUMNS = ("intended_s", "sent_s", "total_s", "outcome", "warmup")


def seconds(rows: int) -> float:
    """A batch's seconds by its rows in the exercises: 2 ms, and half a millisecond a row."""
    return 0.002 + 0.0005 * rows


# ---- 4.1
STORIES: dict[str, tuple[tuple[float, ...], int, float]] = {
    # name: (arrivals, max_batch, max_wait_s)
    "one request, nobody else": ((0.0,), 4, 0.005),
    "five at once, no wait": ((0.0,) * 5, 8, 0.0),
    "one, and four more while it runs": ((0.0, 0.0005, 0.001, 0.0015, 0.002), 8, 0.0),
    "full at once": ((0.0,) * 9, 4, 0.005),
    "full before the wait is over": ((0.0, 0.001, 0.002, 0.003), 3, 0.010),
    "the wait counts from the oldest": ((0.0, 0.004, 0.0045), 8, 0.004),
    "the wait is over while the replica works": ((0.0, 0.00225, 0.0025, 0.00475), 2, 0.00125),
    "a lone one after a pause": ((0.0, 0.0, 1.0), 8, 0.002),
}


def timelines(exercise: str) -> dict[str, tuple[list[float], int, float]]:
    """STORIES and hidden random arrivals: (arrivals, max_batch, max_wait_s) by name."""
    found = {name: (list(times), most, wait_s) for name, (times, most, wait_s) in STORIES.items()}
    for number, seed in enumerate(hidden_seeds(exercise, 6), 1):
        draw = random.Random(seed)
        at_s, times = 0.0, []
        for _ in range(60):
            at_s += draw.choice((0, 0, 1, 2, 4, 9, 40)) / 8192
            times.append(at_s)
        found[f"hidden {number}"] = (times, draw.choice((1, 2, 5, 8)), draw.choice((0, 8, 41)) / 8192)
    return found


def right_batches(
    arrivals: Sequence[float], curve: Curve, max_batch: int, max_wait_s: float
) -> list[tuple[float, int]]:
    """(start, rows) of each batch of a late binder with one replica, found from event to event."""
    coming, waiting, found = list(arrivals), list[float](), list[tuple[float, int]]()
    now = free_at_s = 0.0
    while coming or waiting:
        while coming and coming[0] <= now:
            waiting.append(coming.pop(0))
        ripe = len(waiting) >= max_batch or (waiting and now >= waiting[0] + max_wait_s)
        if ripe and now >= free_at_s:
            rows = min(max_batch, len(waiting))
            del waiting[:rows]
            found.append((now, rows))
            free_at_s = now + curve(rows)
            continue
        moments = [*coming[:1], *(one + max_wait_s for one in waiting[:1]), free_at_s]
        now = min(moment for moment in moments if moment > now)
    return found


# ---- 4.2
def made_up_records(seed: int) -> pd.DataFrame:
    """Requests of an open-loop run in which the tester fell behind for a while, as records with COLUMNS and done_s."""
    import pandas as pd

    draw, rows, at_s = random.Random(seed), list[dict[str, Any]](), 0.0
    for number in range(400):
        at_s += draw.expovariate(100)
        lag_s = 0.8 * math.exp(-((at_s - 2.5) ** 2) / 0.1) + draw.random() * 0.001
        outcome = draw.choices(("ok", "rejected", "expired", "error"), (0.85, 0.09, 0.04, 0.02))[0]
        took_s = 0.004 + draw.expovariate(120) if outcome == "ok" else 0.001
        rows.append(
            {
                "intended_s": at_s,
                "sent_s": at_s + lag_s,
                "done_s": at_s + lag_s + took_s,
                "outcome": outcome,
                "warmup": number < 40,
            }
        )
    draw.shuffle(rows)
    return pd.DataFrame(rows)


def right_tail(records: pd.DataFrame, slo_s: float) -> dict[str, float]:
    """p50, p95 and p99 of the answers from their intended arrival, and the share of all requests answered in time."""
    steady = [row for row in records.to_dict("records") if not row["warmup"]]
    totals = sorted(row["done_s"] - row["intended_s"] for row in steady if row["outcome"] == "ok")

    def quantile(share: float) -> float:
        place = share * (len(totals) - 1)
        low = math.floor(place)
        return totals[low] + (place - low) * (totals[min(low + 1, len(totals) - 1)] - totals[low])

    shares = {"p50_s": 0.5, "p95_s": 0.95, "p99_s": 0.99}
    good = sum(total <= slo_s for total in totals) / len(steady)
    return {**{name: quantile(share) for name, share in shares.items()}, "good_frac": good}


# ---- 4.3
def admission_cases(exercise: str) -> list[tuple[tuple[Any, ...], str]]:
    """((queued, max_queue, replicas, max_batch, batch_s, left_s, time_left_s), answer): edges, then hidden ones."""
    cases: list[tuple[Any, ...]] = [
        (0, 64, 1, 8, 0.005, 0.0, 0.050),
        (64, 64, 1, 8, 0.005, 0.004, 10.0),
        (63, 64, 1, 8, 0.005, 0.004, 10.0),
        (40, 64, 1, 8, 0.005, 0.004, 0.030),  # five batches before it: too late
        (40, 64, 2, 8, 0.005, 0.004, 0.030),  # two replicas share them: in time
        (7, 64, 1, 8, 0.005, 0.0, 0.006),  # it completes the next batch: nothing stands before it
        (8, 64, 1, 8, 0.005, 0.0, 0.006),
        (0, 64, 1, 8, 0.005, 0.0, 0.004),  # no queue, and the batch itself is too long
        (0, 64, 1, 8, 0.005, 0.004, 0.008),  # the batch that runs now stands before it
    ]
    for seed in hidden_seeds(exercise, 12):
        draw = random.Random(seed)
        batch_s = draw.choice((0.004, 0.01, 0.05))
        queued, limit = draw.randrange(120), draw.choice((32, 64, 128))
        cases.append(
            (queued, limit, draw.choice((1, 2, 4)), draw.choice((1, 8, 16)), batch_s,
             batch_s * draw.random(), batch_s * draw.uniform(0.5, 12))
        )  # fmt: skip
    return [(case, right_admission(*case)) for case in cases]


def right_admission(  # noqa: PLR0917  the exercise's own arguments
    queued: int,
    max_queue: int,
    replicas: int,
    max_batch: int,
    batch_s: float,
    left_s: float,
    time_left_s: float,
) -> str:
    """ "in", "429" where the queue is full, "504" where the answer would be late."""
    if queued + 1 > max_queue:
        return "429"
    ahead = 0
    while (ahead + 1) * max_batch <= queued:
        ahead += 1
    return "504" if left_s + ahead * batch_s / replicas + batch_s > time_left_s else "in"


# ---- 4.4
def need_cases(exercise: str) -> list[tuple[tuple[Any, ...], int]]:
    """((rate, queued, capacity, floor, ceiling), replicas needed)."""
    cases: list[tuple[Any, ...]] = [
        (0.0, 0, 1000.0, 1, 8),
        (690.0, 0, 1000.0, 1, 8),
        (710.0, 0, 1000.0, 1, 8),
        (500.0, 2000, 1000.0, 1, 8),
        (9000.0, 9000, 1000.0, 1, 8),
    ]
    for seed in hidden_seeds(exercise, 8):
        draw = random.Random(seed)
        cases.append((draw.uniform(0, 6000), draw.choice((0, 10, 3000)), draw.uniform(300, 1500), draw.choice((1, 2)), draw.choice((4, 12))))  # fmt: skip
    found = []
    for rate, queued, capacity, floor, ceiling in cases:
        count = floor
        while count < ceiling and count * capacity < rate / 0.7 + queued / 1.0:
            count += 1
        found.append(((rate, queued, capacity, floor, ceiling), count))
    return found


def wish_cases() -> list[tuple[tuple[Any, ...], int]]:
    """((needs of the last five seconds, have, queued), replicas from now on)."""
    return [
        (([1, 1, 1, 1, 4], 1, 0), 4),  # up at once, by as many as it takes
        (([2, 2, 2, 2, 2], 2, 0), 2),
        (([4, 1, 1, 1, 1], 4, 0), 4),  # the burst is too recent
        (([1, 1, 1, 1, 1], 4, 0), 3),  # down, one at a time
        (([1, 1, 1, 1, 1], 4, 7), 4),  # not while anything waits
        (([3, 2, 3, 2, 3], 4, 0), 3),
        (([3, 2, 3, 2, 3], 3, 0), 3),  # a need that flickers moves nothing
        (([1, 3, 1, 1, 2], 3, 0), 3),
        (([1, 3, 1, 1, 4], 3, 5), 4),
    ]


# ---- 4.5
def price_lists(exercise: str) -> dict[str, pd.DataFrame]:
    """Tables of configurations with p95_s, rejected_frac and cost_replica_s, as `recommend` makes them."""
    import pandas as pd

    found = {}
    for number, seed in enumerate(hidden_seeds(exercise, 6), 1):
        draw, rows = random.Random(seed), []
        for max_batch in (1, 4, 8, 16):
            for replicas in (1, 2, 4):
                speed = replicas * (1 + math.log2(max_batch))
                rows.append(
                    {
                        "max_batch": max_batch,
                        "replicas": replicas,
                        "p95_s": round(0.25 / speed * draw.uniform(0.7, 1.3), 4),
                        "rejected_frac": round(max(0.0, draw.uniform(-0.4, 0.4) / speed), 3),
                        "cost_replica_s": float(replicas * 60),
                    }
                )
        draw.shuffle(rows)
        found[f"hidden {number}"] = pd.DataFrame(rows)
    return found


def right_choice(table: pd.DataFrame, slo_s: float) -> tuple[int, int] | None:
    """(max_batch, replicas) of the cheapest that meets the target and refuses nothing, the fastest of equals; else None."""
    good = [row for row in table.to_dict("records") if row["p95_s"] <= slo_s and row["rejected_frac"] == 0]
    if not good:
        return None
    best = min(good, key=lambda row: (row["cost_replica_s"], row["p95_s"]))
    return best["max_batch"], best["replicas"]
