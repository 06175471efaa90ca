"""The facts about a run: who is slow by how much, in which phase, and what each rank's host says. Pure pandas.

Nothing here looks at what was injected; `paced` and the number of loader workers are all it takes from the
configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mlsyslab.contract import RunError
from mlsyslab.labs.straggler.blame import Array, Blame, Rounds, blame, rounds
from mlsyslab.labs.straggler.config import LINK_BYTES
from mlsyslab.records import PHASES

if TYPE_CHECKING:
    import pandas as pd

    from mlsyslab.runs import Run


LINK_FACTOR = 4.0  # a link whose message takes so many times the others' is slow,
LINK_S = 0.005  # unless it takes less than this longer


class Loader(NamedTuple):
    """A slow rank's loader beside the others': how many times their CPU, reading and wall seconds a batch takes, and
    the share of the additional wall seconds that is reading. A stopped worker stretches its short reads as well."""

    cpu: float = 1.0
    read: float = 1.0
    wall: float = 1.0
    read_frac: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the rules look at. Seconds are a slow step's; `*_excess_s` is the named ranks' over the others' median.

    phases_s: excess by phase; ratios: how many times the others' seconds, forward and backward. cpu, queue and gc: of
    the training thread; None where nobody counts. load: the named ranks' loader beside the others'. link_s: seconds of
    each rank's link check, of the one in which the links differ most; slow_links: the rank whose link stood out in each check,
    None where none did. join_s: seconds that each rank waited for the others at the start. hosts: telemetry means
    by rank. overloaded: ranks that waited for a core in most steps; others_frac: the share of the cores that others used.
    """

    blame: Blame
    ranks: tuple[int, ...]
    named: tuple[int, ...]
    steps: int
    own_s: Mapping[int, float]
    wait_s: Mapping[int, float]
    step_s: float
    transfer_s: float
    phases_s: Mapping[str, float]
    ratios: Mapping[str, float]
    cpu_excess_s: float | None
    queue_excess_s: float | None
    gc_excess_s: float | None
    load: Loader | None
    rest_s: float
    length_corr: float | None
    link_s: Mapping[int, float]
    slow_links: tuple[int | None, ...]
    link_adds_s: float
    join_s: Mapping[int, float]
    hosts: Mapping[int, Mapping[str, Any]]
    overloaded: tuple[int, ...]
    others_frac: float | None
    since: int | None
    paced: bool
    workers: int
    kernel: tuple[str, ...]

    @property
    def excess_s(self) -> float:
        """Seconds by which the named ranks exceed the others in a slow step."""
        return self.blame.excess_s

    def frac(self, seconds: float | None) -> float:
        """`seconds` as a share of the excess; 0 where there is none."""
        return 0.0 if seconds is None or self.excess_s <= 0 else max(0.0, seconds / self.excess_s)


def steady(records: pd.DataFrame) -> pd.DataFrame:
    """The records that count: no warm-up step, the last attempt of a job that was resumed.

    Raises RunError when there are none, or when a phase was never measured.
    """
    if records.empty:
        raise RunError(
            "no step was recorded; the run ended before its first step, see its status and rank-*.log"
        )
    missing = [name for name in (*PHASES, "step_s", "rank", "step", "warmup") if name not in records]
    if missing:
        raise RunError(f"the records lack {', '.join(missing)}; they were not written by StepTimer")
    kept = records[~records["warmup"].astype(bool)]
    if kept.empty:
        raise RunError(f"all {len(records)} recorded steps are warm-up; record more steps than warmup")
    empty = [name for name in (*PHASES, "step_s") if kept[name].isna().all()]
    if empty:
        raise RunError(
            f"{', '.join(empty)} was never measured; wire StepTimer to the model and the optimizer"
        )
    return kept


