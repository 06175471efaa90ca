"""The panel without a front end: widgets are clicked in Python, runs are scripted (`fakelab`)."""

from __future__ import annotations

import base64
import io
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import fakelab
import ipywidgets
import pytest
from PIL import Image

from mlsyslab import steptime
from mlsyslab.contract import ConfigError, LabError, Range, RunError
from mlsyslab.teach.explore import Panel, explore
from mlsyslab.teach.panel import follow, words
from mlsyslab.teach.panel.follow import Pace
from mlsyslab.teach.panel.knobs import OWN, knob_for
from mlsyslab.teach.panel.picture import StepLines
from mlsyslab.teach.panel.words import Quantity, progress_words, queue_words

JOIN_S = 60.0
PAUSE_S = follow.pause_s  # the fixture below replaces it
ANSWER = ("input", "every rank", "storage/data")


@pytest.fixture(autouse=True)
def nothing_stays_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Frames without pauses, and no drawing thread alive after a test."""
    monkeypatch.setattr(follow, "pause_s", lambda drawing_s, share: 0.001)
    fakelab.started.clear()
    yield
    for run in fakelab.started:
        run.stop()
    alive = [t for t in threading.enumerate() if t.name == "mlsyslab-panel"]
    for thread in alive:
        thread.join(JOIN_S)
    assert not [thread for thread in alive if thread.is_alive()]


@pytest.fixture
def panel() -> Panel:
    return explore(fakelab, "quick", wait=False)


def endless() -> Panel:
    return explore(fakelab, fakelab.Config(endless=True, steps=5), wait=False)


def click(button: Any) -> None:
    """As the front end does: a disabled button sends nothing."""
    assert not button.disabled, button.description
    button.click()


def measured(panel: Panel) -> Panel:
    panel.skip()
    panel.run()
    assert panel.join(JOIN_S)
    return panel


def status(panel: Panel) -> str:
    assert 'role="status"' in panel.parts.status.value
    return re.sub("<[^>]*>", "", panel.parts.status.value)


def alt(panel: Panel) -> str:
    found = re.search(r'alt="([^"]*)"', panel.parts.picture.value)
    assert found
    return found[1]


def picture(panel: Panel) -> bytes:
    found = re.search(r'src="data:image/png;base64,([^"]*)"', panel.parts.picture.value)
    return base64.b64decode(found[1]) if found else b""


def enabled(panel: Panel) -> set[str]:
    p = panel.parts
    named = {
        "lock": p.lock,
        "skip": p.skip,
        "run": p.run,
        "stop": p.stop,
        "check": p.check,
        "reveal": p.reveal,
    }
    named |= {"apply": p.apply, "cause": p.cause, "preset": p.settings.preset}
    named |= {"knob": p.settings.knobs["steps"].widget, "guess": p.guesses["step_s"]}
    return {name for name, widget in named.items() if not widget.disabled}


# ---- whose turn it is
def test_run_is_locked_until_a_prediction_is_locked_in(panel: Panel) -> None:
    assert enabled(panel) == {"knob", "preset", "guess", "lock", "skip"}
    panel.parts.guesses["step_s"].value = "300"
    click(panel.parts.lock)
    assert panel.state == "predict"
    assert panel.error == "data wait is empty; type your guess in %, or skip the prediction"
    panel.parts.guesses["data_frac"].value = "60 %"
    click(panel.parts.lock)
    assert panel.error is None
    assert panel.state == "ready"
    assert enabled(panel) == {"knob", "preset", "run"}
    assert panel.round.yours == {"step_s": 0.3, "data_frac": 0.6}


@pytest.mark.parametrize("typed", ["abc", "nan", "inf", "-3", " "])
def test_a_guess_that_is_no_number_is_refused_in_one_line(panel: Panel, typed: str) -> None:
    panel.parts.guesses["step_s"].value = typed
    click(panel.parts.lock)
    assert panel.state == "predict"
    assert panel.error is not None
    assert "step" in panel.error
    assert panel.error in panel.parts.error.value.replace("&#x27;", "'")


def test_a_skipped_prediction_unlocks_run(panel: Panel) -> None:
    click(panel.parts.skip)
    assert panel.state == "ready"
    click(panel.parts.run)
    assert panel.join(JOIN_S)
    assert panel.error is None
    assert panel.state == "diagnose"


def test_run_from_code_without_a_prediction_says_whose_turn_it_is(panel: Panel) -> None:
    with pytest.raises(LabError, match=r"not now.*prediction"):
        panel.run()
    assert not fakelab.started


def test_the_library_s_prediction_is_hidden_until_the_run_is_measured(panel: Panel) -> None:
    panel.predict(step_s=0.3, data_frac=0.5)
    assert "300 ms" in panel.parts.table.value
    assert "270 to 360" not in panel.parts.table.value
    panel.run()
    assert panel.join(JOIN_S)
    assert "300 ms (270 to 360)" in panel.parts.table.value
    assert "in range" in panel.parts.table.value
    assert "26.7 /s" in panel.parts.table.value  # a quantity that nobody was asked for


def test_the_verdict_waits_for_the_learner_s_own_diagnosis(panel: Panel) -> None:
    measured(panel)
    assert enabled(panel) == {"knob", "preset", "run", "cause", "check", "reveal"}
    assert panel.diagnosis is None
    assert "waits for data" not in panel.parts.verdict.value
    assert "Data wait is most" not in alt(panel)
    click(panel.parts.check)
    assert panel.error == "choose a cause, a place and who acts first; or skip your own diagnosis"
    assert panel.state == "diagnose"
    for choice, value in zip((panel.parts.cause, panel.parts.where, panel.parts.owner), ANSWER, strict=True):
        choice.value = value
    click(panel.parts.check)
    assert panel.error is None
    assert panel.state == "verdict"
    assert panel.diagnosis is not None
    assert "60 % of the step waits for data." in panel.parts.verdict.value


def test_the_learner_s_diagnosis_can_be_skipped(panel: Panel) -> None:
    click(measured(panel).parts.reveal)
    assert panel.state == "verdict"
    assert "Your answer" not in panel.parts.verdict.value


def test_the_verdict_has_evidence_look_alikes_and_action_and_escapes_them(panel: Panel) -> None:
    measured(panel).answer("compute", "rank 0", "storage/data")
    shown = panel.parts.verdict.value
    assert "cause: you said compute; the library says input" in shown
    assert "who acts first: you said storage/data; the library agrees" in shown
    assert "data wait: 60 % (measured)" in shown
    assert "no sensor here for: device utilisation" in shown
    assert "&lt;slow storage&gt;; to tell: read the files without decoding" in shown
    assert "Keep decoded samples in memory (promised: 55 % (50 to 60) of the step saved" in shown


def test_an_answer_that_is_not_offered_is_refused(panel: Panel) -> None:
    with pytest.raises(ConfigError, match="cause='gremlins' is not offered; choose input, compute"):
        measured(panel).answer("gremlins", "every rank", "networking")
    assert panel.state == "diagnose"


def test_a_new_setting_starts_a_new_round(panel: Panel) -> None:
    measured(panel).answer(*ANSWER)
    panel.parts.settings.knobs["input_s"].widget.value = 10.0
    assert panel.state == "predict"
    assert panel.diagnosis is None
    assert panel.config().input_s == 0.01
    assert panel.parts.settings.preset.value == OWN
    assert picture(panel) == b""
    assert "waits for data" not in panel.parts.verdict.value


def test_every_state_is_said_in_words(panel: Panel) -> None:
    said = [status(panel)]
    panel.skip()
    said.append(status(panel))
    panel.run()
    panel.join(JOIN_S)
    said.append(status(panel))
    panel.reveal()
    said.append(status(panel))
    assert len(set(said)) == 4
    assert all(said)


# ---- running
def test_the_picture_and_the_words_follow_the_run(panel: Panel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []
    show = panel._show_picture
    monkeypatch.setattr(
        panel, "_show_picture", lambda data, text: (seen.append((str(len(data)), text)), show(data, text))
    )
    measured(panel)
    texts = [text for _, text in seen if "rank 0" in text]
    assert [re.findall(r"\d+ ms at step \d", text) for text in texts] == [
        [f"300 ms at step {step}", f"301 ms at step {step}"] for step in range(4)
    ]
    assert panel.parts.bar.value == 100
    assert "done, step 4 of 4" in panel.parts.words.value


def test_the_picture_has_a_fixed_size_and_an_opaque_background(panel: Panel) -> None:
    before = re.findall(r'(?:width|height)="\d+"', panel.parts.picture.value)
    assert before == ['width="960"', 'height="400"']
    measured(panel).answer(*ANSWER)
    assert re.findall(r'(?:width|height)="\d+"', panel.parts.picture.value) == before
    corner = Image.open(io.BytesIO(picture(panel))).convert("RGBA").getpixel((1, 1))
    assert corner == (255, 255, 255, 255)


def test_the_final_figure_replaces_the_live_one_with_the_numbers_in_its_alt_text(panel: Panel) -> None:
    live = picture(measured(panel))
    panel.answer(*ANSWER)
    assert picture(panel) not in (b"", live)
    assert "step 300 ms" in alt(panel)
    assert "data wait 60 %" in alt(panel)


def test_stop_ends_the_run_and_what_was_recorded_can_be_diagnosed() -> None:
    panel = endless()
    panel.skip()
    panel.run()
    assert enabled(panel) == {"stop"}
    panel.run_result.reach(3)
    click(panel.parts.stop)
    assert panel.join(JOIN_S)
    assert panel.run_result.stopped
    assert panel.state == "diagnose"
    assert status(panel).startswith("Stopped")
    assert panel.answer(*ANSWER).cause == "input"


def test_the_last_records_of_a_run_that_is_over_are_drawn() -> None:
    class Over:
        finished, progress, status = True, 1.0, {"state": "done"}

        def poll(self) -> list[dict[str, Any]]:
            return [{"rank": 0, "step": step, "world": 1, "step_s": 0.3} for step in range(3)]

    drawn: list[str] = []
    pace = Pace(3)
    follow.follow(Over(), StepLines(), pace, show=lambda _, text: drawn.append(text), tell=lambda *_: None)
    assert pace.step == 3
    assert drawn[-1] == "Time of each step: rank 0 300 ms at step 2"


def test_nothing_else_works_while_it_runs() -> None:
    panel = endless()
    panel.predict(step_s=0.2, data_frac=0.5)
    panel.run()
    panel.run_result.reach(2)
    assert panel.round.prediction is not None
    assert [row.predicted for row in panel.rows()] == [None, None]
    actions: list[Callable[[], object]] = [
        panel.run,
        panel.skip,
        panel.reveal,
        panel.apply,
        lambda: panel.set(steps=3),
    ]
    for action in actions:
        with pytest.raises(LabError, match="not now"):
            action()
    assert len(fakelab.started) == 1
    panel.stop()
    assert panel.join(JOIN_S)


def test_ten_clicks_from_ten_threads_start_one_run() -> None:
    panel = endless()
    panel.skip()
    gate = threading.Barrier(10)

    def press() -> None:
        gate.wait()
        panel.parts.run.click()

    threads = [threading.Thread(target=press) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
    assert len(fakelab.started) == 1
    assert len([t for t in threading.enumerate() if t.name == "mlsyslab-panel"]) == 1
    panel.run_result.reach(3)
    stopper = threading.Thread(target=panel.parts.stop.click)
    stopper.start()
    stopper.join(JOIN_S)
    assert panel.join(JOIN_S)
    assert panel.state == "diagnose"


def test_of_two_starts_that_both_found_the_panel_ready_one_is_refused(panel: Panel) -> None:
    with panel._starting("ready"), pytest.raises(LabError, match="not now"), panel._starting("ready"):
        pytest.fail("started twice")
    assert panel.state == "running"
    panel._to("predict")


def test_a_prediction_can_be_replaced_from_code_before_the_run(panel: Panel) -> None:
    panel.predict(step_s=0.3, data_frac=0.5)
    panel.run({"step_s": 0.2, "data_frac": 0.4}, wait=True)
    assert panel.round.yours == {"step_s": 0.2, "data_frac": 0.4}


def test_a_whole_round_works_from_a_thread_that_is_not_the_main_one(panel: Panel) -> None:
    def learner() -> None:
        panel.parts.skip.click()
        panel.parts.run.click()
        panel.join(JOIN_S)
        panel.parts.reveal.click()

    thread = threading.Thread(target=learner)
    thread.start()
    thread.join(JOIN_S)
    assert panel.error is None
    assert panel.state == "verdict"


def test_blocking_mode_draws_in_the_calling_thread_and_returns_the_finished_run(panel: Panel) -> None:
    before = threading.active_count()
    run = panel.run(prediction={"step_s": 0.3, "data_frac": 0.5}, wait=True)
    assert threading.active_count() == before
    assert run.finished
    assert panel.state == "diagnose"
    assert "step 3" in alt(panel)


def test_blocking_mode_skips_an_open_prediction() -> None:
    panel = explore(fakelab, "quick", wait=True)
    assert panel.run().finished
    assert panel.round.yours == {}


def test_blocking_mode_raises_what_the_run_raised() -> None:
    panel = explore(fakelab, fakelab.Config(fault="run", steps=4), wait=True)
    with pytest.raises(RunError, match="rank 1 failed: ValueError: no JPEG"):
        panel.run()
    assert panel.error == "rank 1 failed: ValueError: no JPEG"


def test_an_interrupt_in_blocking_mode_stops_the_run(panel: Panel, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(follow.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        panel.run(wait=True)
    assert panel.run_result.stopped
    assert panel.state == "ready"
    assert status(panel) == "Interrupted; the run was stopped."


def test_colab_blocks_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not explore(fakelab).wait
    monkeypatch.setitem(sys.modules, "google.colab", object())
    assert explore(fakelab).wait
    assert not explore(fakelab, wait=False).wait


# ---- the action
def test_apply_measures_again_and_shows_promised_beside_seen(panel: Panel) -> None:
    measured(panel).answer(*ANSWER)
    before = panel.run_result
    click(panel.parts.apply)
    assert panel.join(JOIN_S)
    assert panel.state == "verdict"
    assert panel.run_result is before
    assert panel.round.mitigated.config.input_s == 0.01
    said = "step went from 300 ms to 130 ms (57% saved); promised 130 ms (120 to 140): kept"
    assert said in panel.parts.outcome.value
    assert said in status(panel)


def test_apply_can_be_stopped() -> None:
    panel = endless()
    panel.skip()
    panel.run()
    panel.run_result.reach(3)
    panel.stop()
    assert panel.join(JOIN_S)
    panel.answer(*ANSWER)
    run = panel.apply()
    run.reach(3)
    click(panel.parts.stop)
    assert panel.join(JOIN_S)
    assert run.stopped
    assert panel.state == "verdict"


def test_apply_is_grey_where_only_a_person_can_act() -> None:
    panel = measured(explore(fakelab, "fast_input", wait=False))
    panel.answer("healthy", "every rank", "nobody")
    assert "apply" not in enabled(panel)
    assert "Nothing to do" in panel.parts.verdict.value
    with pytest.raises(LabError, match="takes a person"):
        panel.apply()


# ---- what goes wrong
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("start", "cannot write runs/x: the disk is full; choose another folder with out="),
        ("run", "rank 1 failed: ValueError: no JPEG"),
        ("poll", "KeyError: 'rank' (a bug in mlsyslab: re-run this cell, and please report it)"),
        (
            "predict",
            "ZeroDivisionError: float division by zero (a bug in mlsyslab: re-run this cell, and please report it)",
        ),
    ],
)
def test_a_failure_is_one_sentence_in_the_panel_and_the_learner_can_go_on(fault: str, sentence: str) -> None:
    panel = explore(fakelab, fakelab.Config(fault=fault, steps=4), wait=False)
    click(panel.parts.skip)
    click(panel.parts.run)
    assert panel.join(JOIN_S)
    assert panel.error == sentence
    assert 'role="alert"' in panel.parts.error.value
    assert "\n" not in sentence
    assert panel.state == "ready"
    assert all(run.stopped for run in fakelab.started)
    panel.set(fault="none")
    assert panel.error is None
    measured(panel)
    assert panel.state == "diagnose"


def test_a_run_that_gets_no_drawing_thread_is_stopped_and_said(
    panel: Panel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    panel.skip()
    monkeypatch.setattr(follow.threading.Thread, "start", refuse)
    click(panel.parts.run)
    assert panel.error is not None
    assert "can't start new thread" in panel.error
    assert panel.run_result.stopped
    assert panel.state == "ready"


def test_a_figure_that_cannot_be_drawn_does_not_hide_the_verdict() -> None:
    panel = measured(explore(fakelab, fakelab.Config(fault="plot", steps=4), wait=False))
    click(panel.parts.reveal)
    assert panel.state == "verdict"
    assert "waits for data" in panel.parts.verdict.value
    assert panel.error is not None
    assert panel.error.startswith("TypeError: unsupported operand")


def test_a_run_stopped_before_its_first_record_asks_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    panel = endless()
    monkeypatch.setattr(fakelab.Run, "poll", lambda self: [])
    panel.skip()
    panel.run()
    click(panel.parts.stop)
    assert panel.join(JOIN_S)
    assert panel.error == "no steady step was recorded; run more steps"
    assert panel.state == "ready"


def test_settings_that_do_not_fit_together_are_one_line_and_nothing_is_repaired(panel: Panel) -> None:
    with pytest.raises(ConfigError):
        panel.set(ranks=12, cache="memory")
    assert panel.error == "cache='memory' does not fit ranks=12; lower ranks"
    assert panel.parts.settings.knobs["ranks"].widget.value == 12
    click(panel.parts.skip)
    assert panel.state == "predict"
    assert panel.error == "cache='memory' does not fit ranks=12; lower ranks"
    panel.parts.settings.knobs["ranks"].widget.value = 4
    assert panel.error is None


def test_an_unknown_setting_or_preset_is_named(panel: Panel) -> None:
    with pytest.raises(ConfigError, match="no setting rank; there are ranks, steps"):
        panel.set(rank=3)
    with pytest.raises(ConfigError, match="preset='slow' is not one of quick, worked_example"):
        explore(fakelab, "slow")
    with pytest.raises(ConfigError, match="a prediction gives step_s, data_frac; got step"):
        panel.predict(step=0.3)


# ---- knobs
def test_every_knob_gives_back_each_preset_exactly() -> None:
    for name, config in fakelab.PRESETS.items():
        assert explore(fakelab, name).config() == config


def test_every_knob_of_the_step_time_lab_gives_back_each_preset_exactly() -> None:
    for config in steptime.PRESETS.values():
        assert explore(steptime, config).config() == config


def test_choosing_a_preset_turns_the_knobs(panel: Panel) -> None:
    panel.parts.settings.preset.value = "fast_input"
    assert panel.config() == fakelab.PRESETS["fast_input"]
    assert panel.parts.settings.preset.value == "fast_input"
    assert panel.state == "predict"


def test_a_value_beyond_the_slider_widens_it_instead_of_being_clipped(panel: Panel) -> None:
    panel.set(ranks=64, input_s=12.5, scaling=(1, 2, 4), rate_per_s=5.5, lr=1e-4)
    config = panel.config()
    assert (config.ranks, config.input_s, config.scaling) == (64, 12.5, (1, 2, 4))
    assert (config.rate_per_s, config.lr) == (5.5, 1e-4)
    with pytest.raises(ConfigError, match=r"ranks=65 is outside 1\.\.64"):
        panel.set(ranks=65)
    assert panel.config().ranks == 64


def test_seconds_are_shown_in_milliseconds_with_unit_and_sentence() -> None:
    options = {item.name: item for item in explore(fakelab).view.options}
    knob = knob_for(options["input_s"], list(fakelab.PRESETS.values()))
    assert knob.widget.description == "input (ms)"
    assert "wait for data" in knob.widget.tooltip
    knob.put(0.0375)
    assert knob.widget.value == 37.5
    assert knob.get() == 0.0375


def test_advanced_settings_are_folded_not_gone(panel: Panel) -> None:
    (folded,) = [child for child in panel.parts.root.children if isinstance(child, ipywidgets.Accordion)]
    assert folded.selected_index is None
    assert panel.parts.settings.knobs["scaling"].widget in folded.children[0].children


def test_each_part_has_its_class_for_tests_and_style(panel: Panel) -> None:
    p = panel.parts
    assert "mls-panel" in p.root._dom_classes
    named = [(p.run, "run"), (p.stop, "stop"), (p.lock, "lock"), (p.skip, "skip"), (p.check, "check")]
    named += [
        (p.apply, "apply"),
        (p.cause, "cause"),
        (p.where, "where"),
        (p.owner, "owner"),
        (p.error, "error"),
    ]
    named += [(p.settings.preset, "preset"), (p.settings.knobs["ranks"].widget, "knob-ranks")]
    named += [(p.guesses["data_frac"], "predict-data_frac")]
    for widget, name in named:
        assert f"mls-{name}" in widget._dom_classes


# ---- mystery, badge, static copy
def test_a_mystery_hides_the_settings_and_the_prediction_until_the_verdict() -> None:
    panel = explore(fakelab, "quick", mystery=True, wait=False)
    knobs = panel.parts.settings.knobs.values()
    assert all(knob.widget.layout.visibility == "hidden" for knob in knobs)
    assert panel.parts.settings.preset.value == OWN
    assert {"knob", "preset"} & enabled(panel) == set()
    with pytest.raises(ConfigError, match="mystery"):
        panel.set(steps=3)
    measured(panel)
    assert panel.run_result.config == fakelab.PRESETS["quick"]
    assert "270 to 360" not in panel.parts.table.value
    panel.reveal()
    assert "270 to 360" in panel.parts.table.value


def test_the_badge_says_measured_here_and_names_what_was_paced(panel: Panel) -> None:
    assert "measured here, paced compute" in panel.parts.head.value
    panel.set(paced=False)
    assert "paced" not in panel.parts.head.value


def test_the_static_copy_has_the_verdict_the_table_and_the_picture(panel: Panel) -> None:
    result = measured(panel).show_result()
    assert "input" not in str(result).splitlines()[0]
    panel.reveal()
    bundle, metadata = panel.show_result()._repr_mimebundle_()
    assert bundle["text/plain"].splitlines()[0] == "input; where: every rank; acts first: storage/data"
    assert base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG")
    assert "data wait 60 %" in metadata["image/png"]["alt"]


def test_a_lab_that_gives_nothing_but_the_contract_has_a_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(fakelab, "PANEL")
    panel = measured(explore(fakelab, "quick", wait=False))
    assert (
        panel.view.title
        == "A lab whose runs are scripted: each poll brings one step, nothing is measured, no thread, no process."
    )
    assert [q.label for q in panel.quantities] == ["step", "data"]
    assert panel.parts.where.options[1:] == ("every rank", "rank 0", "rank 1", "nowhere")
    assert panel.reveal().cause == "input"


# ---- words
def test_progress_is_said_with_step_time_left_and_queue() -> None:
    said = progress_words({"state": "running"}, step=24, steps=40, share=0.6, left_s=7.2)
    assert said == "step 24 of 40, 7 s left, queue: first"
    waiting = {"state": "queued", "position": 1, "holder": "ada (process 12, steptime)"}
    assert queue_words(waiting) == "queue: waiting, 2nd behind ada (process 12, steptime)"
    preparing = {"state": "preparing", "message": "measuring this machine"}
    assert (
        progress_words(preparing, step=None, steps=40, share=0, left_s=None)
        == "measuring this machine, queue: first"
    )


@pytest.mark.parametrize(
    ("number", "said"), [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (22, "22nd")]
)
def test_ordinals(number: int, said: str) -> None:
    assert words.ordinal(number) == said


def test_pace_follows_the_slowest_rank_and_starts_anew_with_another_world() -> None:
    pace = Pace(10)
    assert (pace.step, pace.left_s) == (None, None)
    pace.see([{"rank": r, "step": s, "world": 2} for r, s in ((0, 0), (0, 1), (1, 0))], 0.1, now=5.0)
    assert pace.step == 1
    pace.see([{"rank": 1, "step": 1, "world": 2}], 0.2, now=6.0)
    assert pace.step == 2
    assert pace.left_s == pytest.approx(8.0)
    pace.see([{"rank": 0, "step": 0, "world": 4}], 0.5, now=7.0)
    assert pace.step == 1


def test_a_costly_picture_comes_less_often() -> None:
    assert PAUSE_S(0.01) == follow.FRAME_S == 0.125
    assert PAUSE_S(0.2) == pytest.approx(0.8)
    assert PAUSE_S(0.05, 0.04) == pytest.approx(
        1.2
    )  # a picture that may take less of a core comes less often


def test_residuals_say_on_which_side_of_the_range_the_measurement_is() -> None:
    step = Quantity.named("step_s")
    assert (step.label, step.unit) == ("step", "ms")
    row = words.Row(quantity=step, predicted=Range(0.09, 0.1, 0.12), measured=0.15)
    assert row.residual() == "+50.0 ms, above its range"
    assert (
        words.Row(quantity=step, predicted=Range(0.09, 0.1, 0.12), measured=0.05).residual()
        == "−50.0 ms, below its range"
    )
    assert words.Row(quantity=step, measured=0.05).residual() == "–"


def test_not_a_number_is_never_shown_as_a_number() -> None:
    assert Quantity.named("step_s").show(float("nan")) == "–"
    assert Quantity.named("step_s").show(None) == "–"
