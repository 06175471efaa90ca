"""Configs whose behaviour was checked over seeds: one for each cause, and the presets. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mlsyslab.contract import ConfigError
from mlsyslab.labs.scaleup.config import CAUSES, OVERFLOW_SCALE, UNDERFLOW_SCALE, Config

# The two tasks on which the causes were checked over seeds: a job that is scaled up, and one that is only split.
SCALED: Mapping[str, Any] = {"samples": 16_384, "epochs": 20, "lr": 0.035, "gain": 1.5, "base_batch": 256}
SPLIT: Mapping[str, Any] = {
    "samples": 8192, "epochs": 3, "lr": 0.05, "gain": 1.0, "base_batch": 256, "global_batch": 256, "warmup_epochs": 0.0,
}  # fmt: skip
PROSE: Mapping[str, Any] = {
    "samples": 1024, "epochs": 2, "lr": 0.05, "gain": 1.0, "task": "prose", "base_batch": 64, "global_batch": 64,
    "warmup_epochs": 0.0,
}  # fmt: skip


def _pieces(per_rank: int) -> int:
    """Micro-batches of a rank's share: as many as divide it, at most 16."""
    return max(n for n in range(1, 17) if per_rank % n == 0)


def config_for(cause: str, *, ranks: int = 4, seed: int = 0, engine: str = "auto") -> Config:
    """A config that produces `cause` on `ranks` workers, of the kind whose behaviour was checked over seeds.

    Raises ConfigError for a cause that is none, or that `ranks` workers cannot have.
    """
    who = {"ranks": ranks, "seed": seed, "engine": engine, "cause": cause}
    if cause not in CAUSES or cause == "unknown":
        raise ConfigError(
            f"cause={cause!r} is not one of {', '.join(c for c in CAUSES if c != 'unknown')}; choose one of them"
        )
    special: dict[str, Mapping[str, Any]] = {
        "learning rate not scaled": {**SCALED, "global_batch": 2048, "scaling": "none", "warmup_epochs": 0.0},
        "no warm-up": {**SCALED, "global_batch": 2048, "warmup_epochs": 0.0},
        "learning rate too high for the curvature": {**SCALED, "global_batch": 8192},
        "beyond the critical batch": {**SCALED, "gain": 1.0, "global_batch": 8192, "scaling": "sqrt"},
        "schedule counted in steps": {**SCALED, "global_batch": 1024, "schedule": "cosine"},
        "too few steps": {**SCALED, "global_batch": 1024},
        "accumulation averaged per micro-batch": {**PROSE, "accumulate": _pieces(max(1, 64 // ranks))},
        "batchnorm statistics": {**SPLIT, "norm": "batch", "global_batch": 4 * ranks, "base_batch": 4 * ranks,
                                 "samples": 2048, "epochs": min(24, max(3, ranks)), "lr": 0.02},
        "seed shared by all ranks": {**SPLIT, "augment": 0.15},
        "bf16 weights": {**SPLIT, "lr": 0.001},
        "fp16 overflow": {**SPLIT, "precision": "fp16", "loss_scale": OVERFLOW_SCALE},
        "fp16 underflow": {**SPLIT, "precision": "fp16", "loss_scale": UNDERFLOW_SCALE},
        "bf16 reduction": {**SPLIT, "wire": "bf16"},
    }  # fmt: skip
    chosen = {**special.get(cause, SPLIT), **who}
    whole = max(ranks, chosen["global_batch"] // ranks * ranks)  # 3 ranks take 255 instead of 256
    if chosen["base_batch"] == chosen["global_batch"]:
        chosen["base_batch"] = whole
    return Config(**{**chosen, "global_batch": whole})


PRESETS: Mapping[str, Config] = {
    "quick": config_for("gradient missing", ranks=2),
    "worked_example": Config(cause="no warm-up", warmup_epochs=0.0),
    "recovered": Config(),
    "not_scaled": Config(scaling="none", warmup_epochs=0.0, cause="learning rate not scaled"),
    "too_high": Config(batch_per_rank=1024, cause="learning rate too high for the curvature"),
    "critical_batch": config_for("beyond the critical batch", ranks=8),
    "warmup_useless": Config(gain=0.0, lr=0.12, cause="learning rate too high for the curvature"),
    "duplicated": config_for("samples duplicated"),
    "set_epoch": config_for("set_epoch forgotten"),
    "missing": config_for("gradient missing"),
    "stale": config_for("gradient stale"),
    "sum_adamw": dataclasses.replace(config_for("sum instead of mean"), optimizer="adamw", lr=0.001),
    "sum_helps": config_for("sum instead of mean"),
    "accumulation": config_for("accumulation averaged per micro-batch"),
    "batchnorm": config_for("batchnorm statistics"),
    "corrupted": config_for("corrupted rank"),
    "healthy": config_for("healthy"),
    "healthy_fp16": dataclasses.replace(config_for("healthy"), wire="fp16"),
    "healthy_init": dataclasses.replace(config_for("healthy"), init_seeds="per rank"),
}
