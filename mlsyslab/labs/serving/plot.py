"""The serving lab's pictures: every request of a run, the curve of a knob, and the live picture of the panel."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlsyslab.contract import LabError, Prediction, format_value
from mlsyslab.labs.serving.diagnose import diagnose
from mlsyslab.labs.serving.figures import OUTCOMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from mlsyslab.runs import Run

# Okabe-Ito colours, and a mark or hatch each, so that nothing is told apart by colour alone.
PARTS = {
    "batch_wait_s": ("held back for company", "#F0E442", ".."),
    "queue_s": ("queued for a replica", "#E69F00", "//"),
    "service_s": ("computed", "#0072B2", ""),
}
MARKS = {
    "ok": ("answered", "#0072B2", "."),
    "rejected": ("refused (429)", "#E69F00", "v"),
    "expired": ("past its deadline (504)", "#CC79A7", "x"),
    "cancelled": ("client gone", "#999999", "+"),
    "error": ("error", "#D55E00", "s"),
}
TARGET = "#009E73"
MOST_DOTS = 20_000


def title_of(run: Run) -> str:
    """The verdict as a sentence, or why there is none."""
    try:
        verdict = diagnose(run)
    except LabError as error:
        return str(error)
    if verdict.cause == "unknown":
        return f"No verdict: {verdict.reason}"
    return f"{verdict.cause[0].upper()}{verdict.cause[1:]}: {verdict.reason}"


def plot(run: Run, prediction: Prediction | None = None) -> Figure:
    """Left: the latency of every request by its intended arrival, with the target and the p95. Right: where the mean
    answer's time went, and predicted (hollow) beside measured percentiles. The title is the verdict.

    Raises RunError where nothing was recorded. The figure has a `description` attribute for alt text.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.2), dpi=100, facecolor="white")
    dots, bars = figure.subplots(1, 2, width_ratios=(2.1, 1))
    figure.subplots_adjust(left=0.075, right=0.985, top=0.79, bottom=0.25, wspace=0.2)
    summary = run.summary()
    _draw_requests(dots, run.records, run.config, summary)
    _draw_percentiles(bars, run.records, summary, prediction, run.config.slo_p95_s)
    marks = [
        words
        for words, on in (
            ("paced model", run.config.paced),
            (f"{run.config.clients} closed-loop clients", run.config.clients),
            ("recorded, not measured here", run.origin == "recorded"),
        )
        if on
    ]
    lines = textwrap.wrap(title_of(run).replace(" ms", "\u00a0ms"), 92, max_lines=2, placeholder=" ...")
    figure.suptitle(
        "\n".join(lines) + (f"\n({'; '.join(marks)})" if marks else ""),
        x=0.075, ha="left", fontsize=11, fontweight="bold",
    )  # fmt: skip
    _legend(figure)
    vars(figure)["description"] = describe(summary, run.config.slo_p95_s)
    return figure


def describe(summary: Mapping[str, Any], slo_s: float) -> str:
    """The figure in words."""
    if summary.get("p95_s") is None:
        return "Latency of each request over time: nothing was answered"
    refused = (summary["rejected_frac"] or 0) + (summary["expired_frac"] or 0)
    return (
        f"Latency of each request over time: p50 {format_value(summary['p50_s'], 's')}, p95 {format_value(summary['p95_s'], 's')}, "
        f"p99 {format_value(summary['p99_s'], 's')} against a target of {format_value(slo_s, 's')}; "
        f"{refused:.0%} refused or expired; mean batch {summary['mean_batch_rows']:.1f} rows"
    )


def _draw_requests(axes: Axes, records: Any, config: Any, summary: Mapping[str, Any]) -> None:
    every = max(1, len(records) // MOST_DOTS)
    shown = records.iloc[::every]
    for outcome, (label, colour, mark) in MARKS.items():
        rows = shown[shown["outcome"] == outcome]
        if len(rows):
            pale = 0.25 if outcome == "ok" and len(rows) > 2000 else 0.6
            axes.plot(
                rows["intended_s"], rows["total_s"].astype(float) * 1e3, mark, color=colour, markersize=3.5,
                alpha=pale, markeredgewidth=0.8, label=label, rasterized=True,
            )  # fmt: skip
    axes.axhline(config.slo_p95_s * 1e3, color=TARGET, linestyle="--", linewidth=1.4, label="target for p95")
    if summary.get("p95_s") is not None:
        axes.axhline(summary["p95_s"] * 1e3, color="black", linewidth=1.1, label="p95 of the answers")
    if config.warmup_s:
        axes.axvspan(
            0, config.warmup_s, color="#999999", alpha=0.15, linewidth=0, label="warm-up, not counted"
        )
    axes.set(xlabel="seconds: when the request should arrive", ylabel="milliseconds until its outcome")
    axes.set_xlim(0, max(config.duration_s, float(records["intended_s"].max()) if len(records) else 0))
    axes.set_yscale("log")
    axes.set_title("every request" if every == 1 else f"every {every}th request", loc="left", fontsize=10)
    _plain_ticks(axes.yaxis)
    axes.spines[["top", "right"]].set_visible(False)


def _plain_ticks(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
    axis.set_minor_locator(NullLocator())
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))


