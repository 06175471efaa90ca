"""When requests come, how many rows each has, how urgent it is: fixed before the run starts, from a seed or a file.

Every kind is a Poisson process whose rate follows a profile, except a trace, which is replayed. The mean rate is
`rate_per_s`. Pure, but for reading the trace.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mlsyslab.contract import ConfigError
from mlsyslab.labs.serving.config import Config

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]
Whole = NDArray[np.int64]

BURST_S = 0.2  # length of a burst, about
BURST_SHARE = 0.5  # of the requests come in bursts
ON_S = 0.5  # length of an on phase, about
CURVE_POINTS = 4097  # of the diurnal profile
MOST_REQUESTS = 20_000_000  # 640 MB; a longer schedule is a mistake more often than not


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The requests of a run, [n] each, in the order of time_s.

    time_s: seconds from the start, 0 <= time_s < duration_s. rows: of each request. priority: 0 is urgent. deadline_s:
    on the same clock, infinity where there is none.
    """

    time_s: Array
    rows: Whole
    priority: Whole
    deadline_s: Array

    def __len__(self) -> int:
        return len(self.time_s)


def schedule(config: Config) -> Schedule:
    """The schedule of a configuration; the same for the same configuration, on every machine.

    poisson: a constant rate. bursts: half of the requests come in bursts of about 0.2 s at burst_factor × the mean
    rate, at random moments, the others evenly between (on/off-modulated Poisson). on/off: burst_factor × the mean
    rate for about half a second, then nothing. diurnal: one period in duration_s, beginning at the trough; a sinusoid
    up to burst_factor = 2, its power above, so that the peak is burst_factor × the mean. trace: the first rate_per_s ×
    duration_s requests of the file (from its start again where it has fewer), on a scale of time that makes them last
    duration_s; so its shape stays, and its mean rate is the wished one.

    Raises ConfigError for a file that cannot be used, or a schedule of more than 20 million requests.
    """
    if config.rate_per_s * config.duration_s > MOST_REQUESTS:
        raise ConfigError(
            f"rate_per_s={config.rate_per_s:g} for duration_s={config.duration_s:g} is more than {MOST_REQUESTS:,} requests; "
            "lower one of them"
        )
    rng = np.random.default_rng(config.seed)
    if config.arrivals == "trace":
        return _replayed(config, rng)
    edges_s, rates = profile(config, rng)
    time_s = _poisson(edges_s, rates, rng)
    return _dressed(config, rng, time_s[time_s < config.duration_s])


def profile(config: Config, rng: np.random.Generator) -> tuple[Array, Array]:
    """(edges_s [m + 1], rate_per_s [m]): the rate is constant between two edges. Its mean is config.rate_per_s."""
    end_s, mean, factor = config.duration_s, config.rate_per_s, config.burst_factor
    if config.arrivals == "bursts":
        share = BURST_SHARE / factor  # of the time
        number = max(1, round(end_s * share / BURST_S))
        slot_s, long_s = end_s / number, end_s * share / number
        begins_s = np.arange(number) * slot_s + rng.random(number) * (slot_s - long_s)
        edges_s = np.concatenate([[0.0], np.column_stack([begins_s, begins_s + long_s]).ravel(), [end_s]])
        calm = mean * (1 - BURST_SHARE) / (1 - share)
        return edges_s, np.append(np.tile([calm, factor * mean], number), calm)
    if config.arrivals == "on/off":
        number = max(1, round(end_s / factor / ON_S))
        begins_s = np.arange(number) * end_s / number
        edges_s = np.append(np.column_stack([begins_s, begins_s + end_s / number / factor]).ravel(), end_s)
        return edges_s, np.tile([factor * mean, 0.0], number)
    if config.arrivals == "diurnal":
        edges_s = np.linspace(0.0, end_s, CURVE_POINTS)
        return edges_s, mean * day_shape((edges_s[:-1] + edges_s[1:]) / 2 / end_s, factor)
    return np.array([0.0, end_s]), np.array([mean])


def day_shape(at: Array, factor: float) -> Array:
    """The rate over its mean at moments `at`, 0..1 of the day, with its trough at 0 and its peak, `factor`, at 1/2.

    A sinusoid up to factor = 2; above, sin(pi t)^2k, whose mean is Gamma(k + 1/2) / (sqrt(pi) Gamma(k + 1)).
    """
    wave = np.sin(np.pi * at) ** 2
    if factor <= 2:
        return np.asarray(1 + (factor - 1) * (2 * wave - 1))
    low, high = 1.0, 2 * factor**2
    for _ in range(60):  # bisection: the mean falls as k rises
        k = (low + high) / 2
        mean = math.exp(math.lgamma(k + 0.5) - math.lgamma(k + 1)) / math.sqrt(math.pi)
        low, high = (k, high) if mean * factor > 1 else (low, k)
    return np.asarray(factor * wave**low)


