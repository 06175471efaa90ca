"""Knobs: a lab's options as core ipywidgets, in the unit that people use."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ipywidgets as widgets

from mlsyslab.contract import ConfigError
from mlsyslab.options import Option

MILLISECONDS_UP_TO_S = 60.0  # a field in seconds that may be longer than this is shown in seconds
OWN = "(your own)"  # what the preset says once a knob was moved
SLIDER_ROOM = 4  # a slider reaches this many times the largest preset, and grows when more is asked for


@dataclass(frozen=True, kw_only=True)
class Knob:
    """One field of the Config as a widget; the widget shows `value * scale`."""

    option: Option
    widget: Any
    scale: float = 1.0

    def get(self) -> Any:
        """The value in the Config's unit; raises ConfigError where the text cannot be read."""
        value = self.widget.value
        if self.option.kind == "ints":
            return self.option.parse(value)
        return float(f"{value / self.scale:.9g}") if self.option.kind == "float" else value

    def put(self, value: Any) -> None:
        """Show a value; a slider grows for it instead of clipping it. Raises ConfigError out of the option's range."""
        self.option.check(value)
        if self.option.kind == "ints":
            self.widget.value = ",".join(str(part) for part in value)
            return
        shown = value * self.scale if self.option.kind == "float" else value
        log = isinstance(self.widget, widgets.FloatLogSlider)
        if self.option.kind in ("int", "float") and not log and shown > self.widget.max:
            self.widget.max = shown
        self.widget.value = shown


def knob_for(option: Option, presets: Sequence[Any]) -> Knob:
    """The widget that suits an option; its reach follows from the lab's presets, not from what is merely allowed."""
    scale = 1e3 if option.unit == "s" and option.high <= MILLISECONDS_UP_TO_S else 1.0
    unit = "ms" if scale != 1.0 else option.unit
    label = option.name.removesuffix("_s") if option.unit == "s" else option.name
    words = label.removesuffix("_" + option.unit.lower()).replace("_mb_per_s", "").replace("_", " ")
    common = {
        "description": f"{words} ({unit})" if unit else words,
        "tooltip": f"{option.says}{f', in {unit}' if unit else ''}",
        "style": {"description_width": "135px"},
        "layout": widgets.Layout(width="325px"),
    }
    widget = _widget(option, scale, presets, common)
    widget.add_class(f"mls-knob-{option.name}")
    return Knob(option=option, widget=widget, scale=scale if option.kind == "float" else 1.0)


def _widget(option: Option, scale: float, presets: Sequence[Any], common: dict[str, Any]) -> Any:
    if option.kind == "bool":
        return widgets.Checkbox(value=option.default, indent=True, **common)
    if option.kind == "choice":
        return widgets.Dropdown(options=option.choices, value=option.default, **common)
    if option.kind == "text":
        return widgets.Text(value=option.default, continuous_update=False, **common)
    if option.kind == "ints":
        text = ",".join(str(part) for part in option.default)
        return widgets.Text(value=text, placeholder="for example 1,2,4", continuous_update=False, **common)
    used = [getattr(preset, option.name) for preset in presets] + [option.default]
    reach = min(option.high, _round_up(SLIDER_ROOM * max([abs(value) for value in used])))
    if option.kind == "int":
        return _int_widget(option, int(reach), common)
    return _float_widget(option, scale, reach, common)


def _int_widget(option: Option, reach: int, common: dict[str, Any]) -> Any:
    if option.low == -math.inf or reach - option.low > 200 or option.name == "seed":
        low, high = int(max(option.low, -(2**31))), int(min(option.high, 2**31 - 1))
        return widgets.BoundedIntText(value=option.default, min=low, max=high, **common)
    high = max(reach, int(min(option.high, option.low + 8)))
    return widgets.IntSlider(
        value=option.default, min=int(option.low), max=high, continuous_update=False, **common
    )


def _float_widget(option: Option, scale: float, reach: float, common: dict[str, Any]) -> Any:
    if option.low > 0 and option.high / option.low > 1000:
        low, high = math.log10(option.low), math.log10(option.high)
        return widgets.FloatLogSlider(
            value=option.default,
            min=low,
            max=high,
            step=0.05,
            readout_format=".3g",
            continuous_update=False,
            **common,
        )
    if reach == 0 or option.low == -math.inf:
        low, high = max(option.low, -1e12) * scale, min(option.high, 1e12) * scale
        return widgets.BoundedFloatText(value=option.default * scale, min=low, max=high, **common)
    step = _round_up(reach * scale / 1000)
    return widgets.FloatSlider(
        value=option.default * scale,
        min=option.low * scale,
        max=reach * scale,
        step=step,
        readout_format=f".{max(0, -math.floor(math.log10(step)))}f",
        continuous_update=False,
        **common,
    )


def _round_up(value: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    if value <= 0:
        return 0
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value * (1 - 1e-9))


class Settings:
    """Every knob of a lab, and the choice of presets. What the panel sets itself is not reported as a move."""

    def __init__(
        self, options: Sequence[Option], presets: Mapping[str, Any], *, hidden: bool = False
    ) -> None:
        self.knobs = {option.name: knob_for(option, list(presets.values())) for option in options}
        self.hidden = hidden
        self._quiet = False
        self.preset = widgets.Dropdown(
            options=[*presets, OWN],
            value=OWN,
            description="preset",
            layout=widgets.Layout(width="260px"),
            style={"description_width": "50px"},
            tooltip="settings that make a known story",
        )
        self.preset.add_class("mls-preset")
        for knob in self.knobs.values() if hidden else ():
            knob.widget.layout.visibility = "hidden"  # keeps its place: nothing jumps

    @property
    def widgets(self) -> list[Any]:
        return [self.preset, *(knob.widget for knob in self.knobs.values())]

    def values(self) -> dict[str, Any]:
        """Each field in the Config's unit; raises ConfigError where a text cannot be read."""
        return {name: knob.get() for name, knob in self.knobs.items()}

    def put(self, fields: Mapping[str, Any], preset: str = OWN) -> None:
        """Set knobs; raises ConfigError for a field that is not there or a value out of its range."""
        strange = sorted(set(fields) - set(self.knobs))
        if strange:
            raise ConfigError(f"no setting {', '.join(strange)}; there are {', '.join(self.knobs)}")
        self._quiet = True
        try:
            for name, value in fields.items():
                self.knobs[name].put(value)
            self.preset.value = OWN if self.hidden else preset
        finally:
            self._quiet = False

    def watch(self, moved: Callable[[], None], chosen: Callable[[str], None]) -> None:
        """moved() when the learner turns a knob, chosen(name) when the learner picks a preset."""
        for knob in self.knobs.values():
            knob.widget.observe(lambda _: None if self._quiet else moved(), "value")
        self.preset.observe(lambda change: None if self._quiet else chosen(change["new"]), "value")
