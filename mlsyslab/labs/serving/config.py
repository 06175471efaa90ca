"""The knobs of the serving lab, its causes and its presets. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from mlsyslab.contract import ConfigError
from mlsyslab.faults import Fault
from mlsyslab.labs.serving.policies import BINDINGS, LATE
from mlsyslab.options import check_options, option

CAUSES = (
    "healthy",
    "batch wait too long",
    "batch too large for the target",
    "saturated",
    "bursts exceed warm capacity",
    "cold starts",
    "no admission control",
    "tester-bound",
    "head of line blocking",
    "unknown",
)
ARRIVALS = ("poisson", "bursts", "on/off", "diurnal", "trace")
ENGINES = ("http", "in process", "ray")


@dataclass(frozen=True, kw_only=True)
class Config:
    """One experiment: a real service on this machine under a schedule of requests fixed beforehand."""

    max_batch: int = option(8, "rows that run together at most", low=1, high=1024, unit="rows")
    max_wait_s: float = option(
        0.005, "how long the oldest request may be held back for company while a replica is free", unit="s", low=0.0, high=1.0
    )  # fmt: skip
    binding: str = option(
        LATE,
        "when a batch is fixed: late, when a replica takes it; early, by a timer while the replicas work",
        choices=BINDINGS,
    )
    replicas: int = option(1, "processes that hold the model, ready before the first request", low=0, high=64)
    rate_per_s: float = option(300.0, "mean arrivals", unit="requests/s", low=0.1, high=100_000.0)
    arrivals: str = option("poisson", "how requests come", choices=ARRIVALS)
    burst_factor: float = option(
        4.0, "of bursts, on/off and diurnal: the peak as a multiple of the mean rate", low=1.0, high=100.0
    )
    duration_s: float = option(
        6.0, "for how long requests are sent, warm-up included", unit="s", low=0.2, high=86_400.0
    )
    slo_p95_s: float = option(
        0.050, "the target: 95 % of the answers within this", unit="s", low=0.001, high=60.0
    )
    deadline_s: float = option(
        0.0, "time after which an answer is worth nothing; 0: none", unit="s", low=0.0, high=600.0
    )
    urgent_frac: float = option(
        0.0, "share of the requests with priority 0; the others have 1", low=0.0, high=1.0
    )
    rows: int = option(1, "largest number of rows of a request; each has 1 to this many", low=1, high=1024)
    admission: bool = option(True, "refuse what the queue cannot hold, or could not answer in time")
    max_queue: int = option(
        64, "rows that may wait, with admission on", low=1, high=1_000_000, unit="rows", advanced=True
    )
    autoscale: bool = option(False, "let the number of replicas follow the load")
    floor: int = option(1, "replicas that are always ready; 0 is scale-to-zero", low=0, high=64)
    ceiling: int = option(2, "most replicas", low=1, high=64)
    cold: bool = option(
        False, "a new replica starts from nothing (interpreter, torch, model) instead of from a process that stands by"
    )  # fmt: skip
    engine: str = option(
        "http", "http: a real front; in process: the same without HTTP; ray: Ray Serve", choices=ENGINES
    )
    width: int = option(256, "of the transformer", low=8, high=16_384, advanced=True)
    layers: int = option(4, "of the transformer", low=1, high=200, advanced=True)
    tokens: int = option(8, "of a row", low=1, high=8192, advanced=True)
    paced: bool = option(
        False,
        "the model waits paced_base_s + paced_row_s × rows instead of computing, as an accelerator of its own would",
        advanced=True,
    )
    paced_base_s: float = option(0.002, "of a paced batch", unit="s", low=0.0, high=60.0, advanced=True)
    paced_row_s: float = option(
        0.0005, "of a paced batch, each row", unit="s", low=0.0, high=60.0, advanced=True
    )
    aging_s: float = option(
        0.1, "how much later than a less urgent request one may come and still overtake it, a priority", unit="s", low=0.0, high=600.0, advanced=True
    )  # fmt: skip
    urgent_slack_s: float = option(
        0.0,
        "a request with less time than this to its deadline gets priority 0",
        unit="s", low=0.0, high=60.0, advanced=True,
    )  # fmt: skip
    clients: int = option(
        0,
        "0: open loop, the schedule is kept whatever happens; else so many closed-loop clients, each waiting for its answer",
        low=0, high=10_000, advanced=True,
    )  # fmt: skip
    kill_at_s: float = option(
        0.0, "kill -9 one replica at this moment; 0: never", unit="s", low=0.0, high=86_400.0, advanced=True
    )
    stall_at_s: float = option(
        0.0, "stop all replicas (SIGSTOP) at this moment for stall_s", unit="s", low=0.0, high=86_400.0, advanced=True
    )  # fmt: skip
    stall_s: float = option(0.0, "how long; 0: no stall", unit="s", low=0.0, high=60.0, advanced=True)
    trace: str = option("", "a CSV of arrivals (TIMESTAMP or arrival_s, and optionally rows, priority)", advanced=True)  # fmt: skip
    warmup_s: float = option(
        1.0, "first part of the schedule: sent and recorded, left out of every figure", unit="s", low=0.0, high=600.0, advanced=True
    )  # fmt: skip
    device: str = option("auto", "where the model runs", choices=("auto", "cpu", "cuda"), advanced=True)
    seed: int = option(0, "of the schedule, the inputs and the weights", low=0, high=2**31 - 1, advanced=True)

    def __post_init__(self) -> None:
        check_options(self)
        if self.rows > self.max_batch:
            raise ConfigError(
                f"rows={self.rows} does not fit into max_batch={self.max_batch}; raise max_batch or lower rows"
            )
        if self.warmup_s >= self.duration_s:
            raise ConfigError(
                f"warmup_s={self.warmup_s:g} leaves nothing of duration_s={self.duration_s:g}; lower it"
            )
        if self.autoscale and not self.floor <= self.replicas <= self.ceiling:
            raise ConfigError(
                f"replicas={self.replicas} is outside floor={self.floor} and ceiling={self.ceiling}; change one of them"
            )
        if self.replicas == 0 and not self.autoscale:
            raise ConfigError(
                "replicas=0 would answer nothing without autoscale; raise replicas or turn autoscale on"
            )
        if (self.arrivals == "trace") != bool(self.trace):
            raise ConfigError(
                f"arrivals={self.arrivals!r} and trace={self.trace!r} do not go together; give both or neither"
            )
        if self.admission and self.max_queue < self.max_batch:
            raise ConfigError(
                f"max_queue={self.max_queue} cannot fill a batch of max_batch={self.max_batch}; raise max_queue or lower max_batch"
            )
        if self.deadline_s and self.deadline_s < self.max_wait_s:
            raise ConfigError(
                f"deadline_s={self.deadline_s:g} is over before max_wait_s={self.max_wait_s:g}; lower the wait"
            )


def faults_of(config: Config) -> list[Fault]:
    """What is injected, for truth.json; empty where only the configuration and the traffic decide."""
    found = []
    if config.kill_at_s:
        found.append(
            Fault(
                cause="unknown",
                mechanism="kill -9 of a replica",
                magnitude=config.kill_at_s,
                unit="s into the run",
            )
        )
    if config.stall_s:
        found.append(
            Fault(
                cause="unknown",
                mechanism="all replicas stopped by SIGSTOP",
                magnitude=config.stall_s,
                unit="s",
            )
        )
    return found


# name -> (the experiment, its rows a second as a share of those of one replica with batches of 8)
_PRESETS: Mapping[str, tuple[Config, float]] = {
    "quick": (Config(duration_s=3.0, warmup_s=0.5), 0.5),
    "worked_example": (Config(), 0.6),
    "healthy": (Config(max_wait_s=0.0), 0.4),
    "one_at_a_time": (Config(max_batch=1), 0.6),
    "early_binding": (Config(binding="early", max_wait_s=0.001), 0.7),
    "long_wait": (Config(max_batch=64, max_wait_s=0.080, max_queue=256), 0.2),
    "large_batch": (Config(max_batch=64, max_wait_s=0.040, slo_p95_s=0.030, max_queue=256), 0.8),
    "burst": (Config(arrivals="bursts", burst_factor=5.0, duration_s=10.0, max_queue=256), 0.35),
    "cold": (
        Config(
            arrivals="on/off",
            replicas=0,
            autoscale=True,
            floor=0,
            ceiling=1,
            cold=True,
            duration_s=12.0,
            warmup_s=0.0,
        ),
        0.3,
    ),
    "overload": (Config(), 5.0),
    "collapse": (Config(admission=False), 1.3),
    "head_of_line": (Config(max_batch=32, rows=32, max_wait_s=0.0, slo_p95_s=0.030, max_queue=256), 0.7),
}
REFERENCE_ROWS_PER_S = 1700.0
"""Rows a second of one replica with batches of 8 on the machine that PRESETS are written for; `measure.preset` fits them
to the machine at hand."""


def fitted(name: str, saturation_per_s: float) -> Config:
    """A preset whose arrivals are its share of `saturation_per_s` (rows a second of one replica with batches of 8)."""
    config, share = _PRESETS[name]
    rows = (1 + config.rows) / 2  # of a mean request
    return dataclasses.replace(config, rate_per_s=max(0.1, round(share * saturation_per_s / rows, 1)))


PRESETS: Mapping[str, Config] = {name: fitted(name, REFERENCE_ROWS_PER_S) for name in _PRESETS}
