"""What the ranks send each other in a step, in closed form, and what that is on the wire. Pure.

Exact against the counted collectives (tests/test_parallelism_traffic.py), counts and bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from mlsyslab.labs.parallelism.config import Layout, stages
from mlsyslab.labs.parallelism.shapes import Model

FIRST_BUCKET_BYTES, BUCKET_BYTES = (
    1 << 20,
    25 << 20,
)  # of DDP: a small one first, so that reducing starts early
FP32, BF16 = 4, 2


@dataclass(frozen=True, kw_only=True)
class Collective:
    """`count` collectives of a kind on an axis of `size` ranks, `bytes` in all: of a gather what comes out of it, of a
    reduce-scatter what goes in, of a send what is sent."""

    axis: str
    kind: str
    count: int
    bytes: int
    size: int


def wire_bytes(collective: Collective, backend: str) -> float:
    """Bytes that one rank sends for it.

    Ring algorithms (Patarasuk and Yuan 2009): all-reduce 2 (n - 1) / n of the bytes, all-gather and reduce-scatter
    (n - 1) / n, a broadcast (n - 1) / n on average over the ranks. gloo's reduce-scatter is an all-reduce of the whole.
    """
    others = (collective.size - 1) / collective.size
    shares = {
        "all_reduce": 2 * others,
        "all_gather": others,
        "reduce_scatter": 2 * others if backend == "gloo" else others,
        "broadcast": others,
        "all_to_all": others,
        "send": 1.0,
        "recv": 0.0,
    }
    return shares[collective.kind] * collective.bytes


def comm_bytes(collectives: Iterable[Collective], backend: str) -> float:
    """Bytes that one rank sends in a step."""
    return sum(wire_bytes(collective, backend) for collective in collectives)


def traffic(
    model: Model, layout: Layout, *, stage: int | None = None, clipped: bool = False
) -> tuple[Collective, ...]:
    """The collectives of a step of one rank. stage: of a pipeline; default the one that sends most. clipped: the gradient's
    global norm is taken."""
    if stage is None:
        every = [traffic(model, layout, stage=at, clipped=clipped) for at in range(layout.pp)]
        return max(every, key=lambda rows: comm_bytes(rows, "nccl"))
    rows = [*_data(model, layout, stage), *_tensor(model, layout, stage), *_pipeline(model, layout, stage)]
    rows += _norm(layout) if clipped else []
    sums: dict[tuple[str, str], Collective] = {}
    for row in rows:
        if row.count and row.size > 1:
            have = sums.get((row.axis, row.kind), replace(row, count=0, bytes=0))
            sums[row.axis, row.kind] = replace(
                have, count=have.count + row.count, bytes=have.bytes + row.bytes
            )
    return tuple(sums.values())


def stage_params(model: Model, layout: Layout, stage: int) -> list[tuple[int, ...]]:
    """Parameters of a tensor-parallel rank of a stage, tensor by tensor, in units of FSDP: each layer, then the rest."""
    tp = layout.tp
    matrices = [model.width * model.width // tp] * 2 + [model.width * model.kv_width // tp] * 2
    layer = (*matrices, *[model.width * model.ffn // tp] * 3, model.width, model.width)
    rest: list[int] = []
    if stage == 0:
        rest.append(model.vocab_params // (tp if layout.tp_plan == "sharded vocabulary" else 1))
    if stage == layout.pp - 1:
        rest += [model.width, model.vocab_params // tp]
    return [layer] * stages(model, layout)[stage] + [tuple(rest)]


def buckets(sizes: Iterable[int]) -> int:
    """Buckets of DDP for gradients of these bytes in the order in which they become ready: one is closed by the gradient that
    reaches its size."""
    count, filled, limit = 0, 0, FIRST_BUCKET_BYTES
    for size in sizes:
        filled += size
        if filled >= limit:
            count, filled, limit = count + 1, 0, BUCKET_BYTES
    return count + (filled > 0)


def _data(model: Model, layout: Layout, stage: int) -> list[Collective]:
    units = stage_params(model, layout, stage)
    params = sum(sum(unit) for unit in units)
    tensors = sum(len(unit) for unit in units)
    rest = units[-1]
    # ready in backward: the head and its norm first, the layers from the last, the embedding at the end
    ready = [*reversed(rest[-2:]), *[p for unit in units[:-1] for p in reversed(unit)], *rest[:-2]]

    def row(kind: str, count: int, size: int) -> Collective:
        return Collective(axis="dp", kind=kind, count=count, bytes=size, size=layout.dp)

    if layout.shard == "fsdp":
        # each microbatch gathers and reduces anew, unless a pipeline has the layers
        weight, times = BF16 if layout.precision == "mixed" else FP32, layout.microbatches
        gathers, live = times * (2 if layout.reshard else 1), sum(1 for unit in units if unit)
        return [
            row("all_gather", gathers * live, gathers * params * weight),
            row("reduce_scatter", times * live, times * params * FP32),
        ]
    reduced = row("all_reduce", buckets(FP32 * p for p in ready), params * FP32)
    # torch's ZeroRedundancyOptimizer broadcasts each parameter from the rank that has updated it (pytorch#69591)
    sent = [row("broadcast", tensors, params * FP32)] if layout.shard == "zero1" else []
    return [reduced, *sent]


def _tensor(model: Model, layout: Layout, stage: int) -> list[Collective]:
    if layout.tp == 1:
        return []
    mixed = layout.precision == "mixed"
    element = BF16 if mixed else FP32
    # autocast leaves norms in float32, so what flows back into them is; FSDP casts all of a layer
    back = BF16 if mixed and layout.shard == "fsdp" else FP32
    tokens = layout.micro_batch * layout.seq
    stream = tokens * model.width
    # forward: after o and after down (o once more where forward is computed again: checkpointing stops at the last tensor that
    # backward needs); backward: the input of attention and of the feed-forward, once each, or for each of q, k, v, gate and up
    forward, backward = 2 + layout.checkpointing, 5 if layout.tp_plan == "plain" else 2
    layers = stages(model, layout)[stage]
    count = layers * (forward + backward)
    size = layers * stream * (forward * element + backward * back)
    gathers = 0
    if stage == 0 and layout.tp_plan == "sharded vocabulary":
        count, size = count + 1, size + stream * back
    if stage == layout.pp - 1:
        count, size, gathers = count + 1, size + stream * back, 1
    times = layout.microbatches
    return [
        Collective(axis="tp", kind="all_reduce", count=times * count, bytes=times * size, size=layout.tp),
        Collective(axis="tp", kind="all_gather", count=times * gathers,
                   bytes=times * gathers * tokens * model.vocab * element, size=layout.tp),
    ]  # fmt: skip


def _pipeline(model: Model, layout: Layout, stage: int) -> list[Collective]:
    """Activations to the next stage, their gradients to the one before; the residual stream stays in float32 under autocast."""
    if layout.pp == 1:
        return []
    element = BF16 if layout.precision == "mixed" and layout.shard == "fsdp" else FP32
    borders = (stage < layout.pp - 1) + (stage > 0)
    count = borders * layout.microbatches
    size = count * layout.micro_batch * layout.seq * model.width * element
    return [
        Collective(axis="pp", kind=kind, count=count, bytes=size, size=layout.pp) for kind in ("recv", "send")
    ]


def _norm(layout: Layout) -> list[Collective]:
    """One float32 for each set of gradients that are cut alike."""
    cut = [("dp", layout.dp, 2 if layout.tp > 1 else 1)] if layout.shard == "fsdp" else []
    cut += [("tp", layout.tp, 1), ("pp", layout.pp, 1)]
    return [
        Collective(axis=axis, kind="all_reduce", count=n, bytes=n * FP32, size=size) for axis, size, n in cut
    ]
