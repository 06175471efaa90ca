"""The verdict on runs with known content: each cause where it must be named, where not, and its look-alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from straggler_runs import slow, write_run

from mlsyslab.contract import RunError
from mlsyslab.labs.straggler import CAUSES, diagnose, summary
from mlsyslab.labs.straggler.blame import blame
from mlsyslab.labs.straggler.checks import checks
from mlsyslab.labs.straggler.evidence import facts_of
from mlsyslab.labs.straggler.rules import OWNER, RULES
from mlsyslab.runs import create_run, open_run

SHARED = Path(__file__).resolve().parents[2] / "shared" / "traces" / "straggler_bytedance"
EXTRA = 0.08


@pytest.mark.parametrize(
    ("more", "cause", "kind"),
    [
        ({"data_s": EXTRA, "load_cpu_s": 0.15, "load_wall_s": 0.15}, "input", "heavier samples"),
        ({"data_s": EXTRA, "load_read_s": 0.15, "load_wall_s": 0.15}, "input", "storage"),
        ({"data_s": EXTRA, "load_wall_s": 0.15}, "input", "starved workers"),
        ({"data_s": EXTRA, "load_wall_s": 0.15, "load_read_s": 0.02}, "input", "starved workers"),  # stopped while it reads
        ({"forward_s": EXTRA, "cpu_s": EXTRA}, "compute", "forward"),
        ({"backward_s": EXTRA, "cpu_s": EXTRA}, "compute", "backward"),
        ({"optimizer_s": EXTRA, "cpu_s": EXTRA}, "compute", "optimizer"),
        ({"forward_s": EXTRA / 3, "backward_s": EXTRA / 3, "other_s": EXTRA / 3, "queue_s": EXTRA}, "host", "contention"),
        ({"forward_s": EXTRA / 3, "backward_s": EXTRA / 2, "other_s": EXTRA / 6}, "host", "throttled"),
        ({"other_s": EXTRA, "cpu_s": EXTRA, "gc_s": EXTRA}, "host", "pause"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_cause_is_named_with_its_rank(
    more: dict[str, float], cause: str, kind: str, ranks: int, tmp_path: Path
) -> None:
    verdict = diagnose(write_run(tmp_path / "run", slow(1, **more), ranks=ranks))
    assert (verdict.where, verdict.cause, verdict.kind) == ("rank 1", cause, kind)
    assert verdict.owner == OWNER[cause]
    assert verdict.actions
    assert verdict.gain is not None
    healthy_s = summary(write_run(tmp_path / "healthy", ranks=ranks))["step_s"]
    came = 1 - healthy_s / summary(open_run(tmp_path / "run"))["step_s"]
    promised = next(a for a in verdict.actions if a.name == "cordon and replace").gain_frac
    assert promised is not None
    assert came in promised


@pytest.mark.parametrize(
    ("more", "cause", "kind"),
    [
        ({"forward_s": 0.030, "backward_s": 0.060}, "host", "throttled"),  # both twice as long
        ({"forward_s": 0.005, "backward_s": 0.080}, "compute", "backward"),
        ({"forward_s": 0.080, "backward_s": 0.005}, "compute", "forward"),
        ({"data_s": EXTRA}, "input", "starved workers"),
    ],
)
def test_on_a_gpu_a_slower_device_is_told_by_phases_that_are_longer_alike(
    more: dict[str, float], cause: str, kind: str, tmp_path: Path
) -> None:
    verdict = diagnose(write_run(tmp_path / "run", slow(1, **more), device_clock=True))
    assert (verdict.where, verdict.cause, verdict.kind) == ("rank 1", cause, kind)


def test_the_worked_example_is_the_input_path_and_not_the_model(tmp_path: Path) -> None:
    """180 ms on most ranks; 420 ms on one, of which 250 ms wait for input."""
    base = {"forward_s": 0.024, "backward_s": 0.048}
    run = write_run(
        tmp_path / "run",
        lambda rank, _: {**base, **({"data_s": 0.246, "load_cpu_s": 0.4, "load_wall_s": 0.4} if rank == 2 else {})},
    )  # fmt: skip
    verdict, figures = diagnose(run), summary(run)
    assert str(verdict) == "input (heavier samples); where: rank 2; acts first: storage/data"
    assert figures["own_s"] == pytest.approx(0.180, rel=0.05)
    assert figures["slow_own_s"] == pytest.approx(0.425, rel=0.05)


def test_backward_looks_alike_on_all_ranks_and_is_found(tmp_path: Path) -> None:
    """traceml#252: 200 ms of extra work in one of four ranks' backward."""
    run = write_run(tmp_path / "run", slow(2, backward_s=0.2, cpu_s=0.2))
    frame = run.records[~run.records["warmup"]]
    alike = (frame["backward_s"] + frame["sync_s"]).groupby(frame["rank"]).mean()
    assert alike.max() < 1.03 * alike.min()
    verdict = diagnose(run)
    assert (verdict.where, verdict.cause, verdict.kind) == ("rank 2", "compute", "backward")


