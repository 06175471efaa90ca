"""The closed forms of a batching server, each with its source and where it holds. Pure.

s(n): seconds of a batch of n rows, `seconds[n - 1]`. B: rows of the largest batch. T: how long the batcher holds a
request back. Rates are rows a second, which are requests where each has one row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mlsyslab.labs.serving.curves import Array

Z_99 = 2.576  # two-sided, 99 %


# ---- capacity
def saturation_per_s(seconds: Array, replicas: int = 1) -> float:
    """Rows a second that replicas with full batches answer: replicas × B / s(B). A ceiling for late binding, whatever T
    is; early binding may stay far below (`early_limit_per_s`)."""
    return replicas * len(seconds) / float(seconds[-1])


def best_batch(seconds: Array) -> int:
    """The batch size with most rows a second. Batching pays where it is not 1: n / s(n) > 1 / s(1)."""
    return int(np.argmax(np.arange(1, len(seconds) + 1) / seconds)) + 1


def in_system(rate_per_s: float, mean_s: float) -> float:
    """Requests in the system: L = lambda W (Little 1961). Exact for every stable system over a long time."""
    return rate_per_s * mean_s


def wait_bound_s(
    seconds: Array, max_wait_s: float, queue_rows: int, replicas: int = 1, largest_rows: int = 1
) -> float:
    """The longest that an admitted request can wait before it starts, seconds, with late binding, one priority, no
    failure, and a queue of at most queue_rows: the hold T, the rest of the running batches, and the batches before it.

    Each of them holds at least B - largest_rows + 1 rows, since only what does not fit stays behind. An upper bound, far
    above the usual wait. With several replicas full rounds are counted, which is an upper bound too.
    """
    least = len(seconds) - largest_rows + 1
    rounds = math.ceil(math.ceil(queue_rows / least) / replicas)
    return max_wait_s + (1 + rounds) * float(seconds.max())


# ---- waiting
def md1_s(rate_per_s: float, service_s: float) -> float:
    """Mean seconds in the system without batching, Poisson arrivals, constant service: s + rho s / (2 (1 - rho)), M/D/1
    (Pollaczek 1930, Khinchine 1932). Exact; infinity from rho = 1 on."""
    rho = rate_per_s * service_s
    return service_s + rho * service_s / (2 * (1 - rho)) if rho < 1 else math.inf


@dataclass(frozen=True, kw_only=True)
class Chain:
    """What `chain` gives: means over requests (mean_s) and over batches (mean_batch), the busy share of the time, and
    the probability that a batch's end finds nobody."""

    mean_s: float
    mean_batch: float
    utilisation_frac: float
    empty_frac: float


def chain(rate_per_s: float, seconds: Array, states: int = 0) -> Chain:
    """One replica, late binding, T = 0, one row a request, Poisson arrivals, constant s(n): exact.

    The Markov chain on n, the requests left when a batch ends (bulk service, Bailey 1954): with m = max(n, 1) and
    b = min(m, B) the next n is m - b + Poisson(lambda s(b)). Its stationary distribution gives
    L = sum pi (m + lambda s(b) / 2) s(b) / sum pi (s(b) + [n = 0] / lambda), and W = L / lambda (Little).
    states: of the chain, at which it is cut; default enough for up to 0.98 of the saturation. Infinite above that of B / s(B).
    """
    largest = len(seconds)
    if rate_per_s >= saturation_per_s(seconds):
        return Chain(mean_s=math.inf, mean_batch=float(largest), utilisation_frac=1.0, empty_frac=0.0)
    rho = rate_per_s * float(seconds[-1]) / largest
    number = states or int(min(2000, max(100, 4 * largest, 8 * largest / (1 - rho))))
    left = np.arange(number)
    m = np.maximum(left, 1)
    b = np.minimum(m, largest)
    took_s = seconds[b - 1]
    step = np.zeros((number, number))
    for n in range(number):
        arrivals = _poisson(rate_per_s * float(took_s[n]), number)
        rest = int(m[n] - b[n])
        step[n, rest:] = arrivals[: number - rest]
        step[n, -1] += max(0.0, 1 - step[n].sum())
    # pi (P - I) = 0 with one equation replaced by sum pi = 1.
    system = (step - np.eye(number)).T
    system[-1] = 1.0
    pi = np.linalg.solve(system, np.append(np.zeros(number - 1), 1.0))
    idle_s = pi[0] / rate_per_s
    cycle_s = float(pi @ took_s) + idle_s
    present = float((pi * (m + rate_per_s * took_s / 2) * took_s).sum()) / cycle_s
    return Chain(
        mean_s=present / rate_per_s,
        mean_batch=float(pi @ b),
        utilisation_frac=1 - idle_s / cycle_s,
        empty_frac=float(pi[0]),
    )


def _poisson(mean: float, number: int) -> Array:
    """P(0) .. P(number - 1), in logarithms so that nothing underflows early."""
    counts = np.arange(number)
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, number)))])
    return (
        np.asarray(np.exp(counts * math.log(mean) - mean - logs)) if mean > 0 else (counts == 0).astype(float)
    )


