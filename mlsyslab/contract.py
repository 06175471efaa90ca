"""What every lab says, and in which words: predictions, evidence, findings, diagnoses, rules.

Pure: numbers and sentences in, numbers and sentences out. No torch, no files, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, NamedTuple, TypeVar

Origin = Literal["measured", "predicted", "simulated", "recorded"]

OWNERS = ("storage/data", "model code", "networking", "host operations", "serving", "optimisation", "nobody")


class LabError(Exception):
    """Something the person at the keyboard can mend: the value, the rule it broke, the remedy.

    Notebooks show the message as one line (IPython calls `_render_traceback_`), the command prints it
    and exits with 2. A bug is never a LabError.
    """

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class ConfigError(LabError, ValueError):
    """A configuration that cannot be run."""


class RunError(LabError, RuntimeError):
    """An experiment that failed, or a run directory that cannot be read or written."""


class Range(NamedTuple):
    """A value with its uncertainty. `low <= expected <= high`, all in the unit that the key's suffix names."""

    low: float
    expected: float
    high: float

    @classmethod
    def around(cls, expected: float, below: float, above: float) -> Range:
        """`expected` less and more a share of itself: around(100, 0.1, 0.25) is 90..125."""
        return cls(expected * (1 - below), expected, expected * (1 + above))

    def __contains__(self, value: object) -> bool:
        return isinstance(value, (int, float)) and self.low <= value <= self.high


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a closed form or a simulation expects, and when it is wrong.

    values: name -> Range; the suffix of the name is the unit (`step_s`, `data_frac`).
    assumptions: sentences; each names a condition under which the numbers do not hold.
    cause: the bottleneck that these numbers imply, one of the lab's CAUSES.
    """

    values: Mapping[str, Range]
    assumptions: tuple[str, ...]
    cause: str
    origin: Origin = "predicted"

    def expected(self) -> dict[str, float]:
        """The middle of each range, by name."""
        return {name: value.expected for name, value in self.values.items()}


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One figure, where it comes from, what it points at and what it is easily mistaken for.

    value None means that the sensor is absent here, which is not the same as 0.
    """

    name: str
    value: float | str | None
    unit: str = ""
    origin: Origin = "measured"
    points_at: str = ""
    confused_with: str = ""

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.name}: not available on this machine"
        return f"{self.name}: {format_value(self.value, self.unit)} ({self.origin})"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A rule that fired: its sentence, the figures behind it, and the check that would refute it.

    weight_frac is the share of the step (0..1) that this finding explains.
    """

    rule: str
    cause: str
    says: str
    evidence: tuple[Evidence, ...] = ()
    confused_with: str = ""
    next_check: str = ""
    weight_frac: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Action:
    """Something to do about it: `change` is what `dataclasses.replace(config, **change)` takes, empty where
    only a person can act. `step_s` is the step predicted after it, or what the lab has in its place, named by `figure`
    (a key of Run.summary()). `gain_frac` is the share that it saves `of` something."""

    name: str
    says: str
    change: Mapping[str, Any] = field(default_factory=dict)
    step_s: Range | None = None
    gain_frac: Range | None = None
    figure: str = "step_s"
    of: str = "the step"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The verdict. cause "unknown" is an abstention, and `reason` says why.

    gain: share of the step (0..1) that the first action is predicted to save; None where nothing is promised.
    """

    cause: str
    reason: str
    kind: str = ""
    where: str | None = None
    owner: str = "nobody"
    findings: tuple[Finding, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    actions: tuple[Action, ...] = ()
    gain: Range | None = None

    def recorded(self) -> Diagnosis:
        """The same of a run read from disk: what was measured elsewhere or earlier says so; what is computed from it, as
        predicted or simulated, was computed now."""

        def mark(items: tuple[Evidence, ...]) -> tuple[Evidence, ...]:
            return tuple(
                replace(item, origin="recorded") if item.origin == "measured" else item for item in items
            )

        findings = tuple(replace(finding, evidence=mark(finding.evidence)) for finding in self.findings)
        return replace(self, evidence=mark(self.evidence), findings=findings)

    def __str__(self) -> str:
        what = f"{self.cause} ({self.kind})" if self.kind else self.cause
        return f"{what}; where: {self.where or 'nowhere'}; acts first: {self.owner}"


F = TypeVar("F")


@dataclass(frozen=True, kw_only=True)
class Rule(Generic[F]):
    """One check. `test(facts)` gives a Finding where it fires, else None."""

    name: str
    checks: str
    why: str
    confused_with: str
    next_check: str
    test: Callable[[F], Finding | None]


def format_value(value: float | str | None, unit: str = "") -> str:
    """A figure as people write it: seconds below one as milliseconds, fractions as percent, bytes in MB."""
    if value is None:
        return "not available"
    if isinstance(value, str):
        return value
    scale, shown, digits = {
        "s": (1.0, " s", 2) if abs(value) >= 1 else (1e3, " ms", 1),
        "frac": (100.0, " %", 0),
        "bytes": (1e-6, " MB", 1),
        "bytes_per_s": (1e-6, " MB/s", 1),
        "flops_per_s": (1e-9, " GFLOP/s", 1),
    }.get(unit, (1.0, f" {unit}", -1))
    return f"{value:.3g}{shown}".rstrip() if digits < 0 else f"{value * scale:.{digits}f}{shown}"


def unit_of(name: str) -> str:
    """The unit that a name's suffix stands for: `step_s` -> s, `data_frac` -> frac."""
    for suffix in ("bytes_per_s", "flops_per_s", "per_s", "frac", "bytes", "flops", "s"):
        if name.endswith("_" + suffix):
            return suffix
    return ""
