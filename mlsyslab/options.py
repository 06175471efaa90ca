"""Fields of a lab's Config, described once: sliders, command-line options and error messages are made from them."""

from __future__ import annotations

import argparse
import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from mlsyslab.contract import ConfigError

_KEY = "mlsyslab.option"


@dataclass(frozen=True, kw_only=True)
class Option:
    """One field. kind is "int", "float", "bool", "choice", "text" or "ints" (a comma-separated tuple of whole numbers)."""

    name: str
    kind: str
    default: Any
    says: str
    unit: str = ""
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[str, ...] = ()
    advanced: bool = False

    @property
    def flag(self) -> str:
        """The command-line spelling: batch_size -> --batch-size."""
        return "--" + self.name.replace("_", "-")

    def parse(self, text: str) -> Any:
        """A value from the command line or a text box; raises ConfigError that names the field."""
        try:
            if self.kind == "int":
                return int(text)
            if self.kind == "float":
                return float(text)
            if self.kind == "bool":
                return {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}[
                    text.lower()
                ]
            if self.kind == "ints":
                return tuple(int(part) for part in text.split(",") if part.strip())
        except (ValueError, KeyError):
            wanted = {"int": "a whole number", "float": "a number", "bool": "on or off"}.get(
                self.kind, "1,2,4"
            )
            raise ConfigError(f"{self.name}={text!r} is not {wanted}; {self.says}") from None
        return text

    def check(self, value: Any) -> None:
        """Raise ConfigError unless `value` has the right type and lies in the field's range."""
        unit = f" {self.unit}" if self.unit else ""
        if self.kind == "text":
            if not isinstance(value, str):
                raise ConfigError(f"{self.name}={value!r} is no text; {self.says}")
        elif self.kind == "choice":
            if value not in self.choices:
                raise ConfigError(
                    f"{self.name}={value!r} is not one of {', '.join(self.choices)}; choose one of them"
                )
        elif self.kind == "bool":
            if not isinstance(value, bool):
                raise ConfigError(f"{self.name}={value!r} is not True or False; {self.says}")
        elif self.kind == "ints":
            if not isinstance(value, tuple):
                raise ConfigError(
                    f"{self.name}={value!r} is not a tuple of whole numbers; write for example (1, 2, 4)"
                )
            for part in value:
                dataclasses.replace(self, kind="int").check(part)
        else:
            number = isinstance(value, int) if self.kind == "int" else isinstance(value, (int, float))
            if not number or isinstance(value, bool) or not math.isfinite(value):
                raise ConfigError(
                    f"{self.name}={value!r} is not {'a whole' if self.kind == 'int' else 'a'} number; "
                    f"choose {self.low:g} to {self.high:g}{unit}"
                )
            if not self.low <= value <= self.high:
                raise ConfigError(
                    f"{self.name}={value!r} is outside {self.low:g}..{self.high:g}{unit}; "
                    f"choose a value in that range ({self.says})"
                )


def option(
    default: Any,
    says: str,
    *,
    unit: str = "",
    low: float = -math.inf,
    high: float = math.inf,
    choices: tuple[str, ...] = (),
    advanced: bool = False,
) -> Any:
    """A dataclass field with its unit, range and sentence. The kind follows from the default's type."""
    kinds = {bool: "bool", int: "int", float: "float", tuple: "ints", str: "choice" if choices else "text"}
    described = {
        "kind": kinds[type(default)],
        "says": says,
        "unit": unit,
        "low": low,
        "high": high,
        "choices": choices,
        "advanced": advanced,
    }
    return dataclasses.field(default=default, metadata={_KEY: described})


def options_of(config_class: type[Any]) -> list[Option]:
    """The options of a Config class, in the order of its fields."""
    return [
        Option(name=f.name, default=f.default, **f.metadata[_KEY])
        for f in dataclasses.fields(config_class)
        if _KEY in f.metadata
    ]


def check_options(config: Any) -> None:
    """Check each field of `config` against its option; for `__post_init__`."""
    for item in options_of(type(config)):
        item.check(getattr(config, item.name))


def from_json(config_class: type[Any], values: dict[str, Any]) -> Any:
    """A Config from JSON values (lists become tuples); raises ConfigError on a field it does not know."""
    known = {item.name: item for item in options_of(config_class)}
    strange = sorted(set(values) - set(known))
    if strange:
        raise ConfigError(
            f"{', '.join(strange)} is no field of {config_class.__module__}.Config; "
            "the file may come from a newer mlsyslab: upgrade, or remove the field"
        )
    return config_class(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def add_arguments(parser: argparse._ActionsContainer, config_class: type[Any]) -> None:
    """One command-line option for each field of a Config class."""
    for item in options_of(config_class):
        unit = f" [{item.unit}]" if item.unit else ""
        shown = ",".join(map(str, item.default)) if item.kind == "ints" else item.default
        choices = f" ({', '.join(item.choices)})" if item.choices else ""
        text = f"{item.says}{unit}{choices}; default {shown if shown != '' else 'none'}".replace("%", "%%")
        parser.add_argument(item.flag, dest=item.name, metavar=item.kind.upper(), help=text)


def config_from_arguments(arguments: argparse.Namespace, base: Any) -> Any:
    """`base` with every option that was given on the command line; raises ConfigError on a bad one."""
    given = {item: getattr(arguments, item.name) for item in options_of(type(base))}
    changes = {item.name: item.parse(text) for item, text in given.items() if text is not None}
    return dataclasses.replace(base, **changes)
