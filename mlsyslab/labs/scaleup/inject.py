"""The faults that sit between backward and the optimizer: what a rank sends, and what becomes of the sum."""

from __future__ import annotations

import torch

from mlsyslab.labs.scaleup.config import Config

FLIP_EVERY = 4  # steps
FLIPPED = 16  # elements
FLIP_BIT = 24  # of float32: the second of the exponent, a factor of 4 up or down
LEFT_OUT_EVERY = 8  # steps of the optimizer that a rank leaves out
WRONG_FACTOR = 3.0
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Wire:
    """What one rank contributes to the reduction. `contribution` is called once a step, in the order of the steps."""

    def __init__(self, config: Config, rank: int, world: int) -> None:
        self.config, self.world = config, world
        self.cause = config.cause
        self.faulty = rank == config.fault_rank
        self.dtype = DTYPES[config.wire]
        self._last: torch.Tensor | None = None
        self._generator = torch.Generator().manual_seed(config.seed)

    def corrupt(self, flat: torch.Tensor, step: int) -> None:
        """Flip bits of the gradient in place, where this rank is corrupted; before anybody has looked at it."""
        if self.cause != "corrupted rank" or not self.faulty or step % FLIP_EVERY != FLIP_EVERY - 1:
            return
        used = flat.nonzero().reshape(-1).cpu()  # a flip in a zero is too small to be one
        chosen = used[torch.randperm(len(used), generator=self._generator)[:FLIPPED]].to(flat.device)
        flat.view(torch.int32)[chosen] ^= 1 << FLIP_BIT

    def contribution(self, flat: torch.Tensor) -> torch.Tensor:
        """What is sent: the gradient divided by the ranks in the precision of the wire, or what is wrong instead."""
        sent = flat
        if self.faulty and self.cause == "gradient missing":
            sent = torch.zeros_like(flat)
        elif self.faulty and self.cause == "gradient stale":
            sent = flat if self._last is None else self._last
            self._last = flat.clone()
        divisor = 1 if self.cause == "sum instead of mean" else self.world
        return sent.to(self.dtype) / divisor

    def leaves_out(self, step: int) -> bool:
        """Whether this rank's optimizer does nothing in this step."""
        return (
            self.cause == "parameters diverge" and self.faulty and step % LEFT_OUT_EVERY == LEFT_OUT_EVERY - 1
        )

    def loss_factor(self) -> float:
        """What this rank multiplies its loss by."""
        return WRONG_FACTOR if self.cause == "gradient scaled wrongly" and self.faulty else 1.0


def summed(contributions: list[torch.Tensor]) -> torch.Tensor:
    """The reduction of virtual ranks: the sum in the wire's precision, in the order of the ranks; float32."""
    total = contributions[0].clone()
    for one in contributions[1:]:
        total += one
    return total.float()
