"""Bursty traffic and a p95 target: batcher, admission, autoscaler, designed, measured, diagnosed.

The functions are bound eagerly, since importing a submodule of the same name later would replace a lazy one; the
submodules keep torch, pandas, aiohttp and matplotlib out of their own import.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlsyslab.contract import Prediction
from mlsyslab.experiment import Mitigation
from mlsyslab.labs.serving import predict as by_policies
from mlsyslab.labs.serving.config import CAUSES, PRESETS, Config
from mlsyslab.labs.serving.day import day
from mlsyslab.labs.serving.diagnose import diagnose
from mlsyslab.labs.serving.figures import summary_of
from mlsyslab.labs.serving.measure import curve_of, measure, mitigate, preset, service_curve, start
from mlsyslab.labs.serving.plot import curve_plot, live_plot, plot
from mlsyslab.labs.serving.policies import Admission, Autoscaler, Batcher, Router
from mlsyslab.labs.serving.recommend import recommend
from mlsyslab.labs.serving.rules import RULES
from mlsyslab.labs.serving.simulate import simulate
from mlsyslab.runs import Run

PANEL: Mapping[str, Any] = {
    "title": "Serving: which answers are late, and why?",
    "knobs": ("max_batch", "max_wait_s", "replicas", "rate_per_s", "arrivals", "admission", "autoscale"),
    "note": lambda config: "paced model" if config.paced else "",
    "predict": (("p95_s", "p95", "ms", 1e3), ("p50_s", "p50", "ms", 1e3)),
    "wheres": lambda config: ["nowhere", "batcher", "queue", "replicas", "tester"],
}

__all__ = [
    "CAUSES",
    "PANEL",
    "PRESETS",
    "RULES",
    "Admission",
    "Autoscaler",
    "Batcher",
    "Config",
    "Mitigation",
    "Router",
    "curve_plot",
    "day",
    "diagnose",
    "live_plot",
    "measure",
    "mitigate",
    "plot",
    "predict",
    "preset",
    "recommend",
    "service_curve",
    "simulate",
    "start",
    "summary",
]


def predict(config: Config, machine: Mapping[str, Any] | None = None) -> Prediction:
    """What the service should do on this machine, with ranges; see `labs.serving.predict.predict`.

    machine: {"curve_s": seconds of a batch of 1 .. max_batch rows}; default the curve that was measured here for this
    model, which takes a few seconds the first time.
    """
    return by_policies.predict(config, curve_of(config) if machine is None else machine)


def summary(run: Run) -> dict[str, Any]:
    """Run.summary() of this lab: percentiles, rates and shares of the steady requests; see `figures.summary_of`."""
    config = run.config
    replica_s = next((n["replica_s"] for n in reversed(run.notes) if n.get("replica_s") is not None), None)
    found = summary_of(run.records, slo_s=config.slo_p95_s, warmup_s=config.warmup_s, replica_s=replica_s)
    good = found["goodput_frac"]
    missed = {} if good is None else {"missed_frac": 1 - good}
    return {**found, **missed, "replica_s": replica_s, "paced": config.paced, "origin": run.origin}
