"""The figure of the straggler lab: the step takes the same time on every rank, own work and wait do not."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlsyslab.contract import Diagnosis, LabError, Prediction, Range
from mlsyslab.labs.straggler.blame import Array, Rounds, rounds
from mlsyslab.labs.straggler.caption import (
    alike,
    describe,
    in_words,
    named_ranks,
    sentence,
    steady_rounds,
    verdict_of,
)
from mlsyslab.phases import STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from mlsyslab.runs import Run

OWN = tuple(name for name in STYLE if name != "sync_s")
WAIT = "sync_s"
CULPRIT, OTHERS, INK = "#D55E00", "#8C8C8C", "#404040"
MOST_LINES = 8  # other ranks drawn as lines of their own; more of them are a band
MOST_LABELS = 16  # lanes with a name; of more, every eighth has one
MOST_ENDS = 3  # named ranks whose lines have a name each
MOST_NUMBERS = 8  # lanes with numbers
MOST_DIGITS, MOST_FIRSTS = (
    10,
    32,
)  # ranks and steps up to which the slowest rank of a step is written as a number
MARKERS = ("o", "s", "^", "D")
FIGURE: Mapping[str, Any] = {"figsize": (9.6, 4.0), "dpi": 100, "facecolor": "white"}


def plot(run: Run, prediction: Prediction | None = None, *, verdict: Diagnosis | str | None = None) -> Figure:
    """Left: a lane for each rank, own work by phase and then wait, the mean of its steady steps; all end alike. Right: own
    work step by step, the named ranks in colour. The title is the verdict (`verdict`, or what `diagnose` says); dashed and
    hollow is predicted. The figure has a `description` attribute for alt text."""
    from matplotlib.figure import Figure

    found = verdict or verdict_of(run)
    figure = Figure(**FIGURE)
    lanes, lines = figure.subplots(1, 2, width_ratios=(1.45, 1))
    figure.subplots_adjust(left=0.085, right=0.905, top=0.76, bottom=0.235, wspace=0.16)
    try:
        steps = steady_rounds(run)
    except LabError as error:
        return _without_lanes(figure, str(error))
    named = named_ranks(found, steps)
    _draw_lanes(lanes, steps, named, prediction.values.get("step_s") if prediction else None)
    _draw_lines(lines, run, steps, named, rotates=isinstance(found, Diagnosis) and found.cause == "imbalance")
    link = next((note["link"] for note in run.notes if note.get("link")), "")
    marks = [
        name
        for name, on in (
            ("paced accelerator", run.config.paced),
            (f"slow link: {link}", link),
            ("recorded, not measured here", run.origin == "recorded"),
        )
        if on
    ]
    title = sentence(found, steps)
    head = textwrap.wrap(title.replace(" ms", "\u00a0ms"), 98, max_lines=2, placeholder=" ...")
    figure.suptitle(
        "\n".join(head) + (f"\n({'; '.join(marks)})" if marks else ""),
        x=0.012,
        y=0.985,
        ha="left",
        fontsize=11,
        fontweight="bold",
    )
    _legend(figure)
    vars(figure)["description"] = f"{title}. {describe(steps, named)}"  # alt text travels with the figure
    return figure


def _without_lanes(figure: Figure, why: str) -> Figure:
    for axes in figure.axes:
        axes.set_axis_off()
    figure.suptitle("\n".join(textwrap.wrap(why, 95)), x=0.012, y=0.6, ha="left", fontsize=11)
    vars(figure)["description"] = why
    return figure


# ---- the lanes
def _lane_ticks(axes: Any, ranks: Sequence[int], named: Sequence[int] = ()) -> None:
    """Names at the lanes: all of few; of many every eighth, and the named ones, which the others make room for."""
    room = math.ceil(len(ranks) / 16)
    if len(ranks) <= MOST_LABELS:
        groups = [[rank] for rank in ranks]
    else:
        every = max(8, len(ranks) // 8)
        groups = [[r] for r in ranks[::every] if all(abs(r - n) >= room for n in named)]
        for rank in sorted(named):
            near = [g for g in groups if g[0] in named and rank - g[-1] < room]
            if near:
                near[0].append(rank)
            else:
                groups.append([rank])
    axes.set_yticks(
        [statistics.fmean(ranks.index(rank) for rank in group) for group in groups],
        [_lane_name(group) for group in groups],
    )
    for label, group in zip(axes.get_yticklabels(), groups, strict=True):
        if group[0] in named:
            label.set(color=CULPRIT, fontweight="bold")


def _lane_name(group: Sequence[int]) -> str:
    if len(group) == 1:
        return f"rank {group[0]}"
    return f"{group[0]}, {group[1]}" if len(group) == 2 else f"{group[0]} to {group[-1]}"


def _look(name: str) -> dict[str, Any]:
    """Work is filled; wait is an outline with a hatch, since nothing is done in it."""
    _, colour, hatch = STYLE[name]
    face, edge = ("white", colour) if name == WAIT else (colour, "white")
    return {"facecolor": face, "edgecolor": edge, "hatch": hatch or None}


def _draw_lanes(axes: Axes, steps: Rounds, named: Sequence[int], predicted: Range | None) -> None:
    import numpy as np

    few, count = len(steps.ranks) <= MOST_LABELS, len(steps.ranks)
    at, left = np.arange(count), np.zeros(count)
    # Of many lanes the named ones are drawn last and thick enough to be seen.
    order = np.argsort([rank in named for rank in steps.ranks], kind="stable")
    height = np.where([rank in named for rank in steps.ranks], 0.8 if few else count / 28, 0.8 if few else 1)
    means = {name: steps.phases[name].mean(0) * 1e3 for name in OWN} | {WAIT: steps.wait.mean(0) * 1e3}
    for name, width in means.items():
        axes.barh(
            at[order],
            width[order],
            height[order],
            left=left[order],
            linewidth=0.4 if few else 0,
            **_look(name),
        )
        left = left + width
    end = float(left.mean())
    axes.axvline(end, color="black", linewidth=1.2)
    box = {"fc": "white", "ec": "none", "pad": 0.9}
    for y, (full, wait) in enumerate(zip(left, means[WAIT], strict=True) if count <= MOST_NUMBERS else ()):
        own = full - wait
        axes.text(own - 0.008 * end, y, f"{own:.0f}", ha="right", va="center", fontsize=8.5, bbox=box)
        if wait > 0.12 * end:
            axes.text(own + wait / 2, y, f"{wait:.0f}", ha="center", va="center", fontsize=8.5, bbox=box)
    bottom, most = count - 0.4, end
    if predicted:
        bottom, most = _draw_predicted(axes, count, predicted), max(end, predicted.high * 1e3)
    axes.set(xlim=(0, 1.04 * most), ylim=(bottom, -0.6), xlabel="milliseconds, mean of the steady steps")
    _lane_ticks(axes, steps.ranks, named)
    axes.set_title(f"own work, then wait: every lane ends at {alike(left)} ms", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_predicted(axes: Axes, count: int, predicted: Range) -> float:
    """A hollow lane with the range below the measured ones; gives the place where it ends."""
    low, expected, high = (value * 1e3 for value in predicted)
    height = max(0.8, count / 14)
    at = count - 0.3 + height / 2
    axes.barh(at, expected, height, fill=False, edgecolor="black", linestyle="--", linewidth=1)
    axes.errorbar(expected, at, xerr=[[expected - low], [high - expected]], color="black", capsize=3)
    axes.text(
        0.012 * expected,
        at,
        f"predicted step {expected:.0f} ms ({low:.0f} to {high:.0f})",
        va="center",
        fontsize=8.5,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},  # the range's bar may pass behind it
    )
    return at + height / 2 + 0.02 * count


# ---- the lines
def _draw_lines(axes: Axes, run: Run, steps: Rounds, named: Sequence[int], *, rotates: bool) -> None:
    """Own work of each rank in each step, warm-up included; scaled by what is steady."""
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    whole = rounds(run.records)
    own_ms, columns = whole.own * 1e3, [whole.ranks.index(rank) for rank in named]
    others = [at for at in range(len(whole.ranks)) if at not in columns]
    band = len(others) > MOST_LINES
    if band:
        low, high = np.quantile(own_ms[:, others], (0.05, 0.95), axis=1)
        axes.fill_between(whole.steps, low, high, color=OTHERS, alpha=0.45, linewidth=0)
    for at in [] if band else others:
        axes.plot(whole.steps, own_ms[:, at], color=OTHERS, linewidth=1)
    for at, marker in zip(columns, MARKERS * len(columns), strict=False):
        axes.plot(whole.steps, own_ms[:, at], color=CULPRIT, linewidth=1.6, marker=marker, markersize=3.5)
    ends = [(float(own_ms[-3:, at].mean()), f"rank {whole.ranks[at]}", CULPRIT) for at in columns]
    if len(ends) > MOST_ENDS:
        ends = [(statistics.fmean(end for end, _, _ in ends), f"{len(ends)} ranks", CULPRIT)]
    labels = ends
    if others:
        word = "the others" if named else "all ranks" if band else "each rank"
        labels.append((float(np.median(own_ms[-3:, others])), word + ("\n(5-95 %)" if band else ""), INK))
    if rotates:
        _draw_firsts(axes, whole, own_ms)
        labels.append((float(own_ms[-3:].max(1).mean()), "slowest", CULPRIT))
    top = 1.18 * 1e3 * float(steps.own.max())
    axes.set(ylim=(0, top), xlim=(whole.steps[0] - 0.6, whole.steps[-1] + 0.6), xlabel="step")
    if steps.steps[0] > whole.steps[0]:
        axes.axvspan(whole.steps[0] - 0.6, steps.steps[0] - 1.5, color="#EEEEEE", zorder=0)
        axes.set_xlabel("step (grey: warm-up, not counted)")
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    _label_ends(axes, labels, top)
    axes.set_title("own work in each step, ms", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_firsts(axes: Axes, whole: Rounds, own_ms: Array) -> None:
    """At each step the rank that works most, by its number where numbers fit."""
    if len(whole.ranks) > MOST_DIGITS or len(whole.steps) > MOST_FIRSTS:
        axes.plot(whole.steps, own_ms.max(1), "o", color=CULPRIT, markerfacecolor="white", markersize=4)
        return
    box = {"boxstyle": "circle,pad=0.12", "fc": "white", "ec": CULPRIT, "lw": 0.7}
    for step, at, value in zip(whole.steps, own_ms.argmax(1), own_ms.max(1), strict=True):
        number = str(whole.ranks[at])
        axes.text(
            step, value, number, ha="center", va="center", fontsize=8, color=CULPRIT, bbox=box, clip_on=True
        )


def _label_ends(axes: Axes, labels: Sequence[tuple[float, str, str]], top: float) -> None:
    """The names right of the lines' ends, moved apart where they would cover each other."""
    place = -math.inf
    for value, text, colour in sorted(labels):
        place = max(value, place + 0.075 * top * (1 + text.count("\n")))
        axes.annotate(text, (1, min(place, top)), xycoords=("axes fraction", "data"), xytext=(5, 0), textcoords="offset points",
                      va="center", color=colour, fontsize=9, fontweight="bold" if colour == CULPRIT else None)  # fmt: skip


