"""A lab whose runs are scripted: each poll brings one step, nothing is measured, no thread, no process."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from mlsyslab.contract import (
    Action,
    ConfigError,
    Diagnosis,
    Evidence,
    Finding,
    Prediction,
    Range,
    RunError,
)
from mlsyslab.options import check_options, option

CAUSES = ("input", "compute", "healthy", "unknown")
PANEL: dict[str, Any] = {
    "title": "A fake lab: where does the step go?",
    "predict": (("step_s", "step", "ms", 1e3), ("data_frac", "data wait", "%", 100)),
    "knobs": ("ranks", "steps", "input_s"),
    "wheres": lambda config: ["every rank", *(f"rank {rank}" for rank in range(config.ranks))],
    "note": lambda config: "paced compute" if config.paced else "",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    ranks: int = option(2, "processes", low=1, high=64)
    steps: int = option(12, "steps to record", low=1, high=100_000)
    input_s: float = option(0.18, "wait for data", low=0.0, high=30.0, unit="s")
    rate_per_s: float = option(0.0, "limit; 0 is none", low=0.0, high=1e5, unit="/s")
    lr: float = option(0.1, "learning rate", low=1e-6, high=10.0)
    cache: str = option("none", "keep samples", choices=("none", "memory"))
    paced: bool = option(True, "wait instead of computing")
    scaling: tuple[int, ...] = option((), "rank counts", low=1, high=64, advanced=True)
    fault: str = option(
        "none", "what goes wrong in this fake", choices=("none", "start", "run", "poll", "plot", "predict")
    )
    endless: bool = option(False, "go on until stopped", advanced=True)

    def __post_init__(self) -> None:
        check_options(self)
        if self.cache == "memory" and self.ranks > 8:
            raise ConfigError(f"cache='memory' does not fit ranks={self.ranks}; lower ranks")


PRESETS: Mapping[str, Config] = {
    "quick": Config(steps=4),
    "worked_example": Config(),
    "fast_input": Config(input_s=0.01, steps=4),
}
started: list[Run] = []


class Run:
    """One step for each rank at each poll."""

    origin = "measured"

    def __init__(self, config: Config) -> None:
        self.config, self.step, self.stopped = config, 0, False
        self.rows: list[dict[str, Any]] = []
        self._moved = threading.Condition()
        started.append(self)

    def reach(self, step: int) -> None:
        """Wait until `step` steps were polled."""
        with self._moved:
            assert self._moved.wait_for(lambda: self.step >= step, timeout=60)

    @property
    def failed(self) -> bool:
        return self.config.fault == "run" and self.step >= 2

    @property
    def finished(self) -> bool:
        return self.stopped or self.failed or (not self.config.endless and self.step >= self.config.steps)

    @property
    def progress(self) -> float:
        return min(1.0, self.step / self.config.steps)

    @property
    def status(self) -> dict[str, Any]:
        if self.failed:
            return {
                "state": "failed",
                "message": "the run failed",
                "error": "rank 1 failed: ValueError: no JPEG",
            }
        state = "stopped" if self.stopped else "done" if self.finished else "running"
        return {"state": state, "message": ""}

    def poll(self) -> list[dict[str, Any]]:
        if self.config.fault == "poll" and self.step == 1:
            raise KeyError("rank")
        if self.finished:
            return []
        step_s = 0.12 + self.config.input_s
        fresh = [
            {"rank": rank, "step": self.step, "world": self.config.ranks, "step_s": step_s + rank / 1e3}
            for rank in range(self.config.ranks)
        ]
        with self._moved:
            self.step += 1
            self.rows += fresh
            self._moved.notify_all()
        return fresh

    def stop(self) -> Run:
        self.stopped = True
        return self

    def wait(self, timeout_s: float | None = None) -> Run:
        return self


def start(config: Config) -> Run:
    if config.fault == "start":
        raise RunError("cannot write runs/x: the disk is full; choose another folder with out=")
    return Run(config)


def predict(config: Config) -> Prediction:
    if config.fault == "predict":
        raise ZeroDivisionError("float division by zero")
    step_s = 0.12 + config.input_s
    return Prediction(
        values={
            "step_s": Range.around(step_s, 0.1, 0.2),
            "data_frac": Range.around(config.input_s / step_s, 0.1, 0.1),
            "samples_per_s": Range.around(8 / step_s, 0.1, 0.1),
        },
        assumptions=("The loader keeps its pace.",),
        cause="input" if config.input_s > 0.12 else "compute",
    )


def summary(run: Run) -> dict[str, Any]:
    if not run.rows:
        raise RunError("no steady step was recorded; run more steps")
    step_s = sum(row["step_s"] for row in run.rows) / len(run.rows)
    return {"step_s": step_s, "data_frac": run.config.input_s / step_s, "samples_per_s": 8 / step_s}


def diagnose(run: Run) -> Diagnosis:
    share = summary(run)["data_frac"]
    if share < 0.5:
        return Diagnosis(cause="healthy", reason="No phase stands out.")
    evidence = (
        Evidence(name="data wait", value=share, unit="frac", points_at="input"),
        Evidence(name="device utilisation", value=None, unit="frac"),
    )
    finding = Finding(
        rule="data wait",
        cause="input",
        says="the loader cannot keep up",
        evidence=evidence,
        confused_with="<slow storage>",
        next_check="read the files without decoding",
        weight_frac=share,
    )
    action = Action(
        name="cache decoded samples",
        says="Keep decoded samples in memory.",
        change={"input_s": 0.01},
        step_s=Range(0.12, 0.13, 0.14),
        gain_frac=Range(0.5, 0.55, 0.6),
    )
    return Diagnosis(
        cause="input",
        reason="60 % of the step waits for data.",
        where="every rank",
        owner="storage/data",
        findings=(finding,),
        evidence=evidence,
        actions=(action,),
        gain=action.gain_frac,
    )


def plot(run: Run, prediction: Prediction | None = None) -> Figure:
    if run.config.fault == "plot":
        raise TypeError("unsupported operand")
    figure = Figure(figsize=(9, 4))
    axes = figure.add_subplot()
    axes.bar(["data", "compute"], [run.config.input_s * 1e3, 120], color=["#0072B2", "#E69F00"])
    axes.set(title="Data wait is most of the step", ylabel="ms")
    return figure
