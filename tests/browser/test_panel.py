"""The panel in a real JupyterLab: what a learner sees and does, and what must not happen on the way."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from driver import (
    TIMEOUT_MS,
    open_notebook,
    reload_notebook,
    restart_kernel,
    run_all,
    run_cell,
    set_theme,
    source,
    wait_enabled,
    wait_for_new_picture,
)

pytestmark = pytest.mark.browser

FAKE = Path(__file__).parents[1] / "fakelab.py"
FAKE_PANEL = "import fakelab\nfrom mlsyslab.teach.explore import explore\npanel = explore(fakelab, {})\npanel"
ENDLESS = FAKE_PANEL.format("fakelab.Config(endless=True, steps=1000)")
STEPTIME = """from dataclasses import replace
from mlsyslab import steptime
from mlsyslab.teach.explore import explore
panel = explore(steptime, replace(steptime.PRESETS["quick"], steps=5000))
panel"""
STRAGGLER = """from dataclasses import replace
from mlsyslab import straggler
from mlsyslab.teach.explore import explore
panel = explore(straggler, replace(straggler.PRESETS["quick"], magnitude=2.0, steps=5000))
panel"""
SERVING = """from mlsyslab import serving
from mlsyslab.teach.explore import explore
panel = explore(serving, serving.Config(max_batch=1, paced=True, paced_base_s=0.02, rate_per_s=200.0, duration_s=60.0))
panel"""
PARALLELISM = """from mlsyslab import parallelism
from mlsyslab.teach.explore import explore
panel = explore(parallelism, parallelism.Config(model="17M", strategy="ddp", ranks=2, batch=4, memory_cap_mb=250.0))
panel"""
SCALEUP = """from mlsyslab import scaleup
from mlsyslab.teach.explore import explore
panel = explore(scaleup, "quick")
panel"""
GONE_WITHIN_S = 3.0
NOTEBOOKS, THEMES = "@jupyterlab/notebook-extension:tracker", "@jupyterlab/apputils-extension:themes"
READ = (".mls-title", ".mls-badge", ".mls-status", ".mls-table td", ".mls-small", ".mls-verdict li")
# At every animation frame: the width that Lab gives (it moves its own side bars), whether the panel fills it, the height
# of the picture, how far the table is below the top of the panel, and the height of the panel.
WATCH = """() => { window.seen = {}; const look = () => {
  const box = document.querySelector('.mls-panel'), image = box?.querySelector('img.mls-live'), table = box?.querySelector('.mls-table');
  if (image && table) {
    const width = box.closest('.jp-OutputArea-output').clientWidth;
    const filled = Math.abs(box.offsetWidth - Math.min(width, 990)) < 2;
    const below = Math.round(table.getBoundingClientRect().top - box.getBoundingClientRect().top);
    (window.seen[width] ??= new Set()).add([filled, image.getBoundingClientRect().height, below, box.scrollHeight].join()); }
  requestAnimationFrame(look); }; look(); }"""
SEEN = "() => Object.values(window.seen).map(s => [...s])"
# Contrast of an element's text with what is behind it (WCAG: 4.5 is readable).
CONTRAST = """selector => {
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => { const f = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b); };
  let element = document.querySelector(selector), behind = element;
  while (behind && (rgb(getComputedStyle(behind).backgroundColor)[3] === 0)) behind = behind.parentElement;
  const [a, b] = [light(rgb(getComputedStyle(element).color)), light(rgb(getComputedStyle(behind).backgroundColor))];
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); }"""


def show(page: Any, lab: Any, name: str, *cells: str) -> None:
    """Open a notebook and run it."""
    open_notebook(page, lab, lab.notebook(name, *cells, beside=(FAKE,)))
    run_all(page)
    page.locator(".mls-panel").wait_for()


def guess(page: Any, step_ms: str, data_percent: str) -> None:
    page.locator(".mls-predict-step_s input").fill(step_ms)
    page.locator(".mls-predict-data_frac input").fill(data_percent)
    page.locator("button.mls-lock").click()
    wait_enabled(page, "button.mls-run")


def choose(page: Any, cause: str, where: str, owner: str) -> None:
    for name, value in (("cause", cause), ("where", where), ("owner", owner)):
        page.locator(f".mls-{name} select").select_option(value)
    page.locator("button.mls-check").click()


def start(page: Any) -> str:
    """Press Run; returns once a first picture is there."""
    before = source(page)
    page.locator("button.mls-run").click()
    wait_for_new_picture(page, before)
    return source(page)


def stop(page: Any) -> None:
    page.locator("button.mls-stop").click()
    wait_for_words(page, ".mls-status", "^Stopped; what was recorded counts")
    wait_enabled(page, "button.mls-run")


def words(page: Any, selector: str) -> str:
    return str(page.locator(selector).inner_text())


def wait_for_words(page: Any, selector: str, pattern: str) -> None:
    page.wait_for_function(
        "([selector, pattern]) => new RegExp(pattern).test(document.querySelector(selector)?.innerText ?? '')",
        arg=[selector, pattern],
        timeout=TIMEOUT_MS,
    )


def test_a_round_slider_prediction_run_stop_verdict(page: Any, lab: Any) -> None:
    show(page, lab, "round.ipynb", ENDLESS)
    assert page.locator("button.mls-run").is_disabled()
    page.locator(".mls-knob-ranks .noUi-handle").focus()
    page.keyboard.press("ArrowRight")
    wait_for_words(page, ".mls-knob-ranks", "3")
    guess(page, "300", "60")
    first = start(page)
    assert page.locator("button.mls-lock").is_disabled()
    wait_for_words(page, ".mls-words", r"step ([5-9]|\d\d) of 1000")
    wait_for_new_picture(page, first)
    assert "rank 2" in page.locator("img.mls-live").get_attribute("alt")
    stop(page)
    assert "step" in words(page, ".mls-table")
    assert "waits for data" not in words(page, ".mls-panel")
    choose(page, "input", "every rank", "networking")
    wait_enabled(page, "button.mls-apply")
    verdict = words(page, ".mls-verdict")
    assert "60 % of the step waits for data." in verdict
    assert "who acts first: you said networking; the library says storage/data" in verdict


def test_the_panel_does_not_grow_or_shrink_while_it_runs(page: Any, lab: Any) -> None:
    show(page, lab, "still.ipynb", FAKE_PANEL.format('"worked_example"'))
    guess(page, "300", "60")
    page.evaluate(WATCH)
    start(page)
    wait_enabled(page, "button.mls-check")
    for frames in page.evaluate(SEEN):
        assert len(frames) == 1, f"filled, picture height, place of the table, height of the panel: {frames}"
        assert frames[0].startswith("true"), frames


def test_run_works_by_keyboard_alone(page: Any, lab: Any) -> None:
    show(page, lab, "keyboard.ipynb", FAKE_PANEL.format('"quick"'))
    page.locator("button.mls-skip").focus()
    page.keyboard.press("Space")
    wait_enabled(page, "button.mls-run")
    page.locator("button.mls-run").focus()
    page.keyboard.press("Enter")
    wait_enabled(page, "button.mls-reveal")
    page.locator("button.mls-reveal").focus()
    page.keyboard.press("Enter")
    wait_for_words(page, ".mls-status", "^The verdict is below")
    assert "waits for data" in words(page, ".mls-verdict")


def test_a_failing_run_is_one_sentence_in_the_panel(page: Any, lab: Any) -> None:
    show(page, lab, "fails.ipynb", FAKE_PANEL.format('fakelab.Config(fault="run")'))
    page.locator("button.mls-skip").click()
    wait_enabled(page, "button.mls-run")
    page.locator("button.mls-run").click()
    wait_for_words(page, ".mls-error", "rank 1 failed: ValueError: no JPEG")
    assert page.locator("[role=alert]").count() == 1
    wait_enabled(page, "button.mls-run")


def test_stop_works_while_another_cell_keeps_the_kernel_busy(page: Any, lab: Any) -> None:
    """The click waits for the cell (ipykernel 7.4), and then the run ends, once."""
    busy = "import threading\nrelease = threading.Event()\nthreading.Timer(4, release.set).start()\n_ = release.wait(60)"
    show(page, lab, "busy.ipynb", ENDLESS, "1", "len(fakelab.started)")
    page.locator("button.mls-skip").click()
    wait_enabled(page, "button.mls-run")
    first = start(page)
    page.evaluate(
        "code => window.jupyterapp.shell.currentWidget.content.widgets[1].model.sharedModel.setSource(code)",
        busy,
    )
    run_cell(page, 1, wait=False)
    wait_for_new_picture(page, first)
    stop(page)
    run_cell(page, 2)
    assert words(page, ".jp-Cell:nth-of-type(3) .jp-OutputArea-output").strip() == "1"


def test_blocking_mode_shows_pictures_in_the_cell_that_runs(page: Any, lab: Any) -> None:
    cell = "import fakelab\nfrom mlsyslab.teach.explore import explore\nexplore(fakelab, wait=True).run() and None"
    open_notebook(page, lab, lab.notebook("blocking.ipynb", cell, beside=(FAKE,)))
    run_cell(page, 0, wait=False)
    page.locator("img.mls-live").wait_for()
    wait_for_words(page, ".mls-words", r"step \d+ of 12")
    wait_for_new_picture(page, source(page))
    wait_enabled(page, "button.mls-check")
    assert "step" in words(page, ".mls-table")


def test_a_reload_in_mid_run_keeps_panel_picture_and_stop(page: Any, lab: Any) -> None:
    show(page, lab, "reload.ipynb", ENDLESS)
    page.locator("button.mls-skip").click()
    wait_enabled(page, "button.mls-run")
    start(page)
    reload_notebook(page, lab, "reload.ipynb")
    page.locator("img.mls-live").wait_for()
    wait_for_new_picture(page, source(page))
    stop(page)
    assert words(page, ".mls-status").startswith("Stopped")


def test_scrolled_away_and_back_the_picture_still_moves(page: Any, lab: Any) -> None:
    lab.set_setting(NOTEBOOKS, windowingMode="full")  # Lab takes what is out of sight out of the page
    try:
        cells = [ENDLESS, *["print('line\\n' * 60)"] * 8]
        open_notebook(page, lab, lab.notebook("scroll.ipynb", *cells, beside=(FAKE,)))
        run_all(page)
        page.evaluate("() => window.jupyterapp.shell.currentWidget.content.scrollToItem(0)")
        page.locator("button.mls-skip").click()
        wait_enabled(page, "button.mls-run")
        start(page)
        page.evaluate("() => window.jupyterapp.shell.currentWidget.content.scrollToItem(8)")
        page.wait_for_function(
            "() => { const p = document.querySelector('.mls-panel'); return !p || p.getBoundingClientRect().bottom < 0; }"
        )
        page.evaluate("() => window.jupyterapp.shell.currentWidget.content.scrollToItem(0)")
        page.locator("img.mls-live").wait_for()
        wait_for_new_picture(page, source(page))
        stop(page)
        assert words(page, ".mls-status").startswith("Stopped")
    finally:
        lab.set_setting(NOTEBOOKS, windowingMode="none")


def test_text_is_readable_in_light_and_dark(page: Any, lab: Any) -> None:
    show(page, lab, "theme.ipynb", FAKE_PANEL.format('"quick"'))
    page.locator("button.mls-skip").click()
    wait_enabled(page, "button.mls-run")
    page.locator("button.mls-run").click()
    wait_enabled(page, "button.mls-reveal")
    page.locator("button.mls-reveal").click()
    wait_for_words(page, ".mls-status", "^The verdict is below")
    try:
        for theme in ("JupyterLab Light", "JupyterLab Dark"):
            if theme != "JupyterLab Light":  # Lab starts with it, and trips over a second quick change
                set_theme(page, theme)
            for selector in READ:
                assert page.evaluate(CONTRAST, selector) >= 4.5, f"{selector} in {theme}"
    finally:
        lab.set_setting(THEMES, theme="JupyterLab Light")


# ---- with real ranks
def test_the_step_time_lab_runs_stops_and_gives_its_verdict(page: Any, lab: Any) -> None:
    show(page, lab, "steptime.ipynb", STEPTIME)
    guess(page, "50", "50")
    first = start(page)
    wait_for_words(page, ".mls-words", r"step \d\d+ of 5000")
    wait_for_new_picture(page, first)
    stop(page)
    assert words(page, ".mls-error") == ""
    choose(page, "input", "every rank", "storage/data")
    wait_for_words(page, ".mls-status", "^The verdict is below")
    assert "Evidence" in words(page, ".mls-verdict")
    assert page.locator("img.mls-live").get_attribute("alt")


def test_the_straggler_lab_shows_a_lane_for_each_rank_and_names_the_slow_one(page: Any, lab: Any) -> None:
    show(page, lab, "straggler.ipynb", STRAGGLER)
    page.locator("button.mls-skip").click()
    wait_enabled(page, "button.mls-run")
    first = start(page)
    wait_for_words(page, ".mls-words", r"step ([2-9]\d|\d{3,}) of 5000")
    wait_for_new_picture(page, first)
    lanes = page.locator("img.mls-live").get_attribute("alt")
    assert all(word in lanes for word in ("rank 0", "rank 1", "own work", "wait")), lanes
    stop(page)
    assert words(page, ".mls-error") == ""
    choose(page, "compute", "rank 1", "model code")
    wait_for_words(page, ".mls-status", "^The verdict is below")
    assert "where: rank 1" in words(page, ".mls-verdict")


def test_the_serving_lab_shows_each_request_and_says_what_was_too_much(page: Any, lab: Any) -> None:
    """A replica that does 49 rows a second, and 200 a second that come."""
    show(page, lab, "serving.ipynb", SERVING)
    page.locator(".mls-predict-p95_s input").fill("100")
    page.locator(".mls-predict-p50_s input").fill("50")
    page.locator("button.mls-lock").click()
    wait_enabled(page, "button.mls-run")
    first = start(page)
    wait_for_words(page, ".mls-words", r"([5-9]|\d\d)% done")
    wait_for_new_picture(page, first)
    assert "outcomes; of the last" in page.locator("img.mls-live").get_attribute("alt")
    stop(page)
    assert words(page, ".mls-error") == ""
    choose(page, "saturated", "replicas", "serving")
    wait_for_words(page, ".mls-status", "^The verdict is below")
    assert "saturated; where: replicas" in words(page, ".mls-verdict")


def test_the_parallelism_lab_explains_memory_that_runs_out_and_applies_the_remedy(
    page: Any, lab: Any
) -> None:
    show(page, lab, "parallelism.ipynb", PARALLELISM)
    page.locator(".mls-predict-peak_bytes input").fill("300")
    page.locator(".mls-predict-comm_bytes input").fill("70")
    page.locator("button.mls-lock").click()
    wait_enabled(page, "button.mls-run")
    page.locator("button.mls-run").click()
    wait_for_words(page, ".mls-status", "say what limits this run")
    assert words(page, ".mls-error") == ""
    choose(page, "memory", "every rank", "model code")
    wait_for_words(page, ".mls-status", "^The verdict is below")
    assert "memory (optimizer); where: every rank" in words(page, ".mls-verdict")
    wait_enabled(page, "button.mls-apply")
    page.locator("button.mls-apply").click()
    wait_for_words(page, ".mls-panel", "peak of a rank went from .* kept")
    wait_enabled(page, "button.mls-run")
    page.wait_for_timeout(
        1000
    )  # a kernel that is shut down while it draws the last picture sends half a message
    assert words(page, ".mls-error") == ""


def test_the_scaleup_lab_draws_its_curves_names_the_rank_and_repairs_it(page: Any, lab: Any) -> None:
    show(page, lab, "scaleup.ipynb", SCALEUP)
    page.locator(".mls-predict-norm_ratio input").fill("0.5")
    page.locator(".mls-predict-acc_gap_frac input").fill("5")
    page.locator("button.mls-lock").click()
    wait_enabled(page, "button.mls-run")
    page.locator("button.mls-run").click()
    wait_for_words(page, ".mls-status", "say what limits this run")
    assert words(page, ".mls-error") == ""
    assert "large run" in page.locator("img.mls-live").get_attribute("alt")
    choose(page, "gradient missing", "rank 1", "networking")
    wait_for_words(page, ".mls-status", "^The verdict is below")
    assert "gradient missing (system); where: rank 1" in words(page, ".mls-verdict")
    wait_enabled(page, "button.mls-apply")
    page.locator("button.mls-apply").click()
    wait_for_words(page, ".mls-panel", "accuracy lost.* went from|test loss|first gradient norm.* went from")
    wait_enabled(page, "button.mls-run")
    page.wait_for_timeout(1000)  # as above
    assert words(page, ".mls-error") == ""


def test_a_kernel_restart_in_mid_run_leaves_no_rank_alive(page: Any, lab: Any) -> None:
    show(page, lab, "restart.ipynb", STEPTIME)
    page.locator("button.mls-skip").click()
    wait_enabled(page, "button.mls-run")
    start(page)
    wait_for_words(page, ".mls-words", r"step \d+ of 5000")
    assert len(lab.rank_processes()) >= 3  # the server and two ranks
    restart_kernel(page)
    deadline = time.monotonic() + GONE_WITHIN_S
    while (alive := lab.rank_processes()) and time.monotonic() < deadline:
        page.wait_for_timeout(100)
    assert alive == []
    run_cell(page, 0)  # and the cell, run again, gives a working panel
    page.locator("button.mls-skip").click()
    wait_enabled(page, "button.mls-run")
