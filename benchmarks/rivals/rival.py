"""What the rivals share: the model, the request, the answer. The configuration and the port come in the
environment: some servers parse the arguments themselves, and their workers read this again."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np

from mlsyslab.labs.serving.config import Config
from mlsyslab.labs.serving.model import Model
from mlsyslab.labs.serving.protocol import MODEL
from mlsyslab.labs.serving.worker import batch_sizes, tokens_of
from mlsyslab.options import from_json

GIVEN = "MLSYSLAB_RIVAL"
PATH = f"/v2/models/{MODEL}/infer"


def arguments() -> tuple[Config, int]:
    """The experiment, and the port to listen on."""
    given = json.loads(os.environ[GIVEN])
    return from_json(Config, given["config"]), int(given["port"])


def warm(config: Config) -> Model:
    """The model, run once in every size."""
    model = Model(config)
    for size in batch_sizes(config.max_batch) if not config.paced else (1,):
        model(tokens_of(config, size))
    return model


def read(asked: dict[str, Any]) -> np.ndarray:
    """The tokens of a request, [tokens]."""
    return np.array(asked["inputs"][0]["data"], np.int64)


def written(logits: np.ndarray) -> dict[str, Any]:
    """The answer to one request."""
    return {"parameters": {}, "outputs": [{"name": "logits", "data": logits.tolist()}]}
