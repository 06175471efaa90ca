"""Training that survives its ranks: checkpoints while it goes on, and the step to go on from. The rank's side.

In the run directory, beside what every run has:
    attempts.jsonl            one line each time the job (re)started: attempt, first step, host and pids of each rank
    samples-<rank>.jsonl      one line a step: the samples that were trained on, and their loss
    checkpoints/step-<n>/     state after n steps, by torch.distributed.checkpoint; n is the sampler's position too
    errors.jsonl              what a restart would not mend
    finished.json             every step is done

A checkpoint is written under another name and renamed when every rank has written its part, so a folder `step-<n>`
is whole; that is checked once more before it is loaded. torch keeps its table of contents as a pickle: resume only
what your own job has written.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shutil
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from mlsyslab.contract import ConfigError, LabError, RunError
from mlsyslab.labs.straggler.config import PRESETS, Config, faults_of
from mlsyslab.labs.straggler.measure import preset
from mlsyslab.labs.straggler.worker import Trainer
from mlsyslab.options import add_arguments, config_from_arguments
from mlsyslab.ranks import RankContext, rank_context
from mlsyslab.records import Stream, Tail, write_json
from mlsyslab.runs import Run
from mlsyslab.training import share_run

FINISHED = "finished.json"
KEEP = 2  # checkpoints
EVERY = 10  # steps between two checkpoints


# ---- checkpoints


def steps_of(path: Path) -> int:
    """The steps that lie behind checkpoint folder `path`; -1 where its name says none."""
    number = path.name.removeprefix("step-")
    return int(number) if number.isdigit() else -1


def whole(path: Path) -> bool:
    """Whether the checkpoint has its table of contents, and all the bytes that it lists."""
    try:
        parts = dcp.FileSystemReader(path).read_metadata().storage_data.values()
        return all((path / part.relative_path).stat().st_size >= part.offset + part.length for part in parts)
    except Exception:  # half a pickle can fail with anything
        return False


def newest(folder: Path) -> Path | None:
    """The last whole checkpoint in `folder`, or None."""
    found = sorted(
        (path for path in folder.glob("step-*") if steps_of(path) >= 0), key=steps_of, reverse=True
    )
    return next((path for path in found if whole(path)), None)


def _state(model: Any, optimizer: Any, done: int) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": done}


def save(folder: Path, model: Any, optimizer: Any, done: int, *, rank: int = 0) -> Path:
    """Write the state after `done` steps as folder/step-<done>; every rank calls it, and rank 0 drops all but the
    last KEEP. Raises CheckpointException in every rank when one of them cannot write, OSError where rank 0 cannot
    rename; older checkpoints stay."""
    final = folder / f"step-{done:08d}"
    part = final.with_suffix(".part")
    try:
        dcp.save(_state(model, optimizer, done), checkpoint_id=str(part))
        if rank == 0:
            shutil.rmtree(final, ignore_errors=True)  # one that was found broken
            part.rename(final)
    finally:
        if rank == 0:
            tidy(folder)
    return final


def tidy(folder: Path) -> None:
    """Remove half-written checkpoints and all but the last KEEP."""
    kept = sorted((path for path in folder.glob("step-*") if steps_of(path) >= 0), key=steps_of)
    for path in [*folder.glob("step-*.part"), *kept[:-KEEP]]:
        shutil.rmtree(path, ignore_errors=True)


def load(path: Path, model: Any, optimizer: Any) -> None:
    """Put a checkpoint's state into `model` and `optimizer`; every rank calls it. Raises RunError where it is not
    the state that its name promises."""
    state = _state(model, optimizer, -1)
    try:
        dcp.load(state, checkpoint_id=str(path))
    except CheckpointException as error:
        raise RunError(
            f"cannot load {path}: {_first_failure(error)}; delete that folder, and the checkpoint before it is used"
        ) from error
    if state["step"] != steps_of(path):
        raise RunError(
            f"{path} holds the state after {state['step']} steps; give it its own name back, or delete it"
        )
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def _first_failure(error: CheckpointException) -> str:
    rank, (what, _) = min(error.failures.items())
    return f"rank {rank}: {str(what).strip().splitlines()[0] if str(what).strip() else type(what).__name__}"


# ---- the job


class Keeper:
    """Notes each step's samples and loss, and keeps checkpoints; one that cannot be written costs only itself.

    The history of a step is on disk before a checkpoint that has it behind it, and is written no sooner, since
    reading a loss waits for the device. What a kill costs are steps that will be done again.
    """

    def __init__(self, trainer: Trainer, folder: Path, attempt: int, every: int) -> None:
        self.trainer, self.folder, self.attempt, self.every = trainer, folder, attempt, every
        self.samples = Stream(trainer.out / f"samples-{trainer.rank}.jsonl")
        self._unwritten: list[tuple[int, Sequence[int], Any]] = []

    def after_step(self, step: int, indices: Sequence[int], loss: Any) -> Mapping[str, float]:
        """What the loop calls; seconds of the checkpoint, where one was due. None is due after the last step."""
        self._unwritten.append((step, indices, loss))
        done = step + 1
        if done % self.every or done == self.trainer.config.steps:
            return {}
        began_s = time.perf_counter()
        self.write()
        self.save(done)
        return {"checkpoint_s": time.perf_counter() - began_s}

    def write(self) -> None:
        """The history so far, to the disk."""
        who = {"kind": "samples", "rank": self.trainer.rank, "attempt": self.attempt}
        for step, indices, loss in self._unwritten:
            self.samples.write({**who, "step": step, "loss": float(loss), "indices": list(indices)})
        self._unwritten.clear()

    def save(self, done: int) -> None:
        """A checkpoint, or a note that says why there is none."""
        trainer = self.trainer
        try:
            save(self.folder, trainer.model, trainer.optimizer, done, rank=trainer.rank)
        except CheckpointException as error:
            self._note(done, _first_failure(error))
        except OSError as error:
            self._note(done, f"rank {trainer.rank}: {error.strerror}")

    def _note(self, done: int, why: str) -> None:
        says = (
            f"no checkpoint after {done} steps: {why}; training goes on, and an earlier checkpoint stays. Free space "
            f"in {self.folder}"
        )
        self.trainer.notes.write(
            {"kind": "checkpoint", "rank": self.trainer.rank, "step": done, "says": says}
        )


def on_host(config: Config, rank: int, host: str) -> Config:
    """`config` as this rank lives it when the fault sits on host-<slow_rank>: on that host it is the slow rank,
    whatever its number; elsewhere another one is. Without hosts' names ("") the fault sits on the rank."""
    if not host:
        return config
    slow = rank if host == f"host-{config.slow_rank}" else (rank + 1) % config.ranks
    return dataclasses.replace(config, slow_rank=slow)


