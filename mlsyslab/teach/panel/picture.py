"""Pictures for the panel: a cheap live one, PNG bytes, and the `<img>` that holds them.

Figures are made without pyplot, so that nothing is shared with the notebook's own plots and drawing from a thread
is safe. The background is opaque: black text on a transparent picture cannot be read in a dark theme.
"""

from __future__ import annotations

import base64
import io
from html import escape
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 960, 400  # what a lab's figure of 9.6 by 4 inches needs to be read
DPI = 100
# Okabe-Ito; the marker and the direct label say the same without colour.
RANK_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
RANK_MARKERS = ("o", "s", "^", "D", "v", "P")


class LivePicture(Protocol):
    """What a lab's `live_plot()` gives: `update` is cheap, `figure` is drawn by the panel's one thread.

    An optional attribute `alt` (text with the numbers) describes the picture.
    """

    figure: Any

    def update(self, records: list[dict[str, Any]]) -> None: ...


class StepLines:
    """The picture for a lab that brings none: the time of each record, a line for each rank."""

    def __init__(self, key: str = "step_s") -> None:
        from matplotlib.figure import Figure

        self.key = key
        self.figure = Figure(figsize=(WIDTH / DPI, HEIGHT / DPI), dpi=DPI, facecolor="white")
        self._axes = self.figure.add_axes((0.07, 0.14, 0.80, 0.74))
        self._axes.set(xlabel="step", ylabel="ms", title="Time of each step, rank by rank")
        self._axes.grid(alpha=0.3)
        self._lines: dict[int, Any] = {}
        self._points: dict[int, tuple[list[float], list[float]]] = {}

    @property
    def alt(self) -> str:
        """The newest value of each rank."""
        newest = [
            f"rank {rank} {ys[-1]:.0f} ms at step {xs[-1]:.0f}"
            for rank, (xs, ys) in sorted(self._points.items())
        ]
        return f"Time of each step: {', '.join(newest) or 'nothing recorded yet'}"

    def update(self, records: list[dict[str, Any]]) -> None:
        """Add records; those without the key are left out."""
        for row in records:
            if isinstance(row.get(self.key), (int, float)):
                xs, ys = self._points.setdefault(int(row.get("rank", 0)), ([], []))
                xs.append(float(row.get("step", len(xs))))
                ys.append(row[self.key] * 1e3)
        for rank in self._points:
            self._draw(rank)
        if self._points:
            last = max(x for xs, _ in self._points.values() for x in xs)
            top = max(y for _, ys in self._points.values() for y in ys)
            self._axes.set(xlim=(-0.5, max(last, 9) + 0.5), ylim=(0, top * 1.1 or 1))

    def _draw(self, rank: int) -> None:
        xs, ys = self._points[rank]
        if rank not in self._lines:
            colour, marker = RANK_COLOURS[rank % 6], RANK_MARKERS[rank % 6]
            self._lines[rank] = self._axes.plot([], [], color=colour, marker=marker, markersize=4)[0]
            self._lines[rank].set_label(f"rank {rank}")
            self._axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        self._lines[rank].set_data(xs, ys)


def png(figure: Figure, *, dpi: float | None = None) -> bytes:
    """The figure as PNG, on white. Without `dpi` by the short way, which draws once where savefig draws twice."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    canvas = FigureCanvasAgg(figure)
    if dpi is None:
        canvas.print_png(buffer, pil_kwargs={"compress_level": 1})  # half the time, a third more bytes
    else:
        figure.savefig(buffer, format="png", dpi=dpi, facecolor="white")
    return buffer.getvalue()


def image_html(data: bytes, alt: str) -> str:
    """An `<img>` whose size is fixed, so that nothing moves while its content changes."""
    source = f"data:image/png;base64,{base64.b64encode(data).decode()}" if data else blank_source()
    return (
        f'<img class="mls-live" width="{WIDTH}" height="{HEIGHT}" alt="{escape(alt, quote=True)}" '
        f'style="width:{WIDTH}px;max-width:100%;height:auto;object-fit:contain;background:white;outline:1px solid #bdbdbd;outline-offset:-1px" src="{source}">'
    )


def blank_source() -> str:
    """A white picture with a line of text, for the place that the first frame will take."""
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}">'
        '<rect width="100%" height="100%" fill="white"/><text x="50%" y="50%" text-anchor="middle" '
        'font-family="sans-serif" font-size="15" fill="#595959">The picture of the run appears here.</text></svg>'
    )
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
