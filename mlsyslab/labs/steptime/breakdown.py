"""From step records to the breakdown: where the time of a steady step goes, per rank and for the job. Pure pandas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlsyslab.contract import RunError
from mlsyslab.records import PHASES

if TYPE_CHECKING:
    import pandas as pd

    from mlsyslab.runs import Run

WAIT_FRAC = (
    0.10  # a phase that takes less of the step than this is not worth acting on (TraceML warns there too)
)


def steady(records: pd.DataFrame, world: int | None = None) -> pd.DataFrame:
    """The records that count: of the largest world (or `world`), without warm-up steps.

    Raises RunError when there are none, or when a phase was never measured.
    """
    if records.empty:
        raise RunError(
            "no step was recorded; the run ended before its first step, see its status and rank-*.log"
        )
    missing = [name for name in (*PHASES, "step_s", "rank", "step", "world", "warmup") if name not in records]
    if missing:
        raise RunError(f"the records lack {', '.join(missing)}; they were not written by StepTimer")
    warm = records[~records["warmup"].astype(bool)]
    if warm.empty:
        raise RunError(f"all {len(records)} recorded steps are warm-up; record more steps than warmup")
    kept = warm[warm["world"] == (world or warm["world"].max())]
    empty = [name for name in (*PHASES, "step_s") if kept[name].isna().all()]
    if empty:
        raise RunError(
            f"{', '.join(empty)} was never measured (all empty); wire StepTimer to the model and the optimizer"
        )
    return kept.sort_values(["step", "rank"]).reset_index(drop=True)


def per_rank(records: pd.DataFrame) -> pd.DataFrame:
    """A row a rank: mean seconds of each phase and of the step, over steady steps."""
    return steady(records).groupby("rank")[[*PHASES, "step_s"]].mean()


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """The job's steady step. Seconds are means over ranks and steps, so that the phases sum to step_s.

    data_worst_s: the mean data wait of the rank that waits most for its loader; transfer_s: the communication that
    remains when nobody waits for anybody (mean over steps of the least sync_s of any rank); late_rank_sync_s: the
    mean sync_s of the rank that has least of it; host_worst_s as data.
    """

    ranks: int
    steps: int
    phases_s: Mapping[str, float]
    step_s: float
    step_p50_s: float
    step_p95_s: float
    data_p50_s: float
    data_p95_s: float
    data_steps_frac: float
    data_worst_s: float
    host_worst_s: float
    transfer_s: float
    late_rank_sync_s: float
    waits: tuple[int, ...]
    samples_per_s: float
    bytes_per_s: float
    cpu_s: float | None
    overloaded_frac: float | None

    def frac(self, *names: str) -> float:
        """The share of the step, 0..1, that these phases take together."""
        return sum(self.phases_s[name] for name in names) / self.step_s

    @property
    def compute_s(self) -> float:
        """Forward, backward (own work) and optimizer."""
        return sum(self.phases_s[name] for name in ("forward_s", "backward_s", "optimizer_s"))


def breakdown(records: pd.DataFrame, world: int | None = None) -> Breakdown:
    """The breakdown of the largest world in `records`, or of `world`."""
    frame = steady(records, world)
    means = frame[[*PHASES, "step_s"]].mean()
    ranks = per_rank_frame = frame.groupby("rank")[[*PHASES, "step_s"]].mean()
    waiting = frame["data_s"] > WAIT_FRAC * frame["step_s"]
    sync_least = frame.groupby("step")["sync_s"].min()
    step_s = float(means["step_s"])
    shares = ranks["data_s"] / ranks["step_s"]
    return Breakdown(
        ranks=len(per_rank_frame),
        steps=int(frame["step"].nunique()),
        phases_s={name: float(means[name]) for name in PHASES},
        step_s=step_s,
        step_p50_s=float(frame["step_s"].median()),
        step_p95_s=float(frame["step_s"].quantile(0.95)),
        data_p50_s=float(frame["data_s"].median()),
        data_p95_s=float(frame["data_s"].quantile(0.95)),
        data_steps_frac=float(waiting.mean()),
        data_worst_s=float(ranks["data_s"].max()),
        host_worst_s=float(ranks["other_s"].max()),
        transfer_s=float(sync_least.mean()),
        late_rank_sync_s=float(ranks["sync_s"].min()),
        waits=tuple(int(rank) for rank in shares.index[shares > WAIT_FRAC]),
        samples_per_s=_per_step(frame, "samples") * len(ranks) / step_s,
        bytes_per_s=_per_step(frame, "bytes") * len(ranks) / step_s,
        cpu_s=_mean_or_none(frame, "cpu_s"),
        overloaded_frac=_mean_or_none(frame, "overloaded"),
    )


def _per_step(frame: pd.DataFrame, name: str) -> float:
    return float(frame[name].mean()) if name in frame else math.nan


def _mean_or_none(frame: pd.DataFrame, name: str) -> float | None:
    if name not in frame or frame[name].isna().all():
        return None
    return float(frame[name].dropna().astype(float).mean())


def summary(run: Run) -> dict[str, Any]:
    """Run.summary() of this lab: seconds a step, shares (0..1), rates; keys carry units."""
    found = breakdown(run.records)
    shares = {
        name.removesuffix("_s") + "_frac": value / found.step_s for name, value in found.phases_s.items()
    }
    return {
        "ranks": found.ranks,
        "steady_steps": found.steps,
        "step_s": found.step_s,
        "step_p95_s": found.step_p95_s,
        **found.phases_s,
        **shares,
        "compute_s": found.compute_s,
        "host_s": found.phases_s["other_s"],
        "samples_per_s": found.samples_per_s,
        "paced": run.config.paced,
        "origin": run.origin,
    }
