"""What every lab's caller side does alike: start ranks on a new run directory, and apply an action and measure again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlsyslab import hardware, launch
from mlsyslab.contract import Action, ConfigError, Diagnosis, Range, RunError
from mlsyslab.faults import Fault
from mlsyslab.records import write_json
from mlsyslab.runs import Run, create_run


def start(
    lab: str,
    worker: str,
    config: Any,
    *,
    worlds: Sequence[int],
    faults: Sequence[Fault],
    out: str | Path | None,
    probe: bool,
    expected: int | None = None,
) -> Run:
    """Start `worker` ("package.module:function") on a new run directory, one world after the other; returns at once.

    config has at least `device` and `steps`. expected: records that will come, default one a step and rank. probe=False leaves the machine probe out where it is not cached.
    Raises ConfigError for a GPU that is not there, RunError where `out` cannot be written.
    """
    path, device, prepare = directory(
        lab, config, expected=expected or config.steps * sum(worlds), faults=faults, out=out, probe=probe
    )
    payload = dataclasses.asdict(config)
    return Run(
        path, job=launch.start(worker, payload, path, worlds, device=device, what=lab, prepare=prepare)
    )


def device_of(config: Any) -> str:
    """The device that a run with this config queues for, "cuda" or "cpu". Raises ConfigError for a GPU that is not there."""
    usable = hardware.cuda_usable()
    if config.device == "cuda" and not usable:
        raise ConfigError("device='cuda' but torch can use no NVIDIA GPU here; choose device='auto' or 'cpu'")
    # One queue for all GPUs: ranks may take several.
    return "cuda" if usable and config.device != "cpu" else "cpu"


def directory(
    lab: str, config: Any, *, expected: int, faults: Sequence[Fault], out: str | Path | None, probe: bool
) -> tuple[Path, str, Callable[[], None]]:
    """Make the run directory for `expected` records, and wake the warm server: (directory, device, what to do once the
    device is ours). Raises as `start` does."""
    device = device_of(config)
    path = create_run(lab, config, out=out, truth=[fault.to_json() for fault in faults], expected=expected)

    def prepare() -> None:
        write_json(path / "environment.json", hardware.environment(device, measure=probe))

    launch.warm_up()
    return path, device, prepare


@dataclass(frozen=True, kw_only=True)
class Mitigation:
    """An action applied: the gain that was promised, and the gain that came, shares of `action.of`."""

    action: Action
    before: Run
    after: Run
    promised: Range | None
    came_frac: float

    def __str__(self) -> str:
        hope = f"{self.promised.low:.0%} to {self.promised.high:.0%}" if self.promised else "nothing"
        return f"{self.action.name}: promised {hope} of {self.action.of}, came {self.came_frac:.0%}"


def mitigate(
    run: Run,
    action: Action | None,
    diagnose: Callable[[Run], Diagnosis],
    measure: Callable[[Any], Run],
    *,
    figure: str = "step_s",
) -> Mitigation:
    """Apply `action` (None: the first of the diagnosis that changes something) to the run's configuration and measure again.

    figure: of `Run.summary()`, what is to become smaller. Raises RunError when the verdict offers nothing that this
    machine can do, or when one of the runs has no such figure.
    """
    chosen = action or next((a for a in diagnose(run).actions if a.change), None)
    if chosen is None:
        raise RunError(
            f"the verdict on {run.path} offers no action to apply; read its reason, or name an action"
        )
    after = measure(dataclasses.replace(run.config, **chosen.change))
    was, now = run.summary()[figure], after.summary()[figure]
    if not was or now is None:
        raise RunError(
            f"{figure} was not measured before and after; look at both runs: {run.path}, {after.path}"
        )
    return Mitigation(
        action=chosen, before=run, after=after, promised=chosen.gain_frac, came_frac=1 - now / was
    )
