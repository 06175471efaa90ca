"""The facts about a run: who was late or refused, where their time went, and what the traffic asked of the replicas. Pure.

A request is missed when it is not answered within the target: late, refused, expired or failed. Nothing here looks at
what was injected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mlsyslab.contract import Evidence, RunError
from mlsyslab.labs.serving.config import Config
from mlsyslab.labs.serving.curves import Array, learnt
from mlsyslab.labs.serving.figures import summary_of
from mlsyslab.labs.serving.fluid import Fluid, Lives, dispersion

if TYPE_CHECKING:
    from mlsyslab.runs import Run

NEEDED = ("intended_s", "sent_s", "lag_s", "queue_s", "batch_wait_s", "service_s", "total_s", "batch_size", "rows", "priority", "outcome", "warmup")  # fmt: skip
STUCK = 5.0  # a batch that takes so many times its usual seconds, and longer than the target, stood still
DRAIN_S = 1.0  # after a start or a loss its backlog is worked off within this, or it was not the reason


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the rules look at. Shares are of the missed requests where nothing else is said; None: it cannot be told.

    figures: `figures.summary_of`. missed, n: after the warm-up. wait_frac: would be in time without the hold.
    queued_frac: refused, or would be in time without the wait for a replica.
    queue_frac, service_frac: of the late ones' seconds, waiting for a replica beyond one batch, and in or behind one
    batch. demand_per_s and saturation_per_s in rows; packed_frac: rows of a batch that leaves others behind, over
    max_batch. largest_rows: of a request (p95), 0 where all are alike. growth: queue at the end over the queue at the beginning. peaks_frac: came while more came than the
    replicas could do. dispersion: variance over mean of the requests in short windows (Poisson: 1). blocked_frac: small
    or urgent ones that would be in time if only their like came; blocked_by says which. starting_frac: came while a
    replica that takes long was starting, or none was ready. lost_frac, stuck_frac: while a lost one was replaced, or a
    replica stood still. open_p99_s: what an open loop would have seen, from a closed one (Tene's correction).
    noise: factors of single batches on the curve. overhead_s: of an answer, outside of queue and replica.
    """

    config: Config
    figures: Mapping[str, float | None]
    n: int
    missed: int
    refused: int
    curve: Array
    demand_per_s: float
    saturation_per_s: float
    replicas: float
    packed_frac: float | None
    largest_rows: int
    wait_frac: float
    queued_frac: float
    queue_frac: float
    service_frac: float
    growth: float
    peaks_frac: float
    dispersion: float
    blocked_frac: float
    blocked_by: str
    starting_frac: float
    start_s: float | None
    lost_frac: float
    stuck_frac: float
    stuck_s: tuple[float, float] | None
    open_p99_s: float | None
    noise: Array
    overhead_s: float

    @property
    def missed_frac(self) -> float:
        return self.missed / self.n if self.n else 0.0

    @property
    def load_frac(self) -> float:
        """Rows that came over rows that full batches could answer."""
        return self.demand_per_s / self.saturation_per_s if self.saturation_per_s else math.inf

    def figure(self, name: str) -> float:
        """A figure, 0 where there is none."""
        return float(self.figures.get(name) or 0.0)


def facts_of(run: Run) -> Facts:
    """The facts of a run. Raises RunError where the records cannot support any verdict."""
    config, records = run.config, run.records
    if run.status["state"] != "done" and len(records):  # it was stopped: what had been planned did not come
        end_s = float(records["intended_s"].max())
        if config.warmup_s + 0.2 < end_s < config.duration_s:
            config = replace(config, duration_s=end_s)
    return facts_from(config, records, run.notes)


