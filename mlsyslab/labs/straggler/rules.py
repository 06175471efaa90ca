"""The checks of the straggler lab in their order, each a rule: what it looks at, its look-alike, the next check. Pure.

Five rules explain a slow rank; each gives the share of the excess that it explains (`weight_frac`). The others
explain why nobody is slow. A share below CLEAR_FRAC names no cause.
"""

from __future__ import annotations

from mlsyslab.contract import Evidence, Finding, Rule
from mlsyslab.labs.straggler.checks import JOIN_S, SEEN_FRAC
from mlsyslab.labs.straggler.evidence import Facts, Loader

CLEAR_FRAC = 0.80  # of the excess that one cause must hold
SLOWER, ALIKE = 1.1, 1.25  # a slower device: both phases so many times the others', and so alike at most

OWNER = {
    "input": "storage/data",
    "compute": "model code",
    "host": "host operations",
    "communication": "networking",
    "startup": "host operations",
    "imbalance": "storage/data",
    "shared": "host operations",
    "stage": "model code",
    "healthy": "nobody",
    "unknown": "nobody",
}
COMPUTE = ("forward_s", "backward_s", "optimizer_s")


def _input(facts: Facts) -> Finding | None:
    share = facts.frac(facts.phases_s.get("data_s", 0.0) + facts.phases_s.get("h2d_s", 0.0))
    if share < SEEN_FRAC:
        return None
    load = facts.load or Loader()
    return Finding(
        rule="data loader",
        cause="input",
        says=f"it waits {facts.phases_s['data_s'] * 1e3:.0f} ms longer for its batch than the others, {share:.0%} of the excess",
        weight_frac=share,
        evidence=(
            Evidence(name="excess of data wait", value=facts.phases_s["data_s"], unit="s", points_at="input"),
            Evidence(name="its loader's CPU time, times the others'", value=load.cpu, points_at="heavier samples, where far above 1"),
            Evidence(name="its loader's reading, times the others'", value=load.read, points_at="storage, where far above 1"),
            Evidence(name="its loader's wall time, times the others'", value=load.wall, points_at="starved workers, where only this is far above 1"),
        ),
        confused_with="a noisy neighbour that keeps the loader's workers from their cores",
        next_check="feed that rank one cached batch again and again: if it is as fast as the others, it is its input",
    )  # fmt: skip


def _contention(facts: Facts) -> Finding | None:
    share = facts.frac(facts.queue_excess_s)
    if share < SEEN_FRAC:
        return None
    host = facts.hosts.get(facts.named[0], {})
    neighbour = host.get("neighbour")
    return Finding(
        rule="neighbours",
        cause="host",
        says=f"its thread was ready and waited for a core {(facts.queue_excess_s or 0) * 1e3:.0f} ms longer than the others'"
        + (f"; beside it ran {neighbour}" if neighbour else ""),
        weight_frac=share,
        evidence=(
            Evidence(name="excess of run-queue wait", value=facts.queue_excess_s, unit="s", points_at="host"),
            Evidence(name="noisiest neighbour", value=neighbour, points_at="host"),
            Evidence(name="steal", value=host.get("steal_frac"), unit="frac", points_at="the hypervisor's other guests"),
        ),
        confused_with="the rank's own threads: too many loader workers, or OMP_NUM_THREADS unset",
        next_check="pin the rank to a core of its own, or list what else runs on that host",
    )  # fmt: skip


def _throttled(facts: Facts) -> Finding | None:
    if facts.cpu_excess_s is None or facts.queue_excess_s is None:
        return _slow_device(facts)  # on a device's clock nobody counts these
    known = facts.cpu_excess_s + facts.queue_excess_s + facts.phases_s.get("data_s", 0.0)
    share = facts.frac(facts.excess_s - max(0.0, known))
    host = facts.hosts.get(facts.named[0], {})
    if share < SEEN_FRAC:
        return None
    return Finding(
        rule="throttling",
        cause="host",
        says=f"{facts.frac(facts.excess_s - known):.0%} of the excess is time in which it neither ran, nor waited for a core, nor for data: it was held up",
        weight_frac=min(share, 1.0),
        evidence=(
            Evidence(name="found stopped by telemetry", value=host.get("stopped_frac"), unit="frac", points_at="host"),
            Evidence(name="throttled by its control group", value=host.get("throttled_s"), unit="s", points_at="host"),
            Evidence(name="excess of CPU time", value=facts.cpu_excess_s, unit="s", points_at="compute, where large"),
        ),
        confused_with="blocking calls in the training thread: a slow disk, a lock, a network file system",
        next_check="read the clocks and throttle counters of that host; sample the process state (T is stopped, D waits for a device)",
    )  # fmt: skip


