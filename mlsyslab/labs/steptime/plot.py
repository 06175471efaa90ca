"""The figure to show in an interview: a step's time, rank by rank and step by step, predicted beside measured."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from mlsyslab.contract import LabError, Prediction
from mlsyslab.labs.steptime.breakdown import breakdown, per_rank
from mlsyslab.labs.steptime.diagnose import diagnose
from mlsyslab.phases import STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from mlsyslab.runs import Run


def title_of(run: Run) -> str:
    """The verdict as a sentence, or why there is none."""
    try:
        verdict = diagnose(run)
        found = breakdown(run.records)
    except LabError as error:
        return str(error)
    if verdict.cause == "unknown":
        return f"No verdict: {verdict.reason}"
    share = {
        "input": max(found.frac("data_s", "h2d_s"), found.data_worst_s / found.step_s),
        "communication": found.frac("sync_s"),
        "host": found.frac("other_s"),
    }.get(verdict.cause, found.compute_s / found.step_s)
    name = {
        "input": "waiting for data",
        "communication": "exposed communication",
        "host": "Python between phases",
    }.get(verdict.cause, "compute")
    head = {
        "healthy": "Healthy",
        "compute": "Compute-bound",
        "input": "Input-bound",
        "communication": "Communication-bound",
        "host": "Host-bound",
    }[verdict.cause]
    where = f" on {verdict.where}" if verdict.where and verdict.where != "every rank" else ""
    return f"{head}: {found.step_s * 1e3:.0f} ms a step, {share:.0%} of it {name}{where}"


def plot(run: Run, prediction: Prediction | None = None) -> Figure:
    """Left: every step of every rank, phases stacked, warm-up pale. Right: the mean steady step, predicted (hollow)
    beside measured (solid). The title is the verdict. The figure has a `description` attribute for alt text."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.0), dpi=100, facecolor="white")
    lanes, means = figure.subplots(1, 2, width_ratios=(2.1, 1))
    figure.subplots_adjust(left=0.07, right=0.985, top=0.78, bottom=0.24, wspace=0.16)
    records = run.records
    records = records[records["world"] == records["world"].max()]
    _draw_lanes(lanes, records)
    _draw_means(means, run, prediction)
    marks = [
        name
        for name, on in (
            ("paced compute", run.config.paced),
            ("recorded, not measured here", run.origin == "recorded"),
        )
        if on
    ]
    lines = textwrap.wrap(title_of(run), 95, max_lines=2, placeholder=" ...")
    figure.suptitle(
        "\n".join(lines) + (f"\n({'; '.join(marks)})" if marks else ""),
        x=0.07,
        ha="left",
        fontsize=11.5,
        fontweight="bold",
    )
    _legend(figure, 8.5)
    vars(figure)["description"] = describe(run)  # alt text travels with the figure
    return figure


def _draw_lanes(axes: Axes, records: Any) -> None:
    import numpy as np

    ranks, steps = sorted(records["rank"].unique()), sorted(records["step"].unique())
    width = 0.86 / len(ranks)
    for lane, rank in enumerate(ranks):
        rows = records[records["rank"] == rank].set_index("step").reindex(steps).fillna({"warmup": False})
        at = np.arange(len(steps)) + (lane - (len(ranks) - 1) / 2) * width
        pale = np.where(rows["warmup"].astype(bool), 0.35, 1.0)
        bottom = np.zeros(len(steps))
        for name, (label, colour, hatch) in STYLE.items():
            heights = rows[name].fillna(0).to_numpy() * 1e3
            bars = axes.bar(at, heights, width * 0.94, bottom=bottom, color=colour, hatch=hatch, edgecolor="white", linewidth=0.3,
                            label=label if lane == 0 else None)  # fmt: skip
            for bar, alpha in zip(bars, pale, strict=True):
                bar.set_alpha(alpha)
            bottom += heights
    axes.set(
        xlabel="step"
        + (
            f" (a bar for each of ranks 0 to {ranks[-1]})"
            if len(ranks) > 1
            else " (pale: warm-up, not counted)"
        ),
        ylabel="milliseconds",
    )
    axes.set_xticks(
        range(0, len(steps), max(1, len(steps) // 8)), [str(s) for s in steps[:: max(1, len(steps) // 8)]]
    )
    axes.set_title("every step", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_means(axes: Axes, run: Run, prediction: Prediction | None) -> None:
    try:
        means = per_rank(run.records)
    except LabError as error:
        axes.text(
            0.5, 0.5, str(error), wrap=True, ha="center", va="center", transform=axes.transAxes, fontsize=9
        )
        axes.set_axis_off()
        return
    import numpy as np

    names = [str(rank) for rank in means.index]
    bottom = np.zeros(len(means))
    for name, (_, colour, hatch) in STYLE.items():
        heights = means[name].to_numpy() * 1e3
        axes.bar(
            names, heights, 0.7, bottom=bottom, color=colour, hatch=hatch, edgecolor="white", linewidth=0.3
        )
        for x, (height, base) in enumerate(zip(heights, bottom, strict=True)):
            if height > 0.07 * means["step_s"].max() * 1e3 and len(means) <= 4:
                axes.text(
                    x,
                    base + height / 2,
                    f"{height:.0f}",
                    ha="center",
                    va="center",
                    fontsize=8.5,
                    bbox={"fc": "white", "ec": "none", "pad": 0.8},
                )
        bottom += heights
    if prediction:
        _draw_predicted(axes, prediction)
    axes.set_title("mean steady step, ms", loc="left", fontsize=10)
    axes.set_xlabel("rank" + (" (dashed: predicted)" if prediction else ""))
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: Figure, size: float) -> None:
    """The phases with their colour and hatch, whatever is pale in the picture."""
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=label)
        for label, colour, hatch in STYLE.values()
    ]
    figure.legend(
        handles=handles,
        loc="lower center",
        ncols=7,
        frameon=False,
        fontsize=size,
        columnspacing=1.2,
        handlelength=1.6,
    )


