"""Run the step-time experiment: the caller's side. Imports no torch; ranks do."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from mlsyslab import hardware, launch
from mlsyslab.contract import Action, ConfigError, Range, RunError
from mlsyslab.labs.steptime.breakdown import breakdown
from mlsyslab.labs.steptime.config import PRESETS, Config, faults_of, scaled
from mlsyslab.labs.steptime.diagnose import diagnose
from mlsyslab.records import write_json
from mlsyslab.runs import Run, create_run

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
    usable = hardware.cuda_usable()
    if config.device == "cuda" and not usable:
        raise ConfigError("device='cuda' but torch can use no NVIDIA GPU here; choose device='auto' or 'cpu'")
    device = (
        "cuda" if usable and config.device != "cpu" else "cpu"
    )  # one queue for all GPUs: ranks may take several
    expected = config.steps * sum(config.worlds)
    truth = [fault.to_json() for fault in faults_of(config)]
    path = create_run("steptime", config, out=out, truth=truth, expected=expected)

    def prepare() -> None:
        write_json(path / "environment.json", hardware.environment(device, measure=probe))

    launch.warm_up()
    job = launch.start(
        WORKER,
        dataclasses.asdict(config),
        path,
        config.worlds,
        device=device,
        what="steptime",
        prepare=prepare,
    )
    return Run(path, job=job)


def measure(config: Config, *, out: str | Path | None = None, timeout_s: float | None = None) -> Run:
    """start(config) and wait. Raises RunError when it fails; what was recorded stays in the run directory."""
    return start(config, out=out).wait(timeout_s)


@dataclass(frozen=True, kw_only=True)
class Mitigation:
    """An action applied: the gain that was promised, and the gain that came (shares of the step before)."""

    action: Action
    before: Run
    after: Run
    promised: Range | None
    came_frac: float

    def __str__(self) -> str:
        hope = f"{self.promised.low:.0%} to {self.promised.high:.0%}" if self.promised else "nothing"
        return f"{self.action.name}: promised {hope} of the step, came {self.came_frac:.0%}"


def mitigate(
    run: Run, action: Action | None = None, *, out: str | Path | None = None, timeout_s: float | None = None
) -> Mitigation:
    """Apply `action` (default: the first of the diagnosis) to the run's configuration and measure again.

    Raises RunError when the verdict offers nothing that this machine can do.
    """
    chosen = action or next((a for a in diagnose(run).actions if a.change), None)
    if chosen is None:
        raise RunError(
            f"the verdict on {run.path} offers no action to apply; read its reason, or name an action"
        )
    after = measure(dataclasses.replace(run.config, **chosen.change), out=out, timeout_s=timeout_s)
    before_s, after_s = breakdown(run.records).step_s, breakdown(after.records).step_s
    return Mitigation(
        action=chosen, before=run, after=after, promised=chosen.gain_frac, came_frac=1 - after_s / before_s
    )