def facts_from(config: Config, records: Any, events: Sequence[Mapping[str, Any]]) -> Facts:
    """The same from its parts: records as a DataFrame or a mapping of arrays, events as a run's notes."""
    table = _table(records)
    steady = {name: values[~table["warmup"]] for name, values in table.items()}
    lives = Lives(events, config.replicas, float((table["sent_s"] + table["total_s"]).max()))
    figures = summary_of(table, slo_s=config.slo_p95_s, warmup_s=config.warmup_s, replica_s=lives.replica_s)
    ok = steady["outcome"] == "ok"
    missed = ~ok | (steady["total_s"] > config.slo_p95_s)
    late = ok & missed
    curve, noise = learnt(table["batch_size"], table["service_s"], config.max_batch)
    when_s = steady["intended_s"]
    lasts_s = config.duration_s - config.warmup_s
    if len(when_s) > 1 and config.clients:
        lasts_s = max(1e-9, float(when_s[-1] - when_s[0]))
    fluid = Fluid(config, lives, curve)
    peaks = fluid.late(when_s, steady["rows"])
    blocked, by = _blocked(fluid, steady, peaks)
    parts_s = {name: steady[name][late] for name in ("queue_s", "batch_wait_s", "service_s", "total_s")}
    one_s = np.minimum(parts_s["queue_s"], curve[-1]) + parts_s["service_s"]
    spent_s = max(1e-12, float(parts_s["total_s"].sum()))
    long_s = [(asked, ready) for asked, ready in lives.starts if ready - asked >= 1.0]
    stuck = _stuck(table, curve, config.slo_p95_s)
    in_time = (steady["total_s"] - steady["batch_wait_s"] <= config.slo_p95_s) & late
    return Facts(
        config=config,
        figures=figures,
        n=len(ok),
        missed=int(missed.sum()),
        refused=int((~ok).sum()),
        curve=curve,
        demand_per_s=float(steady["rows"].sum()) / lasts_s,
        saturation_per_s=lives.mean_ready(config.warmup_s, config.duration_s) * config.max_batch / float(curve[-1]),
        replicas=lives.mean_ready(config.warmup_s, config.duration_s),
        packed_frac=_packed(steady, ok, config),
        largest_rows=int(np.quantile(steady["rows"], 0.95)) if np.ptp(steady["rows"]) else 0,
        wait_frac=_share(in_time, missed),
        queued_frac=_share(~ok | (steady["total_s"] - steady["queue_s"] <= config.slo_p95_s), missed),
        queue_frac=float((parts_s["queue_s"] - np.minimum(parts_s["queue_s"], curve[-1])).sum()) / spent_s,
        service_frac=float(one_s.sum()) / spent_s,
        growth=_growth(steady, ok),
        peaks_frac=_share(peaks, missed),
        dispersion=dispersion(when_s, config.slo_p95_s),
        blocked_frac=_share(blocked, missed),
        blocked_by=by,
        starting_frac=_share(lives.within(when_s, long_s, DRAIN_S) | (lives.ready_at(when_s) == 0), missed),
        start_s=float(np.median([ready - asked for asked, ready in lives.starts])) if lives.starts else None,
        lost_frac=_share(lives.within(when_s, lives.losses, DRAIN_S), missed),
        stuck_frac=_share((when_s >= stuck[0] - config.slo_p95_s) & (when_s <= stuck[1] + DRAIN_S), missed) if stuck else 0.0,
        stuck_s=stuck,
        open_p99_s=_open_p99(steady, ok, config),
        noise=noise,
        overhead_s=_overhead(steady, ok),
    )  # fmt: skip


def _table(records: Any) -> dict[str, NDArray[Any]]:
    if len(records) == 0 or not len(records[next(iter(records))]):
        raise RunError(
            "no request was recorded; the run ended before its first answer, see its status and logs"
        )
    missing = [name for name in NEEDED if name not in records]
    if missing:
        raise RunError(f"the records lack {', '.join(missing)}; they were not written by the load generator")
    table = {name: np.asarray(records[name]) for name in NEEDED}
    order = np.argsort(table["intended_s"].astype(float), kind="stable")
    table = {name: values[order] if name == "outcome" else values[order].astype(bool if name == "warmup" else float) for name, values in table.items()}  # fmt: skip
    if table["warmup"].all():
        raise RunError(f"all {len(order)} recorded requests are warm-up; lower warmup_s or send for longer")
    return table


def _share(which: NDArray[np.bool_], missed: NDArray[np.bool_]) -> float:
    return float((which & missed).sum() / missed.sum()) if missed.any() else 0.0


def _growth(steady: Mapping[str, Array], ok: NDArray[np.bool_]) -> float:
    waits = steady["queue_s"][ok]
    quarter = len(waits) // 4
    if not quarter:
        return 1.0
    return float(np.median(waits[-quarter:]) / max(1e-6, np.median(waits[:quarter])))


def _packed(steady: Mapping[str, Array], ok: NDArray[np.bool_], config: Config) -> float | None:
    """Rows over max_batch of the batches at whose start others already waited; None without such a batch."""
    sent, sizes = steady["sent_s"][ok], steady["batch_size"][ok]
    starts = sent + steady["queue_s"][ok] + steady["batch_wait_s"][ok]
    order = np.argsort(starts, kind="stable")
    first = np.concatenate([[True], np.diff(starts[order]) > 1e-7])
    begins, rows = starts[order][first], sizes[order][first]
    behind = np.array([False] * len(begins))
    waited_from = np.minimum.accumulate(sent[order][::-1])[
        ::-1
    ]  # the earliest arrival among those that start later
    last = np.append(np.flatnonzero(first)[1:], len(order))
    inside = last < len(order)
    behind[inside] = waited_from[last[inside]] < begins[inside] - 1e-7
    return float(rows[behind].mean()) / config.max_batch if behind.any() else None


def _blocked(
    fluid: Fluid, steady: Mapping[str, Array], peaks: NDArray[np.bool_]
) -> tuple[NDArray[np.bool_], str]:
    """Requests that came into a backlog which their like alone would not have made: few large requests, or less
    urgent ones, stood before them."""
    when_s, rows = steady["intended_s"], steady["rows"]
    nobody = np.zeros(len(when_s), bool)
    best, by = nobody, ""
    large = rows > fluid.config.max_batch / 2
    urgent = steady["priority"] < steady["priority"].max()
    few_large = large.any() and large.mean() <= 0.3 and rows[large].sum() > 0.4 * rows.sum()
    for mine, what in ((urgent, "less urgent requests"), (~large, "large requests" if few_large else "")):
        if what and mine.any() and not mine.all():
            alone = nobody.copy()
            alone[mine] = fluid.late(when_s[mine], rows[mine])
            blocked = mine & peaks & ~alone
            if blocked.sum() > best.sum():
                best, by = blocked, what
    return best, by


