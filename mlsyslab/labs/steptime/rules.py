"""The checks, one function each: a share of the step, the figures behind it, its look-alike, the next check. Pure."""

from __future__ import annotations

from mlsyslab.contract import Evidence, Finding, Rule
from mlsyslab.labs.steptime.breakdown import WAIT_FRAC
from mlsyslab.labs.steptime.evidence import Facts

EFFICIENT_FRAC = 0.30  # of the measured matmul rate; below it busy is not the same as well used

OWNER = {
    "input": "storage/data",
    "compute": "model code",
    "communication": "networking",
    "host": "model code",
    "healthy": "nobody",
    "unknown": "nobody",
}


def _input(facts: Facts) -> Finding | None:
    wait = facts.step.data_worst_s / facts.step.step_s
    if wait < WAIT_FRAC:
        return None
    return Finding(
        rule="data wait",
        cause="input",
        says=f"the device waits for its batch during {wait:.0%} of the step",
        weight_frac=wait,
        evidence=(
            Evidence(
                name="data wait",
                value=facts.step.data_worst_s,
                unit="s",
                points_at="input",
                confused_with="host time in next() that device work hides",
            ),
            Evidence(
                name="data wait, median",
                value=facts.step.data_p50_s,
                unit="s",
                points_at="bursts, where far from the mean",
            ),
            Evidence(
                name="data wait, 95th percentile",
                value=facts.step.data_p95_s,
                unit="s",
                points_at="bursts, where far from the mean",
            ),
            Evidence(name="steps that waited", value=facts.step.data_steps_frac, unit="frac"),
            Evidence(
                name="cores used by a loader worker",
                value=facts.worker_cpu_frac,
                points_at="CPU-limited when near 1, storage when near 0",
            ),
            Evidence(
                name="share of loading spent reading", value=facts.read_frac, unit="frac", points_at="storage"
            ),
        ),
        confused_with="a slow first batch (worker start-up), or the wait for a slower rank",
        next_check="feed one cached batch again and again: if the step does not shorten, it is not the input",
    )


def _transfer(facts: Facts) -> Finding | None:
    share = facts.step.frac("h2d_s")
    if share < WAIT_FRAC:
        return None
    return Finding(
        rule="host-to-device copy",
        cause="input",
        says=f"copies to the device take {share:.0%} of the step",
        weight_frac=share,
        evidence=(
            Evidence(
                name="copy to the device", value=facts.step.phases_s["h2d_s"], unit="s", points_at="input"
            ),
        ),
        confused_with="a synchronisation that happens to come with the copy",
        next_check="copy the same pinned tensor in a loop and compare with the bus's rate",
    )


def _communication(facts: Facts) -> Finding | None:
    if facts.transfer_frac < WAIT_FRAC:
        return None
    scaling = tuple(
        Evidence(
            name=f"step with {world} rank{'s' if world > 1 else ''}",
            value=value,
            unit="s",
            points_at="communication, when it rises with ranks",
        )
        for world, value in facts.scaling_s.items()
    )
    return Finding(
        rule="exposed communication",
        cause="communication",
        says=f"gradients are still being reduced for {facts.transfer_frac:.0%} of the step after backward has finished",
        weight_frac=facts.transfer_frac,
        evidence=(
            Evidence(
                name="exposed transfer",
                value=facts.step.transfer_s,
                unit="s",
                points_at="communication",
                confused_with="waiting for a slow rank",
            ),
            Evidence(
                name="wait for another rank",
                value=facts.straggling_frac * facts.step.step_s,
                unit="s",
                points_at="a straggler",
            ),
            Evidence(name="network throughput", value=facts.net_bytes_per_s, unit="bytes_per_s"),
            *scaling,
        ),
        confused_with="one slow rank: then the least sync over the ranks is near zero",
        next_check="run with 1 rank: if the step falls by the exposed time, it is communication",
    )


def _straggler(facts: Facts) -> Finding | None:
    if facts.straggling_frac < WAIT_FRAC:
        return None
    return Finding(
        rule="waiting for a rank",
        cause="unknown",
        says=f"ranks wait for each other during {facts.straggling_frac:.0%} of the step",
        weight_frac=facts.straggling_frac,
        evidence=(
            Evidence(
                name="wait for another rank",
                value=facts.straggling_frac * facts.step.step_s,
                unit="s",
                points_at="a straggler",
            ),
        ),
        confused_with="slow communication: then every rank waits, also the last one",
        next_check="compare the own work of the ranks; that is the question of the straggler lab",
    )


