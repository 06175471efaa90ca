"""Pipeline schedules: the order of each stage's work, and how it plays out in time. Pure; what `play` gives is simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Op = tuple[str, int]  # "F" or "B", and the microbatch


def orders(schedule: str, stages: int, microbatches: int) -> list[tuple[Op, ...]]:
    """The work of each stage in its order, as torch.distributed.pipelining runs it.

    "gpipe": all forwards, then all backwards (Huang et al. 2019). "1f1b": as many forwards as there are stages left, then one
    forward and one backward in turn, then the backwards that remain (Narayanan et al. 2019).
    """
    forwards = [("F", m) for m in range(microbatches)]
    backwards = [("B", m) for m in range(microbatches)]
    if schedule == "gpipe":
        return [(*forwards, *backwards)] * stages
    found = []
    for stage in range(stages):
        warm = min(stages - stage, microbatches)
        turns = [op for pair in zip(backwards, forwards[warm:], strict=False) for op in pair]
        found.append((*forwards[:warm], *turns, *backwards[microbatches - warm :]))
    return found


def bubble_frac(stages: int, microbatches: int) -> float:
    """Share of the time (0..1) in which a stage of equal ones is idle: (p - 1) / (m + p - 1), for both schedules
    (Huang et al. 2019; Narayanan et al. 2021)."""
    return (stages - 1) / (microbatches + stages - 1)


def in_flight(schedule: str, stages: int, microbatches: int, stage: int) -> int:
    """The most microbatches whose activations a stage holds at once: all under GPipe, p - stage under 1F1B."""
    return microbatches if schedule == "gpipe" else min(stages - stage, microbatches)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A step played out: for each stage (op, microbatch, begin_s, end_s), in order."""

    stages: tuple[tuple[tuple[str, int, float, float], ...], ...]

    @property
    def step_s(self) -> float:
        """Seconds from the first begin to the last end."""
        return max(ops[-1][3] for ops in self.stages)

    @property
    def idle_frac(self) -> tuple[float, ...]:
        """Share of the step in which each stage has nothing to do."""
        return tuple(1 - sum(end - begin for _, _, begin, end in ops) / self.step_s for ops in self.stages)

    @property
    def bubble_frac(self) -> float:
        """Mean idle share over the stages."""
        return sum(self.idle_frac) / len(self.stages)


def play(
    work: Sequence[Sequence[Op]], forward_s: Sequence[float], backward_s: Sequence[float], send_s: float = 0.0
) -> Timeline:
    """Each stage does its work in its order, as soon as what it needs has come: a forward the activations of the stage before, a
    backward the gradient of the stage behind, `send_s` after they were ready. Seconds of one microbatch, stage by stage."""
    last = len(work) - 1
    ends: dict[tuple[str, int, int], float] = {}
    done: list[list[tuple[str, int, float, float]]] = [[] for _ in work]
    todo = [list(ops) for ops in work]
    while any(todo):
        moved = False
        for stage, ops in enumerate(todo):
            while ops:
                op, microbatch = ops[0]
                neighbour = stage - 1 if op == "F" else stage + 1
                ready = 0.0
                if 0 <= neighbour <= last:
                    if (op, microbatch, neighbour) not in ends:
                        break
                    ready = ends[op, microbatch, neighbour] + send_s
                begin = max(ready, done[stage][-1][3] if done[stage] else 0.0)
                end = begin + (forward_s if op == "F" else backward_s)[stage]
                ends[op, microbatch, stage] = end
                done[stage].append((op, microbatch, begin, end))
                ops.pop(0)
                moved = True
        if not moved:
            raise ValueError("these orders wait for each other for ever")
    return Timeline(stages=tuple(tuple(ops) for ops in done))
