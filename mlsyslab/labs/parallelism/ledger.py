"""What a rank's memory holds while it trains, term by term, in closed form. Pure.

Model state follows ZeRO (Rajbhandari et al. 2020); activations are what eager autograd keeps of `gpt.py`, counted tensor by tensor as
Korthikanti et al. 2022 do for another block; the transients (gathered layers, gradients on their way, the loss's temporaries) are
what such formulas usually leave out. Checked against counted storages in tests/test_parallelism_ledger.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlsyslab.labs.parallelism.config import STATE_BYTES, Layout, stages
from mlsyslab.labs.parallelism.schedule import in_flight
from mlsyslab.labs.parallelism.shapes import Model
from mlsyslab.labs.parallelism.traffic import BF16, FP32, stage_params

STATE = ("params", "grads", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Bytes of one rank. moments: what is live at once, by term, at the instants at which the peak can lie.

    The terms: params, grads, optimizer; activations (kept for backward), logits, loss (log-softmax and its gradients), unsharded
    (FSDP's gathered parameters and their gradients), buckets (of DDP, and FSDP's gather and reduce buffers), copies (bfloat16 copies
    of weights under autocast), borders (a pipeline's receive buffers), working (temporaries of one layer's backward).
    """

    moments: Mapping[str, Mapping[str, float]]

    @property
    def peak_moment(self) -> str:
        """The instant of the peak."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def peak_bytes(self) -> float:
        """The most that is live at once."""
        return sum(self.moments[self.peak_moment].values())

    @property
    def peak(self) -> Mapping[str, float]:
        """What the peak consists of."""
        return self.moments[self.peak_moment]

    @property
    def state(self) -> dict[str, float]:
        """params, grads and optimizer: what is there when the optimizer steps."""
        return {name: self.moments["optimizer"][name] for name in STATE}

    @property
    def state_bytes(self) -> float:
        """Model state."""
        return sum(self.state.values())

    @property
    def activations_bytes(self) -> float:
        """What forward leaves for backward, logits and gathered parameters included."""
        forward, stay = self.moments["forward"], self.moments["between steps"]
        return sum(forward[name] - stay.get(name, 0.0) for name in forward if name not in STATE)


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Bytes of the things that come and go. T tokens of a microbatch; e bytes an element."""

    layer: float  # kept of one layer for backward
    kept: float  # of one layer when checkpointed: its input
    head: float  # kept of the last norm and the head
    copies: float  # bfloat16 copies of one layer's weights, kept until its backward
    head_copy: float
    logits: float
    gathered: float  # logits of one tensor-parallel rank and of all, before they are put in order
    softmax: float  # float32
    stream: float  # one [tokens, width]
    working: float  # temporaries of a layer's backward


def _sizes(model: Model, layout: Layout, *, fused: bool) -> _Sizes:
    tokens = layout.micro_batch * layout.seq
    mixed, fsdp, tp = layout.precision == "mixed", layout.shard == "fsdp", layout.tp
    autocast = mixed and not fsdp
    width, kv, ffn = tokens * model.width, tokens * model.kv_width / tp, tokens * model.ffn / tp
    e = BF16 if mixed else FP32  # of what matrices give
    x = BF16 if mixed and fsdp else FP32  # of the residual stream: autocast leaves it in float32
    # A norm keeps its input and its normalised input; in bfloat16 also a float32 one. A fused kernel keeps the input alone.
    norm = x * width + (0 if fused else width * (FP32 if x == FP32 else FP32 + BF16))
    # Its output is kept once, or as a bfloat16 copy for each matrix that reads it.
    reads = {"attention": 3, "ffn": 2} if autocast else {"attention": 1, "ffn": 1}
    attention = norm + reads["attention"] * e * width + e * (2 * width / tp + 2 * kv)
    attention += FP32 * tokens * model.heads / tp  # the softmax's log-sum (FlashAttention, Dao et al. 2022)
    layer = attention + norm + reads["ffn"] * e * width + 4 * e * ffn
    vocab = tokens * model.vocab
    return _Sizes(
        layer=layer,
        kept=x * width,
        head=norm + e * width,
        copies=BF16 * model.matrix_params / tp if autocast else 0.0,
        head_copy=BF16 * model.vocab_params / tp if autocast else 0.0,
        logits=e * vocab,
        gathered=e * vocab * (1 + 1 / tp) if tp > 1 else 0.0,
        softmax=FP32 * vocab,
        stream=x * width,
        working=2 * e * ffn + x * width,
    )


