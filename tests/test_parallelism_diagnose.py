"""The verdicts of the parallelism lab: each cause where it holds, where it must not, and beside its look-alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from parallelism_runs import write_run

from mlsyslab import RunError, open_run, parallelism
from mlsyslab.labs.parallelism.config import Config, layout_of
from mlsyslab.labs.parallelism.diagnose import diagnose
from mlsyslab.labs.parallelism.ledger import largest
from mlsyslab.labs.parallelism.predict import REFERENCE_MACHINE, crosses, predict
from mlsyslab.labs.parallelism.traffic import traffic

MB = 1e6


def sent(config: Config) -> list[dict[str, Any]]:
    """The collectives of a step, as a run would have counted them."""
    return [
        {"axis": one.axis, "kind": one.kind, "count": one.count, "bytes": one.bytes}
        for one in traffic(config.shape, layout_of(config))
    ]


def refused(phase: str, wanted: float, **live: float) -> dict[str, Any]:
    roles = dict.fromkeys(("params", "grads", "optimizer", "inputs", "other"), 0.0) | live
    return {
        "phase": phase,
        "wanted_bytes": wanted,
        "cap_bytes": 250 * MB,
        "live": {**roles, "total": sum(roles.values())},
        "says": "refused",
    }


class TestMemory:
    CONFIG = Config(model="17M", strategy="ddp", ranks=2, batch=4, memory_cap_mb=250.0)
    NOTE = refused("optimizer", 6 * MB, params=69 * MB, grads=69 * MB, optimizer=110 * MB)

    def test_a_refusal_names_the_term_that_was_being_made(self, tmp_path: Path) -> None:
        verdict = diagnose(write_run(tmp_path / "run", self.CONFIG, oom=self.NOTE))
        assert (verdict.cause, verdict.kind, verdict.where, verdict.owner) == (
            "memory",
            "optimizer",
            "every rank",
            "model code",
        )
        assert "6.0 MB more" in verdict.reason
        assert "cap of 250.0 MB" in verdict.reason

    @pytest.mark.parametrize(
        ("phase", "wanted", "term"),
        [("building the model", 1 * MB, "params"), ("forward", 1 * MB, "activations"), ("backward", 1 * MB, "grads"),
         ("forward", 4 * 2 * 128 * 4096, "logits"), ("backward", 4 * 2 * 128 * 4096, "logits")],
    )  # fmt: skip
    def test_the_term_follows_from_the_phase_and_the_size(
        self, phase: str, wanted: float, term: str, tmp_path: Path
    ) -> None:
        assert (
            diagnose(
                write_run(tmp_path / "run", self.CONFIG, oom=refused(phase, wanted, params=69 * MB))
            ).kind
            == term
        )

    def test_the_ledger_names_what_the_formula_of_the_state_omits(self, tmp_path: Path) -> None:
        """As in DeepSpeed#4527: the state would fit, activations and logits do not."""
        finding = diagnose(write_run(tmp_path / "run", self.CONFIG, oom=self.NOTE)).findings[0]
        named = {e.name: e.value for e in finding.evidence}
        assert named["model state of the whole model"] == 16 * self.CONFIG.shape.params
        assert {"the peak's activations", "the peak's loss"} <= set(named)
        assert all(e.origin == "predicted" for e in finding.evidence if e.name.startswith("the peak"))

    def test_the_next_simplest_split_that_fits_is_offered_first_with_its_peak(self, tmp_path: Path) -> None:
        actions = diagnose(write_run(tmp_path / "run", self.CONFIG, oom=self.NOTE)).actions
        assert actions[0].change == {"strategy": "fsdp"}  # ZeRO-1 would need 287 MB
        assert actions[0].figure == "peak_bytes"
        for action in actions:
            after = Config(
                **{
                    **{"model": "17M", "ranks": 2, "batch": 4, "memory_cap_mb": 250.0, "strategy": "ddp"},
                    **action.change,
                }
            )
            assert largest(after.shape, layout_of(after)).peak_bytes < 250 * MB

    def test_where_no_split_fits_only_more_ranks_are_left(self, tmp_path: Path) -> None:
        config = Config(model="17M", strategy="ddp", ranks=2, batch=4, memory_cap_mb=50.0)
        note = {**self.NOTE, "cap_bytes": 50 * MB}
        (action,) = diagnose(write_run(tmp_path / "run", config, oom=note)).actions
        assert (action.name, action.change) == ("more ranks", {})

    def test_without_a_cap_what_was_needed_is_the_bound(self, tmp_path: Path) -> None:
        """As on a GPU that is full."""
        config = Config(model="17M", strategy="ddp", ranks=2, batch=4)
        action = diagnose(write_run(tmp_path / "run", config, oom={**self.NOTE, "cap_bytes": None})).actions[
            0
        ]
        assert action.change == {"strategy": "fsdp"}

    def test_uneven_stages_do_not_hide_the_other_splits(self, tmp_path: Path) -> None:
        config = Config(model="17M", strategy="pp", ranks=2, batch=4, stage_split=(7, 1), memory_cap_mb=250.0)
        actions = diagnose(write_run(tmp_path / "run", config, oom=self.NOTE)).actions
        assert {"strategy": "fsdp", "stage_split": ()} in [dict(action.change) for action in actions]

    def test_a_refusal_of_a_pipeline_names_the_stage(self, tmp_path: Path) -> None:
        config = Config(model="17M", strategy="pp", ranks=2, batch=4, memory_cap_mb=100.0)
        assert diagnose(write_run(tmp_path / "run", config, oom=self.NOTE)).where == "stage 0"

    def test_a_run_that_fits_under_its_cap_is_healthy(self, tmp_path: Path) -> None:
        run = write_run(tmp_path / "run", self.CONFIG, held={"peak_bytes": 200 * MB}, sent=sent(self.CONFIG))
        verdict = diagnose(run)
        assert (verdict.cause, verdict.where, verdict.owner) == ("healthy", None, "nobody")
        assert "peaks at 200.0 MB" in verdict.reason

    def test_its_summary_is_what_would_have_been_needed(self, tmp_path: Path) -> None:
        found = write_run(tmp_path / "run", self.CONFIG, oom=self.NOTE).summary()
        assert found["peak_bytes"] == 254 * MB
        assert found["out_of_memory"]
        assert found["step_s"] is None


