"""A run directory is readable whatever became of the run, and executes nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import socket

import pytest

from mlsyslab import open_run
from mlsyslab.contract import RunError
from mlsyslab.labs.steptime.config import Config
from mlsyslab.records import PHASES, StepRecord, Stream, Tail, write_json
from mlsyslab.runs import create_run

RECORD = StepRecord(
    rank=0, step=0, world=1, warmup=False, data_s=0.1, h2d_s=0.0, forward_s=0.2, backward_s=0.3, sync_s=0.05,
    optimizer_s=0.01, other_s=0.02, step_s=0.68, extra={"load_cpu_s": 0.5},
)  # fmt: skip


@pytest.fixture
def run_path(tmp_path):
    return create_run(
        "steptime", Config(steps=10, seed=3), out=tmp_path / "run", truth=[{"cause": "input"}], expected=10
    )


def append(path, *steps: int, rank: int = 0) -> None:
    stream = Stream(path / f"rank-{rank}.jsonl")
    for step in steps:
        stream.write(dataclasses.replace(RECORD, step=step, rank=rank).to_json())
    stream.close()


def test_a_record_knows_its_own_work():
    row = RECORD.to_json()
    assert row["own_s"] == pytest.approx(0.63)
    assert sum(row[name] for name in PHASES) == pytest.approx(row["step_s"])
    assert row["load_cpu_s"] == 0.5


def test_what_was_written_is_read_back(run_path):
    append(run_path, 0, 1)
    run = open_run(run_path)
    assert run.config == Config(steps=10, seed=3)
    assert run.truth == [{"cause": "input"}]
    assert list(run.records["step"]) == [0, 1]
    assert run.origin == "recorded"


def test_a_crash_in_the_middle_of_a_line_loses_that_line_only(run_path):
    append(run_path, 0, 1)
    with (run_path / "rank-0.jsonl").open("a") as file:
        file.write('{"kind":"step","rank":0,"ste')
    assert list(open_run(run_path).records["step"]) == [0, 1]


def test_a_broken_line_in_the_middle_does_not_hide_the_later_ones(run_path):
    append(run_path, 0)
    with (run_path / "rank-0.jsonl").open("a") as file:
        file.write("\0\0\0 not json\n")
    append(run_path, 1)
    assert list(open_run(run_path).records["step"]) == [0, 1]


def test_poll_gives_each_record_once_and_in_the_order_of_steps(run_path):
    run = open_run(run_path)
    append(run_path, 0, 1, rank=1)
    append(run_path, 0, 1, rank=0)
    assert [(r["step"], r["rank"]) for r in run.poll()] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert run.poll() == []
    append(run_path, 2)
    assert [r["step"] for r in run.poll()] == [2]


def test_looking_at_a_run_does_not_take_records_away_from_poll(run_path):
    run = open_run(run_path)
    append(run_path, 0, 1)
    assert run.progress > 0
    assert len(run.records) == 2
    assert [r["step"] for r in run.poll()] == [0, 1]


def test_a_half_written_line_is_read_when_it_is_complete(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"a":1}\n{"a"')
    tail = Tail(path)
    assert [row["a"] for row in tail.read()] == [1]
    with path.open("a") as file:
        file.write(":2}\n")
    assert [row["a"] for row in tail.read()] == [2]


def test_progress_is_the_share_of_expected_records(run_path):
    append(run_path, 0, 1, 2)
    assert open_run(run_path).progress == pytest.approx(0.3)


def test_a_run_whose_process_is_gone_is_interrupted(run_path):
    write_json(run_path / "status.json", {"state": "running", "pid": 2**22 + 1, "host": socket.gethostname()})
    assert open_run(run_path).status["state"] == "interrupted"
    write_json(
        run_path / "status.json", {"state": "running", "pid": os.getpid(), "host": socket.gethostname()}
    )
    assert open_run(run_path).status["state"] == "running"


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(RunError, match=r"no readable config\.json"):
        open_run(tmp_path)


def test_a_newer_schema_asks_for_an_upgrade(run_path):
    stored = json.loads((run_path / "config.json").read_text())
    write_json(run_path / "config.json", {**stored, "schema": 99})
    with pytest.raises(RunError, match=r"schema 99.*upgrade"):
        open_run(run_path)


def test_a_stranger_cannot_name_a_module_to_import(run_path):
    stored = json.loads((run_path / "config.json").read_text())
    write_json(run_path / "config.json", {**stored, "lab": "os.path"})
    with pytest.raises(RunError, match="names no lab"):
        _ = open_run(run_path).config


@pytest.mark.parametrize(
    "change",
    [
        {"lab": "foo"},
        {"lab": "straggler"},
        {"schema": "1"},
        {"config": {"scaling": 3}},
        {"config": {"steps": "x"}},
    ],
)
def test_a_foreign_run_directory_is_one_sentence(run_path, change):
    stored = json.loads((run_path / "config.json").read_text())
    write_json(run_path / "config.json", {**stored, **change})
    with pytest.raises(RunError):
        _ = open_run(run_path).config


@pytest.mark.parametrize(
    "status", [{}, {"x": 1}, {"state": "running", "pid": 10**30}, {"state": "running", "pid": "a"}]
)
def test_a_broken_status_is_an_interrupted_run(run_path, status):
    write_json(run_path / "status.json", status)
    assert open_run(run_path).status["state"] == "interrupted"


def test_a_bad_configuration_in_a_run_is_an_error_of_the_run(run_path):
    stored = json.loads((run_path / "config.json").read_text())
    stored["config"]["steps"] = -4
    write_json(run_path / "config.json", stored)
    with pytest.raises(RunError, match="steps=-4"):
        _ = open_run(run_path).config


def test_the_truth_of_a_mystery_run_is_hidden(run_path):
    write_json(run_path / "truth.json", {"hidden": True, "faults": [{"cause": "input"}]})
    with pytest.raises(RunError, match="commit your verdict first"):
        _ = open_run(run_path).truth


def test_a_used_folder_is_not_overwritten(run_path):
    with pytest.raises(RunError, match="is not empty"):
        create_run("steptime", Config(), out=run_path, truth=[], expected=1)


def test_a_path_through_a_file_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot write .*choose another folder"):
        create_run("steptime", Config(), out=tmp_path / "file" / "run", truth=[], expected=1)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_a_full_disk_says_so_and_what_was_written_stays(run_path):
    append(run_path, 0)
    (run_path / "rank-1.jsonl").symlink_to("/dev/full")
    stream = Stream(run_path / "rank-1.jsonl")
    with pytest.raises(RunError, match="the disk is full: free space"):
        stream.write({"kind": "step"})
    (run_path / "rank-1.jsonl").unlink()
    assert list(open_run(run_path).records["step"]) == [0]


def test_not_a_number_never_reaches_the_file(tmp_path):
    stream = Stream(tmp_path / "x.jsonl")
    stream.write({"loss": float("nan"), "x": float("inf")})
    assert json.loads((tmp_path / "x.jsonl").read_text()) == {"loss": None, "x": None}