def _host(facts: Facts) -> Finding | None:
    share = facts.step.host_worst_s / facts.step.step_s
    if share < WAIT_FRAC:
        return None
    return Finding(
        rule="host work between phases",
        cause="host",
        says=f"Python between the phases takes {share:.0%} of the step while the device has nothing to do",
        weight_frac=share,
        evidence=(
            Evidence(name="between the phases", value=facts.step.host_worst_s, unit="s", points_at="host"),
            Evidence(name="garbage collection", value=facts.gc_s, unit="s", points_at="host: GC"),
        ),
        confused_with="data wait, when metrics are computed inside the loader's loop",
        next_check="log every tenth step: if the step shortens by nine tenths of it, it was the logging",
    )


def _launch(facts: Facts) -> Finding | None:
    if (
        facts.drained_frac is None
        or facts.drained_frac < 0.8
        or facts.device_util_frac is None
        or facts.device_util_frac > 0.7
    ):
        return None
    if facts.step.data_worst_s > WAIT_FRAC * facts.step.step_s:
        return None  # the device waits for data: that is another rule's finding
    idle = 1 - facts.device_util_frac
    return Finding(
        rule="device idle without a wait",
        cause="host",
        says=f"the device is idle {idle:.0%} of the time although it never waits for data: kernels are launched too slowly",
        weight_frac=idle * (1 - facts.step.frac("data_s", "sync_s")),
        evidence=(
            Evidence(
                name="device utilisation",
                value=facts.device_util_frac,
                unit="frac",
                points_at="host",
                confused_with="input: but nothing waits for data",
            ),
            Evidence(name="steps that ended with an idle device", value=facts.drained_frac, unit="frac"),
        ),
        confused_with="input-bound: low utilisation alone does not tell them apart, the data wait does",
        next_check="double the batch: a launch-bound step hardly lengthens",
    )


def _compute(facts: Facts) -> Finding | None:
    share = facts.step.compute_s / facts.step.step_s
    if share < 0.5:
        return None
    # Without a measured roof only work that was added on purpose is known to be poor.
    added = facts.paced or facts.config.compute_s > 0
    poor = added if facts.efficiency_frac is None else facts.efficiency_frac < EFFICIENT_FRAC
    if not poor:
        return None
    return Finding(
        rule="device busy",
        cause="compute",
        says=f"forward, backward and optimizer take {share:.0%} of the step and nothing else waits",
        weight_frac=share,
        evidence=(
            Evidence(name="compute", value=facts.step.compute_s, unit="s", points_at="compute"),
            Evidence(
                name="share of the measured matmul rate",
                value=facts.efficiency_frac,
                unit="frac",
                points_at="model code, when low",
            ),
            Evidence(name="device utilisation", value=facts.device_util_frac, unit="frac"),
        ),
        confused_with="a healthy step: busy is only good when the work is useful",
        next_check="profile one step: many short elementwise kernels mean that fusion or lower precision helps",
    )


RULES: tuple[Rule[Facts], ...] = (
    Rule(name="data wait", checks="exposed wait for the loader, worst rank", why="the device cannot start without its batch",
         confused_with="host time hidden behind device work", next_check="replay one batch", test=_input),
    Rule(name="host-to-device copy", checks="copy time on the compute stream", why="an unpinned copy blocks the step",
         confused_with="a synchronisation", next_check="copy in a loop", test=_transfer),
    Rule(name="exposed communication", checks="least sync over the ranks", why="what remains when nobody waits for anybody is transfer",
         confused_with="a straggler", next_check="run with one rank", test=_communication),
    Rule(name="waiting for a rank", checks="sync above the least of the ranks", why="all-reduce makes everyone as slow as the slowest",
         confused_with="slow communication", next_check="compare own work", test=_straggler),
    Rule(name="host work between phases", checks="time outside data, copies, compute and communication", why="Python runs while the device idles",
         confused_with="data wait", next_check="do it less often", test=_host),
    Rule(name="device idle without a wait", checks="device utilisation against data wait", why="small kernels are launched more slowly than they run",
         confused_with="input", next_check="double the batch", test=_launch),
    Rule(name="device busy", checks="compute share and its part of the measured roof", why="busy is not the same as well used",
         confused_with="healthy", next_check="profile one step", test=_compute),
)  # fmt: skip
