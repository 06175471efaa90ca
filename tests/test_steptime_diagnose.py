"""Each rule has a run where it fires, one where it must not, and its look-alike."""

from __future__ import annotations

import pytest
from steptime_runs import add_world, config_for, write_run

from mlsyslab import open_run, steptime
from mlsyslab.contract import RunError
from mlsyslab.labs.steptime.breakdown import breakdown
from mlsyslab.labs.steptime.evidence import change_point
from mlsyslab.records import PHASES

COMPUTE = {"forward_s": 0.03, "backward_s": 0.06, "optimizer_s": 0.005}
USEFUL = {"matmul_flops": 0.6 * 60e9 * 0.09}
POOR = {"matmul_flops": 0.05 * 60e9 * 0.09}


def verdict(path, phases, **more):
    return steptime.diagnose(write_run(path / "run", phases, **more))


# ---- input
def test_the_worked_example_is_input_bound(tmp_path):
    found = verdict(tmp_path, {"data_s": 0.180, "forward_s": 0.04, "backward_s": 0.08})
    assert (found.cause, found.owner, found.where) == ("input", "storage/data", "every rank")
    assert str(found).startswith("input")


def test_a_wait_below_a_tenth_of_the_step_is_not_input(tmp_path):
    assert verdict(tmp_path, {"data_s": 0.006, **COMPUTE}, header=USEFUL).cause == "healthy"


def test_low_device_use_without_data_wait_is_launch_bound_not_input(tmp_path):
    found = verdict(
        tmp_path,
        {"data_s": 0.0002, **COMPUTE},
        telemetry={"gpu_util_frac": 0.07},
        header={"device": "cuda:0", **POOR},
        drained=True,
    )
    assert (found.cause, found.kind, found.owner) == ("host", "launch-bound", "model code")


def test_a_busy_device_with_the_same_records_is_not_launch_bound(tmp_path):
    found = verdict(
        tmp_path,
        {"data_s": 0.0002, **COMPUTE},
        telemetry={"gpu_util_frac": 0.97},
        header={"device": "cuda:0", **POOR},
        drained=True,
    )
    assert found.cause == "compute"


def test_bursts_count_by_their_mean_though_the_median_step_does_not_wait(tmp_path):
    found = verdict(
        tmp_path, lambda rank, step: {"data_s": 0.4 if step % 4 == 0 else 0.0, **COMPUTE}, steps=26
    )
    assert found.cause == "input"
    evidence = {e.name: e.value for e in found.findings[0].evidence}
    assert evidence["data wait, median"] < 0.01
    assert evidence["data wait, 95th percentile"] > 0.3
    assert 0.2 < evidence["steps that waited"] < 0.3


@pytest.mark.parametrize(
    ("kind", "telemetry", "fields", "changes"),
    [
        (
            "per-sample CPU cost",
            {"worker_cpu_frac": 0.98, "busy_cores": 7.8},
            {"load_read_s": 0.001, "load_wall_s": 0.2},
            {},
        ),
        (
            "too few workers",
            {"worker_cpu_frac": 0.98, "busy_cores": 1.2},
            {"load_read_s": 0.001, "load_wall_s": 0.2},
            {},
        ),
        (
            "storage",
            {"worker_cpu_frac": 0.05, "busy_cores": 0.3},
            {"load_read_s": 0.18, "load_wall_s": 0.2},
            {},
        ),
        ("storage", {"worker_cpu_frac": 0.05, "busy_cores": 0.3}, {}, {}),
        ("no prefetching", {}, {}, {"workers": 0}),
    ],
)
def test_the_loaders_side_tells_the_kind(tmp_path, kind, telemetry, fields, changes):
    found = verdict(
        tmp_path, {"data_s": 0.18, **COMPUTE}, telemetry=telemetry, extra=fields, config=config_for(**changes)
    )
    assert (found.cause, found.kind) == ("input", kind)


def test_a_slow_copy_is_input_of_the_kind_transfer(tmp_path):
    found = verdict(tmp_path, {"h2d_s": 0.08, **COMPUTE})
    assert (found.cause, found.kind, found.actions[0].change) == ("input", "transfer", {"pinned": True})


