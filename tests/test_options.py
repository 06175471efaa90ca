"""Config fields: one description gives checks, command-line options and JSON."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from mlsyslab.contract import ConfigError
from mlsyslab.labs.steptime.config import PRESETS, Config, faults_of, scaled
from mlsyslab.options import add_arguments, config_from_arguments, from_json, options_of


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("workers", -1, "workers=-1 is outside 0..64; choose a value in that range"),
        ("steps", 0, "steps=0 is outside 1..100000"),
        ("ranks", 2.5, "ranks=2.5 is not a whole number"),
        ("ranks", True, "ranks=True is not a whole number"),
        ("compute_s", float("nan"), "compute_s=nan is not a number"),
        ("compute_s", "fast", "compute_s='fast' is not a number"),
        ("cache", "disk", "cache='disk' is not one of none, memory"),
        ("overlap", 1, "overlap=1 is not True or False"),
        ("scaling", (1, 0), "scaling=0 is outside 1..64"),
        ("scaling", [1, 2], r"scaling=\[1, 2\] is not a tuple"),
    ],
)
def test_a_bad_value_is_named_with_its_rule_and_remedy(field, value, says):
    with pytest.raises(ConfigError, match=says):
        Config(**{field: value})


def test_a_batch_larger_than_the_data_set_is_refused():
    with pytest.raises(ConfigError, match="batch_size=64 is larger than the data set of 32 images"):
        Config(batch_size=64, images=32)


def test_warmup_must_leave_a_steady_step():
    with pytest.raises(ConfigError, match="leaves no steady step"):
        Config(steps=4, warmup=4)


def test_pacing_nothing_is_refused():
    with pytest.raises(ConfigError, match="nothing to pace"):
        Config(paced=True)


def test_a_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().steps = 3


def parse(*words: str, base: Config | None = None) -> Config:
    parser = argparse.ArgumentParser()
    add_arguments(parser, Config)
    return config_from_arguments(parser.parse_args(list(words)), base or Config())


def test_every_field_has_a_command_line_option_that_round_trips():
    for item in options_of(Config):
        value = getattr(PRESETS["scaling"], item.name)
        shown = ",".join(map(str, value)) if item.kind == "ints" else str(value)
        given = dataclasses.replace(Config(), paced=False)
        if item.name in ("paced",):
            continue
        assert getattr(parse(item.flag, shown, base=given), item.name) == value


def test_options_override_the_preset_and_keep_the_rest():
    changed = parse("--workers", "3", "--overlap", "off", base=PRESETS["worked_example"])
    assert changed == dataclasses.replace(PRESETS["worked_example"], workers=3, overlap=False)


def test_an_option_that_is_no_number_is_one_clear_error():
    with pytest.raises(ConfigError, match="workers='many' is not a whole number"):
        parse("--workers", "many")


def test_json_brings_the_same_config_back():
    config = PRESETS["scaling"]
    stored = {**dataclasses.asdict(config), "scaling": [1, 2, 4]}
    assert from_json(Config, stored) == config


def test_a_field_of_a_newer_version_is_named():
    with pytest.raises(ConfigError, match="colour is no field"):
        from_json(Config, {"colour": 1})


def test_presets_scale_gradients_with_the_machines_all_reduce_rate():
    probe = {"allreduce_bytes_per_s": 9e9}
    config = scaled(PRESETS["communication_bound"], probe, cuda=False)
    assert config.gradient_mb == 10 * PRESETS["communication_bound"].gradient_mb
    assert dataclasses.replace(config, gradient_mb=64.0) == PRESETS["communication_bound"]


def test_nothing_is_paced_where_there_is_an_accelerator():
    assert PRESETS["worked_example"].paced
    assert not scaled(PRESETS["worked_example"], {}, cuda=True).paced


def test_the_truth_lists_what_was_made_slow_and_nothing_else():
    assert [f.cause for f in faults_of(Config())] == []
    worked = {f.cause: f.magnitude for f in faults_of(PRESETS["worked_example"])}
    assert worked == {"input": pytest.approx(0.3), "compute": 0.12}


@pytest.mark.parametrize(
    ("preset", "cause"),
    [("worked_example", "input"), ("quick", "input"), ("compute_bound", "compute"), ("host_bound", "host"),
     ("communication_bound", "communication"), ("scaling", "communication")],
)  # fmt: skip
def test_the_first_fault_is_the_one_that_costs_most(preset, cause):
    assert faults_of(PRESETS[preset])[0].cause == cause