def _draw_predicted(axes: Axes, prediction: Prediction) -> None:
    """The prediction as a hollow stack (data wait below, as in the measured bars) with its range."""
    base, low, expected, high = 0.0, *(value * 1e3 for value in prediction.values["step_s"])
    for name, label in (("data_s", "data"), ("compute_s", "compute"), ("sync_s", "sync"), ("host_s", "host")):
        height = prediction.values[name].expected * 1e3
        bar = axes.bar(
            ["pred."],
            [height],
            0.7,
            bottom=base,
            fill=False,
            edgecolor="black",
            linestyle="--",
            linewidth=0.9,
        )[0]
        if height > 0.1 * axes.get_ylim()[1]:
            middle = bar.get_x() + bar.get_width() / 2
            axes.text(
                middle, base + height / 2, f"{label}\n{height:.0f}", ha="center", va="center", fontsize=8
            )
        base += height
    axes.errorbar(
        [bar.get_x() + bar.get_width() + 0.1],
        [expected],
        [[expected - low], [high - expected]],
        color="black",
        capsize=3,
    )


def describe(run: Run) -> str:
    """The figure in words, for people who do not see it."""
    try:
        found = breakdown(run.records)
    except LabError as error:
        return str(error)
    shares = ", ".join(
        f"{STYLE[name][0]} {value * 1e3:.0f} ms"
        for name, value in found.phases_s.items()
        if value > 0.01 * found.step_s
    )
    return f"{title_of(run)}. Mean steady step of {found.ranks} rank(s) over {found.steps} steps: {shares}."


class LivePlot:
    """The picture while a run goes on: the last steps of each rank, phases stacked. `alt` says it in words.

    One collection of bars a phase is kept and given new corners: half the cost of a patch for each bar.
    """

    STEPS = 24

    def __init__(self) -> None:
        from matplotlib.collections import PolyCollection
        from matplotlib.figure import Figure

        self.figure = Figure(figsize=(9.6, 4.0), dpi=100, facecolor="white")
        self.axes = self.figure.subplots()
        self.figure.subplots_adjust(left=0.07, right=0.985, top=0.90, bottom=0.24)
        self.axes.set(ylabel="milliseconds", xlim=(-0.7, self.STEPS - 0.3))
        self.axes.spines[["top", "right"]].set_visible(False)
        self._bars = {
            name: PolyCollection([], facecolor=colour, edgecolor="white", linewidth=0.3, hatch=hatch or None)
            for name, (_, colour, hatch) in STYLE.items()
        }
        for bars in self._bars.values():
            self.axes.add_collection(bars, autolim=False)
        _legend(self.figure, 8.5)
        self._rows: list[dict[str, Any]] = []
        self.alt = "Nothing recorded yet"

    def update(self, records: list[dict[str, Any]]) -> None:
        """Take new step records (as `Run.poll` gives them) and move the bars."""
        if records and self._rows and records[-1]["world"] != self._rows[-1]["world"]:
            self._rows = []  # the next rank count of a sweep
        self._rows += [row for row in records if row["world"] == records[-1]["world"]]
        if not self._rows:
            return
        first = max(0, max(row["step"] for row in self._rows) - self.STEPS + 1)
        self._rows = [row for row in self._rows if row["step"] >= first]
        self._move(first)
        self._label(first)

    def _move(self, first: int) -> None:
        import numpy as np

        world = self._rows[-1]["world"]
        width = 0.86 / world
        left = np.array([row["step"] - first + (row["rank"] - world / 2) * width for row in self._rows])
        right, base = left + 0.94 * width, np.zeros(len(self._rows))
        for name, bars in self._bars.items():
            top = base + np.array([row[name] * 1e3 for row in self._rows])
            corners = ((left, base), (right, base), (right, top), (left, top))
            bars.set_verts(list(np.stack([np.stack(corner, 1) for corner in corners], 1)))
            base = top
        self.axes.set_ylim(0, 1.15 * float(base.max()))

    def _label(self, first: int) -> None:
        last, ticks = self._rows[-1], range(0, self.STEPS, 4)
        self.axes.set_xticks(ticks, [str(first + tick) for tick in ticks])
        self.axes.set_xlabel(
            f"step (a bar for each of {last['world']} ranks)" if last["world"] > 1 else "step"
        )
        share = last["data_s"] / last["step_s"]
        title = f"step {last['step']}, rank {last['rank']}: {last['step_s'] * 1e3:.0f} ms, {share:.0%} of it data wait"
        self.axes.set_title(title, loc="left", fontsize=10)
        phases = ", ".join(f"{label} {last[name] * 1e3:.0f} ms" for name, (label, _, _) in STYLE.items())
        self.alt = f"Phases of the last steps, stacked. {title}: {phases}"


def live_plot() -> LivePlot:
    """A new live picture for the panel."""
    return LivePlot()
