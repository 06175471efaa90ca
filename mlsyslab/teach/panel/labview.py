"""What the panel needs of a lab, read from its contract, with a fallback for each thing that a lab may leave out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlsyslab import contract
from mlsyslab.contract import ConfigError
from mlsyslab.options import Option, options_of
from mlsyslab.teach.panel.picture import StepLines
from mlsyslab.teach.panel.words import Quantity

RANKS_OFFERED = 64


class LabView:
    """A lab module as the panel sees it.

    A lab may have PANEL, a mapping with any of: "title"; "knobs", names of fields shown unfolded; "predict",
    (key, label, unit, scale) of what the learner predicts; "wheres", config -> the places a diagnosis can name;
    "note", config -> words that every result of it must carry, such as "paced compute". It may have
    `live_plot()`, an object with `update(records)`, `figure` and, if it likes, `alt`.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self._given: Mapping[str, Any] = getattr(module, "PANEL", {})

    @property
    def name(self) -> str:
        return str(self.module.__name__).rsplit(".", maxsplit=1)[-1]

    @property
    def title(self) -> str:
        return str(self._given.get("title") or (self.module.__doc__ or self.name).strip().splitlines()[0])

    @property
    def options(self) -> list[Option]:
        return options_of(self.module.Config)

    @property
    def unfolded(self) -> Sequence[str]:
        """The fields that are always in sight; the others fold away."""
        return list(self._given.get("knobs") or [item.name for item in self.options if not item.advanced])

    @property
    def causes(self) -> list[str]:
        return list(self.module.CAUSES)

    @property
    def owners(self) -> list[str]:
        return list(getattr(self.module, "OWNERS", contract.OWNERS))

    def wheres(self, config: Any) -> list[str]:
        """The places that a diagnosis of a run with this config can name."""
        if "wheres" in self._given:
            return list(self._given["wheres"](config))
        ranks = min(int(getattr(config, "ranks", 1)), RANKS_OFFERED)
        return ["every rank", *(f"rank {rank}" for rank in range(ranks)), "nowhere"]

    def note(self, config: Any) -> str:
        return str(self._given["note"](config)) if "note" in self._given else ""

    def preset(self, name: str) -> Any:
        """A Config by its name, fitted to this machine where the lab knows how; raises ConfigError."""
        presets = self.module.PRESETS
        if name not in presets:
            raise ConfigError(f"preset={name!r} is not one of {', '.join(presets)}; choose one of them")
        return self.module.preset(name) if hasattr(self.module, "preset") else presets[name]

    def quantities(self, config: Any) -> list[Quantity]:
        """What the learner predicts: what the lab says, else the first two numbers of its own prediction."""
        if "predict" not in self._given:
            return [Quantity.named(key) for key in list(self.module.predict(config).values)[:2]]
        return [
            Quantity(key=key, label=label, unit=unit, scale=scale)
            for key, label, unit, scale in self._given["predict"]
        ]

    def live_picture(self, quantities: Sequence[Quantity]) -> Any:
        """The lab's own picture, or lines of the first predicted time."""
        if hasattr(self.module, "live_plot"):
            return self.module.live_plot()
        return StepLines(next((q.key for q in quantities if q.unit in ("ms", "s")), "step_s"))
