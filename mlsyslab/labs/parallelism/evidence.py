"""The facts about a run: what each rank held and sent, how its step went, and where memory ended. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from mlsyslab.contract import RunError
from mlsyslab.labs.parallelism.config import Config, Layout, layout_of
from mlsyslab.labs.parallelism.predict import crosses
from mlsyslab.labs.parallelism.schedule import Timeline, orders, play
from mlsyslab.labs.parallelism.traffic import Collective, wire_bytes

if TYPE_CHECKING:
    from mlsyslab.runs import Run

BYTES = ("params_bytes", "grads_bytes", "optimizer_bytes", "activations_bytes", "peak_bytes", "comm_bytes")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the rules look at. memory: rank -> bytes by the names of BYTES. sent: rank -> its collectives. step_s, own_s,
    wait_s: means over the steady steps, own and wait by rank; queue_frac: share of the step that ranks waited for a core. shared_device: several
    ranks compute on one GPU, so no time is a device's own. replay: a
    pipeline's schedule played with the CPU seconds of its measured microbatches (simulated). stage_s: those seconds summed, by stage.
    link_s: seconds that the link between nodes needs for what crosses it in a step, by axis. oom: the note of the rank that ran out."""

    config: Config
    layout: Layout
    backend: str
    memory: Mapping[int, Mapping[str, float]]
    sent: Mapping[int, tuple[Collective, ...]]
    steps: int
    step_s: float | None
    own_s: Mapping[int, float]
    wait_s: Mapping[int, float]
    queue_frac: float | None
    usable_cores: float | None
    shared_device: bool
    replay: Timeline | None
    stage_s: tuple[float, ...]
    link_s: Mapping[str, float]
    oom: Mapping[str, Any] | None

    @property
    def transfer_frac(self) -> float | None:
        """Share of the step that even the rank which waits least waits: what remains when nobody waits for anybody."""
        return min(self.wait_s.values()) / self.step_s if self.step_s and self.wait_s else None

    @property
    def crowded(self) -> bool:
        """Whether the ranks outnumber what they compute on, so that waiting for another is often waiting for a turn."""
        return self.shared_device or (self.usable_cores is not None and self.config.ranks > self.usable_cores)

    @property
    def shared(self) -> str:
        """What crowded ranks share, in words."""
        return "one GPU" if self.shared_device else f"{self.usable_cores:g} cores"


def facts_of(run: Run) -> Facts:
    """Gather the facts. Raises RunError where the records support no verdict."""
    config, records, notes = run.config, run.records, run.notes
    oom = next((note for note in notes if note.get("kind") == "oom"), None)
    header: Mapping[str, Any] = next((note for note in notes if note.get("kind") == "header"), {})
    if records.empty and oom is None:
        raise RunError(
            "no step was recorded; the run ended before its first step, see its status and rank-*.log"
        )
    steady = records[~records["warmup"].astype(bool)] if not records.empty else records
    counted = records.dropna(subset=["peak_bytes"]) if "peak_bytes" in records else records.iloc[:0]
    last = counted.sort_values("step").groupby("rank").tail(1) if len(counted) else counted
    memory = {int(row["rank"]): {name: float(row[name]) for name in BYTES} for row in last.to_dict("records")}
    step_s = float(steady["step_s"].mean()) if len(steady) else None
    mean = {
        name: steady.groupby("rank")[name].mean().to_dict() if len(steady) else {}
        for name in ("own_s", "sync_s")
    }
    queue = steady["queue_s"].mean() / step_s if step_s and steady["queue_s"].notna().all() else None
    sent = _sent(notes, header.get("world", config.ranks))
    layout, backend = layout_of(config), str(header.get("backend", "gloo"))
    replay, stage_s = _replayed(layout, notes)
    return Facts(
        config=config,
        layout=layout,
        backend=backend,
        memory=memory,
        sent=sent,
        steps=int(steady["step"].nunique()) if len(steady) else 0,
        step_s=step_s,
        own_s={int(str(rank)): float(value) for rank, value in mean["own_s"].items()},
        wait_s={int(str(rank)): float(value) for rank, value in mean["sync_s"].items()},
        queue_frac=None if queue is None else float(queue),
        usable_cores=(run.environment.get("limits") or {}).get("usable_cores") if _on_cpu(header) else None,
        shared_device=bool(header.get("shared_device")),
        replay=replay,
        stage_s=stage_s,
        link_s=link_seconds(config, max(sent.values(), key=len, default=()), backend),
        oom=oom,
    )


def _on_cpu(header: Mapping[str, Any]) -> bool:
    return str(header.get("device", "cpu")) == "cpu"


def _sent(notes: list[dict[str, Any]], world: int) -> dict[int, tuple[Collective, ...]]:
    sizes = {
        (note["rank"], axis): len(ranks)
        for note in notes
        if note.get("kind") == "header"
        for axis, ranks in note["axes"].items()
    }
    found: dict[int, tuple[Collective, ...]] = {}
    for note in notes:
        if note.get("kind") == "traffic":  # a later one replaces an earlier one
            rank = int(note["rank"])
            found[rank] = tuple(
                Collective(**row, size=sizes.get((rank, row["axis"]), world)) for row in note["collectives"]
            )
    return found


def _replayed(layout: Layout, notes: list[dict[str, Any]]) -> tuple[Timeline | None, tuple[float, ...]]:
    """The schedule as it would play on devices of their own, from each stage's mean CPU seconds of a microbatch."""
    ops = [note for note in notes if note.get("kind") == "op"]
    if layout.pp < 2 or not ops:
        return None, ()
    mean = {
        (stage, op): fmean(o["cpu_s"] for o in ops if o["stage"] == stage and o["op"] == op)
        for stage, op in {(o["stage"], o["op"]) for o in ops}
    }
    if len(mean) < 2 * layout.pp:
        return None, ()
    forward, backward = ([mean[stage, op] for stage in range(layout.pp)] for op in "FB")
    timeline = play(orders(layout.schedule, layout.pp, layout.microbatches), forward, backward)
    return timeline, tuple(layout.microbatches * (f + b) for f, b in zip(forward, backward, strict=True))


def link_seconds(config: Config, sent: tuple[Collective, ...], backend: str) -> dict[str, float]:
    """Seconds of the link between two nodes for what crosses it in a step, by axis; {} on one node.

    All groups of an axis that crosses share the link: as many as a node has ranks, each with what one rank sends.
    """
    if config.nodes == 1:
        return {}
    per_node, rate = config.ranks // config.nodes, config.link_mb_per_s * 1e6
    found: dict[str, float] = {}
    for one in sent:
        if crosses(config, one.axis):
            found[one.axis] = found.get(one.axis, 0.0) + per_node * wire_bytes(one, backend) / rate
    return found
