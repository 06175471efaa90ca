"""The figures of a run, measured or simulated, from its requests' records. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

OUTCOMES = ("ok", "rejected", "expired", "cancelled", "error")


def summary_of(
    records: Any, *, slo_s: float, warmup_s: float = 0.0, replica_s: float | None = None
) -> dict[str, float | None]:
    """The figures of the requests after the warm-up; None where there is nothing to compute one from.

    records: a DataFrame or a mapping of arrays with the record's columns. slo_s: the bound on total_s that good
    answers keep. replica_s: replica-seconds of the whole run, warm-up included.

    n: requests. p50_s, p95_s, p99_s, mean_s: total_s of the answers. throughput_per_s: answers a second, from the
    moment warmup_s to the last of them. goodput_frac: answers within slo_s, of all requests, and missed_frac the rest; rejected_frac, expired_frac,
    cancelled_frac, error_frac: of all requests. mean_batch_rows: rows of a batch. utilisation_frac: seconds in which
    replicas worked (warm-up included) of replica_s. queue_s, batch_wait_s, service_s: means. lag_p99_s: of the tester.
    """
    table = {name: np.asarray(records[name]) for name in _COLUMNS if name in records}
    if not len(table.get("warmup", ())):
        return {"n": 0.0, **dict.fromkeys(_NAMES)}
    keep = ~table["warmup"].astype(bool)
    steady = {name: values[keep] for name, values in table.items()}
    ok = steady["outcome"] == "ok"
    total_s = steady["total_s"][ok].astype(float)
    n = len(ok)
    found: dict[str, float | None] = {"n": float(n)}
    tops = np.quantile(total_s, (0.5, 0.95, 0.99)).tolist() if ok.any() else [None] * 3
    found.update(zip(("p50_s", "p95_s", "p99_s"), tops, strict=True))
    found["mean_s"] = _mean(total_s)
    found["throughput_per_s"] = None
    if ok.any():
        # By when they went out, since in a backlog the answers after the warm-up are those of requests from within it.
        answered = table["outcome"] == "ok"
        ends_s = (table["sent_s"][answered] + table["total_s"][answered]).astype(float)
        lasts_s = float(ends_s.max()) - warmup_s
        found["throughput_per_s"] = float((ends_s > warmup_s).sum()) / lasts_s if lasts_s > 0 else None
    found["goodput_frac"] = float((total_s <= slo_s).sum() / n) if n else None
    found["missed_frac"] = 1 - float((total_s <= slo_s).sum() / n) if n else None
    for name in OUTCOMES[1:]:
        found[f"{name}_frac"] = float((steady["outcome"] == name).sum() / n) if n else None
    found["mean_batch_rows"] = _mean_batch(steady, ok)
    for name in ("queue_s", "batch_wait_s", "service_s"):
        found[name] = _mean(steady[name][ok].astype(float))
    found["utilisation_frac"] = _utilisation(table, replica_s)
    found["lag_p99_s"] = float(np.quantile(steady["lag_s"].astype(float), 0.99)) if n else None
    return found


_COLUMNS = (
    "intended_s", "sent_s", "lag_s", "queue_s", "batch_wait_s", "service_s", "total_s", "batch_size", "rows",
    "outcome", "warmup",
)  # fmt: skip


_NAMES = (
    "p50_s", "p95_s", "p99_s", "mean_s", "throughput_per_s", "goodput_frac", "missed_frac", *(f"{name}_frac" for name in OUTCOMES[1:]),
    "mean_batch_rows", "queue_s", "batch_wait_s", "service_s", "utilisation_frac", "lag_p99_s",
)  # fmt: skip


def _mean(values: Any) -> float | None:
    return float(values.mean()) if len(values) else None


def _mean_batch(steady: Mapping[str, Any], ok: Any) -> float | None:
    """Rows of a mean batch. Each request knows the rows of its batch, so it counts for rows / batch_size of one."""
    rows, sizes = steady["rows"][ok].astype(float), steady["batch_size"][ok].astype(float)
    batches = float((rows[sizes > 0] / sizes[sizes > 0]).sum())
    return float(rows[sizes > 0].sum()) / batches if batches else None


def _utilisation(table: Mapping[str, Any], replica_s: float | None) -> float | None:
    ran = (table["outcome"] == "ok") & (table["batch_size"].astype(float) > 0)
    if not replica_s or not ran.any():
        return None
    rows, sizes = table["rows"][ran].astype(float), table["batch_size"][ran].astype(float)
    return float((table["service_s"][ran].astype(float) * rows / sizes).sum()) / replica_s
