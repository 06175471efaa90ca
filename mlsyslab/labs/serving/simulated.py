"""What a simulation gives: the records, batches and events that a measured run would have left. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mlsyslab.contract import Origin
from mlsyslab.labs.serving.config import Config
from mlsyslab.labs.serving.figures import OUTCOMES, summary_of

if TYPE_CHECKING:
    import pandas as pd

    from mlsyslab.labs.serving.simulate import World

OK, REJECTED, EXPIRED, CANCELLED, ERROR = range(len(OUTCOMES))


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """What came out.

    columns: name -> [n], a value for each request, with the names of a measured run's records. batches: name -> [m]:
    started_s, service_s, rows, requests, replica, reason. events: what happened to replicas, in the form of a measured
    run's notes. replica_s: seconds that replicas existed, from the decision to start one until its end. end_s: the last
    answer, or the end of the schedule. left: the counters at the end; each should be 0.
    """

    config: Config
    columns: Mapping[str, NDArray[Any]]
    batches: Mapping[str, NDArray[Any]]
    events: tuple[Mapping[str, Any], ...]
    replica_s: float
    end_s: float
    left: Mapping[str, int]
    origin: Origin = "simulated"

    @property
    def records(self) -> pd.DataFrame:
        """The columns as a table, a row for each request."""
        import pandas as pd

        return pd.DataFrame(dict(self.columns))

    def summary(self) -> dict[str, float | None]:
        """The figures of a run; see `figures.summary_of`."""
        return summary_of(
            self.columns, slo_s=self.config.slo_p95_s, warmup_s=self.config.warmup_s, replica_s=self.replica_s
        )


def simulated(world: World, overhead_s: float) -> Simulated:
    """The notes of a simulation's world that has ended, as arrays."""
    config, number = world.config, len(world.sent_s)
    table = list(zip(*world.started, strict=True)) or [()] * 6
    kinds: tuple[Any, ...] = (float, float, np.int64, np.int64, np.int64, object)
    names = ("started_s", "service_s", "rows", "requests", "replica", "reason")
    batches = {name: np.array(values, kind) for name, values, kind in zip(names, table, kinds, strict=True)}
    batch_of, sent_s, held_s = (
        np.array(world.batch_of, np.int64),
        np.array(world.sent_s),
        np.array(world.held_s),
    )
    outcome, left_s = np.full(number, OK), np.zeros(number)
    for i, (code, when_s) in world.ended.items():
        outcome[i], left_s[i] = code, when_s
    outcome[(batch_of < 0) & (outcome == OK)] = ERROR  # it was never answered, which `left` tells
    ran = outcome == OK

    def of(name: str, nothing: float) -> NDArray[Any]:
        """A batch's value for each request that it answered."""
        return (
            np.where(ran, batches[name][batch_of], nothing)
            if len(batches[name])
            else np.full(number, nothing)
        )

    waited_s, service_s = of("started_s", math.nan) - sent_s, of("service_s", math.nan)
    held_s = np.where(ran, np.minimum(held_s, waited_s), math.nan)
    asked = np.array(world.asked, float).reshape(-1, 3)[np.arange(number) % max(1, len(world.asked))]
    columns = {
        "id": np.arange(number), "intended_s": sent_s, "sent_s": sent_s, "lag_s": np.zeros(number),
        "queue_s": waited_s - held_s, "batch_wait_s": held_s, "service_s": service_s,
        "total_s": np.where(ran, waited_s + service_s + overhead_s, np.maximum(left_s - sent_s, 0.0)),
        "batch_size": of("rows", math.nan), "replica": of("replica", math.nan),
        "rows": asked[:, 0].astype(np.int64), "priority": asked[:, 1].astype(np.int64),
        "deadline_s": np.where(np.isfinite(asked[:, 2]), asked[:, 2], math.nan),
        "outcome": np.array(OUTCOMES, object)[outcome], "warmup": sent_s < config.warmup_s,
        "retries": np.bincount(np.array(world.retried, np.int64), minlength=number)[:number],
    }  # fmt: skip
    batcher = world.core.batcher
    left = {
        "waiting requests": batcher.count,
        "waiting rows": batcher.rows,
        "running batches": sum(one.running is not None for one in world.core.replicas.values()),
        "requests without an outcome": number - int(ran.sum()) - len(world.ended),
        "requests not sent": 0 if config.clients else len(world.planned) - number,
    }
    replica_s = world.replica_s + sum(world.end_s - born_s for born_s in world.born_s.values())
    end = {"kind": "event", "event": "end", "time_s": world.end_s, "replica_s": replica_s}
    return Simulated(
        config=config, columns=columns, batches=batches, events=(*world.notes, end), replica_s=replica_s,
        end_s=world.end_s, left=left,
    )  # fmt: skip
