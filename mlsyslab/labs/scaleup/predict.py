"""What scaling up should do, before it is tried: rules, limits and bands, each with its source. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mlsyslab.contract import ConfigError, Prediction, Range
from mlsyslab.labs.scaleup.answers import GATE_FRAC, LOW_PRECISION_GATE_FRAC
from mlsyslab.labs.scaleup.config import MOMENTUM, Config, bucket_of, faults_of

UNIT_ROUNDOFF: Mapping[str, float] = {"fp64": 2.0**-53, "fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}

# Published accuracy or error over the batch, as reference curves: top-1 accuracy in percent of ResNet-50 on ImageNet by
# batch size, with the linear rule and warm-up (README of the ImageNet example of dm-haiku, DeepMind, read 2026).
RESNET50_TOP1: Mapping[int, float] = {256: 76.7, 1024: 76.5, 4096: 76.2, 32_768: 71.7}
PUBLISHED: tuple[tuple[str, str], ...] = (
    ("P. Goyal et al. 2017 (arXiv 1706.02677)", "linear rule and 5 epochs of warm-up keep the accuracy of ResNet-50 up to a batch of 8,192"),
    ("C. Shallue et al. 2019 (JMLR 20, 112)", "35 workloads, 168,160 models: perfect scaling, then diminishing returns, then none; where differs widely, and no worse result once rates are tuned"),
    ("S. McCandlish et al. 2018 (arXiv 1812.06162)", "the noise scale predicts the largest useful batch within an order of magnitude, and grows as the loss falls"),
)  # fmt: skip

# Accuracy lost against the reference, of the two tasks on which the causes were checked (docs/log.md, 5 seeds each).
ACCURACY_LOST: Mapping[str, tuple[float, float, float]] = {
    "healthy": (-0.02, 0.0, 0.02),
    "learning rate not scaled": (0.05, 0.1, 0.2),
    "no warm-up": (0.05, 0.4, 0.86),
    "learning rate too high for the curvature": (0.05, 0.6, 0.86),
    "beyond the critical batch": (0.02, 0.12, 0.25),
    "schedule counted in steps": (-0.02, 0.02, 0.2),
    "too few steps": (0.02, 0.06, 0.2),
    "fp16 overflow": (0.4, 0.6, 0.8),
    "fp16 underflow": (0.02, 0.3, 0.7),
    "ranks start with different weights": (0.1, 0.4, 0.7),
    "batchnorm statistics": (0.03, 0.2, 0.6),
    "gradients not synchronised": (-0.02, 0.05, 0.3),
}


def scaled_rate(lr: float, growth: float, rule: str = "linear") -> float:
    """The learning rate for a batch that is `growth` times as large: linear for SGD (Goyal 2017), the square root for
    Adam, whose step does not grow with the gradient (and for SGD where the linear one is unstable).

    Raises ConfigError for a rate or growth that is not above zero, or another rule."""
    if lr <= 0 or growth <= 0:
        raise ConfigError(
            f"lr={lr:g} and growth={growth:g} must both be above zero; give the small run's rate"
        )
    if rule not in ("none", "linear", "sqrt"):
        raise ConfigError(f"rule={rule!r} is not one of none, linear, sqrt; choose one of them")
    return lr * {"none": 1.0, "linear": growth, "sqrt": math.sqrt(growth)}[rule]


def warmup_steps(config: Config) -> int:
    """Steps of the warm-up: in epochs, so that the same samples pass whatever the batch (Goyal 2017: 5 epochs)."""
    return round(config.warmup_epochs * config.epoch_steps)


def sharpness_limit(lr: float, momentum: float = MOMENTUM) -> float:
    """The largest Hessian eigenvalue at which gradient descent with momentum is stable: 2 (1 + momentum) / lr."""
    return 2 * (1 + momentum) / lr


def rounding_band(ranks: int, precision: str = "fp32") -> Range:
    """Relative difference of gradient norms between two world sizes that are equal but for rounding.

    low 0, expected 4 units of roundoff times the square root of the ranks (sums in another order; 8 ranks: seen up to 6.6e-7),
    high the gate. Raises ConfigError for a precision that is not known."""
    if precision not in UNIT_ROUNDOFF:
        raise ConfigError(f"precision={precision!r} is not one of {', '.join(UNIT_ROUNDOFF)}")
    gate = {"fp64": 1e-11, "fp32": GATE_FRAC}.get(precision, LOW_PRECISION_GATE_FRAC)
    return Range(0.0, min(gate, 4 * UNIT_ROUNDOFF[precision] * math.sqrt(ranks)), gate)


def predict(config: Config) -> Prediction:
    """What the large run should show beside its control and the small run."""
    cause = _expected_cause(config)
    few, middle, many = ACCURACY_LOST.get(cause, (-0.03, 0.02, 0.2))
    steps = float(config.steps)
    limit = sharpness_limit(config.peak_lr)
    values = {
        "norm_ratio": _norm_ratio(config, cause),
        "acc_gap_frac": Range(few, middle, many),
        "steps": Range(steps, steps, steps),
        "peak_lr": Range(config.peak_lr, config.peak_lr, config.peak_lr),
        "sharpness_limit": Range(limit, limit, limit),
    }
    if cause in ("healthy", "learning rate not scaled", "no warm-up"):
        values["norm_gap"] = rounding_band(config.ranks)
    assumptions = [
        f"lost accuracy is what 5 seeds showed on the {'prose' if config.task == 'prose' else 'digits'}; another model has another critical batch and another sharpness",
        "the linear rule holds while steps stay short against the curvature: below a sharpness of 2 (1 + momentum) / lr",
    ]
    if config.task == "prose":
        assumptions.append("the prose is Python's own manual, which differs between versions of Python")
    return Prediction(values=values, assumptions=tuple(assumptions), cause=cause)


def _expected_cause(config: Config) -> str:
    found = faults_of(config)
    return found[0].cause if found else "healthy"


def _norm_ratio(config: Config, cause: str) -> Range:
    """The first gradient norm over the control's. The ranks' gradients are alike in direction at the start, so that a mean
    without one of N is smaller by up to 1/N."""
    n = config.ranks
    if bucket_of(cause) in ("optimiser", "healthy") or cause in (
        "set_epoch forgotten",
        "samples skipped",
        "gradient stale",
    ):
        return Range.around(1.0, GATE_FRAC, GATE_FRAC)
    return {
        "sum instead of mean": Range(n * 0.999, float(n), n * 1.001),
        "gradient missing": Range(max(0.0, 1 - 1.5 / n), 1 - 1 / n, 1 - 0.3 / n),
        "gradient scaled wrongly": Range(1 + 0.6 / n, 1 + 2 / n, 1 + 3 / n),
        "samples duplicated": Range(0.7, 1.3, 3.0),
        "ranks start with different weights": Range(0.2, 0.7, 1.5),
        "gradients not synchronised": Range(0.7, 1.2, 3.0),
        "batchnorm statistics": Range(0.7, 1.1, 2.5),
        "accumulation averaged per micro-batch": Range(0.95, 1.05, 1.6),
    }.get(cause, Range(0.9, 1.0, 1.1))  # fmt: skip
