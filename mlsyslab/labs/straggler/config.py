"""The knobs of the straggler lab, its faults, its presets, and when and where a fault acts. Pure."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass

from mlsyslab.contract import ConfigError
from mlsyslab.faults import Fault
from mlsyslab.options import check_options, option

CAUSES = (
    "input",
    "compute",
    "host",
    "communication",
    "startup",
    "imbalance",
    "shared",
    "stage",
    "healthy",
    "unknown",
)

# name -> (the cause that names it, what really happens)
MECHANISMS: Mapping[str, tuple[str, str]] = {
    "none": ("healthy", "nothing"),
    "slow_input": ("input", "its samples are heavier: each is decoded and augmented again and again"),
    "slow_storage": ("input", "its reads wait for a token bucket"),
    "starved_workers": ("input", "its loader workers are stopped and continued (SIGSTOP, SIGCONT) in a duty cycle"),
    "cpu_contention": ("host", "noisy neighbours: processes that burn CPU on the rank's own core"),
    "throttling": ("host", "the rank is stopped and continued (SIGSTOP, SIGCONT) in a duty cycle, as a hot CPU is; on a GPU another process' kernels take turns with its own"),
    "slow_forward": ("compute", "extra real work in its forward"),
    "slow_backward": ("compute", "extra real work in its backward"),
    "slow_optimizer": ("compute", "extra real work in its optimizer step"),
    "slow_link": ("communication", "what it sends goes through a slow link"),
    "periodic_pause": ("host", "every fifth step it collects garbage and writes a file through to the disk"),
    "data_imbalance": ("imbalance", "in each step some rank gets longer samples, and it is another one each time"),
    "late_start": ("startup", "it is started later than the others"),
}  # fmt: skip
FAULTS = tuple(MECHANISMS)
PATTERNS = ("constant", "intermittent", "rotating", "everywhere")
PAUSE_EVERY = 5  # steps
BURST, BURST_FRAC = 3, 0.4  # an intermittent fault acts in bursts of so many steps, in this share of them
LATE_S = 2.0  # seconds of a late start of magnitude 1
SLACK_S = 0.015  # the exchange and the hand-over of a batch, during which a loader works ahead as well
LINK_BYTES = 2 << 20  # of the message that checks a link
FRAMEWORK_S = (
    0.020  # CPU seconds that the small model, autograd, DDP and the loader's hand-over take a step here
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """One experiment: a synchronous job in which one rank is made slow by a real mechanism."""

    ranks: int = option(4, "training processes of the job", low=2, high=64)
    fault: str = option("slow_input", "what is injected", choices=FAULTS)
    slow_rank: int = option(2, "the rank it is injected into", low=0, high=63)
    magnitude: float = option(
        1.0, "extra time as a multiple of a healthy step: 0.2 is +20 %, 2 is three times as long", low=0.0, high=20.0
    )  # fmt: skip
    pattern: str = option(
        "constant",
        "when it acts: in each step, in bursts, on another rank each step, or on every rank",
        choices=PATTERNS,
    )
    start_step: int = option(0, "first step in which it acts", low=0, high=1_000_000, unit="steps")
    steps: int = option(30, "training steps to record, warm-up included", low=1, high=100_000)
    warmup: int = option(
        4, "first steps, recorded but marked and left out of every figure", low=0, high=1000, unit="steps"
    )
    compute_s: float = option(
        0.090, "forward and backward of a healthy step on the accelerator", unit="s", low=0.0, high=30.0
    )
    cpu_s: float = option(
        0.010, "work of a healthy step on the host's own core: launching, logging, metrics", unit="s", low=0.0, high=10.0
    )  # fmt: skip
    batch_size: int = option(2, "samples a rank takes each step", low=1, high=4096, unit="samples")
    workers: int = option(1, "loader processes of each rank; 0 loads in the training process", low=0, high=64)
    prefetch: int = option(
        2, "batches each loader worker keeps ready", low=1, high=64, unit="batches", advanced=True
    )
    relief: str = option(
        "none",
        "what is done for the slow rank: a local cache of decoded samples, half the preprocessing, half of those "
        "that contend with it, or a spare host in place of its own",
        choices=("none", "cache", "less preprocessing", "less contention", "spare host"),
    )
    gradient_mb: float = option(
        4.0, "gradients to all-reduce", unit="MB", low=0.0, high=16_384.0, advanced=True
    )
    paced: bool = option(
        True,
        "the accelerator's part waits instead of computing, and leaves the host's cores free",
        advanced=True,
    )
    device: str = option(
        "auto", "where the model runs; auto is a GPU where there is one", choices=("auto", "cpu", "cuda"), advanced=True
    )  # fmt: skip
    images: int = option(1000, "JPEG files in the data set", low=16, high=1_000_000, advanced=True)
    seed: int = option(
        0, "seed of the sample order, of the weights and of the bursts", low=0, high=2**31 - 1, advanced=True
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.slow_rank >= self.ranks:
            raise ConfigError(
                f"slow_rank={self.slow_rank} is outside 0..{self.ranks - 1}; choose a rank of this run"
            )
        if self.warmup >= self.steps:
            raise ConfigError(
                f"warmup={self.warmup} leaves no steady step of steps={self.steps}; choose warmup below steps"
            )
        if self.fault != "none" and self.start_step >= self.steps:
            raise ConfigError(
                f"start_step={self.start_step} is after the last of steps={self.steps}; the fault would never act"
            )
        if self.ranks * self.batch_size > self.images:
            raise ConfigError(
                f"ranks={self.ranks} times batch_size={self.batch_size} is more than the data set of {self.images} "
                "images; lower one of them or raise images"
            )
        if self.fault == "starved_workers" and self.workers == 0:
            raise ConfigError("fault='starved_workers' has no worker to starve with workers=0; raise workers")
        if self.fault == "late_start" and self.pattern != "constant":
            raise ConfigError(
                f"fault='late_start' happens once, not pattern={self.pattern!r}; choose constant"
            )

    @property
    def base_s(self) -> float:
        """Seconds of a healthy rank's own work."""
        return self.compute_s + self.cpu_s + FRAMEWORK_S

    @property
    def extra_s(self) -> float:
        """Seconds that the fault is meant to add to a step in which it acts."""
        return self.magnitude * self.base_s

    @property
    def where(self) -> str:
        """The pattern that holds: imbalance always rotates, a pause is constant."""
        return "rotating" if self.fault == "data_imbalance" and self.pattern != "everywhere" else self.pattern