def _slow_device(facts: Facts) -> Finding | None:
    """Forward and backward are longer by the same factor: not what code or data do, but what a slower device does."""
    factors = sorted(facts.ratios.values())
    if len(factors) < 2 or factors[0] < SLOWER or factors[1] > ALIKE * factors[0]:
        return None
    host = facts.hosts.get(facts.named[0], {})
    share = facts.frac(sum(facts.phases_s.get(name, 0.0) for name in COMPUTE))
    return Finding(
        rule="throttling",
        cause="host",
        says=f"its forward and backward both take {factors[0]:.1f} to {factors[1]:.1f} times the others': the device itself is slower, or another process computes on it",
        weight_frac=min(share, 1.0),
        evidence=(
            *(Evidence(name=f"{n.removesuffix('_s')}, times the others'", value=v) for n, v in facts.ratios.items()),
            Evidence(name="device clock", value=host.get("gpu_sm_clock_hz"), unit="Hz", points_at="throttling, where lower than the others'"),
        ),
        confused_with="a rank with larger batches, whose forward and backward grow alike too",
        next_check="compare the clocks, throttle reasons and processes of that device with a healthy one's (nvidia-smi -q -d CLOCK,PERFORMANCE,PIDS)",
    )  # fmt: skip


def _pause(facts: Facts) -> Finding | None:
    share = facts.frac(facts.phases_s.get("other_s", 0.0))
    queued = facts.frac(facts.queue_excess_s)
    held = facts.frac(facts.excess_s - (facts.cpu_excess_s or 0.0) - (facts.queue_excess_s or 0.0))
    if share < SEEN_FRAC or max(queued, held if facts.cpu_excess_s is not None else 0.0) > 0.5:
        return None
    garbage = facts.frac(facts.gc_excess_s)
    return Finding(
        rule="host work between phases",
        cause="host",
        says=f"it works {facts.phases_s['other_s'] * 1e3:.0f} ms longer between the phases than the others"
        + (f", {garbage:.0%} of the excess in garbage collection" if garbage > SEEN_FRAC else ""),
        weight_frac=share,
        evidence=(
            Evidence(
                name="excess between the phases", value=facts.phases_s["other_s"], unit="s", points_at="host"
            ),
            Evidence(
                name="excess of garbage collection",
                value=facts.gc_excess_s,
                unit="s",
                points_at="host (pause)",
            ),
            Evidence(
                name="slow steps",
                value=float(facts.blame.slow.mean()),
                unit="frac",
                points_at="a pause, where few",
            ),
        ),
        confused_with="a rank that alone logs, evaluates or saves: rank 0 by design",
        next_check="log the beginning and end of what only this rank does; call gc.freeze() or gc.disable() and look again",
    )


def _compute(facts: Facts) -> Finding | None:
    phases = {name: facts.frac(facts.phases_s.get(name, 0.0)) for name in COMPUTE}
    if sum(phases.values()) < SEEN_FRAC:
        return None
    top = max(phases, key=lambda name: phases[name])
    ran = 1.0 if facts.cpu_excess_s is None else min(1.0, facts.frac(facts.cpu_excess_s))
    return Finding(
        rule="the rank's own work",
        cause="compute",
        says=f"its {top.removesuffix('_s')} takes {facts.phases_s[top] * 1e3:.0f} ms longer than the others', {phases[top]:.0%} of the excess"
        + ("" if facts.cpu_excess_s is None else ", and it really computed in that time"),
        weight_frac=min(phases[top], ran),
        evidence=(
            *(Evidence(name=f"excess of {n.removesuffix('_s')}", value=facts.phases_s.get(n), unit="s", points_at="compute") for n in COMPUTE),
            Evidence(name="excess of CPU time", value=facts.cpu_excess_s, unit="s", points_at="compute"),
        ),
        confused_with="a device with lower clocks, whose every phase is longer by the same factor",
        next_check="run the same batch alone on that device and on another: if both take as long, it is the code or the data",
    )  # fmt: skip


