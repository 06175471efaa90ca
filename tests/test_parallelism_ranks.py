"""Every way of splitting, on real ranks: the losses of a single process, the bytes that were predicted, and ends that are no crash."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from parallelism_runs import rows_of

from mlsyslab import RunError, netns, open_run, parallelism
from mlsyslab.labs.parallelism.config import Config, layout_of
from mlsyslab.labs.parallelism.evidence import link_seconds
from mlsyslab.labs.parallelism.ledger import ledger
from mlsyslab.labs.parallelism.schedule import orders
from mlsyslab.labs.parallelism.traffic import traffic
from mlsyslab.runs import Run

pytestmark = pytest.mark.ranks

BASE: dict[str, Any] = {"model": "1M", "batch": 8, "steps": 4, "warmup": 2, "device": "cpu"}
WAYS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp, own gradients": {"bucket_views": False},
    "ddp, checkpointing": {"checkpointing": True},
    "zero1": {},
    "fsdp": {},
    "fsdp, no reshard": {"reshard": False},
    "fsdp, checkpointing": {"checkpointing": True},
    "tp": {},
    "tp, plain": {"tp_plan": "plain"},
    "tp, sharded vocabulary": {"tp_plan": "sharded vocabulary"},
    "tp, checkpointing": {"checkpointing": True},
    "pp": {},
    "pp, gpipe": {"schedule": "gpipe"},
    "pp, logits kept": {"keep_logits": True},
    "pp, checkpointing": {"checkpointing": True},
    "fsdp+tp": {},
    "fsdp+tp, sharded vocabulary": {"tp_plan": "sharded vocabulary"},
}
CASES = [
    pytest.param(Config(**BASE, strategy=name.split(",")[0], ranks=ranks, **change), id=f"{name} on {ranks}")
    for ranks in (2, 4)
    for name, change in WAYS.items()
    if ranks == 4 or not name.startswith("fsdp+tp")
]
OTHERS = [
    pytest.param(
        Config(**BASE, strategy=strategy, ranks=ranks, **change), id=f"{strategy} {change} on {ranks}"
    )
    for strategy, ranks, change in (
        *((strategy, 2, {"precision": "mixed"}) for strategy in ("ddp", "fsdp", "tp", "pp")),
        ("fsdp+tp", 4, {"precision": "mixed"}),
        ("fsdp", 2, {"optimizer": "momentum"}),
        ("ddp", 2, {"optimizer": "sgd"}),
        ("pp", 2, {"stage_split": (3, 1)}),
    )
]


def losses(config: Config) -> list[float]:
    """The loss of each step, the same on every rank."""
    by_rank = [
        [row["loss"] for row in rows_of(config) if row["kind"] == "step" and row["rank"] == rank]
        for rank in range(config.ranks)
    ]
    assert all(one == pytest.approx(by_rank[0], abs=1e-6) for one in by_rank)
    return by_rank[0]


def alone(config: Config, **change: Any) -> Config:
    """The same training in one process."""
    plain = {
        "strategy": "ddp",
        "ranks": 1,
        "stage_split": (),
        "bucket_views": True,
        "checkpointing": False,
        "keep_logits": False,
    }
    return dataclasses.replace(
        config, **{**plain, "reshard": True, "schedule": "1f1b", "tp_plan": "shared input", **change}
    )


def last(config: Config, kind: str, rank: int) -> dict[str, Any]:
    """A rank's note of the last step."""
    return next(
        row
        for row in rows_of(config)
        if row["kind"] == kind and row["rank"] == rank and row["step"] == config.steps - 1
    )


@pytest.mark.parametrize("config", CASES)
def test_it_gives_the_losses_of_a_single_process(config: Config) -> None:
    assert losses(config) == pytest.approx(losses(alone(config)), rel=1e-5)
    assert losses(config)[0] > losses(config)[1]  # and it learns


@pytest.mark.parametrize("config", [case for case in OTHERS if "mixed" in str(case.id)])
def test_mixed_precision_stays_near_the_single_process(config: Config) -> None:
    whole = losses(alone(config, precision="fp32"))
    assert losses(config) == pytest.approx(whole, rel=1e-3)
    assert losses(config) != whole


@pytest.mark.parametrize("config", [case for case in OTHERS if "mixed" not in str(case.id)])
def test_other_optimizers_and_uneven_stages_change_nothing(config: Config) -> None:
    assert losses(config) == pytest.approx(losses(alone(config)), rel=1e-5)