def acts(config: Config, rank: int, step: int) -> bool:
    """Whether the fault acts on `rank` in `step`; the same answer in every process. It sits on the rank's host, so
    a spare host is without it."""
    if config.fault in ("none", "late_start") or config.relief == "spare host" or step < config.start_step:
        return False
    if config.fault == "periodic_pause" and (step - config.start_step) % PAUSE_EVERY != PAUSE_EVERY - 1:
        return False
    if config.where == "everywhere":
        return True
    if config.where == "rotating":
        return rank == random.Random(f"{config.seed}/{step}").randrange(config.ranks)
    if rank != config.slow_rank:
        return False
    burst = random.Random(f"{config.seed}/{step // BURST}/burst").random() < BURST_FRAC
    return burst or config.where == "constant"


def faults_of(config: Config) -> list[Fault]:
    """What is injected, for truth.json; empty for a healthy job."""
    if config.fault == "none" or config.magnitude == 0:
        return []
    cause, mechanism = MECHANISMS[config.fault]
    cause = {"rotating": "imbalance", "everywhere": "shared"}.get(config.where, cause)
    late_s = config.magnitude * LATE_S
    size, unit = (late_s, "s") if config.fault == "late_start" else (config.magnitude, "healthy steps")
    rank = config.slow_rank if config.where in ("constant", "intermittent") else None
    return [
        Fault(
            cause=cause,
            mechanism=mechanism,
            magnitude=size,
            unit=unit,
            rank=rank,
            start_step=config.start_step,
        )
    ]


PRESETS: Mapping[str, Config] = {
    "quick": Config(ranks=2, steps=16, fault="slow_backward", slow_rank=1, magnitude=1.0),
    "worked_example": Config(
        fault="slow_input", slow_rank=2, magnitude=1.3, steps=24, compute_s=0.150, cpu_s=0.012
    ),
    "equalised": Config(
        fault="slow_backward", slow_rank=1, magnitude=1.2, steps=24, compute_s=0.150, cpu_s=0.012
    ),
    "contention": Config(ranks=3, fault="cpu_contention", slow_rank=2),
    "throttled": Config(fault="throttling", slow_rank=0),
    "slow_link": Config(ranks=3, fault="slow_link", slow_rank=1),
    "pauses": Config(fault="periodic_pause", slow_rank=2, steps=44),
    "rotating": Config(fault="data_imbalance", magnitude=0.8),
    "late": Config(fault="late_start", slow_rank=1),
    "healthy": Config(fault="none"),
}


def rebuilt(config: Config, *, cuda: bool) -> Config:
    """A preset for this machine: nothing is paced where a real accelerator is present."""
    return dataclasses.replace(config, paced=config.paced and not (cuda and config.device != "cpu"))
