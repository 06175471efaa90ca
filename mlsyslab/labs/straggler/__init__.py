"""One worker is slow: which, why, and what do you do? A slow rank found, explained, cordoned.

The functions are bound eagerly, since importing a submodule of the same name later would replace a lazy one; the
submodules keep torch, pandas and matplotlib out of their own import.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlsyslab import hardware
from mlsyslab.contract import Prediction
from mlsyslab.experiment import Mitigation
from mlsyslab.labs.straggler import predict as closed_form
from mlsyslab.labs.straggler.config import CAUSES, FAULTS, PRESETS, Config
from mlsyslab.labs.straggler.detect import Detector
from mlsyslab.labs.straggler.diagnose import diagnose
from mlsyslab.labs.straggler.elastic import recover
from mlsyslab.labs.straggler.evidence import facts_of
from mlsyslab.labs.straggler.measure import measure, mitigate, preset, start
from mlsyslab.labs.straggler.plot import live_plot, plot
from mlsyslab.labs.straggler.recovery import Recovery
from mlsyslab.labs.straggler.rules import BESIDES, OWNER
from mlsyslab.labs.straggler.rules import RULES as EXPLAIN
from mlsyslab.labs.straggler.simulate import simulate
from mlsyslab.runs import Run

RULES = (*EXPLAIN, *BESIDES)

PANEL: Mapping[str, Any] = {
    "title": "Straggler: which rank is slow, and why?",
    "knobs": ("ranks", "fault", "slow_rank", "magnitude", "pattern", "compute_s"),
    "note": lambda config: "paced accelerator" if config.paced else "",
    "predict": (("step_s", "step", "ms", 1e3), ("wait_frac", "wait of a healthy rank", "%", 100.0)),
    "wheres": lambda config: ["nowhere", *(f"rank {rank}" for rank in range(config.ranks))],
}

__all__ = [
    "CAUSES",
    "FAULTS",
    "OWNER",
    "PANEL",
    "PRESETS",
    "RULES",
    "Config",
    "Detector",
    "Mitigation",
    "Recovery",
    "diagnose",
    "live_plot",
    "measure",
    "mitigate",
    "plot",
    "predict",
    "preset",
    "recover",
    "simulate",
    "start",
    "summary",
]


def predict(config: Config, machine: Mapping[str, Any] | None = None) -> Prediction:
    """What the job should do on this machine, with ranges; see `labs.straggler.predict.predict`.

    machine: figures of the probe and `usable_cores`; default what is known of this machine.
    """
    known = {"usable_cores": hardware.limits().get("usable_cores"), **(hardware.cached_probe() or {})}
    return closed_form.predict(config, known if machine is None else machine)


def summary(run: Run) -> dict[str, Any]:
    """Run.summary() of this lab: seconds a round of the job, and own work and wait of the slowest and the others."""
    facts = facts_of(run)
    slow = facts.named or (max(facts.own_s, key=lambda rank: facts.own_s[rank]),)
    others = [rank for rank in facts.ranks if rank not in slow] or list(facts.ranks)
    middle = sorted(others, key=lambda rank: facts.own_s[rank])[len(others) // 2]
    return {
        "ranks": len(facts.ranks),
        "steady_steps": facts.steps,
        "step_s": facts.step_s,
        "own_s": facts.own_s[middle],
        "slow_own_s": max(facts.own_s[rank] for rank in slow),
        "transfer_s": facts.transfer_s,
        "wait_s": facts.wait_s[middle],
        "wait_frac": facts.wait_s[middle] / facts.step_s,
        "gain_frac": facts.blame.gain_frac,
        "excess_s": facts.excess_s,
        "paced": facts.paced,
        "origin": run.origin,
    }
