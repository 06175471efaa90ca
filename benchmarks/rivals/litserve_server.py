"""LitServe: FastAPI in front, and one worker process that takes batches."""

from __future__ import annotations

from typing import Any

import litserve
import numpy as np
from rival import PATH, arguments, read, warm, written

CONFIG, PORT = arguments()


class Encoder(litserve.LitAPI):
    """The lab's model."""

    def setup(self, device: str) -> None:
        self.model = warm(CONFIG)

    def decode_request(self, request):  # type: ignore[no-untyped-def]  # an annotation would be a query parameter to FastAPI
        return read(request)

    def batch(self, inputs: list[np.ndarray]) -> np.ndarray:
        return np.stack(inputs)

    def predict(self, x: np.ndarray) -> np.ndarray:
        return self.model(x)

    def unbatch(self, output: np.ndarray) -> list[np.ndarray]:
        return list(output)

    def encode_response(self, output: np.ndarray) -> dict[str, Any]:
        return written(output)


if __name__ == "__main__":
    api = Encoder(max_batch_size=CONFIG.max_batch, batch_timeout=CONFIG.max_wait_s, api_path=PATH)
    server = litserve.LitServer(api, accelerator="cpu", devices=1, workers_per_device=1)
    server.run(host="127.0.0.1", port=PORT, generate_client_file=False, log_level="warning")