def _legend(figure: Figure) -> None:
    """The phases with their colour and hatch, in the order of the lanes."""
    from matplotlib.patches import Patch

    words = {WAIT: "wait for the others"}
    handles = [Patch(**_look(name), label=words.get(name, STYLE[name][0])) for name in (*OWN, WAIT)]
    figure.legend(handles=handles, loc="lower center", ncols=7, frameon=False, fontsize=8.5, columnspacing=1.2, handlelength=1.6)  # fmt: skip


class LivePlot:
    """The lanes while a run goes on: each rank's own work and wait, mean of its last steps. `alt` says it in words."""

    STEPS = 8

    def __init__(self) -> None:
        from matplotlib.collections import PolyCollection
        from matplotlib.figure import Figure

        self.figure = Figure(**FIGURE)
        self.axes = self.figure.add_axes((0.085, 0.235, 0.78, 0.64))
        self.axes.spines[["top", "right"]].set_visible(False)
        self.axes.set_xlabel("milliseconds: own work, then wait for the others")
        self._bars = {name: PolyCollection([], linewidth=0.4, **_look(name)) for name in (*OWN, WAIT)}
        for bars in self._bars.values():
            self.axes.add_collection(bars, autolim=False)
        self._end = self.axes.axvline(0, color="black", linewidth=1.2)
        self._figures: list[Any] = []
        self._ranks: list[int] = []
        self._rows: dict[int, list[dict[str, Any]]] = {}
        self._world: Any = None
        _legend(self.figure)
        self.alt = "Nothing recorded yet"

    def update(self, records: list[dict[str, Any]]) -> None:
        """Take new step records (as `Run.poll` gives them) and move the bars. Warm-up counts until there is better."""
        for row in records:
            if row["world"] != self._world:
                self._world, self._rows = row["world"], {}  # a job that was resumed with other ranks
            kept = self._rows.setdefault(int(row["rank"]), [])
            if kept and kept[-1]["warmup"] and not row["warmup"]:
                kept.clear()
            kept.append(row)
            del kept[: -self.STEPS]
        if self._rows:
            self._move()

    def _move(self) -> None:
        import numpy as np

        if sorted(self._rows) != self._ranks:
            self._relabel()
        for bars in self._bars.values():
            bars.set_linewidth(0.4 if len(self._ranks) <= MOST_LABELS else 0)
        half, at = 0.4 if len(self._ranks) <= MOST_LABELS else 0.5, np.arange(len(self._ranks))
        base = np.zeros(len(self._ranks))
        for name, bars in self._bars.items():
            end = base + [np.mean([(row[name] or 0) * 1e3 for row in self._rows[r]]) for r in self._ranks]
            corners = ((base, at - half), (end, at - half), (end, at + half), (base, at + half))
            bars.set_verts(list(np.stack([np.stack(corner, 1) for corner in corners], 1)))
            own, base = base, end  # wait comes last
        self._scale(float(base.max()))
        self._end.set_xdata([base.mean()] * 2)
        for text, mine, wait in zip(self._figures, own, base - own, strict=False):
            text.set_text(f"{mine:4.0f} {wait:5.0f}")
        self._say(alike(base), own / 1e3, (base - own) / 1e3)

    def _scale(self, most: float) -> None:
        """Leave the axis as it is while the lanes fill a good part of it, so that nothing jumps."""
        limit = self.axes.get_xlim()[1]
        if not 0.6 * limit < most < limit:
            self.axes.set_xlim(0, 1.2 * most or 1)

    def _relabel(self) -> None:
        self._ranks, few = sorted(self._rows), len(self._rows) <= MOST_LABELS
        _lane_ticks(self.axes, self._ranks)
        self.axes.set_ylim(len(self._ranks) - 0.4, -0.6)
        for text in self._figures:
            text.remove()
        place: dict[str, Any] = {
            "transform": self.axes.get_yaxis_transform(),
            "family": "monospace",
            "fontsize": 9,
            "va": "center",
        }
        head = (
            [self.axes.text(1.012, 1.03, " own  wait", **{**place, "transform": self.axes.transAxes})]
            if few
            else []
        )
        self._figures = [
            self.axes.text(1.012, y, "", **place) for y in range(len(self._ranks) if few else 0)
        ] + head

    def _say(self, step_ms: str, own_s: Array, wait_s: Array) -> None:
        last = max((rows[-1] for rows in self._rows.values()), key=lambda row: row["step"])
        count = max(map(len, self._rows.values()))
        what = "warm-up" if last["warmup"] else f"mean of the last {count} steps" if count > 1 else "one step"
        title = f"step {last['step']}: a step takes {step_ms} ms on every rank ({what})"
        self.axes.set_title(title, loc="left", fontsize=10)
        self.alt = f"{title[0].upper() + title[1:]}: {in_words(self._ranks, own_s, wait_s)}"


def live_plot() -> LivePlot:
    """A new live picture for the panel."""
    return LivePlot()
