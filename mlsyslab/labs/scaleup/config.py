"""The knobs of the scale-up clinic: the job, how it is scaled, and the one thing that is wrong with it. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlsyslab.contract import ConfigError
from mlsyslab.faults import Fault
from mlsyslab.options import check_options, option

OPTIMISER = (
    "learning rate not scaled",
    "no warm-up",
    "learning rate too high for the curvature",
    "beyond the critical batch",
    "schedule counted in steps",
    "too few steps",
)
# What each system cause really does, to every rank or to `fault_rank`.
MECHANISMS: Mapping[str, str] = {
    "samples duplicated": "no distributed sampler: every rank draws the same order",
    "set_epoch forgotten": "the sampler is never told the epoch, so that each epoch repeats the first one's order",
    "samples skipped": "one rank's shard is a batch short, so that it begins its next epoch early",
    "seed shared by all ranks": "every rank seeds its random numbers alike, so that all augment alike",
    "ranks start with different weights": "each rank draws its own initial weights, and nobody broadcasts",
    "gradients not synchronised": "forward calls the wrapped module directly, past DDP",
    "parameters diverge": "one rank's optimizer leaves out every eighth step, as a loss scaler of its own would",
    "fp16 overflow": "float16 with a static loss scale that is too large",
    "fp16 underflow": "float16 with a static loss scale that is too small",
    "bf16 weights": "weights in bfloat16 without a float32 copy, so that small updates are rounded away",
    "bf16 reduction": "gradients are summed over the ranks in bfloat16",
    "sum instead of mean": "gradients are summed over the ranks and not divided",
    "gradient missing": "one rank sends zeros to the all-reduce",
    "gradient stale": "one rank sends the gradient of the step before",
    "gradient scaled wrongly": "one rank multiplies its loss by three",
    "corrupted rank": "bits of one rank's gradient flip in every fourth step",
    "accumulation averaged per micro-batch": "each micro-batch is averaged over its own tokens, and then the averages",
    "batchnorm statistics": "each rank normalises by the statistics of its own few samples",
}
ON_ONE_RANK = ("samples skipped", "parameters diverge", "gradient missing", "gradient stale",
               "gradient scaled wrongly", "corrupted rank")  # fmt: skip
SYSTEM = tuple(MECHANISMS)
CAUSES = (*OPTIMISER, *SYSTEM, "healthy", "unknown")
MOMENTUM = 0.9
REAL_RANKS = (
    8  # more are virtual unless asked for: 16 processes on 2 cores spend their time in the all-reduce
)
OVERFLOW_SCALE, UNDERFLOW_SCALE = 2.0**26, 2.0**-17
CLASSES: Mapping[str, int] = {"digits": 10, "prose": 97}


def bucket_of(cause: str) -> str:
    """ "optimiser", "system", or the cause itself where it is neither ("healthy", "unknown")."""
    return "optimiser" if cause in OPTIMISER else "system" if cause in SYSTEM else cause


@dataclass(frozen=True, kw_only=True)
class Config:
    """One experiment: the same training at a small batch, on one worker at the large batch, and on `ranks` workers."""

    ranks: int = option(8, "workers of the large run", low=1, high=64)
    batch_per_rank: int = option(256, "samples that a worker takes each step", low=1, high=65_536)
    lr: float = option(0.035, "learning rate of the small run", low=1e-8, high=100.0)
    scaling: str = option(
        "linear", "how the learning rate grows with the batch", choices=("none", "linear", "sqrt")
    )
    warmup_epochs: float = option(
        5.0, "epochs in which the learning rate climbs to its peak", low=0.0, high=1000.0
    )
    cause: str = option(
        "healthy", "what is wrong with the large run", choices=tuple(c for c in CAUSES if c != "unknown")
    )
    epochs: int = option(20, "passes over the data", low=1, high=10_000)
    base_batch: int = option(256, "batch of the small run, on one worker", low=1, high=65_536, unit="samples")
    global_batch: int = option(
        0,
        "samples of all workers in a step, instead of batch_per_rank; 0 is ranks × batch_per_rank",
        low=0,
        high=1_048_576,
        unit="samples",
        advanced=True,
    )
    fault_rank: int = option(1, "the worker that a fault of one worker sits on", low=0, high=63)
    schedule: str = option(
        "constant", "learning rate after warm-up", choices=("constant", "cosine"), advanced=True
    )
    optimizer: str = option("sgd", "sgd has momentum 0.9", choices=("sgd", "adamw"), advanced=True)
    task: str = option(
        "digits",
        "8 × 8 digits, or the next character of English prose",
        choices=tuple(CLASSES),
        advanced=True,
    )
    norm: str = option(
        "none", "normalisation in the model", choices=("none", "batch", "group"), advanced=True
    )
    gain: float = option(
        1.5,
        "initial weights, as a multiple of Kaiming's; 0 is torch's own",
        low=0.0,
        high=4.0,
        advanced=True,
    )
    accumulate: int = option(1, "micro-batches of a worker in a step", low=1, high=1024, advanced=True)
    precision: str = option(
        "fp32", "of forward and backward", choices=("fp32", "fp16", "bf16"), advanced=True
    )
    loss_scale: float = option(
        0.0,
        "static factor on the loss in float16; 0 lets a GradScaler find it",
        low=0.0,
        high=1e12,
        advanced=True,
    )
    wire: str = option(
        "fp32", "precision in which gradients are reduced", choices=("fp32", "fp16", "bf16"), advanced=True
    )
    init_seeds: str = option(
        "same",
        "initial weights before DDP broadcasts those of rank 0",
        choices=("same", "per rank"),
        advanced=True,
    )
    augment: float = option(
        0.0, "noise that each worker adds to its samples, in standard deviations", low=0.0, high=2.0, advanced=True
    )  # fmt: skip
    samples: int = option(16_384, "samples of the data set", low=16, high=1_000_000, advanced=True)
    compare: bool = option(
        True, "train one worker at the same global batch first, and one at the small batch", advanced=True
    )
    engine: str = option(
        "auto",
        f"ranks as processes, or all in one process (virtual); auto is processes up to {REAL_RANKS}",
        choices=("auto", "processes", "virtual"),
        advanced=True,
    )
    device: str = option(
        "auto",
        "where the model runs; auto is a GPU where there is one",
        choices=("auto", "cpu", "cuda"),
        advanced=True,
    )
    seed: int = option(0, "seed of data order and weights", low=0, high=2**31 - 1, advanced=True)

    def __post_init__(self) -> None:
        check_options(self)
        if self.global_batch % self.ranks:
            raise ConfigError(
                f"global_batch={self.global_batch} over ranks={self.ranks} is {self.global_batch / self.ranks:g} samples each; "
                "choose a global batch that divides by the ranks"
            )
        if self.per_rank % self.accumulate:
            raise ConfigError(
                f"{self.per_rank} samples a rank in accumulate={self.accumulate} micro-batches is "
                f"{self.per_rank / self.accumulate:g} each; choose micro-batches that divide it"
            )
        if self.whole_batch > self.samples or self.base_batch > self.samples:
            most = max(self.whole_batch, self.base_batch)
            raise ConfigError(
                f"a batch of {most} is larger than the data set of samples={self.samples}: some shard would be empty; "
                "lower the batch or raise samples"
            )
        if self.cause in ON_ONE_RANK and self.fault_rank >= self.ranks:
            raise ConfigError(
                f"fault_rank={self.fault_rank} is outside 0..{self.ranks - 1}; choose a rank of this run"
            )
        if self.cause in SYSTEM and self.ranks == 1 and self.cause not in ALSO_ALONE:
            raise ConfigError(
                f"cause={self.cause!r} needs more than one rank; choose ranks of at least 2, or another cause"
            )
        if self.cause == "batchnorm statistics" and self.norm != "batch":
            raise ConfigError(f"cause={self.cause!r} needs norm='batch', not {self.norm!r}")
        if self.cause == "seed shared by all ranks" and not self.augment:
            raise ConfigError(
                f"cause={self.cause!r} with augment=0 draws no random numbers; set augment, for example 0.15"
            )
        if self.cause == "accumulation averaged per micro-batch" and self.task != "prose":
            raise ConfigError(
                f"cause={self.cause!r} needs samples of unequal length; choose task='prose', not {self.task!r}"
            )
        if self.cause == "no warm-up" and self.warmup_epochs:
            raise ConfigError(
                f"cause='no warm-up' with warmup_epochs={self.warmup_epochs:g} contradicts itself; set it to 0"
            )
        if self.cause == "learning rate not scaled" and self.scaling == "linear":
            raise ConfigError(f"cause={self.cause!r} with scaling='linear' contradicts itself; choose 'none'")
        if self.cause in OPTIMISER and self.growth <= 1:
            raise ConfigError(
                f"cause={self.cause!r} with a global batch of {self.whole_batch} and base_batch={self.base_batch} has "
                "nothing that was scaled up; raise ranks or batch_per_rank"
            )
        if (
            self.cause == "schedule counted in steps"
            and self.schedule == "constant"
            and not self.warmup_epochs
        ):
            raise ConfigError(f"cause={self.cause!r} has no schedule; choose schedule='cosine' or a warm-up")

    @property
    def per_rank(self) -> int:
        """Samples of one rank in a step."""
        return self.global_batch // self.ranks or self.batch_per_rank

    @property
    def whole_batch(self) -> int:
        """Samples of all ranks in a step."""
        return self.per_rank * self.ranks

    @property
    def growth(self) -> float:
        """How much larger the global batch is than the small run's."""
        return self.whole_batch / self.base_batch

    @property
    def epoch_steps(self) -> int:
        """Steps of the large run in an epoch: DistributedSampler pads each shard to the same length."""
        return math.ceil(self.samples / self.ranks) // self.per_rank

    @property
    def steps(self) -> int:
        """Steps of the large run."""
        whole = self.epochs * self.epoch_steps
        return max(2, round(whole / self.growth)) if self.cause == "too few steps" else whole

    @property
    def peak_lr(self) -> float:
        """The learning rate that the rule gives for the global batch."""
        return self.lr * {"none": 1.0, "linear": self.growth, "sqrt": math.sqrt(self.growth)}[self.scaling]

    @property
    def virtual(self) -> bool:
        """Whether the ranks are replicas in one process."""
        return self.engine == "virtual" or (self.engine == "auto" and self.ranks > REAL_RANKS)


