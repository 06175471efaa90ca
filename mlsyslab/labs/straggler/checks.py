"""The checks of a straggler in the order in which to make them, each a figure with what it points at. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mlsyslab.contract import Evidence
from mlsyslab.labs.straggler.evidence import Facts

SEEN_FRAC = 0.30  # of the excess, or of the step; what explains less is not worth a finding
JOIN_S = 0.5  # a start that keeps the others waiting for longer is late; twice that on a crowded machine
STEAL_FRAC, STOPPED_FRAC = 0.02, 0.02  # of the time; less than it is a machine's everyday
RETRANSMITS_PER_S = 5.0


def checks(facts: Facts) -> tuple[Evidence, ...]:
    """The checks in the order in which to make them, each with its figure, whom it points at, and its look-alike."""
    of = facts.named[0] if facts.named else None
    host = facts.hosts.get(of, {}) if of is not None else _mean_host(facts.hosts)
    who = f"rank {of}" if of is not None else "nobody"
    joins = sorted(facts.join_s.values())
    slow_links = sorted({rank for rank in facts.slow_links if rank is not None})

    def when(value: float | None, least: float, points_at: str) -> str:
        """Whom a figure points at once it is above what is usual."""
        return points_at if value is not None and value > least else "nobody, as usual"

    shown = [
        Evidence(name="job's step", value=facts.step_s, unit="s", points_at="nobody: it is the same on all ranks"),
        Evidence(
            name="own work, slowest rank",
            value=facts.own_s[of] if of is not None else max(facts.own_s.values(), default=0.0),
            unit="s",
            points_at=who,
            confused_with="backward time, which the wait for others makes alike",
        ),
        Evidence(name="own work of the others", value=_others(facts.own_s, facts.named), unit="s"),
        Evidence(
            name="wait, slowest rank",
            value=facts.wait_s[of] if of is not None else min(facts.wait_s.values(), default=0.0),
            unit="s",
            points_at="the rank with the least of it",
            confused_with="the longest collective, which is a victim's",
        ),
        Evidence(name="wait of the others", value=_others(facts.wait_s, facts.named), unit="s"),
        Evidence(
            name="device utilisation", value=host.get("gpu_util_frac"), unit="frac", points_at=who,
            confused_with="a device that waits for data or for its host",
        ),
        Evidence(name="device memory bandwidth in use", value=host.get("gpu_memory_util_frac"), unit="frac"),
        Evidence(
            name="excess of data wait", value=facts.phases_s.get("data_s"), unit="s",
            points_at=when(facts.frac(facts.phases_s.get("data_s")), SEEN_FRAC, "input"),
            confused_with="a loader that others keep from its core",
        ),
        Evidence(
            name="disk reads", value=host.get("disk_read_bytes_per_s"), unit="bytes_per_s",
            confused_with="reads that a rate limit or the network delays, which look like few",
        ),
        Evidence(
            name="CPU time stolen by the hypervisor", value=host.get("steal_frac"), unit="frac",
            points_at=when(host.get("steal_frac"), STEAL_FRAC, "the hypervisor's other guests"),
        ),
        Evidence(
            name="excess of run-queue wait", value=facts.queue_excess_s, unit="s",
            points_at=when(facts.frac(facts.queue_excess_s), SEEN_FRAC, "host (contention)"),
            confused_with="too many threads of the job itself",
        ),
        Evidence(
            name="noisiest neighbour", value=host.get("neighbour"),
            points_at=when(facts.frac(facts.queue_excess_s), SEEN_FRAC, "host (contention)"),
            confused_with="a program that takes its turns without keeping the rank waiting",
        ),
        Evidence(
            name="found stopped by telemetry", value=host.get("stopped_frac"), unit="frac",
            points_at=when(host.get("stopped_frac"), STOPPED_FRAC, "host (throttled)"),
            confused_with="a rank that waits: it sleeps, and is not stopped",
        ),
        Evidence(
            name="throttled by its control group, each second", value=(quota := _each_second(host, "throttled_s")), unit="s",
            points_at=when(quota, STOPPED_FRAC, "host (quota)"),
        ),
        Evidence(
            name="retransmitted segments", value=(again := _each_second(host, "retransmits")), unit="per s",
            points_at=when(again, RETRANSMITS_PER_S, "communication"), confused_with="other traffic of the same host",
        ),
        Evidence(
            name="network errors and drops", value=(lost := _each_second(host, "net_errors")), unit="per s",
            points_at=when(lost, 0.0, "communication"),
        ),
        Evidence(
            name="transfer: the least wait of any rank", value=facts.transfer_s, unit="s",
            points_at=when(facts.transfer_s, SEEN_FRAC * facts.step_s, "communication"),
            confused_with="waiting, which is the rest",
        ),
        Evidence(
            name="link check, slowest rank", value=max(facts.link_s.values(), default=None), unit="s",
            points_at=", ".join(f"rank {rank}" for rank in slow_links) or "nobody, as usual",
        ),
        Evidence(
            name="wait at the start of the others for the last", value=joins[1] - joins[0] if len(joins) > 1 else None, unit="s",
            points_at=when(joins[1] - joins[0] if len(joins) > 1 else None, JOIN_S, "a late start: the last to come waits least"),
        ),
        Evidence(
            name="kernel log", value="; ".join(facts.kernel[:3]) or None if facts.kernel else None, points_at="hardware",
        ),
    ]  # fmt: skip
    return tuple(shown)


def _each_second(host: Mapping[str, Any], name: str) -> float | None:
    """A count by telemetry sample as one by second."""
    value, interval_s = host.get(name), host.get("interval_s")
    return None if value is None or not interval_s else float(value) / float(interval_s)


def _others(values: Mapping[int, float], named: tuple[int, ...]) -> float | None:
    rest = [value for rank, value in values.items() if rank not in named]
    return float(np.median(rest)) if rest else None


def _mean_host(hosts: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    names = {name for host in hosts.values() for name, value in host.items() if isinstance(value, float)}
    return {name: float(np.mean([host[name] for host in hosts.values() if name in host])) for name in names}
