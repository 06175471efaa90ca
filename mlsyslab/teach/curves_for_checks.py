"""What checks the scale-up exercises: simulated descent and noise with known truth, and runs of the clinic made here."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from mlsyslab.labs import scaleup
from mlsyslab.labs.scaleup.answers import is_worse
from mlsyslab.labs.scaleup.evidence import Facts, facts_of
from mlsyslab.teach.checks import hidden_seeds

SMALL: dict[str, Any] = {
    "samples": 1024,
    "epochs": 2,
    "global_batch": 128,
    "base_batch": 128,
    "engine": "virtual",
}
DATA_CAUSES = ("healthy", "samples duplicated", "set_epoch forgotten", "samples skipped")
BLIND = ("healthy", "gradient missing", "sum instead of mean", "set_epoch forgotten", "ranks start with different weights",
         "gradients not synchronised")  # fmt: skip


# ---- 5.1: the rule and the limit


def rate_cases() -> Iterator[tuple[tuple[float, ...], float]]:
    """(step, small rate, growth, warm-up steps) -> rate, by adding up equal increments."""
    for lr, growth, climb in ((0.03, 8, 40), (0.1, 4, 10), (0.5, 2, 1)):
        rate, rates = lr, []
        for _ in range(climb):
            rates.append(rate)
            rate += (growth * lr - lr) / climb
        for step in (0, climb // 2, climb - 1):
            yield (step, lr, growth, climb), rates[step]
        yield (climb, lr, growth, climb), growth * lr
        yield (10 * climb, lr, growth, climb), growth * lr
    yield (0, 0.03, 8, 0), 0.24


def diverges(curvature: float, lr: float, momentum: float) -> bool:
    """Whether descent with momentum on a parabola of that curvature runs away, tried out."""
    x, speed = 1.0, 0.0
    for _ in range(4000):
        speed = momentum * speed + curvature * x
        x -= lr * speed
        if abs(x) > 1e6:
            return True
    return abs(x) > 1.0


def limit_cases() -> Iterator[tuple[tuple[float, float], float]]:
    """(rate, momentum) -> the largest curvature that is stable, by bisection over simulated descent."""
    for lr, momentum in ((0.03, 0.9), (0.24, 0.9), (0.1, 0.0)):
        low, high = 0.0, 10 / lr
        while high - low > 1e-3 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if diverges(middle, lr, momentum) else (middle, high)
        yield (lr, momentum), low


# ---- 5.2: samples


@cache
def run_of(cause: str, **change: Any) -> Facts:
    """A run of the clinic, made on this machine in about a second: 4 virtual ranks, 2 epochs of 8 steps."""
    config = scaleup.config_for(cause, ranks=4, engine="virtual", seed=7)
    with tempfile.TemporaryDirectory() as folder:
        run = scaleup.measure(
            dataclasses.replace(config, **{**SMALL, **change}), out=Path(folder) / "run", timeout_s=120
        )
        return facts_of(run)


def drawn(cause: str) -> list[list[list[list[int]]]]:
    """Sample ids as [epoch][step][rank], of a run with that cause."""
    part = run_of(cause).large
    epochs: list[list[list[list[int]]]] = [[] for _ in range(int(part.epochs.max()) + 1)]
    for step in range(part.steps):
        epochs[int(part.epochs[step])].append([part.ids(step, rank) or [] for rank in part.ranks])
    return epochs


def repeated_cases() -> Iterator[tuple[tuple[list[list[int]]], float]]:
    """ids by rank of one step -> share that was drawn before, counted one by one."""
    steps = [drawn(cause)[0][0] for cause in ("healthy", "samples duplicated")]
    steps += [[[1, 2], [2, 3]], [[5, 5], [5, 5]], [[1], [2], [3]]]
    for ranks in steps:
        seen: list[int] = []
        again = 0
        for index in (i for ids in ranks for i in ids):
            again += index in seen
            seen.append(index)
        yield (ranks,), again / len(seen)


def data_cases() -> Iterator[tuple[tuple[list[Any], int], str]]:
    """(ids [epoch][step][rank], samples of the data set) -> what is wrong."""
    for cause in DATA_CAUSES:
        yield (drawn(cause), SMALL["samples"]), cause


# ---- 5.3: noise


def noise_cases() -> Iterator[tuple[tuple[list[list[float]], list[float], int, int], tuple[float, float]]]:
    """(norms by step and rank, norms of the mean, batches) -> (trace, square), in exact expectation.

    Norms are made so that their mean squares are |G|^2 + trace / batch on the dot; the steps scatter around it in pairs.
    """
    for seed in hidden_seeds("5.3", 3):
        draw = np.random.default_rng(seed)
        trace, square = float(draw.uniform(50, 500)), float(draw.uniform(0.5, 5))
        small, ranks = int(draw.integers(4, 64)), int(draw.integers(2, 9))
        shifts = draw.uniform(-0.3, 0.3, 10)
        swing = np.concatenate([1 + shifts, 1 - shifts])
        each = np.sqrt((square + trace / small) * swing)
        whole = np.sqrt((square + trace / (small * ranks)) * swing[::-1])
        yield ([[float(e)] * ranks for e in each], whole.tolist(), small, small * ranks), (trace, square)


# ---- 5.4: tokens


def factor_cases() -> Iterator[tuple[tuple[list[list[int]]], float]]:
    """tokens by rank and micro-batch -> the factor on each micro-batch's summed loss, found by what it must give.

    With DDP's mean over ranks, the gradient of all must be the mean over all tokens: the factor is solved for.
    """
    for tokens in ([[10, 30], [20, 5]], [[7], [7]], [[100, 1, 1], [3, 3, 3], [50, 2, 9]]):
        sums = [[float(n) * (3 + r + k) for k, n in enumerate(row)] for r, row in enumerate(tokens)]
        right = sum(map(sum, sums)) / sum(map(sum, tokens))
        mean_of_ranks = sum(map(sum, sums)) / len(tokens)
        yield (tokens,), right / mean_of_ranks


def bias_cases() -> Iterator[tuple[tuple[list[float], list[int]], float]]:
    """(mean loss, tokens) of each micro-batch -> by how much the mean of means is off, as a share."""
    for losses, tokens in (([1.0, 3.0], [10, 30]), ([2.0, 2.0], [5, 50]), ([4.0, 1.0, 1.0], [1, 20, 20])):
        everything = [loss for loss, count in zip(losses, tokens, strict=True) for _ in range(count)]
        right = sum(everything) / len(everything)
        yield (losses, tokens), (sum(losses) / len(losses) - right) / right


# ---- 5.5: the procedure


def vitals(facts: Facts) -> dict[str, float]:
    """What the procedure looks at, as numbers: shares and relative differences."""
    part, reference = facts.large, facts.base or facts.control
    assert reference is not None
    ids = [
        i for s in range(part.steps) if part.epochs[s] == 0 for r in part.ranks for i in part.ids(s, r) or []
    ]
    first, second = (np.flatnonzero(part.epochs == e) for e in (0, 1))
    same = (part.get("ids_hash")[first] == part.get("ids_hash")[second[: len(first)]]).mean()
    mean = part.get("local_probe").mean(axis=1)
    reduced = np.linalg.norm(part.get("probe")[:, 0] - mean, axis=1) / np.linalg.norm(mean, axis=1)
    return {
        "repeated": 1 - len(set(ids)) / len(ids),
        "same_order": float(same),
        "start_differs": float(len(set(part.get("start_crc")[0].tolist())) - 1),
        "ranks_apart": float(part.spread("probe").max()),
        "reduced_off": float(np.median(reduced)),
        "control_gap": float(facts.norm_gap(16).max()),
        "worse": float(is_worse(part, reference)),
    }


def blind_cases() -> Iterator[tuple[tuple[dict[str, float]], str]]:
    """Vital signs of runs made here -> cause; the last is bad and equal to its control: the optimiser."""
    for cause in BLIND:
        yield (vitals(run_of(cause)),), cause
    grown = {"samples": 4096, "epochs": 4, "global_batch": 1024, "base_batch": 64}
    yield (vitals(run_of("learning rate not scaled", **grown)),), "optimiser"
