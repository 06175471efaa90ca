"""The model that is served: a small transformer encoder that classifies rows of tokens. Needs torch."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import nn

from mlsyslab.contract import RunError
from mlsyslab.labs.serving.config import Config
from mlsyslab.labs.serving.protocol import CLASSES, VOCABULARY


class Encoder(nn.Module):
    """INT64 tokens [rows, tokens] -> FP32 [rows, CLASSES]."""

    def __init__(self, width: int, layers: int, tokens: int) -> None:
        super().__init__()
        heads = next(n for n in (4, 2, 1) if width % n == 0)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(tokens, width) * 0.02)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        encoded: torch.Tensor = self.encoder(self.embedding(tokens) + self.position)
        return self.head(encoded.mean(1))


class Model:
    """An Encoder with the weights of config.seed, on the device of the configuration. One thread on the CPU.

    Raises RunError for a GPU that is not there.
    """

    def __init__(self, config: Config) -> None:
        torch.set_num_threads(1)
        if config.device == "cuda" and not torch.cuda.is_available():
            raise RunError("device='cuda' but torch sees no GPU here; choose device='auto' or 'cpu'")
        cuda = config.device != "cpu" and torch.cuda.is_available()
        self.device = torch.device("cuda" if cuda else "cpu")
        self.config = config
        torch.manual_seed(config.seed)
        self.encoder = Encoder(config.width, config.layers, config.tokens).eval().to(self.device)

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        """Logits [rows, CLASSES]. Raises IndexError for a token outside of the vocabulary.

        A paced model waits paced_base_s + paced_row_s × rows instead, as for an accelerator, and answers zeros.
        """
        config = self.config
        # A CUDA kernel would answer a wrong index with an assertion that ends the whole process's use of the device.
        if (config.paced or self.device.type == "cuda") and (tokens.min() < 0 or tokens.max() >= VOCABULARY):
            raise IndexError("index out of range in self")
        if config.paced:
            time.sleep(config.paced_base_s + config.paced_row_s * len(tokens))
            return np.zeros((len(tokens), CLASSES), np.float32)
        with torch.inference_mode():
            logits = self.encoder(torch.from_numpy(tokens).to(self.device))
            return logits.float().cpu().numpy()