# Causes that one worker can have as well.
ALSO_ALONE = ("fp16 overflow", "fp16 underflow", "bf16 weights", "accumulation averaged per micro-batch",
              "set_epoch forgotten")  # fmt: skip


def base_of(config: Config) -> Config:
    """The small run: one worker, the small batch, the small run's learning rate, nothing wrong."""
    return dataclasses.replace(
        control_of(dataclasses.replace(config, cause="healthy")), ranks=1, global_batch=0,
        batch_per_rank=config.base_batch, scaling="none", warmup_epochs=0.0, accumulate=1,
    )  # fmt: skip


def control_of(config: Config) -> Config:
    """One worker at the large run's global batch and learning rate, in float32, its ranks' shares as micro-batches.

    What is wrong with the optimiser's settings it has as well; nothing else is wrong. BatchNorm needs the batch in one piece.
    """
    alike: dict[str, Any] = {"cause": config.cause if config.cause in OPTIMISER else "healthy", "engine": "virtual", "precision": "fp32",
             "wire": "fp32", "loss_scale": 0.0, "init_seeds": "same", "compare": False}  # fmt: skip
    if config.norm == "batch":
        alike |= {"ranks": 1, "global_batch": config.whole_batch, "accumulate": 1}
    return dataclasses.replace(config, **alike)


