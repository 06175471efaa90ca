"""A small real model and real work to slow a step with: calibrated passes, Python work, or a named pace.

Costs are reached by doing real work more often, never by sleeping; the one exception is `Pace`, which is named in
every result that used it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from mlsyslab.contract import RunError
from mlsyslab.jpegs import CLASSES, CROP

PATCH = 16
TOKENS = (CROP // PATCH) ** 2


class Pace(torch.autograd.Function):
    """Wait in forward and in backward until the pacer's time has come; the tensor passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pacer: Pacer, block: int) -> torch.Tensor:
        ctx.pacer, ctx.block = pacer, block
        pacer.wait("forward", block)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.pacer.wait("backward", ctx.pacer.blocks - 1 - ctx.block)
        return grad, None, None


class Pacer:
    """Stretches forward to a third and backward to two thirds of `compute_s`, block by block.

    What the model really computes counts towards it, so the sum holds as long as the model itself is faster. The
    wait leaves the cores to the loader, as an accelerator would.
    """

    def __init__(self, compute_s: float, blocks: int) -> None:
        self.blocks = blocks
        self.share_s = {"forward": compute_s / 3 / blocks, "backward": compute_s * 2 / 3 / blocks}
        self._began_s = 0.0

    def begin(self) -> None:
        self._began_s = time.perf_counter()

    def wait(self, phase: str, done: int) -> None:
        """Sleep until block number `done` (from 0, in the order of this phase) may end."""
        if phase == "backward" and done == 0:
            self.begin()
        time.sleep(max(0.0, self._began_s + self.share_s[phase] * (done + 1) - time.perf_counter()))


class Unfused(torch.autograd.Function):
    """Extra elementwise passes over a scratch tensor, `passes` in forward and twice as many in backward.

    Memory-bound, one kernel a pass: the work that fusion would remove. The tensor passes unchanged.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scratch: torch.Tensor, passes: int) -> torch.Tensor:
        ctx.scratch, ctx.passes = scratch, passes
        unfused_passes(scratch, passes)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        unfused_passes(ctx.scratch, 2 * ctx.passes)
        return grad, None, None


def unfused_passes(scratch: torch.Tensor, passes: int) -> None:
    """`passes` elementwise kernels in place, values kept near 1."""
    for _ in range(passes):
        scratch.mul_(0.999).add_(0.001)


class Block(nn.Module):
    """Residual two-layer MLP over tokens [batch, TOKENS, width], with ballast parameters for all-reduce."""

    def __init__(self, width: int, ballast: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.ballast = nn.Parameter(torch.zeros(max(ballast, width)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Only `width` ballast values matter, but the gradient is dense: bytes to reduce without work to do.
        return x + self.down(nn.functional.gelu(self.up(x))) + self.ballast[: x.shape[-1]]


class PatchModel(nn.Module):
    """A small classifier of image patches: uint8 [batch, 3, CROP, CROP] -> logits [batch, CLASSES].

    extra: "none", "paced" (Pacer) or "unfused" (Unfused passes, set by `calibrate`); gradient_bytes more bytes of
    float32 parameters than the model needs, spread over the blocks.
    """

    def __init__(
        self, width: int, *, blocks: int = 4, gradient_bytes: float = 0.0, pacer: Pacer | None = None
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(3 * PATCH * PATCH, width)
        self.blocks = nn.ModuleList(Block(width, int(gradient_bytes / 4 / blocks)) for _ in range(blocks))
        self.head = nn.Linear(width, CLASSES)
        self.pacer = pacer
        self.passes = 0
        self.scratch: torch.Tensor | None = None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.pacer:
            self.pacer.begin()
        x = images.float().div_(127.5).sub_(1.0)
        x = nn.functional.unfold(x, PATCH, stride=PATCH).transpose(1, 2)
        x = self.embed(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if self.pacer:
                x = Pace.apply(x, self.pacer, number)
            elif self.passes:
                x = Unfused.apply(x, self.scratch, self.passes)
        return self.head(x.mean(1))

    def matmul_flops(self, batch: int) -> float:
        """FLOPs of the matrix products of one forward and backward: 2 a weight and token forward, 4 backward
        (2 for the first layer, whose input needs no gradient). Kaplan et al. 2020 count the same way."""
        inner = sum(
            m.weight.numel() for block in self.blocks for m in block.children() if isinstance(m, nn.Linear)
        )
        per_token = 6.0 * inner + 4.0 * self.embed.weight.numel()
        return batch * (TOKENS * per_token + 6.0 * self.head.weight.numel())


def calibrate(model: PatchModel, batch: int, compute_s: float, device: torch.device) -> dict[str, float]:
    """Set `model.passes` so that forward and backward take `compute_s` on this device; returns what was measured.

    On the CPU the clock is the thread's CPU time, so that a busy machine does not shrink the work.
    Raises RunError when the model alone takes longer.
    """
    model.scratch = torch.ones((16 << 20) if device.type == "cuda" else (256 << 10), device=device)
    images = torch.zeros(batch, 3, CROP, CROP, dtype=torch.uint8, device=device)

    def seconds(work: Callable[[], Any], repeat: int) -> float:
        work()
        times = []
        for _ in range(repeat):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            began = time.perf_counter() if device.type == "cuda" else time.thread_time()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append((time.perf_counter() if device.type == "cuda" else time.thread_time()) - began)
        return float(np.median(times))

    model.passes = 0
    alone_s = seconds(lambda: model(images).sum().backward(), 5)
    model.zero_grad(set_to_none=True)
    scratch = model.scratch
    pass_s = seconds(lambda: unfused_passes(scratch, 10), 9) / 10
    if compute_s and alone_s > 1.1 * compute_s:
        raise RunError(
            f"compute_s={compute_s:g} is less than the model alone takes here ({alone_s:.3f} s for batch_size={batch}); "
            "raise compute_s, or lower batch_size or width"
        )
    model.passes = max(0, round((compute_s - alone_s) / (3 * len(model.blocks) * pass_s)))
    return {"model_alone_s": alone_s, "unfused_pass_s": pass_s, "passes": float(model.passes)}


def python_work(cpu_s: float) -> int:
    """Spend `cpu_s` CPU seconds on what training scripts do between steps: format and parse metrics. Returns rounds."""
    rounds, until = 0, time.thread_time() + cpu_s
    metrics = {f"layer{i}/grad_norm": i * 0.001 for i in range(40)}
    while time.thread_time() < until:
        metrics.update(json.loads(json.dumps(metrics)))
        rounds += 1
    return rounds
