"""A JupyterLab of its own for the browser tests: own settings, own kernels, own port, nothing of the user's."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import nbformat
import psutil

START_S = 120.0
MARK = "MLSYSLAB_BROWSER_LAB"  # every process that the server starts carries it, also when its parent is gone
SETTINGS: dict[str, dict[str, Any]] = {
    "@jupyterlab/apputils-extension/notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": True,
    },
    # off-screen cells would not be in the page at all
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
    "@jupyterlab/docmanager-extension/plugin": {"autosave": False},
}
FLAGS = (
    "--no-browser",
    "--ip=127.0.0.1",
    "--allow-root",
    "--ServerApp.port_retries=0",
    "--IdentityProvider.token=",  # loopback only, and gone when the tests end
    "--ServerApp.disable_check_xsrf=True",
    "--LabApp.expose_app_in_browser=True",  # the tests call Lab's commands instead of hunting for menus
    "--LabApp.news_url=",
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class LabServer:
    """`with LabServer(folder) as lab`: serves the notebooks in `folder` at lab.url."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home, self.mark = folder / "notebooks", folder / "home", uuid.uuid4().hex
        self.folder.mkdir(parents=True)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> LabServer:
        self._write_settings()
        self.log: IO[bytes] = (self.home / "server.log").open("wb")
        command = [sys.executable, "-m", "jupyterlab", *FLAGS, f"--port={self.port}"]
        self.process = subprocess.Popen(
            [*command, f"--ServerApp.root_dir={self.folder}"],
            env=self._environment(),
            stdout=self.log,
            stderr=subprocess.STDOUT,
            cwd=self.folder,
        )
        self._wait_until_it_answers()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        self.log.close()

    def _write_settings(self) -> None:
        for plugin, values in SETTINGS.items():
            path = self.home / "settings" / f"{plugin}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values))

    def _environment(self) -> dict[str, str]:
        places = {
            "JUPYTER_CONFIG_DIR": "config",
            "JUPYTER_DATA_DIR": "data",
            "JUPYTER_RUNTIME_DIR": "runtime",
            "JUPYTERLAB_SETTINGS_DIR": "settings",
            "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
            "IPYTHONDIR": "ipython",
        }
        own = {name: str(self.home / folder) for name, folder in places.items()}
        # A kernel under pytest would turn its capture of child output off.
        kept = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        # An own queue for the device: the tests do not wait for whoever measures on this machine.
        return {
            **kept,
            **own,
            MARK: self.mark,
            "MLSYSLAB_LOCKS": str(self.home),
            "JUPYTER_PLATFORM_DIRS": "1",
        }

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/api/status", timeout=2).read()
                return
            except (urllib.error.URLError, OSError):
                if self.process.poll() is not None or time.monotonic() > deadline:
                    said = (self.home / "server.log").read_text(errors="replace")
                    raise RuntimeError(f"JupyterLab did not start:\n{said[-3000:]}") from None
                time.sleep(0.1)

    def rank_processes(self) -> list[int]:
        """Ids of the live rank servers, ranks and loader workers of any kernel of this server."""
        found = []
        for process in psutil.process_iter():
            try:
                ours = process.environ().get(MARK) == self.mark and "mlsyslab.warm" in process.cmdline()
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
            except psutil.Error:  # ended meanwhile
                continue
        return found

    def set_setting(self, plugin: str, **values: Any) -> None:
        """Change a setting for pages that are opened from now on; `plugin` such as "@jupyterlab/x-extension:y"."""
        request = urllib.request.Request(
            f"{self.url}/lab/api/settings/{plugin}",
            data=json.dumps({"raw": json.dumps(values)}).encode(),
            method="PUT",
            headers={"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=30).read()

    def notebook(self, name: str, *cells: str, beside: tuple[Path, ...] = ()) -> str:
        """Write a notebook of code cells (and copy files next to it); returns its path for `open_notebook`."""
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(book, self.folder / name)
        for path in beside:
            shutil.copy(path, self.folder)
        return name
