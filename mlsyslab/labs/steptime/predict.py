"""What a step should take, before it is run: loader against device, ring all-reduce, shared cores. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlsyslab.contract import Prediction, Range
from mlsyslab.labs.steptime.breakdown import WAIT_FRAC
from mlsyslab.labs.steptime.config import IMAGE_BYTES, REFERENCE_ALLREDUCE_BYTES_PER_S, Config

# A 2-core cloud machine, measured with the probe (docs/log.md); used where this machine was not probed.
REFERENCE_MACHINE: Mapping[str, float] = {
    "usable_cores": 2.0,
    "matmul_flops_per_s": 65e9,
    "copy_bytes_per_s": 6e9,
    "allreduce_bytes_per_s": REFERENCE_ALLREDUCE_BYTES_PER_S,
    "allreduce_latency_s": 350e-6,
    "jpeg_decode_s": 0.003,
}
BUCKET_BYTES = 25e6  # DDP's bucket
MATMUL_SHARE = 0.65  # of the probe's matmul rate that this model reaches, GELU and bias included
HOST_FLOOR_S = 0.003  # Python, hooks and collation between the phases
BELOW, ABOVE = (
    0.08,
    0.25,
)  # measured times rarely undershoot a closed form, and overshoot it on a shared machine


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A step in a few numbers, seconds. load_s: the time between two batches that the loader can sustain; read_s:
    what the storage alone would take, however many workers there are.

    cores_s: CPU seconds that all ranks and their workers spend on a step, loading_cores_s of them on loading;
    cores: what there is to spend them on. ahead: batches are loaded while the device computes (workers > 0).
    """

    load_s: float
    compute_s: float
    sync_s: float
    host_s: float
    cores_s: float
    cores: float
    ahead: bool = True
    read_s: float = 0.0
    loading_cores_s: float = 0.0

    @property
    def device_s(self) -> float:
        """What one step needs when its batch is already there."""
        return self.compute_s + self.sync_s + self.host_s

    @property
    def step_s(self) -> float:
        """max(load, device) with prefetch, load + device without; never below the CPU work there is to do."""
        paced = max(self.load_s, self.device_s) if self.ahead else self.load_s + self.device_s
        return max(paced, self.cores_s / self.cores)

    @property
    def data_s(self) -> float:
        """The exposed wait for the loader."""
        return max(0.0, self.step_s - self.device_s) if self.ahead else self.load_s


def model_parameters(config: Config, blocks: int = 4) -> float:
    """Parameters of the lab's model (workloads.PatchModel), ballast included."""
    width, pixels = config.width, 768
    ballast = max(config.gradient_mb * 1e6 / 4 / blocks, width)
    return (pixels + 1) * width + blocks * (4 * width**2 + 3 * width + ballast) + 10 * (width + 1)


def model_flops(config: Config, blocks: int = 4) -> float:
    """FLOPs of the matrix products of one step on one rank: 6 a weight and token, 4 in the first layer."""
    return config.batch_size * (
        100 * (6 * blocks * 4 * config.width**2 + 4 * 768 * config.width) + 60 * config.width
    )


def allreduce_s(size_bytes: float, ranks: int, machine: Mapping[str, float]) -> float:
    """Ring all-reduce: 2 (n-1)/n × bytes / bandwidth + 2 (n-1) × latency (Patarasu and Yuan, 2009).

    The probe's rate is that of two ranks, for which 2 (n-1)/n is 1. More ranks than cores take turns.
    """
    if ranks == 1:
        return 0.0
    turns = max(1.0, ranks / max(machine["usable_cores"], 1.0))
    ring = 2 * (ranks - 1) / ranks
    return (
        turns * ring * size_bytes / machine["allreduce_bytes_per_s"]
        + 2 * (ranks - 1) * machine["allreduce_latency_s"]
    )


def exposed_s(total_s: float, size_bytes: float, backward_s: float, overlap: bool) -> float:
    """Communication that backward does not hide: all of it without overlap; with buckets at least the last one,
    and whatever is longer than the rest of backward."""
    if not overlap:
        return total_s
    buckets = max(1, math.ceil(size_bytes / BUCKET_BYTES))
    return max(total_s / buckets, total_s - backward_s * (1 - 1 / buckets))


def parts(config: Config, ranks: int, machine: Mapping[str, float]) -> Parts:
    """The five numbers of a configuration on a machine."""
    cached = config.cache == "memory"
    cost_s = 0.0003 if cached else max(config.input_cost_s, machine["jpeg_decode_s"])
    batch_cpu_s = config.batch_size * cost_s
    limited = config.storage_mb_per_s > 0 and not cached
    read_s = config.batch_size * IMAGE_BYTES / (config.storage_mb_per_s * 1e6) if limited else 0.0
    load_s = max(batch_cpu_s / max(config.workers, 1), read_s)
    model_s = model_flops(config) / (MATMUL_SHARE * machine["matmul_flops_per_s"])
    compute_s = max(config.compute_s, model_s)
    size_bytes = 4 * model_parameters(config)
    optimizer_s = 3 * size_bytes / machine["copy_bytes_per_s"]
    total_s = allreduce_s(size_bytes, ranks, machine)
    sync_s = exposed_s(total_s, size_bytes, compute_s * 2 / 3, config.overlap)
    host_s = config.host_s + HOST_FLOOR_S
    busy_s = (model_s if config.paced else compute_s) + optimizer_s + host_s + batch_cpu_s
    return Parts(
        load_s=load_s,
        compute_s=compute_s + optimizer_s,
        sync_s=sync_s,
        host_s=host_s,
        cores_s=ranks * busy_s,
        cores=max(machine["usable_cores"], 1.0),
        ahead=config.workers > 0,
        read_s=read_s,
        loading_cores_s=ranks * batch_cpu_s,
    )