def test_a_starved_rank_is_named_and_its_victims_are_not(tmp_path):
    def phases(rank: int, step: int) -> dict[str, float]:
        return (
            {**COMPUTE, "data_s": 0.2, "sync_s": 0.005}
            if rank == 1
            else {**COMPUTE, "data_s": 0.0, "sync_s": 0.205}
        )

    found = verdict(tmp_path, phases, ranks=3)
    assert (found.cause, found.where) == ("input", "rank 1")


# ---- communication
def test_exposed_communication_on_every_rank_is_communication(tmp_path):
    found = verdict(tmp_path, {**COMPUTE, "sync_s": 0.1}, ranks=2)
    assert (found.cause, found.owner) == ("communication", "networking")


def test_one_rank_does_not_communicate(tmp_path):
    assert verdict(tmp_path, COMPUTE, header=USEFUL).cause == "healthy"


def test_waiting_for_a_slow_rank_is_not_communication(tmp_path):
    def phases(rank: int, step: int) -> dict[str, float]:
        slow = rank == 0
        return {"forward_s": 0.03, "backward_s": 0.16 if slow else 0.06, "sync_s": 0.002 if slow else 0.102}

    found = verdict(tmp_path, phases, ranks=2, header=POOR)
    assert found.cause == "unknown"
    assert "own work of the ranks" in found.reason


def test_waits_that_rotate_over_the_ranks_accuse_nobody(tmp_path):
    def phases(rank: int, step: int) -> dict[str, float]:
        late = rank == step % 2
        return {"forward_s": 0.03, "backward_s": 0.11 if late else 0.06, "sync_s": 0.05 if late else 0.10}

    found = verdict(tmp_path, phases, ranks=2)
    assert found.cause == "communication"
    assert "waiting for a rank" not in [f.rule for f in found.findings]


def test_scaling_evidence_shows_the_step_at_each_world_size(tmp_path):
    write_run(tmp_path / "run", COMPUTE, ranks=1)
    for world, sync in ((2, 0.05), (4, 0.15)):
        add_world(tmp_path / "run", {**COMPUTE, "sync_s": sync}, ranks=world)
    found = steptime.diagnose(open_run(tmp_path / "run"))
    assert found.cause == "communication"
    steps = [e.value for e in found.findings[0].evidence if e.name.startswith("step with")]
    assert len(steps) == 3
    assert steps == sorted(steps)


# ---- host, compute, healthy
def test_python_between_the_phases_is_host(tmp_path):
    found = verdict(tmp_path, {**COMPUTE, "other_s": 0.08})
    assert (found.cause, found.kind) == ("host", "Python")


def test_garbage_collection_is_named(tmp_path):
    found = verdict(tmp_path, {**COMPUTE, "other_s": 0.08}, extra={"gc_s": 0.07})
    assert (found.cause, found.kind) == ("host", "GC")


def test_a_busy_device_that_does_little_is_compute_and_one_that_does_much_is_healthy(tmp_path):
    assert verdict(tmp_path / "a", COMPUTE, header=POOR).cause == "compute"
    assert verdict(tmp_path / "b", COMPUTE, header=USEFUL).cause == "healthy"


def test_a_busy_neighbour_does_not_turn_healthy_into_compute(tmp_path):
    """Wall time triples, CPU time does not: efficiency is counted on CPU time."""
    run = write_run(tmp_path / "run", {k: 3 * v for k, v in COMPUTE.items()}, header=USEFUL)
    for row in (rows := run.records.to_dict("records")):
        row["cpu_s"] /= 3
    run._steps = [{"kind": "step", **row} for row in rows]
    assert steptime.diagnose(run).cause == "healthy"


# ---- abstentions and errors
def test_a_rank_that_is_late_in_turn_is_no_healthy_job(tmp_path):
    def phases(rank: int, step: int) -> dict[str, float]:
        late = rank == step % 4
        return {"forward_s": 0.03, "backward_s": 0.16 if late else 0.06, "sync_s": 0.002 if late else 0.1}

    found = verdict(tmp_path, phases, ranks=4, header=USEFUL)
    assert found.cause == "unknown"
    assert "changes with step and rank" in found.reason


