"""Step records of runs that never happened, for checking an exercise on numbers that the learner has not seen.

    made = step_records("bursty", seed=7)     made.records, made.util_frac, made.cause
    STORIES                                   name -> what is wrong in it

Synthetic, and only for checks: never shown as a measurement. Same columns and same seconds as `mlsyslab.records`,
and the phases of every row sum to its step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlsyslab.contract import ConfigError
from mlsyslab.labs.steptime.breakdown import breakdown
from mlsyslab.records import PHASES

if TYPE_CHECKING:
    import pandas as pd

WARMUP, STEPS, RANKS = 3, 27, 4
QUIET_S = {
    "data_s": 0.002,
    "h2d_s": 0.001,
    "forward_s": 0.040,
    "backward_s": 0.080,
    "sync_s": 0.003,
    "optimizer_s": 0.005,
    "other_s": 0.003,
}
# name -> (the right cause, device utilisation, what is in it)
STORIES = {
    "healthy": ("compute", 0.93, "nothing outside compute takes a tenth of the step; loading is long, but hidden"),
    "starved": ("input", 0.40, "every step waits for its batch"),
    "bursty": ("input", 0.55, "one step in six waits long, the others not at all"),
    "one rank starved": ("input", 0.45, "one rank of four waits for data, the others wait for it in all-reduce"),
    "one rank slow": ("compute", 0.70, "backward of one rank of four is long, and the others wait for it in all-reduce"),
    "slow network": ("communication", 0.90, "every rank is left with exposed sync, also the last one"),
    "slow logging": ("host", 0.50, "Python between the phases"),
    "launch-bound": ("host", 0.30, "the device is mostly idle, and yet nothing waits for data"),
    "no sensor": ("compute", None, "healthy, on a machine that cannot say how busy its device is"),
    "too short": ("unknown", 0.40, "all but three steps are warm-up"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MadeUp:
    """Records, the device's utilisation (None: no sensor), and the cause that is right for them."""

    story: str
    records: pd.DataFrame
    util_frac: float | None
    cause: str
    why: str


def step_records(story: str, seed: int) -> MadeUp:
    """The records of a story; the seed sets the size of everything. Raises ConfigError for a story that is not there."""
    import numpy as np
    import pandas as pd

    if story not in STORIES:
        raise ConfigError(f"story={story!r} is not one of {', '.join(STORIES)}; choose one of them")
    rng = np.random.default_rng([seed, list(STORIES).index(story)])
    size = float(rng.uniform(0.5, 2.0))
    steps = 6 if story == "too short" else STEPS
    world = RANKS if story in ("one rank starved", "one rank slow", "slow network") else 1
    culprit = int(rng.integers(world))
    rows: list[dict[str, Any]] = []
    for step in range(steps):
        for rank in range(world):
            row = {name: value * size * float(rng.uniform(0.9, 1.1)) for name, value in QUIET_S.items()}
            _spoil(row, story, size=size, step=step, guilty=rank == culprit)
            if step < WARMUP:
                row["data_s"] += 0.9 * size
                row["forward_s"] *= 3
            loading = 0.8 * sum(row.values())  # in a worker, while the device is busy
            rows.append(
                {
                    "rank": rank,
                    "step": step,
                    "world": world,
                    "warmup": step < WARMUP,
                    **row,
                    "step_s": sum(row[name] for name in PHASES),
                    "load_wall_s": loading,
                }
            )
    cause, util_frac, why = STORIES[story]
    return MadeUp(story=story, records=pd.DataFrame(rows), util_frac=util_frac, cause=cause, why=why)


def _spoil(row: dict[str, float], story: str, *, size: float, step: int, guilty: bool) -> None:
    """Make the row what its story says; the phase that suffers is many times its quiet length."""
    wait_s = 0.25 * size
    if story in ("starved", "too short"):
        row["data_s"] += wait_s
    elif story == "bursty" and step % 6 == 5:
        row["data_s"] += 4 * wait_s
    elif story == "one rank starved":
        row["data_s" if guilty else "sync_s"] += wait_s
    elif story == "one rank slow":
        row["backward_s" if guilty else "sync_s"] += wait_s
    elif story == "slow network":
        row["sync_s"] += wait_s / 2
    elif story == "slow logging":
        row["other_s"] += wait_s / 2


# ---- what a check compares with
def hidden_runs(exercise: str, *stories: str, each: int = 2) -> dict[str, MadeUp]:
    """`each` made-up runs of every story (default: of all), with the hidden seeds of an exercise; keys say which."""
    from mlsyslab.teach.checks import hidden_seeds

    seeds = list(hidden_seeds(exercise, each))
    return {
        f"hidden run {number}: {story}": step_records(story, seed)
        for story in stories or STORIES
        for number, seed in enumerate(seeds, 1)
    }


def right_phases(records: pd.DataFrame) -> dict[str, float]:
    """Mean seconds of each phase, and of the step, as the library's breakdown has them."""
    found = breakdown(records)
    return {**found.phases_s, "step_s": found.step_s}


def right_waits(records: pd.DataFrame) -> tuple[float, float]:
    """(data wait as a share of the step, share of steps that waited), both 0..1."""
    found = breakdown(records)
    return found.frac("data_s"), found.data_steps_frac


def loader_cases(exercise: str) -> Iterator[tuple[tuple[Any, ...], float]]:
    """((batch, cost_s, workers, device_s, cores), seconds a step) of loaders of every kind.

    seconds = max(batch × cost_s / min(workers, cores), device_s); batch × cost_s + device_s where workers is 0, since
    the training process then loads by itself.
    """
    for loader in _loaders(exercise):
        yield loader, _step_s(*loader)


def gain_cases(exercise: str) -> Iterator[tuple[tuple[Any, ...], float]]:
    """((batch, cost_s, workers, device_s, cores), share of the step that twice as many workers save)."""
    for batch, cost_s, workers, device_s, cores in _loaders(exercise):
        if workers:
            now_s, then_s = (_step_s(batch, cost_s, n, device_s, cores) for n in (workers, 2 * workers))
            yield (batch, cost_s, workers, device_s, cores), 1 - then_s / now_s


def _step_s(batch: int, cost_s: float, workers: int, device_s: float, cores: int) -> float:
    if not workers:
        return batch * cost_s + device_s
    return max(batch * cost_s / min(workers, cores), device_s)


def _loaders(exercise: str) -> Iterator[tuple[int, float, int, float, int]]:
    """Loaders slower and faster than their device; fewer workers than cores, as many, more, and none."""
    import numpy as np

    from mlsyslab.teach.checks import hidden_seeds

    for seed in hidden_seeds(exercise, 3):
        rng = np.random.default_rng(seed)
        batch, cores = int(rng.integers(4, 33)), 2 * int(rng.integers(1, 5)) + 1
        cost_s = round(float(rng.uniform(0.005, 0.05)), 4)
        for workers in (1, cores - 1, cores, cores + 3):
            fast_s = round(batch * cost_s / min(workers, cores) * float(rng.uniform(0.2, 0.9)), 4)
            yield batch, cost_s, workers, fast_s, cores
        yield batch, cost_s, 1, round(1.5 * batch * cost_s, 4), cores
        yield batch, cost_s, 0, round(0.4 * batch * cost_s, 4), cores
