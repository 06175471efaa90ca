"""What the bars of the figures are made of: a run's memory by part, measured and predicted. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mlsyslab.contract import RunError
from mlsyslab.labs.parallelism.config import layout_of
from mlsyslab.labs.parallelism.ledger import Ledger, ledger

if TYPE_CHECKING:
    from mlsyslab.runs import Run

# Okabe-Ito, with a hatch that says the same without colour.
PARTS: Mapping[str, tuple[str, str]] = {
    "parameters": ("#0072B2", ""),
    "gradients": ("#56B4E9", "//"),
    "optimizer": ("#009E73", ".."),
    "activations": ("#E69F00", "\\\\"),
    "transients": ("#CC79A7", "xx"),
}
STATE = {"params": "parameters", "grads": "gradients", "optimizer": "optimizer"}


def held_by_rank(run: Run) -> dict[int, dict[str, float]]:
    """Rank -> the parts of its measured peak; where memory was refused, what was live then."""
    found: dict[int, dict[str, float]] = {}
    for note in run.notes:
        if note.get("kind") == "ledger":
            parts = parts_of(note["moments"]["peak"], note["moments"])
            if run.config.strategy in (
                "ddp",
                "zero1",
            ):  # DDP's buckets stay while there are no gradients in them
                stays = max(0.0, float(note["moments"].get("end", {}).get("other", 0)) - parts["gradients"])
                parts["activations"] -= (stays := min(stays, parts["activations"]))
                parts["gradients"] += stays
            found[int(note["rank"])] = parts
    for note in run.notes:
        if note.get("kind") == "oom":
            found[int(note["rank"])] = parts_of(note["live"], {})
    if not found:
        raise RunError("no step was counted; record more steps, or read the run's status")
    return dict(sorted(found.items()))


def parts_of(peak: Mapping[str, float], moments: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """params, grads, optimizer as they were then; the rest is what forward had left, and transients above it."""
    # what FSDP has gathered counts as a parameter while it is whole: here it is a transient
    state = moments.get("optimizer", peak)
    parts = {label: float(min(peak.get(role, 0), state.get(role, 0))) for role, label in STATE.items()}
    rest = float(peak["total"]) - sum(parts.values())
    kept = float(moments["forward"]["other"]) if "forward" in moments else rest
    return {**parts, "activations": min(rest, kept), "transients": max(0.0, rest - kept)}


def predicted_parts(run: Run, rank: int) -> dict[str, float]:
    """The parts of a rank's predicted peak."""
    config = run.config
    return grouped(ledger(config.shape, layout_of(config), stage=rank if config.strategy == "pp" else 0))


def grouped(found: Ledger) -> dict[str, float]:
    """The terms of a ledger's peak, as parts of a bar."""
    parts = dict.fromkeys(PARTS, 0.0)
    for term, size in found.peak.items():
        kept = "activations" if term in ("activations", "logits", "copies") else "transients"
        parts[STATE.get(term, kept)] += size
    return parts


def title_of(run: Run) -> str:
    """The message of a run's figure."""
    config, oom = run.config, next((note for note in run.notes if note.get("kind") == "oom"), None)
    if oom:
        wanted = oom.get("wanted_bytes")
        more = f"{wanted / 1e6:.1f} MB more" if wanted else "more"
        return f"{config.strategy}: rank {oom['rank']} is refused {more} under its cap of {config.memory_cap_mb:g} MB"
    peaks = {rank: sum(parts.values()) for rank, parts in held_by_rank(run).items()}
    top = max(peaks, key=lambda r: peaks[r])
    room = f", {config.memory_cap_mb - peaks[top] / 1e6:.0f} MB under the cap" if config.memory_cap_mb else ""
    return f"{config.strategy} over {config.ranks}: the fullest rank peaks at {peaks[top] / 1e6:.0f} MB{room}"
