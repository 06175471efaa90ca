"""Run the scale-up experiment: the caller's side. Imports no torch; ranks do."""

from __future__ import annotations

from pathlib import Path

from mlsyslab import experiment
from mlsyslab.contract import Action, ConfigError
from mlsyslab.experiment import Mitigation
from mlsyslab.labs.scaleup.config import Config, base_of, control_of, faults_of, has_base
from mlsyslab.labs.scaleup.diagnose import diagnose
from mlsyslab.labs.scaleup.presets import PRESETS
from mlsyslab.runs import Run

WORKER = "mlsyslab.labs.scaleup.worker:main"


def preset(name: str) -> Config:
    """A preset by its name. Raises ConfigError for an unknown one."""
    if name not in PRESETS:
        raise ConfigError(f"preset {name!r} is not one of {', '.join(PRESETS)}; choose one of them")
    return PRESETS[name]


def expected_records(config: Config) -> int:
    """Rows that a run writes: one a rank and step, of the small run, the control and the large run."""
    parts = [config]
    if config.compare:
        parts.append(control_of(config))
    if has_base(config):
        parts.append(base_of(config))
    return sum(part.steps * part.ranks for part in parts)


def start(config: Config, *, out: str | Path | None = None, probe: bool = True) -> Run:
    """Start the experiment and return at once. The run queues for the device if another one has it.

    out: the run directory (absent or empty); default runs/scaleup-<time>. probe=False leaves the machine probe
    out where it is not cached. Raises ConfigError for a GPU that is not there, RunError where `out` cannot be written.
    """
    worlds = (1,) if config.virtual else (config.ranks,)
    return experiment.start(
        "scaleup", WORKER, config, worlds=worlds, faults=faults_of(config), out=out, probe=probe,
        expected=expected_records(config),
    )  # fmt: skip


def measure(config: Config, *, out: str | Path | None = None, timeout_s: float | None = None) -> Run:
    """start(config) and wait. Raises RunError when it fails; what was recorded stays in the run directory."""
    return start(config, out=out).wait(timeout_s)


def mitigate(
    run: Run, action: Action | None = None, *, out: str | Path | None = None, timeout_s: float | None = None
) -> Mitigation:
    """Apply `action` (default: the first of the diagnosis) to the run's configuration and measure again.

    Raises RunError when the verdict offers nothing that this machine can do.
    """
    chosen = action or next((a for a in diagnose(run).actions if a.change), None)
    return experiment.mitigate(
        run,
        chosen,
        diagnose,
        lambda new: measure(new, out=out, timeout_s=timeout_s),
        figure=chosen.figure if chosen else "val_loss",
    )
