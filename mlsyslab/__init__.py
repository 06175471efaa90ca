"""mlsyslab: rehearse ML system design by predicting a number, measuring it here, and naming the cause.

from mlsyslab import steptime            # a lab: Config, PRESETS, predict, start, measure, diagnose, mitigate, plot
run = steptime.measure(steptime.PRESETS["worked_example"])
print(steptime.diagnose(run))

Importing this package imports neither torch nor Jupyter.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mlsyslab.contract import ConfigError, LabError, RunError
from mlsyslab.runs import open_run

if TYPE_CHECKING:
    from mlsyslab.labs import parallelism, scaleup, serving, steptime, straggler
    from mlsyslab.timing import StepTimer

__version__ = "0.1.0"
__all__ = [
    "ConfigError",
    "LabError",
    "RunError",
    "StepTimer",
    "open_run",
    "parallelism",
    "scaleup",
    "serving",
    "steptime",
    "straggler",
]

_LAZY = {
    "parallelism": ("mlsyslab.labs.parallelism", ""),
    "scaleup": ("mlsyslab.labs.scaleup", ""),
    "serving": ("mlsyslab.labs.serving", ""),
    "steptime": ("mlsyslab.labs.steptime", ""),
    "straggler": ("mlsyslab.labs.straggler", ""),
    "StepTimer": ("mlsyslab.timing", "StepTimer"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'mlsyslab' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    loaded = importlib.import_module(module)
    return getattr(loaded, attribute) if attribute else loaded
