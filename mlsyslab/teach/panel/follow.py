"""Follow a run while it goes on: read its records, draw, say how far it is. One loop, in one thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from mlsyslab.contract import LabError, RunError
from mlsyslab.teach.panel.picture import png

FRAME_S = 0.125  # 8 pictures a second at most
DRAWING_FRAC = (
    0.2  # of a core at most: a picture that costs more comes less often, since it disturbs what it shows
)


class Pace:
    """How far a run is, from its records; seconds left from the share done since the first record. `now` is given."""

    def __init__(self, steps: int | None) -> None:
        self.steps, self.share = steps, 0.0
        self._world: int | None = None
        self._newest: dict[int, int] = {}
        self._first: tuple[float, float] | None = None
        self._now = 0.0

    def see(self, records: Sequence[Mapping[str, Any]], share: float, now: float) -> None:
        """Take in new records (`rank`, `step`, `world`) and the run's own share done (0..1)."""
        for row in records:
            if row.get("world") != self._world:
                self._world, self._newest = row.get("world"), {}
            if isinstance(row.get("step"), int):
                rank = int(row.get("rank", 0))
                self._newest[rank] = max(self._newest.get(rank, 0), row["step"] + 1)
        self.share, self._now = max(self.share, share), now
        if records and self._first is None:
            self._first = (now, self.share)

    @property
    def step(self) -> int | None:
        """Steps recorded by the rank that is furthest behind; None while nothing was recorded."""
        return min(self._newest.values()) if self._newest else None

    @property
    def left_s(self) -> float | None:
        """Seconds to the end at the pace so far; None while there is no pace to speak of."""
        if self._first is None or self.share <= self._first[1]:
            return None
        since, share = self._first
        return (self._now - since) * (1 - self.share) / (self.share - share)


def follow(
    run: Any,
    picture: Any,
    pace: Pace,
    *,
    show: Callable[[bytes, str], None],
    tell: Callable[[Pace, Mapping[str, Any]], None],
) -> None:
    """Poll and draw until the run is over. show(png, alt text) gets each new picture, tell(pace, status) each look."""
    over = False
    show(b"", "Waiting for the first record of the run")
    while not over:
        began = time.thread_time()
        over = run.finished  # asked before poll, so that the last records are still drawn
        records = run.poll()
        pace.see(records, run.progress, time.monotonic())
        if records:
            picture.update(records)
            show(
                png(picture.figure),
                getattr(picture, "alt", "") or f"Live picture of the run, {pace.share:.0%} done",
            )
        tell(pace, run.status)
        if not over:
            share = getattr(picture, "drawing_frac", DRAWING_FRAC)
            time.sleep(pause_s(time.thread_time() - began, share))


def pause_s(drawing_s: float, share: float = DRAWING_FRAC) -> float:
    """Seconds to wait after a picture that took `drawing_s` of CPU time, so that drawing takes `share` of a core."""
    return max(FRAME_S, drawing_s * (1 / share - 1))


class Driver:
    """Sees one run at a time to its end: in this thread, or in the one drawing thread that the run gets.

    Whatever happens to the panel, no run goes on without it.
    """

    def __init__(self, draw: Callable[[Any], None]) -> None:
        self._draw = draw
        self._active: Any = None
        self._thread: threading.Thread | None = None

    def launch(
        self, run: Any, *, ended: Callable[[Any], None], failed: Callable[[BaseException], None], wait: bool
    ) -> None:
        """Draw `run`, then call ended(run), or failed(error), which wait=True raises as well."""
        self._active = run
        if wait:
            self._see_through(run, ended, failed)
            return
        thread = threading.Thread(
            target=self._in_background, args=(run, ended, failed), name="mlsyslab-panel", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # the machine's limit on threads
            self._give_up(run, failed, error)
            raise
        self._thread = thread

    def _in_background(self, *arguments: Any) -> None:
        with suppress(Exception):  # `failed` has shown it
            self._see_through(*arguments)

    def _see_through(
        self, run: Any, ended: Callable[[Any], None], failed: Callable[[BaseException], None]
    ) -> None:
        try:
            self._draw(run)
            status = run.status
            if status["state"] in ("failed", "interrupted"):
                raise RunError(str(status.get("error") or status.get("message") or "the run failed"))
            self._active = None
            ended(run)
        except BaseException as error:
            self._give_up(run, failed, error)
            raise

    def _give_up(self, run: Any, failed: Callable[[BaseException], None], error: BaseException) -> None:
        run.stop()
        self._active = None
        failed(error)

    def stop(self) -> None:
        """End the run that is drawn now; raises LabError where there is none yet."""
        if self._active is None:
            raise LabError("the run is just starting or just over; look again")
        self._active.stop()

    def join(self, timeout_s: float | None) -> bool:
        """Wait for the drawing thread; False when `timeout_s` passed first."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout_s)
        return not thread.is_alive()
