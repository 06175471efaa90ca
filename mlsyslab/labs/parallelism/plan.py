"""Which split to choose: every layout that fits, and the simplest that is not clearly slower. Pure; all of it is predicted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlsyslab.contract import ConfigError, Range, format_value
from mlsyslab.labs.parallelism.clusters import Cluster, cluster
from mlsyslab.labs.parallelism.config import Layout, check_layout
from mlsyslab.labs.parallelism.ledger import Ledger, ledger
from mlsyslab.labs.parallelism.schedule import bubble_frac
from mlsyslab.labs.parallelism.shapes import PUBLISHED, TRAINED, Model
from mlsyslab.labs.parallelism.traffic import Collective, traffic, wire_bytes

MFU = 0.45  # of the peak that compute alone reaches; published runs report 0.38 to 0.5 (Llama 3, 2024, table 4; PaLM, 2022)
BELOW, ABOVE = 0.25, 0.6
HIDDEN_FRAC = 0.8  # of backward (forward for gathers) behind which data-parallel traffic can hide
FASTER = 1.4  # a more complex plan must be so many times as fast: less is lost in one week of debugging, and it is more than checkpointing costs
DDP, SHARDED, TENSOR, PIPELINE = 0.0, 1.0, 3.0, 4.0  # what a way of splitting costs the people; they add up
RECOMPUTE, ACCUMULATE = 1.5, 0.2


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A layout that fits. ledger: of its fullest rank. comm_s: seconds of each axis' traffic, and exposed_s what compute does not
    hide. complexity: what it costs the people, the smaller the simpler. says: one sentence that defends it, or says what it costs."""

    layout: Layout
    ledger: Ledger
    usable_bytes: float
    comm_bytes: float
    comm_s: Mapping[str, float]
    compute_s: float
    exposed_s: float
    bubble_frac: float
    step_s: Range
    complexity: float
    says: str = ""

    @property
    def peak_bytes(self) -> float:
        """Of the fullest rank."""
        return self.ledger.peak_bytes

    @property
    def headroom_bytes(self) -> float:
        """What is left of a device."""
        return self.usable_bytes - self.peak_bytes

    @property
    def name(self) -> str:
        """In words, such as "FSDP over 64 x tensor parallel over 8, checkpointing"."""
        at, words = self.layout, []
        if at.dp > 1:
            words.append({"none": "DDP", "zero1": "ZeRO-1", "fsdp": "FSDP"}[at.shard] + f" over {at.dp}")
        if at.tp > 1:
            words.append(f"tensor parallel over {at.tp}")
        if at.pp > 1:
            words.append(f"pipeline over {at.pp}, {at.microbatches} microbatches")
        extras = ["checkpointing"] * at.checkpointing
        extras += [f"{at.microbatches} microbatches accumulated"] * (at.pp == 1 and at.microbatches > 1)
        return ", ".join([" x ".join(words) or "one device", *extras])


def plan(model: Model, on: Cluster, *, precision: str = "mixed", optimizer: str = "adamw") -> list[Plan]:
    """Every layout that fits, the recommended one first, the others by simplicity and then by speed.

    Recommended is the simplest that fits, unless a more complex one is predicted to be FASTER times as fast. Raises ConfigError
    with the arithmetic where nothing fits.
    """
    tried = [
        _plan(model, on, layout) for layout in layouts(model, on, precision=precision, optimizer=optimizer)
    ]
    if not tried:
        raise ConfigError(
            f"no mesh of {on.devices} devices divides {model.layers} layers, {model.kv_heads} key-value heads and {on.sequences} "
            "sequences; choose a batch or a number of devices that is a power of two"
        )
    fits = [one for one in tried if one.headroom_bytes >= 0]
    if not fits:
        raise ConfigError(_nothing_fits(model, on, min(tried, key=lambda one: one.peak_bytes)))
    order = sorted(fits, key=lambda one: (one.complexity, one.step_s.expected, one.peak_bytes))
    best = order[0]
    for one in order[1:]:
        if one.step_s.expected * FASTER < best.step_s.expected:
            best = one
    listed = [best, *(one for one in order if one is not best)]
    return [replace(one, says=_defend(one, listed, order[0], model)) for one in listed]