class TestPipeline:
    def at(self, **change: Any) -> Config:
        return Config(
            **{"model": "4M", "strategy": "pp", "ranks": 2, "batch": 16, "microbatches": 2, **change}
        )

    def test_few_microbatches_are_a_bubble(self, tmp_path: Path) -> None:
        verdict = diagnose(write_run(tmp_path / "run", self.at(), stage_s=(0.06, 0.06), cores=2))
        assert (verdict.cause, verdict.where, verdict.owner) == ("bubble", "every rank", "model code")
        assert "33%" in verdict.reason
        assert verdict.actions[0].change["microbatches"] > 2

    def test_many_microbatches_are_none(self, tmp_path: Path) -> None:
        assert (
            diagnose(write_run(tmp_path / "run", self.at(microbatches=16), stage_s=(0.06, 0.06))).cause
            == "healthy"
        )

    def test_a_stage_with_more_to_do_is_an_imbalance_whatever_the_bubble(self, tmp_path: Path) -> None:
        for microbatches in (2, 16):
            config = self.at(microbatches=microbatches, stage_split=(2, 6))
            verdict = diagnose(write_run(tmp_path / f"run{microbatches}", config, stage_s=(0.03, 0.09)))
            assert (verdict.cause, verdict.where) == ("imbalance", "stage 1")
            assert "6 of 8 layers" in verdict.reason
            assert verdict.actions[0].change == {"stage_split": (4, 4)}

    def test_a_last_stage_that_is_slow_by_its_head_gets_fewer_layers(self, tmp_path: Path) -> None:
        config = self.at(ranks=4, microbatches=16)
        verdict = diagnose(write_run(tmp_path / "run", config, stage_s=(0.06, 0.06, 0.06, 0.10)))
        assert (verdict.cause, verdict.where) == ("imbalance", "stage 3")
        assert verdict.actions[0].change == {"stage_split": (3, 2, 2, 1)}

    def test_where_no_split_is_better_nothing_is_promised(self, tmp_path: Path) -> None:
        config = self.at(model="1M", ranks=4, microbatches=16)  # a layer each
        (action,) = diagnose(write_run(tmp_path / "run", config, stage_s=(0.06, 0.06, 0.06, 0.10))).actions
        assert (action.change, action.gain_frac) == ({}, None)
        assert "the machine of the slow stage" in action.says

    def test_promises_are_what_the_replayed_schedule_gains_on_cores_of_its_own(self, tmp_path: Path) -> None:
        config = self.at(stage_split=(2, 6), microbatches=16)
        action = diagnose(write_run(tmp_path / "run", config, stage_s=(0.03, 0.09), cores=8)).actions[0]
        assert action.gain_frac is not None
        assert action.gain_frac.expected == pytest.approx(1 / 3, abs=0.03)  # from 0.09 to 0.06 a microbatch

    def test_the_batch_must_divide_for_more_microbatches(self, tmp_path: Path) -> None:
        config = self.at(batch=2)
        action = diagnose(write_run(tmp_path / "run", config, stage_s=(0.06, 0.06))).actions[0]
        assert not action.change
        assert "raise the batch" in action.says