def unlimited_bound_s(rate_per_s: float, fixed_s: float, row_s: float) -> float:
    """Upper bound of the mean seconds in the system with s(n) = fixed_s + row_s n, no largest batch, T = 0 (Inoue 2019,
    arXiv 1912.06322): the smaller of two functions. Within 1 % of simulation from half load on, 9 % high at light load;
    infinity where lambda row_s >= 1."""
    a, c, rate = fixed_s, row_s, rate_per_s
    if rate * c >= 1:
        return math.inf
    first = (c + a) / (2 * (1 - rate * c)) * (1 + 2 * rate * a + (1 - rate * a) / (1 + rate * c))
    second = 1.5 * a / (1 - rate * c) + c / 2 * (rate * c + 2) / (1 - (rate * c) ** 2)
    return min(first, second)


def light_load_s(rate_per_s: float, max_wait_s: float, seconds: Array) -> float:
    """Mean seconds in the system at light load with a hold of T: b = 1 + lambda T rows come together, the i-th of which
    waits T less what it came later, so T (1 - (b - 1) / (2 b)) + s(b). Good to 1-4 % (low) while batches hardly ever meet
    a busy replica and b < B."""
    b = min(1 + rate_per_s * max_wait_s, float(len(seconds)))
    service_s = float(np.interp(b, np.arange(1, len(seconds) + 1), seconds))
    return max_wait_s * (1 - (b - 1) / (2 * b)) + service_s


# ---- early binding
def early_batch(rate_per_s: float, max_wait_s: float, seconds: Array) -> tuple[float, float]:
    """(E[N], E[s(N)]) of the batches that an early binder forms: N = min(B, 1 + Poisson(lambda T)); it closes a batch by
    count or T after its first request, whether or not a replica is free."""
    largest = len(seconds)
    chances = _poisson(rate_per_s * max_wait_s, largest)
    chances[-1] = max(0.0, 1 - chances[:-1].sum())
    return float(chances @ np.arange(1, largest + 1)), float(chances @ seconds)


def early_stable(rate_per_s: float, max_wait_s: float, seconds: Array, replicas: int = 1) -> bool:
    """Whether an early binder keeps up: lambda E[s(N)] < replicas E[N] (work that comes in a second < seconds that there
    are). Exact for the batches of `early_batch`."""
    rows, took_s = early_batch(rate_per_s, max_wait_s, seconds)
    return rate_per_s * took_s < replicas * rows


def early_limit_per_s(max_wait_s: float, seconds: Array, replicas: int = 1) -> float:
    """The largest rate at which an early binder keeps up; at most the saturation. By bisection."""
    low, high = 0.0, saturation_per_s(seconds, replicas)
    if early_stable(high * (1 - 1e-9), max_wait_s, seconds, replicas):
        return high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if early_stable(middle, max_wait_s, seconds, replicas) else (low, middle)
    return low


# ---- bursts, staffing, starts
def kingman_s(
    rho: float, service_s: float, arrivals_cv2: float, service_cv2: float = 0.0, replicas: int = 1
) -> float:
    """Mean wait before service, seconds: rho^(sqrt(2 (k + 1)) - 1) / (k (1 - rho)) × (ca² + cs²) / 2 × s (Kingman 1961
    for k = 1; Allen-Cunneen for more). An approximation for heavy traffic, without batching; infinity from rho = 1 on."""
    if rho >= 1:
        return math.inf
    crowd = rho ** (math.sqrt(2 * (replicas + 1)) - 1) / (replicas * (1 - rho))
    return crowd * (arrivals_cv2 + service_cv2) / 2 * service_s


def staffing(rate_per_s: float, replica_per_s: float, beta: float = 1.0) -> int:
    """Replicas by the square-root rule: R + beta sqrt(R), R = lambda / mu* (Halfin and Whitt 1981). beta: 1 leaves about a
    fifth of the requests waiting, 2 a fortieth. For many replicas without batching; with batching it is on the safe side."""
    work = rate_per_s / replica_per_s
    return max(1, math.ceil(work + beta * math.sqrt(work) - 1e-9))


def cold_start(rate_per_s: float, replicas: int, replica_per_s: float, cold_s: float) -> tuple[float, float]:
    """(backlog rows, drain seconds) of a step of the rate to rate_per_s that one more replica answers after cold_s: the
    backlog is (lambda - k mu*) d, and goes in backlog / ((k + 1) mu* - lambda). A fluid: exact for the means.
    (0, 0) where k replicas suffice, (.., infinity) where k + 1 do not."""
    backlog = max(0.0, rate_per_s - replicas * replica_per_s) * cold_s
    spare = (replicas + 1) * replica_per_s - rate_per_s
    return backlog, 0.0 if backlog == 0 else backlog / spare if spare > 0 else math.inf


def warm_needed(peak_per_s: float, replicas: int, replica_per_s: float, cold_s: float, slo_s: float) -> int:
    """Replicas to keep warm beside `replicas` for a peak: ceil((peak - k mu*) / mu*) where a start takes longer than the
    target allows, else 0. A fluid; at the peak itself the replicas are then full."""
    if cold_s <= slo_s:
        return 0
    return max(0, math.ceil((peak_per_s - replicas * replica_per_s) / replica_per_s - 1e-9))


def requests_needed(quantile: float, margin_frac: float = 0.5) -> int:
    """Requests for a percentile known with 99 % confidence to within margin_frac of 1 - quantile: z² p (1 - p) / m²
    (MLPerf Inference, server scenario, which takes a twentieth). p95: 505 at a half; p99: 2628."""
    margin = margin_frac * (1 - quantile)
    return math.ceil(Z_99**2 * quantile * (1 - quantile) / margin**2)
