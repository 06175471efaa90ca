"""The figures of the parallelism lab: what fills each rank's memory, a pipeline's schedule, plans side by side."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlsyslab.contract import LabError, Prediction, RunError
from mlsyslab.labs.parallelism.bars import PARTS, grouped, held_by_rank, predicted_parts, title_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from mlsyslab.labs.parallelism.plan import Plan
    from mlsyslab.runs import Run

FIGURE: Mapping[str, Any] = {"figsize": (9.6, 4.0), "dpi": 100, "facecolor": "white"}
INK = "#404040"
MOST_RANKS, MOST_PLANS = 8, 6
LABEL_FRAC = 0.07  # of the width; a narrower part has no number


def plot(run: Run, prediction: Prediction | None = None) -> Figure:
    """What each rank holds at its peak, by term (or held when memory was refused), the predicted ledger hollow beside it, the cap
    as a line. The figure has a `description` attribute for alt text."""
    del (
        prediction
    )  # the ledger itself is drawn beside each rank: it has the terms, the prediction only their sums
    return _draw(
        {f"rank {rank}": (held, predicted_parts(run, rank)) for rank, held in held_by_rank(run).items()},
        run,
        title_of(run),
    )


def ledger_plot(runs: Mapping[str, Run]) -> Figure:
    """The fullest rank of several runs by name, measured beside predicted."""
    bars = {}
    for name, run in runs.items():
        held = held_by_rank(run)
        rank = max(held, key=lambda r: sum(held[r].values()))
        bars[name] = (held[rank], predicted_parts(run, rank))
    peaks = {name: sum(measured.values()) / 1e6 for name, (measured, _) in bars.items()}
    least, most = min(peaks, key=lambda n: peaks[n]), max(peaks, key=lambda n: peaks[n])
    title = f"The fullest rank peaks at {peaks[most]:.0f} MB under {most} and at {peaks[least]:.0f} MB under {least}"
    return _draw(bars, None, title)


def _draw(
    bars: Mapping[str, tuple[Mapping[str, float], Mapping[str, float]]], run: Run | None, title: str
) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    shown = dict(list(bars.items())[:MOST_RANKS])
    figure = Figure(**FIGURE)
    axes = figure.add_axes((0.10, 0.21, 0.78, 0.62))
    cap = run.config.memory_cap_mb if run else 0.0
    widest = max(sum(parts.values()) for pair in shown.values() for parts in pair) / 1e6
    axes.set_xlim(0, 1.02 * max(widest, cap))
    for place, (measured, predicted) in enumerate(shown.values()):
        _bar(axes, place - 0.18, measured, solid=True)
        _bar(axes, place + 0.24, predicted, solid=False)
    axes.set_yticks(range(len(shown)), list(shown))
    axes.set_ylim(len(shown) - 0.45, -0.5)
    axes.set_xlabel("MB of tensors", color=INK)
    if cap:
        axes.axvline(cap, color="#D55E00", linewidth=1.5)
        axes.annotate(f"cap {cap:g}", (cap, 1.0), xycoords=("data", "axes fraction"), xytext=(-3, 3),
                      textcoords="offset points", ha="right", fontsize=9, color="#D55E00")  # fmt: skip
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    origin = "recorded" if run is not None and run.origin == "recorded" else "measured"
    handles = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=name)
        for name, (colour, hatch) in PARTS.items()
    ]
    handles.append(Patch(facecolor="white", edgecolor=INK, linestyle="--", label="predicted"))
    figure.legend(
        handles=handles, loc="lower center", ncols=len(handles), fontsize=9, frameon=False, title=None
    )
    figure.suptitle(
        _wrapped(f"{title} ({origin})"), x=0.012, y=0.98, ha="left", fontsize=11, fontweight="bold"
    )
    lines = [
        f"{name}: {sum(m.values()) / 1e6:.0f} MB {origin} ({', '.join(f'{part} {size / 1e6:.0f}' for part, size in m.items() if size)}), "
        f"{sum(p.values()) / 1e6:.0f} predicted"
        for name, (m, p) in shown.items()
    ]
    figure.description = f"{title}. {'; '.join(lines)}."  # type: ignore[attr-defined]  # read by lesson.show
    return figure


def _bar(axes: Axes, at: float, parts: Mapping[str, float], *, solid: bool) -> None:
    left, width = 0.0, axes.get_xlim()[1]
    for name, size in parts.items():
        colour, hatch = PARTS[name]
        value = size / 1e6
        if value <= 0:
            continue
        if solid:
            axes.barh(at, value, 0.40, left, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5)
            if value > LABEL_FRAC * width:
                axes.text(left + value / 2, at, f"{value:.0f}", ha="center", va="center", fontsize=8.5, color="black",
                          bbox={"facecolor": "white", "alpha": 0.75, "pad": 1, "linewidth": 0})  # fmt: skip
        else:
            axes.barh(at, value, 0.26, left, color="white", edgecolor=colour, linestyle="--", linewidth=1.2)
        left += value
    axes.text(left + 0.008 * width, at, f"{left:.0f}", va="center", fontsize=8.5, color=INK)


def _wrapped(title: str) -> str:
    return "\n".join(textwrap.wrap(title, 104, max_lines=2, placeholder=" ..."))


# ---- the pipeline


def pipeline_plot(run: Run) -> Figure:
    """Each stage's microbatches as they were computed in the last timed step, forward and backward. Raises RunError for a run
    without a pipeline."""
    from matplotlib.figure import Figure

    ops = [note for note in run.notes if note.get("kind") == "op"]
    last = max((op["step"] for op in ops), default=None)
    ops = [op for op in ops if op["step"] == last]
    if not ops:
        raise RunError("this run has no pipeline to draw; choose strategy='pp' and more steps than warmup")
    figure = Figure(**FIGURE)
    axes = figure.add_axes((0.10, 0.20, 0.86, 0.60))
    begin = min(op["begin_s"] for op in ops)
    end = max(op["end_s"] for op in ops) - begin
    stages = sorted({op["stage"] for op in ops})
    busy = {stage: sum(op["end_s"] - op["begin_s"] for op in ops if op["stage"] == stage) for stage in stages}
    for op in ops:
        left, width = (op["begin_s"] - begin) * 1e3, (op["end_s"] - op["begin_s"]) * 1e3
        colour, hatch = ("#56B4E9", "") if op["op"] == "F" else ("#E69F00", "//")
        axes.barh(op["stage"], width, 0.7, left, color=colour, hatch=hatch, edgecolor="white")
        if width > 0.02 * end * 1e3:
            axes.text(left + width / 2, op["stage"], f"{op['op']}{op['microbatch']}", ha="center", va="center", fontsize=8,
                      bbox={"facecolor": "white", "alpha": 0.75, "pad": 0.8, "linewidth": 0})  # fmt: skip
    axes.set_yticks(stages, [f"stage {stage}\n({1 - busy[stage] / end:.0%} idle)" for stage in stages])
    axes.set_ylim(len(stages) - 0.5, -0.5)
    axes.set_xlabel(
        "ms since the step's first microbatch; F forward, B backward (hatched), with the microbatch's number",
        color=INK,
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    idle = 1 - sum(busy.values()) / (len(stages) * end)
    m = run.config.microbatches
    title = f"{run.config.schedule}, {m} microbatches over {len(stages)} stages: a stage is idle {idle:.0%} of {end * 1e3:.0f} ms"
    shared = "" if run.config.ranks <= 1 else "; ranks that share cores lengthen each other's boxes"
    figure.suptitle(
        _wrapped(f"{title} ({run.origin}{shared})"),
        x=0.012,
        y=0.98,
        ha="left",
        fontsize=11,
        fontweight="bold",
    )
    figure.description = f"{title}. " + "; ".join(  # type: ignore[attr-defined]  # read by lesson.show
        f"stage {stage}: "
        + " ".join(
            f"{op['op']}{op['microbatch']}"
            for op in sorted(ops, key=lambda o: o["begin_s"])
            if op["stage"] == stage
        )
        for stage in stages
    )
    return figure


# ---- plans


def plans_plot(plans: Sequence[Plan]) -> Figure:
    """Memory of a device under each plan, by term, best first; beside it what is sent and the step's range. All predicted."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    shown = list(plans)[:MOST_PLANS]
    if not shown:
        raise LabError("there is no plan to draw; call plan(model, cluster) first")
    figure = Figure(**FIGURE)
    axes = figure.add_axes((0.02, 0.20, 0.66, 0.62))
    room = shown[0].usable_bytes / 1e9
    axes.set_xlim(0, 1.03 * room)
    for place, one in enumerate(shown):
        left = 0.0
        for name, size in grouped(one.ledger).items():
            axes.barh(
                place + 0.22,
                size / 1e9,
                0.36,
                left,
                color="white",
                hatch=PARTS[name][1],
                edgecolor=PARTS[name][0],
                linewidth=1.2,
                linestyle="--",
            )
            left += size / 1e9
        axes.text(
            0,
            place - 0.12,
            f"{one.name}: {left:.0f} GB",
            fontsize=9,
            va="center",
            fontweight="bold" if place == 0 else "normal",
        )
        step = one.step_s
        axes.text(1.05 * room, place + 0.1, f"sends {one.comm_bytes / 1e9:.0f} GB\nstep {step.low:.2g} to {step.high:.2g} s",
                  fontsize=9, va="center", clip_on=False)  # fmt: skip
    axes.axvline(room, color="#D55E00", linewidth=1.5)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_yticks([])
    axes.set_xlabel(f"GB of a device's tensors at the peak; {room:.0f} are usable (line)", color=INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    handles = [
        Patch(facecolor="white", hatch=hatch, edgecolor=colour, linestyle="--", label=name)
        for name, (colour, hatch) in PARTS.items()
    ]
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), fontsize=9, frameon=False)
    title = f"The simplest plan that fits: {shown[0].name} (all predicted)"
    figure.suptitle(_wrapped(title), x=0.012, y=0.98, ha="left", fontsize=11, fontweight="bold")
    figure.description = f"{title}. " + "; ".join(one.says for one in shown)  # type: ignore[attr-defined]  # read by lesson.show
    return figure


