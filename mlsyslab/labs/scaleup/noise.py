"""The gradient noise scale, from norms that a data-parallel job has anyway. Pure.

S. McCandlish, J. Kaplan, D. Amodei: An Empirical Model of Large-Batch Training (2018), appendix A.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

DECAY = 0.95  # of the running means: one step's ratio is useless, since |G|^2 is often below zero
SETTLED_STEPS = 50


@dataclass(frozen=True, kw_only=True)
class NoiseScale:
    """trace: of the covariance of one sample's gradient. square: squared norm of the true gradient. batch: their ratio,
    an estimate of the critical batch, right to a factor of some 3. after_steps: how many steps it rests on."""

    trace: float
    square: float
    after_steps: int

    @property
    def batch(self) -> float:
        return self.trace / self.square if self.square > 0 and self.trace > 0 else math.nan


def noise_scale(
    local_norms: npt.ArrayLike, norms: npt.ArrayLike, *, small: int, big: int, decay: float = DECAY
) -> NoiseScale | None:
    """The estimate at the end of the run, numerator and denominator smoothed apart.

    local_norms: (steps, ranks), each of a gradient over `small` samples; norms: (steps,), of their mean over `big`.
    None where both batches are the same, or nothing finite was given. Raises ValueError unless 0 < small <= big.
    """
    if not 0 < small <= big:
        raise ValueError(f"small={small} and big={big} are no batch of a rank and of all ranks")
    ranks, whole = np.asarray(local_norms, float), np.asarray(norms, float)
    usable = np.isfinite(whole) & np.isfinite(ranks).all(axis=1)
    if small == big or not usable.any():
        return None
    mean_small, big_square = (ranks[usable] ** 2).mean(axis=1), whole[usable] ** 2
    squares = (big * big_square - small * mean_small) / (big - small)
    traces = (mean_small - big_square) / (1 / small - 1 / big)
    weights = decay ** np.arange(len(squares))[::-1]
    weights /= weights.sum()
    return NoiseScale(
        trace=float(weights @ traces), square=float(weights @ squares), after_steps=len(squares)
    )


def steps_needed(batch: float, *, critical_batch: float, least_steps: float) -> float:
    """Steps to a given loss at a batch: least_steps (1 + critical_batch / batch), the paper's equation 2.7."""
    return least_steps * (1 + critical_batch / batch)


def samples_needed(batch: float, *, critical_batch: float, least_steps: float) -> float:
    """Samples to a given loss at a batch: twice as many at the critical batch as at a small one."""
    return batch * steps_needed(batch, critical_batch=critical_batch, least_steps=least_steps)
