"""Run the step-time experiment: the caller's side. Imports no torch; ranks do."""

from __future__ import annotations

from pathlib import Path

from mlsyslab import experiment, hardware
from mlsyslab.contract import Action, ConfigError
from mlsyslab.experiment import Mitigation
from mlsyslab.labs.steptime.config import PRESETS, Config, faults_of, scaled
from mlsyslab.labs.steptime.diagnose import diagnose
from mlsyslab.runs import Run

WORKER = "mlsyslab.labs.steptime.worker:main"


def preset(name: str) -> Config:
    """A preset for this machine: PRESETS[name], its gradients scaled to the probed all-reduce rate, and unpaced
    where there is a GPU. Raises ConfigError for an unknown name."""
    if name not in PRESETS:
        raise ConfigError(f"preset {name!r} is not one of {', '.join(PRESETS)}; choose one of them")
    return scaled(PRESETS[name], hardware.cached_probe() or {}, cuda=hardware.cuda_usable())


def start(config: Config, *, out: str | Path | None = None, probe: bool = True) -> Run:
    """Start the experiment and return at once. The run queues for the device if another one has it.

    out: the run directory (absent or empty); default runs/steptime-<time>. probe=False leaves the machine probe
    out where it is not cached. Raises ConfigError for a GPU that is not there, RunError where `out` cannot be written.
    """
    return experiment.start(
        "steptime", WORKER, config, worlds=config.worlds, faults=faults_of(config), out=out, probe=probe
    )


def measure(config: Config, *, out: str | Path | None = None, timeout_s: float | None = None) -> Run:
    """start(config) and wait. Raises RunError when it fails; what was recorded stays in the run directory."""
    return start(config, out=out).wait(timeout_s)


def mitigate(
    run: Run, action: Action | None = None, *, out: str | Path | None = None, timeout_s: float | None = None
) -> Mitigation:
    """Apply `action` (default: the first of the diagnosis) to the run's configuration and measure again.

    Raises RunError when the verdict offers nothing that this machine can do.
    """
    return experiment.mitigate(run, action, diagnose, lambda new: measure(new, out=out, timeout_s=timeout_s))
