"""The figures of the clinic: loss over samples, gradient norms against the control, and sharpness against its limit."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mlsyslab.contract import LabError, Prediction, RunError
from mlsyslab.labs.scaleup.answers import GATE_FRAC, GATE_STEPS, gate_steps
from mlsyslab.labs.scaleup.config import bucket_of
from mlsyslab.labs.scaleup.diagnose import diagnose
from mlsyslab.labs.scaleup.evidence import Facts, facts_of
from mlsyslab.labs.scaleup.optimiser import limit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from mlsyslab.runs import Run

FIGURE: Mapping[str, Any] = {"figsize": (9.6, 4.0), "dpi": 100, "facecolor": "white"}
INK = "#404040"
# Okabe-Ito; line style and label say the same without colour.
STYLE: Mapping[str, tuple[str, str, str]] = {
    "base": ("#009E73", ":", "small run, 1 worker"),
    "control": ("#0072B2", "--", "control: 1 worker, same global batch"),
    "large": ("#D55E00", "-", "large run"),
}
FLOOR = 1e-9  # at which differences that are exactly zero are drawn
MOST_LOSS = 1e4  # losses above are drawn there
GAP_STEPS = 3 * GATE_STEPS


def plot(run: Run, prediction: Prediction | None = None) -> Figure:
    """Left: training loss of the small run, the control and the large run over the epochs. Right: how far the large run's
    gradient norm is from the control's, step by step, with the gate. The title is the verdict. The figure has a `description`
    attribute for alt text."""
    from matplotlib.figure import Figure

    del prediction  # its numbers are in the table
    facts = facts_of(run)
    figure = Figure(**FIGURE)
    left, right = figure.subplots(1, 2, width_ratios=(1.5, 1))
    figure.subplots_adjust(left=0.075, right=0.985, top=0.80, bottom=0.235, wspace=0.26)
    said = _losses(left, facts)
    said.append(_gaps(right, facts))
    title = title_of(run)
    marks = [
        name for name, on in (("virtual ranks", facts.large.header.get("virtual")), (run.origin, True)) if on
    ]
    figure.suptitle(
        "\n".join(textwrap.wrap(f"{title} ({', '.join(marks)})", 100, max_lines=2, placeholder=" ...")),
        x=0.012, y=0.98, ha="left", fontsize=11, fontweight="bold",
    )  # fmt: skip
    figure.description = f"{title}. {'; '.join(said)}."  # type: ignore[attr-defined]  # read by lesson.show
    return figure


def title_of(run: Run) -> str:
    """The verdict as a sentence, or why there is none."""
    try:
        verdict = diagnose(run)
    except LabError as error:
        return str(error)
    head = {"optimiser": "The optimiser", "system": "The system"}.get(bucket_of(verdict.cause))
    if head is None:
        return f"{'Healthy' if verdict.cause == 'healthy' else 'No verdict'}: {verdict.reason}"
    where = f", {verdict.where}" if verdict.where and verdict.where.startswith("rank") else ""
    return f"{head}: {verdict.cause}{where}"


def clinic_plot(runs: Mapping[str, Run]) -> Figure:
    """Several runs side by side, by name and without a verdict: losses above, gradient norms against the control below."""
    from matplotlib.figure import Figure

    figure = Figure(**{**FIGURE, "figsize": (9.6, 5.2)})
    grid = figure.subplots(2, len(runs), squeeze=False, height_ratios=(1.3, 1))
    figure.subplots_adjust(left=0.075, right=0.985, top=0.87, bottom=0.16, wspace=0.30, hspace=0.62)
    said = []
    for column, (name, run) in enumerate(runs.items()):
        facts = facts_of(run)
        losses = _losses(grid[0, column], facts, legend=False)
        gaps = _gaps(grid[1, column], facts)
        grid[0, column].set_title(f"Run {name}", fontsize=11, fontweight="bold")
        said.append(f"Run {name}: {'; '.join(losses)}; {gaps}")
        if column:
            grid[0, column].set_ylabel("")
    shown = {
        label.split(", ")[0] if label.startswith("large") else label: handle
        for axes in grid[0]
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(shown.values(), shown.keys(), loc="lower center", ncols=3, fontsize=9, frameon=False)
    figure.suptitle("What is wrong with each?", x=0.012, y=0.98, ha="left", fontsize=11, fontweight="bold")
    figure.description = ". ".join(said) + "."  # type: ignore[attr-defined]  # read by lesson.show
    return figure


def _losses(axes: Axes, facts: Facts, *, legend: bool = True) -> list[str]:
    said = []
    parts = {"base": facts.base, "control": facts.control, "large": facts.large}
    size = facts.large.header.get("samples") or facts.large.seen_samples
    for name, part in parts.items():
        if part is None or not part.steps:
            continue
        colour, style, label = STYLE[name]
        many = len(part.ranks)
        label = f"{label}, {many} rank{'s' if many > 1 else ''}" if name == "large" else label
        epochs = np.cumsum(part.get("samples").sum(1)) / size
        loss = np.minimum(np.nan_to_num(part.loss, nan=MOST_LOSS, posinf=MOST_LOSS), MOST_LOSS)
        axes.plot(epochs, loss, color=colour, alpha=0.25, linewidth=0.8)
        if name == "control":  # what the large run may cover
            axes.plot(epochs, _smooth(loss), color=colour, alpha=0.35, linewidth=6, solid_capstyle="butt")
        axes.plot(epochs, _smooth(loss), style, color=colour, linewidth=1.8, label=label)
        said.append(f"{label}: loss {part.loss[0]:.2f} at first, {part.final_loss():.2f} at the end")
    axes.set_yscale("log")
    axes.set_xlabel("epochs", color=INK)
    axes.set_ylabel("training loss", color=INK)
    if legend:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2, fontsize=8.5, frameon=False)
    _plain(axes)
    return said


def _smooth(loss: Any) -> Any:
    """A running mean over a thirtieth of the run, so that curves of different batches can be compared."""
    width = max(1, len(loss) // 30)
    sums = np.cumsum(np.insert(loss, 0, 0.0))
    begins = np.maximum(0, np.arange(len(loss)) + 1 - width)
    return (sums[1:] - sums[begins]) / (np.arange(len(loss)) + 1 - begins)


def _gaps(axes: Axes, facts: Facts) -> str:
    gap = facts.norm_gap(GAP_STEPS)
    axes.set_title("gradient norm, apart from the control's", fontsize=9.5, color=INK)
    axes.set_xlabel("step", color=INK)
    _plain(axes)
    if not len(gap):
        axes.text(0.5, 0.5, "no control to compare with", ha="center", va="center", transform=axes.transAxes)
        axes.set_yticks([])
        return "no control"
    axes.axhspan(FLOOR, GATE_FRAC, color="#009E73", alpha=0.12, linewidth=0)
    axes.axhline(GATE_FRAC, color="#009E73", linestyle="--", linewidth=1)
    axes.text(0.98, 1e-7, "equal within rounding", transform=axes.get_yaxis_transform(), ha="right", va="center", fontsize=8.5, color=INK,
              bbox={"facecolor": "white", "alpha": 0.7, "pad": 1, "linewidth": 0}, zorder=5)  # fmt: skip
    axes.plot(
        range(len(gap)), np.maximum(gap, FLOOR), "o-", color=STYLE["large"][0], markersize=3, linewidth=1
    )
    axes.set_yscale("log")
    axes.set_ylim(FLOOR / 2, max(10.0, float(gap.max()) * 3))
    many = gate_steps(facts)
    return f"the gradient norm is within {gap[:many].max():.1e} of the control's in the first {many} steps"


def _plain(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(alpha=0.25)


def sharpness_plot(run: Run) -> Figure:
    """The largest Hessian eigenvalue along the small run, with the limits of both learning rates. Raises RunError for a run
    without a small run."""
    from matplotlib.figure import Figure

    facts = facts_of(run)
    if facts.base is None or not facts.base.sharpness:
        raise RunError(
            "this run has no small run whose sharpness was measured; choose a global batch above base_batch"
        )
    figure = Figure(**{**FIGURE, "figsize": (9.6, 3.4)})
    axes = figure.add_axes((0.075, 0.16, 0.70, 0.66))
    steps, values = zip(*facts.base.sharpness, strict=True)
    axes.plot(steps, values, "o-", color=STYLE["base"][0], linewidth=1.8)
    axes.set_xscale("symlog", linthresh=8)
    axes.set_xticks(steps, [str(s) for s in steps])
    axes.set_yscale("log")
    axes.set_xlabel("step of the small run", color=INK)
    axes.set_ylabel("largest Hessian eigenvalue", color=INK)
    limits = {"small run": float(facts.base.lr.max()), "large run": float(facts.large.lr.max())}
    said = []
    for (name, rate), part in zip(limits.items(), ("base", "large"), strict=True):
        limit = limit_of(rate)
        axes.axhline(limit, color=STYLE[part][0], linestyle="--", linewidth=1.2)
        axes.annotate(f"limit of the {name}\n(rate {rate:.3g}): {limit:.1f}", (1.0, limit), xycoords=("axes fraction", "data"), xytext=(6, 0),
                      textcoords="offset points", va="center", fontsize=9, color=INK, annotation_clip=False)  # fmt: skip
        said.append(f"limit of the {name} {limit:.1f}")
    axes.set_ylim(min(*values, *(limit_of(r) for r in limits.values())) / 2, max(*values, *(limit_of(r) for r in limits.values())) * 2)  # fmt: skip
    _plain(axes)
    title = "Sharpness against the limit 2 (1 + momentum) / learning rate"
    figure.suptitle(f"{title} ({run.origin})", x=0.012, y=0.97, ha="left", fontsize=11, fontweight="bold")
    listed = ", ".join(f"{value:.0f} at step {step}" for step, value in facts.base.sharpness)
    figure.description = f"{title}. {listed}; {'; '.join(said)}."  # type: ignore[attr-defined]  # read by lesson.show
    return figure


class LossLines:
    """The live picture: training loss over the share of each run that is done, one line for each of the three."""

    def __init__(self) -> None:
        from matplotlib.figure import Figure

        self.figure = Figure(**FIGURE)
        self._axes = self.figure.add_axes((0.075, 0.14, 0.60, 0.74))
        self._axes.set(
            xlabel="samples seen, thousands", ylabel="training loss", title="Loss of the runs, as they train"
        )
        self._axes.set_yscale("log")
        _plain(self._axes)
        self._lines: dict[str, Any] = {}
        self._points: dict[str, tuple[list[float], list[float]]] = {}
        self._open: dict[tuple[str, int], list[dict[str, Any]]] = {}

    @property
    def alt(self) -> str:
        """The newest loss of each run."""
        newest = [f"{STYLE[name][2]} {ys[-1]:.2f}" for name, (_, ys) in self._points.items() if ys]
        return f"Training loss: {', '.join(newest) or 'nothing recorded yet'}"

    def update(self, records: list[dict[str, Any]]) -> None:
        """Add records; a step is drawn when all its ranks are there."""
        for row in records:
            key = (str(row.get("part", "large")), int(row["step"]))
            here = self._open.setdefault(key, [])
            here.append(row)
            if len(here) < row["world"]:
                continue
            del self._open[key]
            xs, ys = self._points.setdefault(key[0], ([], []))
            loss = np.mean([r["loss"] if r.get("loss") is not None else MOST_LOSS for r in here])
            xs.append(((xs[-1] * 1e3 if xs else 0.0) + sum(r.get("samples") or 0 for r in here)) / 1e3)
            ys.append(float(min(loss, MOST_LOSS)))
        for name, (xs, ys) in self._points.items():
            if name not in self._lines:
                colour, style, label = STYLE[name]
                self._lines[name] = self._axes.plot([], [], style, color=colour, linewidth=1.6, label=label)[
                    0
                ]
                self._axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
            self._lines[name].set_data(xs, _smooth(np.array(ys)))
        if self._points:
            self._axes.set_xlim(0, max(xs[-1] for xs, _ in self._points.values()) * 1.02)
            values = [y for _, ys in self._points.values() for y in ys]
            self._axes.set_ylim(min(values) * 0.8, min(MOST_LOSS, max(values)) * 1.3)


def live_plot() -> LossLines:
    """The panel's live picture of this lab."""
    return LossLines()