def facts_of(run: Run) -> Facts:
    """Gather the facts of a run. Raises RunError where the records cannot support any verdict."""
    frame = steady(run.records)
    stages = _stages(frame)
    found = rounds(frame)
    verdict = blame(found.own, found.wait, stages=stages)
    named = tuple(found.ranks[column] for column in verdict.ranks)
    columns, slow = list(verdict.ranks), verdict.slow
    notes, hosts = run.notes, _hosts(run.telemetry, frame)
    links = _links(notes)

    def excess(values: Array) -> float:
        """Mean over the slow steps of what the named ranks have more than the others' median."""
        others = np.median(np.delete(values, columns, 1)[slow], 1)
        return float((values[slow][:, columns].mean(1) - others).mean())

    def column(name: str) -> float | None:
        if not columns or name not in found.frame or found.frame[name].isna().any():
            return None
        return excess(found.column(name))

    return Facts(
        blame=verdict,
        ranks=found.ranks,
        named=named,
        steps=len(found.own),
        own_s=_means(found, frame, found.own, "own_s"),
        wait_s=_means(found, frame, found.wait, "sync_s"),
        step_s=float((found.own.max(1) + found.wait.min(1)).mean())
        if len(found.own)
        else float(frame["step_s"].mean()),
        transfer_s=float(found.wait.min(1).mean()) if len(found.wait) else 0.0,
        phases_s={name: excess(values) for name, values in found.phases.items()} if columns else {},
        ratios=_ratios(found, columns, slow) if columns else {},
        cpu_excess_s=_after(found, "cpu_s", excess) if columns else None,
        queue_excess_s=_after(found, "queue_s", excess) if columns else None,
        gc_excess_s=_after(found, "gc_s", excess) if columns else None,
        load=_load(found, columns, slow) if columns else None,
        rest_s=_rest(found, columns, slow) if columns else 0.0,
        length_corr=_correlation(found),
        link_s=max(links, key=_link_lead, default={}),
        slow_links=tuple(_slow_link(link_s) for link_s in links),
        link_adds_s=_link_adds(links, notes),
        join_s=_by_rank(notes, "header", "join_s"),
        hosts=hosts,
        overloaded=_overloaded(frame),
        others_frac=_others_share(hosts, run.environment.get("limits") or {}),
        since=int(found.steps[verdict.since]) if verdict.since else None,
        paced=bool(run.config.paced),
        workers=int(run.config.workers),
        kernel=tuple(
            line for note in notes if note.get("kind") == "host" for line in note.get("kernel") or ()
        ),
    )


def _means(found: Rounds, frame: pd.DataFrame, values: Array, name: str) -> dict[int, float]:
    """Mean seconds of each rank over the rounds; over its steps where there is no whole round."""
    means = values.mean(0) if len(values) else frame.groupby("rank")[name].mean().to_numpy()
    return dict(zip(found.ranks, means.tolist(), strict=True))


def _stages(frame: pd.DataFrame) -> list[int] | None:
    """The pipeline stage of each rank, where the records say it."""
    return None if "stage" not in frame else [int(s) for s in frame.groupby("rank")["stage"].first()]


def _after(found: Rounds, name: str, excess: Any) -> float | None:
    """The excess of a counter that is read at the end of each step: a round holds the end of one step and the
    beginning of the next, so the larger of both readings is taken."""
    if name not in found.frame or found.frame[name].isna().any():
        return None
    values = found.steps_of(name)
    return max(excess(values[1:]), excess(values[:-1]))


def _load(found: Rounds, columns: list[int], slow: Any) -> Loader | None:
    """The named ranks' loader beside the others'; None where nobody counts."""
    names = ("load_cpu_s", "load_read_s", "load_wall_s")
    if any(name not in found.frame or found.frame[name].isna().any() for name in names):
        return None
    values = [found.column(name)[slow] for name in names]
    mine = [float(np.median(of[:, columns])) for of in values]
    others = [float(np.median(np.delete(of, columns, 1))) for of in values]
    cpu, read, wall = (of / max(usual, 1e-6) for of, usual in zip(mine, others, strict=True))
    read_frac = (mine[1] - others[1]) / max(mine[2] - others[2], 1e-6)
    return Loader(cpu=cpu, read=read, wall=wall, read_frac=read_frac)


def _ratios(found: Rounds, columns: list[int], slow: Any) -> dict[str, float]:
    """The named ranks' forward and backward over the others' median, means of the slow steps."""
    of = {name: found.phases[name][slow] for name in ("forward_s", "backward_s")}
    return {
        name: float(v[:, columns].mean() / max(np.median(np.delete(v, columns, 1), 1).mean(), 1e-9))
        for name, v in of.items()
    }


def _rest(found: Rounds, columns: list[int], slow: Any) -> float:
    """Seconds of the named ranks' own work without the wait for data, in a slow step."""
    return float((found.own - found.phases["data_s"])[slow][:, columns].mean())


def _correlation(found: Rounds) -> float | None:
    """Correlation of own work and the samples' length over all ranks and steps; None where all are alike."""
    if "length" not in found.frame or len(found.own) < 2:
        return None
    length = found.column("length")
    if length.std() == 0 or found.own.std() == 0:
        return None
    return float(np.corrcoef(length.ravel(), found.own.ravel())[0, 1])