def layouts(model: Model, on: Cluster, *, precision: str, optimizer: str) -> Iterator[Layout]:
    """Every layout worth a look: the tensor axis inside a node, microbatches of one sequence where that helps."""
    for tp in _powers(min(on.devices_per_node, on.devices)):
        for pp in _powers(min(on.devices // tp, model.layers)):
            dp = on.devices // (tp * pp)
            if dp * tp * pp != on.devices or on.sequences % dp:
                continue
            each = on.sequences // dp
            for shard in ("none", "zero1", "fsdp") if dp > 1 else ("none",):
                for checkpointing in (False, True):
                    for microbatches in sorted({1, each} if pp == 1 else {each, max(1, each // 2)}):
                        layout = Layout(
                            shard=shard, dp=dp, tp=tp, pp=pp, batch=on.sequences, seq=model.seq, microbatches=microbatches,
                            precision=precision, optimizer=optimizer, checkpointing=checkpointing,
                        )  # fmt: skip
                        try:
                            check_layout(model, layout)
                        except ConfigError:
                            continue
                        yield layout


def _powers(most: int) -> list[int]:
    return [1 << n for n in range(most.bit_length()) if 1 << n <= most]


def complexity(layout: Layout) -> float:
    """DDP 0; sharding 1 (ZeRO-1 too: one wrapper as well, the same bytes, less saved); checkpointing 1.5 more, for a third of compute in every step; tensor parallel 3
    and pipeline 4 more, since they change the model's code, its checkpoints and its failures."""
    return (
        (SHARDED if layout.shard != "none" else DDP)
        + TENSOR * (layout.tp > 1)
        + PIPELINE * (layout.pp > 1)
        + RECOMPUTE * layout.checkpointing
        + ACCUMULATE * (layout.pp == 1 and layout.microbatches > 1)
    )


def _plan(model: Model, on: Cluster, layout: Layout) -> Plan:
    ends = [ledger(model, layout, stage=stage, fused=True) for stage in sorted({0, layout.pp - 1})]
    fullest = max(ends, key=lambda one: one.peak_bytes)
    flops = model.flops_per_token() * layout.batch * layout.seq * (4 / 3 if layout.checkpointing else 1)
    compute_s = flops / (on.devices * on.flops_per_s * MFU)
    moved = traffic(model, layout)
    comm_s = axis_seconds(on, layout, moved)
    hidden = HIDDEN_FRAC * compute_s if layout.shard == "fsdp" else HIDDEN_FRAC * compute_s * 2 / 3
    exposed = max(0.0, comm_s.get("dp", 0.0) - hidden) + comm_s.get("tp", 0.0) + comm_s.get("pp", 0.0) / 2
    bubble = bubble_frac(layout.pp, layout.microbatches) if layout.pp > 1 else 0.0
    step_s = (compute_s + comm_s.get("tp", 0.0)) / (1 - bubble) + exposed - comm_s.get("tp", 0.0)
    return Plan(
        layout=layout,
        ledger=fullest,
        usable_bytes=on.usable_bytes,
        comm_bytes=sum(wire_bytes(one, "nccl") for one in moved),
        comm_s=comm_s,
        compute_s=compute_s,
        exposed_s=exposed,
        bubble_frac=bubble,
        step_s=Range.around(step_s, BELOW, ABOVE),
        complexity=complexity(layout),
    )


def axis_seconds(on: Cluster, layout: Layout, moved: Sequence[Collective]) -> dict[str, float]:
    """Seconds of each axis: latency of its collectives, and bytes over the rate of the links that it uses. The tensor axis is the
    innermost, the pipeline the outermost; an axis that leaves the node has the rate between nodes."""
    reach = {"tp": layout.tp, "dp": layout.tp * layout.dp, "pp": layout.ranks}
    found: dict[str, float] = {}
    for one in moved:
        rate = on.inside_bytes_per_s if reach[one.axis] <= on.devices_per_node else on.between_bytes_per_s
        # each hop of a ring is a message; a broadcast or a send is one
        hops = (
            1 if one.kind in ("send", "recv", "broadcast") else min(one.size - 1, 2 * one.size.bit_length())
        )
        found[one.axis] = (
            found.get(one.axis, 0.0) + one.count * hops * on.latency_s + wire_bytes(one, "nccl") / rate
        )
    return found


def _gb(value: float) -> str:
    return f"{value / 1e9:.1f} GB" if value >= 1e8 else format_value(value, "bytes")


def _defend(one: Plan, listed: Sequence[Plan], simplest: Plan, model: Model) -> str:
    """Simplicity against communication against memory, with the numbers."""
    memory = f"{_gb(one.peak_bytes)} of {_gb(one.usable_bytes)} a device ({_largest_term(one.ledger)})"
    sent = f"{_gb(one.comm_bytes)} sent a step, {one.exposed_s / one.step_s.expected:.0%} of it exposed"
    cost = f"{one.name}: {memory}; {sent}" + (f"; bubble {one.bubble_frac:.0%}" if one.bubble_frac else "")
    if one is not listed[0]:
        return cost
    if one is simplest:
        return f"{cost}. It is the simplest that fits, and nothing more complex is {FASTER:g} times as fast."
    return f"{cost}. {simplest.name} is simpler and fits, but takes {simplest.step_s.expected / one.step_s.expected:.1f} times as long."


def _largest_term(found: Ledger) -> str:
    name = max(found.peak, key=lambda term: found.peak[term])
    return f"most of it {name}, {_gb(found.peak[name])}"


def _nothing_fits(model: Model, on: Cluster, nearest: Plan) -> str:
    terms = ", ".join(f"{name} {_gb(size)}" for name, size in nearest.ledger.peak.items() if size)
    enough = next((n for n in _more(on) if _fits(model, _resized(on, n))), None)
    remedy = f"{enough} devices would be enough" if enough else "shorten the sequences or take larger devices"
    return (
        f"{model.name} fits on no mesh of {on.devices} devices with {_gb(on.usable_bytes)} for tensors each: the smallest peak is "
        f"{_gb(nearest.peak_bytes)} ({nearest.name}: {terms}); {remedy}"
    )


def _more(on: Cluster) -> Iterator[int]:
    yield from (on.devices << power for power in range(1, 8))


def _resized(on: Cluster, devices: int) -> Cluster:
    whole = min(on.devices_per_node if on.devices > on.devices_per_node else 8, devices)
    return replace(on, devices=devices, devices_per_node=whole, batch=on.batch and max(on.batch, devices))


def _fits(model: Model, on: Cluster) -> bool:
    return any(
        _plan(model, on, layout).headroom_bytes >= 0
        for layout in layouts(model, on, precision="mixed", optimizer="adamw")
    )


# ---- the interviewer's follow-ups


def ask(model: Model, on: Cluster, **change: Any) -> str:
    """What one change makes of the recommendation, in a sentence. change: fields of Cluster or Model, such as memory_bytes, batch, seq.

    Raises ConfigError for a field that neither has.
    """
    known = {f.name for f in dataclasses.fields(Cluster)} | {f.name for f in dataclasses.fields(Model)}
    if strange := sorted(set(change) - known):
        raise ConfigError(
            f"{', '.join(strange)} is no field of a cluster or a model; choose from {', '.join(sorted(known))}"
        )
    before = plan(model, on)[0]
    new_model, new_on = _apply(model, on, change)
    what = ", ".join(
        f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in change.items()
    )
    try:
        after = plan(new_model, new_on)[0]
    except ConfigError as error:
        return f"with {what} nothing fits any more: {error}"
    moved = f"peak {_gb(before.peak_bytes)} -> {_gb(after.peak_bytes)}, step x {after.step_s.expected / before.step_s.expected:.2g}"
    if replace(after.layout, batch=0, seq=0) == replace(before.layout, batch=0, seq=0):
        return f"with {what} the answer stays: {after.name} ({moved})"
    return f"with {what} the answer becomes {after.name}, instead of {before.name} ({moved}). {after.says}"


def _apply(model: Model, on: Cluster, change: Mapping[str, Any]) -> tuple[Model, Cluster]:
    fields = {f.name for f in dataclasses.fields(Cluster)}
    of_cluster = {name: value for name, value in change.items() if name in fields}
    of_model = {name: value for name, value in change.items() if name not in fields}
    return replace(model, **of_model), replace(on, **of_cluster)


def what_changes(model: Model, on: Cluster) -> list[str]:
    """The numbers at which the recommendation changes: device memory, sequence length and link, found by bisection."""
    now = plan(model, on)[0]
    found = [
        _turn(now, "memory above {} a device", lambda x: (model, replace(on, memory_bytes=on.memory_bytes * x)), 16.0, on.memory_bytes),
        _turn(now, "memory below {} a device", lambda x: (model, replace(on, memory_bytes=on.memory_bytes / x)), 16.0, on.memory_bytes, down=True),
        _turn(now, "links slower than {}/s", lambda x: (model, replace(on, inside_bytes_per_s=on.inside_bytes_per_s / x, between_bytes_per_s=on.between_bytes_per_s / x)), 256.0, on.inside_bytes_per_s, down=True),
    ]  # fmt: skip
    for factor in (2, 4, 8, 16, 32):  # sequences stay whole, so these are not bisected
        longer = replace(model, seq=model.seq * factor)
        answer = _best(longer, on)
        if answer is None or _way(answer) != _way(now):
            found.append(f"sequences of {longer.seq}: {'nothing fits' if answer is None else answer.name}")
            break
    return [one for one in found if one]


def _best(model: Model, on: Cluster) -> Plan | None:
    try:
        return plan(model, on)[0]
    except ConfigError:
        return None


def _way(one: Plan) -> Layout:
    return replace(one.layout, batch=0, seq=0, microbatches=0)


def _turn(
    now: Plan,
    words: str,
    at: Callable[[float], tuple[Model, Cluster]],
    most: float,
    value: float,
    *,
    down: bool = False,
) -> str:
    """The factor from 1 to `most` at which the answer turns, as a sentence; "" where it does not."""

    def same(factor: float) -> bool:
        answer = _best(*at(factor))
        return answer is not None and _way(answer) == _way(now)

    if same(most):
        return ""
    low, high = 1.0, most
    for _ in range(12):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if same(middle) else (low, middle)
    then = _best(*at(high))
    where = _gb(value / high if down else value * high)
    return f"{words.format(where)}: {'nothing fits' if then is None else then.name}"


_ALMOST = replace(TRAINED["1B"], name="4B", layers=32, width=3072, heads=24, kv_heads=8, ffn=8192, seq=4096)
_WIDE = Model(
    name="one huge layer", layers=2, width=65_536, heads=512, kv_heads=8, ffn=229_376, vocab=32_000, seq=1024
)
_DEEP = Model(
    name="deep and long", layers=128, width=4096, heads=32, kv_heads=8, ffn=11_008, vocab=32_000, seq=32_768
)

PLANS: Mapping[str, tuple[Model, Cluster]] = {
    "worked_example": (_ALMOST, cluster("A100", 8)),
    "fits one device": (TRAINED["1B"], cluster("A100", 8)),
    "8B on 8": (PUBLISHED["8B"], cluster("H100", 8)),
    "70B on 64": (PUBLISHED["70B"], cluster("H100", 64)),
    "405B on 16384": (PUBLISHED["405B"], cluster("H100", 16_384, batch=2048)),
    "one sequence at a time": (PUBLISHED["8B"], cluster("H100", 8, batch=1)),
    "one huge layer": (_WIDE, cluster("H100", 128)),
    "deep and long": (_DEEP, cluster("H100", 64)),
}
"""Questions for `plan`: name -> (model, cluster)."""
