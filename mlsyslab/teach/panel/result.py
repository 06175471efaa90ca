"""A static copy of a panel, for notebooks that are read on the web."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Result:
    """Picture and text as one display object. Make it the last line of a cell."""

    text: str
    picture: bytes
    alt: str

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, str], dict[str, Any]]:
        bundle = {"text/plain": self.text}
        if self.picture:
            bundle["image/png"] = base64.b64encode(self.picture).decode()
        return bundle, {"image/png": {"alt": self.alt}} if self.picture else {}

    def __repr__(self) -> str:
        return self.text
