"""What a person does in JupyterLab, as functions of a playwright page. Each waits for what it needs; none sleeps."""

from __future__ import annotations

from typing import Any

TIMEOUT_MS = 120_000
# The status bar says "idle" before there is a session, and running then opens a dialog that nobody answers.
READY = """() => {
  const w = window.jupyterapp?.shell?.currentWidget, s = w?.sessionContext;
  return !!(w?.context?.isReady && s?.isReady && s.session?.kernel?.connectionStatus === 'connected'
    && s.session.kernel.status === 'idle');
}"""
RUN_ALL = """(ms) => Promise.race([
  window.jupyterapp.commands.execute('notebook:run-all-cells').then(ok => ok === false ? 'a cell failed' : 'ok'),
  new Promise(done => setTimeout(() => done('timeout'), ms))])"""
RUN_CELL = """([index, wait, ms]) => {
  const book = window.jupyterapp.shell.currentWidget.content;
  book.activeCellIndex = index; book.deselectAll();
  const ran = window.jupyterapp.commands.execute('notebook:run-cell').then(ok => ok === false ? 'a cell failed' : 'ok');
  return wait ? Promise.race([ran, new Promise(done => setTimeout(() => done('timeout'), ms))]) : 'started';
}"""


def open_notebook(page: Any, lab: Any, name: str) -> None:
    page.goto(f"{lab.url}/lab/tree/{name}?reset")
    page.wait_for_function(READY, timeout=TIMEOUT_MS)


def run_all(page: Any) -> None:
    """Run every cell; a failing cell is an error here."""
    said = page.evaluate(RUN_ALL, TIMEOUT_MS)
    assert said == "ok", f"{said}: {page.locator('.jp-OutputArea-output').all_inner_texts()}"


def run_cell(page: Any, index: int, *, wait: bool = True) -> None:
    said = page.evaluate(RUN_CELL, [index, wait, TIMEOUT_MS])
    assert said in ("ok", "started"), f"{said}: {page.locator('.jp-OutputArea-output').all_inner_texts()}"


def restart_kernel(page: Any) -> None:
    page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.restartKernel()")
    page.wait_for_function(READY, timeout=TIMEOUT_MS)


def set_theme(page: Any, name: str) -> None:
    page.evaluate("name => window.jupyterapp.commands.execute('apputils:change-theme', {theme: name})", name)
    page.wait_for_function(
        "dark => document.body.dataset.jpThemeLight === String(!dark)", arg="Dark" in name, timeout=TIMEOUT_MS
    )


def source(page: Any) -> str:
    """The picture that is shown now."""
    return str(page.locator("img.mls-live").get_attribute("src"))


def wait_for_new_picture(page: Any, old: str) -> None:
    """Until the picture is another one, loaded, and not blank."""
    page.wait_for_function(
        "old => { const i = document.querySelector('img.mls-live');"
        " return !!i && i.src !== old && i.src.startsWith('data:image/png') && i.complete && i.naturalWidth > 0; }",
        arg=old,
        timeout=TIMEOUT_MS,
    )


def wait_enabled(page: Any, selector: str) -> None:
    page.wait_for_function(
        "selector => { const b = document.querySelector(selector); return !!b && !b.disabled; }",
        arg=selector,
        timeout=TIMEOUT_MS,
    )


def reload_notebook(page: Any, lab: Any, name: str) -> None:
    """Save, as Lab does by itself after a while, and load the page anew; the kernel goes on."""
    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    page.goto(f"{lab.url}/lab/tree/{name}")
    page.wait_for_function(READY, timeout=TIMEOUT_MS)