def _draw_percentiles(
    axes: Axes, records: Any, summary: Mapping[str, Any], prediction: Prediction | None, slo_s: float
) -> None:
    """The mean answer, stacked, then p50, p95 and p99 beside their predictions."""
    steady = records[~records["warmup"].astype(bool) & (records["outcome"] == "ok")]
    base = 0.0
    for name, (label, colour, hatch) in PARTS.items():
        height = float(steady[name].astype(float).mean()) * 1e3 if len(steady) else 0.0
        axes.bar(
            0,
            height,
            0.62,
            bottom=base,
            color=colour,
            hatch=hatch,
            edgecolor="white",
            linewidth=0.4,
            label=label,
        )
        base += height
    for at, name in enumerate(("p50_s", "p95_s", "p99_s"), 1):
        value = summary.get(name)
        if value is not None:
            axes.bar(
                at - 0.17, value * 1e3, 0.3, color="#56B4E9", label=summary["origin"] if at == 1 else None
            )
        expected = prediction.values.get(name) if prediction else None
        if expected:
            low, middle, high = (part * 1e3 for part in expected)
            axes.bar(
                at + 0.17, middle, 0.3, fill=False, edgecolor="black", linestyle="--",
                label=f"{prediction.origin}" if at == 1 and prediction else None,
            )  # fmt: skip
            axes.errorbar(
                at + 0.17,
                middle,
                yerr=[[middle - low], [high - middle]],
                color="black",
                capsize=3,
                linewidth=1,
            )
    axes.axhline(slo_s * 1e3, color=TARGET, linestyle="--", linewidth=1.4)
    axes.set_xticks(range(4), ["mean", "p50", "p95", "p99"])
    axes.set_ylabel("milliseconds")
    axes.set_title("the answers", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: Figure, markerscale: float = 1.8) -> None:
    found: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(
        found.values(), found.keys(), loc="lower left", bbox_to_anchor=(0.06, 0.0), ncols=5, fontsize=8,
        frameon=False, markerscale=markerscale, handlelength=1.6, columnspacing=1.2,
    )  # fmt: skip


