"""Training is slow: what do you check first? Where the time of a training step goes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mlsyslab.labs.steptime.config import CAUSES, PRESETS, Config

if TYPE_CHECKING:
    from mlsyslab.labs.steptime.breakdown import summary
    from mlsyslab.labs.steptime.diagnose import RULES, diagnose
    from mlsyslab.labs.steptime.measure import measure, mitigate, start
    from mlsyslab.labs.steptime.plot import plot
    from mlsyslab.labs.steptime.predict import predict, what_if

_LAZY = {
    "summary": "breakdown",
    "diagnose": "diagnose",
    "RULES": "diagnose",
    "measure": "measure",
    "mitigate": "measure",
    "start": "measure",
    "plot": "plot",
    "predict": "predict",
    "what_if": "predict",
}
__all__ = [
    "CAUSES",
    "PRESETS",
    "RULES",
    "Config",
    "diagnose",
    "measure",
    "mitigate",
    "plot",
    "predict",
    "start",
    "summary",
    "what_if",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'mlsyslab.labs.steptime' has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