def ledger(model: Model, layout: Layout, *, stage: int = 0, fused: bool = False) -> Ledger:
    """The memory of a rank of `stage`. fused: norms are one kernel that keeps its input alone, as on CUDA."""
    if layout.pp > 1:
        return _pipelined(model, layout, stage, fused=fused)
    size, units = _sizes(model, layout, fused=fused), stage_params(model, layout, stage)
    base = _state(model, layout, units, stage)
    layers, each = model.layers, size.kept if layout.checkpointing else size.layer
    saved = {"activations": layers * each + size.head, "copies": layers * size.copies + size.head_copy}
    starting = saved | {"activations": (layers - 1) * each + size.layer, "working": size.working}
    middle = starting | {"activations": max(0, layers - 2) * each + size.layer}
    ending = {"activations": size.layer, "copies": size.copies, "working": size.working}
    # DDP's gradients are views of buckets that stay; the others come one by one, and go when the optimizer is done
    # (where several microbatches are accumulated they stay as well)
    kept = (layout.bucket_views and _replicated(layout)) or layout.microbatches > 1
    stay = base if kept else base | {"grads": 0.0}
    whole = _gathered(layout, units)
    moments = {
        "between steps": stay,
        "head": _sum(stay, saved, {"logits": size.logits + size.gathered}, whole["head"]),
        "loss": _sum(stay, saved, {"logits": size.logits * (1 if layout.precision == "fp32" else 3), "loss": size.softmax}, whole["forward"]),
        "forward": _sum(stay, saved, {"loss": size.softmax}, whole["forward"]),
        "loss backward": _sum(stay, saved, {"loss": 3 * size.softmax}, whole["forward"]),
        "head backward": _sum(stay, saved, {"loss": size.softmax}, whole["head backward"]),
        "last layer": _sum(stay, starting, whole["last layer"]),
        "last layer done": _sum(stay, saved, {"activations": -size.layer - size.head if not layout.checkpointing else 0.0, "working": size.working}, whole["last layer done"]),
        "a middle layer": _sum(stay, middle, whole["a middle layer"]),
        "first layer": _sum(base, ending, whole["first layer"]),
        "end of backward": _sum(base, whole["end of backward"]),
        "optimizer": base,
    }  # fmt: skip
    return Ledger(moments=moments)


def largest(model: Model, layout: Layout, *, fused: bool = False) -> Ledger:
    """The ledger of the pipeline stage with the highest peak."""
    found = (ledger(model, layout, stage=stage, fused=fused) for stage in range(layout.pp))
    return max(found, key=lambda one: one.peak_bytes)


