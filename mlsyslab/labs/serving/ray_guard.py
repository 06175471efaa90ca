"""Ends what a run started of Ray, and removes its folder, when the run is gone, however it went.

Ray's daemons die with the process that started them and its workers soon after, but its agents stay for a minute, its
folder for ever, and so would an application on somebody else's cluster. This process outlives them all: it is run by
its path, with the standard library and psutil alone, and its stdin ends when the run does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from pathlib import Path

import psutil

MARK = "MLSYSLAB_RAY_FOLDER"  # in the environment of all that belongs to the run; its value is the folder
GIVE_UP_S = 20.0


def belonging(folder: str) -> list[psutil.Process]:
    """The living processes of this run, but for this one and its parent: by their environment, or by a file that they
    have open in the folder, since a process that gives itself a title writes over its environment."""
    found, spared = [], (os.getpid(), os.getppid())
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid in spared or process.status() == psutil.STATUS_ZOMBIE:
                continue
            marked = process.environ().get(MARK) == folder
            if marked or any(Path(file.path).is_relative_to(folder) for file in process.open_files()):
                found.append(process)
    return found


def clear(folder: str) -> None:
    """Kill them, again and again while new ones come, and remove the folder."""
    until = time.monotonic() + GIVE_UP_S
    while (left := belonging(folder)) and time.monotonic() < until:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=0.2)
    shutil.rmtree(folder, ignore_errors=True)


def withdraw(address: str, name: str) -> None:
    """Take the application `name` off a cluster that is not ours."""
    import ray
    from ray import serve

    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    serve.delete(name)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    if sys.argv[1] == "folder":
        clear(sys.argv[2])
    else:
        withdraw(sys.argv[2], sys.argv[3])