@pytest.mark.parametrize("config", [*CASES, *OTHERS])
def test_collectives_are_as_predicted_count_for_count_and_byte_for_byte(config: Config) -> None:
    for rank in range(config.ranks):
        counted = {
            (row["axis"], row["kind"]): (row["count"], row["bytes"])
            for row in last(config, "traffic", rank)["collectives"]
        }
        stage = rank if config.strategy == "pp" else 0
        predicted = traffic(config.shape, layout_of(config), stage=stage)
        assert counted == {(one.axis, one.kind): (one.count, one.bytes) for one in predicted}


@pytest.mark.parametrize("config", [*CASES, *OTHERS])
def test_memory_is_as_predicted_state_within_3_percent_and_the_peak_within_10(config: Config) -> None:
    """Of FSDP the fullest rank's peak: when a gather ends decides what is live together, and a rank may be lucky."""
    peaks = []
    for rank in range(config.ranks):
        moments = last(config, "ledger", rank)["moments"]
        predicted = ledger(config.shape, layout_of(config), stage=rank if config.strategy == "pp" else 0)
        for role, size in predicted.state.items():
            assert moments["optimizer"][role] == pytest.approx(size, rel=0.03, abs=2000), role
        peaks.append((moments["peak"]["total"], predicted.peak_bytes))
    for measured, expected in [max(peaks)] if config.strategy == "fsdp" else peaks:
        assert measured == pytest.approx(expected, rel=0.10)


def test_state_is_an_nth_under_fsdp() -> None:
    whole = sum(
        last(alone(Config(**BASE)), "ledger", 0)["moments"]["optimizer"][role]
        for role in ("params", "grads", "optimizer")
    )
    for ranks in (2, 4):
        config = Config(**BASE, strategy="fsdp", ranks=ranks)
        mine = sum(
            last(config, "ledger", 0)["moments"]["optimizer"][role]
            for role in ("params", "grads", "optimizer")
        )
        assert mine == pytest.approx(whole / ranks, rel=0.01)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "tp", "pp", "fsdp+tp"])
def test_clipping_is_by_the_norm_of_the_whole_gradient(strategy: str) -> None:
    config = Config(
        **BASE,
        strategy=strategy,
        ranks=4 if strategy == "fsdp+tp" else 2,
        optimizer="sgd",
        lr=0.3,
        clip_norm=0.5,
    )
    clipped = losses(alone(config))
    assert losses(config) == pytest.approx(clipped, rel=1e-5)
    assert clipped != pytest.approx(losses(alone(config, clip_norm=0.0)), rel=1e-4)  # the bound is felt


def test_a_pipeline_whose_stages_clip_for_themselves_trains_otherwise() -> None:
    config = Config(**BASE, strategy="pp", ranks=2, optimizer="sgd", lr=0.3, clip_norm=0.5, clip="local")
    assert losses(config)[:1] == pytest.approx(losses(alone(config, clip="global"))[:1], rel=1e-6)
    assert losses(config)[-1] != pytest.approx(losses(alone(config, clip="global"))[-1], rel=1e-4)


@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 2), ("1f1b", 4), ("gpipe", 2), ("gpipe", 4)])
def test_torch_computes_the_microbatches_in_the_order_of_our_schedules(schedule: str, ranks: int) -> None:
    config = Config(**BASE, strategy="pp", ranks=ranks, schedule=schedule, microbatches=4)
    ops = [row for row in rows_of(config) if row["kind"] == "op"]
    for stage, order in enumerate(orders(schedule, ranks, 4)):
        mine = sorted((op for op in ops if op["stage"] == stage), key=lambda op: op["begin_s"])
        assert tuple((op["op"], op["microbatch"]) for op in mine) == order
        assert all(op["end_s"] > op["begin_s"] for op in mine)