def test_without_a_measured_roof_nobody_is_called_healthy_or_wasteful(tmp_path):
    found = verdict(tmp_path, COMPUTE)
    assert found.cause == "unknown"
    assert "was not measured" in found.reason


def test_figures_of_a_recorded_run_say_recorded(tmp_path):
    found = verdict(tmp_path, {"data_s": 0.18, **COMPUTE})
    assert {e.origin for f in found.findings for e in f.evidence} == {"recorded"}
    assert {e.origin for e in found.evidence} == {"recorded"}


def test_telemetry_of_warm_up_is_not_evidence_of_the_steady_steps(tmp_path):
    run = write_run(tmp_path / "run", {"data_s": 0.18, **COMPUTE})
    run._steps = [{**row, "time_s": 1000.0 + row["step"]} for row in run._steps]
    samples = [(990.0, 0.0), (1001.0, 0.0), (1010.0, 0.9), (1015.0, 0.9), (1100.0, 0.0)]
    run._telemetry = [
        {"time_s": at, "interval_s": 0.5, "rank": 0, "worker_cpu_frac": cpu} for at, cpu in samples
    ]
    shown = {e.name: e.value for e in steptime.diagnose(run).evidence}
    assert shown["cores used by a loader worker"] == pytest.approx(0.9)


def test_memory_and_its_growth_are_summed_over_ranks_not_mixed(tmp_path):
    run = write_run(tmp_path / "run", {"data_s": 0.18, **COMPUTE}, ranks=2)
    run._telemetry = [
        {"rank": rank, "worker_private_bytes": [float(size)]}
        for rank, sizes in ((0, (10, 12)), (1, (50, 51)))
        for size in sizes
    ]
    shown = {e.name: e.value for e in steptime.diagnose(run).evidence}
    assert shown["memory of the loader workers"] == 63
    assert shown["growth of that memory"] == 3


def test_advice_without_a_knob_promises_nothing(tmp_path):
    found = verdict(tmp_path, {**COMPUTE, "other_s": 0.08}, extra={"gc_s": 0.07})
    assert found.actions[0].change == {}
    assert found.gain is None


def test_a_launch_bound_job_is_told_to_use_larger_batches(tmp_path):
    found = verdict(
        tmp_path,
        COMPUTE,
        telemetry={"gpu_util_frac": 0.07},
        header={"device": "cuda:0", **POOR},
        drained=True,
    )
    assert found.actions[0].change == {"batch_size": 16}


def test_an_idle_device_that_waits_for_data_is_not_launch_bound_too(tmp_path):
    found = verdict(
        tmp_path,
        {"data_s": 0.2, **COMPUTE},
        telemetry={"gpu_util_frac": 0.3},
        header={"device": "cuda:0", **POOR},
        drained=True,
    )
    assert found.cause == "input"
    assert "device idle without a wait" not in [f.rule for f in found.findings]


def test_a_sweep_stopped_in_its_last_world_is_judged_by_the_one_before(tmp_path):
    write_run(tmp_path / "run", {**COMPUTE, "sync_s": 0.1}, ranks=2)
    add_world(tmp_path / "run", COMPUTE, ranks=4, steps=2, warmup=2)
    assert breakdown(open_run(tmp_path / "run").records).ranks == 2


def test_too_few_steps_decide_nothing(tmp_path):
    found = verdict(tmp_path, {"data_s": 0.2, **COMPUTE}, steps=5, warmup=2)
    assert found.cause == "unknown"
    assert "only 3 steady steps" in found.reason


def test_on_an_overloaded_machine_a_close_call_is_no_call(tmp_path):
    close = {"data_s": 0.05, "other_s": 0.045, **COMPUTE}
    assert verdict(tmp_path / "a", close, overloaded=True).cause == "unknown"
    assert verdict(tmp_path / "b", close, overloaded=False).cause == "input"
    assert (
        verdict(tmp_path / "c", {"data_s": 0.3, "other_s": 0.045, **COMPUTE}, overloaded=True).cause
        == "input"
    )


def test_a_run_without_steps_is_an_error_that_says_where_to_look(tmp_path):
    with pytest.raises(RunError, match="no step was recorded"):
        verdict(tmp_path, COMPUTE, steps=0)