def _poisson(edges_s: Array, rates: Array, rng: np.random.Generator) -> Array:
    """Sorted arrivals of a Poisson process with a piecewise constant rate: given their number they are independent,
    and uniform on the scale of the expected count (Cinlar 1975, "Introduction to Stochastic Processes", 4.7)."""
    expected = np.concatenate([[0.0], np.cumsum(rates * np.diff(edges_s))])
    counts = np.sort(rng.random(rng.poisson(expected[-1]))) * expected[-1]
    # A piece whose rate is 0 expects nothing, so that no count falls into it.
    piece = np.clip(np.searchsorted(expected, counts, side="right") - 1, 0, len(rates) - 1)
    return np.asarray(edges_s[piece] + (counts - expected[piece]) / rates[piece])


def _dressed(
    config: Config,
    rng: np.random.Generator,
    time_s: Array,
    rows: Whole | None = None,
    priority: Whole | None = None,
) -> Schedule:
    """Arrival times with what else a request has; drawn where it is not given."""
    number = len(time_s)
    drawn_rows = rng.integers(1, config.rows + 1, number)
    drawn_priority = (rng.random(number) >= config.urgent_frac).astype(np.int64)
    return Schedule(
        time_s=time_s,
        rows=drawn_rows if rows is None else rows,
        priority=drawn_priority if priority is None else priority,
        deadline_s=time_s + config.deadline_s if config.deadline_s else np.full(number, np.inf),
    )


# ---- traces
def _replayed(config: Config, rng: np.random.Generator) -> Schedule:
    """The file's requests on the wished scale of time."""
    table = read_trace(config.trace)
    at_s = table["arrival_s"].to_numpy(float)
    number = max(1, round(config.rate_per_s * config.duration_s))
    if number > 1 and at_s[-1] <= 0:
        raise ConfigError(f"trace={config.trace!r}: all requests come at one moment; give a file that lasts")
    lasts_s = (
        at_s[-1] * len(at_s) / max(1, len(at_s) - 1)
    )  # a mean gap between the last one and the first again
    which = np.arange(number + 1)
    when_s = at_s[which % len(at_s)] + which // len(at_s) * lasts_s
    scale = config.duration_s / when_s[-1] if when_s[-1] > 0 else 1.0
    time_s = np.minimum(when_s[:-1] * scale, np.nextafter(config.duration_s, 0))
    which = which[:-1] % len(at_s)
    columns = {name: table[name].to_numpy(np.int64)[which] for name in ("rows", "priority") if name in table}
    if "rows" in columns and columns["rows"].max() > config.max_batch:
        raise ConfigError(
            f"trace={config.trace!r} has a request of {columns['rows'].max()} rows, which does not fit into "
            f"max_batch={config.max_batch}; raise max_batch or split the request"
        )
    return _dressed(config, rng, time_s, columns.get("rows"), columns.get("priority"))


def read_trace(path: str | Path) -> pd.DataFrame:
    """The arrivals of a CSV file: arrival_s, sorted, seconds since the first, and rows and priority where it has them.

    The file has a column arrival_s (seconds) or TIMESTAMP (any date and time that pandas reads, as in the Azure LLM
    inference traces); rows is at least 1, priority 0 to 9. Raises ConfigError where it cannot be used.
    """
    import pandas as pd

    try:
        table = pd.read_csv(path)
    except OSError as error:
        raise ConfigError(
            f"trace={str(path)!r} cannot be read: {error.strerror}; give a CSV file that exists"
        ) from error
    except ValueError as error:  # pandas' parser errors are ValueErrors
        raise ConfigError(
            f"trace={str(path)!r} is no CSV: {str(error).splitlines()[0]}; give a table with a header"
        ) from error
    if "arrival_s" in table:
        at_s = pd.to_numeric(table["arrival_s"], errors="coerce")
    elif "TIMESTAMP" in table:
        moments = pd.to_datetime(table["TIMESTAMP"], errors="coerce", format="mixed")
        at_s = (moments - moments.min()).dt.total_seconds()
    else:
        raise ConfigError(
            f"trace={str(path)!r} has the columns {', '.join(map(str, table.columns[:6]))}; it needs arrival_s (seconds) or TIMESTAMP"
        )
    if at_s.empty:
        raise ConfigError(f"trace={str(path)!r} has no line after its header; give a file with arrivals")
    kept = {"arrival_s": at_s}
    for name, low, high in (("rows", 1, 1024), ("priority", 0, 9)):
        if name in table:
            values = pd.to_numeric(table[name], errors="coerce")
            _refuse(
                path,
                name,
                table[name],
                ~values.between(low, high) | (values % 1 != 0),
                f"a whole number, {low} to {high}",
            )
            kept[name] = values
    what = next(name for name in ("arrival_s", "TIMESTAMP") if name in table)
    _refuse(path, what, table[what], ~np.isfinite(at_s), "a time")
    frame = pd.DataFrame(kept).sort_values("arrival_s", kind="stable", ignore_index=True)
    frame["arrival_s"] -= frame["arrival_s"].iloc[0]
    return frame


def _refuse(path: str | Path, name: str, column: pd.Series, bad: pd.Series, wanted: str) -> None:
    """Raise ConfigError for the first bad cell of a column."""
    if bad.any():
        line = int(np.flatnonzero(bad)[0])
        raise ConfigError(
            f"trace={str(path)!r}, line {line + 2}: {name}={column.tolist()[line]!r} is not {wanted}; correct the file"
        )