@pytest.fixture(scope="module")
def starved(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that was refused memory."""
    config = dataclasses.replace(parallelism.preset("too_big"), device="cpu")
    return parallelism.measure(config, out=tmp_path_factory.mktemp("oom") / "run")


class TestMemoryThatRunsOut:
    """The kernel refuses a rank more memory: a result, with its cause, and no crash."""

    def test_the_run_is_done_and_says_who_wanted_what(self, starved: Run) -> None:
        assert starved.status["state"] == "done"
        note = next(note for note in starved.notes if note.get("kind") == "oom")
        assert note["wanted_bytes"] > 0
        assert note["live"]["total"] + note["wanted_bytes"] <= note["cap_bytes"] * 1.1
        assert note["live"]["params"] == pytest.approx(4 * starved.config.shape.params, rel=0.01)

    def test_the_verdict_names_the_term_and_the_next_simplest_split(self, starved: Run) -> None:
        verdict = parallelism.diagnose(starved)
        assert (verdict.cause, verdict.kind, verdict.owner) == ("memory", "optimizer", "model code")
        assert verdict.actions[0].change["strategy"] == "fsdp"

    def test_its_remedy_fits_and_holds_what_was_promised(self, starved: Run, tmp_path: Path) -> None:
        fix = parallelism.mitigate(starved, out=tmp_path / "after")
        assert fix.after.config.strategy == "fsdp"
        assert not fix.after.summary()["out_of_memory"]
        assert fix.after.summary()["peak_bytes"] < fix.after.config.memory_cap_mb * 1e6
        assert fix.came_frac in fix.promised

    def test_the_parents_limit_is_untouched(self, starved: Run) -> None:
        import resource

        assert resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY


def test_a_killed_rank_ends_the_run_with_its_name_and_what_it_wrote_stays(run_dir: Path) -> None:
    run = parallelism.start(
        Config(**{**BASE, "steps": 10_000}, strategy="fsdp", ranks=2), out=run_dir, probe=False
    )
    until = time.monotonic() + 60
    while len(run.records) < 4 and time.monotonic() < until:
        time.sleep(0.05)
    pid = next(note["pid"] for note in run.notes if note.get("kind") == "header" and note["rank"] == 1)
    began = time.monotonic()
    threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
    with pytest.raises(RunError, match="rank 1"):
        run.wait(60)
    assert time.monotonic() - began < 20
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert len(open_run(run_dir).records) >= 4


def test_stop_ends_a_run_and_leaves_it_readable(run_dir: Path) -> None:
    run = parallelism.start(
        Config(**{**BASE, "steps": 10_000}, strategy="tp", ranks=2), out=run_dir, probe=False
    )
    until = time.monotonic() + 60
    while len(run.records) < 8 and time.monotonic() < until:
        time.sleep(0.05)
    run.stop()
    run.wait(30)
    assert run.status["state"] == "stopped"
    assert parallelism.diagnose(open_run(run_dir)).cause in ("healthy", "communication", "unknown")


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not (shutil.which("tc") and shutil.which("ip")),
    reason="nodes are network namespaces: root on Linux, with iproute2",
)
class TestNodes:
    """Two groups of ranks with a slow link between them."""

    CONFIG = Config(
        **{**BASE, "steps": 3, "batch": 16}, strategy="fsdp+tp", ranks=4, tp=2, nodes=2, link_mb_per_s=20.0
    )

    def steps(self, config: Config) -> list[float]:
        return [row["step_s"] for row in rows_of(config) if row["kind"] == "step" and row["rank"] == 0]

    def test_the_losses_are_the_same_whichever_axis_crosses(self) -> None:
        for across in (False, True):
            config = dataclasses.replace(self.CONFIG, tp_across=across)
            assert losses(config) == pytest.approx(losses(alone(config, nodes=1, tp_across=False)), rel=1e-5)
            assert {row["link"] for row in rows_of(config) if row["kind"] == "header"} == {netns.Link.how}

    def test_the_axes_are_the_neighbours_or_not(self) -> None:
        for across, tp, dp in ((False, [0, 1], [0, 2]), (True, [0, 2], [0, 1])):
            config = dataclasses.replace(self.CONFIG, tp_across=across)
            header = next(row for row in rows_of(config) if row["kind"] == "header" and row["rank"] == 0)
            assert header["axes"] == {"tp": tp, "dp": dp}

    def test_what_crosses_waits_for_the_link(self) -> None:
        """A step is never shorter than the bytes of the crossing axis over the rate of the link."""
        for across in (False, True):
            config = dataclasses.replace(self.CONFIG, tp_across=across)
            moved = traffic(config.shape, layout_of(config))
            least_s = sum(link_seconds(config, moved, "gloo").values())
            assert least_s > 0.1
            assert min(self.steps(config)) > 0.8 * least_s
