"""What the lessons show: tables with units, figures with their words. A cell stays one line, and reads as text too.

from mlsyslab.teach import lesson
lesson.machine()                    what the labs run on here
lesson.compare(prediction, run)     predicted beside measured
lesson.side_by_side({"a": run_a, "b": run_b})
lesson.per_rank(run, {"own work": ["own_s"], "wait": ["sync_s"]})
lesson.sent({"a": run_a})           the collectives of a step
lesson.checked(verdict)             the checks that were made, in their order
lesson.show(steptime.plot(run))
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Any

from mlsyslab import doctor
from mlsyslab.contract import Diagnosis, Evidence, Prediction, Range, Rule, format_value
from mlsyslab.teach.panel.picture import png
from mlsyslab.teach.panel.result import Result
from mlsyslab.teach.panel.words import COLUMNS, NOT_YET, Quantity, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mlsyslab.runs import Run

TEXT_WIDTH = 38
SHORT = 12  # characters of a cell that is never broken
# What each figure of the probe sets a floor under, in the words of the labs.
BOUNDS = {
    "matmul, 1 thread": "compute: forward and backward take at least their FLOP divided by it",
    "memory copy": "optimizer and collation: bytes moved divided by it",
    "all-reduce, 2 ranks": "communication: gradient bytes divided by it, where backward hides nothing",
    "all-reduce, 4 bytes": "communication of many small tensors: this once for every message",
    "JPEG decode": "input: batch × this ÷ loader workers, while there are cores for them",
    "disk read": "input: bytes of a batch divided by it, when the files are not in memory",
    "Python loop": "host: everything between the phases that is plain Python",
    "GPU matmul": "compute on the GPU: FLOP divided by it",
    "GPU memory copy": "elementwise work and optimizer on the GPU",
    "host to GPU, pinned": "copying a batch from page-locked memory",
    "host to GPU, pageable": "copying a batch from ordinary memory",
    "kernel launch": "many small kernels: number of kernels × this",
}
MACHINE_ROWS = ("Python", "torch", "GPU", "cores", "memory", "/dev/shm", "backends", "load", "steptime")
# Means over a run's telemetry that a lab's verdict does not need, but a reader looks for.
COUNTERS = (("CPU time stolen by the hypervisor", "frac", "steal_frac"),)


@dataclass(frozen=True)
class Table:
    """Rows of text below a header: HTML in a notebook, aligned text elsewhere."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    def _repr_html_(self) -> str:
        left = 'style="text-align:left;vertical-align:top"'
        whole = left.replace("top", "top;white-space:nowrap")  # a number keeps its unit
        head = "".join(f'<th scope="col" {left}>{escape(name)}</th>' for name in self.columns)
        body = "".join(
            f'<tr><th scope="row" {left}>{escape(first)}</th>'
            + "".join(f"<td {whole if len(cell) <= SHORT else left}>{escape(cell)}</td>" for cell in rest)
            + "</tr>"
            for first, *rest in self.rows
        )
        caption = f'<caption style="text-align:left">{escape(self.caption)}</caption>' if self.caption else ""
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def __repr__(self) -> str:
        cut = [
            [textwrap.wrap(cell, TEXT_WIDTH) or [""] for cell in row] for row in (self.columns, *self.rows)
        ]
        widths = [max(len(line) for row in cut for line in row[i]) for i in range(len(self.columns))]
        lines = [self.caption] if self.caption else []
        for row in cut:
            for at in range(max(map(len, row))):
                cells = (cell[at] if at < len(cell) else "" for cell in row)
                lines.append("  ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)).rstrip())
        return "\n".join(lines)


def show(figure: Figure) -> Result:
    """A lab's figure as a picture that a saved notebook keeps, with the figure's own words beside it."""
    words = str(getattr(figure, "description", "")) or "a figure without a description"
    return Result(words, png(figure), words)


def machine() -> Table:
    """What the labs will run on here: the doctor's rows, without paths."""
    rows = [(row.name, row.value, row.remedy) for row in doctor.check() if row.name in MACHINE_ROWS]
    return Table(("this machine", "found", "remedy, where something is wrong"), rows)


def probe_figures() -> Table:
    """The machine probe: each figure with its unit and spread, and what it is a bound on.

    Measured now where no figures are kept (some 10 s). A row that fails says why.
    """
    checks, _ = doctor.probe_checks(refresh=False)
    rows = [(row.name, row.value, BOUNDS.get(row.name, row.remedy)) for row in checks]
    return Table(("probe", "measured here", "sets a floor under"), rows)


def compare(prediction: Prediction, run: Run, yours: Mapping[str, float] | None = None) -> Table:
    """Predicted, your own, and measured (or recorded), for everything that was predicted and measured."""
    measured, mine = run.summary(), yours or {}
    rows = [
        Row(quantity=_quantity(key, run.lab), predicted=value, yours=mine.get(key), measured=measured[key])
        for key, value in prediction.values.items()
        if key in measured
    ]
    columns = [run.origin if name == "measured" else name for name in COLUMNS]
    return Table(columns, [row.cells() for row in rows], _note(run))


def _quantity(key: str, lab: str) -> Quantity:
    """As in the panel, and a share says that it is one: `data_s` and `data_frac` would else share a label."""
    named = Quantity.named(key)
    # serving: of requests, of time, of the saturation
    share = {"serving": "share", "scaleup": "share of the test set"}.get(lab, "share of the step")
    return replace(named, label=f"{named.label}, {share}") if key.endswith("_frac") else named


def _note(run: Run) -> str:
    return "compute was paced, like an accelerator" if getattr(run.config, "paced", False) else ""


def side_by_side(runs: Mapping[str, Run], lab: Any) -> Table:
    """The evidence of several runs, a column each; of a lab whose verdict stops early, all that it could have asked. `–`: no
    sensor on this machine."""
    figures = getattr(lab, "chart", lambda run: lab.diagnose(run).evidence)
    evidence = {name: {e.name: e for e in (*figures(run), *_counters(run))} for name, run in runs.items()}
    names = list(dict.fromkeys(name for found in evidence.values() for name in found))
    rows = [(name, *(_shown(found.get(name)) for found in evidence.values())) for name in names]
    origins = sorted({run.origin for run in runs.values()})
    return Table((f"evidence ({', '.join(origins)})", *runs), rows)


def _counters(run: Run) -> list[Evidence]:
    samples = run.telemetry
    means = {
        name: float(samples[name].mean()) for name in samples if samples[name].dtype.kind in "if"
    }  # an absent sensor is a column of None, which is no number
    return [Evidence(name=name, value=means.get(column), unit=unit) for name, unit, column in COUNTERS]


def _shown(item: Any) -> str:
    return NOT_YET if item is None or item.value is None else format_value(item.value, item.unit)


def per_rank(run: Run, columns: Mapping[str, Sequence[str]]) -> Table:
    """Mean time of each rank over its steady steps; a column is the sum of the fields of a record that it names."""
    records = run.records
    steady = records[~records["warmup"].astype(bool)]
    sums = {
        name: steady[list(fields)].sum(axis=1).groupby(steady["rank"]).mean()
        for name, fields in columns.items()
    }
    rows = [
        (f"rank {rank}", *(format_value(float(means[rank]), "s") for means in sums.values()))
        for rank in sorted(steady["rank"].unique())
    ]
    return Table((f"mean steady step ({run.origin})", *columns), rows, _note(run))


def sent(runs: Mapping[str, Run], rank: int = 0) -> Table:
    """The collectives of one step of a rank, as they were counted: how many and how many bytes, a column for each run."""
    counted: dict[str, dict[str, str]] = {}
    for name, run in runs.items():
        notes = [n for n in run.notes if n.get("kind") == "traffic" and n["rank"] == rank]
        for row in notes[-1]["collectives"] if notes else ():
            what = f"{row['kind'].replace('_', '-')} ({row['axis']})"
            counted.setdefault(what, {})[name] = (
                f"{row['count']} × {row['bytes'] / row['count'] / 1e6:.2g} MB"
            )
    rows = [(what, *(of.get(name, NOT_YET) for name in runs)) for what, of in counted.items()]
    return Table((f"rank {rank}, one step (counted)", *runs), rows)


def checked(verdict: Diagnosis) -> Table:
    """Every check behind a verdict, in its order. `–`: no sensor on this machine."""
    rows = [
        (e.name, _shown(e), ("" if e.value is None else e.points_at) or NOT_YET, e.confused_with or NOT_YET)
        for e in verdict.evidence
    ]
    return Table(("check", "figure", "would point at", "is confused with"), rows)


def rules(lab: Any) -> Table:
    """A lab's rules: what each looks at, its look-alike, and the check that tells the two apart."""
    listed: Sequence[Rule[Any]] = lab.RULES
    rows = [(r.name, r.checks, r.confused_with, r.next_check) for r in listed]
    return Table(("rule", "looks at", "is confused with", "to tell them apart"), rows)


def futures(steps: Mapping[str, Range]) -> Table:
    """What-if seconds a step (predicted), each beside the share that it saves of the first row."""
    now = next(iter(steps.values())).expected
    show_range = Quantity.named("step_s").show_range
    rows = [(name, show_range(step), f"{1 - step.expected / now:.0%}") for name, step in steps.items()]
    return Table(("what if", "predicted step", "saves"), rows)