def _link(facts: Facts) -> Finding | None:
    slow = {rank for rank in facts.slow_links if rank is not None}
    if not slow or facts.transfer_s < 0.6 * facts.link_adds_s or facts.link_adds_s < 0.08 * facts.step_s:
        return None
    *others, slowest_s = sorted(facts.link_s.values())
    who = f"rank {min(slow)}" if len(slow) == 1 else f"ranks {', '.join(map(str, sorted(slow)))} in turn"
    return Finding(
        rule="network",
        cause="communication" if len(slow) == 1 else "imbalance",
        says=f"every rank waits {facts.transfer_s * 1e3:.0f} ms in the exchange, and the message of {who} takes "
        f"{slowest_s / others[len(others) // 2]:.0f} times as long as the others'",
        weight_frac=facts.link_adds_s / facts.step_s,
        evidence=(
            Evidence(name="transfer: the least wait of any rank", value=facts.transfer_s, unit="s", points_at="communication"),
            *(Evidence(name=f"link check of rank {rank}", value=value, unit="s") for rank, value in facts.link_s.items()),
        ),
        confused_with="waiting for a slow rank, which at least one rank would not do",
        next_check="measure each link alone (nccl-tests, iperf3), then read the card's error counters",
    )  # fmt: skip


def _late(facts: Facts) -> Finding | None:
    if len(facts.join_s) < 2:
        return None
    last = min(facts.join_s, key=lambda rank: facts.join_s[rank])
    others = min(value for rank, value in facts.join_s.items() if rank != last)
    if others - facts.join_s[last] < JOIN_S * (2 if facts.overloaded else 1):
        return None
    return Finding(
        rule="start",
        cause="startup",
        says=f"the others waited {others:.1f} s for rank {last} before the first step; since then it keeps up",
        evidence=(Evidence(name=f"wait at the start of the ranks but {last}, least", value=others, unit="s", points_at=f"rank {last}"),),
        confused_with="a slow first step (compilation, cache warm-up), which all ranks share",
        next_check="look at the scheduler's log: image pull, queue, module load on that host",
    )  # fmt: skip


RULES: tuple[Rule[Facts], ...] = (
    Rule(name="data loader", checks="data wait and loader of the slow rank beside the others'",
         why="a starved rank makes every rank wait", confused_with="a neighbour that starves the loader",
         next_check="one cached batch again and again", test=_input),
    Rule(name="neighbours", checks="run-queue wait, steal, and who else runs there",
         why="a thread that is ready and has no core is slow through no work of its own", confused_with="the job's own threads",
         next_check="pin the rank to a core of its own", test=_contention),
    Rule(name="throttling", checks="time that is neither CPU, nor queue, nor data",
         why="a hot or capped host runs the same code slower", confused_with="blocking calls",
         next_check="clocks, throttle counters, process state", test=_throttled),
    Rule(name="host work between phases", checks="Python, garbage collection and files between the phases",
         why="a pause on one rank is a pause on all", confused_with="what rank 0 does by design",
         next_check="gc.freeze(), or log what only this rank does", test=_pause),
    Rule(name="the rank's own work", checks="forward, backward and optimizer of the slow rank beside the others'",
         why="all-reduce makes backward look alike on all ranks, own work does not", confused_with="lower clocks",
         next_check="the same batch alone on that device and on another", test=_compute),
)  # fmt: skip
"""The rules that explain a slow rank, in the order of the checks."""

BESIDES: tuple[Rule[Facts], ...] = (
    Rule(name="network", checks="the least wait of any rank, and each rank's link alone",
         why="a slow link slows the exchange itself, for everybody alike", confused_with="waiting for a slow rank",
         next_check="measure each link alone", test=_link),
    Rule(name="start", checks="who waited for whom before the first step",
         why="a late rank costs once", confused_with="a slow first step", next_check="the scheduler's log", test=_late),
)  # fmt: skip
"""The rules that find a cause where no rank has more own work than the others."""
