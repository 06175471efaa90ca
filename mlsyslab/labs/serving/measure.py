"""Run the serving experiment: the caller's side. Imports neither torch nor aiohttp; the processes it starts do."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import tempfile
import time
from pathlib import Path

from mlsyslab import experiment, hardware, launch
from mlsyslab.contract import Action, ConfigError, LabError
from mlsyslab.devicelock import DeviceLock
from mlsyslab.experiment import Mitigation
from mlsyslab.labs.serving.arrivals import schedule
from mlsyslab.labs.serving.config import PRESETS, Config, faults_of, fitted
from mlsyslab.labs.serving.curves import seconds_of
from mlsyslab.labs.serving.diagnose import diagnose
from mlsyslab.labs.serving.job import ServingJob
from mlsyslab.records import read_json, write_json
from mlsyslab.runs import Run

KEPT_S = 3600.0  # a shared machine's speed changes by a third within the hour
HTTP_NEEDS = ("aiohttp", "prometheus_client")


def preset(name: str) -> Config:
    """A preset whose rate fits this machine: its share of what one replica can do with batches of 8, which is measured
    once an hour (some seconds). Raises ConfigError for an unknown name."""
    if name not in PRESETS:
        raise ConfigError(f"preset {name!r} is not one of {', '.join(PRESETS)}; choose one of them")
    seconds = curve_of(Config())["curve_s"]
    return fitted(name, len(seconds) / seconds[-1])


def refuse_impossible(config: Config, *, standing: bool = False) -> None:
    """Raise ConfigError for an engine that is not installed here."""
    if config.engine == "ray" and importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "engine='ray' needs Ray Serve; run: pip install 'mlsyslab[ray]', or choose engine='http' or 'in process'"
        )
    missing = [name for name in HTTP_NEEDS if importlib.util.find_spec(name) is None]
    if missing and (standing or config.engine != "in process"):
        raise ConfigError(
            f"engine={config.engine!r} needs {' and '.join(missing)}; run: pip install 'mlsyslab[serving]', or choose engine='in process'"
        )


def start(config: Config, *, out: str | Path | None = None, probe: bool = True) -> Run:
    """Start the service and its load, and return at once. The run queues for the device if another one has it.

    out: the run directory (absent or empty); default runs/serving-<time>. probe=False leaves the machine probe out
    where it is not cached. Raises ConfigError for an engine or a GPU that is not there or a trace that cannot be read,
    RunError where `out` cannot be written.
    """
    refuse_impossible(config)
    expected = len(schedule(config))
    path, device, prepare = experiment.directory(
        "serving", config, expected=expected, faults=faults_of(config), out=out, probe=probe
    )
    return Run(path, job=ServingJob(config, path, device=device, prepare=prepare))


def measure(config: Config, *, out: str | Path | None = None, timeout_s: float | None = None) -> Run:
    """start(config) and wait. Raises RunError when it fails; what was recorded stays in the run directory."""
    return start(config, out=out).wait(timeout_s)


def mitigate(
    run: Run, action: Action | None = None, *, out: str | Path | None = None, timeout_s: float | None = None
) -> Mitigation:
    """Apply `action` (default: the first of the diagnosis) to the run's configuration and measure again; what is to
    become smaller is the share of the requests that miss the target. Raises RunError when the verdict offers nothing.
    """
    return experiment.mitigate(
        run, action, diagnose, lambda new: measure(new, out=out, timeout_s=timeout_s), figure="missed_frac"
    )


def curve_of(config: Config) -> dict[str, list[float]]:
    """{"curve_s": seconds of a batch of 1 .. max_batch rows} of this model on this machine: kept figures up to an hour
    old, else measured now, in the queue for the device. A paced model's are known. Raises as `service_curve`.
    """
    if config.paced:
        known = {n: config.paced_base_s + config.paced_row_s * n for n in (1, 2)}
    else:
        path = _curve_path(config)
        kept = read_json(path)
        if not 0 <= time.time() - kept.get("time_s", 0.0) < KEPT_S:
            kept = {"curve": _measured_in_turn(config)}
        known = {int(rows): seconds for rows, seconds in kept["curve"].items()}
    return {"curve_s": seconds_of(known, config.max_batch).tolist()}


def _curve_path(config: Config) -> Path:
    here = hardware.limits()
    identity = [
        here["hostname"], here["cpu_model"], hardware.version_of("torch"), config.device,
        config.width, config.layers, config.tokens, config.max_batch,
    ]  # fmt: skip
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    return hardware.cache_dir() / f"serving-curve-{key}.json"


def _measured_in_turn(config: Config) -> dict[int, float]:
    lock = DeviceLock(experiment.device_of(config), "service-time curve")
    lock.acquire()
    try:
        return service_curve(config)
    finally:
        lock.release()


def service_curve(config: Config, *, timeout_s: float = 120.0) -> dict[int, float]:
    """Seconds of a batch of n rows on this machine, for n from 1 to max_batch: the model alone, medians, one thread.

    `curve_of`, and so `preset` and `predict`, keep it. It does not queue for the device. Raises RunError where the model
    cannot be run.
    """
    found = launch.call("mlsyslab.labs.serving.worker:curve", dataclasses.asdict(config), timeout_s=timeout_s)
    curve = {int(rows): float(seconds) for rows, seconds in found[0]}
    path = _curve_path(config)
    with contextlib.suppress(OSError, LabError):  # a cache that cannot be written is no error
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"time_s": time.time(), "curve": curve})
    return curve


def standing(
    config: Config, *, host: str = "127.0.0.1", port: int = 0, out: str | Path | None = None
) -> ServingJob:
    """A service for whoever calls it, with `drain`, `stop` and `wait`; its address is status["url"] once it serves.

    port 0: any free one. out: where its processes log; default a temporary folder. It queues for the device as a run
    does. Raises ConfigError where the extra `serving` or a GPU is missing.
    """
    refuse_impossible(config, standing=True)
    device = experiment.device_of(config)
    folder = Path(out) if out else Path(tempfile.mkdtemp(prefix="mlsyslab-service-"))
    folder.mkdir(parents=True, exist_ok=True)
    launch.warm_up()
    return ServingJob(config, folder, device=device, standing=True, host=host, port=port)
