"""The model does not fit: how do you split it over 8 GPUs? Memory and communication of every split, predicted and measured.

The functions are bound eagerly, since importing a submodule of the same name later would replace a lazy one; the
submodules keep torch, pandas and matplotlib out of their own import.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlsyslab import hardware
from mlsyslab.contract import Prediction
from mlsyslab.experiment import Mitigation
from mlsyslab.labs.parallelism import predict as closed_form
from mlsyslab.labs.parallelism.actions import failed_bytes
from mlsyslab.labs.parallelism.clusters import Cluster, cluster
from mlsyslab.labs.parallelism.config import CAUSES, PRESETS, Config, Layout
from mlsyslab.labs.parallelism.diagnose import diagnose
from mlsyslab.labs.parallelism.evidence import BYTES, facts_of
from mlsyslab.labs.parallelism.ledger import Ledger, ledger
from mlsyslab.labs.parallelism.measure import measure, mitigate, preset, start
from mlsyslab.labs.parallelism.plan import PLANS, Plan, ask, plan, what_changes
from mlsyslab.labs.parallelism.plot import ledger_plot, live_plot, pipeline_plot, plans_plot, plot
from mlsyslab.labs.parallelism.rules import OWNER, RULES
from mlsyslab.labs.parallelism.shapes import MODELS, Model
from mlsyslab.runs import Run

PANEL: Mapping[str, Any] = {
    "title": "Parallelism: what fits, and what does the split cost?",
    "knobs": ("strategy", "ranks", "model", "batch", "checkpointing", "memory_cap_mb"),
    "predict": (
        ("peak_bytes", "peak of a rank", "MB", 1e-6),
        ("comm_bytes", "sent by a rank in a step", "MB", 1e-6),
    ),
    "wheres": lambda config: [
        "nowhere",
        "every rank",
        *(f"stage {stage}" for stage in range(config.ranks if config.strategy == "pp" else 0)),
    ],
}

__all__ = [
    "CAUSES",
    "MODELS",
    "OWNER",
    "PANEL",
    "PLANS",
    "PRESETS",
    "RULES",
    "Cluster",
    "Config",
    "Layout",
    "Ledger",
    "Mitigation",
    "Model",
    "Plan",
    "ask",
    "cluster",
    "diagnose",
    "ledger",
    "ledger_plot",
    "live_plot",
    "measure",
    "mitigate",
    "pipeline_plot",
    "plan",
    "plans_plot",
    "plot",
    "predict",
    "preset",
    "start",
    "summary",
    "what_changes",
]


def predict(config: Config, machine: Mapping[str, Any] | None = None) -> Prediction:
    """What the split should hold, send and take here, with ranges; see `labs.parallelism.predict.predict`.

    machine: figures of the probe and `usable_cores`; default what is known of this machine.
    """
    known = {"usable_cores": hardware.limits().get("usable_cores"), **(hardware.cached_probe() or {})}
    return closed_form.predict(config, known if machine is None else machine)


def summary(run: Run) -> dict[str, Any]:
    """Run.summary() of this lab: bytes of the largest rank, the step, and how much of it is wait.

    Of a run that ran out of memory peak_bytes is what it would have needed at that moment: what was live and what it wanted; the
    figures that it never reached are None.
    """
    facts = facts_of(run)
    most: dict[str, Any] = {
        name: max((held[name] for held in facts.memory.values()), default=None) for name in BYTES
    }
    if facts.oom is not None:
        most = {**dict.fromkeys(BYTES), "peak_bytes": failed_bytes(facts)}
    return {
        "ranks": facts.config.ranks,
        "steady_steps": facts.steps,
        **most,
        "step_s": facts.step_s,
        "wait_frac": facts.transfer_frac,
        "bubble_frac": facts.replay.bubble_frac if facts.replay else None,
        "out_of_memory": facts.oom is not None,
        "origin": run.origin,
    }
