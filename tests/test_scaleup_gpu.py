"""The scale-up clinic on CUDA: virtual ranks equal those on the CPU, processes over NCCL or, where ranks share a GPU, gloo."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from scaleup_runs import small

from mlsyslab import hardware, scaleup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ranks,
    pytest.mark.skipif(not hardware.cuda_usable(), reason="needs a CUDA device that torch can use"),
]


@pytest.mark.parametrize("engine", ["virtual", "processes"])
@pytest.mark.parametrize("cause", ["healthy", "gradient missing", "sum instead of mean", "bf16 reduction"])
def test_causes_are_named_on_a_gpu(cause: str, engine: str, run_dir: Path) -> None:
    config = dataclasses.replace(small(cause, 2), device="cuda", engine=engine)
    run = scaleup.measure(config, out=run_dir, timeout_s=180)
    assert scaleup.diagnose(run).cause == cause


def test_a_control_on_the_gpu_equals_one_on_the_cpu_at_first(tmp_path: Path) -> None:
    norms = []
    for device in ("cpu", "cuda"):
        run = scaleup.measure(
            dataclasses.replace(small("healthy", 2), device=device), out=tmp_path / device, timeout_s=180
        )
        norms.append([row["norm"] for row in run.rows() if row["part"] == "control" and row["step"] < 3])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
