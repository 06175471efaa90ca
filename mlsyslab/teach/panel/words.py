"""The panel's sentences and tables, as text and as HTML. Pure: no widgets, no clock, no files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from mlsyslab.contract import ConfigError, LabError, Range, unit_of

NOT_YET = "–"
# What a unit looks like to people: unit -> (shown as, factor).
SHOWN = {
    "s": ("ms", 1e3),
    "frac": ("%", 100.0),
    "bytes": ("MB", 1e-6),
    "bytes_per_s": ("MB/s", 1e-6),
    "per_s": ("/s", 1.0),
}

# Keys that say too little by themselves.
LABELS = {"own_s": "own work", "slow_own_s": "own work, slowest rank", "val_loss": "test loss"}


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A figure that is predicted and measured. `value * scale` is shown in `unit`."""

    key: str
    label: str
    unit: str = ""
    scale: float = 1.0

    @classmethod
    def named(cls, key: str) -> Quantity:
        """The quantity that a key with a unit suffix stands for: `data_frac` -> "data", in percent."""
        suffix = unit_of(key)
        unit, scale = SHOWN.get(suffix, (suffix, 1.0))
        label = LABELS.get(key) or (key.removesuffix("_" + suffix) if suffix else key).replace("_", " ")
        return cls(key=key, label=label, unit=unit, scale=scale)

    def parse(self, text: str) -> float:
        """What the learner typed, in the key's own unit; raises ConfigError."""
        cleaned = text.strip().removesuffix(self.unit).strip().replace(",", ".")
        try:
            value = float(cleaned)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0:
            what = (
                f"{self.label}={text.strip()!r} is not a number" if text.strip() else f"{self.label} is empty"
            )
            raise ConfigError(f"{what}; type your guess in {self.unit or 'its unit'}, or skip the prediction")
        return value / self.scale

    def show(self, value: float | None) -> str:
        """With its unit, as people write it; `–` for a value that is not there."""
        if value is None or not math.isfinite(value):
            return NOT_YET
        return f"{self.number(value)} {self.unit}".strip()

    def number(self, value: float) -> str:
        shown = value * self.scale
        if not self.unit and 0 < abs(shown) < 0.005:  # a ratio or a difference, which may be rounding alone
            return f"{shown:.0e}"
        whole = not self.unit and abs(shown) >= 10 and float(shown).is_integer()  # steps, counts
        digits = 0 if whole or abs(shown) >= 99.5 or self.unit == "%" else 1 if abs(shown) >= 9.95 else 2
        return f"{shown:,.{digits}f}"

    def show_range(self, value: Range | None) -> str:
        """`300 ms (270 to 350)`."""
        if value is None:
            return NOT_YET
        if value.low == value.high:
            return self.show(value.expected)
        return f"{self.show(value.expected)} ({self.number(value.low)} to {self.number(value.high)})"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the comparison: what the library expected, the learner expected, and the run gave."""

    quantity: Quantity
    predicted: Range | None = None
    yours: float | None = None
    measured: float | None = None

    def cells(self) -> tuple[str, str, str, str, str]:
        show = self.quantity.show
        return (
            self.quantity.label,
            self.quantity.show_range(self.predicted),
            show(self.yours),
            show(self.measured),
            self.residual(),
        )

    def residual(self) -> str:
        """Measured less predicted, in the unit, and whether it lies in the predicted range."""
        if self.measured is None or self.predicted is None:
            return NOT_YET
        off = self.measured - self.predicted.expected
        low, _, high = self.predicted
        where = (
            "below its range"
            if self.measured < low
            else "above its range"
            if self.measured > high
            else "in range"
        )
        size = self.quantity.show(abs(off))
        sign = "" if not any(digit in size for digit in "123456789") else "+" if off > 0 else "−"
        return f"{sign}{size}, {where}"


COLUMNS = ("quantity", "predicted", "yours", "measured", "residual")


def table_html(rows: Sequence[Row], note: str = "") -> str:
    """The comparison as a table; predicted and measured stay `–` until they are known."""
    head = "".join(f'<th scope="col">{name}</th>' for name in COLUMNS)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in (row.cells() for row in rows)
    )
    return (
        f'<table class="mls-table"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        f'<p class="mls-small">{escape(note)}</p>'
    )


def table_text(rows: Sequence[Row]) -> str:
    """The same table for a terminal or a saved notebook."""
    lines = [COLUMNS, *(row.cells() for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def ordinal(number: int) -> str:
    """2 -> 2nd."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def queue_words(status: Mapping[str, Any]) -> str:
    """`queue: first`, or whom this run waits for. Position 0 is the one that runs."""
    if status.get("state") != "queued":
        return "queue: first"
    if not status.get("position"):
        return "queue: waiting for the device"
    holder = f" behind {status['holder']}" if status.get("holder") else ""
    return f"queue: waiting, {ordinal(int(status['position']) + 1)}{holder}"


def progress_words(
    status: Mapping[str, Any], *, step: int | None, steps: int | None, share: float, left_s: float | None
) -> str:
    """`step 24 of 40, 7 s left, queue: first`; while nothing was recorded, what the run is doing."""
    if status.get("state") in ("done", "stopped", "failed"):
        return f"{status['state']}, {f'step {step} of {steps}' if step and steps else f'{share:.0%}'}"
    if status.get("state") in ("queued", "preparing") or (step is None and not share):
        doing = {"queued": "", "preparing": str(status.get("message") or "preparing")}
        first = doing.get(str(status.get("state")), "starting")
        return ", ".join(part for part in (first, queue_words(status)) if part)
    done = f"step {step} of {steps}" if steps else f"{share:.0%} done"
    left = f"{left_s:.0f} s left" if left_s is not None else ""
    return ", ".join(part for part in (done, left, queue_words(status)) if part)


def error_words(error: BaseException) -> str:
    """One line for the panel. A LabError says it all itself; anything else is named as what it is: a bug."""
    if isinstance(error, LabError):
        return str(error)
    if isinstance(error, NotImplementedError):
        return f"not written yet: {error or 'a function of the lab'}"
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text[:300]} (a bug in mlsyslab: re-run this cell, and please report it)"
