"""Real ranks, real loader workers, real JPEG files, real all-reduce. Causes, bounds and sums; never milliseconds."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mlsyslab
from mlsyslab import jpegs, steptime
from mlsyslab.contract import ConfigError, RunError
from mlsyslab.labs.steptime.config import PRESETS
from mlsyslab.records import PHASES

pytestmark = pytest.mark.ranks

FEW = {
    "worked_example": 14,
    "compute_bound": 12,
    "communication_bound": 14,
    "host_bound": 14,
    "healthy": 12,
    "quick": 16,
}
EXPECTED = {
    "worked_example": "input",
    "quick": "input",
    "compute_bound": "compute",
    "communication_bound": "communication",
    "host_bound": "host",
    "healthy": "healthy",
}


def few_steps(name: str) -> steptime.Config:
    return dataclasses.replace(steptime.preset(name), steps=FEW[name])


@pytest.fixture(scope="module")
def worked(tmp_path_factory):
    return steptime.measure(
        few_steps("worked_example"), out=tmp_path_factory.mktemp("worked") / "run", timeout_s=300
    )


def test_the_worked_example_is_found_to_be_input_bound(worked):
    verdict = steptime.diagnose(worked)
    assert (verdict.cause, verdict.owner) == ("input", "storage/data")
    assert worked.summary()["data_frac"] > 0.4


def test_phases_sum_to_the_step_in_every_record(worked):
    records = worked.records
    assert len(records) == FEW["worked_example"]
    assert (records[list(PHASES)].sum(axis=1) - records["step_s"]).abs().max() < 1e-6
    assert (records[list(PHASES)] >= 0).all().all()
    assert list(records["warmup"]) == [True] * 4 + [False] * (len(records) - 4)


def test_the_data_wait_agrees_with_the_loaders_own_clock(worked):
    """One worker sets the pace, so the step is the seconds that it spent on a batch; its clock is not the timer's."""
    steady = worked.records.query("not warmup")
    device_s = (steady["step_s"] - steady["data_s"]).mean()
    expected_wait_s = steady["load_wall_s"].mean() - device_s
    assert abs(steady["data_s"].mean() - expected_wait_s) < 0.05 * steady["step_s"].mean()


def test_the_loader_did_the_work_it_was_asked_for(worked):
    config, steady = worked.config, worked.records.query("not warmup")
    asked_s = config.batch_size * config.input_cost_s
    assert steady["load_cpu_s"].mean() == pytest.approx(asked_s, rel=0.1)
    assert (steady["bytes"] > 8 * 20_000).all()


def test_the_run_directory_tells_where_and_what(worked):
    run = mlsyslab.open_run(worked.path)
    assert run.status["state"] == "done"
    assert run.truth[0]["cause"] == "input"
    assert run.environment["probe"]["matmul_flops_per_s"] > 0
    assert run.environment["limits"]["usable_cores"] > 0
    assert run.origin == "recorded"
    assert steptime.diagnose(run).cause == "input"


def test_telemetry_saw_the_loader_worker_and_not_the_launcher(worked):
    samples = worked.telemetry
    assert (samples["workers"].dropna() == 1).any()
    assert samples["worker_cpu_frac"].max() > samples["rank_cpu_frac"].median()


def test_the_figures_title_is_the_verdict_and_pacing_is_named(worked):
    figure = steptime.plot(worked, steptime.predict(worked.config))
    title = figure.get_suptitle()
    assert title.startswith("Input-bound")
    assert "paced compute" in title
    assert "data wait" in figure.description


@pytest.mark.parametrize("name", ["quick", "compute_bound", "communication_bound", "host_bound", "healthy"])
def test_a_preset_is_diagnosed_as_its_name_says_or_not_at_all(name, tmp_path):
    run = steptime.measure(few_steps(name), out=tmp_path / "run", timeout_s=300)
    verdict = steptime.diagnose(run)
    assert verdict.cause in (EXPECTED[name], "unknown"), verdict.reason


