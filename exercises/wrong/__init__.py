"""Typical wrong answers, kept to prove that the checks catch them.

    exercises/wrong/NN_name.py
        from exercises.wrong import Wrong
        WRONG = [
            Wrong(exercise="1.1", old="/ step_s", new="/ own_s", why="own time leaves out the wait for the others"),
            Wrong(exercise="1.2", source="share = 0.5", why="a guess"),
        ]

`exercise` is a tag of the cell that holds the answer and of the cell that checks it; the latter also has the tag
`check`. Give `old` and `new` (a change of the solution's cell) or `source` (all of the cell).
"""

from __future__ import annotations

import runpy
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """One wrong answer to one exercise, and why somebody would give it."""

    exercise: str
    why: str
    source: str = ""
    old: str = ""
    new: str = ""

    def cell(self, solution: str) -> str:
        """The wrong cell, given the right one. Raises ValueError where `old` does not occur exactly once."""
        if self.source:
            return self.source.strip("\n")
        if solution.count(self.old) != 1 or not self.old:
            raise ValueError(
                f"wrong answer to {self.exercise}: {self.old!r} occurs {solution.count(self.old) if self.old else 0} times "
                "in the solution; it must occur once"
            )
        return solution.replace(self.old, self.new)


def load(path: Path) -> list[Wrong]:
    """The wrong answers in a file of this folder; [] where there is no such file."""
    return list(runpy.run_path(str(path))["WRONG"]) if path.exists() else []
