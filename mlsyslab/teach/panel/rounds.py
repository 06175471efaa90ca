"""One round of predict, measure, diagnose: what is known so far, and what of it may be shown. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlsyslab.contract import Action, Diagnosis, Prediction
from mlsyslab.teach.panel.verdict import outcome_words
from mlsyslab.teach.panel.words import Quantity, Row

EXTRA_ROWS = 4


@dataclass
class Round:
    """A new setting starts a new round; nothing of the last one is carried over."""

    config: Any
    yours: Mapping[str, float] = field(default_factory=dict)
    prediction: Prediction | None = None
    run: Any = None
    measured: Mapping[str, Any] = field(default_factory=dict)
    diagnosis: Diagnosis | None = None
    mitigated: Any = None

    def rows(self, asked: Sequence[Quantity], *, hidden: bool = False) -> list[Row]:
        """The comparison. The library's numbers come with the measured ones, not before; `hidden` keeps them back."""
        known = self.prediction is not None and bool(self.measured) and not hidden
        predicted = self.prediction.values if self.prediction is not None and known else {}
        names = {quantity.key for quantity in asked}
        more = [key for key in predicted if key in self.measured and key not in names][:EXTRA_ROWS]
        return [
            Row(
                quantity=quantity,
                predicted=predicted.get(quantity.key),
                yours=self.yours.get(quantity.key),
                measured=self.measured.get(quantity.key),
            )
            for quantity in [*asked, *map(Quantity.named, more)]
        ]

    def note(self) -> str:
        """The sentence under the comparison."""
        if not self.measured or self.prediction is None:
            return "The library's own prediction is shown after the run."
        wrong_when = "; ".join(self.prediction.assumptions[:2])
        return f"The prediction assumes: {wrong_when}" if wrong_when else ""

    def action(self) -> Action | None:
        """The verdict's first action that a machine can apply, None where it takes a person."""
        actions = self.diagnosis.actions if self.diagnosis else ()
        return next((action for action in actions if action.change), None)

    def changed_config(self) -> Any:
        """The config after the action; raises ConfigError where the two do not fit."""
        action = self.action()
        return dataclasses.replace(self.config, **action.change) if action else self.config

    def outcome(self, asked: Sequence[Quantity], after: Mapping[str, Any]) -> str:
        """The gain promised beside the gain that came."""
        action = self.action()
        offered = [*asked, Quantity.named("step_s")]
        if action is not None:  # what the action promises first, where both runs have it
            known = {quantity.key: quantity for quantity in offered}
            offered.insert(0, known.get(action.figure, Quantity.named(action.figure)))
        both = [q for q in offered if after.get(q.key) is not None and self.measured.get(q.key) is not None]
        if action is None or not both:
            return "nothing to compare"
        key = both[0].key
        promised = action.step_s if key == action.figure else None
        return outcome_words(both[0], before=self.measured[key], after=after[key], promised=promised)
