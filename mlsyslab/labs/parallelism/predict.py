"""What a split should hold, send and take, before it is run: the ledger, the traffic and the schedule in one. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlsyslab.contract import Prediction, Range
from mlsyslab.labs.parallelism.config import Config, Layout, layout_of, stages
from mlsyslab.labs.parallelism.ledger import Ledger, ledger
from mlsyslab.labs.parallelism.schedule import Timeline, bubble_frac, orders, play
from mlsyslab.labs.parallelism.shapes import Model
from mlsyslab.labs.parallelism.traffic import Collective, comm_bytes, traffic, wire_bytes

# A 2-core cloud machine, measured with the probe (docs/log.md); used where this machine was not probed.
REFERENCE_MACHINE: Mapping[str, float] = {
    "usable_cores": 2.0,
    "matmul_flops_per_s": 65e9,
    "copy_bytes_per_s": 6e9,
    "allreduce_bytes_per_s": 0.9e9,
    "allreduce_latency_s": 350e-6,
}
MATMUL_FRAC = 0.8  # of the probe's rate that wide matrices reach in a training step (docs/log.md)
SMALL_WIDTH = (
    256.0  # a model of this width reaches half of that: its matrices are too small to amortise an operator
)
HOST_S = 0.005  # Python and the autograd engine's own work in a step
BELOW, ABOVE = 0.4, 1.5  # a shared machine is slower far more often than faster
MEMORY = 0.10  # what the closed form of the peak may be off by
COMMUNICATION_FRAC, LINK_FRAC, BUBBLE_FRAC, UNEVEN = 0.35, 0.2, 0.25, 1.3  # from these on a cause is named


def predict(config: Config, machine: Mapping[str, Any]) -> Prediction:
    """Memory and bytes of the largest rank, and the step, with ranges; cause is what the run's verdict should be.

    machine: figures of the probe and `usable_cores`; what is missing is taken from REFERENCE_MACHINE.
    """
    rates = {**REFERENCE_MACHINE, **{k: v for k, v in machine.items() if v is not None}}
    model, layout = config.shape, layout_of(config)
    backend = "gloo" if config.device == "cpu" or not machine.get("gpu_matmul_flops_per_s") else "nccl"
    heaviest = max(
        (ledger(model, layout, stage=stage) for stage in range(layout.pp)), key=lambda one: one.peak_bytes
    )
    moved = traffic(model, layout, clipped=config.clip_norm > 0)
    compute_s, wait_s = (
        compute_seconds(model, layout, rates),
        communication_seconds(config, moved, rates, backend),
    )
    timeline = pipeline(model, layout, compute_s) if layout.pp > 1 else None
    # ranks of one machine share its cores: what overlaps on devices of their own comes one after the other here
    cores = min(float(layout.ranks), rates["usable_cores"])
    step_s = max(sum(compute_s) / cores, timeline.step_s if timeline else max(compute_s)) + wait_s + HOST_S
    values = {
        **{f"{name}_bytes": Range.around(value, 0.03, 0.03) for name, value in heaviest.state.items()},
        "activations_bytes": Range.around(heaviest.activations_bytes, 0.15, 0.15),
        "peak_bytes": Range.around(heaviest.peak_bytes, MEMORY, MEMORY),
        "comm_bytes": Range.around(comm_bytes(moved, backend), 0.01, 0.01),
        "step_s": Range.around(step_s, BELOW, ABOVE),
    }
    if timeline:
        values["bubble_frac"] = Range.around(timeline.bubble_frac, 0.3, 0.3)
    return Prediction(
        values=values,
        assumptions=_assumptions(config, rates, backend),
        cause=_cause(
            config, heaviest, wait_s / step_s, timeline, crowded=config.ranks > rates["usable_cores"]
        ),
    )


def compute_seconds(model: Model, layout: Layout, rates: Mapping[str, float]) -> list[float]:
    """Seconds of forward and backward of each rank on a core of its own: FLOP over the rate that such matrices reach.
    Checkpointing computes forward twice: 4/3 of the work."""
    flops = (
        model.flops_per_token(layout.seq)
        * layout.batch
        * layout.seq
        * (4 / 3 if layout.checkpointing else 1.0)
    )
    reached = rates["matmul_flops_per_s"] * MATMUL_FRAC * model.width / (model.width + SMALL_WIDTH)
    share = [layers / model.layers for layers in stages(model, layout)]
    head = 6.0 * model.vocab_params * layout.batch * layout.seq
    each = [
        (flops - head) * part + (head if stage == layout.pp - 1 else 0) for stage, part in enumerate(share)
    ]
    return [work / reached / (layout.dp * layout.tp) for work in each for _ in range(layout.dp * layout.tp)]


def pipeline(model: Model, layout: Layout, compute_s: list[float]) -> Timeline:
    """The schedule played out with these seconds of each stage; backward takes twice as long as forward (three times under
    checkpointing)."""
    forward = 1 / (4 if layout.checkpointing else 3)
    per_stage = [seconds / layout.microbatches for seconds in compute_s[:: layout.dp * layout.tp]]
    work = orders(layout.schedule, layout.pp, layout.microbatches)
    return play(work, [s * forward for s in per_stage], [s * (1 - forward) for s in per_stage])


def communication_seconds(
    config: Config, moved: tuple[Collective, ...], rates: Mapping[str, float], backend: str
) -> float:
    """Latency of each collective and its bytes on the wire; between nodes the link bounds what crosses it."""
    rate = rates["allreduce_bytes_per_s"]  # bytes of the buffer over seconds: a 2-rank ring sends as many
    total = 0.0
    for one in moved:
        slow = config.nodes > 1 and crosses(config, one.axis)
        # a ring over several nodes sends everything through each of its links
        speed = config.link_mb_per_s * 1e6 if slow else rate
        share = min(1.0, rates["usable_cores"] / one.size)
        total += one.count * rates["allreduce_latency_s"] / share + wire_bytes(one, backend) / min(
            speed, rate * share
        )
    return total


def crosses(config: Config, axis: str) -> bool:
    """Whether the groups of an axis have ranks on several nodes: neighbours share a node, and the inner axis is made of them."""
    per_node = config.ranks // config.nodes
    if config.strategy != "fsdp+tp":
        return config.ranks > per_node
    inner = "dp" if config.tp_across else "tp"
    inner_size = config.ranks // config.tp if config.tp_across else config.tp
    return axis != inner or inner_size > per_node


def _cause(
    config: Config, heaviest: Ledger, waiting: float, timeline: Timeline | None, *, crowded: bool
) -> str:
    if config.memory_cap_mb and heaviest.peak_bytes > config.memory_cap_mb * 1e6:
        return "memory"
    if config.nodes > 1 and config.strategy == "fsdp+tp" and config.tp_across and waiting > LINK_FRAC:
        return "placement"
    if timeline:
        cut = stages(config.shape, layout_of(config))
        even = bubble_frac(len(cut), config.microbatches)
        if max(cut) > UNEVEN * sum(cut) / len(cut):
            return "imbalance"
        return "bubble" if even >= BUBBLE_FRAC else "healthy"
    # more ranks than cores wait for each other's turn: no verdict is made of that
    return "communication" if waiting > COMMUNICATION_FRAC and not crowded else "healthy"


def _assumptions(config: Config, rates: Mapping[str, float], backend: str) -> tuple[str, ...]:
    said = [
        "memory is what tensors occupy: the allocator's own reserve and the libraries' scratch come on top",
        "activations are those of eager torch; compiled or fused kernels keep less",
    ]
    if backend == "gloo":
        said.append(
            "gloo's reduce-scatter is an all-reduce, so FSDP sends 4/3 of what it would send over NCCL"
        )
    if config.ranks > rates["usable_cores"]:
        said.append(
            f"{config.ranks} ranks share {rates['usable_cores']:g} cores: the step says nothing about the speed-up of as many devices"
        )
    if (
        config.memory_cap_mb
        and sum(ledger(config.shape, layout_of(config)).peak.values()) > config.memory_cap_mb * 1e6
    ):
        said.append("the run ends when memory is refused: what comes after that moment is never reached")
    return tuple(said)
