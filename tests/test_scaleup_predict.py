"""The clinic's closed forms, each beside an independent computation: simulated noise, simulated descent, exact rounding."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mlsyslab import ConfigError, scaleup
from mlsyslab.labs.scaleup.config import CAUSES
from mlsyslab.labs.scaleup.noise import noise_scale


def gradients(
    true: np.ndarray, deviation: float, small: int, ranks: int, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Norms of noisy gradients: (steps, ranks) of each rank's mean over `small` samples, and of the mean of all."""
    draw = np.random.default_rng(0)
    each = true + deviation / math.sqrt(small) * draw.standard_normal((steps, ranks, len(true)))
    return np.linalg.norm(each, axis=2), np.linalg.norm(each.mean(axis=1), axis=1)


class TestNoiseScale:
    @pytest.mark.parametrize(("ranks", "small"), [(2, 16), (8, 4), (4, 64)])
    def test_it_finds_the_trace_and_the_norm_that_were_simulated(self, ranks: int, small: int) -> None:
        true, deviation = np.full(200, 0.1), 0.5
        local, whole = gradients(true, deviation, small, ranks, steps=4000)
        found = noise_scale(local, whole, small=small, big=small * ranks, decay=0.9995)
        assert found is not None
        assert found.trace == pytest.approx(200 * deviation**2, rel=0.05)
        assert found.square == pytest.approx(200 * 0.1**2, rel=0.15)
        assert found.batch == pytest.approx(200 * deviation**2 / 2.0, rel=0.2)

    def test_numerator_and_denominator_are_smoothed_apart(self) -> None:
        """One step alone is often below zero; the mean of ratios would be ruined by it."""
        local, whole = gradients(np.full(50, 0.02), 1.0, 8, 4, steps=500)
        singles = [noise_scale(local[i : i + 1], whole[i : i + 1], small=8, big=32) for i in range(500)]
        assert sum(one is not None and one.square < 0 for one in singles) > 50
        found = noise_scale(local, whole, small=8, big=32, decay=0.999)
        assert found is not None
        assert found.trace == pytest.approx(50, rel=0.1)

    def test_steps_that_are_not_finite_are_left_out(self) -> None:
        local, whole = gradients(np.full(50, 0.1), 1.0, 8, 4, steps=20)
        local[3, 1], whole[7] = math.nan, math.inf
        found = noise_scale(local, whole, small=8, big=32)
        assert found is not None
        assert found.after_steps == 18

    def test_one_rank_says_nothing_and_a_wrong_batch_is_an_error(self) -> None:
        assert noise_scale([[1.0]], [1.0], small=8, big=8) is None
        with pytest.raises(ValueError, match="small=16 and big=8"):
            noise_scale([[1.0]], [1.0], small=16, big=8)


def test_at_the_critical_batch_steps_and_samples_are_twice_the_least() -> None:
    steps = scaleup.steps_needed(500, critical_batch=500, least_steps=100)
    few = scaleup.samples_needed(1, critical_batch=500, least_steps=100)
    assert steps == 200
    assert scaleup.samples_needed(500, critical_batch=500, least_steps=100) == pytest.approx(
        2 * few, rel=0.01
    )


class TestLimits:
    @pytest.mark.parametrize("share", [0.9, 0.99, 1.01, 1.1])
    def test_descent_with_momentum_on_a_parabola_diverges_above_the_limit(self, share: float) -> None:
        lr = 0.1
        curvature = share * scaleup.sharpness_limit(lr)
        x, speed = 1.0, 0.0
        for _ in range(2000):
            speed = 0.9 * speed + curvature * x
            x -= lr * speed
            if abs(x) > 1e6:
                break
        assert (abs(x) > 1) == (share > 1)

    def test_rates(self) -> None:
        assert scaleup.scaled_rate(0.1, 8) == pytest.approx(0.8)
        assert scaleup.scaled_rate(0.1, 4, "sqrt") == pytest.approx(0.2)
        assert scaleup.scaled_rate(0.1, 4, "none") == 0.1
        for lr, growth, rule in ((0.0, 8, "linear"), (0.1, 0, "linear"), (0.1, 8, "cubic")):
            with pytest.raises(ConfigError):
                scaleup.scaled_rate(lr, growth, rule)

    @pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
    def test_sums_in_another_order_stay_inside_the_band(self, precision: str) -> None:
        """Sums of 8 ranks' gradients, in two orders, in that precision."""
        torch = pytest.importorskip("torch")
        dtype = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        parts = torch.randn(8, 10_000, generator=torch.Generator().manual_seed(0)).to(dtype)
        orders = []
        for order in (range(8), reversed(range(8))):
            total = torch.zeros(10_000, dtype=dtype)
            for rank in order:
                total = total + parts[rank] / 8
            orders.append(float(total.double().norm()))
        gap = abs(orders[0] - orders[1]) / orders[0]
        band = scaleup.rounding_band(8, precision)
        assert 0 < band.expected <= band.high
        assert gap <= band.high
        assert gap <= 4 * band.expected or precision == "fp64"

    def test_an_unknown_precision_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="precision='fp8'"):
            scaleup.rounding_band(8, "fp8")

    def test_warm_up_is_counted_in_samples(self) -> None:
        small, large = scaleup.Config(batch_per_rank=32), scaleup.Config(batch_per_rank=256)
        assert (
            scaleup.warmup_steps(small) * small.whole_batch == scaleup.warmup_steps(large) * large.whole_batch
        )


class TestPrediction:
    @pytest.mark.parametrize("cause", [cause for cause in CAUSES if cause != "unknown"])
    def test_each_cause_has_a_prediction_with_ranges_and_says_when_it_is_wrong(self, cause: str) -> None:
        prediction = scaleup.predict(scaleup.config_for(cause))
        assert prediction.cause == cause
        assert prediction.assumptions
        for low, expected, high in prediction.values.values():
            assert low <= expected <= high

    def test_a_sum_is_as_many_times_the_mean_as_there_are_ranks(self) -> None:
        for ranks in (2, 8):
            value = scaleup.predict(scaleup.config_for("sum instead of mean", ranks=ranks)).values[
                "norm_ratio"
            ]
            assert value.expected == ranks

    def test_the_published_curve_falls_with_the_batch(self) -> None:
        accuracies = list(scaleup.RESNET50_TOP1.values())
        assert accuracies == sorted(accuracies, reverse=True)
        assert all(source and said for source, said in scaleup.PUBLISHED)
