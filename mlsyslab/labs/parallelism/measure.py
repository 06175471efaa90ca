"""Run the parallelism experiment: the caller's side. Imports no torch; ranks do."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mlsyslab import experiment, hardware
from mlsyslab.contract import Action, ConfigError
from mlsyslab.experiment import Mitigation
from mlsyslab.labs.parallelism.config import PRESETS, Config, faults_of
from mlsyslab.labs.parallelism.diagnose import diagnose
from mlsyslab.runs import Run

WORKER = "mlsyslab.labs.parallelism.worker:main"


def preset(name: str) -> Config:
    """A preset by its name. Where there is a GPU it runs there. Raises ConfigError for an unknown name."""
    if name not in PRESETS:
        raise ConfigError(f"preset {name!r} is not one of {', '.join(PRESETS)}; choose one of them")
    config = PRESETS[name]
    # Nodes are network namespaces, through which only gloo on CPU tensors speaks here.
    return (
        dataclasses.replace(config, device="cpu") if config.nodes > 1 and hardware.cuda_usable() else config
    )


def start(config: Config, *, out: str | Path | None = None, probe: bool = True) -> Run:
    """Start the experiment and return at once. The run queues for the device if another one has it.

    out: the run directory (absent or empty); default runs/parallelism-<time>. probe=False leaves the machine probe
    out where it is not cached. Raises ConfigError for a GPU that is not there, RunError where `out` cannot be written.
    """
    return experiment.start(
        "parallelism", WORKER, config, worlds=(config.ranks,), faults=faults_of(config), out=out, probe=probe
    )


def measure(config: Config, *, out: str | Path | None = None, timeout_s: float | None = None) -> Run:
    """start(config) and wait. Raises RunError when it fails; an out-of-memory is a result and raises nothing."""
    return start(config, out=out).wait(timeout_s)


def mitigate(
    run: Run, action: Action | None = None, *, out: str | Path | None = None, timeout_s: float | None = None
) -> Mitigation:
    """Apply `action` (default: the first of the diagnosis) to the run's configuration and measure again.

    Raises RunError when the verdict offers nothing to apply.
    """
    chosen = action or next((a for a in diagnose(run).actions if a.change), None)
    return experiment.mitigate(
        run,
        chosen,
        diagnose,
        lambda new: measure(new, out=out, timeout_s=timeout_s),
        figure=chosen.figure if chosen else "step_s",
    )
