"""One JupyterLab and one Chromium for all browser tests; a new page and an empty list of errors for each."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

REQUIRED = os.environ.get("MLSYSLAB_REQUIRE_BROWSER") == "1"
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# A container has no user namespaces for the sandbox and a small /dev/shm.
CHROMIUM_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]


def _missing(reason: str) -> None:
    (pytest.fail if REQUIRED else pytest.skip)(reason)


# Of the module, not the session: while playwright is open its event loop counts as running in this thread, and no test
# after these could run one of its own.
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        _missing("no Chromium on PATH; on Debian: apt-get install chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _missing("playwright is not installed; pip install -e .[dev]")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, headless=True, args=CHROMIUM_FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def lab(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from labserver import LabServer

    with LabServer(tmp_path_factory.mktemp("lab")) as server:
        yield server


@pytest.fixture
def page(browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A page; the test fails if the page saw an error, whatever else held."""
    context = browser.new_context(viewport={"width": 1280, "height": 1000})
    page = context.new_page()
    page.set_default_timeout(120_000)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    yield page
    with suppress(Exception):  # a page that crashed has no kernel to shut down
        page.evaluate(
            "() => Promise.race([window.jupyterapp.shell.currentWidget.sessionContext.shutdown(),"
            " new Promise(done => setTimeout(done, 10000))])"
        )
    context.close()
    assert not errors, errors