def has_base(config: Config) -> bool:
    """Whether the small run is another one than the control."""
    return config.compare and config.growth != 1


def learning_rate(config: Config, step: int) -> float:
    """The learning rate of a step: linear warm-up from the small run's, then the schedule.

    A schedule that is counted in steps takes the small run's number of steps for the length of an epoch.
    """
    per_epoch = config.epoch_steps
    if config.cause == "schedule counted in steps":
        per_epoch = config.samples // config.base_batch
    climb, whole = config.warmup_epochs * per_epoch, config.epochs * per_epoch
    if step < climb:
        return config.lr + (config.peak_lr - config.lr) * step / climb
    if config.schedule == "constant":
        return config.peak_lr
    done = min(1.0, (step - climb) / max(1.0, whole - climb))
    return config.peak_lr * 0.5 * (1 + math.cos(math.pi * done))


def faults_of(config: Config) -> list[Fault]:
    """What a configuration makes bad on purpose, for truth.json."""
    cause = config.cause
    if cause in SYSTEM:
        rank = config.fault_rank if cause in ON_ONE_RANK else None
        return [Fault(cause=cause, mechanism=MECHANISMS[cause], magnitude=1, unit="fault", rank=rank)]
    if cause == "healthy" and config.growth > 1:  # the settings alone may be the mistake
        climbs = config.scaling == "none" or config.warmup_epochs
        cause = (
            "learning rate not scaled" if config.scaling == "none" else "healthy" if climbs else "no warm-up"
        )
    if cause == "healthy":
        return []
    said = f"global batch {config.whole_batch} instead of {config.base_batch}, peak learning rate {config.peak_lr:g}"
    return [Fault(cause=cause, mechanism=said, magnitude=config.growth, unit="times the batch")]
