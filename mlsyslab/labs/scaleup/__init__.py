"""Worse with more workers: is it the optimiser or the system? The same training, small and large, told apart by its records.

The functions are bound eagerly, since importing a submodule of the same name later would replace a lazy one; the
submodules keep torch, pandas and matplotlib out of their own import.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mlsyslab.experiment import Mitigation
from mlsyslab.labs.scaleup.answers import GATE_FRAC, GATE_STEPS, gate_steps
from mlsyslab.labs.scaleup.compare import compare
from mlsyslab.labs.scaleup.config import (
    CAUSES,
    OPTIMISER,
    SYSTEM,
    Config,
    bucket_of,
    learning_rate,
)
from mlsyslab.labs.scaleup.diagnose import chart, diagnose, walk
from mlsyslab.labs.scaleup.evidence import facts_of
from mlsyslab.labs.scaleup.measure import measure, mitigate, preset, start
from mlsyslab.labs.scaleup.noise import noise_scale, samples_needed, steps_needed
from mlsyslab.labs.scaleup.plot import clinic_plot, live_plot, plot, sharpness_plot
from mlsyslab.labs.scaleup.predict import (
    PUBLISHED,
    RESNET50_TOP1,
    predict,
    rounding_band,
    scaled_rate,
    sharpness_limit,
    warmup_steps,
)
from mlsyslab.labs.scaleup.presets import PRESETS, config_for
from mlsyslab.labs.scaleup.rules import RULES
from mlsyslab.runs import Run

if TYPE_CHECKING:
    from mlsyslab.labs.scaleup.recorder import ScaleupRecorder

PANEL: Mapping[str, Any] = {
    "title": "Scale-up: is it the optimiser or the system?",
    "knobs": ("ranks", "batch_per_rank", "lr", "scaling", "warmup_epochs", "cause"),
    "predict": (
        ("norm_ratio", "first gradient norm, large over control", "times", 1.0),
        ("acc_gap_frac", "accuracy lost against the small run", "%", 100.0),
    ),
    "wheres": lambda config: ["nowhere", "every rank", *(f"rank {rank}" for rank in range(config.ranks))],
    "note": lambda config: "virtual ranks, in one process" if config.virtual else "",
}

__all__ = [
    "CAUSES",
    "GATE_FRAC",
    "GATE_STEPS",
    "OPTIMISER",
    "PANEL",
    "PRESETS",
    "PUBLISHED",
    "RESNET50_TOP1",
    "RULES",
    "SYSTEM",
    "Config",
    "Mitigation",
    "ScaleupRecorder",
    "bucket_of",
    "chart",
    "clinic_plot",
    "compare",
    "config_for",
    "diagnose",
    "learning_rate",
    "live_plot",
    "measure",
    "mitigate",
    "noise_scale",
    "plot",
    "predict",
    "preset",
    "rounding_band",
    "samples_needed",
    "scaled_rate",
    "sharpness_limit",
    "sharpness_plot",
    "start",
    "steps_needed",
    "summary",
    "walk",
    "warmup_steps",
]


def __getattr__(name: str) -> Any:
    if name != "ScaleupRecorder":  # which alone needs torch
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("mlsyslab.labs.scaleup.recorder").ScaleupRecorder


def summary(run: Run) -> dict[str, Any]:
    """Run.summary() of this lab: how the large run went, beside its control and the small run; None where one is absent.

    norm_ratio: the first gradient norm over the control's; norm_gap: the largest relative difference in the first 20 steps, or 5 where the
    control diverges.
    acc_gap_frac: accuracy lost against the small run, or the control where that is the small run. noise_batch: the gradient
    noise scale in samples. record_frac: share of the steps' time that the records took.
    """
    facts = facts_of(run)
    large, control, reference = facts.large, facts.control, facts.base or facts.control
    gap = facts.norm_gap(gate_steps(facts))
    accuracy = large.last("val_acc_frac")
    best = reference.last("val_acc_frac") if reference else None
    noise = facts.noise
    spent, whole = (float(np.nansum(large.get(name))) for name in ("record_s", "step_s"))
    whole /= len(large.ranks) if large.header.get("virtual") else 1  # replicas share their steps
    return {
        "ranks": len(large.ranks),
        "virtual": bool(large.header.get("virtual")),
        "global_batch": large.batch,
        "steps": large.steps,
        "peak_lr": float(large.lr.max()),
        "norm_ratio": _number(large.norm[0] / control.norm[0]) if control else None,
        "norm_gap": float(gap.max()) if len(gap) else None,
        "final_loss": _number(large.final_loss()),
        "val_loss": large.last("val_loss"),
        "val_acc_frac": accuracy,
        "acc_gap_frac": best - accuracy if best is not None and accuracy is not None else None,
        "small_acc_frac": best,
        "sharpness": facts.base.sharpness[0][1] if facts.base and facts.base.sharpness else None,
        "sharpness_limit": sharpness_limit(float(large.lr.max())),
        "noise_batch": _number(noise.batch) if noise else None,
        "record_frac": spent / whole if whole else None,
        "origin": run.origin,
    }


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
