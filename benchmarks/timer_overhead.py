"""What StepTimer costs, beside no timer and beside torch.profiler: paired and rotated, in one process.

    python benchmarks/timer_overhead.py [--blocks 120]

Three training steps on one CPU thread: one with next to no arithmetic, one of about 1.5 and one of about 50 ms.
A block runs each condition for a few steps of the same model, in an order that rotates from block to block, so
that a slow minute of the machine meets all of them. Overhead is the difference to "no timer" within the block;
printed are its median over the blocks with a 95 % bootstrap interval, and the difference of the blocks' lower
quartiles, which other processes disturb less. CPU time is of the whole process. The last line is one JSON object.

Targets: 0.05 ms a step, and 0.3 % of a step of 50 ms. On a shared machine a step of 50 ms scatters by more than
0.15 ms, so read that row's interval first: the timer hooks no parameter, hence costs a long step what it costs
the short one, and the last table line divides that by 50 ms.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from torch import nn

from mlsyslab.timing import StepTimer

TARGET_MS, TARGET_FRAC = 0.05, 0.003
CONDITIONS = ("no timer", "StepTimer", "torch.profiler")
Batches = Iterable[torch.Tensor]
Timed = Callable[[Batches], Batches]


@dataclass(frozen=True, kw_only=True)
class Step:
    """A training step to time: layers of `width`, `batch` rows; `steps` of them in a block."""

    name: str
    width: int
    layers: int
    batch: int
    steps: int


STEPS = (
    Step(name="empty", width=4, layers=1, batch=2, steps=200),
    Step(name="short", width=128, layers=5, batch=48, steps=60),
    Step(name="long", width=512, layers=10, batch=160, steps=5),
)


class Loop:
    """One model and its optimizer; `run` trains it on `batches`."""

    def __init__(self, step: Step) -> None:
        torch.manual_seed(0)
        layers = [m for _ in range(step.layers) for m in (nn.Linear(step.width, step.width), nn.ReLU())]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.batches = [torch.randn(step.batch, step.width)] * step.steps

    def run(self, batches: Batches) -> None:
        for batch in batches:
            loss = self.model(batch).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


@contextmanager
def untimed(loop: Loop, out: Path) -> Iterator[Timed]:
    yield iter


@contextmanager
def step_timer(loop: Loop, out: Path) -> Iterator[Timed]:
    with StepTimer(loop.model, loop.optimizer, out=out) as timer:
        yield timer


@contextmanager
def profiler(loop: Loop, out: Path) -> Iterator[Timed]:
    # Collecting only; exporting a trace comes on top of it.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        yield iter


OPENED: dict[str, Callable[[Loop, Path], AbstractContextManager[Timed]]] = {
    "no timer": untimed,
    "StepTimer": step_timer,
    "torch.profiler": profiler,
}


def measure(loop: Loop, condition: str, out: Path) -> dict[str, float]:
    """Milliseconds a step, CPU (all threads of the process) and wall; set-up and tear-down are left out.

    So is the first step: a new timer hooks the model's output in it, once, and autograd cannot reuse the memory of a
    gradient that a hook has seen, which cost the step of 28 ms about one more.
    """
    with OPENED[condition](loop, out) as timed:
        loop.run(timed(loop.batches[:1]))
        batches = timed(loop.batches)
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        loop.run(batches)
        cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    steps = len(loop.batches)
    return {"cpu_ms": cpu_s * 1e3 / steps, "wall_ms": wall_s * 1e3 / steps}


def blocks(step: Step, n: int, folder: Path) -> list[dict[str, dict[str, float]]]:
    """`n` blocks of every condition, the order rotated by one from block to block; one block before them is dropped."""
    loop, serial, rows = Loop(step), count(), []
    for block in range(-1, n):
        order = CONDITIONS[block % 3 :] + CONDITIONS[: block % 3]
        rows.append({c: measure(loop, c, folder / f"{step.name}-{next(serial)}") for c in order})
    return rows[1:]


def interval(values: list[float], seed: int = 0, resamples: int = 2000) -> tuple[float, float, float]:
    """2.5 % bound, median, 97.5 % bound of the median of `values`, by bootstrap (Efron 1979)."""
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(resamples))
    return medians[int(resamples * 0.025)], statistics.median(values), medians[int(resamples * 0.975)]


def overhead(rows: list[dict[str, dict[str, float]]], condition: str, key: str) -> dict[str, float]:
    """Milliseconds a step over "no timer" with their interval, and the median as a fraction of the step."""
    low, middle, high = interval([row[condition][key] - row["no timer"][key] for row in rows])
    base = statistics.median(row["no timer"][key] for row in rows)
    quiet = quartile(rows, condition, key) - quartile(rows, "no timer", key)
    return {"low_ms": low, "median_ms": middle, "high_ms": high, "quartiles_ms": quiet, "step_ms": base}


def quartile(rows: list[dict[str, dict[str, float]]], condition: str, key: str) -> float:
    """Milliseconds a step that a quarter of the blocks stayed below."""
    return statistics.quantiles((row[condition][key] for row in rows), n=4)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=120, help="blocks a step size (default 120)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, object] = {"target_ms": TARGET_MS, "target_frac": TARGET_FRAC, "blocks": options.blocks}
    print(
        f"{'step':7}{'condition':16}{'time':6}{'step ms':>9}{'over ms':>10}{'95 %':>19}{'quartiles':>11}{'share':>9}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for step in STEPS:
            rows = blocks(step, options.blocks, Path(folder))
            for condition in CONDITIONS[1:]:
                for key in ("cpu_ms", "wall_ms"):
                    figures = overhead(rows, condition, key)
                    result[f"{step.name}/{condition}/{key}"] = figures
                    show(step.name, condition, key, figures)
                    if (step.name, condition, key) == ("short", "StepTimer", "cpu_ms"):
                        result["share_of_50_ms_frac"] = figures["median_ms"] / 50
    print(f"the short step's cost as a share of 50 ms: {result['share_of_50_ms_frac'] * 100:.2f} %")
    print(json.dumps(result))


def show(name: str, condition: str, key: str, figures: dict[str, float]) -> None:
    bounds = f"{figures['low_ms']:.3f}..{figures['high_ms']:.3f}"
    share = figures["median_ms"] / figures["step_ms"] * 100
    print(
        f"{name:7}{condition:16}{key[:-3]:6}{figures['step_ms']:9.3f}{figures['median_ms']:10.4f}{bounds:>19}"
        f"{figures['quartiles_ms']:11.4f}{share:8.2f}%",
        flush=True,
    )


if __name__ == "__main__":
    main()