def _sum(*parts: Mapping[str, float]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total


def _replicated(layout: Layout) -> bool:
    """Whether DDP wraps the model."""
    return layout.shard != "fsdp" and layout.tp == 1 and layout.pp == 1


def _state(model: Model, layout: Layout, units: list[tuple[int, ...]], stage: int) -> dict[str, float]:
    """Parameters, gradients and optimizer state of a rank at the optimizer's step, and DDP's buckets beside them.

    float32 weights and gradients, and STATE_BYTES of the optimizer. ZeRO-1 cuts the optimizer's, FSDP all three.
    """
    params = sum(sum(unit) for unit in units)
    mine = params / layout.dp if layout.shard == "fsdp" else params
    kept = params / layout.dp if layout.shard in ("fsdp", "zero1") else params
    # DDP reduces in buckets as large as the gradients; as views of them the gradients take no room of their own
    buckets = FP32 * params if _replicated(layout) and not layout.bucket_views else 0.0
    # the gradient of an embedding that tensor parallelism splits comes back whole on every rank, unless FSDP cuts it
    split = stage == 0 and layout.tp_plan == "sharded vocabulary" and layout.shard != "fsdp"
    surplus = FP32 * model.vocab_params * (1 - 1 / layout.tp) if split else 0.0
    return {
        "params": FP32 * mine,
        "grads": FP32 * mine + surplus,
        "optimizer": STATE_BYTES[layout.optimizer] * kept,
        "buckets": buckets,
    }


def _gathered(layout: Layout, units: list[tuple[int, ...]]) -> dict[str, dict[str, float]]:
    """What FSDP gathers and reduces, at each instant.

    A unit is gathered into a buffer and copied out of it; the buffer of one unit stays until the next is copied out, and backward
    gathers one unit ahead. The gradients of a unit are whole until they have been reduced, from a float32 copy of them. The unit of
    embedding, norm and head is whole during all of forward and backward.
    """
    if layout.shard != "fsdp":
        instants = (
            "head",
            "forward",
            "head backward",
            "last layer",
            "last layer done",
            "a middle layer",
            "first layer",
            "end of backward",
        )
        return {name: {} for name in instants}
    weight = BF16 if layout.precision == "mixed" else FP32
    layer, rest, head = sum(units[0]), sum(units[-1]), units[-1][-1]
    everything = weight * sum(sum(unit) for unit in units)
    whole: dict[str, float] = {"unsharded": everything if not layout.reshard else weight * rest}
    ahead = weight * layer if layout.reshard else 0.0
    return {
        "head": whole | {"buckets": ahead},
        "forward": {} if layout.reshard else whole,
        "head backward": whole | {"buckets": weight * rest + ahead if layout.reshard else 0.0},
        "last layer": {"unsharded": whole["unsharded"] + weight * head + ahead, "buckets": ahead},
        "last layer done": {
            "unsharded": whole["unsharded"] + weight * (head + layer) + ahead,
            "buckets": ahead,
        },
        "a middle layer": {
            "unsharded": whole["unsharded"] + weight * head + ahead,
            "buckets": ahead + FP32 * layer,
        },
        "first layer": {"unsharded": weight * (rest + head + layer), "buckets": FP32 * layer + ahead},
        "end of backward": {"unsharded": 2 * weight * rest, "buckets": FP32 * rest},
    }


def _pipelined(model: Model, layout: Layout, stage: int, *, fused: bool) -> Ledger:
    """A stage holds the activations of several microbatches at once; the last one has logits and loss beside them."""
    size, units = _sizes(model, layout, fused=fused), stage_params(model, layout, stage)
    base = _state(model, layout, units, stage)
    first, last = stage == 0, stage == layout.pp - 1
    layers, many = stages(model, layout)[stage], layout.microbatches
    held = in_flight(layout.schedule, layout.pp, many, stage)
    each = size.kept if layout.checkpointing else size.layer
    # what a later stage takes in lies in a buffer of its own, made once for each microbatch
    one = layers * each + (size.head if last else size.stream) - (0 if first else size.stream)
    copies = layers * size.copies + (size.head_copy if last else 0.0)
    borders = many * size.stream * ((not first) + (not last))
    logits = many * size.logits if layout.keep_logits and last else 0.0
    busy = _sum(base, {"borders": borders})
    going = busy | {"grads": base["grads"] if layout.schedule == "1f1b" and many > held else 0.0}
    saved = {"activations": held * one, "copies": copies}
    recomputed = size.layer - each
    moments = {
        "between steps": _sum(busy | {"grads": 0.0}, {"logits": logits}),
        "forward": _sum(going, saved, {"logits": logits}),
        "optimizer": base | {"borders": borders},
    }
    if last:
        waiting = held if layout.schedule == "gpipe" else 1
        ends = {"logits": max(logits, waiting * size.logits), "loss": waiting * size.softmax}
        early = {
            "logits": max(logits, waiting * size.logits + (size.logits if layout.schedule == "1f1b" else 0)),
            "loss": (waiting - 1) * size.softmax,
        }
        moments["forward"] = _sum(going, saved, early)
        moments["loss backward"] = _sum(
            going, saved, ends, {"loss": 2 * size.softmax, "working": size.stream}
        )
    moments["last layer"] = _sum(
        going, saved, {"activations": recomputed, "working": size.working, "logits": logits}
    )
    rest = {"activations": (held - 1) * one + size.layer, "copies": copies, "working": size.working}
    left = (held - 1 if last else 0) * (size.logits + size.softmax)
    moments["a microbatch done"] = _sum(busy, rest, {"logits": max(logits, left)})
    return Ledger(moments=moments)