def test_a_sweep_over_ranks_measures_each_world_and_shows_that_the_step_grows(tmp_path):
    config = dataclasses.replace(steptime.preset("scaling"), steps=10, scaling=(1, 2))
    run = steptime.measure(config, out=tmp_path / "run", timeout_s=300)
    assert sorted(run.records.groupby(["world", "rank"]).size().to_dict().items()) == [
        ((1, 0), 10),
        ((2, 0), 10),
        ((2, 1), 10),
    ]
    assert steptime.diagnose(run).cause in ("communication", "unknown")


def test_every_rank_sees_other_samples_and_one_bucket_hides_nothing(tmp_path):
    config = dataclasses.replace(few_steps("communication_bound"), overlap=False, steps=8)
    run = steptime.measure(config, out=tmp_path / "run", timeout_s=300)
    assert run.records["sync_s"].mean() > 0
    assert set(run.records["rank"]) == {0, 1}


@pytest.mark.parametrize(
    "changes", [{"workers": 0}, {"cache": "memory"}, {"storage_mb_per_s": 2.0}, {"pinned": True}]
)
def test_the_other_ways_to_load_run_and_leave_complete_records(changes, tmp_path):
    config = steptime.Config(steps=8, warmup=3, batch_size=2, compute_s=0.02, width=32, paced=True, **changes)
    run = steptime.measure(config, out=tmp_path / "run", timeout_s=300)
    assert len(run.records) == 8
    if "storage_mb_per_s" in changes:
        verdict = steptime.diagnose(run)
        assert (verdict.cause, verdict.kind) == ("input", "storage")


def test_a_cache_mends_the_input_and_the_promise_holds_in_direction(tmp_path):
    config = steptime.Config(steps=14, batch_size=4, input_cost_s=0.03, compute_s=0.03, width=32, paced=True)
    before = steptime.measure(config, out=tmp_path / "before", timeout_s=300)
    cache = next(a for a in steptime.diagnose(before).actions if a.name == "cache")
    done = steptime.mitigate(before, cache, out=tmp_path / "after", timeout_s=300)
    assert done.came_frac > 0.5 * done.promised.expected
    assert done.after.summary()["data_s"] < 0.5 * before.summary()["data_s"]
    assert "promised" in str(done)


def test_records_arrive_while_the_run_goes_on_and_stop_keeps_them(tmp_path):
    config = dataclasses.replace(few_steps("worked_example"), steps=2000)
    run = steptime.start(config, out=tmp_path / "run")
    until = time.monotonic() + 120
    while len(run.records) < 3 and time.monotonic() < until:
        time.sleep(0.05)
    assert 0 < run.progress < 1
    run.stop()
    run.wait(30)
    assert run.status["state"] == "stopped"
    kept = mlsyslab.open_run(tmp_path / "run")
    assert len(kept.records) >= 3


def test_a_killed_rank_ends_the_run_with_its_name_and_keeps_the_records(tmp_path):
    run = steptime.start(dataclasses.replace(few_steps("quick"), steps=2000), out=tmp_path / "run")
    until = time.monotonic() + 120
    while len(run.records) < 8 and time.monotonic() < until:
        time.sleep(0.05)
    header = next(note for note in run.notes if note.get("kind") == "header" and note["rank"] == 1)
    os.kill(header["pid"], signal.SIGKILL)
    with pytest.raises(RunError, match="rank 1 was killed by SIGKILL"):
        run.wait(30)
    assert len(mlsyslab.open_run(tmp_path / "run").records) >= 8


def test_two_runs_on_one_device_take_turns_and_the_second_knows_behind_whom(tmp_path):
    first = steptime.start(dataclasses.replace(few_steps("worked_example"), steps=2000), out=tmp_path / "a")
    until = time.monotonic() + 120
    while first.records.empty and time.monotonic() < until:
        time.sleep(0.05)
    second = steptime.start(few_steps("quick"), out=tmp_path / "b")
    while second.status.get("position") != 1 and time.monotonic() < until:
        time.sleep(0.05)
    assert second.status["state"] == "queued"
    assert f"process {os.getpid()}" in second.status["holder"]
    assert second.records.empty
    first.stop()
    second.wait(120)
    assert second.status["state"] == "done"


