"""The knobs of the step-time lab, its presets, and how presets are scaled to a machine. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlsyslab.contract import ConfigError
from mlsyslab.faults import Fault
from mlsyslab.options import check_options, option

CAUSES = ("input", "compute", "communication", "host", "healthy", "unknown")

# Bytes a second that a 2-core machine moved through a 2-rank gloo all-reduce of 32 MB when the presets were
# written (docs/log.md): presets keep the communication TIME of that machine, see scaled().
REFERENCE_ALLREDUCE_BYTES_PER_S = 0.9e9
IMAGE_BYTES = 75e3  # mean of the data set's files


@dataclass(frozen=True, kw_only=True)
class Config:
    """One experiment: a real training loop over JPEG files, with one part of it made as slow as you like."""

    ranks: int = option(1, "training processes, one per device", low=1, high=64)
    steps: int = option(24, "training steps to record, warm-up included", low=1, high=100_000)
    warmup: int = option(
        4, "first steps, recorded but marked and left out of every figure", low=0, high=1000, unit="steps"
    )
    batch_size: int = option(8, "samples a rank takes each step", low=1, high=4096, unit="samples")
    workers: int = option(1, "loader processes of each rank; 0 loads in the training process", low=0, high=64)
    prefetch: int = option(2, "batches each loader worker keeps ready", low=1, high=64, unit="batches")
    input_cost_s: float = option(
        0.0,
        "CPU seconds to decode and augment a sample, reached by decoding again; 0 decodes once",
        low=0.0,
        high=2.0,
        unit="s",
    )
    compute_s: float = option(
        0.0,
        "forward and backward of a step, reached by extra unfused work (or paced); 0 is the model alone",
        low=0.0,
        high=30.0,
        unit="s",
    )
    host_s: float = option(
        0.0, "Python work between steps (metrics, logging), in CPU seconds", low=0.0, high=10.0, unit="s"
    )
    width: int = option(
        256,
        "hidden width of the model; its matrix work grows with the square",
        low=16,
        high=8192,
        advanced=True,
    )
    gradient_mb: float = option(
        0.0,
        "parameters added to the model, so that all-reduce has this much more to move",
        low=0.0,
        high=16_384.0,
        unit="MB",
    )
    storage_mb_per_s: float = option(
        0.0,
        "limit on reading files, shared by a rank's workers; 0 is no limit",
        low=0.0,
        high=100_000.0,
        unit="MB/s",
    )
    cache: str = option(
        "none", "keep decoded samples in memory, made before the first step", choices=("none", "memory")
    )
    pinned: bool = option(False, "page-locked host memory for copies to a GPU", advanced=True)
    overlap: bool = option(
        True, "all-reduce gradients in buckets while backward goes on; off is one bucket at the end"
    )
    paced: bool = option(
        False,
        "forward and backward wait instead of computing, like an accelerator that leaves the host's cores free",
    )
    device: str = option(
        "auto",
        "where the model runs; auto is a GPU where there is one",
        choices=("auto", "cpu", "cuda"),
        advanced=True,
    )
    images: int = option(3000, "JPEG files in the data set", low=16, high=1_000_000, advanced=True)
    scaling: tuple[int, ...] = option(
        (),
        "rank counts to measure one after the other, such as 1,2,4; empty is `ranks` alone",
        low=1,
        high=64,
        advanced=True,
    )
    seed: int = option(0, "seed of the sample order and of the weights", low=0, high=2**31 - 1, advanced=True)

    def __post_init__(self) -> None:
        check_options(self)
        if self.batch_size > self.images:
            raise ConfigError(
                f"batch_size={self.batch_size} is larger than the data set of {self.images} images; lower batch_size or raise images"
            )
        if self.warmup >= self.steps:
            raise ConfigError(
                f"warmup={self.warmup} leaves no steady step of steps={self.steps}; choose warmup below steps"
            )
        if self.paced and self.compute_s == 0:
            raise ConfigError(
                "paced=True with compute_s=0 has nothing to pace; set compute_s, or paced=False"
            )

    @property
    def worlds(self) -> tuple[int, ...]:
        """The rank counts that a run measures, in order."""
        return self.scaling or (self.ranks,)


PRESETS: Mapping[str, Config] = {
    "quick": Config(
        ranks=2, steps=16, batch_size=4, workers=1, input_cost_s=0.012, compute_s=0.02, width=32, paced=True
    ),
    "worked_example": Config(
        steps=24, batch_size=8, workers=1, input_cost_s=0.0375, compute_s=0.120, width=64, paced=True
    ),
    "compute_bound": Config(steps=20, batch_size=8, workers=1, compute_s=0.200, width=64),
    "communication_bound": Config(
        ranks=2,
        steps=16,
        batch_size=4,
        workers=1,
        compute_s=0.030,
        width=64,
        gradient_mb=64.0,
        cache="memory",
        paced=True,
    ),
    "host_bound": Config(
        steps=20, batch_size=8, workers=1, compute_s=0.050, host_s=0.100, cache="memory", paced=True
    ),
    "healthy": Config(steps=16, batch_size=8, workers=1, width=512),
    "scaling": Config(
        steps=12,
        batch_size=4,
        workers=1,
        compute_s=0.060,
        width=64,
        gradient_mb=32.0,
        cache="memory",
        paced=True,
        scaling=(1, 2, 4),
    ),
}


def scaled(config: Config, probe: Mapping[str, Any], *, cuda: bool) -> Config:
    """A preset for this machine: the same story in the same time.

    Times are reached by calibration wherever they run, so only two fields depend on the machine: gradients
    grow with the measured all-reduce rate, and nothing is paced where a real accelerator is present.
    """
    rate = probe.get("allreduce_bytes_per_s")
    ratio = rate / REFERENCE_ALLREDUCE_BYTES_PER_S if rate else 1.0
    gradient_mb = config.gradient_mb * min(max(ratio, 0.5), 64.0)
    on_cuda = cuda and config.device != "cpu"
    return dataclasses.replace(config, gradient_mb=round(gradient_mb, 1), paced=config.paced and not on_cuda)


def faults_of(config: Config) -> list[Fault]:
    """What a configuration makes slow on purpose, the one that costs most first; for truth.json.

    The order is by seconds a step, from the configuration and the reference machine's rates alone. A pace is the
    accelerator's normal speed rather than a fault, so it comes last.
    """
    load_s = config.batch_size * config.input_cost_s / max(config.workers, 1)
    ranks = max(config.worlds)
    move_s = 2 * (ranks - 1) / ranks * config.gradient_mb * 1e6 / REFERENCE_ALLREDUCE_BYTES_PER_S
    read_s = (
        config.batch_size * IMAGE_BYTES / (config.storage_mb_per_s * 1e6) if config.storage_mb_per_s else 0.0
    )
    compute = (
        "forward and backward wait on a pacer" if config.paced else "unfused elementwise work in each block"
    )
    uncached = config.cache == "none"
    found = [
        (load_s * uncached, Fault(cause="input", mechanism="each sample is decoded and augmented again in the loader", magnitude=load_s, unit="s")),
        (read_s * uncached, Fault(cause="input", mechanism="reads wait for a token bucket", magnitude=config.storage_mb_per_s, unit="MB/s")),
        (config.host_s, Fault(cause="host", mechanism="Python work between the steps on the training thread", magnitude=config.host_s, unit="s")),
        (move_s, Fault(cause="communication", mechanism="extra parameters whose gradients are all-reduced", magnitude=config.gradient_mb, unit="MB")),
        (config.compute_s * (not config.paced), Fault(cause="compute", mechanism=compute, magnitude=config.compute_s, unit="s")),
    ]  # fmt: skip
    ordered = sorted(found, key=lambda pair: -pair[0])
    return [
        fault
        for seconds, fault in ordered
        if seconds > 0 or (fault.cause == "compute" and fault.magnitude > 0)
    ]
