"""Training is slow: what do you check first? Where the time of a training step goes.

The functions are bound eagerly, since importing a submodule of the same name later would replace a lazy one; the
submodules keep torch, pandas and matplotlib out of their own import.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlsyslab import hardware
from mlsyslab.contract import Prediction, Range
from mlsyslab.labs.steptime import predict as closed_form
from mlsyslab.labs.steptime.breakdown import Breakdown, breakdown, summary
from mlsyslab.labs.steptime.config import CAUSES, PRESETS, Config
from mlsyslab.labs.steptime.diagnose import diagnose
from mlsyslab.labs.steptime.measure import Mitigation, measure, mitigate, preset, start
from mlsyslab.labs.steptime.plot import live_plot, plot
from mlsyslab.labs.steptime.rules import OWNER, RULES

PANEL: Mapping[str, Any] = {
    "title": "Step time: input, compute or communication?",
    "knobs": ("ranks", "batch_size", "workers", "input_cost_s", "compute_s", "gradient_mb"),
    "note": lambda config: "paced compute" if config.paced else "",
    "predict": (("step_s", "step", "ms", 1e3), ("data_frac", "data wait", "%", 100.0)),
}

__all__ = [
    "CAUSES",
    "OWNER",
    "PANEL",
    "PRESETS",
    "RULES",
    "Breakdown",
    "Config",
    "Mitigation",
    "breakdown",
    "diagnose",
    "live_plot",
    "measure",
    "mitigate",
    "plot",
    "predict",
    "preset",
    "start",
    "summary",
    "what_if",
]


def predict(config: Config, machine: Mapping[str, Any] | None = None) -> Prediction:
    """What a step should take on this machine, with ranges; see `labs.steptime.predict.predict`.

    machine: figures of the probe; default those that this machine's probe has cached, if any.
    """
    return closed_form.predict(config, machine or hardware.cached_probe())


def what_if(config: Config, machine: Mapping[str, Any] | None = None) -> dict[str, Range]:
    """Predicted seconds a step as it is and after each remedy; `machine` as in `predict`."""
    return closed_form.what_if(config, machine or hardware.cached_probe())