def test_a_gpu_where_there_is_none_is_one_clear_error(tmp_path):
    from mlsyslab import hardware

    if hardware.cuda_usable():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match="can use no NVIDIA GPU here; choose device='auto' or 'cpu'"):
        steptime.start(steptime.Config(device="cuda"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_truncated_jpeg_is_named_with_its_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("MLSYSLAB_CACHE", str(tmp_path / "cache"))
    folder = jpegs.jpeg_files(16)
    broken = jpegs.image_path(folder, 3)
    broken.write_bytes(broken.read_bytes()[:2000])
    config = steptime.Config(steps=8, batch_size=8, images=16, compute_s=0.01, width=32, paced=True)
    environ = {**os.environ}
    code = (
        "import sys; from mlsyslab import steptime; from mlsyslab.contract import RunError\n"
        f"try: steptime.start(steptime.{config!r}, out={str(tmp_path / 'run')!r}, probe=False).wait(120)\n"
        "except RunError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=240
    )
    assert f"{broken} is no complete JPEG" in done.stdout
    assert "delete the file, it is made again" in done.stdout
    broken.unlink()
    assert jpegs.image_path(jpegs.jpeg_files(16), 3).stat().st_size > 10_000


def test_a_disk_that_fills_up_ends_the_run_with_one_sentence_and_keeps_what_was_written(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        config = steptime.Config(
            steps=5000, batch_size=1, compute_s=0.001, width=16, paced=True, cache="memory", images=16
        )
        with pytest.raises(RunError, match="the disk is full: free space"):
            steptime.measure(config, out=small / "run", timeout_s=300)
        assert len(mlsyslab.open_run(small / "run").records) > 10
    finally:
        subprocess.run(["umount", "-l", small], check=True)


def test_a_compute_target_below_the_model_is_refused_with_the_measured_time(tmp_path):
    with pytest.raises(RunError, match="is less than the model alone takes here"):
        steptime.measure(
            steptime.Config(steps=6, warmup=2, width=1024, compute_s=0.001),
            out=tmp_path / "run",
            timeout_s=300,
        )


def test_the_same_worker_runs_under_torchrun(tmp_path):
    torchrun = Path(sys.executable).with_name("torchrun")
    out = tmp_path / "run"
    command = [torchrun, "--nproc-per-node", "2", "--standalone", "-m", "mlsyslab.labs.steptime.worker"]
    options = ["--out", out, "--preset", "quick", "--steps", "6", "--warmup", "2"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    run = mlsyslab.open_run(out)
    assert run.status["state"] == "done"
    assert run.records.groupby("rank").size().to_dict() == {0: 6, 1: 6}


@pytest.mark.parametrize("trouble", ["old run", "no address"])
def test_under_torchrun_trouble_is_one_sentence_and_nothing_is_overwritten(tmp_path, trouble):
    out = tmp_path / "run"
    out.mkdir()
    env = {**os.environ, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    if trouble == "old run":
        (out / "rank-1.jsonl").write_text("old\n")
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    command = [sys.executable, "-m", "mlsyslab.labs.steptime.worker", "--out", out, "--preset", "quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert ("holds an earlier run" if trouble == "old run" else "MASTER_ADDR and MASTER_PORT") in done.stderr
    assert trouble != "old run" or (out / "rank-1.jsonl").read_text() == "old\n"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["worked_example", "compute_bound", "healthy"])
def test_a_preset_on_a_gpu_is_diagnosed_as_its_name_says_or_not_at_all(name, tmp_path):
    from mlsyslab import hardware

    if not hardware.cuda_usable():
        pytest.skip("no CUDA device here")
    run = steptime.measure(steptime.preset(name), out=tmp_path / "run", timeout_s=300)
    assert not run.config.paced
    assert next(note for note in run.notes if note.get("kind") == "header")["device"].startswith("cuda")
    assert steptime.diagnose(run).cause in (EXPECTED[name], "unknown")


def test_the_caller_imports_no_torch(tmp_path):
    code = (
        "import sys; from mlsyslab import steptime\n"
        f"run = steptime.measure(steptime.Config(steps=8, batch_size=2, compute_s=0.01, width=32, paced=True), out={str(tmp_path / 'run')!r})\n"
        "print(steptime.diagnose(run).cause, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.stdout.split()[-1] == "False", done.stderr


def test_presets_of_the_issue_exist():
    assert {"quick", "worked_example", "compute_bound", "communication_bound", "healthy", "scaling"} <= set(
        PRESETS
    )
