"""The parallelism lab on CUDA: the allocator's figures, NCCL where each rank has a GPU, gloo where ranks share one."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlsyslab import hardware, parallelism
from mlsyslab.labs.parallelism.config import Config, layout_of
from mlsyslab.labs.parallelism.ledger import ledger

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ranks,
    pytest.mark.skipif(not hardware.cuda_usable(), reason="needs a CUDA device that torch can use"),
]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tp", "pp"])
def test_ranks_on_gpus_hold_the_state_that_was_predicted_and_learn(strategy: str, run_dir: Path) -> None:
    config = Config(model="17M", strategy=strategy, ranks=2, batch=8, device="cuda", microbatches=4)
    run = parallelism.measure(config, out=run_dir, timeout_s=180)
    predicted = ledger(config.shape, layout_of(config), fused=True)
    summary = run.summary()
    assert summary["params_bytes"] == pytest.approx(predicted.state["params"], rel=0.03)
    assert summary["optimizer_bytes"] == pytest.approx(predicted.state["optimizer"], rel=0.03)
    losses = run.records.groupby("step")["loss"].mean()
    assert losses.iloc[-1] < losses.iloc[0]


def test_ranks_that_share_a_gpu_say_so_and_no_verdict_is_made_of_their_waits(run_dir: Path) -> None:
    gpus = len(hardware.gpus())
    run = parallelism.measure(
        Config(model="17M", ranks=2 * gpus, batch=8 * gpus, device="cuda"), out=run_dir, timeout_s=180
    )
    assert all(
        note["shared_device"] and note["backend"] == "gloo"
        for note in run.notes
        if note.get("kind") == "header"
    )
    assert parallelism.diagnose(run).cause == "healthy"


def test_the_allocator_refuses_more_than_the_cap_and_the_run_is_a_result(run_dir: Path) -> None:
    run = parallelism.measure(
        Config(model="350M", strategy="ddp", ranks=1, batch=4, memory_cap_mb=3000.0, device="cuda"),
        out=run_dir,
    )
    assert parallelism.diagnose(run).cause == "memory"