def _stuck(table: Mapping[str, Array], curve: Array, slo_s: float) -> tuple[float, float] | None:
    """From when to when batches took far longer than their size explains; None where none did."""
    ran = table["outcome"] == "ok"
    size = np.clip(np.nan_to_num(table["batch_size"][ran], nan=1), 1, len(curve)).astype(int)
    service_s = table["service_s"][ran]
    long = service_s > np.maximum(STUCK * curve[size - 1], slo_s)
    if not long.any():
        return None
    starts = (table["sent_s"] + table["queue_s"] + table["batch_wait_s"])[ran][long]
    return float(starts.min()), float((starts + service_s[long]).max())


def _open_p99(steady: Mapping[str, Array], ok: NDArray[np.bool_], config: Config) -> float | None:
    """p99 with the requests that a closed loop did not send while it waited: for each answer that took longer than a
    client's usual interval, further ones of the rest of that time (HdrHistogram's correction, Tene)."""
    if not config.clients or not ok.any():
        return None
    total_s = steady["total_s"][ok]
    interval_s = max(float(np.median(total_s)), 1e-6)
    more = [np.arange(one - interval_s, 0, -interval_s) for one in total_s[total_s > 2 * interval_s]]
    return float(np.quantile(np.concatenate([total_s, *more]), 0.99))


def _overhead(steady: Mapping[str, Array], ok: NDArray[np.bool_]) -> float:
    inside = steady["lag_s"] + steady["queue_s"] + steady["batch_wait_s"] + steady["service_s"]
    return max(0.0, float(np.median((steady["total_s"] - inside)[ok]))) if ok.any() else 0.0


def checks(facts: Facts) -> tuple[Evidence, ...]:
    """The checks in the order in which to make them, each with its figure, what it points at, and its look-alike."""
    config, saw = facts.config, facts.figures
    return (
        Evidence(name="generator's lag, p99", value=saw.get("lag_p99_s"), unit="s", points_at="tester-bound, where above a tenth of p99"),
        Evidence(name="requests judged", value=float(facts.n), points_at="unknown, where few"),
        Evidence(name="missed: late, refused, expired or failed", value=facts.missed_frac, unit="frac", points_at="healthy, where below 5 %"),
        Evidence(name="refused, expired or failed", value=facts.refused / max(1, facts.n), unit="frac", points_at="admission that works",
                 confused_with="a service that is down"),
        Evidence(name="p95", value=saw.get("p95_s"), unit="s", confused_with="a p95 of the answers only, which refusals make look good"),
        Evidence(name="rows that came over rows that full batches can answer", value=facts.load_frac, unit="frac", points_at="saturated, where near 1",
                 confused_with="a busy replica: small batches keep it busy long before"),
        Evidence(name="replicas busy", value=saw.get("utilisation_frac"), unit="frac", confused_with="saturation"),
        Evidence(name="queue at the end over the queue at the beginning", value=facts.growth, points_at="no admission control, where large"),
        Evidence(name="mean batch", value=saw.get("mean_batch_rows"), unit="rows"),
        Evidence(name="rows a second of full batches over those of single rows", value=len(facts.curve) * float(facts.curve[0] / facts.curve[-1]),
                 points_at="no use of batching, where near 1 or below", confused_with="clients that wait, so that no batch forms"),
        Evidence(name="missed for the batcher's hold alone", value=facts.wait_frac, unit="frac", origin="predicted", points_at="batch wait too long"),
        Evidence(name="late ones' time in or behind one batch", value=facts.service_frac, unit="frac", points_at="batch too large for the target"),
        Evidence(name="late ones' time queued beyond one batch", value=facts.queue_frac, unit="frac", points_at="saturated or bursts"),
        Evidence(name="missed that came in a peak above the capacity", value=facts.peaks_frac, unit="frac", origin="simulated", points_at="bursts exceed warm capacity"),
        Evidence(name="variance over mean of the arrivals", value=facts.dispersion, points_at="bursts, where far above 1 (Poisson)"),
        Evidence(name="missed while a replica was starting", value=facts.starting_frac, unit="frac", points_at="cold starts"),
        Evidence(name="a start", value=facts.start_s, unit="s", points_at="cold starts, where above 1 s"),
        Evidence(name="missed that their like alone would not have been", value=facts.blocked_frac, unit="frac", origin="simulated", points_at="head of line blocking"),
        Evidence(name="rows of a batch that left others behind, of max_batch", value=facts.packed_frac, unit="frac", points_at="head of line blocking, where low"),
        Evidence(name="p99 as an open loop would have seen it", value=facts.open_p99_s, unit="s", origin="predicted", points_at="coordinated omission, where far above p99")
        if config.clients else Evidence(name="sender", value="open loop", points_at="the schedule is kept whatever happens"),
    )  # fmt: skip
