"""What the records of a run, of its control and of the small run say, as arrays. Pure: no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mlsyslab.contract import ConfigError, RunError
from mlsyslab.labs.scaleup.noise import NoiseScale, noise_scale

if TYPE_CHECKING:
    import numpy.typing as npt

    from mlsyslab.runs import Run

    Array = npt.NDArray[np.float64]

SETTLED_STEPS = 60  # in which a loss scaler has found its scale
SMOOTH_STEPS = 10  # the loss at the end is a mean over so many


class Part:
    """The rows of one training run: figures by name as arrays of (steps, ranks), NaN where nothing was recorded."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], notes: Sequence[Mapping[str, Any]]) -> None:
        self.ranks = sorted({int(row["rank"]) for row in rows})
        self._arrays: dict[str, Array] = {}
        by_step: dict[int, dict[int, Mapping[str, Any]]] = {}
        for row in rows:
            by_step.setdefault(int(row["step"]), {})[int(row["rank"])] = row
        # The last step of a run that was stopped may lack ranks.
        self.rows = [by_step[s] for s in sorted(by_step) if len(by_step[s]) == len(self.ranks)]
        self.header = next((n for n in notes if n.get("kind") == "header"), {})
        # Ranks that made a step with their own gradient alone, while others of their world did not make it.
        world = int(self.header.get("world") or len(self.ranks))
        self.alone = [
            (step, rank) for step, found in sorted(by_step.items()) if len(found) < world
            for rank, row in found.items() if row.get("probe") and row.get("probe") == row.get("local_probe")
        ]  # fmt: skip
        self.evaluations = [n for n in notes if n.get("kind") == "val"]
        self.sharpness = [(int(n["step"]), float(n["value"])) for n in notes
                          if n.get("kind") == "sharpness" and n.get("value") is not None]  # fmt: skip

    @property
    def steps(self) -> int:
        return len(self.rows)

    def get(self, name: str) -> Array:
        """(steps, ranks), or (steps, ranks, probes) of a projection."""
        if name not in self._arrays:
            wide = name.endswith("probe")
            empty: Any = [np.nan] * 8 if wide else np.nan
            values = [
                [row[r].get(name) if row[r].get(name) is not None else empty for r in self.ranks]
                for row in self.rows
            ]
            self._arrays[name] = np.array(values, dtype=float)
        return self._arrays[name]

    def middle(self, name: str, steps: int) -> float:
        """The median over the ranks of the first steps; NaN where nothing was recorded."""
        known = self.get(name)[:steps]
        known = known[np.isfinite(known)]
        return float(np.median(known)) if known.size else float("nan")

    def ids(self, step: int, rank: int) -> list[int] | None:
        """The samples of a rank in a step, None where they were not written down."""
        found = self.rows[step][rank].get("ids")
        return None if found is None else list(found)

    @cached_property
    def epochs(self) -> npt.NDArray[np.int64]:
        """The epoch of each step: as recorded, else by the samples so far."""
        told = [row[self.ranks[0]].get("epoch") for row in self.rows]
        if all(epoch is not None for epoch in told):
            return np.array(told, dtype=np.int64)
        size = self.header.get("samples")
        before = np.concatenate([[0.0], np.cumsum(self.get("samples").sum(1))[:-1]])
        return (before // size).astype(np.int64) if size else np.zeros(self.steps, dtype=np.int64)

    @cached_property
    def batch(self) -> int:
        """Samples of all ranks in a step."""
        counts = self.get("samples").sum(1)
        return int(np.nanmedian(counts)) if self.steps and np.isfinite(counts).any() else 0

    @cached_property
    def loss(self) -> Array:
        """The loss of the whole batch in each step."""
        return self.get("loss").mean(axis=1) if self.steps else np.zeros(0)

    @property
    def lr(self) -> Array:
        return self.get("lr")[:, 0]

    @cached_property
    def norm(self) -> Array:
        """The gradient norm that the optimizer of the first rank saw, a value a step."""
        return self.get("norm")[:, 0]

    def final_loss(self) -> float:
        """Mean training loss of the last steps; NaN where it is not finite."""
        last = self.loss[-SMOOTH_STEPS:]
        return float(last.mean()) if len(last) else float("nan")

    def last(self, name: str) -> float | None:
        """Of the last evaluation: "val_loss" or "val_acc_frac"; None where there was none, or it is not finite."""
        found = self.evaluations[-1].get(name) if self.evaluations else None
        return None if found is None else float(found)

    @property
    def seen_samples(self) -> float:
        return float(np.nansum(self.get("samples")))

    @property
    def draws(self) -> bool:
        """Whether the ranks draw random numbers in their steps (dropout, augmentation)."""
        return self.middle("rng_used", self.steps) > 0.5

    @property
    def skips(self) -> bool:
        """Whether a loss scaler left out one of the first steps, after which a run is a step behind any other."""
        first = (self.get("nonfinite")[:SETTLED_STEPS] > 0) & (self.get("update_frac")[:SETTLED_STEPS] == 0)
        return bool(first.any())

    @property
    def sees_local(self) -> bool:
        """Whether gradients were seen before they were reduced: else both are the same on every rank."""
        if len(self.ranks) == 1:
            return True
        if not np.isfinite(self.get("local_norm")).any():
            return False
        same = np.array_equal(self.get("local_norm"), self.get("norm"), equal_nan=True)
        return not (same and self.spread("probe").max(initial=0.0) < 1e-12)

    def spread(self, name: str) -> Array:
        """How far the ranks' projections are apart in each step, relative to their size."""
        probes = self.get(name)
        middle = probes.mean(axis=1, keepdims=True)
        with np.errstate(invalid="ignore"):  # overflowed gradients have a check of their own
            apart = np.linalg.norm(probes - middle, axis=2).max(axis=1)
        return _relative(apart, np.linalg.norm(middle[:, 0], axis=1))


def _relative(value: Array, scale: Array) -> Array:
    """value / scale, 0 where both are 0; not-a-number counts as no difference, which other checks look at."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = value / scale
    return np.where((value == 0) | ~np.isfinite(ratio), 0.0, ratio)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """large: the run that is judged. control: one worker, or another run, at the same global batch. base: at a smaller one."""

    large: Part
    control: Part | None = None
    base: Part | None = None
    config: Any = None
    origin: str = "measured"

    @cached_property
    def noise(self) -> NoiseScale | None:
        """Of the large run, from what its ranks computed; else of the control's shares."""
        for part in (self.large, self.control):
            if part is not None and len(part.ranks) > 1 and part.sees_local and part.batch:
                found = noise_scale(part.get("local_norm"), part.norm, small=max(1, part.batch // len(part.ranks)), big=part.batch)  # fmt: skip
                if found:
                    return found
        return None

    def norm_gap(self, steps: int) -> Array:
        """Relative difference of the gradient norm to the control's in the first steps; empty without a control."""
        if self.control is None:
            return np.zeros(0)
        many = min(steps, self.large.steps, self.control.steps)
        return _relative(np.abs(self.large.norm[:many] - self.control.norm[:many]), self.control.norm[:many])

    def rank_gap(self, steps: int) -> Array | None:
        """(steps, ranks): relative difference of each rank's own gradient to that of its share in the control; None where the
        control has other shares."""
        control = self.control
        if control is None or control.ranks != self.large.ranks or not self.large.sees_local:
            return None
        many = min(steps, self.large.steps, control.steps)
        ours, theirs = self.large.get("local_probe")[:many], control.get("local_probe")[:many]
        return _relative(np.linalg.norm(ours - theirs, axis=2), np.linalg.norm(theirs, axis=2))


def facts_of(run: Run, other: Run | None = None) -> Facts:
    """The facts of a run, and of a second one that it is compared with (small first, as in `diagnose`).

    Raises RunError where nothing was recorded, ConfigError for runs that cannot be compared.
    """
    parts = _parts(run)
    if "large" not in parts or not parts["large"].steps:
        raise RunError(
            f"{run.path} holds no step of the large run yet; let it run longer, or read its status: {run.status['message']}"
        )
    config = run.config
    if other is None:
        return Facts(large=parts["large"], control=parts.get("control"), base=parts.get("base"), config=config,
                     origin=run.origin)  # fmt: skip
    small = facts_of(other).large
    _check_comparable(small, parts["large"], other, run)
    same = small.batch == parts["large"].batch
    return Facts(
        large=parts["large"],
        control=small if same else parts.get("control"),
        base=parts.get("base") if same else small,
        config=config,
        origin=run.origin,
    )


def _parts(run: Run) -> dict[str, Part]:
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for row in run.rows():
        rows.setdefault(str(row.get("part", "large")), []).append(row)
    return {
        name: Part(found, [n for n in run.notes if n.get("part") == name]) for name, found in rows.items()
    }


def _check_comparable(small: Part, large: Part, first: Run, second: Run) -> None:
    for name in ("task", "parameters", "samples", "seed"):
        mine, theirs = small.header.get(name), large.header.get(name)
        if mine is not None and theirs is not None and mine != theirs:
            raise ConfigError(
                f"{first.path} has {name}={mine}, {second.path} has {theirs}; runs are compared with the same model, data and "
                "seed: run one of them again"
            )
    if small.batch > large.batch:
        raise ConfigError(
            f"{first.path} has a batch of {small.batch}, {second.path} of {large.batch}; give the smaller run first"
        )