def cause_of(step: Parts, extra_compute: bool) -> str:
    """The bottleneck that the numbers imply; the same thresholds as the diagnosis of a run."""
    shares = {"input": step.data_s, "communication": step.sync_s, "host": step.host_s}
    worst = max(shares, key=lambda name: shares[name])
    if shares[worst] > WAIT_FRAC * step.step_s:
        return worst
    return "compute" if extra_compute else "healthy"


def predict(config: Config, machine: Mapping[str, Any] | None = None) -> Prediction:
    """Expected step, phases and shares of the largest world, with ranges.

    machine: the probe's figures of this machine (`hardware.probe()`); without them the reference machine's.
    values: step_s, data_s, compute_s, sync_s, host_s, data_frac, samples_per_s.
    """
    figures = machine_for(config, machine)
    ranks = max(config.worlds)
    step = parts(config, ranks, figures)
    step_range = Range.around(step.step_s, BELOW, ABOVE)
    data_range = Range(
        max(0.0, step.data_s - BELOW * step.step_s), step.data_s, step.data_s + ABOVE * step.step_s
    )
    values = {
        "step_s": step_range,
        "data_s": data_range,
        "compute_s": Range.around(step.compute_s, BELOW, ABOVE),
        "sync_s": Range.around(step.sync_s, 0.4, 1.0),
        "host_s": Range(step.host_s * (1 - BELOW), step.host_s, step.host_s + 0.05 * step.step_s),
        "data_frac": Range(
            data_range.low / step_range.low,
            step.data_s / step.step_s,
            min(1.0, data_range.high / step_range.high),
        ),
        "samples_per_s": Range(*sorted(ranks * config.batch_size / value for value in step_range)),
    }
    return Prediction(
        values=values,
        assumptions=tuple(_assumptions(config, machine or {})),
        cause=cause_of(step, config.compute_s > 0),
    )


def _assumptions(config: Config, machine: Mapping[str, Any]) -> list[str]:
    said = ["steady state: the first batches, which the loader made before the first step, are not counted"]
    said.append("nothing else uses this machine's cores; a busy machine is slower than the range")
    if not machine:
        said.append("this machine was not probed: its rates are those of a 2-core reference machine")
    if config.paced:
        said.append(
            "paced: forward and backward wait like an accelerator; they are not compute of this machine"
        )
    if max(config.worlds) > 1:
        said.append(
            "ring all-reduce at the rate of two ranks on this machine; more ranks than cores take turns"
        )
        if machine.get("gpu_float32_matmul_flops_per_s") and config.device != "cpu":
            said.append(
                "all-reduce between GPUs was not probed: the rate is that of two ranks through the host"
            )
    return said


def what_if_parts(step: Parts) -> dict[str, Parts]:
    """The same step after each of the four usual remedies."""
    more_s = max(step.load_s / 2, step.read_s) if step.ahead else step.load_s
    return {
        "2x loader workers": replace(step, load_s=more_s, ahead=True),
        "decoded samples cached": replace(
            step, load_s=0.0, read_s=0.0, cores_s=step.cores_s - step.loading_cores_s
        ),
        "2x faster device": replace(step, compute_s=step.compute_s / 2),
        "free communication": replace(step, sync_s=0.0),
    }


def machine_for(config: Config, machine: Mapping[str, Any] | None) -> dict[str, float]:
    """The rates that bound this configuration: the probe's, a GPU's where the model runs on one, else the
    reference machine's."""
    given = dict(machine or {})
    if config.device != "cpu" and given.get("gpu_float32_matmul_flops_per_s"):
        given["matmul_flops_per_s"] = given["gpu_float32_matmul_flops_per_s"]
        given["copy_bytes_per_s"] = given.get("gpu_copy_bytes_per_s")
    known = {k: float(v) for k, v in given.items() if k in REFERENCE_MACHINE and isinstance(v, (int, float))}
    return {**REFERENCE_MACHINE, **known}


def what_if(config: Config, machine: Mapping[str, Any] | None = None) -> dict[str, Range]:
    """Predicted seconds a step as configured ("as it is") and after each remedy."""
    figures = machine_for(config, machine)
    step = parts(config, max(config.worlds), figures)
    return {
        name: Range.around(p.step_s, BELOW, ABOVE)
        for name, p in {"as it is": step, **what_if_parts(step)}.items()
    }