class TestCommunication:
    CONFIG = Config(model="4M", strategy="fsdp", ranks=2)

    def test_a_wait_of_every_rank_is_transfer(self, tmp_path: Path) -> None:
        verdict = diagnose(
            write_run(tmp_path / "run", self.CONFIG, sent=sent(self.CONFIG), wait_s=(0.05, 0.06))
        )
        assert (verdict.cause, verdict.where, verdict.owner) == ("communication", "every rank", "networking")
        assert verdict.actions[0].change == {"reshard": False}

    def test_the_wait_of_one_rank_is_not(self, tmp_path: Path) -> None:
        assert (
            diagnose(
                write_run(tmp_path / "run", self.CONFIG, sent=sent(self.CONFIG), wait_s=(0.06, 0.0))
            ).cause
            == "healthy"
        )

    def test_more_ranks_than_cores_wait_for_their_turn_and_prove_nothing(self, tmp_path: Path) -> None:
        verdict = diagnose(
            write_run(tmp_path / "run", self.CONFIG, sent=sent(self.CONFIG), wait_s=(0.05, 0.06), cores=1)
        )
        assert verdict.cause == "healthy"
        assert "says nothing about speed" in verdict.reason

    def test_ranks_that_wait_for_a_core_and_for_each_other_are_unknown(self, tmp_path: Path) -> None:
        run = write_run(
            tmp_path / "run", self.CONFIG, sent=sent(self.CONFIG), wait_s=(0.03, 0.03), queue_s=0.04
        )
        verdict = diagnose(run)
        assert verdict.cause == "unknown"
        assert "communication, or a busy machine" in verdict.reason


class TestPlacement:
    CONFIG = Config(
        model="4M", strategy="fsdp+tp", ranks=4, tp=2, nodes=2, tp_across=True, batch=64, link_mb_per_s=50.0
    )

    def test_the_tensor_axis_over_the_slow_link_is_the_wrong_axis(self, tmp_path: Path) -> None:
        verdict = diagnose(
            write_run(tmp_path / "run", self.CONFIG, sent=sent(self.CONFIG), step_s=3.0, cores=2)
        )
        assert (verdict.cause, verdict.owner) == ("placement", "host operations")
        assert "the tp axis crosses the link" in verdict.reason
        assert verdict.actions[0].change == {"tp_across": False}

    def test_a_link_that_is_slow_for_either_is_communication(self, tmp_path: Path) -> None:
        inside = Config(
            **{
                **{f: getattr(self.CONFIG, f) for f in ("model", "strategy", "ranks", "tp", "nodes")},
                "batch": 20,  # at which both axes send about as much
                "link_mb_per_s": 5.0,
            }
        )
        assert (
            diagnose(
                write_run(tmp_path / "run", inside, sent=sent(inside), step_s=8.0, wait_s=(4.0,) * 4, cores=2)
            ).cause
            == "communication"
        )

    @pytest.mark.parametrize(
        ("across", "axis", "crossing"),
        [(False, "dp", True), (False, "tp", False), (True, "tp", True), (True, "dp", False)],
    )
    def test_which_axis_crosses(self, across: bool, axis: str, crossing: bool) -> None:
        config = Config(model="4M", strategy="fsdp+tp", ranks=4, tp=2, nodes=2, tp_across=across)
        assert crosses(config, axis) is crossing


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"strategy": "zero1"}, "ZeRO-1 sends more than DDP"),
        ({"strategy": "tp", "tp_plan": "plain"}, "an all-reduce for each matrix"),
        ({"strategy": "tp", "tp_plan": "sharded vocabulary"}, "the embedding's gradient is whole"),
        ({"strategy": "pp", "keep_logits": True, "microbatches": 8}, "the last stage keeps its logits"),
        (
            {"strategy": "pp", "clip_norm": 1.0, "clip": "local", "microbatches": 8},
            "each stage clips by its own norm",
        ),
    ],
)
def test_what_a_split_does_besides_is_shown_with_its_remedy(
    change: dict[str, Any], rule: str, tmp_path: Path
) -> None:
    config = Config(model="4M", ranks=2, **change)
    stage_s = (0.06, 0.06) if config.strategy == "pp" else ()
    verdict = diagnose(write_run(tmp_path / "run", config, sent=sent(config), stage_s=stage_s))
    assert [finding.rule for finding in verdict.findings] == [rule]
    assert verdict.findings[0].next_check
    assert verdict.cause == "healthy"
    plain = (
        Config(model="4M", ranks=2, strategy=config.strategy, microbatches=8)
        if config.strategy != "zero1"
        else Config(model="4M", ranks=2)
    )
    assert diagnose(write_run(tmp_path / "plain", plain, sent=sent(plain), stage_s=stage_s)).findings == ()


