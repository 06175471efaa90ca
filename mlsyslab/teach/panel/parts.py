"""The panel's widgets, arranged, and what they show. No behaviour.

Core ipywidgets only, so that JupyterLab, Notebook 7 and VS Code show the same panel without an extension.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from html import escape
from typing import Any

import ipywidgets as widgets

from mlsyslab.teach.panel.knobs import Settings
from mlsyslab.teach.panel.picture import image_html
from mlsyslab.teach.panel.words import Quantity, Row, table_html

CHOOSE = "choose …"

STYLE = """<style>
.mls-panel { border: 1px solid var(--jp-border-color1, #9e9e9e); border-radius: 4px; padding: 8px 12px; max-width: 990px; }
.mls-panel, .mls-panel .widget-html-content { color: var(--jp-content-font-color1, inherit); }
.mls-panel .widget-html-content { line-height: 1.35; }
.mls-panel .mls-head { display: flex; justify-content: space-between; gap: 16px; align-items: baseline; }
.mls-panel .mls-title { font-weight: 600; font-size: 1.15em; }
.mls-panel .mls-badge { border: 1px solid currentColor; border-radius: 9px; padding: 0 8px; font-size: .85em; white-space: nowrap; }
.mls-panel .mls-step { font-weight: 600; }
.mls-panel table.mls-table { border-collapse: collapse; width: 100%; font-size: .92em; }
.mls-panel table.mls-table th, .mls-panel table.mls-table td { padding: 3px 6px; text-align: right; border-bottom: 1px solid var(--jp-border-color2, #bdbdbd); vertical-align: top; }
.mls-panel table.mls-table th:first-child { text-align: left; font-weight: 600; }
.mls-panel .mls-small { font-size: .85em; margin: 4px 0; opacity: .85; }
.mls-panel .mls-errortext { border-left: 4px solid #D55E00; padding: 2px 8px; font-weight: 600; }
.mls-panel .mls-verdict h4 { margin: 8px 0 2px; font-size: 1em; }
.mls-panel .mls-verdict ul { margin: 0 0 0 20px; padding: 0; }
.mls-panel .mls-verdict p { margin: 2px 0; }
.mls-panel .mls-columns { columns: 2 340px; column-gap: 32px; }
.mls-panel .mls-columns li { break-inside: avoid; }
.mls-panel .mls-waiting { opacity: .6; }
.mls-panel button:focus-visible, .mls-panel .noUi-handle:focus-visible { outline: 2px solid var(--jp-brand-color1, #0072B2); }
</style>"""


def _button(text: str, icon: str, name: str, tooltip: str, style: str = "") -> widgets.Button:
    button = widgets.Button(description=text, icon=icon, tooltip=tooltip, button_style=style)
    button.layout.width = "auto"
    button.add_class(name)
    return button


def _html(name: str, value: str = "", **layout: str) -> widgets.HTML:
    part = widgets.HTML(value=value, layout=widgets.Layout(**layout))
    part.add_class(name)
    return part


def _row(*children: Any, **layout: str) -> widgets.Box:
    settings = {
        "flex_flow": "row wrap",
        "align_items": "center",
        "grid_gap": "4px 10px",
        "min_height": "36px",
    }
    return widgets.Box(children, layout=widgets.Layout(display="flex", **{**settings, **layout}))


def _heading(text: str) -> widgets.HTML:
    return widgets.HTML(f'<span class="mls-step">{escape(text)}</span>')


class Parts:
    """Every widget of one panel, arranged. The panel reads and sets them and brings the behaviour."""

    def __init__(
        self,
        settings: Settings,
        first: Sequence[str],
        quantities: Sequence[Quantity],
        names: Mapping[str, Sequence[str]],
    ) -> None:
        self.settings = settings
        self.head = _html("mls-head-box", width="100%")
        self.guesses = {q.key: self._guess(q) for q in quantities}
        self.lock = _button("Lock in", "lock", "mls-lock", "commit your prediction; Run unlocks")
        self.skip = _button("Skip", "", "mls-skip", "run without a prediction")
        self.run = _button("Run", "play", "mls-run", "measure on this machine", "primary")
        self.stop = _button("Stop", "stop", "mls-stop", "end the run; what was recorded stays")
        self.bar = widgets.IntProgress(max=100, layout=widgets.Layout(width="180px"))
        self.words = _html("mls-words", flex="1 1 260px")
        self.status = _html("mls-status-box", width="100%", min_height="28px")
        self.error = _html("mls-error", width="100%", min_height="28px")
        self.picture = _html("mls-picture", width="100%")
        self.picture.value = image_html(b"", "No run yet: the picture of the run appears here")
        self.table = _html("mls-table-box", width="100%", min_height="190px")
        self.cause = self._choice("cause", "mls-cause", names["causes"])
        self.where = self._choice("where", "mls-where", names["wheres"])
        self.owner = self._choice("who acts first", "mls-owner", names["owners"], "90px")
        self.check = _button("Check", "check", "mls-check", "compare your diagnosis with the library's")
        self.reveal = _button("Skip", "", "mls-reveal", "see the verdict without a diagnosis of your own")
        self.verdict = _html("mls-verdict-box", width="100%", min_height="260px")
        self.apply = _button(
            "Apply and measure", "wrench", "mls-apply", "change what the verdict says and run again"
        )
        self.outcome = _html("mls-outcome", flex="1 1 400px")
        self.root = self._arrange(first)

    def _guess(self, quantity: Quantity) -> widgets.Text:
        label = f"{quantity.label} ({quantity.unit})" if quantity.unit else quantity.label
        label_width = f"{0.85 * len(label):.0f}ch"  # the label whole; most letters are narrower than a digit
        box = widgets.Text(
            description=label,
            placeholder="your guess",
            layout=widgets.Layout(width=f"calc({label_width} + 105px)"),
            style={"description_width": label_width},
            tooltip=f"what do you expect for {quantity.label}, in {quantity.unit or 'its own unit'}?",
        )
        box.add_class(f"mls-predict-{quantity.key}")
        return box

    def _choice(
        self, label: str, name: str, options: Sequence[str], label_width: str = "45px"
    ) -> widgets.Dropdown:
        longest = 70 + round(6.6 * max(map(len, options), default=0))  # pixels; no word is cut
        least = 175 if label_width == "45px" else 225
        choice = widgets.Dropdown(
            options=[CHOOSE, *options],
            description=label,
            layout=widgets.Layout(width=f"{max(least, longest)}px"),
            style={"description_width": label_width},
        )
        choice.add_class(name)
        return choice

    def _arrange(self, first: Sequence[str]) -> widgets.VBox:
        knobs = self.settings.knobs
        shown = [knobs[name].widget for name in first]
        folded = [knob.widget for name, knob in knobs.items() if name not in first]
        more = widgets.Accordion(children=[_row(*folded)], selected_index=None, titles=("More settings",))
        more.layout.width = "100%"
        root = widgets.VBox(
            [
                widgets.HTML(STYLE, layout=widgets.Layout(display="none")),
                self.head,
                _row(_heading("1. Settings"), self.settings.preset),
                _row(*shown),
                *([more] if folded else []),
                _row(_heading("2. Your prediction"), *self.guesses.values(), self.lock, self.skip),
                _row(_heading("3. Measure"), self.run, self.stop, self.bar, self.words),
                self.status,
                self.error,
                self.picture,
                self.table,
                _row(
                    _heading("4. Your diagnosis"), self.cause, self.where, self.owner, self.check, self.reveal
                ),
                _row(_heading("5. Verdict"), self.apply, self.outcome),
                self.verdict,
            ]
        )
        root.add_class("mls-panel")
        return root

    # ---- what they show
    def enable(self, turn: Collection[str]) -> None:
        """Grey out what is not the learner's turn. turn: of knobs, guess, run, stop, answer, apply."""
        groups: dict[str, Sequence[Any]] = {
            "knobs": self.settings.widgets,
            "guess": [*self.guesses.values(), self.lock, self.skip],
            "run": [self.run],
            "stop": [self.stop],
            "answer": [self.cause, self.where, self.owner, self.check, self.reveal],
            "apply": [self.apply],
        }
        for name, members in groups.items():
            for member in members:
                member.disabled = name not in turn

    def show_head(self, title: str, badge: str) -> None:
        """The title, and whether the figures were measured here or recorded elsewhere."""
        self.head.value = (
            f'<div class="mls-head"><span class="mls-title" role="heading" aria-level="3">{escape(title)}</span>'
            f'<span class="mls-badge">{escape(badge)}</span></div>'
        )

    def say(self, sentence: str) -> None:
        """The state in words; screen readers read it when it changes."""
        self.status.value = f'<div class="mls-status" role="status">{escape(sentence)}</div>'

    def show_error(self, sentence: str) -> None:
        self.error.value = (
            f'<div class="mls-errortext" role="alert">{escape(sentence)}</div>' if sentence else ""
        )

    def show_picture(self, data: bytes, alt: str) -> None:
        self.picture.value = image_html(data, alt)

    def show_progress(self, share: float, sentence: str) -> None:
        """The bar, and the same in words, since a bar has no role for a screen reader."""
        self.bar.value = round(100 * share)
        self.words.value = f'<span class="mls-progress">{escape(sentence)}</span>'

    def show_rows(self, rows: Sequence[Row], note: str) -> None:
        self.table.value = table_html(rows, note)

    def offer_wheres(self, wheres: Sequence[str]) -> None:
        self.where.options = [CHOOSE, *wheres]

    def answers(self) -> dict[str, str]:
        """The learner's diagnosis, `CHOOSE` where nothing was chosen yet."""
        return {"cause": self.cause.value, "where": self.where.value, "owner": self.owner.value}
