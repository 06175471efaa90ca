"""Who is to be blamed: the culprit rule on arrays with known truth, its look-alikes, and its arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from straggler_runs import slow, write_run

from mlsyslab.labs.straggler.blame import (
    Array,
    blame,
    chance,
    job_seconds,
    median_of_others,
    replay_gain,
    rounds,
)

BASE_S, TRANSFER_S, STEPS = 0.1, 0.006, 26


def job(ranks: int, change: Callable[[Array], None] = lambda own: None, *, seed: int = 0, noise: float = 0.03,
        steps: int = STEPS) -> tuple[Array, Array]:  # fmt: skip
    """own and wait of a synchronous job."""
    own = BASE_S * (1 + noise * np.abs(np.random.default_rng(seed).standard_normal((steps, ranks))))
    change(own)
    return own, own.max(1, keepdims=True) - own + TRANSFER_S


def add(rank: int, seconds: float, steps: object = slice(None)) -> Callable[[Array], None]:
    def change(own: Array) -> None:
        own[steps, rank] += seconds

    return change


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 64])
@pytest.mark.parametrize("seed", range(5))
def test_a_slow_rank_is_named_from_20_percent_on(ranks: int, seed: int) -> None:
    rank = seed % ranks
    found = blame(*job(ranks, add(rank, 0.2 * BASE_S), seed=seed))
    assert (found.kind, found.ranks) == ("rank", (rank,))
    assert found.excess_s == pytest.approx(0.2 * BASE_S, rel=0.3)
    assert found.slow.all()


def test_of_two_ranks_that_take_turns_the_one_with_most_turns_is_not_named() -> None:
    """16 of 22 steps by chance: the other rank is as far ahead in the rest."""
    often = [step % 22 < 16 for step in range(2 * 22)]

    def take_turns(own: Array) -> None:
        own[often, 1] += 0.6 * BASE_S
        own[np.logical_not(often), 0] += 0.6 * BASE_S

    found = blame(*job(2, take_turns, steps=44))
    assert (found.kind, found.ranks) == ("rotates", ())


def test_a_constant_straggler_stays_named_where_the_other_rank_has_hiccups() -> None:
    def both(own: Array) -> None:
        own[:, 1] += 0.4 * BASE_S
        own[[4, 17], 0] += 1.5 * BASE_S

    found = blame(*job(2, both))
    assert (found.kind, found.ranks) == ("rank", (1,))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 64])
@pytest.mark.parametrize("noise", [0.0, 0.03, 0.15])
def test_a_healthy_job_names_nobody(ranks: int, noise: float) -> None:
    for seed in range(10):
        found = blame(*job(ranks, seed=seed, noise=noise))
        assert found.kind in ("healthy", "rotates")  # heavy noise is a rotation of its own
        assert found.ranks == ()


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_slowness_that_rotates_is_said_and_names_nobody(ranks: int) -> None:
    for seed in range(10):
        turns = np.random.default_rng(seed).integers(0, ranks, STEPS)

        def rotate(own: Array, turns: object = turns) -> None:
            own[np.arange(STEPS), turns] += 0.5 * BASE_S

        assert blame(*job(ranks, rotate, seed=seed)).kind == "rotates"


@pytest.mark.parametrize("ranks", [3, 4])
def test_a_rotation_does_not_widen_the_scatter_that_it_is_measured_by(ranks: int) -> None:
    """Longer samples make the rank that has them 60 % slower, others shift by a tenth."""
    for seed in range(10):
        turns = np.random.default_rng(seed).permutation(np.arange(27) % ranks)

        def rotate(own: Array, turns: object = turns) -> None:
            own[np.arange(27), turns] += 0.6 * BASE_S

        found = blame(*job(ranks, rotate, seed=seed, noise=0.1, steps=27))
        assert found.kind == "rotates"
        assert found.noise_s < 0.15 * BASE_S


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_fault_that_comes_and_goes_is_named_with_the_steps_in_which_it_acts(ranks: int) -> None:
    bursts = [3, 4, 5, 12, 13, 14, 20, 21]
    found = blame(*job(ranks, add(1, 0.6 * BASE_S, bursts)))
    assert (found.kind, found.ranks) == ("rank", (1,))
    assert np.flatnonzero(found.slow).tolist() == bursts


def test_hiccups_on_another_rank_have_no_vote_beside_long_pauses() -> None:
    """Eight pauses of three steps' length on rank 0 of two, and small hiccups of both."""

    def change(own: Array) -> None:
        own[4::5, 0] += 3 * BASE_S
        own[[7, 16], 0] += 0.2 * BASE_S
        own[[10, 22], 1] += 0.2 * BASE_S

    found = blame(*job(2, change, steps=42))
    assert (found.kind, found.ranks) == ("rank", (0,))
    assert np.flatnonzero(found.slow).tolist() == list(range(4, 42, 5))


