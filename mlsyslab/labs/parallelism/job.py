"""A rank's share of the training job, and the norm of a gradient of which it has a part."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from mlsyslab.labs.parallelism.config import Config, Layout
from mlsyslab.labs.parallelism.memory import local

Mark = Callable[[str], None]


@dataclass(kw_only=True)
class Job:
    """A rank's share of the work. axes: "dp", "tp" or "pp" -> (this rank's group, its place in it); forward_backward(tokens,
    targets, mark) computes the gradients and gives this rank's loss (None where it has none), calling mark("forward") and
    mark("backward") at the end of each. ops: of a pipeline, what was computed when in the last step."""

    modules: list[nn.Module]
    optimizer: torch.optim.Optimizer
    axes: dict[str, tuple[dist.ProcessGroup, int]]
    forward_backward: Callable[[torch.Tensor, torch.Tensor, Mark], torch.Tensor | None]
    stage: int = 0
    layers: int = 0
    ops: list[dict[str, Any]] = field(default_factory=list)

    @property
    def groups(self) -> dict[str, str]:
        """Name of each process group -> its axis."""
        return {group.group_name: axis for axis, (group, _) in self.axes.items()}

    def parameters(self) -> list[nn.Parameter]:
        """All parameters of which this rank has a part."""
        return [p for module in self.modules for p in module.parameters()]

    def my_part(self, batch: torch.Tensor, layout: Layout) -> torch.Tensor:
        """This rank's sequences of the job's batch [batch, ...]."""
        place = self.axes["dp"][1] if "dp" in self.axes else 0
        each = layout.batch // layout.dp
        return batch[place * each : (place + 1) * each]


def gradient_norm(job: Job) -> float:
    """The norm of the whole gradient, whatever each rank holds of it.

    torch's clip_grad_norm_ cannot mix plain and distributed parameters (pytorch#180346), and under a pipeline it takes each
    stage's own norm for the whole one, silently.
    """
    squares: dict[tuple[Any, ...], torch.Tensor] = {}
    for p in job.parameters():
        if p.grad is None:
            continue
        groups = _shared_out(p.grad) if isinstance(p.grad, DTensor) else ()
        mine = local(p.grad).detach().float().square().sum()
        squares[groups] = squares.get(groups, torch.zeros_like(mine)) + mine
    total = torch.zeros(())
    for groups, square in squares.items():
        for group in groups:
            dist.all_reduce(square, group=group)
        total = total.to(square.device) + square
    if "pp" in job.axes and dist.get_world_size() > 1:
        dist.all_reduce(total, group=job.axes["pp"][0])
    return math.sqrt(total.item())


def _shared_out(grad: DTensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups over which a distributed gradient is cut; a part that is still to be summed cannot be squared."""
    if any(place.is_partial() for place in grad.placements):
        raise NotImplementedError("a gradient that is a sum over ranks not yet taken has no norm of parts")
    mesh = grad.device_mesh
    return tuple(
        mesh.get_group(axis) for axis, place in enumerate(grad.placements) if not place.is_replicate()
    )


def clip(job: Job, config: Config) -> None:
    """Scale the gradient down to `clip_norm`: by the norm of the whole, or (clip="local", the mistake) of this rank's own part."""
    if config.clip == "global":
        norm = gradient_norm(job)
    else:
        grads = [local(p.grad) for p in job.parameters() if p.grad is not None]
        norm = math.sqrt(sum(float(grad.detach().float().square().sum()) for grad in grads))
    if norm > config.clip_norm:
        for p in job.parameters():
            if p.grad is not None:
                local(p.grad).mul_(config.clip_norm / norm)
