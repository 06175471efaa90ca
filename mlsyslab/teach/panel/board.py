"""What a panel shows: its state in words, the comparison, the pictures. It decides nothing; see `explore`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import Any

from mlsyslab.options import options_of
from mlsyslab.teach.panel import words
from mlsyslab.teach.panel.follow import Pace
from mlsyslab.teach.panel.knobs import OWN, Settings
from mlsyslab.teach.panel.labview import LabView
from mlsyslab.teach.panel.parts import Parts
from mlsyslab.teach.panel.picture import png
from mlsyslab.teach.panel.result import Result
from mlsyslab.teach.panel.rounds import Round

FINAL_DPI = 150
UNSAID = '<p class="mls-waiting">The verdict comes after your own diagnosis.</p>'
# state -> what can be used then, and the sentence that says whose turn it is
TURNS = {
    "predict": ({"knobs", "guess"}, "Your turn: type your prediction and lock it in, or skip it."),
    "ready": ({"knobs", "run"}, "Your turn: run the experiment."),
    "running": ({"stop"}, "Running: the picture follows the records as they come."),
    "diagnose": ({"knobs", "run", "answer"}, "Your turn: say what limits this run, then check."),
    "verdict": (
        {"knobs", "guess", "run", "apply"},
        "The verdict is below. Apply its action, or change a setting for a new round.",
    ),
}


class Board:
    """The widgets of one panel and the state they show."""

    def __init__(self, lab: Any, preset: Any, *, mystery: bool = False) -> None:
        self.view, self.mystery = LabView(lab), mystery
        named = isinstance(preset, str)
        config = self.view.preset(preset) if named else preset
        self.state = "predict"
        self.error: str | None = None
        self.round = Round(config)
        self.quantities = self.view.quantities(config)
        self._picture = (b"", "No run yet")
        self._lock = threading.RLock()
        self._shown = False
        self.settings = Settings(self.view.options, lab.PRESETS, hidden=mystery)
        self.settings.put(fields_of(config), preset if named else OWN)
        self.parts = Parts(self.settings, self.view.unfolded, self.quantities, self._names(config))
        self._to("predict")

    def _names(self, config: Any) -> dict[str, list[str]]:
        view = self.view
        return {"causes": view.causes, "owners": view.owners, "wheres": view.wheres(config)}

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self.error = words.error_words(error)
            self.parts.show_error(self.error)

    def _to(self, state: str, say: str = "") -> None:
        with self._lock:
            self.state = state
            turn, sentence = TURNS[state]
            cannot = ({"knobs"} if self.mystery else set()) | (
                {"apply"} if self.round.action() is None else set()
            )
            self.parts.show_head(self.view.title, self._badge())
            self.parts.show_rows(self.rows(), self.round.note())
            if self.round.diagnosis is None:
                self.parts.verdict.value = UNSAID
            self.parts.say(say or sentence)
            self.parts.enable(turn - cannot)  # last: what can be clicked is already described

    def _badge(self) -> str:
        origin = getattr(self.round.run, "origin", "measured")
        where = "measured here" if origin == "measured" else f"{origin} elsewhere"
        note = "settings hidden" if self.mystery else self.view.note(self.round.config)
        return f"{where}, {note}" if note else where

    def rows(self) -> list[words.Row]:
        """The comparison, as far as the learner may see it."""
        return self.round.rows(self.quantities, hidden=self.mystery and self.round.diagnosis is None)

    def _tell(self, pace: Pace, status: Mapping[str, Any]) -> None:
        said = words.progress_words(
            status, step=pace.step, steps=pace.steps, share=pace.share, left_s=pace.left_s
        )
        self.parts.show_progress(pace.share, said)

    def _show_picture(self, data: bytes, alt: str) -> None:
        self._picture = (data, alt)
        self.parts.show_picture(data, alt)

    def _clear_picture(self) -> None:
        """The last round's picture is not one of this round's settings."""
        self._show_picture(b"", "No run with these settings yet")
        self.parts.show_progress(0, "")
        self.parts.outcome.value = ""

    def _show_plot(self, run: Any, sentence: str) -> None:
        figure = self.view.module.plot(
            run, prediction=self.round.prediction if run is self.round.run else None
        )
        shown = (f"{row.quantity.label} {row.cells()[3]}" for row in self.rows() if row.measured is not None)
        described = getattr(figure, "description", "") or f"{sentence}. Measured: {', '.join(shown)}"
        self._show_picture(png(figure, dpi=FINAL_DPI), described)

    def _display_once(self) -> None:
        """In blocking mode the cell has not ended, so that nothing would be on the screen yet."""
        if self._shown or "IPython" not in sys.modules:
            return
        from IPython.core.getipython import get_ipython
        from IPython.display import display

        if get_ipython() is not None:
            display(self)

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        self._shown = True
        return self.parts.root._repr_mimebundle_(**kwargs)

    def __repr__(self) -> str:
        return f"<Panel {self.view.name}: {self.state}>"

    def show_result(self) -> Result:
        """What the panel shows now, as a picture and text that a saved notebook keeps without a kernel."""
        verdict = str(self.round.diagnosis or TURNS[self.state][1])
        return Result(f"{verdict}\n{words.table_text(self.rows())}", *self._picture)


def fields_of(config: Any) -> dict[str, Any]:
    """Every field of a Config and its value."""
    return {option.name: getattr(config, option.name) for option in options_of(type(config))}
