"""The transformer that this lab trains, in plain torch, and the text that it learns."""

from __future__ import annotations

import sysconfig
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

from mlsyslab.labs.parallelism.shapes import Model

BASE = 10_000.0  # of the rotary frequencies (Su et al. 2021)
FILES = (
    "argparse.py",
    "ast.py",
    "dataclasses.py",
    "datetime.py",
    "inspect.py",
    "os.py",
    "tarfile.py",
    "typing.py",
)


class Attention(nn.Module):
    """Causal attention with rotary positions. [batch, seq, width] in and out.

    Head counts follow from the weights' local shapes, so a tensor-parallel rank works on its own heads unchanged.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.head_width = model.head_width
        self.wq = nn.Linear(model.width, model.width, bias=False)
        self.wk = nn.Linear(model.width, model.kv_width, bias=False)
        self.wv = nn.Linear(model.width, model.kv_width, bias=False)
        self.wo = nn.Linear(model.width, model.width, bias=False)

    def forward(self, x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape
        q, k, v = (
            w(x).view(batch, seq, -1, self.head_width).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        grouped = q.shape[1] != k.shape[1]
        mixed = scaled_dot_product_attention(
            rotate(q, rotary), rotate(k, rotary), v, is_causal=True, enable_gqa=grouped
        )
        return self.wo(mixed.transpose(1, 2).reshape(batch, seq, -1))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)). [batch, seq, width] in and out."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.gate = nn.Linear(model.width, model.ffn, bias=False)
        self.up = nn.Linear(model.width, model.ffn, bias=False)
        self.down = nn.Linear(model.ffn, model.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer. [batch, seq, width] in and out. checkpointing: keep its input alone, and compute the rest again in backward."""

    def __init__(self, model: Model, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.attention_norm = nn.RMSNorm(model.width, eps=1e-5)
        self.attention = Attention(model)
        self.ffn_norm = nn.RMSNorm(model.width, eps=1e-5)
        self.ffn = FeedForward(model)

    def forward(self, x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        if self.checkpointing:
            # inside the block, so that what wraps it (FSDP) gathers before and frees after
            return checkpoint(self._layer, x, rotary, use_reentrant=False)
        return self._layer(x, rotary)

    def _layer(self, x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.ffn(self.ffn_norm(x))


class GPT(nn.Module):
    """All layers, or those of one pipeline stage: `first` has the embedding, `last` the norm and the head.

    tokens [batch, seq] (or activations [batch, seq, width]) in, logits [batch, seq, vocab] (or activations) out.
    layers: which layers, as a range; default all. checkpointing keeps each layer's input alone.
    """

    rotary: torch.Tensor

    def __init__(
        self, model: Model, *, layers: range | None = None, first: bool = True, last: bool = True,
        checkpointing: bool = False
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed = nn.Embedding(model.vocab, model.width) if first else None
        mine = range(model.layers) if layers is None else layers
        self.layers = nn.ModuleDict(
            {str(number): Block(model, checkpointing=checkpointing) for number in mine}
        )
        self.norm = nn.RMSNorm(model.width, eps=1e-5) if last else None
        self.head = nn.Linear(model.width, model.vocab, bias=False) if last else None
        self.register_buffer("rotary", angles(model.seq, model.head_width), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for block in self.layers.values():
            x = block(x, self.rotary)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def angles(seq: int, head_width: int) -> torch.Tensor:
    """[2, seq, head_width] cosines and sines of the rotary positions."""
    frequency = BASE ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    angle = torch.arange(seq, dtype=torch.float32)[:, None] * frequency.repeat(2)[None]
    return torch.stack((angle.cos(), angle.sin()))


def rotate(x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """Rotary positions on [batch, heads, seq, head_width]."""
    left, right = x.chunk(2, dim=-1)
    cosine, sine = rotary.to(x.dtype)
    return x * cosine + torch.cat((-right, left), dim=-1) * sine


def initialise(module: nn.Module, model: Model, seed: int) -> None:
    """The weights that a single process would have, whichever layers are here: each parameter draws from its own seed.

    Normal with standard deviation 0.02; norms are 1. Works on a module before it is split.
    """
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1:
            nn.init.ones_(parameter)
            continue
        # crc32 of the name: Python's own hash differs between processes
        from zlib import crc32

        draw = torch.Generator().manual_seed((seed << 32) ^ crc32(name.encode()))
        with torch.no_grad():
            parameter.copy_(torch.empty(parameter.shape).normal_(0, 0.02, generator=draw))


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over all tokens. logits [batch, seq, vocab], targets [batch, seq]."""
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@lru_cache(maxsize=1)
def corpus() -> bytes:
    """Text that is on every machine with Python: modules of its standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return b"".join((folder / name).read_bytes() for name in FILES)


def batch_of(step: int, model: Model, batch: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole job's (tokens, targets) of a step, each [batch, seq]: pairs of bytes of `corpus`, hashed to the vocabulary.

    The same on every rank: each takes its own part.
    """
    text = torch.frombuffer(bytearray(corpus()), dtype=torch.uint8).long()
    pairs = (text[:-1:2] * 256 + text[1::2]) * 2_654_435_761 % 4_294_967_291 % model.vocab
    draw = torch.Generator().manual_seed(seed * 1_000_003 + step)
    begin = torch.randint(len(pairs) - model.seq - 1, (batch,), generator=draw)
    window = pairs[begin[:, None] + torch.arange(model.seq + 1)]
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()
