"""Run the straggler experiment: the caller's side. Imports no torch; ranks do."""

from __future__ import annotations

import os
from pathlib import Path

from mlsyslab import experiment, hardware
from mlsyslab.contract import Action, ConfigError
from mlsyslab.experiment import Mitigation
from mlsyslab.labs.straggler.config import PRESETS, Config, faults_of, rebuilt
from mlsyslab.labs.straggler.diagnose import diagnose
from mlsyslab.runs import Run

WORKER = "mlsyslab.labs.straggler.worker:main"


def preset(name: str) -> Config:
    """A preset for this machine: PRESETS[name], unpaced where there is a GPU. Raises ConfigError for an unknown name."""
    if name not in PRESETS:
        raise ConfigError(f"preset {name!r} is not one of {', '.join(PRESETS)}; choose one of them")
    return rebuilt(PRESETS[name], cuda=hardware.cuda_usable())


def refuse_impossible(config: Config) -> None:
    """Raise ConfigError for a fault that this machine cannot inject."""
    if config.fault == "cpu_contention":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
        if cores < 2:
            raise ConfigError(
                f"fault='cpu_contention' needs two cores that can be told apart, this process may use {cores}; "
                "choose throttling or slow_forward"
            )


def start(config: Config, *, out: str | Path | None = None, probe: bool = True) -> Run:
    """Start the experiment and return at once. The run queues for the device if another one has it.

    out: the run directory (absent or empty); default runs/straggler-<time>. probe=False leaves the machine probe
    out where it is not cached. Raises ConfigError for a fault that cannot be injected here or a GPU that is not
    there, RunError where `out` cannot be written.
    """
    refuse_impossible(config)
    return experiment.start(
        "straggler", WORKER, config, worlds=(config.ranks,), faults=faults_of(config), out=out, probe=probe
    )


def measure(config: Config, *, out: str | Path | None = None, timeout_s: float | None = None) -> Run:
    """start(config) and wait. Raises RunError when it fails; what was recorded stays in the run directory."""
    return start(config, out=out).wait(timeout_s)


def mitigate(
    run: Run, action: Action | None = None, *, out: str | Path | None = None, timeout_s: float | None = None
) -> Mitigation:
    """Apply `action` (default: the first of the diagnosis) to the run's configuration and measure again.

    "cordon and replace" runs the whole job with a spare host; `recover` does it within one job. Raises RunError
    when the verdict offers nothing to apply.
    """
    return experiment.mitigate(run, action, diagnose, lambda new: measure(new, out=out, timeout_s=timeout_s))
