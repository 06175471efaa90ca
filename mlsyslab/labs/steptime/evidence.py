"""The facts that the rules look at: breakdown, loader, host and device side of a run. None where a sensor is absent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlsyslab.contract import Evidence
from mlsyslab.labs.steptime.breakdown import Breakdown, breakdown, steady
from mlsyslab.labs.steptime.config import Config

if TYPE_CHECKING:
    import pandas as pd

    from mlsyslab.runs import Run

ENOUGH_STEPS = 5  # fewer steady steps than this decide nothing


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the rules look at: the breakdown, the loader's side, the host's side. None where a sensor is absent."""

    config: Config
    step: Breakdown
    paced: bool
    worker_cpu_frac: float | None  # cores used by one loader worker
    idle_cores: float | None  # cores nobody used
    worker_delay_frac: float | None  # share of the time that a loader worker was ready but had no core
    read_frac: float | None  # share of a sample's loading that is waiting for the file
    load_s: float | None  # seconds a worker needs for a batch
    device_util_frac: float | None
    drained_frac: float | None  # share of steps at whose end the device had nothing left to do (CUDA)
    efficiency_frac: (
        float | None
    )  # of the probe's matmul rate, over the CPU or device seconds of the compute phases
    model_alone_s: float | None
    gc_s: float
    disk_bytes_per_s: float | None
    net_bytes_per_s: float | None
    loopback_bytes_per_s: float | None
    device_memory_bytes: float | None
    worker_bytes: float | None
    worker_growth_bytes: float | None
    startup_s: float | None
    scaling_s: Mapping[int, float]  # step seconds by number of ranks
    slower_after: int | None  # the step from which on everything was at least 1.5 times slower

    @property
    def transfer_frac(self) -> float:
        return self.step.transfer_s / self.step.step_s

    @property
    def straggling_frac(self) -> float:
        """Sync that is waiting for one and the same rank. Waits whose reason rotates over the ranks are the job's
        own jitter, and part of neither this nor the transfer."""
        return self.step.frac("sync_s") - self.step.late_rank_sync_s / self.step.step_s


def _mean(frame: pd.DataFrame, name: str) -> float | None:
    if name not in frame or frame[name].isna().all():
        return None
    return float(frame[name].dropna().astype(float).mean())


def change_point(frame: pd.DataFrame) -> int | None:
    """The step from which on nearly every step is slower than nearly every step before it, the median at least
    1.5 times; five steps on each side. Noise and a growing load do not cut that cleanly."""
    steps = frame.groupby("step")["step_s"].mean()
    found = [
        (float(before.var(ddof=0) * len(before) + after.var(ddof=0) * len(after)), int(steps.index[at]))
        for at in range(ENOUGH_STEPS, len(steps) - ENOUGH_STEPS + 1)
        for before, after in [(steps.iloc[:at], steps.iloc[at:])]
        if after.median() > 1.5 * before.median() and after.quantile(0.1) > 1.2 * before.quantile(0.9)
    ]
    return min(found)[1] if found else None


def facts_of(run: Run) -> Facts:
    """Gather the facts of a run. Raises RunError where the records cannot support any verdict."""
    records, config, headers = run.records, run.config, _headers(run)
    frame = steady(records)
    changed = change_point(frame)
    if changed is not None:
        records = records[(records["step"] >= changed) | records["warmup"].astype(bool)]
    step, frame = breakdown(records), steady(records)
    samples = _meanwhile(run.telemetry, frame)
    probe = run.environment.get("probe") or {}
    workers, load_s = config.workers, None
    if "load_wall_s" in frame:
        load_s = float(frame["load_wall_s"].mean())
    head = headers[0] if headers else {}
    memory = _memory(samples)
    worlds = sorted(int(world) for world in run.records["world"].unique())
    worker_cpu = _mean(samples, "worker_cpu_frac")
    return Facts(
        config=config,
        step=step,
        paced=bool(head.get("paced", config.paced)),
        worker_cpu_frac=worker_cpu / workers if worker_cpu is not None and workers else None,
        worker_delay_frac=_ratio(_mean(samples, "worker_run_delay_frac"), float(workers) or None),
        idle_cores=_idle_cores(run.environment.get("limits", {}), _mean(samples, "busy_cores")),
        read_frac=_ratio(_mean(frame, "load_read_s"), load_s),
        load_s=load_s,
        device_util_frac=_mean(samples, "gpu_util_frac"),
        drained_frac=_mean(frame, "drained"),
        efficiency_frac=_efficiency(head, step, frame, probe),
        model_alone_s=head.get("model_alone_s"),
        gc_s=_mean(frame, "gc_s") or 0.0,
        disk_bytes_per_s=_mean(samples, "disk_read_bytes_per_s"),
        net_bytes_per_s=_mean(samples, "net_bytes_per_s"),
        loopback_bytes_per_s=_mean(samples, "loopback_bytes_per_s"),
        device_memory_bytes=_mean(samples, "gpu_memory_bytes"),
        worker_bytes=memory[0],
        worker_growth_bytes=memory[1],
        startup_s=_mean(run.records, "startup_s"),
        scaling_s={world: breakdown(run.records, world).step_s for world in worlds}
        if len(worlds) > 1
        else {},
        slower_after=changed,
    )


