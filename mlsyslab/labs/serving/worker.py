"""One replica: a process that holds the model, takes a batch at a time from the service, and answers row by row.

Started by `measure` as a fork of the warm server, or cold: python -m mlsyslab.labs.serving.worker CONFIG_JSON
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from mlsyslab.contract import LabError
from mlsyslab.labs.serving.config import Config
from mlsyslab.labs.serving.model import Model
from mlsyslab.labs.serving.protocol import VOCABULARY
from mlsyslab.labs.serving.wire import REPLICAS, Frames, connect, pack
from mlsyslab.options import from_json
from mlsyslab.ranks import die_with_parent

CHUNK = 1 << 20  # bytes read at once
EVERY_SIZE = 32  # up to this batch size each is run before the replica is ready
REPEATS = 15  # of a measured batch size; the median counts


def batch_sizes(max_batch: int) -> list[int]:
    """The sizes that are run once before a replica is ready, 1 and max_batch among them.

    All of them up to EVERY_SIZE: a library prepares itself for each shape it sees first. Above, in steps of a quarter,
    since the time for all of them grows with the square of the largest.
    """
    sizes, size = list(range(1, min(max_batch, EVERY_SIZE) + 1)), float(EVERY_SIZE)
    while (size := size * 1.25) < max_batch:
        sizes.append(round(size))
    return sorted({*sizes, max_batch})


def tokens_of(config: Config, rows: int) -> np.ndarray:
    """Some valid input."""
    return np.random.default_rng(config.seed).integers(0, VOCABULARY, (rows, config.tokens))


def answer(model: Model, rows: list[int], body: bytearray) -> bytes:
    """Run a batch of requests with so many rows each; the frame that answers it.

    The frame's head has took_s, and the errors by the place of the request; its body, the logits of all the others.
    Where the batch fails, each request is run for itself, so that a bad one fails alone.
    """
    began_s = time.perf_counter()
    tokens = np.frombuffer(body, np.int64).reshape(-1, model.config.tokens)
    errors: dict[int, str] = {}
    try:
        parts = [model(tokens)]
    except Exception:
        parts, start = [], 0
        for place, count in enumerate(rows):
            try:
                parts.append(model(tokens[start : start + count]))
            except Exception as error:  # whatever a model raises is this request's answer
                errors[place] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            start += count
    output = b"".join(np.ascontiguousarray(part, np.float32).tobytes() for part in parts)
    return pack({"took_s": time.perf_counter() - began_s, "errors": errors}, output)


def serve(config: Config, folder: str, name: int) -> None:
    """Load, warm up, say that we are ready, then answer batches until the service closes the line."""
    start_s = time.monotonic()
    model = Model(config)
    loaded_s = time.monotonic()
    for size in batch_sizes(config.max_batch) if not config.paced else (1,):
        model(tokens_of(config, size))
    hello = {
        "name": name,
        "pid": os.getpid(),
        "load_s": loaded_s - start_s,
        "warm_up_s": time.monotonic() - loaded_s,
        "device": str(model.device),
        "paced": config.paced,
    }
    service, frames = connect(f"{folder}/{REPLICAS}"), Frames()
    try:
        service.sendall(pack(hello))
        while data := service.recv(CHUNK):
            for head, body in frames.feed(data):
                service.sendall(answer(model, head["rows"], body))
    except (BrokenPipeError, ConnectionResetError):
        return  # the service is gone; the caller hears of that from the service


def main(payload: dict[str, Any], _: Path) -> None:
    """What `launch` calls. payload: config, folder (of the sockets), name, and whether Ctrl-C is ours to ignore."""
    if payload.get("standing"):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller drains
    serve(from_json(Config, payload["config"]), payload["folder"], payload["name"])
    os._exit(0)  # an orderly exit of torch takes longer than anything here


def curve(payload: dict[str, Any], _: Path) -> list[tuple[int, float]]:
    """What `measure.service_curve` has run in a rank: (rows, seconds), medians of interleaved repeats."""
    config = from_json(Config, payload)
    model, sizes = Model(config), batch_sizes(config.max_batch)
    inputs = {size: tokens_of(config, size) for size in sizes}
    taken: dict[int, list[float]] = {size: [] for size in sizes}
    for repeat in range(REPEATS + 1):
        for size in sizes:
            began_s = time.perf_counter()
            model(inputs[size])
            if repeat:
                taken[size].append(time.perf_counter() - began_s)
    return [(size, statistics.median(taken[size])) for size in sizes]


def command_line(argv: list[str]) -> int:
    """A cold replica: everything from nothing."""
    die_with_parent()
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    payload = json.loads(argv[0])
    if os.getppid() != payload["parent"]:
        return 1
    try:
        main(payload, Path())
    except LabError as error:
        print(error, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(command_line(sys.argv[1:]))