# ---- the curve of a knob
def curve_plot(
    knob: str, lines: Mapping[str, Sequence[tuple[float, Mapping[str, Any]]]], *, slo_s: float | None = None
) -> Figure:
    """Latency and throughput against a knob of the configuration.

    knob: the axis' words, with its unit. lines: "simulated", "measured", "predicted" -> (value, summary) pairs; what
    was measured is drawn as points, what was not as lines. Left p50, p95 and p99, milliseconds; right rows a batch
    and requests a second, each on its own axis.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 3.8), dpi=100, facecolor="white")
    latency, batch = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.075, right=0.93, top=0.9, bottom=0.3, wspace=0.22)
    rate = batch.twinx()
    said = []
    for origin, points in lines.items():
        at = [value for value, _ in points]
        look: dict[str, Any] = (
            {"linestyle": "none", "markersize": 7}
            if origin == "measured"
            else {"linestyle": "-", "markersize": 0}
        )
        for name, colour, mark in (
            ("p50_s", "#56B4E9", "o"),
            ("p95_s", "#0072B2", "s"),
            ("p99_s", "#000000", "^"),
        ):
            values = [None if row.get(name) is None else row[name] * 1e3 for _, row in points]
            latency.plot(at, values, color=colour, marker=mark, label=f"{name[:3]}, {origin}", **look)
        batch.plot(at, [row.get("mean_batch_rows") for _, row in points], color="#E69F00", marker="D",
                   label=f"rows a batch, {origin}", **look)  # fmt: skip
        rate.plot(at, [row.get("throughput_per_s") for _, row in points], color="#CC79A7", marker="v",
                  label=f"answers a second, {origin}", **look)  # fmt: skip
        said += [f"{origin} at {value:g}: p95 {format_value(row.get('p95_s'), 's')}" for value, row in points]
    if slo_s is not None:
        latency.axhline(slo_s * 1e3, color=TARGET, linestyle="--", linewidth=1.4, label="target for p95")
    latency.set(xlabel=knob, ylabel="milliseconds")
    latency.set_ylim(0, 1.06 * latency.get_ylim()[1])
    batch.set(xlabel=knob, ylabel="rows a batch")
    batch.set_ylim(0, 1.06 * batch.get_ylim()[1])
    rate.set_ylabel("answers a second")
    rate.set_ylim(0, 1.06 * rate.get_ylim()[1])
    latency.set_title("latency of the answers", loc="left", fontsize=10)
    batch.set_title("batches, and the rate that comes through", loc="left", fontsize=10)
    for axes in (latency, batch):
        axes.spines[["top", "right"]].set_visible(False)
    _legend(figure, 1.0)
    vars(figure)["description"] = f"Latency against {knob}. " + "; ".join(said)
    return figure


# ---- live
class LivePlot:
    """The panel's picture: every request as its outcome comes, on axes that do not jump. `alt` says it in words."""

    drawing_frac = 0.04  # of a core: a picture of 50 ms keeps requests waiting on a machine of few cores
    RECENT = 400
    SHOWN = 400  # dots of an outcome at most: drawing takes the service's cores

    def __init__(self) -> None:
        from matplotlib.figure import Figure

        self.figure = Figure(figsize=(9.2, 3.3), dpi=100, facecolor="white")
        self.axes = self.figure.add_axes((0.085, 0.27, 0.89, 0.61))
        self.axes.set(xlabel="seconds: when the request should arrive", ylabel="milliseconds")
        self.axes.set_yscale("log")
        self.axes.set_ylim(1, 100)
        self.axes.set_xlim(0, 5)
        _plain_ticks(self.axes.yaxis)
        self.axes.spines[["top", "right"]].set_visible(False)
        self._dots = {
            name: self.axes.plot(
                [], [], mark, color=colour, markersize=3, alpha=0.5, markeredgewidth=0.8, label=label
            )[0]
            for name, (label, colour, mark) in MARKS.items()
        }
        self._seen: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in OUTCOMES}
        self._recent: list[dict[str, Any]] = []
        _legend(self.figure)
        self.alt = "Nothing recorded yet"

    def update(self, records: list[dict[str, Any]]) -> None:
        """Take new request records, as `Run.poll` gives them."""
        for row in records:
            if row["total_s"] is None:  # it has no end that could be drawn
                continue
            at, took = self._seen[row["outcome"]]
            at.append(row["intended_s"])
            took.append(max(row["total_s"], 1e-4) * 1e3)
        self._recent = [*self._recent, *records][-self.RECENT :]
        for name, (at, took) in self._seen.items():
            every = max(1, len(at) // self.SHOWN)
            self._dots[name].set_data(at[::every], took[::every])
        ends = [at[-1] for at, _ in self._seen.values() if at]
        if not ends:
            return
        self._fit(max(ends))
        self._say()

    def _fit(self, end_s: float) -> None:
        """Axes grow in large steps, so that nothing jumps."""
        left, right = self.axes.get_xlim()
        if end_s > right:
            self.axes.set_xlim(left, right * 2)
        low, high = self.axes.get_ylim()
        most = max((max(took) for _, took in self._seen.values() if took), default=1.0)
        least = min((min(took) for _, took in self._seen.values() if took), default=1.0)
        while most > high:
            high *= 10
        while least < low and low > 1e-2:
            low /= 10
        self.axes.set_ylim(low, high)

    def _say(self) -> None:
        totals = sorted(row["total_s"] for row in self._recent if row["outcome"] == "ok")
        lost = sum(row["outcome"] != "ok" for row in self._recent)
        p95 = format_value(totals[int(0.95 * (len(totals) - 1))], "s") if totals else "none yet"
        count = sum(len(at) for at, _ in self._seen.values())
        title = f"{count} outcomes; of the last {len(self._recent)}: p95 {p95}, {lost} without an answer"
        self.axes.set_title(title, loc="left", fontsize=10)
        self.alt = title


def live_plot() -> LivePlot:
    """A new live picture for the panel."""
    return LivePlot()
