"""MOSEC: a Rust front, and one worker process that takes batches."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from mosec import Runtime, Server, Worker
from rival import PATH, arguments, read, warm, written

CONFIG, PORT = arguments()


class Encoder(Worker):
    """The lab's model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = warm(CONFIG)

    def deserialize(self, data: bytes) -> np.ndarray:
        return read(json.loads(data))

    def forward(self, data: list[np.ndarray]) -> list[np.ndarray]:
        return list(self.model(np.stack(data)))

    def serialize(self, data: Any) -> bytes:
        return json.dumps(written(data)).encode()


if __name__ == "__main__":
    import sys

    sys.argv += ["--address", "127.0.0.1", "--port", str(PORT), "--log-level", "warning"]
    server = Server()
    # Its wait is in whole milliseconds, at least 1.
    wait_ms = max(1, round(CONFIG.max_wait_s * 1e3))
    runtime = Runtime(Encoder, num=1, max_batch_size=CONFIG.max_batch, max_wait_time=wait_ms)
    server.register_runtime({PATH: [runtime]})
    server.run()