def test_a_fault_that_begins_late_is_dated() -> None:
    found = blame(*job(4, add(3, 0.5 * BASE_S, slice(18, None))))
    assert (found.kind, found.ranks, found.since) == ("rank", (3,), 18)


def test_two_starved_ranks_of_eight_are_both_named() -> None:
    def change(own: Array) -> None:
        own[:, [2, 5]] += 0.8 * BASE_S

    assert blame(*job(8, change)).ranks == (2, 5)


def test_a_whole_stage_is_no_machine_but_a_part_of_one_is() -> None:
    def both(own: Array) -> None:
        own[:, 6:] *= 1.6

    stages = [0, 0, 1, 1, 2, 2, 3, 3]
    assert (blame(*job(8, both), stages=stages).kind, blame(*job(8, both)).kind) == ("stage", "rank")
    assert blame(*job(8, add(6, 0.6 * BASE_S)), stages=stages).kind == "rank"


def test_what_happens_to_all_ranks_at_once_accuses_nobody() -> None:
    def all_slow(own: Array) -> None:
        own[13:] += 0.6 * BASE_S

    found = blame(*job(4, all_slow))
    assert (found.kind, found.ranks, found.since) == ("shared", (), 13)


@pytest.mark.parametrize("steps", [1, 4])
def test_few_steps_accuse_nobody(steps: int) -> None:
    assert blame(*job(4, add(1, 5 * BASE_S), steps=steps)).kind == "few steps"


def test_most_own_work_without_less_wait_is_not_the_culprit() -> None:
    own, wait = job(4, add(1, 0.5 * BASE_S))
    wait[:, 1] = wait[:, 0]
    assert blame(own, wait).ranks == ()


def test_a_victim_is_not_the_culprit_however_long_its_collectives() -> None:
    own, wait = job(4, add(0, 0.5 * BASE_S))
    assert wait[:, 0].mean() < wait[:, 1:].mean(0).min()
    assert blame(own, wait).ranks == (0,)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8])
def test_the_median_of_the_others_is_exact(ranks: int) -> None:
    own = np.random.default_rng(ranks).integers(0, 5, (9, ranks)).astype(float)  # with ties
    wanted = [[np.median(np.delete(row, rank)) for rank in range(ranks)] for row in own]
    assert median_of_others(own).tolist() == wanted


def test_the_replay_is_the_job_without_the_excess() -> None:
    own, wait = job(4, add(2, 0.4 * BASE_S), noise=0.0)
    healed = BASE_S + TRANSFER_S
    assert job_seconds(own, wait) == pytest.approx(np.full(STEPS, healed + 0.4 * BASE_S))
    assert replay_gain(own, wait, [2]) == pytest.approx(0.4 * BASE_S / (healed + 0.4 * BASE_S))
    assert replay_gain(own, wait, [1]) == pytest.approx(0.0)


def test_chance_is_the_binomial_tail() -> None:
    assert chance(0, 5, 0.3) == pytest.approx(1.0)
    assert chance(5, 5, 0.25) == pytest.approx(0.25**5)
    assert chance(1, 2, 0.5) == pytest.approx(0.75)


def test_a_round_is_what_ranks_wait_for_together(tmp_path: Path) -> None:
    """A pause after the exchange of step 12 is waited for in step 13; by steps it would look like no wait at all."""
    run = write_run(tmp_path / "run", lambda rank, step: {"other_s": 0.5} if (rank, step) == (1, 12) else {})
    found = rounds(run.records)
    at = int(np.flatnonzero(found.steps == 13)[0])
    assert found.own[at, 1] > 0.5
    assert found.wait[at, [0, 2, 3]].min() > 0.45
    assert found.wait[at, 1] < 0.05
    total = found.own + found.wait
    assert np.ptp(total[1:], axis=1).max() < 1e-6  # every rank's round takes equally long


def test_steps_that_a_rank_lacks_are_left_out(tmp_path: Path) -> None:
    frame = write_run(tmp_path / "run", slow(1, forward_s=0.1)).records
    kept = frame[~((frame["rank"] == 2) & (frame["step"] == 9))]
    found = rounds(kept.sample(frac=1, random_state=0))
    assert 9 not in found.steps
    assert found.own.shape == (24, 4)
    assert blame(found.own, found.wait).ranks == (1,)


def test_a_step_that_was_done_again_counts_as_it_was_done_last(tmp_path: Path) -> None:
    frame = write_run(tmp_path / "run", slow(1, forward_s=0.1)).records
    again = frame[frame["step"] == 9].assign(forward_s=7.0)
    found = rounds(pd.concat([frame, again], ignore_index=True))
    assert found.own.shape == (25, 4)
    assert (found.phases["forward_s"][found.steps == 9] == 7.0).all()
