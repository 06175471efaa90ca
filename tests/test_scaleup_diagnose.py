"""The verdicts of the clinic on virtual ranks: each cause where it holds, its look-alike where it does not, and the order."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scaleup_runs import facts_of_rows, small, trained, virtual_facts, write_run

from mlsyslab import ConfigError, RunError, scaleup
from mlsyslab.contract import Diagnosis
from mlsyslab.labs.scaleup.config import ON_ONE_RANK, SYSTEM, Config
from mlsyslab.labs.scaleup.diagnose import decide
from mlsyslab.labs.scaleup.rules import QUESTIONS, owner_of

QUICK = [c for c in SYSTEM if c not in ("batchnorm statistics", "accumulation averaged per micro-batch")]


def verdict(config: Config) -> Diagnosis:
    return decide(virtual_facts(config))


class TestSystem:
    @pytest.mark.parametrize("cause", QUICK)
    def test_each_fault_is_named_with_its_rank(self, cause: str) -> None:
        found = verdict(small(cause))
        assert (found.cause, found.kind) == (cause, "system")
        assert found.where == ("rank 1" if cause in ON_ONE_RANK else "every rank")
        assert found.owner == owner_of(cause)
        assert found.actions[0].change["cause"] == "healthy"

    @pytest.mark.parametrize(
        "cause", ["gradient missing", "gradient stale", "gradient scaled wrongly", "corrupted rank"]
    )
    @pytest.mark.parametrize("rank", [0, 2])
    def test_the_rank_is_the_one_that_it_sits_on(self, cause: str, rank: int) -> None:
        assert (
            verdict(small(cause, ranks=3, fault_rank=rank, global_batch=129, base_batch=129)).where
            == f"rank {rank}"
        )

    @pytest.mark.parametrize(
        "cause", ["gradient missing", "gradient stale", "gradient scaled wrongly", "parameters diverge"]
    )
    def test_of_two_ranks_too(self, cause: str) -> None:
        found = verdict(small(cause, ranks=2))
        assert (found.cause, found.where) == (cause, "rank 1")

    @pytest.mark.ranks  # some seconds, and no part of the quick check
    @pytest.mark.parametrize("cause", ["batchnorm statistics", "accumulation averaged per micro-batch"])
    def test_the_long_ones(self, cause: str) -> None:
        assert verdict(small(cause)).cause == cause

    def test_a_fault_that_adamw_hides_from_the_loss_is_found_by_the_norms(self) -> None:
        config = small("sum instead of mean", optimizer="adamw", lr=0.001)
        facts = virtual_facts(config)
        assert facts.control is not None
        assert np.allclose(facts.large.loss, facts.control.loss, rtol=1e-3)
        assert decide(facts).cause == "sum instead of mean"

    def test_a_fault_that_improves_the_loss_is_found_all_the_same(self) -> None:
        facts = virtual_facts(small("sum instead of mean", lr=0.01))
        assert facts.control is not None
        assert facts.large.final_loss() < facts.control.final_loss()
        assert decide(facts).cause == "sum instead of mean"


HARMLESS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "seeds that DDP makes equal": {"init_seeds": "per rank"},
    "a reduction in float16": {"wire": "fp16"},
    "float16 with a scaler": {"precision": "fp16"},
    "augmentation of each rank's own": {"augment": 0.15},
    "AdamW": {"optimizer": "adamw", "lr": 0.001},
    "accumulation": {"accumulate": 4},
    "BatchNorm over many": {"norm": "batch", "global_batch": 256, "base_batch": 256},
    "a padded tail": {"samples": 1022},
}


class TestHealthy:
    @pytest.mark.parametrize("name", HARMLESS)
    def test_harmless_differences_accuse_nobody(self, name: str) -> None:
        found = verdict(small("healthy", **HARMLESS[name]))
        assert found.cause == "healthy", found.reason
        assert found.owner == "nobody"

    @pytest.mark.parametrize("ranks", [1, 2, 8])
    def test_any_number_of_ranks(self, ranks: int) -> None:
        assert verdict(small("healthy", ranks=ranks)).cause == "healthy"

    def test_what_is_harmless_is_named_so_that_nobody_hunts_it(self) -> None:
        half = verdict(small("healthy", wire="fp16")).findings
        padded = verdict(small("healthy", samples=1022, global_batch=128)).findings
        assert [finding.rule for finding in half] == ["reduction in float16"]
        assert [finding.rule for finding in padded] == ["padded"]

    def test_without_a_control_it_says_what_it_cannot_know(self) -> None:
        config = small("healthy")
        found = decide(facts_of_rows(trained(config, ("large",)), config))
        assert found.cause == "healthy"
        assert "control" in found.reason


class TestWithoutControl:
    @pytest.mark.parametrize(
        "cause",
        ["samples duplicated", "set_epoch forgotten", "seed shared by all ranks", "ranks start with different weights",
         "gradients not synchronised", "parameters diverge", "fp16 overflow", "bf16 weights", "bf16 reduction",
         "sum instead of mean", "gradient missing", "gradient stale", "gradient scaled wrongly"],
    )  # fmt: skip
    def test_what_one_run_can_show_needs_no_reference(self, cause: str) -> None:
        config = small(cause)
        assert decide(facts_of_rows(trained(config, ("large",)), config)).cause == cause


class TestProcedure:
    def test_it_stops_at_the_first_thing_that_is_wrong(self) -> None:
        found = verdict(small("gradients not synchronised"))
        names = [question.name for question in QUESTIONS]
        assert len(found.evidence) == names.index("same gradient after reduction") + 1

    def test_a_healthy_run_is_asked_everything(self) -> None:
        assert len(verdict(small("healthy")).evidence) == len(QUESTIONS)

    def test_the_walk_tells_question_figure_and_the_stop(self, tmp_path: Path) -> None:
        config = small("gradient missing")
        steps = scaleup.walk(write_run(tmp_path / "run", config, trained(config)))
        assert [stopped for _, _, stopped in steps] == [False] * (len(steps) - 1) + [True]
        assert steps[-1][0] == "reduced is the mean of the ranks'"

    def test_an_unexplained_reduction_is_unknown_and_names_the_experiment(self) -> None:
        config = small("healthy")
        rows = copy.deepcopy(trained(config))
        draw = np.random.default_rng(0)
        for row in rows:
            if row["kind"] == "step" and row["part"] == "large" and row["rank"] == 0:
                bent = list(np.array(row["probe"]) * draw.uniform(0.5, 1.5, 8))
            if row["kind"] == "step" and row["part"] == "large":
                row["probe"] = bent
        found = decide(facts_of_rows(rows, config))
        assert found.cause == "unknown"
        assert "To tell: reduce the same tensor twice" in found.reason

    def test_a_factor_of_the_ranks_without_local_gradients_is_unknown(self) -> None:
        """A sum over ranks and summed micro-batches leave the same trace where no local gradient was seen."""
        config = small("sum instead of mean")
        rows = copy.deepcopy(trained(config))
        for row in rows:
            if row["kind"] == "step" and row["part"] == "large":
                row |= {
                    "local_norm": row["norm"],
                    "local_probe": row["probe"],
                    "local_zero_frac": row["zero_frac"],
                }
        found = decide(facts_of_rows(rows, config))
        assert found.cause == "unknown"
        assert "4 times the control's" in found.reason
        assert "micro-batches" in found.reason

    def test_rounding_that_unstable_training_amplifies_is_no_fault(self) -> None:
        """A control that diverges: the gap grows step by step, from rounding to percents."""
        config = small("healthy")
        rows = copy.deepcopy(trained(config))
        for row in rows:
            if row["kind"] == "step":
                row["loss"] *= 3.0 ** min(row["step"], 6)  # both runs diverge
            if row["kind"] == "step" and row["part"] == "large":
                row["norm"] *= 1 + 1e-8 * 3.0 ** row["step"]  # 1 % after 13 steps
        assert decide(facts_of_rows(rows, config)).kind != "system"
        for row in rows:
            if row["kind"] == "step" and row["part"] == "large" and row["step"] == 3:
                row["norm"] *= 1.1  # all at once
        assert decide(facts_of_rows(rows, config)).cause == "unknown"


class TestTwoRuns:
    def run(self, path: Path, cause: str = "healthy", **change: Any) -> Any:
        config = small(cause, compare=False, **change)
        return write_run(path, config, trained(config, ("large",)))

    def test_at_the_same_global_batch_the_small_run_is_the_control(self, tmp_path: Path) -> None:
        one, two = (
            self.run(tmp_path / "1", ranks=1),
            self.run(tmp_path / "2", "gradient scaled wrongly", ranks=2),
        )
        assert scaleup.diagnose(two).cause == "healthy"  # alone it cannot be known
        assert scaleup.diagnose(one, two).kind == "system"
        assert scaleup.diagnose(one, self.run(tmp_path / "ok")).cause == "healthy"

    def test_with_a_control_of_as_many_shares_the_rank_is_named(self, tmp_path: Path) -> None:
        control, large = self.run(tmp_path / "1"), self.run(tmp_path / "4", "corrupted rank")
        assert (scaleup.diagnose(control, large).cause, scaleup.diagnose(control, large).where) == (
            "corrupted rank",
            "rank 1",
        )

    def test_at_a_smaller_batch_it_is_the_small_run_and_a_control_is_asked_for(self, tmp_path: Path) -> None:
        few = {"samples": 4096, "epochs": 4, "lr": 0.01}
        base = self.run(tmp_path / "b", ranks=1, **{**few, "global_batch": 64, "base_batch": 64})
        large = self.run(tmp_path / "l", **{**few, "global_batch": 1024, "base_batch": 1024})
        found = scaleup.diagnose(base, large)
        assert found.cause in ("learning rate not scaled", "unknown")
        assert found.kind != "system"

    def test_runs_that_cannot_be_compared_are_refused(self, tmp_path: Path) -> None:
        one = self.run(tmp_path / "1")
        for change, words in (({"seed": 1}, "seed="), ({"samples": 2048}, "samples=")):
            with pytest.raises(ConfigError, match=words):
                scaleup.diagnose(one, self.run(tmp_path / words, **change))
        larger = self.run(tmp_path / "big", global_batch=256, base_batch=256)
        with pytest.raises(ConfigError, match="give the smaller run first"):
            scaleup.diagnose(larger, one)

    def test_an_empty_run_is_one_error(self, tmp_path: Path) -> None:
        with pytest.raises(RunError, match="holds no step"):
            scaleup.diagnose(write_run(tmp_path / "run", small("healthy"), []))

    def test_a_run_that_was_stopped_in_mid_step_is_judged_by_its_whole_steps(self, tmp_path: Path) -> None:
        config = small("gradient missing")
        rows = trained(config, ("control", "large"))
        cut = [
            r
            for r in rows
            if not (r["kind"] == "step" and r["part"] == "large" and (r["step"], r["rank"]) > (9, 1))
        ]
        assert scaleup.diagnose(write_run(tmp_path / "run", config, cut)).cause == "gradient missing"


class TestCompare:
    def test_the_first_difference_comes_first_and_what_is_equal_last(self, tmp_path: Path) -> None:
        one, two = (small(cause, compare=False) for cause in ("healthy", "gradient stale"))
        runs = [write_run(tmp_path / str(i), c, trained(c, ("large",))) for i, c in enumerate((one, two))]
        found = scaleup.compare(*runs)
        by_name = {difference.name: difference for difference in found}
        assert by_name["ids_hash"].step is None
        assert by_name["lr"].step is None
        assert by_name["norm"].step == 1  # in the first step nothing is stale
        assert by_name["loss"].step == 2
        assert found[0].step is not None
        assert found[-1].step is None

    def test_a_run_and_itself_differ_in_nothing(self, tmp_path: Path) -> None:
        config = small("healthy", compare=False)
        runs = [write_run(tmp_path / name, config, trained(config, ("large",))) for name in ("a", "b")]
        assert all(
            difference.step is None and difference.largest == 0 for difference in scaleup.compare(*runs)
        )


def test_every_cause_has_an_owner_and_an_action() -> None:
    assert {owner_of(cause) for cause in scaleup.CAUSES} <= {
        "storage/data", "model code", "networking", "host operations", "optimisation", "nobody",
    }  # fmt: skip
    facts = virtual_facts(small("healthy"))
    from mlsyslab.labs.scaleup.actions import actions_for

    for cause in (*scaleup.OPTIMISER, *SYSTEM):
        facts = dataclasses.replace(facts, config=scaleup.config_for(cause))
        for action in actions_for(cause, facts):
            assert action.says
            after = dataclasses.replace(facts.config, **action.change)
            assert after != facts.config
