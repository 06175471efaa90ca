"""The closed forms of a job of many ranks: the latest of n, and how often to write a checkpoint. Pure."""

from __future__ import annotations

import math
from statistics import NormalDist

NORMAL = NormalDist()
BLOM_ERROR_FRAC = 0.05  # of the maximum: 4.4 % at n = 2, below 0.5 % from n = 16 on (integrated numerically)


def expected_max(n: int) -> float:
    """Expected maximum of n independent standard normals, by Blom's approximation: the quantile (n - 3/8) / (n + 1/4)
    (Blom 1958, "Statistical Estimates and Transformed Beta-Variables"). Off by 4.4 % at n = 2, by 0.4 % at 16,384."""
    return NORMAL.inv_cdf((n - 0.375) / (n + 0.25))


def spread_of_max(n: int) -> float:
    """About the standard deviation of that maximum: half the distance of its quantiles at -1 and +1 sigma, since
    P(max <= x) = Phi(x)^n. Exact at n = 1, 5 % low at 16,384."""
    quantiles = [-NORMAL.inv_cdf(-math.expm1(math.log(NORMAL.cdf(z)) / n)) for z in (-1.0, 1.0)]
    return (quantiles[1] - quantiles[0]) / 2


def expected_later(mean: float, spread: float, other: float, its_spread: float) -> float:
    """Expected maximum of two independent normals (Clark 1961, "The Greatest of a Finite Set of Random Variables"):
    the larger mean when they are far apart, more when they are not."""
    apart = math.hypot(spread, its_spread)
    if apart == 0:
        return max(mean, other)
    z = (mean - other) / apart
    return mean * NORMAL.cdf(z) + other * NORMAL.cdf(-z) + apart * NORMAL.pdf(z)


def young_every_s(checkpoint_s: float, job_mtbf_s: float) -> float:
    """sqrt(2 checkpoint_s job_mtbf_s), seconds of training between two checkpoints (Young 1974). Good while a
    checkpoint takes far less than the time between failures."""
    return math.sqrt(2 * checkpoint_s * job_mtbf_s)


def daly_every_s(checkpoint_s: float, job_mtbf_s: float) -> float:
    """Young's interval with two further terms of its series (Daly 2006), seconds:
    sqrt(2 C M) (1 + sqrt(C / (2 M)) / 3 + C / (18 M)) - C, and M where a checkpoint takes more than 2 M."""
    ratio = checkpoint_s / (2 * job_mtbf_s)
    if ratio >= 1:
        return job_mtbf_s
    return young_every_s(checkpoint_s, job_mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_s


def goodput_frac(every_s: float, *, job_mtbf_s: float, checkpoint_s: float, restart_s: float) -> float:
    """Share of the wall time (0..1) that is kept training with a checkpoint each every_s of training (Daly 2006):
    T exp(-R/M) / (M (exp((T + C) / M) - 1)). Restarts may fail too. 0 where no checkpoint is ever reached."""
    segment = (every_s + checkpoint_s) / job_mtbf_s
    if segment > 700:
        return 0.0
    return every_s / job_mtbf_s * math.exp(-restart_s / job_mtbf_s) / math.expm1(segment)