def test_warm_up_only_is_an_error(tmp_path):
    with pytest.raises(RunError, match="all 3 recorded steps are warm-up"):
        verdict(tmp_path, COMPUTE, steps=3, warmup=3)


def test_a_timer_that_was_never_wired_is_an_error_not_a_table_of_nan(tmp_path):
    run = write_run(tmp_path / "run", COMPUTE)
    run._steps = [{**row, "forward_s": None} for row in run._steps]
    with pytest.raises(RunError, match="forward_s was never measured"):
        steptime.diagnose(run)


def test_the_first_steps_do_not_count(tmp_path):
    def phases(rank: int, step: int) -> dict[str, float]:
        return {"data_s": 8.0 if step == 0 else 0.0, **COMPUTE}

    found = verdict(tmp_path, phases, header=USEFUL, extra={"startup_s": 8.0})
    assert found.cause == "healthy"
    assert next(e.value for e in found.evidence if e.name.startswith("loader start-up")) == 8.0


def test_a_rate_that_falls_half_way_is_diagnosed_from_the_change_on(tmp_path):
    """Two of eight ranks lose their input after step 15; the others wait for them."""

    def phases(rank: int, step: int) -> dict[str, float]:
        if step < 15:
            return COMPUTE
        return (
            {**COMPUTE, "data_s": 2.9, "sync_s": 0.01}
            if rank in (2, 5)
            else {**COMPUTE, "data_s": 0.0, "sync_s": 2.91}
        )

    found = verdict(tmp_path, phases, ranks=8, steps=40)
    assert (found.cause, found.where) == ("input", "ranks 2, 5")
    assert "at step 15" in found.reason


def test_noise_is_no_change_point(tmp_path):
    run = write_run(tmp_path / "run", COMPUTE, steps=60, noise=0.15)
    assert change_point(run.records) is None


def test_absent_sensors_are_none_in_the_evidence_never_zero(tmp_path):
    found = verdict(tmp_path, COMPUTE, header=USEFUL)
    assert {e.name: e.value for e in found.evidence}["device utilisation"] is None
    assert "not available on this machine" in str(
        next(e for e in found.evidence if e.name == "device utilisation")
    )


# ---- the breakdown itself
def test_phases_sum_to_the_step_and_shares_to_one(tmp_path):
    run = write_run(tmp_path / "run", {"data_s": 0.18, **COMPUTE, "sync_s": 0.03}, ranks=2)
    found, summary = breakdown(run.records), run.summary()
    assert sum(found.phases_s.values()) == pytest.approx(found.step_s)
    assert sum(summary[name.removesuffix("_s") + "_frac"] for name in PHASES) == pytest.approx(1)


def test_injected_data_wait_is_recovered_within_five_percent_of_the_step(tmp_path):
    run = write_run(tmp_path / "run", {"data_s": 0.18, **COMPUTE}, noise=0.1)
    assert breakdown(run.records).phases_s["data_s"] == pytest.approx(
        0.18, abs=0.05 * breakdown(run.records).step_s
    )


def test_transfer_is_what_remains_when_nobody_waits(tmp_path):
    run = write_run(
        tmp_path / "run",
        lambda rank, step: {**COMPUTE, "sync_s": 0.02 if rank == step % 3 else 0.1},
        ranks=3,
        noise=0.0,
    )
    assert breakdown(run.records).transfer_s == pytest.approx(0.02)


def test_promised_gains_never_exceed_the_step(tmp_path):
    found = verdict(
        tmp_path, {"data_s": 0.9, "forward_s": 0.01, "backward_s": 0.02}, config=config_for(input_cost_s=0.1)
    )
    assert found.actions
    for action in found.actions:
        assert 0 <= action.gain_frac.low <= action.gain_frac.expected <= action.gain_frac.high <= 1
        assert action.step_s.low <= action.step_s.expected <= action.step_s.high


def test_every_rule_says_what_it_checks_and_what_it_is_confused_with():
    for rule in steptime.RULES:
        assert all((rule.name, rule.checks, rule.why, rule.confused_with, rule.next_check))
