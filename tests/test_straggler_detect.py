"""The online detector: how fast it names a rank, whom, and how often it cries wolf."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from straggler_runs import slow, write_run

from mlsyslab.labs.straggler.detect import Detector, Named

START = 20


def stream(
    ranks: int, *, rank: int | None, extra: float, seed: int, steps: int = 60, noise: float = 0.03
) -> Iterator[dict[str, Any]]:
    """Records of a job of which `rank` does `extra` more of a 0.1 s step from step START on, ranks in any order."""
    draw, shuffle = np.random.default_rng(seed), random.Random(seed)
    for step in range(steps):
        rows = []
        for r in range(ranks):
            own = 0.1 * (1 + noise * abs(draw.standard_normal())) + (
                0.1 * extra if r == rank and step >= START else 0.0
            )
            rows.append({"rank": r, "step": step, "warmup": step < 3, "data_s": 0.0, "h2d_s": 0.0, "forward_s": own / 3,
                         "backward_s": own / 2, "optimizer_s": 0.0, "other_s": own / 6, "sync_s": 0.0})  # fmt: skip
        shuffle.shuffle(rows)
        yield from rows


def first(ranks: int, **given: Any) -> Named | None:
    detector = Detector(ranks)
    return next((named for row in stream(ranks, **given) if (named := detector.feed(row))), None)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 64])
def test_20_percent_more_is_named_within_ten_steps(ranks: int) -> None:
    for seed in range(8):
        named = first(ranks, rank=seed % ranks, extra=0.2, seed=seed)
        assert named is not None
        assert named.rank == seed % ranks
        assert START <= named.step < START + 10
        assert named.excess_frac == pytest.approx(0.2, abs=0.08)


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_a_healthy_job_is_left_alone(ranks: int) -> None:
    assert [first(ranks, rank=None, extra=0.0, seed=seed, steps=300) for seed in range(5)] == [None] * 5


def test_a_fault_that_rotates_names_nobody() -> None:
    detector, turns = Detector(4), np.random.default_rng(0).integers(0, 4, 300)
    for row in stream(4, rank=None, extra=0.0, seed=1, steps=300):
        extra = 0.06 if turns[row["step"]] == row["rank"] else 0.0
        assert detector.feed({**row, "forward_s": row["forward_s"] + extra}) is None


def test_it_waits_for_every_rank_and_passes_over_warm_up() -> None:
    detector = Detector(3)
    rows = [row for row in stream(3, rank=1, extra=3.0, seed=0) if row["rank"] != 2]
    assert all(detector.feed(row) is None for row in rows)
    warm = Detector(3)
    assert all(warm.feed({**row, "warmup": True}) is None for row in stream(3, rank=1, extra=3.0, seed=0))


def test_a_pause_after_the_exchange_counts_for_the_round_that_waits_for_it(tmp_path: Path) -> None:
    rows = write_run(tmp_path / "run", slow(2, start=8, other_s=0.05)).records.to_dict("records")
    detector = Detector(4)
    named = [found for row in rows if (found := detector.feed(row))]
    assert {found.rank for found in named} == {2}