def test_two_causes_that_share_the_excess_are_unknown_with_both_and_the_separating_check(
    tmp_path: Path,
) -> None:
    run = write_run(
        tmp_path / "run", slow(1, data_s=EXTRA / 2, load_wall_s=0.1, forward_s=EXTRA / 2, cpu_s=EXTRA / 2)
    )
    verdict = diagnose(run)
    assert (verdict.cause, verdict.where) == ("unknown", "rank 1")
    assert "data loader 5" in verdict.reason
    assert "the rank's own work 5" in verdict.reason or "the rank's own work 4" in verdict.reason
    assert "to separate them" in verdict.reason


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_healthy_job_is_healthy(ranks: int, tmp_path: Path) -> None:
    for seed in range(5):
        verdict = diagnose(write_run(tmp_path / str(seed), ranks=ranks, seed=seed))
        assert (verdict.cause, verdict.where, verdict.owner) == ("healthy", None, "nobody")


def test_rotating_imbalance_names_nobody_and_says_what_it_follows(tmp_path: Path) -> None:
    turns = np.random.default_rng(0).integers(0, 4, 26)
    run = write_run(
        tmp_path / "run",
        lambda rank, step: (
            {"forward_s": 0.03, "backward_s": 0.06, "length": 0.8} if turns[step] == rank else {}
        ),
    )
    verdict = diagnose(run)
    assert (verdict.cause, verdict.kind, verdict.where) == ("imbalance", "sample length", None)
    assert "cordon nobody" in verdict.actions[0].says


def test_a_stage_is_no_machine(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run",
        lambda rank, _: {"forward_s": 0.06} if rank in (3, 7) else {},
        ranks=8,
        stage=lambda r: r % 4,
    )
    verdict = diagnose(run)
    assert (verdict.cause, verdict.where, verdict.owner) == ("stage", None, "model code")


