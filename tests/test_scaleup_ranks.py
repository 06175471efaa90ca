"""The clinic on real processes: equal to virtual ranks within rounding, every cause named, public cases, kills and stops."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from scaleup_runs import SMALL, facts_of_rows, real_facts, small, trained, virtual_facts

from mlsyslab import RunError, launch, open_run, scaleup
from mlsyslab.labs.scaleup.config import ON_ONE_RANK, SYSTEM
from mlsyslab.labs.scaleup.diagnose import decide
from mlsyslab.labs.scaleup.evidence import Part

pytestmark = pytest.mark.ranks
GATED = (
    "healthy",
    "gradient missing",
    "gradient stale",
    "sum instead of mean",
    "gradient scaled wrongly",
    "samples skipped",
)


class TestVirtualRanksAreRealOnes:
    @pytest.mark.parametrize("cause", GATED)
    @pytest.mark.parametrize("ranks", [2, 4])
    def test_every_figure_is_equal_within_rounding(self, cause: str, ranks: int) -> None:
        virtual = virtual_facts(small(cause, ranks))
        real = real_facts(small(cause, ranks, engine="processes"))
        for name in ("loss", "local_norm", "norm", "param_norm", "update_frac", "lr"):
            assert np.allclose(real.large.get(name), virtual.large.get(name), rtol=1e-5, atol=0), name
        for name in ("ids_hash", "samples", "tokens", "epoch"):
            assert np.array_equal(real.large.get(name), virtual.large.get(name)), name

    def test_two_ranks_are_equal_to_the_last_bit(self) -> None:
        virtual, real = (
            virtual_facts(small("healthy", 2)),
            real_facts(small("healthy", 2, engine="processes")),
        )
        assert np.array_equal(real.large.get("norm"), virtual.large.get("norm"))
        assert np.array_equal(real.large.get("param_crc"), virtual.large.get("param_crc"))

    def test_the_result_says_which_they_were(self) -> None:
        assert real_facts(small("healthy", 2, engine="processes")).large.header["virtual"] is False
        assert virtual_facts(small("healthy", 2)).large.header["virtual"] is True

    def test_one_worker_at_the_same_global_batch_has_the_same_curve(self) -> None:
        """The gate of the issue: 1e-5 on the gradient norm over 20 steps, more than one epoch."""
        for ranks in (2, 4):
            facts = real_facts(small("healthy", ranks, engine="processes"))
            assert facts.large.epochs[19] >= 1
            assert facts.norm_gap(20).max() < 1e-5


class TestCauses:
    @pytest.mark.parametrize("cause", SYSTEM)
    def test_each_fault_of_the_system_is_named_with_its_rank(self, cause: str) -> None:
        found = decide(real_facts(small(cause, 2, engine="processes")))
        assert (found.cause, found.kind) == (cause, "system")
        if cause in ON_ONE_RANK:
            assert found.where == "rank 1"

    @pytest.mark.parametrize("cause", scaleup.OPTIMISER)
    def test_each_mistake_of_the_optimiser_is_named(self, cause: str) -> None:
        found = decide(real_facts(scaleup.config_for(cause, ranks=2)))
        assert (found.cause, found.kind) == (cause, "optimiser")

    @pytest.mark.parametrize(
        "change",
        [{}, {"init_seeds": "per rank"}, {"wire": "fp16"}, {"precision": "fp16"}, {"augment": 0.15}],
        ids=["nothing", "seeds before DDP", "float16 wire", "float16 with a scaler", "augmented"],
    )
    def test_harmless_differences_accuse_nobody(self, change: dict[str, object]) -> None:
        found = decide(real_facts(dataclasses.replace(small("healthy", 4, engine="processes"), **change)))  # type: ignore[arg-type]  # values of several fields
        assert found.cause == "healthy", found.reason

    def test_four_ranks_name_the_rank(self) -> None:
        for cause in ("gradient missing", "corrupted rank"):
            found = decide(real_facts(small(cause, 4, engine="processes", fault_rank=2)))
            assert (found.cause, found.where) == (cause, "rank 2")


class TestWorkedExample:
    """8 workers x 256: the rate that was scaled without warm-up diverges, and warm-up repairs it."""

    def test_by_preset(self) -> None:
        facts = real_facts(scaleup.PRESETS["worked_example"])
        found = decide(facts)
        assert (found.cause, found.kind, found.owner) == ("no warm-up", "optimiser", "optimisation")
        assert found.actions[0].change == {"cause": "healthy", "warmup_epochs": 5.0}
        assert facts.base is not None
        assert facts.base.last("val_acc_frac") > 0.85
        assert facts.large.last("val_acc_frac") < facts.base.last("val_acc_frac") - 0.05

    def test_the_control_diverges_alike_which_proves_that_it_is_not_the_system(self) -> None:
        facts = real_facts(scaleup.PRESETS["worked_example"])
        assert facts.control is not None
        assert facts.norm_gap(10).max() < 1e-5
        assert facts.control.last("val_acc_frac") < 0.85

    def test_recovered_by_the_action(self) -> None:
        facts = real_facts(scaleup.PRESETS["recovered"])
        assert facts.base is not None
        assert facts.large.last("val_acc_frac") > facts.base.last("val_acc_frac") - 0.08
        assert decide(facts).cause in ("healthy", "beyond the critical batch")


class TestOverSeeds:
    """The configuration whose behaviour was checked over seeds; one worker at the large batch, which has no system to blame."""

    def large(self, seed: int, warmup_epochs: float) -> Part:
        config = scaleup.Config(
            ranks=1, global_batch=2048, engine="virtual", seed=seed, warmup_epochs=warmup_epochs
        )
        return facts_of_rows(trained(config, ("large",)), config).large

    def test_without_warm_up_at_least_three_of_five_end_where_a_guesser_would(self) -> None:
        ends = [self.large(seed, 0.0).final_loss() for seed in range(5)]
        assert sum(not end < 1.0 for end in ends) >= 3, ends

    def test_warm_up_recovers_five_of_five(self) -> None:
        accuracies = [self.large(seed, 5.0).last("val_acc_frac") for seed in range(5)]
        assert min(accuracies) > 0.8, accuracies

    def test_the_two_limits_are_apart(self) -> None:
        """A stable rate at four times the batch is beyond the noise; the linear rate there is beyond the curvature."""
        for cause in ("beyond the critical batch", "learning rate too high for the curvature"):
            facts = virtual_facts(scaleup.config_for(cause, ranks=2, engine="virtual"))
            assert facts.base is not None
            soon = next(value for step, value in facts.base.sharpness if step >= 8)
            over = soon > scaleup.sharpness_limit(float(facts.large.lr.max()))
            assert over == (cause != "beyond the critical batch")
            assert facts.large.batch > 4 * 500  # of a noise scale that is a few hundred


class TestCases:
    """Public reports as programs of their own (tests/scaleup_cases.py), recorded by ScaleupRecorder."""

    @pytest.mark.parametrize(
        ("program", "cause"),
        [("healthy", "healthy"), ("set_epoch_never_called", "set_epoch forgotten"),
         ("wrapped_module_called", "gradients not synchronised"),
         ("converted_after_wrapping", "gradients not synchronised"),
         ("forward_inside_no_sync", "gradients not synchronised"),
         ("no_sync_with_unused", "healthy"), ("batchnorm_of_few", "healthy")],
    )  # fmt: skip
    def test_each_is_named(self, program: str, cause: str, tmp_path: Path) -> None:
        assert launch.Ranks(f"scaleup_cases:{program}", {}, tmp_path, 2).wait(60)
        found = scaleup.diagnose(open_run(tmp_path / "run"))
        assert found.cause == cause, found.reason

    @pytest.mark.parametrize("ranks", [2, 3])
    def test_a_parameter_unused_on_one_rank(self, ranks: int, tmp_path: Path) -> None:
        """pytorch#128949: that rank makes a step alone, and the others wait for it until it dies of the next one."""
        with contextlib.suppress(RunError):  # the others lost their peer
            launch.Ranks("scaleup_cases:unused_parameter", {"unused_on": [1]}, tmp_path, ranks).wait(60)
        found = scaleup.diagnose(open_run(tmp_path / "run"))
        assert (found.cause, found.where) == ("parameters diverge", "rank 1")

    def test_a_parameter_that_no_rank_uses_leaves_all_gradients_unsynchronised(self, tmp_path: Path) -> None:
        assert launch.Ranks("scaleup_cases:unused_parameter", {}, tmp_path, 2).wait(60)
        assert scaleup.diagnose(open_run(tmp_path / "run")).cause == "gradients not synchronised"


