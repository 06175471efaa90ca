"""One live panel for any lab: predict, measure, diagnose, and only then the verdict.

    from mlsyslab import steptime
    from mlsyslab.teach.explore import explore
    explore(steptime)

Made from the lab's contract alone (Config, PRESETS, predict, start, summary, diagnose, plot, CAUSES); what a lab may
add is in `panel.labview`. After a kernel restart the old panel stays on the screen and does nothing: re-run its cell.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from html import escape
from typing import Any

from mlsyslab.contract import ConfigError, Diagnosis, LabError
from mlsyslab.teach.panel.board import TURNS, Board, fields_of
from mlsyslab.teach.panel.follow import Driver, Pace, follow
from mlsyslab.teach.panel.knobs import OWN
from mlsyslab.teach.panel.parts import CHOOSE
from mlsyslab.teach.panel.rounds import Round
from mlsyslab.teach.panel.verdict import verdict_html

IDLE = tuple(state for state in TURNS if state != "running")


class Panel(Board):
    """The panel and its state: "predict", "ready", "running", "diagnose" or "verdict".

    Methods do what the buttons do, and raise what goes wrong; a button shows it in the panel instead. Either way
    `error` holds the sentence, None while all is well. Every method may be called from any thread.
    """

    def __init__(
        self, lab: Any, preset: Any = "worked_example", *, wait: bool = False, mystery: bool = False
    ) -> None:
        super().__init__(lab, preset, mystery=mystery)
        self.lab, self.wait = lab, wait
        self._driver = Driver(self._draw)
        self._connect()

    def _connect(self) -> None:
        parts = self.parts
        for button, action in {
            parts.lock: self._lock_clicked,
            parts.skip: self.skip,
            parts.run: self.run,
            parts.stop: self.stop,
            parts.check: self._check_clicked,
            parts.reveal: self.reveal,
            parts.apply: self.apply,
        }.items():
            button.on_click(self._callback(action))
        self.settings.watch(self._callback(self._knob_moved), self._callback(self._preset_chosen))

    # ---- whatever goes wrong is one sentence in the panel
    def _callback(self, action: Callable[..., Any]) -> Callable[..., None]:
        """For a widget: what a callback raises would vanish into a log, so it goes into the panel."""

        def handler(*given: Any) -> None:
            try:
                with suppress(KeyboardInterrupt):  # of a blocking run; `_failed` has left the panel in order
                    action(*(one for one in given if isinstance(one, str)))  # a name, not the button
            except Exception as error:
                self._fail(error)

        return handler

    @contextmanager
    def _turn(self, *states: str) -> Iterator[None]:
        """Refuse what is not the learner's turn; show what goes wrong, and raise it."""
        try:
            with self._lock:
                if self.state not in states:
                    raise LabError(f"not now. {TURNS[self.state][1]}")
                self.error = None
                self.parts.show_error("")
            yield
        except Exception as error:
            self._fail(error)
            raise

    # ---- settings
    def config(self) -> Any:
        """The Config that the knobs stand for; raises ConfigError."""
        return self.lab.Config(**self.settings.values())

    def set(self, **fields: Any) -> None:
        """Turn knobs, in the Config's own units; raises ConfigError. New settings ask for a new prediction."""
        with self._turn(*IDLE):
            if self.mystery:
                raise ConfigError("the settings of a mystery are fixed; run it as it is")
            self.settings.put(fields)
            self._new_round()

    def _knob_moved(self) -> None:
        with self._turn(*IDLE):
            self.settings.put({})  # no preset any more
            self._new_round()

    def _preset_chosen(self, name: str) -> None:
        if name != OWN:
            with self._turn(*IDLE):
                self.settings.put(fields_of(self.view.preset(name)), name)
                self._new_round()

    def _new_round(self) -> None:
        with self._lock:
            self.round = Round(self.round.config)
            self._clear_picture()
            self._to("predict")
            self.round.config = self.config()
            self._to("predict")

    # ---- prediction
    def predict(self, **values: float) -> None:
        """Lock a prediction in, each value in its key's own unit (seconds, fractions); raises ConfigError."""
        with self._turn(*IDLE):
            asked = {quantity.key: quantity for quantity in self.quantities}
            if set(values) != set(asked):
                raise ConfigError(
                    f"a prediction gives {', '.join(asked)}; got {', '.join(values) or 'nothing'}"
                )
            for key, value in values.items():
                self.parts.guesses[key].value = f"{value * asked[key].scale:g}"
            self._begin_with(values)

    def _lock_clicked(self) -> None:
        with self._turn("predict", "verdict"):
            self._begin_with({q.key: q.parse(self.parts.guesses[q.key].value) for q in self.quantities})

    def skip(self) -> None:
        """Run without a prediction."""
        with self._turn("predict", "verdict"):
            self._begin_with({})

    def _begin_with(self, yours: Mapping[str, float]) -> None:
        config = self.config()
        with self._lock:
            self.round = Round(config, yours=yours)
            self._clear_picture()
            self._to("ready")

    # ---- measurement
    def run(self, prediction: Mapping[str, float] | None = None, *, wait: bool | None = None) -> Any:
        """Measure; returns the Run, at once or, with wait=True (Colab, Run All, nbval), when it is over.

        prediction: locked in first. Without one, blocking mode skips an open prediction, since nobody is there to
        ask; otherwise it must have been locked or skipped. Raises LabError; in blocking mode also what the run raised.
        """
        wait = self.wait if wait is None else wait
        if prediction is not None:
            self.predict(**prediction)
        elif wait and self.state == "predict":
            self.skip()
        with self._turn("ready", "diagnose", "verdict"), self._starting("ready"):
            config = self.config()
            self.round = Round(config, yours=self.round.yours)
            self.parts.offer_wheres(self.view.wheres(config))
            self.parts.show_progress(0, "starting")
            self.round.prediction = self.lab.predict(config)
            self.round.run = run = self.lab.start(config)
        self._launch(run, self._measured, "ready", wait)
        return run

    @contextmanager
    def _starting(self, fallback: str, say: str = "") -> Iterator[None]:
        """The panel is taken before anything is started, so that a second click cannot start a second run."""
        with self._lock:
            if self.state == "running":
                raise LabError(f"not now. {TURNS['running'][1]}")
            self._to("running", say)
        try:
            yield
        except BaseException:
            self._to(fallback)
            raise

    def _launch(self, run: Any, ended: Callable[[Any], None], fallback: str, wait: bool) -> None:
        def failed(error: BaseException) -> None:
            interrupted = isinstance(error, KeyboardInterrupt)
            self._to(fallback, "Interrupted; the run was stopped." if interrupted else "")
            if not interrupted:
                self._fail(error)

        if wait:
            self._display_once()
            self.parts.stop.disabled = True  # its click would wait for the cell
            self.parts.say("Running; to stop it, interrupt the kernel (the ■ of the toolbar).")
        self._driver.launch(run, ended=ended, failed=failed, wait=wait)

    def _draw(self, run: Any) -> None:
        pace = Pace(getattr(self.round.config, "steps", None))
        picture = self.view.live_picture(self.quantities)
        follow(run, picture, pace, show=self._show_picture, tell=self._tell)

    def _measured(self, run: Any) -> None:
        measured = dict(self.lab.summary(run))
        with self._lock:
            self.round.measured = measured
            stopped = run.status["state"] != "done"
            self._to(
                "diagnose", f"Stopped; what was recorded counts. {TURNS['diagnose'][1]}" if stopped else ""
            )

    def stop(self) -> None:
        """End the run; what was recorded stays."""
        with self._turn("running"):
            self._driver.stop()
            with self._lock:
                if self.state == "running":  # it may have ended meanwhile
                    self.parts.stop.disabled = True
                    self.parts.say("Stopping …")

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the run is over and drawn; False when `timeout_s` passed first."""
        return self._driver.join(timeout_s)

    # ---- diagnosis, verdict, action
    def answer(self, cause: str, where: str, owner: str) -> Diagnosis:
        """Commit a diagnosis, then see the library's; raises ConfigError for a word that the panel does not offer."""
        with self._turn("diagnose"):
            chosen = {"cause": cause, "where": where, "owner": owner}
            for name, value in chosen.items():
                choice = getattr(self.parts, name)
                if value not in choice.options[1:]:
                    raise ConfigError(
                        f"{name}={value!r} is not offered; choose {', '.join(choice.options[1:])}"
                    )
                choice.value = value
            return self._verdict(chosen)

    def _check_clicked(self) -> None:
        with self._turn("diagnose"):
            chosen = self.parts.answers()
            if CHOOSE in chosen.values():
                raise ConfigError("choose a cause, a place and who acts first; or skip your own diagnosis")
            self._verdict(chosen)

    def reveal(self) -> Diagnosis:
        """The verdict without a diagnosis of one's own."""
        with self._turn("diagnose"):
            return self._verdict({})

    def _verdict(self, answer: dict[str, str]) -> Diagnosis:
        diagnosis = self.lab.diagnose(self.round.run)
        with self._lock:
            self.round.diagnosis = diagnosis
            self.parts.verdict.value = verdict_html(diagnosis, answer)
            try:
                self._show_plot(self.round.run, str(diagnosis))
            finally:  # a figure that cannot be drawn hides no verdict
                self._to("verdict")
        return diagnosis

    def apply(self, *, wait: bool | None = None) -> Any:
        """Make the change of the verdict's first action, measure again, show promised beside seen; returns the Run."""
        with self._turn("verdict"):
            action = self.round.action()
            if action is None:
                raise LabError("this verdict has no action that a machine can apply; it takes a person")
            with self._starting("verdict", f"Measuring again after: {action.name}."):
                self.round.mitigated = run = self.lab.start(self.round.changed_config())
        self._launch(run, self._mitigated, "verdict", self.wait if wait is None else wait)
        return run

    def _mitigated(self, run: Any) -> None:
        said = self.round.outcome(self.quantities, dict(self.lab.summary(run)))
        self.parts.outcome.value = f"<b>{escape(said)}</b>"
        try:
            self._show_plot(run, said)
        finally:
            self._to("verdict", f"Measured again: {said}.")

    # ---- the round, by the names that notebooks use
    @property
    def run_result(self) -> Any:
        """The Run that was measured last, None before the first."""
        return self.round.run

    @property
    def diagnosis(self) -> Diagnosis | None:
        """The library's verdict, None until the learner's own was given or skipped."""
        return self.round.diagnosis


def explore(
    lab: Any, preset: Any = "worked_example", *, wait: bool | None = None, mystery: bool = False
) -> Panel:
    """A live panel for `lab`, starting from a preset's name or from a Config.

    wait: True measures in the thread that asks (blocking mode), False in the background; None blocks only in Colab,
    which does not show what background threads draw. mystery hides the settings. Raises ConfigError for a preset
    that the lab does not have.
    """
    return Panel(lab, preset, wait="google.colab" in sys.modules if wait is None else wait, mystery=mystery)