def begin_line(path: Path) -> None:
    """End the half line that a killed writer may have left, so that the next record stands alone."""
    with contextlib.suppress(OSError), path.open("rb+") as file:
        if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            file.write(b"\n")


def agree(out: Path, attempt: int, first: int, host: str) -> None:
    """Every rank says where it begins; rank 0 writes the attempt down. Raises RunError where they differ."""
    mine = {"first": first, "attempt": attempt, "host": host, "pid": os.getpid(), "parent": os.getppid()}
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, mine)
    if len({(one["first"], one["attempt"]) for one in said}) > 1:
        where = ", ".join(f"rank {rank} step {one['first']}" for rank, one in enumerate(said))
        raise RunError(
            f"the ranks would resume at different steps ({where}); put {out} on a file system that all hosts share"
        )
    if dist.get_rank() == 0:
        Stream(out / "attempts.jsonl").write(
            {"attempt": attempt, "first": first, "time_s": time.time(), "ranks": said}
        )


def train(config: Config, out: Path, context: RankContext, *, every: int = EVERY) -> Trainer:
    """One rank's life: go on from the newest checkpoint, train to the end, leave together. The trainer comes back
    so that its process group is not torn down before the process ends (see `ranks.leave`)."""
    folder, host = out / "checkpoints", os.environ.get("MLSYSLAB_HOST", "")
    name = host or socket.gethostname()
    attempt = sum(1 for _ in Tail(out / "attempts.jsonl").read())
    begin_line(out / f"rank-{context.rank}.jsonl")
    begin_line(out / f"samples-{context.rank}.jsonl")
    found = newest(folder)
    first = steps_of(found) if found else 0
    mine = on_host(config, context.rank, host)
    trainer = Trainer(mine, out, context, first=first, tags={"attempt": attempt, "host": name})
    try:
        trainer.open()
        agree(out, attempt, first, name)
        if context.rank == 0:
            tidy(folder)
        if found:
            load(found, trainer.model, trainer.optimizer)
        keeper = Keeper(trainer, folder, attempt, every)
        trainer.train(keeper.after_step)
        keeper.write()
        trainer.finish()
        dist.barrier()
        write_json(out / FINISHED, {"attempt": attempt})  # each rank says so: some may not live to
    finally:
        trainer.close()
    return trainer