class TestLife:
    def test_measure_writes_a_run_that_is_read_back_with_its_truth(self, run_dir: Path) -> None:
        run = scaleup.measure(small("gradient missing", 2, engine="processes"), out=run_dir, timeout_s=120)
        again = open_run(run_dir)
        assert str(scaleup.diagnose(again)) == str(scaleup.diagnose(run))
        assert [fault["cause"] for fault in again.truth] == ["gradient missing"]
        assert again.summary()["virtual"] is False
        assert run.progress == 1

    def test_a_mitigation_is_applied_and_measured(self, run_dir: Path, tmp_path: Path) -> None:
        run = scaleup.measure(
            small("ranks start with different weights", 2, engine="processes"), out=run_dir, timeout_s=120
        )
        done = scaleup.mitigate(run, out=tmp_path / "after", timeout_s=120)
        assert scaleup.diagnose(done.after).cause == "healthy"
        assert done.promised is not None
        assert done.promised.low <= done.came_frac <= done.promised.high

    def test_a_rank_that_is_killed_is_named_and_nothing_is_lost(self, run_dir: Path) -> None:
        config = dataclasses.replace(small("healthy", 2, engine="processes"), epochs=2000, compare=False)
        run = scaleup.start(config, out=run_dir)
        deadline = time.monotonic() + 60
        while len(run.rows()) < 20 and time.monotonic() < deadline:
            time.sleep(0.05)
        import psutil

        ranks = [
            p for p in psutil.Process().children(recursive=True) if "mlsyslab.warm" in " ".join(p.cmdline())
        ]
        victim = max(ranks, key=lambda p: p.create_time())
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(RunError, match="was killed by SIGKILL"):
            run.wait(60)
        assert scaleup.diagnose(open_run(run_dir)).cause == "healthy"

    def test_the_same_worker_runs_under_torchrun(self, tmp_path: Path) -> None:
        torchrun = Path(sys.executable).with_name("torchrun")
        command = [torchrun, "--nproc-per-node", "2", "--standalone", "-m", "mlsyslab.labs.scaleup.worker", "--out", tmp_path / "run",
                   "--preset", "missing", "--samples", "1024", "--epochs", "2"]  # fmt: skip
        subprocess.run(command, check=True, timeout=120, capture_output=True)
        found = scaleup.diagnose(open_run(tmp_path / "run"))
        assert (found.cause, found.where) == ("gradient missing", "rank 1")

    def test_stop_ends_it_soon_and_keeps_what_was_recorded(self, run_dir: Path) -> None:
        config = dataclasses.replace(small("healthy", 4), epochs=2000)
        run = scaleup.start(config, out=run_dir)
        deadline = time.monotonic() + 60
        while not run.rows() and time.monotonic() < deadline:
            time.sleep(0.05)
        run.stop().wait(20)
        assert run.status["state"] == "stopped"
        assert run.rows()

    def test_virtual_ranks_beyond_what_processes_can(self) -> None:
        facts = virtual_facts(dataclasses.replace(small("gradient missing", 64), epochs=2))
        assert len(facts.large.ranks) == 64
        assert decide(facts).where == "rank 1"


def test_the_quick_preset_is_quick_and_right(run_dir: Path) -> None:
    run = scaleup.measure(scaleup.PRESETS["quick"], out=run_dir, timeout_s=120)
    assert str(scaleup.diagnose(run)) == "gradient missing (system); where: rank 1; acts first: networking"
    assert SMALL  # the tests' own size