# ---- live


class LedgerBars:
    """The panel's picture: what each rank holds, as its steps are counted."""

    drawing_frac = 0.1

    def __init__(self) -> None:
        from matplotlib.figure import Figure

        self.figure = Figure(**FIGURE)
        self._axes = self.figure.add_axes((0.10, 0.17, 0.86, 0.70))
        self._held: dict[int, dict[str, float]] = {}
        self._step = -1

    @property
    def alt(self) -> str:
        """The newest figures of each rank."""
        said = [
            f"rank {rank} peaks at {held['peak_bytes'] / 1e6:.0f} MB"
            for rank, held in sorted(self._held.items())
        ]
        return f"Memory of each rank: {', '.join(said) or 'nothing counted yet'}"

    def update(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add step records; those that were not counted only move the step on."""
        for row in records:
            self._step = max(self._step, int(row.get("step", -1)))
            if row.get("peak_bytes"):
                self._held[int(row["rank"])] = {
                    name: float(value)
                    for name, value in row.items()
                    if name.endswith("_bytes") and value is not None
                }
        self._redraw()

    def _redraw(self) -> None:
        axes = self._axes
        axes.clear()
        for rank, held in sorted(self._held.items())[:MOST_RANKS]:
            left = 0.0
            parts = {"parameters": held["params_bytes"], "gradients": held["grads_bytes"], "optimizer": held["optimizer_bytes"],
                     "activations": held["activations_bytes"]}  # fmt: skip
            for name, size in parts.items():
                axes.barh(
                    rank,
                    size / 1e6,
                    0.6,
                    left,
                    color=PARTS[name][0],
                    hatch=PARTS[name][1],
                    edgecolor="white",
                    label=name if rank == 0 else None,
                )
                left += size / 1e6
            axes.plot(
                [held["peak_bytes"] / 1e6] * 2,
                [rank - 0.35, rank + 0.35],
                color="#D55E00",
                linewidth=2,
                label="peak" if rank == 0 else None,
            )
        ranks = sorted(self._held)[:MOST_RANKS]
        axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
        axes.invert_yaxis()
        axes.set_xlabel(
            "MB of tensors (peak: the most at one instant, in which not all parts are at their fullest)",
            color=INK,
        )
        axes.set_title(
            f"What each rank holds, step {self._step}" if self._step >= 0 else "Waiting for the first step",
            loc="left",
            fontsize=11,
        )
        if self._held:
            axes.legend(loc="upper right", fontsize=8, ncols=5, frameon=True)


def live_plot() -> LedgerBars:
    """The panel's live picture of this lab."""
    return LedgerBars()
