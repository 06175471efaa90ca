"""What a job that was interrupted went through, from its run directory: time lost, steps done again, gain. No torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlsyslab.contract import RunError
from mlsyslab.labs.straggler.blame import replay_gain, rounds
from mlsyslab.records import Tail, read_json, write_json
from mlsyslab.runs import Run

if TYPE_CHECKING:
    import pandas as pd

ENOUGH_STEPS = 3  # below it no figure is given
FILE = "interventions.json"
LONGER = ("other_s", "own_s", "step_s")  # by the seconds of a checkpoint


@dataclass(frozen=True, kw_only=True)
class Named:
    """Who was named: rank and host, the step after which it was, and the attempt of the job in which it was."""

    rank: int
    host: str
    step: int
    attempt: int = 0


@dataclass(frozen=True, kw_only=True)
class Interventions:
    """What was done to a job: who was named and taken out, what was killed. Lies in interventions.json."""

    named: Named | None = None
    killed: str = ""

    def write(self, folder: Path) -> None:
        """Into the run directory."""
        write_json(folder / FILE, dataclasses.asdict(self))

    @classmethod
    def read(cls, folder: Path) -> Interventions:
        """From the run directory; none where the file is absent."""
        stored = read_json(folder / FILE)
        named = Named(**stored["named"]) if stored.get("named") else None
        return cls(named=named, killed=stored.get("killed", ""))


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """A job from its first step to its last, whatever came between.

    named: who was taken out, or None. killed: what was ended by kill -9, or "". hosts: those of the ranks, attempt by
    attempt. resumed_steps: the first step of each attempt after the first. lost_steps: done more than once.
    down_s: from the last record before an interruption to the start of the first step after it, summed.
    step_before_s, step_after_s: mean steady step of the job while the named rank was in it and the fault acted, and
    in the last attempt, both without the seconds that checkpoints took, checkpoint_s each. promised_frac: the gain that replaying the job without the named rank's excess gave; gain_frac:
    what came; shares of step_before_s. None where there is nothing to compute them from.
    losses: mean over the ranks, by step. samples: indices trained on, by step, in the order of ranks. Both are the
    final history: of a step done twice the last counts. notes: checkpoints that could not be written.
    """

    run: Run
    named: Named | None
    killed: str
    hosts: tuple[tuple[str, ...], ...]
    resumed_steps: tuple[int, ...]
    lost_steps: int
    down_s: float
    step_before_s: float | None
    step_after_s: float | None
    checkpoint_s: float | None
    promised_frac: float | None
    gain_frac: float | None
    losses: Mapping[int, float]
    samples: Mapping[int, tuple[int, ...]]
    notes: tuple[str, ...]

    @property
    def cordoned(self) -> str:
        """The host that was taken out, or ""."""
        return self.named.host if self.named else ""

    def __str__(self) -> str:
        what = (
            [f"named rank {self.named.rank} on {self.cordoned} in step {self.named.step}"]
            if self.named
            else []
        )
        what += [f"{self.killed} was killed"] if self.killed else []
        if len(self.hosts) > 1:
            what.append(f"{self.down_s:.1f} s down, {self.lost_steps} steps done again")
        if self.step_before_s and self.step_after_s and self.gain_frac is not None:
            steps = f"step {self.step_before_s * 1e3:.0f} ms before, {self.step_after_s * 1e3:.0f} ms after"
            what.append(f"{steps}: {self.gain_frac:.0%} gained, {self.promised_frac or 0:.0%} promised")
        return "; ".join(what) or "undisturbed"


def recovery_of(run: Run) -> Recovery:
    """The account of a run that `recover` made, also of one read back: from its records, interventions.json,
    attempts.jsonl and samples-<rank>.jsonl. Raises RunError where there are no records of an elastic job."""
    done = Interventions.read(run.path)
    named = done.named
    if "attempt" not in run.records:
        raise RunError(f"{run.path} holds no steps of an elastic job; make one with recover()")
    frame = run.records
    took_s = frame["checkpoint_s"].dropna() if "checkpoint_s" in frame else frame["step_s"][:0]
    frame = without_checkpoints(frame)
    attempts = list(Tail(run.path / "attempts.jsonl").read())
    before = steady(frame, named.attempt, since=run.config.start_step) if named else frame[:0]
    after = steady(frame, len(attempts) - 1) if named and len(attempts) > named.attempt + 1 else frame[:0]
    before_s, after_s = step_seconds(before), step_seconds(after)
    promised = None
    if named and before_s:
        seen = rounds(before)
        promised = replay_gain(seen.own, seen.wait, [seen.ranks.index(named.rank)])
    samples, losses = history(run)
    return Recovery(
        run=run,
        named=named,
        killed=done.killed,
        hosts=tuple(tuple(rank["host"] for rank in attempt["ranks"]) for attempt in attempts),
        resumed_steps=tuple(attempt["first"] for attempt in attempts[1:]),
        lost_steps=len(frame[["attempt", "step"]].drop_duplicates()) - frame["step"].nunique(),
        down_s=down_seconds(run.records),
        step_before_s=before_s,
        step_after_s=after_s,
        checkpoint_s=float(took_s.mean()) if len(took_s) else None,
        promised_frac=promised,
        gain_frac=1 - after_s / before_s if before_s and after_s else None,
        losses=losses,
        samples=samples,
        notes=tuple(str(note["says"]) for note in run.notes if note.get("kind") == "checkpoint"),
    )


def without_checkpoints(frame: pd.DataFrame) -> pd.DataFrame:
    """The records as if no checkpoint had been written: its seconds taken off the step and off other_s."""
    if "checkpoint_s" not in frame:
        return frame
    lean = frame.copy()
    for name in LONGER:
        lean[name] -= frame["checkpoint_s"].fillna(0.0)
    return lean


def without_checkpoint(row: Mapping[str, Any]) -> dict[str, Any]:
    """The same for one record."""
    took_s = row.get("checkpoint_s") or 0.0
    return {**row, **{name: row[name] - took_s for name in LONGER}}


def steady(frame: pd.DataFrame, attempt: int, *, since: int = 0) -> pd.DataFrame:
    """The records of one attempt from step `since` on, warm-up left out."""
    return frame[(frame["attempt"] == attempt) & ~frame["warmup"].astype(bool) & (frame["step"] >= since)]


def step_seconds(frame: pd.DataFrame) -> float | None:
    """Mean seconds of a step of the job, each step as long as the ranks' mean; None for too few."""
    steps = frame.groupby("step")["step_s"].mean()
    return float(steps.mean()) if len(steps) >= ENOUGH_STEPS else None


