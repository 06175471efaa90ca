"""The diff of two runs: for each recorded figure, from which step on they differ, and by how much. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mlsyslab.labs.scaleup.answers import GATE_FRAC
from mlsyslab.labs.scaleup.evidence import facts_of

if TYPE_CHECKING:
    from mlsyslab.runs import Run

# What is compared, and the relative difference above which it counts: 0 means equal to the last bit.
COMPARED: Mapping[str, float] = {
    "ids_hash": 0.0,
    "lr": 1e-9,
    "loss": GATE_FRAC,
    "norm": GATE_FRAC,
    "param_norm": GATE_FRAC,
    "update_frac": 10 * GATE_FRAC,
    "tokens": 0.0,
    "loss_scale": 0.0,
}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One figure of two runs. step: the first in which it differs, None where it never does. largest: relative difference
    over all common steps."""

    name: str
    step: int | None
    largest: float
    first: float
    second: float


def compare(first: Run, second: Run) -> list[Difference]:
    """What differs between two runs at the same global batch, the earliest first; then what does not.

    Samples are compared as the sum of the ranks' fingerprints, other figures of rank 0 and losses as means over ranks. Raises
    ConfigError for runs that cannot be compared, RunError where nothing was recorded.
    """
    facts = facts_of(second, first)
    ours, theirs = facts_of(first).large, facts.large
    many = min(ours.steps, theirs.steps)
    found = []
    for name, limit in COMPARED.items():
        if name == "ids_hash":
            a, b = (part.get(name)[:many].sum(axis=1) % 2**53 for part in (ours, theirs))
        elif name in ("loss", "tokens"):
            a, b = (np.nanmean(part.get(name)[:many], axis=1) if name == "loss" else part.get(name)[:many].sum(axis=1)
                    for part in (ours, theirs))  # fmt: skip
        else:
            a, b = (part.get(name)[:many, 0] for part in (ours, theirs))
        known = np.isfinite(a) & np.isfinite(b)
        if not known.any():
            continue
        gap = np.where(known, np.abs(a - b) / np.maximum(np.abs(a), 1e-30), 0.0)
        off = gap > limit
        at = int(np.argmax(off)) if off.any() else None
        shown = at or 0
        found.append(
            Difference(
                name=name, step=at, largest=float(gap.max()), first=float(a[shown]), second=float(b[shown])
            )
        )
    return sorted(found, key=lambda d: (d.step is None, d.step or 0))