def _headers(run: Run) -> list[dict[str, Any]]:
    found = [note for note in run.notes if note.get("kind") == "header"]
    largest = max((note["world"] for note in found), default=0)
    return sorted((note for note in found if note["world"] == largest), key=lambda note: note["rank"])


def _meanwhile(samples: pd.DataFrame, frame: pd.DataFrame) -> pd.DataFrame:
    """The samples taken during the steady steps; those of calibration, warm-up or another world say nothing here."""
    if samples.empty or "time_s" not in frame or "time_s" not in samples:
        return samples
    middle_s = samples["time_s"] - samples["interval_s"] / 2
    return samples[(middle_s >= frame["time_s"].min()) & (samples["time_s"] <= frame["time_s"].max() + 1)]


def _memory(samples: pd.DataFrame) -> tuple[float | None, float | None]:
    """Private bytes of all loader workers at the end, and how much they have grown, summed over the ranks."""
    if "worker_private_bytes" not in samples:
        return None, None
    last, growth, seen = 0.0, 0.0, False
    for _, rows in samples.groupby("rank"):
        sums = [
            sum(each)
            for each in rows["worker_private_bytes"]
            if isinstance(each, list) and each and None not in each
        ]
        if sums:
            last, growth, seen = last + sums[-1], growth + sums[-1] - sums[0], True
    return (last, growth) if seen else (None, None)


def _idle_cores(limits: Mapping[str, Any], busy: float | None) -> float | None:
    """Cores that nobody used; None in a container with a quota, which sees the busy cores of the whole host."""
    if busy is None or limits.get("usable_cores") is None or limits.get("quota_cores") is not None:
        return None
    return max(0.0, limits["usable_cores"] - busy)


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _efficiency(
    head: Mapping[str, Any], step: Breakdown, frame: pd.DataFrame, probe: Mapping[str, Any]
) -> float | None:
    """Useful matmul FLOP/s over the machine's measured rate (PaLM's model FLOPs utilisation, on a measured roof).

    On the CPU the seconds are the training thread's CPU time, so that a busy neighbour does not look like bad code.
    """
    on_gpu = str(head.get("device", "cpu")).startswith("cuda")
    roof = probe.get(
        "gpu_float32_matmul_flops_per_s" if on_gpu else "matmul_flops_per_s"
    )  # the model is float32
    if not roof or not head.get("matmul_flops"):
        return None
    seconds = step.phases_s["forward_s"] + step.phases_s["backward_s"]
    if not on_gpu and step.cpu_s is not None:
        seconds = min(seconds, step.cpu_s)
    return float(head["matmul_flops"]) / seconds / float(roof) if seconds > 0 else None


def general_evidence(facts: Facts) -> list[Evidence]:
    """The figures that are shown whatever the verdict."""
    step = facts.step
    shown = [
        Evidence(name="step", value=step.step_s, unit="s"),
        Evidence(name="data wait", value=step.frac("data_s"), unit="frac", points_at="input"),
        Evidence(name="compute", value=step.compute_s / step.step_s, unit="frac", points_at="compute"),
        Evidence(
            name="exposed communication", value=step.frac("sync_s"), unit="frac", points_at="communication"
        ),
        Evidence(name="between the phases", value=step.frac("other_s"), unit="frac", points_at="host"),
        Evidence(
            name="device utilisation",
            value=facts.device_util_frac,
            unit="frac",
            confused_with="low use is not always data wait",
        ),
        Evidence(name="device memory in use", value=facts.device_memory_bytes, unit="bytes"),
        Evidence(name="cores used by a loader worker", value=facts.worker_cpu_frac),
        Evidence(name="idle cores", value=facts.idle_cores),
        Evidence(
            name="loader worker waiting for a core",
            value=facts.worker_delay_frac,
            unit="frac",
            points_at="input: the workers share their cores",
            confused_with="expensive samples",
        ),
        Evidence(name="disk reads", value=facts.disk_bytes_per_s, unit="bytes_per_s"),
        Evidence(name="network", value=facts.net_bytes_per_s, unit="bytes_per_s"),
        Evidence(name="network inside this machine", value=facts.loopback_bytes_per_s, unit="bytes_per_s"),
        Evidence(name="files read", value=step.bytes_per_s, unit="bytes_per_s"),
        Evidence(
            name="memory of the loader workers",
            value=facts.worker_bytes,
            unit="bytes",
            confused_with="growth by copy-on-write of Python lists",
        ),
        Evidence(name="growth of that memory", value=facts.worker_growth_bytes, unit="bytes"),
        Evidence(
            name="loader start-up, before the first step",
            value=facts.startup_s,
            unit="s",
            confused_with="steady data wait; it is paid once an epoch",
        ),
        Evidence(name="steps on an overloaded host", value=step.overloaded_frac, unit="frac"),
    ]
    return [item for item in shown if item.value is None or item.value == item.value]
