"""The clinic's configuration: what it means in steps and rates, what it refuses, and what it calls the truth."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mlsyslab import ConfigError, scaleup
from mlsyslab.labs.scaleup.config import SYSTEM, base_of, control_of, faults_of, has_base, learning_rate

CAUSES = [cause for cause in scaleup.CAUSES if cause != "unknown"]


class TestMeaning:
    def test_the_worked_example_is_eight_times_256(self) -> None:
        config = scaleup.PRESETS["worked_example"]
        assert (config.ranks, config.per_rank, config.whole_batch) == (8, 256, 2048)
        assert config.growth == 8
        assert config.peak_lr == pytest.approx(8 * config.lr)
        assert config.steps == 20 * 16_384 // 2048

    def test_a_global_batch_is_dealt_to_the_ranks(self) -> None:
        config = scaleup.Config(ranks=4, global_batch=256)
        assert config.per_rank == 64
        assert config.whole_batch == 256

    @pytest.mark.parametrize(
        ("samples", "ranks", "steps"), [(1000, 4, 3), (1002, 4, 3), (1024, 4, 4), (1021, 4, 4)]
    )
    def test_an_epoch_is_as_long_as_a_padded_shard(self, samples: int, ranks: int, steps: int) -> None:
        config = scaleup.Config(ranks=ranks, batch_per_rank=64, base_batch=64, samples=samples, epochs=1)
        assert config.epoch_steps == steps

    def test_the_square_root_rule(self) -> None:
        config = scaleup.Config(scaling="sqrt", lr=0.1)
        assert config.peak_lr == pytest.approx(0.1 * 8**0.5)

    def test_warm_up_climbs_from_the_small_rate_to_the_peak_and_stays(self) -> None:
        config = scaleup.Config(warmup_epochs=5)
        rates = [learning_rate(config, step) for step in range(config.steps)]
        climb = 5 * config.epoch_steps
        assert rates[0] == config.lr
        assert rates[climb // 2] == pytest.approx((config.lr + config.peak_lr) / 2)
        assert set(rates[climb:]) == {config.peak_lr}
        assert rates[:climb] == sorted(rates[:climb])

    def test_a_cosine_ends_near_zero_and_one_that_counts_steps_does_not(self) -> None:
        config = scaleup.config_for("schedule counted in steps")
        right = dataclasses.replace(config, cause="healthy")
        last = config.steps - 1
        assert learning_rate(right, last) < 0.01 * config.peak_lr
        assert learning_rate(config, last) > 0.5 * config.peak_lr

    def test_too_few_steps_are_as_many_times_fewer_as_the_batch_grew(self) -> None:
        config = scaleup.config_for("too few steps")
        assert config.steps == dataclasses.replace(config, cause="healthy").steps / config.growth


class TestParts:
    def test_the_small_run_is_one_worker_at_the_small_rate(self) -> None:
        base = base_of(scaleup.PRESETS["not_scaled"])
        assert (base.ranks, base.whole_batch, base.peak_lr, base.cause) == (1, 256, base.lr, "healthy")

    @pytest.mark.parametrize("cause", CAUSES)
    def test_the_control_has_the_optimisers_settings_and_no_fault_of_the_system(self, cause: str) -> None:
        config = scaleup.config_for(cause)
        control = control_of(config)
        assert control.whole_batch == config.whole_batch
        assert control.cause == ("healthy" if cause in SYSTEM else cause)
        assert [learning_rate(control, step) for step in range(5)] == [
            learning_rate(config, step) for step in range(5)
        ]
        assert (control.precision, control.wire, control.virtual) == ("fp32", "fp32", True)

    def test_with_batchnorm_the_control_takes_the_batch_in_one_piece(self) -> None:
        assert control_of(scaleup.config_for("batchnorm statistics")).ranks == 1

    def test_where_nothing_grew_the_control_is_the_small_run(self) -> None:
        assert not has_base(scaleup.config_for("gradient stale"))
        assert has_base(scaleup.PRESETS["worked_example"])


class TestTruth:
    @pytest.mark.parametrize("cause", CAUSES)
    def test_what_is_injected_is_the_truth(self, cause: str) -> None:
        found = [fault.cause for fault in faults_of(scaleup.config_for(cause))]
        assert found == ([] if cause == "healthy" else [cause])

    @pytest.mark.parametrize(
        ("change", "cause"),
        [
            ({"scaling": "none"}, ["learning rate not scaled"]),
            ({"warmup_epochs": 0.0}, ["no warm-up"]),
            ({}, []),
        ],
    )
    def test_settings_can_be_the_mistake(self, change: dict[str, Any], cause: list[str]) -> None:
        assert [fault.cause for fault in faults_of(scaleup.Config(**change))] == cause

    def test_every_preset_is_valid_and_the_promised_ones_are_there(self) -> None:
        assert {"quick", "worked_example"} <= set(scaleup.PRESETS)
        assert all(isinstance(config, scaleup.Config) for config in scaleup.PRESETS.values())


BAD: list[tuple[dict[str, Any], str]] = [
    ({"ranks": 8, "global_batch": 2047}, r"global_batch=2047 over ranks=8 is 255.875 samples each"),
    ({"lr": 0.0}, r"lr=0.0 is outside"),
    ({"lr": -0.1}, r"lr=-0.1 is outside"),
    ({"ranks": 64, "batch_per_rank": 1024}, r"some shard would be empty"),
    ({"base_batch": 32_768}, r"larger than the data set"),
    ({"accumulate": 3}, r"accumulate=3 micro-batches is 85.3333 each"),
    ({"cause": "gradient stale", "ranks": 2, "fault_rank": 2}, r"fault_rank=2 is outside 0..1"),
    ({"cause": "gradient stale", "ranks": 1, "fault_rank": 0}, r"needs more than one rank"),
    ({"cause": "batchnorm statistics"}, r"needs norm='batch'"),
    ({"cause": "seed shared by all ranks"}, r"augment=0 draws no random numbers"),
    ({"cause": "accumulation averaged per micro-batch"}, r"needs samples of unequal length"),
    ({"cause": "no warm-up"}, r"warmup_epochs=5 contradicts itself"),
    ({"cause": "learning rate not scaled"}, r"scaling='linear' contradicts itself"),
    ({"cause": "too few steps", "global_batch": 256}, r"nothing that was scaled up"),
    ({"cause": "schedule counted in steps", "warmup_epochs": 0.0}, r"has no schedule"),
    ({"cause": "bad luck"}, r"cause='bad luck' is not one of"),
]


@pytest.mark.parametrize(("change", "words"), BAD, ids=[words for _, words in BAD])
def test_bad_input_is_one_sentence_with_the_value_and_the_remedy(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        scaleup.Config(**change)
    assert "\n" not in str(caught.value)


def test_an_unknown_cause_or_preset_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="cause='magic' is not one of"):
        scaleup.config_for("magic")
    with pytest.raises(ConfigError, match="preset 'magic' is not one of"):
        scaleup.preset("magic")