def down_seconds(frame: pd.DataFrame) -> float:
    """Seconds between attempts in which no step ran, summed."""
    first = (frame["time_s"] - frame["step_s"]).groupby(frame["attempt"]).min().sort_index()
    end = frame.groupby("attempt")["time_s"].max().sort_index()
    return float(sum(max(0.0, a - b) for a, b in zip(first[1:], end[:-1], strict=True)))


def history(run: Run) -> tuple[dict[int, tuple[int, ...]], dict[int, float]]:
    """The samples of each step in the order of ranks, and its loss, the ranks' mean; of a step done twice those of
    the last attempt."""
    seen: dict[int, dict[int, Mapping[str, Any]]] = {}
    for path in sorted(run.path.glob("samples-*.jsonl")):
        for row in Tail(path).read():
            ranks = seen.setdefault(row["step"], {})
            if row["rank"] not in ranks or row["attempt"] >= ranks[row["rank"]]["attempt"]:
                ranks[row["rank"]] = row
    samples: dict[int, tuple[int, ...]] = {}
    losses: dict[int, float] = {}
    for step, ranks in sorted(seen.items()):
        samples[step] = tuple(index for rank in sorted(ranks) for index in ranks[rank]["indices"])
        given = [row["loss"] for row in ranks.values() if row["loss"] is not None]
        losses[step] = sum(given) / len(given) if given else math.nan
    return samples, losses
