"""The service-time curve: how many seconds a batch takes, by its rows. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlsyslab.contract import ConfigError

Array = NDArray[np.float64]
Curve: TypeAlias = Callable[[int], float] | Mapping[int, float] | Sequence[float] | NDArray[np.floating[Any]]


def seconds_of(curve: Curve, max_batch: int) -> Array:
    """s(1) .. s(max_batch), [max_batch], seconds.

    curve: a function of the rows; the values themselves, from one row on; or rows -> seconds for some sizes, with a
    straight line between them and the last two's beyond. Raises ConfigError where it does not reach max_batch or holds
    a value that is no time.
    """
    sizes = np.arange(1, max_batch + 1)
    if callable(curve):
        seconds = np.array([curve(int(rows)) for rows in sizes], float)
    elif isinstance(curve, Mapping):
        seconds = _between({int(rows): float(value) for rows, value in curve.items()}, sizes)
    else:
        seconds = np.asarray(curve, float)[:max_batch]
    if len(seconds) < max_batch:
        raise ConfigError(
            f"the curve has {len(seconds)} values, which does not reach max_batch={max_batch}; measure it up to that size"
        )
    bad = ~(np.isfinite(seconds) & (seconds > 0))
    if bad.any():
        rows = int(np.flatnonzero(bad)[0]) + 1
        raise ConfigError(
            f"the curve says {seconds[rows - 1]:g} s for {rows} rows, which is no time that a batch can take; measure it again"
        )
    return seconds


def _between(known: Mapping[int, float], sizes: NDArray[np.int64]) -> Array:
    if not known:
        raise ConfigError("the curve is empty; measure at least one batch size")
    rows = sorted(known)
    values = [known[one] for one in rows]
    seconds = np.interp(sizes, rows, values)
    if len(rows) > 1:
        slope = (values[-1] - values[-2]) / (rows[-1] - rows[-2])
        seconds = np.where(sizes > rows[-1], values[-1] + max(0.0, slope) * (sizes - rows[-1]), seconds)
    return seconds


def line_through(rows: Array, seconds: Array) -> tuple[float, float]:
    """(a, c) of s(n) = a + c n by least squares, both at least 0; c = 0 where all batches have one size."""
    if len(np.unique(rows)) < 2:
        return float(np.mean(seconds)), 0.0
    c, a = np.polyfit(rows, seconds, 1)
    if c < 0:
        return float(np.mean(seconds)), 0.0
    if a < 0:
        return 0.0, float((rows * seconds).sum() / (rows * rows).sum())
    return float(a), float(c)


def learnt(sizes: Array, service_s: Array, max_batch: int) -> tuple[Array, Array]:
    """(s(1) .. s(max_batch), factors) from what requests saw: the median seconds by the rows of the batch, a line
    through them where a size did not come, and the seconds over it of a sample of requests. Where all batches had one
    size the cost of a row is not known: sqrt(n) is taken, between none and all of it.
    """
    ran = np.isfinite(sizes) & np.isfinite(service_s) & (service_s > 0) & (sizes >= 1)
    rows, seconds = sizes[ran].astype(int), service_s[ran]
    wanted = np.arange(1, max_batch + 1)
    if not len(rows):
        return np.full(max_batch, 1e-3), np.ones(1)
    known = {int(n): float(np.median(seconds[rows == n])) for n in np.unique(rows)}
    if len(known) == 1:
        ((one, took_s),) = known.items()
        curve = took_s * np.sqrt(wanted / one)
    else:
        a, c = line_through(np.array(list(known), float), np.array(list(known.values())))
        line = a + c * wanted
        curve = np.array([known.get(int(n), float(line[n - 1])) for n in wanted])
    factors = seconds / curve[np.minimum(rows, max_batch) - 1]
    return curve, factors[:: max(1, len(factors) // 2000)]
