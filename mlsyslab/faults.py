"""What was made slow, by which real mechanism: the truth that a verdict is graded against. Pure data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Fault:
    """An injected fault.

    cause: the verdict that names it. mechanism: what really happens, in one sentence. magnitude: in `unit`.
    rank None means every rank. It acts from `start_step` on.
    """

    cause: str
    mechanism: str
    magnitude: float
    unit: str
    rank: int | None = None
    start_step: int = 0

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
