"""`mlsyslab`: the labs, the doctor and recorded runs from the command line.

Exit codes: 0 done; 1 the doctor found what prevents the labs; 2 bad input or a failed run (one line on stderr);
130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import mlsyslab
from mlsyslab.contract import ConfigError, Diagnosis, LabError, Prediction, format_value, unit_of
from mlsyslab.options import add_arguments, config_from_arguments
from mlsyslab.runs import Run, open_run

LABS = ("steptime", "straggler", "parallelism", "serving", "scaleup")
POLL_S = 0.25


def parser() -> argparse.ArgumentParser:
    """The command's grammar; the options of a lab are made from its Config."""
    top = argparse.ArgumentParser(
        prog="mlsyslab", description="Predict a number, measure it here, name the cause."
    )
    top.add_argument("--version", action="version", version=f"mlsyslab {mlsyslab.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in LABS:
        lab = importlib.import_module(f"mlsyslab.labs.{name}")
        sub = commands.add_parser(name, help=(lab.__doc__ or "").splitlines()[0])
        sub.add_argument(
            "--preset",
            default="worked_example",
            help=f"one of {', '.join(lab.PRESETS)}; default worked_example",
        )
        sub.add_argument("--out", type=Path, help="run directory; default runs/<lab>-<time>")
        sub.add_argument("--plot", type=Path, metavar="FILE.png", help="also save the figure")
        sub.add_argument(
            "--mitigate", action="store_true", help="apply the first action of the verdict and measure again"
        )
        if hasattr(lab, "recover"):
            sub.add_argument(
                "--recover",
                action="store_true",
                help="under the elastic launcher: take the named rank's host out, go on from a checkpoint on a spare",
            )
        sub.add_argument("--timeout-s", type=float, help="stop and fail when the run takes longer")
        sub.add_argument("--json", action="store_true", help="print one JSON object, keys with units")
        add_arguments(sub.add_argument_group("configuration"), lab.Config)
    doctor = commands.add_parser("doctor", help="what this machine has, and what each lab will run on")
    doctor.add_argument("--refresh", action="store_true", help="measure the machine again")
    doctor.add_argument("--no-probe", action="store_true", help="do not measure the machine")
    doctor.add_argument("--json", action="store_true")
    show = commands.add_parser("show", help="read a run directory back: status, breakdown, verdict")
    show.add_argument("run", type=Path)
    show.add_argument("--plot", type=Path, metavar="FILE.png")
    show.add_argument("--json", action="store_true")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = parser().parse_args(argv)
    try:
        code = run_command(arguments)
        sys.stdout.flush()
        return code
    except LabError as error:
        print(f"mlsyslab: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has seen enough (mlsyslab doctor | head)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("mlsyslab: interrupted; what was recorded stays in the run directory", file=sys.stderr)
        return 130


def run_command(arguments: argparse.Namespace) -> int:
    """The command that was asked for; its exit code."""
    if arguments.command == "doctor":
        doctor = importlib.import_module("mlsyslab.doctor")
        return int(
            doctor.report(as_json=arguments.json, refresh=arguments.refresh, probe=not arguments.no_probe)
        )
    return show(arguments) if arguments.command == "show" else experiment(arguments)


def experiment(arguments: argparse.Namespace) -> int:
    """Predict, measure with progress on stderr, diagnose, and mitigate when asked."""
    lab = importlib.import_module(f"mlsyslab.labs.{arguments.command}")
    config = config_from_arguments(arguments, lab.preset(arguments.preset))
    if getattr(arguments, "recover", False):
        return recovery(lab, config, arguments)
    prediction = lab.predict(config)
    run = follow(lab.start(config, out=arguments.out), arguments.timeout_s)
    verdict = lab.diagnose(run)
    after = (
        lab.mitigate(run, timeout_s=arguments.timeout_s)
        if arguments.mitigate and any(a.change for a in verdict.actions)
        else None
    )
    if arguments.json:
        print(json.dumps(as_json(run, prediction, verdict, after), default=str))
    else:
        print(report(run, prediction, verdict))
        if after:
            print(f"\nApplied      {after}")
    if arguments.mitigate and not after:
        print("mlsyslab: the verdict offers nothing to apply", file=sys.stderr)
    if arguments.plot:
        save_plot(lab, run, prediction, arguments.plot)
    return 0


def recovery(lab: ModuleType, config: Any, arguments: argparse.Namespace) -> int:
    """Run the job on hosts of its own, one of which is taken out when its rank is named; say what that gained."""
    limit = {"timeout_s": arguments.timeout_s} if arguments.timeout_s else {}
    done = lab.recover(config, out=arguments.out, **limit)
    names = (
        "step_before_s",
        "step_after_s",
        "down_s",
        "lost_steps",
        "checkpoint_s",
        "promised_frac",
        "gain_frac",
    )
    figures = {name: getattr(done, name) for name in names}
    said = {"lab": done.run.lab, "run": str(done.run.path), "cordoned": done.cordoned, **figures}
    print(json.dumps(said) if arguments.json else f"Run          {done.run.path}\nRecovery     {done}")
    return 0


def show(arguments: argparse.Namespace) -> int:
    """Status, breakdown and verdict of a run directory."""
    run = open_run(arguments.run)
    lab = importlib.import_module(f"mlsyslab.labs.{run.lab}")
    status = run.status
    if status["state"] != "done":
        print(
            f"This run is {status['state']}: {status.get('error') or status.get('message')}", file=sys.stderr
        )
    verdict = lab.diagnose(run)
    if arguments.plot:
        save_plot(lab, run, None, arguments.plot)
    print(
        json.dumps(as_json(run, None, verdict, None), default=str)
        if arguments.json
        else report(run, None, verdict)
    )
    return 0


def follow(run: Run, timeout_s: float | None) -> Run:
    """Wait for the end of a run, with its progress in words on stderr where that is a terminal."""
    began, said = time.monotonic(), ""
    try:
        while not run.finished:
            words = progress_words(run)
            if words != said and sys.stderr.isatty():
                print(f"\r\033[K{words}", end="", file=sys.stderr, flush=True)
                said = words
            if timeout_s is not None and time.monotonic() - began > timeout_s:
                return run.wait(0)
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        run.stop()
        with contextlib.suppress(LabError):  # the interruption is the news
            run.wait(15)
        raise
    finally:
        if said:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
    return run.wait()


def progress_words(run: Run) -> str:
    """Where a run stands, in words."""
    status = run.status
    if status["state"] == "queued":
        return f"queue: {status.get('position', 0)} before you; {status['message']}"
    notes = [note["says"] for note in run.notes if "says" in note]
    if status["state"] == "running" and run.progress == 0 and notes:
        return str(notes[-1])
    return f"{status['state']}: {run.progress:.0%}"


def save_plot(lab: ModuleType, run: Run, prediction: Prediction | None, path: Path) -> None:
    """Write the lab's figure; raises LabError where it cannot."""
    try:
        lab.plot(run, prediction).savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot save the figure as {path}: {error}; name a .png or .svg file in a folder you may write"
        ) from error


def report(run: Run, prediction: Prediction | None, verdict: Diagnosis) -> str:
    """The run in a terminal: predicted beside measured, the verdict, its evidence, what to do."""
    measured = run.summary()
    lines = [
        f"Run          {run.path}  ({run.origin}{', paced compute' if measured.get('paced') else ''})",
        "",
    ]
    lines.append(f"{'':24}{'predicted':>26}{run.origin:>14}")
    for name, value in (prediction.values if prediction else {}).items():
        unit = unit_of(name)
        span = f"{format_value(value.low, unit)} .. {format_value(value.high, unit)}"
        lines.append(f"{name:24}{span:>26}{format_value(measured.get(name), unit):>14}")
    for name, value in measured.items():
        if (
            name.endswith("_s")
            and not name.endswith("per_s")
            and (not prediction or name not in prediction.values)
        ):
            lines.append(f"{name:24}{'':>26}{format_value(value, 's'):>14}")
    lines += ["", f"Verdict      {verdict}", f"             {verdict.reason}"]
    for finding in verdict.findings:
        lines += [f"Evidence     {finding.says}", *[f"             - {item}" for item in finding.evidence]]
        lines.append(
            f"             looks like: {finding.confused_with}; to tell them apart: {finding.next_check}"
        )
    lines += ["Checked", *[f"             - {item}" for item in verdict.evidence if item.value is not None]]
    for action in verdict.actions:
        promise = (
            f"; promises {action.gain_frac.low:.0%} to {action.gain_frac.high:.0%} of {action.of}"
            if action.gain_frac
            else ""
        )
        lines.append(f"Action       {action.says}{promise}")
    if prediction:
        lines += [f"Assumed      {sentence}" for sentence in prediction.assumptions]
    return "\n".join(lines)


def as_json(run: Run, prediction: Prediction | None, verdict: Diagnosis, after: Any) -> dict[str, Any]:
    """The same as one object for programs."""
    return {
        "lab": run.lab,
        "run": str(run.path),
        "origin": run.origin,
        "config": dataclasses.asdict(run.config),
        "predicted": {k: v._asdict() for k, v in prediction.values.items()} if prediction else None,
        "measured": run.summary(),
        "verdict": {
            "cause": verdict.cause,
            "kind": verdict.kind,
            "where": verdict.where,
            "owner": verdict.owner,
            "reason": verdict.reason,
            "gain_frac": verdict.gain._asdict() if verdict.gain else None,
            "actions": [{"name": a.name, "says": a.says, "change": dict(a.change)} for a in verdict.actions],
        },
        "mitigation": {
            "action": after.action.name,
            "came_frac": after.came_frac,
            "run": str(after.after.path),
        }
        if after
        else None,
    }


if __name__ == "__main__":
    sys.exit(main())
