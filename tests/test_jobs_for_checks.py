"""The made-up jobs of the straggler exercises: what their stories say is what the library finds in them."""

from __future__ import annotations

import pytest

from mlsyslab.contract import ConfigError
from mlsyslab.labs.straggler.blame import blame
from mlsyslab.records import PHASES
from mlsyslab.teach import jobs_for_checks as made_up


@pytest.mark.parametrize("story", made_up.STORIES)
def test_the_rule_of_the_exercise_names_the_culprit_and_nobody_else(story: str) -> None:
    for seed in range(40):
        made = made_up.job_records(story, seed)
        assert made_up.right_straggler(made.records) == made.culprit, f"seed {seed}"


@pytest.mark.parametrize("story", [*made_up.GUILTY, "healthy", "rotating", "one long step", "counted twice"])
def test_the_library_judges_it_alike(story: str) -> None:
    for seed in range(10):
        made = made_up.job_records(story, seed)
        own, wait = made_up.right_tables(made.records)
        found = blame(own.to_numpy(), wait.to_numpy())
        assert (found.ranks or (None,))[0] == made.culprit, f"seed {seed}: {found.kind}"


@pytest.mark.parametrize("story", [name for name in made_up.STORIES if name != "counted twice"])
def test_all_ranks_of_a_job_are_equally_long(story: str) -> None:
    records = made_up.job_records(story, 1).records
    assert (records[list(PHASES)].sum(axis=1) - records["step_s"]).abs().max() < 1e-12
    took_s = records[~records["warmup"]].groupby("rank")["step_s"].sum()
    assert took_s.max() < 1.05 * took_s.min()


def test_a_story_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ConfigError, match="story='gremlins' is not one of"):
        made_up.job_records("gremlins", 1)


def test_the_cost_and_the_jitter_agree_with_the_simulation_of_the_lab() -> None:
    from mlsyslab.labs.straggler import simulate

    for (ranks, healthy_s, slow_s), (lost_rank_s, _) in made_up.cost_cases("2.4a"):
        job = simulate(
            ranks=ranks, base_s=healthy_s, slow_factor=slow_s / healthy_s, jitter_frac=0.0, steps=2
        )
        assert job.simulated["lost_rank_s"].expected == pytest.approx(lost_rank_s, abs=1e-6)
    for (ranks, sigma_s), late_s in made_up.jitter_cases("2.4b"):
        job = simulate(ranks=ranks, base_s=0.18, jitter_frac=sigma_s / 0.18, slow_ranks=0, steps=400)
        assert job.simulated["jitter_s"].expected == pytest.approx(late_s, rel=0.12)
