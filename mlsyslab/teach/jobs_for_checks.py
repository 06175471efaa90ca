"""Step records of synchronous jobs that never happened, for checking the straggler exercises.

    made = job_records("slow backward", seed=7)     made.records, made.culprit, made.why
    STORIES                                         name -> what is wrong in it

Synthetic, and only for checks. Every rank waits in `sync_s` for the last one, and what a rank does after the exchange
makes the next one late, as in a real job.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlsyslab.contract import ConfigError
from mlsyslab.records import PHASES
from mlsyslab.teach.records_for_checks import QUIET_S, WARMUP

if TYPE_CHECKING:
    import pandas as pd

STEPS = 25
TRANSFER_S = 0.004
COLUMNS = ("rank", "step", "warmup", *PHASES, "step_s")
# name -> what is in it; the first ones have a culprit
GUILTY = {
    "slow input": "one rank waits for its batches",
    "slow backward": "one rank's backward is long, and backward with its exchange is equally long on all",
    "slow optimizer": "one rank is long after the exchange, so that it is late for the next",
    "two ranks, one slow": "there is one other rank to compare with",
}
INNOCENT = {
    "healthy": "some rank always has the most own work, by a trifle",
    "two ranks, healthy": "one of two is 4 % slower, in every step",
    "rotating": "the rank with the most own work is another one in each step",
    "uneven rotation": "the long batches come to one rank in 12 of 22 steps, and to the others in the rest",
    "one long step": "one rank, one step, and its mean is the largest of all",
    "slow start": "one rank is slow, but only while warming up",
    "too short": "one rank is slow in the four steady steps that there are",
    "counted twice": "one rank's timer counts work that runs beside the step: it reads most own work, yet waits longest",
}
STORIES = {**GUILTY, **INNOCENT}


@dataclass(frozen=True, kw_only=True)
class MadeUpJob:
    """Records with COLUMNS, the rank that holds the job up (None: nobody), and why."""

    story: str
    records: pd.DataFrame
    culprit: int | None
    why: str


def job_records(story: str, seed: int) -> MadeUpJob:
    """The records of a story, in the order in which they came; the seed sets ranks, culprit and sizes.

    Raises ConfigError for a story that is not there.
    """
    import numpy as np
    import pandas as pd

    if story not in STORIES:
        raise ConfigError(f"story={story!r} is not one of {', '.join(STORIES)}; choose one of them")
    rng = np.random.default_rng([seed, list(STORIES).index(story)])
    ranks = 2 if story.startswith("two") else int(rng.integers(3, 7))
    size, first = float(rng.uniform(0.5, 2.0)), int(rng.integers(ranks))
    rows: list[dict[str, Any]] = []
    free_s = np.zeros(ranks)  # when each rank is done with what follows the last exchange
    for step in range(WARMUP + 4 if story == "too short" else STEPS):
        guilty = _whose(story, step, first, ranks)
        laps = [_laps(story, rng, size, step, rank == guilty) for rank in range(ranks)]
        ready_s = free_s + [sum(lap[name] for name in PHASES[:4]) for lap in laps]
        for lap, late_s in zip(laps, ready_s.max() + TRANSFER_S * size - ready_s, strict=True):
            lap["sync_s"] = float(late_s)
        free_s = ready_s.max() + np.array([lap["optimizer_s"] + lap["other_s"] for lap in laps])
        if story == "counted twice":  # after the clock has gone on: it costs the job nothing
            laps[guilty]["other_s"] += 0.06 * size
        rows += [_row(rank, step, lap) for rank, lap in enumerate(laps)]
    records = pd.DataFrame(rows).sample(frac=1, random_state=seed % 2**31, ignore_index=True)
    return MadeUpJob(
        story=story, records=records, culprit=first if story in GUILTY else None, why=STORIES[story]
    )


def _whose(story: str, step: int, first: int, ranks: int) -> int:
    """The rank that something happens to in this step."""
    other = (first + 1 + step % (ranks - 1)) % ranks
    if story == "rotating":
        return (first + step) % ranks
    return other if story == "uneven rotation" and step % 5 > 2 else first


def _row(rank: int, step: int, lap: dict[str, float]) -> dict[str, Any]:
    return {
        "rank": rank,
        "step": step,
        "warmup": step < WARMUP,
        **lap,
        "step_s": sum(lap[name] for name in PHASES),
    }


def _laps(story: str, rng: Any, size: float, step: int, guilty: bool) -> dict[str, float]:
    """One rank's phases in one step, before anybody waits for anybody."""
    lap = {name: QUIET_S[name] * size * float(rng.uniform(0.97, 1.03)) for name in PHASES}
    if step < WARMUP:
        lap["forward_s"] *= 4
    if not guilty:
        return lap
    more_s = float(rng.uniform(0.05, 0.12)) * size
    if story in ("slow backward", "two ranks, one slow", "rotating", "uneven rotation", "too short"):
        lap["backward_s"] += more_s
    elif story in ("slow input", "slow optimizer"):
        lap["data_s" if story == "slow input" else "optimizer_s"] += more_s
    elif (story == "one long step" and step == STEPS // 2) or (story == "slow start" and step < WARMUP):
        lap["data_s"] += 40 * more_s
    elif story == "two ranks, healthy":
        lap["backward_s"] *= 1.04
    elif story == "counted twice":
        lap["forward_s"] *= 0.7
    return lap


# ---- what a check compares with
def hidden_jobs(exercise: str, *stories: str, each: int = 2) -> dict[str, MadeUpJob]:
    """`each` made-up jobs of every story (default: of all), with the hidden seeds of an exercise; keys say which."""
    from mlsyslab.teach.checks import hidden_seeds

    seeds = list(hidden_seeds(exercise, each))
    return {
        f"hidden job {number}: {story}": job_records(story, seed)
        for story in stories or STORIES
        for number, seed in enumerate(seeds, 1)
    }


def right_tables(records: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(own work, wait) of the steady steps: a row a step, a column a rank, seconds."""
    steady = records[~records["warmup"].astype(bool)]
    own = steady.assign(own_s=steady["step_s"] - steady["sync_s"])
    return (
        own.pivot(index="step", columns="rank", values="own_s"),
        steady.pivot(index="step", columns="rank", values="sync_s"),
    )


def right_excess(table: pd.DataFrame) -> pd.DataFrame:
    """What each rank has more than the median of the other ranks, in each step."""
    from mlsyslab.labs.straggler.blame import median_of_others

    return table - median_of_others(table.to_numpy(float))


def right_straggler(records: pd.DataFrame) -> int | None:
    """The rank that the rule of exercise 2.3 names: last in 70 % of at least 5 steps, by more than 10 %."""
    own, wait = right_tables(records)
    if len(own) < 5:
        return None
    last = own.idxmax(axis=1)
    votes = last[last == wait.idxmin(axis=1)].value_counts()
    if votes.empty or votes.iloc[0] < 0.7 * len(own):
        return None
    rank = int(votes.index[0])
    others_s = own.drop(columns=rank).median(axis=1)
    return rank if (own[rank] - others_s).median() > 0.1 * others_s.median() else None


def cost_cases(exercise: str) -> Iterator[tuple[tuple[Any, ...], tuple[float, float]]]:
    """((ranks, healthy_s, slow_s), (rank-seconds that the job loses a step, share of its time))."""
    for ranks, size in _sizes(exercise):
        for slow in (1.0, 1.2, 420 / 180, 4.0):
            healthy_s = 0.180 * size
            slow_s = healthy_s * slow
            yield (ranks, healthy_s, slow_s), (ranks * (slow_s - healthy_s), 1 - healthy_s / slow_s)


def jitter_cases(exercise: str) -> Iterator[tuple[tuple[Any, ...], float]]:
    """((ranks, sigma_s), seconds that the slowest of so many ranks is later than the mean)."""
    from mlsyslab.labs.straggler.scale import expected_max

    for ranks, size in _sizes(exercise):
        sigma_s = 0.005 * size
        yield (ranks, sigma_s), sigma_s * expected_max(ranks)


def _sizes(exercise: str) -> Iterator[tuple[int, float]]:
    """Numbers of ranks of every order of magnitude, each with a factor for the seconds."""
    import numpy as np

    from mlsyslab.teach.checks import hidden_seeds

    for index, seed in enumerate(hidden_seeds(exercise, 6)):
        rng = np.random.default_rng(seed)
        yield int(rng.integers(4, 8)) * 4**index, round(float(rng.uniform(0.5, 2.0)), 3)


def action_cases() -> Iterator[tuple[tuple[Any, ...], str]]:
    """((kind, shares of the excess, excess_s, steps_left, restart_s), what to do)."""
    host, data = {"host": 0.95, "input": 0.03}, {"input": 0.93, "host": 0.05}
    mixed, model = {"input": 0.55, "host": 0.40}, {"compute": 0.97}
    yield ("rank", host, 0.24, 100_000, 600.0), "cordon and replace"
    yield ("rank", host, 0.24, 1_000, 600.0), "let it run"
    yield ("rank", host, 0.004, 100_000, 600.0), "let it run"
    yield ("rank", data, 0.25, 100_000, 600.0), "mend the input"
    yield ("rank", data, 0.25, 1_000, 600.0), "mend the input"
    yield ("rank", mixed, 0.20, 50_000, 900.0), "cordon and replace"
    yield ("rank", mixed, 0.20, 3_000, 900.0), "let it run"
    yield ("rank", model, 0.30, 20_000, 300.0), "cordon and replace"
    yield ("rank", {"input": 0.80}, 0.10, 20_000, 300.0), "mend the input"
    yield ("rank", {}, 0.10, 20_000, 300.0), "cordon and replace"
    for kind, words in NOBODY.items():
        yield (kind, host, 0.24, 100_000, 600.0), words
        yield (kind, data, 0.24, 100_000, 600.0), words


NOBODY = {
    "few steps": "measure longer",
    "healthy": "nothing",
    "rotates": "even out the batches",
    "shared": "look at what all share",
}
"""What to do where no rank is named."""
