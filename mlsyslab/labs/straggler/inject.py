"""The faults, as what really happens in a rank: its samples, its work, its neighbours, its link. Needs torch."""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from mlsyslab import jpegs, workloads
from mlsyslab.labs.straggler.config import FRAMEWORK_S, PAUSE_EVERY, SLACK_S, Config, acts
from mlsyslab.labs.straggler.links import AnyLink
from mlsyslab.labs.straggler.noise import Noise

PIECE_S = 0.004  # a paced accelerator runs kernels of this length, each launched by the host when the last has ended
GRACE_S = 0.001  # of a piece's overshoot that timers cause, and the next piece makes up for
DUTY_PERIOD_S = 0.020
MOST_NEIGHBOURS = 16
Spec = tuple[int, int, float, bool, float]


def pace(seconds: float) -> None:
    """Wait like an accelerator that the host feeds piece by piece: a host that is stopped launches nothing."""
    debt_s = 0.0
    while seconds > debt_s + 1e-6:
        piece_s = min(PIECE_S, seconds) - debt_s
        began_s = time.perf_counter()
        time.sleep(max(0.0, piece_s))
        debt_s = min(time.perf_counter() - began_s - piece_s, GRACE_S)
        seconds -= PIECE_S


class Work:
    """Real work of a given length on the rank's device: CPU seconds of this thread, or calibrated kernels."""

    def __init__(self, device: torch.device) -> None:
        self.scratch = torch.ones((16 << 20) if device.type == "cuda" else (64 << 10), device=device)
        self.pass_s = self._calibrate() if device.type == "cuda" else 0.0

    def _calibrate(self) -> float:
        workloads.unfused_passes(self.scratch, 20)
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        workloads.unfused_passes(self.scratch, 200)
        torch.cuda.synchronize()
        return (time.perf_counter() - began_s) / 200

    def do(self, seconds: float) -> None:
        """Elementwise passes over a scratch tensor, as many as take so long."""
        if self.pass_s:
            workloads.unfused_passes(self.scratch, round(seconds / self.pass_s))
            return
        until_s = time.thread_time() + seconds
        while seconds > 0 and time.thread_time() < until_s:
            workloads.unfused_passes(self.scratch, 1)


class Costs:
    """What a step costs on this rank beyond the small model: the accelerator's part, and what the fault adds."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config, self.work = config, Work(device)
        self.length = 1.0
        self.extra_s: dict[str, float] = {}

    def spend(self, phase: str, share: float) -> None:
        """The accelerator's part of `phase` (`share` of compute_s, longer for longer samples), and the fault's."""
        seconds = self.config.compute_s * share * self.length
        if self.config.paced:
            pace(seconds)
        else:
            self.work.do(seconds)
        self.work.do(self.extra_s.get(phase, 0.0))


class Spend(torch.autograd.Function):
    """Spends the forward's cost in forward and the backward's in backward; the tensor passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, costs: Costs) -> torch.Tensor:
        ctx.costs = costs
        costs.spend("forward", 1 / 3)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.costs.spend("backward", 2 / 3)
        return grad, None


class Model(torch.nn.Module):
    """The small patch model with costs: images uint8 [batch, 3, height, width] -> logits [batch, CLASSES]."""

    def __init__(self, config: Config, costs: Costs) -> None:
        super().__init__()
        self.inner = workloads.PatchModel(32, gradient_bytes=config.gradient_mb * 1e6)
        self.costs = costs

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.costs.length = images.shape[-1] / jpegs.CROP
        return Spend.apply(self.inner(images), self.costs)


class Optimizer(torch.optim.SGD):
    """SGD whose step takes longer where the fault says so."""

    costs: Costs

    def step(self, closure: Any = None) -> Any:
        self.costs.work.do(self.costs.extra_s.get("optimizer", 0.0))
        return super().step(closure)


# ---- the input side


class Samples(jpegs.JpegFolder):
    """Samples asked for as (index, batch number, CPU seconds, slow storage?, length): what the fault makes of them.

    Cropping and flipping depend on the seed, the batch and the index alone, so a resumed job sees the same pixels.
    The cost that comes with each has a fifth figure: its index, which says what was really trained on.
    """

    def __init__(self, folder: Path, config: Config) -> None:
        super().__init__(folder, config.images, seed=config.seed)
        self.config = config
        read_s = config.base_s + SLACK_S + config.extra_s
        self.slow = jpegs.ReadLimit(config.batch_size * 75e3 / max(read_s, 1e-3))

    def __getitem__(self, spec: Spec) -> tuple[torch.Tensor, int, torch.Tensor]:  # type: ignore[override]  # a richer index
        index, batch, self.cost_s, slow, length = spec
        self.limit = self.slow if slow else None
        self.rng = np.random.default_rng([self.config.seed, batch, index])
        image, label, spent = super().__getitem__(index)
        if length > 1:  # a longer sample: the picture goes on to the right
            width = round(jpegs.CROP * length / workloads.PATCH) * workloads.PATCH
            image = image.repeat(1, 1, int(np.ceil(length)))[:, :, :width].contiguous()
        return image, label, torch.cat([spent, spent.new_tensor([index])])


