"""What went wrong in a group of ranks, in one sentence that names the rank which failed by itself."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LAST_LINES = 6


def explain_failure(out: Path, exits: Sequence[dict[str, Any]]) -> str:
    """One message for a failed group: which rank, what it raised or which signal ended it, its last lines.

    exits: {"rank", "code", "ours", "error"} in the order of ending; `ours` marks ranks that we stopped afterwards,
    `error` is what the rank said of itself.
    A peer that only lost its connection is a consequence, never named as the cause.
    """
    errors = {event["rank"]: event["error"] for event in exits if event.get("error")}
    if stuck := _nccl_timeout(out, exits):
        return stuck
    killed = [event for event in exits if event["code"] < 0 and not event["ours"]]
    if killed:
        rank, signal_number = killed[0]["rank"], -killed[0]["code"]
        return f"rank {rank} was killed by {_signal_name(signal_number)}{_signal_hint(signal_number)}; last lines: {last_lines(out, rank)}"
    causes = {rank: error for rank, error in errors.items() if not error["peer_lost"]} or errors
    if not causes:
        codes = ", ".join(f"rank {event['rank']} exit {event['code']}" for event in exits)
        return f"the ranks ended without an error message ({codes}); see rank-*.log in the run directory"
    rank, error = min(causes.items(), key=lambda item: item[1]["time_s"])
    if error["timeout"]:
        absent = sorted(event["rank"] for event in exits if event["ours"] and event["rank"] not in errors)
        who = (
            f"rank {', '.join(map(str, absent))} did not arrive"
            if absent
            else "the ranks waited for each other in different collectives"
        )
        return f"a collective timed out: {who} (rank {rank} waited: {error['message']})"
    if error["for_people"]:
        return str(error["message"])
    return f"rank {rank} failed: {error['type']}: {error['message']}; last lines: {last_lines(out, rank)}"


def _nccl_timeout(out: Path, exits: Sequence[dict[str, Any]]) -> str:
    """NCCL's watchdog aborts the ranks that waited; those that did not arrive are the others."""
    waited = {
        event["rank"]
        for event in exits
        if event["code"] == -signal.SIGABRT and _says_watchdog(out, event["rank"])
    }
    absent = sorted({event["rank"] for event in exits} - waited)
    if not waited:
        return ""
    who = (
        f"rank {', '.join(map(str, absent))} did not arrive"
        if absent
        else "the ranks waited for each other in different collectives"
    )
    return f"a collective timed out: {who} (NCCL's watchdog ended rank {', '.join(map(str, sorted(waited)))})"


def _says_watchdog(out: Path, rank: int) -> bool:
    try:
        return "Watchdog caught collective operation timeout" in (out / f"rank-{rank}.log").read_text(
            errors="replace"
        )
    except OSError:
        return False


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _signal_hint(number: int) -> str:
    return {
        9: " (by hand, or by the kernel when memory ran out: see dmesg, lower batch_size or workers)",
        7: " (shared memory is too small: raise /dev/shm, e.g. docker --shm-size=1g, or set workers=0)",
        6: " (an abort inside a library, often mismatched shapes in a collective)",
    }.get(number, "")


def last_lines(out: Path, rank: int) -> str:
    """The end of what the rank printed, on one line."""
    try:
        text = (out / f"rank-{rank}.log").read_text(errors="replace")
    except OSError:
        return "none"
    lines = [line.strip() for line in text.splitlines() if line.strip(" ^~")]
    return " | ".join(lines[-LAST_LINES:])[-800:] or "none"