# ---- the command line


def settle(arguments: argparse.Namespace, context: RankContext) -> Config:
    """The run's Config: that of the run directory, made at the first start. Raises RunError where the arguments or
    the number of ranks contradict it."""
    out = arguments.out
    if not (out / "config.json").exists():
        given = config_from_arguments(arguments, preset(arguments.preset or "worked_example"))
        share_run("straggler", dataclasses.replace(given, ranks=context.world), out, context, faults_of)
    stored: Config = Run(out).config
    base = dataclasses.replace(preset(arguments.preset), ranks=stored.ranks) if arguments.preset else stored
    if config_from_arguments(arguments, base) != stored:
        raise RunError(
            f"{out} holds a run with other settings; choose a new folder, or leave the settings out"
        )
    if stored.ranks != context.world:
        raise RunError(
            f"{out} is a run of {stored.ranks} ranks and {context.world} were started; start as many as it has"
        )
    return stored


def command_line(argv: Sequence[str]) -> tuple[int, Any]:
    """`--out DIR [--every K] [--preset NAME] [--field value ...]` in each rank: the exit code (0 done, 2 bad input,
    1 anything that a restart may mend), and what must live as long as the process."""
    parser = argparse.ArgumentParser(prog="torchrun ... -m mlsyslab.labs.straggler.elastic_worker")
    parser.add_argument("--out", type=Path, required=True, help="run directory that all hosts share")
    parser.add_argument("--every", type=int, default=EVERY, help="steps between two checkpoints")
    parser.add_argument("--preset", choices=sorted(PRESETS))
    add_arguments(parser, Config)
    arguments = parser.parse_args(argv)
    called = "MLSYSLAB_ONE_MACHINE" in os.environ  # by `recover`, which keeps the status
    try:
        if arguments.every < 1:
            raise ConfigError(f"every={arguments.every} is below 1; choose the steps between two checkpoints")
        if (arguments.out / FINISHED).exists():
            print(f"mlsyslab: {arguments.out} holds a finished run; choose a new folder", file=sys.stderr)
            return 0, None
        context = rank_context()
        if called:
            context = dataclasses.replace(context, local_rank=context.rank, local_world=context.world)
        config = settle(arguments, context)
        trainer = train(config, arguments.out, context, every=arguments.every)
        if context.rank == 0 and not called:
            write_json(arguments.out / "status.json", {"state": "done", "message": "finished"})
    except LabError as error:
        print(f"mlsyslab: {error}", file=sys.stderr)
        with contextlib.suppress(LabError):
            Stream(arguments.out / "errors.jsonl").write({"kind": "error", "says": str(error)})
        return 2, None
    except Exception:
        traceback.print_exc()
        return 1, None
    return 0, trainer