class Specs(Sampler[list[Spec]]):
    """The rank's batches from `first` on, each sample with what the fault does to it."""

    def __init__(self, config: Config, rank: int, first: int = 0) -> None:
        self.config, self.rank, self.first = config, rank, first
        batches = config.steps + max(1, config.workers) * config.prefetch + 1
        self.inner = jpegs.StepSampler(
            config.images, config.batch_size, batches, rank=rank, world=config.ranks, seed=config.seed
        )

    def __len__(self) -> int:
        return len(self.inner) - self.first

    def __iter__(self) -> Iterator[list[Spec]]:
        config = self.config
        for batch, indices in enumerate(self.inner):
            if batch < self.first:
                continue
            on = acts(config, self.rank, batch)
            cost_s = sample_cost_s(config) if on and config.fault == "slow_input" else 0.0
            length = 1 + config.magnitude if on and config.fault == "data_imbalance" else 1.0
            slow = on and config.fault == "slow_storage"
            yield [(index, batch, cost_s, slow, length) for index in indices]


def sample_cost_s(config: Config) -> float:
    """CPU seconds of a heavy sample: a batch then takes the loader a healthy step and the fault's extra.

    Without a worker loading is not hidden, so the extra alone is the cost.
    """
    halved = 0.5 if config.relief == "less preprocessing" else 1.0
    batch_s = config.base_s + SLACK_S + config.extra_s if config.workers else config.extra_s
    return halved * batch_s * max(config.workers, 1) / config.batch_size


# ---- the host side


class Injector:
    """Turns the fault on and off, step by step, in one rank."""

    def __init__(
        self,
        config: Config,
        rank: int,
        *,
        costs: Costs,
        link: AnyLink,
        loaders: list[int],
        load_s: float,
        gpu: str = "",
    ) -> None:
        """gpu: the device of the rank where that is a GPU, such as "cuda:0"."""
        self.config, self.rank, self.costs, self.link = config, rank, costs, link
        concerned = any(acts(config, rank, step) for step in range(config.steps))
        self.noises = start_noise(config, loaders, load_s, gpu) if concerned else []
        self._garbage: list[Any] = []
        if concerned and config.fault == "periodic_pause":
            self._garbage = [[{}] for _ in range(100_000)]

    def begin(self, step: int) -> None:
        """What holds from the start of `step` on."""
        config, on = self.config, acts(self.config, self.rank, step)
        phase = config.fault.removeprefix("slow_")
        self.costs.extra_s = (
            {phase: config.extra_s} if on and phase in ("forward", "backward", "optimizer") else {}
        )
        self.link.slow = on and config.fault == "slow_link" and config.extra_s > 0
        for noise in self.noises:
            noise.act(on)

    def pause(self, step: int, out: Path) -> None:
        """A pause between phases where the fault is one: garbage is collected and a file written through to the disk."""
        if self.config.fault != "periodic_pause" or not acts(self.config, self.rank, step):
            return
        until_s = time.perf_counter() + PAUSE_EVERY * self.config.extra_s
        path = out / f"pause-{self.rank}.bin"
        with path.open("wb") as file:
            file.write(bytes(4 << 20))
            os.fsync(file.fileno())
        path.unlink()
        while time.perf_counter() < until_s:
            gc.collect()

    def quiet(self) -> None:
        """End the noise, so that what follows measures the link alone."""
        for noise in self.noises:
            noise.close()
        self.noises = []

    def close(self) -> None:
        """End the noise and settle the link."""
        self.quiet()
        self.link.close()


def start_noise(config: Config, loaders: list[int], load_s: float, gpu: str = "") -> list[Noise]:
    """The processes that disturb this rank, resting; load_s: CPU seconds of a batch in the loader."""
    halved = 0.5 if config.relief == "less contention" else 1.0
    if config.fault == "cpu_contention":
        # With h neighbours on its core the rank's CPU seconds take 1 + h times as long; a thread that sleeps most of
        # the time is favoured by the scheduler, so it is rather h than h - 1/2 (measured: docs/log.md).
        wanted = config.extra_s / (config.cpu_s + FRAMEWORK_S) * halved
        return [Noise("burn", own_core()) for _ in range(min(MOST_NEIGHBOURS, max(1, math.ceil(wanted))))]
    if config.fault == "throttling" and gpu:
        # Kernels of two processes take turns, so a rival that always computes makes the rank's take twice as long.
        wanted = config.magnitude * halved
        rivals = min(MOST_NEIGHBOURS, max(1, math.ceil(wanted)))
        on_s = min(1.0, wanted / rivals) * DUTY_PERIOD_S
        return [Noise("compete", gpu, on_s, DUTY_PERIOD_S - on_s) for _ in range(rivals)]
    if config.fault == "throttling":
        off = config.extra_s * halved / (config.base_s + config.extra_s * halved)
        return [Noise("duty", (1 - off) * DUTY_PERIOD_S, off * DUTY_PERIOD_S, os.getpid())]
    if config.fault == "starved_workers":
        on = min(0.9, load_s / (config.base_s + SLACK_S + config.extra_s * halved) / max(config.workers, 1))
        return [Noise("duty", on * DUTY_PERIOD_S, (1 - on) * DUTY_PERIOD_S, *loaders)]
    return []


def own_core() -> int:
    """The core that contention takes place on: the last that this process may use."""
    return max(os.sched_getaffinity(0))


def stay_apart(config: Config, rank: int) -> set[int]:
    """Under contention the concerned rank's thread keeps to one core, all others to the rest. Returns the cores before."""
    if not hasattr(os, "sched_getaffinity"):
        return set()
    cores = os.sched_getaffinity(0)
    others = cores - {own_core()}
    if config.fault == "cpu_contention" and others:
        concerned = any(acts(config, rank, step) for step in range(config.steps))
        os.sched_setaffinity(0, {own_core()} if concerned else others)
    return cores
