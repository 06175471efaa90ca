"""The command: one clear line for bad input, JSON with units, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from steptime_runs import write_run

from mlsyslab import straggler
from mlsyslab.cli import main
from mlsyslab.labs.straggler import recovery

SMALL = ["--steps", "10", "--batch-size", "2", "--input-cost-s", "0.02", "--compute-s", "0.01"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["steptime", "--workers", "-1"], "workers=-1 is outside 0..64"),
        (["steptime", "--steps", "0"], "steps=0 is outside"),
        (["steptime", "--steps", "many"], "steps='many' is not a whole number"),
        (["steptime", "--preset", "fast"], "preset 'fast' is not one of quick, worked_example"),
        (["steptime", "--batch-size", "4000"], "larger than the data set of 3000 images"),
        (["show", "/no/such/run"], "has no readable config.json"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, says, capsys):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err
    assert captured.err.count("\n") == 1


def test_an_unknown_option_is_refused_by_name(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["steptime", "--colour", "red"])
    assert caught.value.code == 2
    assert "--colour" in capsys.readouterr().err


def test_an_out_folder_that_cannot_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["steptime", "--out", str(tmp_path / "file" / "run")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_show_reads_a_recorded_run_as_text_and_as_json(tmp_path, capsys):
    write_run(tmp_path / "run", {"data_s": 0.18, "forward_s": 0.04, "backward_s": 0.08})
    assert main(["show", str(tmp_path / "run"), "--plot", str(tmp_path / "x.png")]) == 0
    text = capsys.readouterr().out
    assert "Verdict      input" in text
    assert "recorded" in text
    assert (tmp_path / "x.png").stat().st_size > 10_000
    assert main(["show", str(tmp_path / "run"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["verdict"]["cause"] == "input"
    assert shown["measured"]["data_s"] == pytest.approx(0.18, rel=0.05)
    assert shown["origin"] == "recorded"


def test_a_figure_that_cannot_be_saved_is_one_line(tmp_path, capsys):
    write_run(tmp_path / "run", {"data_s": 0.18, "forward_s": 0.04})
    assert main(["show", str(tmp_path / "run"), "--plot", str(tmp_path / "no" / "x.png")]) == 2
    assert "cannot save the figure" in capsys.readouterr().err


@pytest.mark.ranks
def test_a_real_run_prints_predicted_measured_and_verdict(tmp_path, capsys):
    assert main(["steptime", "--preset", "quick", *SMALL, "--out", str(tmp_path / "run"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["predicted"]["step_s"]["low"] <= shown["predicted"]["step_s"]["high"]
    assert shown["measured"]["step_s"] > 0
    assert shown["verdict"]["cause"] in ("input", "unknown")
    assert shown["config"]["steps"] == 10


@pytest.mark.ranks
def test_ctrl_c_ends_the_command_its_ranks_and_keeps_the_records(tmp_path):
    out = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "mlsyslab.cli",
        "steptime",
        "--preset",
        "quick",
        "--steps",
        "5000",
        "--out",
        out,
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    until = time.monotonic() + 120
    while time.monotonic() < until and not (
        out.is_dir() and any('"step"' in p.read_text() for p in out.glob("rank-*.jsonl"))
    ):
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert json.loads((out / "status.json").read_text())["state"] == "stopped"


def test_help_starts_without_torch_pandas_or_matplotlib():
    code = "import sys; from mlsyslab.cli import parser; parser(); print([m for m in ('torch', 'pandas', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_recover_runs_the_job_under_the_elastic_launcher_and_says_what_it_gained(
    tmp_path, capsys, monkeypatch
):
    asked = {}

    def recover(config, **rest):
        asked.update(rest, ranks=config.ranks)
        figures = {"step_before_s": 0.3, "step_after_s": 0.1, "gain_frac": 0.67, "promised_frac": 0.6}
        named = SimpleNamespace(rank=1, host="host-1", step=9)
        run = SimpleNamespace(path=tmp_path / "run", lab="straggler")
        return recovery.Recovery(
            run=run, named=named, killed="", hosts=(("host-0", "host-1"), ("host-0", "host-2")), resumed_steps=(10,),
            lost_steps=1, down_s=4.0, checkpoint_s=0.1, losses={}, samples={}, notes=(), **figures,
        )  # fmt: skip

    monkeypatch.setattr(straggler, "recover", recover)
    words = ["straggler", "--recover", "--ranks", "3", "--out", str(tmp_path / "run"), "--timeout-s", "90"]
    assert main([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert asked == {"out": tmp_path / "run", "timeout_s": 90.0, "ranks": 3}
    assert (said["cordoned"], said["gain_frac"], said["promised_frac"], said["lost_steps"]) == (
        "host-1",
        0.67,
        0.6,
        1,
    )
    assert main(words) == 0
    assert "named rank 1 on host-1 in step 9" in capsys.readouterr().out
