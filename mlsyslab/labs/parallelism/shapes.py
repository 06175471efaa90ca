"""The transformers of this lab as numbers: small ones that are trained here, published ones that are only planned. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlsyslab.contract import ConfigError


@dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder-only transformer: RMSNorm before attention and feed-forward, rotary positions, grouped-query attention,
    SwiGLU, no biases, an output head of its own (Touvron et al. 2023).

    width: of the residual stream; heads and kv_heads: query and key-value heads of width / heads each; ffn: hidden width
    of the feed-forward; seq: tokens of a training sequence.
    """

    name: str = "own"
    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int

    def __post_init__(self) -> None:
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ConfigError(
                f"width={self.width} over heads={self.heads} is {self.width / self.heads:g} a head; "
                "rotary positions need an even whole number: change one of them"
            )
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"heads={self.heads} over kv_heads={self.kv_heads} is {self.heads / self.kv_heads:g}; each key-value head "
                "serves a whole number of query heads: change one of them"
            )

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.width // self.heads

    @property
    def kv_width(self) -> int:
        """Width of all key (or value) heads together."""
        return self.kv_heads * self.head_width

    @property
    def matrix_params(self) -> int:
        """Parameters of a layer's seven matrices: q, k, v, o and gate, up, down."""
        return self.width * (2 * self.width + 2 * self.kv_width + 3 * self.ffn)

    @property
    def layer_params(self) -> int:
        """Parameters of one layer: its matrices and two norms."""
        return self.matrix_params + 2 * self.width

    @property
    def vocab_params(self) -> int:
        """Parameters of the embedding, and as many of the output head."""
        return self.vocab * self.width

    @property
    def params(self) -> int:
        """All parameters: layers, embedding, last norm, head."""
        return self.layers * self.layer_params + 2 * self.vocab_params + self.width

    def flops_per_token(self, seq: int | None = None) -> float:
        """Forward and backward: 6 for each weight of a matrix multiply, and 6 x layers x seq x width for causal attention
        (Chowdhery et al. 2022, appendix B, halved as half of the scores are masked)."""
        matmul = self.layers * self.matrix_params + self.vocab_params
        return 6.0 * matmul + 6.0 * self.layers * (seq or self.seq) * self.width


def _model(name: str, *shape: int) -> Model:
    """shape: layers, width, heads, kv_heads, ffn, vocab, seq."""
    fields = ("layers", "width", "heads", "kv_heads", "ffn", "vocab", "seq")
    return Model(name=name, **dict(zip(fields, shape, strict=True)))


# Sizes that are trained here; layers, heads and vocabulary divide by 2, 4 and 8.
TRAINED: Mapping[str, Model] = {
    "1M": _model("1M", 4, 128, 8, 8, 352, 1024, 64),
    "4M": _model("4M", 8, 192, 8, 8, 512, 1536, 64),
    "17M": _model("17M", 8, 384, 8, 8, 1024, 4096, 128),
    "60M": _model("60M", 8, 768, 16, 16, 2048, 4096, 128),
    "350M": _model("350M", 24, 1024, 16, 16, 2816, 16384, 1024),
    "1B": _model("1B", 22, 2048, 16, 16, 5632, 32000, 2048),
}

# Llama 2 7B (Touvron et al. 2023, table 1 of the Llama 1 paper for the shape); Llama 3 (Grattafiori et al. 2024, table 3).
PUBLISHED: Mapping[str, Model] = {
    "7B": _model("7B", 32, 4096, 32, 32, 11008, 32000, 4096),
    "8B": _model("8B", 32, 4096, 32, 8, 14336, 128256, 8192),
    "70B": _model("70B", 80, 8192, 64, 8, 28672, 128256, 8192),
    "405B": _model("405B", 126, 16384, 128, 8, 53248, 128256, 8192),
}

MODELS: Mapping[str, Model] = {**TRAINED, **PUBLISHED}