def test_what_all_ranks_share_names_nobody(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", lambda rank, step: {"forward_s": 0.08} if step >= 14 else {})
    verdict = diagnose(run)
    assert (verdict.cause, verdict.where) == ("shared", None)
    assert "step 14" in verdict.reason or "step 15" in verdict.reason


def test_one_step_is_not_enough(tmp_path: Path) -> None:
    verdict = diagnose(write_run(tmp_path / "run", slow(1, forward_s=1.0), steps=3, warmup=2))
    assert (verdict.cause, verdict.where) == ("unknown", None)
    assert "accuses nobody" in verdict.reason


@pytest.mark.parametrize(("extra", "where"), [(0.02, None), (0.08, "rank 1")])
def test_on_an_overloaded_host_only_a_clear_lead_names_a_rank(
    extra: float, where: str | None, tmp_path: Path
) -> None:
    def more(rank: int, step: int) -> dict[str, Any]:
        return {"overloaded": True, **({"backward_s": extra, "cpu_s": extra} if rank == 1 else {})}

    verdict = diagnose(write_run(tmp_path / "run", more))
    assert verdict.where == where
    assert where or ("overloaded" in verdict.reason and verdict.cause == "unknown")


def test_a_job_that_crowds_its_own_cores_is_not_in_doubt(tmp_path: Path) -> None:
    for others, cause in ((0.1, "healthy"), (4.0, "unknown")):
        run = write_run(
            tmp_path / cause,
            lambda rank, step: {"overloaded": True},
            telemetry=lambda rank, n=others: {"other_cpu_frac": n},
        )
        assert diagnose(run).cause == cause


@pytest.mark.parametrize(("extra", "where"), [(0.02, None), (0.08, "rank 1")])
def test_a_little_contention_is_the_hosts_and_names_nobody(
    extra: float, where: str | None, tmp_path: Path
) -> None:
    verdict = diagnose(write_run(tmp_path / "run", slow(1, forward_s=extra, queue_s=extra)))
    assert verdict.where == where
    assert where or "waiting for a core" in verdict.reason


def links(of: dict[int, float], healthy_s: float = 0.001) -> Any:
    return lambda rank: [{"kind": "link", "world": 4, "send_s": of.get(rank, healthy_s)}]


def test_a_slow_link_is_told_by_the_link_check(tmp_path: Path) -> None:
    """4 MB at 20 ms a 2 MB: 40 ms more in every exchange, for everybody alike."""
    slower = lambda rank, step: {"sync_s": 0.040}  # noqa: E731 - a fault in one line
    verdict = diagnose(write_run(tmp_path / "run", slower, notes=links({3: 0.021})))
    assert (verdict.cause, verdict.where, verdict.owner) == ("communication", "rank 3", "networking")


def test_a_link_that_is_slow_only_in_the_check_is_no_verdict(tmp_path: Path) -> None:
    assert diagnose(write_run(tmp_path / "run", notes=links({3: 0.021}))).cause == "healthy"


def turns(*slow: int | None) -> Any:
    """Link checks, one for each entry: the rank whose link is slow then."""
    return lambda rank: [
        {"kind": "link", "world": 4, "turn": turn, "send_s": 0.021 if rank == who else 0.001}
        for turn, who in enumerate(slow)
    ]


def test_links_that_are_slow_in_turn_accuse_nobody(tmp_path: Path) -> None:
    slower = lambda rank, step: {"sync_s": 0.040}  # noqa: E731 - a fault in one line
    verdict = diagnose(write_run(tmp_path / "run", slower, notes=turns(3, 0, 2, 0, 1, 3, 2, 1)))
    assert (verdict.cause, verdict.where, verdict.owner) == ("imbalance", None, "networking")
    assert "ranks 0, 1, 2, 3 in turn" in verdict.reason


def test_a_link_that_is_slow_now_and_then_is_named(tmp_path: Path) -> None:
    """Slow in 3 of 8 checks, so the mean exchange is 15 ms longer."""
    slower = lambda rank, step: {"sync_s": 0.040 if step % 8 < 3 else 0.0}  # noqa: E731 - a fault in one line
    verdict = diagnose(
        write_run(tmp_path / "run", slower, notes=turns(None, 3, 3, None, None, 3, None, None))
    )
    assert (verdict.cause, verdict.where) == ("communication", "rank 3")


def test_links_that_are_slow_all_at_once_are_a_cause_that_all_share(tmp_path: Path) -> None:
    slower = lambda rank, step: {"sync_s": 0.060 if step >= 13 else 0.0}  # noqa: E731 - a fault in one line
    verdict = diagnose(write_run(tmp_path / "run", slower, notes=links({}, healthy_s=0.030)))
    assert (verdict.cause, verdict.where) == ("shared", None)
    assert "from step 13 on" in verdict.reason


def test_a_slow_link_counts_more_than_a_rotation_that_costs_less(tmp_path: Path) -> None:
    def slower(rank: int, step: int) -> dict[str, float]:
        return {"sync_s": 0.040, "forward_s": 0.012 if rank == step % 4 else 0.0}

    assert diagnose(write_run(tmp_path / "run", slower, notes=links({3: 0.021}))).where == "rank 3"
    assert diagnose(write_run(tmp_path / "rotation", slower)).cause == "imbalance"


@pytest.mark.parametrize(("waited_s", "where"), [(2.1, "rank 2"), (0.7, "rank 2"), (0.3, None)])
def test_a_late_start_is_said_and_costs_nothing_later(
    waited_s: float, where: str | None, tmp_path: Path
) -> None:
    run = write_run(
        tmp_path / "run", notes=lambda rank: [{"kind": "header", "join_s": 0.02 if rank == 2 else waited_s}]
    )
    verdict = diagnose(run)
    assert (verdict.cause, verdict.where) == ("startup" if where else "healthy", where)


@pytest.mark.parametrize(
    ("noise", "others", "cause"), [(0.8, 0.8, "unknown"), (0.8, 0.02, "healthy"), (0.03, 0.8, "healthy")]
)
def test_own_work_that_scatters_beside_busy_others_is_not_called_healthy(
    noise: float, others: float, cause: str, tmp_path: Path
) -> None:
    run = write_run(
        tmp_path / "run",
        noise=noise,
        steps=14,
        ranks=2,
        telemetry=lambda rank: {"other_cpu_frac": 8 * others},
    )
    verdict = diagnose(run)
    assert (verdict.cause, verdict.where) == (cause, None)
    assert cause == "healthy" or "overloaded" in verdict.reason


def test_where_ranks_wait_for_cores_a_start_must_be_later_to_be_late(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run",
        lambda rank, step: {"overloaded": True},
        notes=lambda rank: [{"kind": "header", "join_s": 0.02 if rank == 2 else 0.7}],
    )
    assert diagnose(run).where is None


def test_a_usual_figure_points_at_nobody(tmp_path: Path) -> None:
    """20 retransmitted segments in two seconds are worth a look, one is not."""
    for count, points_at in ((1.0, "nobody, as usual"), (20.0, "communication")):
        run = write_run(
            tmp_path / str(count), telemetry=lambda rank, n=count: {"retransmits": n, "interval_s": 2.0}
        )
        (shown,) = [e for e in diagnose(run).evidence if e.name == "retransmitted segments"]
        assert (shown.value, shown.unit, shown.points_at) == (count / 2, "per s", points_at)


def test_the_neighbour_is_named(tmp_path: Path) -> None:
    noisy = {"neighbours": [{"pid": 9, "name": "encoder", "cpu_frac": 1.9, "cpu": 0}], "steal_frac": 0.0}
    run = write_run(
        tmp_path / "run",
        slow(1, other_s=EXTRA, queue_s=EXTRA),
        telemetry=lambda rank: noisy if rank == 1 else {"neighbours": []},
    )
    assert "encoder (1.9 cores)" in diagnose(run).reason


def test_the_checks_come_in_their_order_and_an_absent_sensor_is_no_zero(tmp_path: Path) -> None:
    evidence = checks(facts_of(write_run(tmp_path / "run", slow(1, data_s=EXTRA))))
    names = [item.name for item in evidence]
    order = ["device utilisation", "excess of data wait", "disk reads", "CPU time stolen by the hypervisor", "excess of run-queue wait",
             "noisiest neighbour", "retransmitted segments", "kernel log"]  # fmt: skip
    places = [names.index(name) for name in order]
    assert places == sorted(places)
    assert {item.name: item.value for item in evidence}["CPU time stolen by the hypervisor"] is None


def test_a_recorded_run_says_so(tmp_path: Path) -> None:
    verdict = diagnose(write_run(tmp_path / "run", slow(1, data_s=EXTRA)))
    assert {item.origin for item in verdict.evidence} == {"recorded"}


def test_a_run_without_records_is_one_clear_error(tmp_path: Path) -> None:
    from mlsyslab.labs.straggler.config import Config

    create_run("straggler", Config(), out=tmp_path / "run", truth=[], expected=1)
    with pytest.raises(RunError, match="no step was recorded"):
        diagnose(open_run(tmp_path / "run"))


def test_each_rule_says_what_it_is_confused_with_and_every_cause_has_an_owner() -> None:
    assert all(rule.checks and rule.why and rule.confused_with and rule.next_check for rule in RULES)
    assert set(OWNER) == set(CAUSES)


@pytest.mark.parametrize(("name", "kind", "who"), [("AR", "rank", (0,)), ("ST", "stage", (3, 7))])
def test_two_production_jobs_of_others_are_judged_right(name: str, kind: str, who: tuple[int, ...]) -> None:
    """ByteDance-Seed/StragglerAnalysis: AR has one slow worker, ST an uneven last stage (columns: dp_rank x stage)."""
    path = SHARED / f"trace-{name}.csv.gz"
    if not path.exists():
        pytest.skip(f"{path.name} lies beside the project only on some machines")
    ops = pd.read_csv(path)
    work = ops[ops["optype"].str.contains("compute")].groupby(["step", "dp_rank", "stage"])["duration"].sum()
    table = work.unstack(["dp_rank", "stage"]).dropna().sort_index(axis=1)
    own = table.to_numpy()
    found = blame(own, own.max(1, keepdims=True) - own, stages=[stage for _, stage in table.columns])
    assert (found.kind, found.ranks) == (kind, who)