def _by_rank(notes: list[dict[str, Any]], kind: str, name: str) -> dict[int, float]:
    rows = [note for note in notes if note.get("kind") == kind and note.get(name) is not None]
    return {int(note["rank"]): float(note[name]) for note in sorted(rows, key=lambda note: note["rank"])}


def _links(notes: list[dict[str, Any]]) -> list[dict[int, float]]:
    """Seconds of each rank's message, check by check; a run in which the links change is checked several times."""
    checks: dict[int, list[dict[str, Any]]] = {}
    for note in notes:
        if note.get("kind") == "link":
            checks.setdefault(int(note.get("turn", 0)), []).append(note)
    return [_by_rank(check, "link", "send_s") for _, check in sorted(checks.items())]


def _link_lead(link_s: Mapping[int, float]) -> float:
    """Seconds by which the slowest message exceeds the others' upper median; 0 for fewer than two."""
    *others, worst = sorted(link_s.values()) or [0.0]
    return worst - others[len(others) // 2] if others else 0.0


def _slow_link(link_s: Mapping[int, float]) -> int | None:
    """The rank whose link stands out in a check."""
    lead = _link_lead(link_s)
    worst = max(link_s, key=lambda rank: link_s[rank], default=-1)
    slow = lead > LINK_S and link_s[worst] > LINK_FACTOR * (link_s[worst] - lead)
    return worst if slow else None


def _link_adds(links: list[dict[int, float]], notes: list[dict[str, Any]]) -> float:
    """Seconds that slow links would add to an exchange by their own checks, on average over these: the slowest one's extra
    seconds a byte times the gradient's bytes. The bytes a rank sends in a ring all-reduce are 2 (n - 1) / n of them
    (Patarasuk and Yuan 2009); a hook that delays whole buckets sends them once, so the smaller is taken."""
    sizes = _by_rank(notes, "header", "gradient_bytes")
    if not links or not sizes:
        return 0.0
    return float(np.mean([_link_lead(link_s) for link_s in links])) / LINK_BYTES * max(sizes.values())


def _hosts(samples: pd.DataFrame, frame: pd.DataFrame) -> dict[int, dict[str, Any]]:
    """Telemetry of each rank during the steady steps: means of the numbers, the busiest neighbour of all samples."""
    if samples.empty or "rank" not in samples:
        return {}
    if "time_s" in frame and "time_s" in samples:
        middle_s = samples["time_s"] - samples["interval_s"] / 2
        samples = samples[
            (middle_s >= frame["time_s"].min()) & (samples["time_s"] <= frame["time_s"].max() + 1)
        ]
    hosts: dict[int, dict[str, Any]] = {}
    for rank, rows in samples.groupby("rank"):
        means = {
            str(name): float(rows[name].dropna().astype(float).mean())
            for name in rows
            if name != "rank" and rows[name].map(lambda v: isinstance(v, (int, float))).any()
        }
        hosts[int(str(rank))] = {**means, "neighbour": _busiest(rows)}
    return hosts


def _busiest(rows: pd.DataFrame) -> str | None:
    """Names of the processes outside the run that used most CPU, with how many of them and their cores."""
    if "neighbours" not in rows:
        return None
    seen: dict[str, list[float]] = {}
    looks = [sample for sample in rows["neighbours"] if isinstance(sample, list)]
    for sample in looks:
        for one in sample:
            seen.setdefault(str(one["name"]), []).append(float(one["cpu_frac"]))
    if not seen:
        return None
    name = max(seen, key=lambda key: sum(seen[key]))
    return f"{name} ({sum(seen[name]) / len(looks):.1f} cores)"


def _others_share(hosts: Mapping[int, Mapping[str, Any]], limits: Mapping[str, Any]) -> float | None:
    """Share of the machine's cores that processes outside this run used; None where nobody counts."""
    used = [host["other_cpu_frac"] for host in hosts.values() if host.get("other_cpu_frac") is not None]
    return float(np.median(used)) / limits["usable_cores"] if used and limits.get("usable_cores") else None


def _overloaded(frame: pd.DataFrame) -> tuple[int, ...]:
    if "overloaded" not in frame or frame["overloaded"].isna().all():
        return ()
    shares = (
        frame.assign(overloaded=frame["overloaded"].fillna(False).astype(float))
        .groupby("rank")["overloaded"]
        .mean()
    )
    return tuple(int(rank) for rank in shares.index[shares >= 0.5])
