"""Runs of the scale-up clinic for its tests: virtual ranks in this process, and real ones, once for each configuration."""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from mlsyslab import launch, scaleup
from mlsyslab.labs.scaleup.config import Config, base_of, control_of, faults_of, has_base
from mlsyslab.labs.scaleup.data import data_sets
from mlsyslab.labs.scaleup.evidence import Facts, Part, facts_of
from mlsyslab.labs.scaleup.job import Part as Training
from mlsyslab.runs import Run, create_run, open_run

WORKER = "mlsyslab.labs.scaleup.worker:main"
SMALL: Mapping[str, Any] = {
    "samples": 1024,
    "epochs": 3,
    "global_batch": 128,
    "base_batch": 128,
    "engine": "virtual",
}


def small(cause: str, ranks: int = 4, **change: Any) -> Config:
    """A config with `cause` that takes a fraction of a second: 24 steps of 128 samples."""
    config = scaleup.config_for(cause, ranks=ranks, engine="virtual")
    if cause in scaleup.OPTIMISER or config.norm == "batch" or config.task == "prose":
        return dataclasses.replace(config, **change)
    return dataclasses.replace(config, **{**SMALL, **change})


def trained(config: Config, names: tuple[str, ...] = ("base", "control", "large")) -> list[dict[str, Any]]:
    """The rows of a virtual run, trained in this process."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name in names:
        if name == "base" and not has_base(config):
            continue
        of = {"base": base_of, "control": control_of}.get(name, lambda c: c)(config)
        header = {"kind": "header", "part": name, "rank": 0, "world": of.ranks, "own": False, "virtual": True,
                  "samples": of.samples, "precision": of.precision, "task": of.task, "seed": of.seed,
                  "chance_loss": 2.302}  # fmt: skip
        rows.append(header)
        Training(name, of, data_sets(config), rows.append, torch.device("cpu")).run()
    return rows


def write_run(path: Path, config: Config, rows: list[dict[str, Any]]) -> Run:
    """A run directory of these rows."""
    truth = [fault.to_json() for fault in faults_of(config)]
    create_run("scaleup", config, out=path, truth=truth, expected=len(rows))
    (path / "status.json").write_text(json.dumps({"state": "done", "message": "finished"}))
    (path / "rank-0.jsonl").write_text("".join(json.dumps(_clean(row)) + "\n" for row in rows))
    return open_run(path)


def _clean(row: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()}


def facts_of_rows(rows: list[dict[str, Any]], config: Config) -> Facts:
    """Facts without a run directory."""
    parts = {
        name: Part([r for r in rows if r["kind"] == "step" and r["part"] == name], [r for r in rows if r["kind"] != "step" and r["part"] == name])
        for name in {row["part"] for row in rows}
    }  # fmt: skip
    return Facts(large=parts["large"], control=parts.get("control"), base=parts.get("base"), config=config)


@cache
def virtual_facts(config: Config) -> Facts:
    """Facts of a virtual run; a configuration trains once a session."""
    return facts_of_rows(trained(config), config)


@cache
def real_facts(config: Config) -> Facts:
    """Facts of a run with a process for each rank; a configuration runs once a session."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        create_run("scaleup", config, out=path, truth=[], expected=1)
        assert launch.Ranks(WORKER, dataclasses.asdict(config), path, config.ranks).wait(240)
        facts = facts_of(open_run(path))
        assert facts.large.steps == config.steps
        return facts
