"""One experiment at a time on a device: a queue of tickets that a crash cannot jam.

A ticket is a file whose `flock` its owner holds. The kernel drops the lock when the owner dies, so a dead holder's
turn ends by itself. The oldest live ticket has the device.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mlsyslab.contract import RunError

POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A place in the queue: position 0 is our turn; `holder` says who has the device before us."""

    position: int
    holder: str


def queue_dir(device: str) -> Path:
    """The folder of a device's tickets, shared by all users of this machine."""
    base = Path(os.environ.get("MLSYSLAB_LOCKS", tempfile.gettempdir()))
    return base / f"mlsyslab-queue-{re.sub(r'[^A-Za-z0-9.-]', '_', device)}"


class DeviceLock:
    """`acquire` waits for the device, `release` gives it back (also when the process dies).

    device: "cpu", "cuda:0", ...; what: who asks, shown to those who wait.
    """

    def __init__(self, device: str, what: str) -> None:
        self.folder = queue_dir(device)
        self.what = what
        self._fd: int | None = None
        self._path: Path | None = None

    def acquire(
        self, on_wait: Callable[[Turn], None] | None = None, cancel: threading.Event | None = None
    ) -> bool:
        """Take a ticket and wait for our turn; False when `cancel` was set first. Raises RunError if the queue
        folder cannot be written."""
        cancel = cancel or threading.Event()
        self._take_ticket()
        told: Turn | None = None
        while True:
            turn = self.turn()
            if turn.position == 0:
                return True
            if on_wait and turn != told:
                on_wait(turn)
                told = turn
            if cancel.wait(POLL_S):
                self.release()
                return False

    def _take_ticket(self) -> None:
        try:
            self.folder.mkdir(exist_ok=True)
            with contextlib.suppress(PermissionError):
                self.folder.chmod(0o1777)  # a classroom's seats share the machine
            with self._door():
                last = max((int(path.name.split("-")[0]) for path in self.folder.glob("[0-9]*")), default=0)
                name = f"{max(time.time_ns(), last + 1):020d}-{os.getpid()}"
                hidden = self.folder / f".{name}"
                self._fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
                fcntl.flock(self._fd, fcntl.LOCK_EX)
                who = {"user": _user(), "pid": os.getpid(), "what": self.what}
                os.write(self._fd, json.dumps(who).encode())
                self._path = self.folder / name
                hidden.rename(self._path)  # seen by others only when it is locked and complete
        except OSError as error:
            raise RunError(
                f"cannot queue for the device in {self.folder}: {error.strerror}; set MLSYSLAB_LOCKS to a folder you may write"
            ) from error

    @contextlib.contextmanager
    def _door(self) -> Iterator[None]:
        """One ticket at a time, so that a later ticket never sorts before one that has been served."""
        door = os.open(self.folder / ".door", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            with contextlib.suppress(PermissionError):
                os.fchmod(door, 0o666)
            fcntl.flock(door, fcntl.LOCK_EX)
            yield
        finally:
            os.close(door)

    def turn(self) -> Turn:
        """Where we stand now."""
        assert self._path is not None
        ahead = [
            path for path in sorted(self.folder.glob("[0-9]*")) if path.name < self._path.name and _held(path)
        ]
        return Turn(position=len(ahead), holder=_owner(ahead[0]) if ahead else "")

    def release(self) -> None:
        """Give the device back; safe to call twice."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _held(path: Path) -> bool:
    """Whether the ticket's owner lives. A dead owner's ticket is removed where we may."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        with contextlib.suppress(OSError):
            path.unlink()
        return False
    finally:
        os.close(fd)


def _owner(path: Path) -> str:
    try:
        who = json.loads(path.read_text())
        return f"{who['user']} (process {who['pid']}, {who['what']})"
    except (OSError, ValueError, KeyError):
        return "another experiment"