def test_where_activations_dominate_more_ranks_are_said_to_help_little(tmp_path: Path) -> None:
    """As in pytorch#104589: FSDP on 4 and on 8 ranks, and memory hardly falls."""
    config = Config(model="4M", ranks=2, batch=32)
    held = {
        "params_bytes": 8e6,
        "grads_bytes": 8e6,
        "optimizer_bytes": 16e6,
        "activations_bytes": 140e6,
        "peak_bytes": 170e6,
    }
    (finding,) = diagnose(write_run(tmp_path / "run", config, held=held, sent=sent(config))).findings
    assert finding.rule == "more ranks will hardly help"
    assert "model state is 19% of the peak" in finding.says


def test_zero1s_surprise_has_its_factor(tmp_path: Path) -> None:
    config = Config(model="4M", ranks=2, strategy="zero1")
    assert "1.5 times" in diagnose(write_run(tmp_path / "run", config, sent=sent(config))).findings[0].says


def test_a_run_without_records_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Config())
    for path in run.path.glob("rank-*.jsonl"):
        path.write_text("")
    with pytest.raises(RunError, match="no step was recorded"):
        diagnose(open_run(run.path))


def test_a_run_that_was_stopped_early_abstains(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Config())
    for path in run.path.glob("rank-*.jsonl"):
        path.write_text("".join(line + "\n" for line in path.read_text().splitlines()[:2]))
    assert diagnose(open_run(run.path)).cause == "unknown"


def test_what_was_measured_elsewhere_says_so(tmp_path: Path) -> None:
    verdict = diagnose(write_run(tmp_path / "run", Config(), sent=sent(Config())))
    origins = {e.name: e.origin for e in verdict.evidence if e.value is not None}
    assert set(origins.values()) <= {"recorded", "simulated"}


def test_the_prediction_shares_its_keys_with_the_summary(tmp_path: Path) -> None:
    for strategy in ("fsdp", "pp"):
        config = Config(strategy=strategy)
        summary = write_run(
            tmp_path / strategy, config, sent=sent(config), stage_s=(0.1, 0.1) if strategy == "pp" else ()
        ).summary()
        assert set(predict(config, {}).values) <= set(summary)


@pytest.mark.parametrize(("name", "cause"), [("quick", "healthy"), ("worked_example", "healthy"), ("too_big", "memory"), ("pipeline", "healthy"), ("bubble", "bubble"), ("unbalanced", "imbalance"), ("slow_axis", "placement")])  # fmt: skip
def test_a_preset_implies_the_cause_of_its_name(name: str, cause: str) -> None:
    assert predict(parallelism.PRESETS[name], REFERENCE_MACHINE).cause == cause
