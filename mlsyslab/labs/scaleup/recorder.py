"""What tells the optimiser from the system, written down at each step of a training loop. Three lines in anybody's own:

    recorder = ScaleupRecorder(model, optimizer, out="runs/mine", dataset_size=len(dataset))
    ...                                         # after optimizer.step(), before zero_grad()
    recorder.step(loss=loss, ids=ids)           # ids: the indices of this rank's samples

A row holds norms, fingerprints and counts, never a tensor. Gradients are looked at twice: as this rank computed them, in a
communication hook before DDP reduces them, and as the optimizer gets them.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from mlsyslab.contract import ConfigError
from mlsyslab.labs.scaleup.config import Config
from mlsyslab.records import SCHEMA, Stream
from mlsyslab.runs import create_run

PROBES = 8  # random projections of a gradient
PERIOD = 65_521  # signs after which they repeat; a prime, so that no layer's width divides it
FLIP_64 = np.uint64(0xBF58476D1CE4E5B9)


def ids_hash(ids: Sequence[int] | torch.Tensor) -> int:
    """A fingerprint of a set of samples: the sum of their hashes (splitmix64) modulo 2**53, so that order does not
    count and the fingerprints of shards add up to that of the whole batch."""
    x = np.asarray(ids, dtype=np.uint64)
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * FLIP_64
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return int(x.astype(object).sum() % 2**53) if len(x) else 0


class Probe:
    """Random projections of a flat tensor on +1 and -1: equal tensors have equal projections, and the mean of tensors has
    the mean of theirs. float64, shape (PROBES,)."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.period = min(size, PERIOD)
        generator = torch.Generator().manual_seed(2017)
        signs = torch.randint(0, 2, (PROBES, self.period), generator=generator) * 2 - 1
        self.signs = signs.double().to(device)

    def __call__(self, flat: torch.Tensor) -> list[float]:
        whole = flat.double()
        if len(whole) > self.period:
            whole = nn.functional.pad(whole, (0, -len(whole) % self.period)).reshape(-1, self.period).sum(0)
        return [float(v) for v in (self.signs @ whole).tolist()]


def flattened(tensors: Iterable[torch.Tensor | None], like: Sequence[torch.Tensor]) -> torch.Tensor:
    """One float32 vector of the local parts, zeros where a tensor is None."""
    parts = []
    for tensor, parameter in zip(tensors, like, strict=True):
        here = _local(parameter) if tensor is None else _local(tensor)
        parts.append((torch.zeros_like(here) if tensor is None else here).detach().reshape(-1).float())
    return torch.cat(parts)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that FSDP has cut, else the tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def on_grid(flat: torch.Tensor, dtype: torch.dtype) -> float:
    """Share of the non-zero values that `dtype` can hold exactly: 1 where they came through it."""
    used = int(flat.count_nonzero())
    fits = int((flat.to(dtype).float() == flat).sum()) - (len(flat) - used)
    return fits / used if used else 0.0


def crc(flat: torch.Tensor) -> int:
    """CRC-32 of the bytes."""
    return zlib.crc32(flat.cpu().numpy().tobytes())


class Recorder:
    """The figures of one rank. `local` and `reduced` are called once a step, `row` at its end."""

    def __init__(
        self, model: nn.Module, *, rank: int, world: int, random: Callable[[], torch.Tensor] = torch.get_rng_state
    ) -> None:  # fmt: skip
        """random: the state of the generator that this rank's augmentation and dropout draw from."""
        self.rank, self.world, self.number = rank, world, 0
        self._state = random
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.buffers = [b for b in model.buffers() if b.is_floating_point()]
        self.before = flattened(self.parameters, self.parameters)
        self.probe = Probe(len(self.before), self.before.device)
        self.sharded = any(hasattr(p, "to_local") for p in self.parameters)
        self.start_crc = crc(self.before)
        self.random = self._random()
        self.spent_s = 0.0
        self._local: dict[str, Any] = {}
        self._reduced: dict[str, Any] = {}
        self._gradient: torch.Tensor | None = None
        self.shared: dict[str, Any] = {}  # of the last row: what ranks with the same weights have in common

    def _random(self) -> int:
        return zlib.crc32(self._state().numpy().tobytes())

    def _figures(self, flat: torch.Tensor, prefix: str) -> dict[str, Any]:
        square = float(flat.double().square().sum())
        if self.sharded:
            square = self._over_ranks(square)
        return {
            f"{prefix}norm": square**0.5,
            f"{prefix}probe": None if self.sharded else self.probe(flat),  # of shards they differ
            f"{prefix}nonfinite": 0 if math.isfinite(square) else int((~flat.isfinite()).sum()),
            f"{prefix}zero_frac": 1 - int(flat.count_nonzero()) / len(flat),
        }

    @staticmethod
    def _over_ranks(value: float) -> float:
        total = torch.tensor([value], dtype=torch.float64)
        if dist.get_backend() == "nccl":
            total = total.cuda()
        dist.all_reduce(total)
        return float(total.item())

    def local(self, flat: torch.Tensor, loss_scale: float = 1.0) -> None:
        """The gradient as this rank computed it, before anything was exchanged; scaled by `loss_scale`."""
        began = time.perf_counter()
        self._local = self._figures(flat / loss_scale if loss_scale != 1 else flat, "local_")
        self.spent_s += time.perf_counter() - began

    def reduced(self, like: Recorder | None = None) -> None:
        """The gradient as the optimizer gets it: what the parameters hold. like: a recorder whose rank got the same tensor."""
        if like is not None:
            self._reduced, self._gradient = like._reduced, like._gradient
            return
        began = time.perf_counter()
        gradient = flattened([p.grad for p in self.parameters], self.parameters)
        self._reduced = {
            **self._figures(gradient, ""),
            "bf16_frac": on_grid(gradient, torch.bfloat16),
            "fp16_frac": on_grid(gradient, torch.float16),
        }
        self._gradient = gradient
        self.spent_s += time.perf_counter() - began

    def _updated(self) -> dict[str, Any]:
        """How the weights have changed since the last row."""
        after = flattened(self.parameters, self.parameters)
        change = after - self.before
        moved = self._gradient != 0 if self._gradient is not None else change != 0
        lost = float(((change == 0) & moved).sum()) / max(1, int(moved.sum()))
        # Shards differ between ranks, and are no error.
        size = self._over_ranks if self.sharded else float
        norm = size(float(self.before.double().square().sum())) ** 0.5
        step = size(float(change.double().square().sum())) ** 0.5
        self.before = after
        return {
            "param_crc": None if self.sharded else crc(after),
            "param_norm": norm,
            "update_frac": step / norm if norm else 0.0,
            "lost_frac": lost,
            "weight_bf16_frac": on_grid(after, torch.bfloat16),
        }

    def row(self, *, loss: float, ids: Sequence[int] | torch.Tensor | None = None, keep_ids: bool = False,
            like: Recorder | None = None, **more: Any) -> dict[str, Any]:  # fmt: skip
        """The record of the step that ends. Where no hook has seen the local gradient, it is what the optimizer got.

        like: the recorder of a rank that shares its weights with this one, whose row has been taken.
        """
        if like is None and not self._reduced:  # the optimizer's step was left out, as a loss scaler does
            self.reduced()
        began = time.perf_counter()
        local = self._local
        if not local and not self.sharded:
            local = {f"local_{k}": v for k, v in self._reduced.items() if not k.endswith("16_frac")}
        random = self._random()
        statistics = torch.cat([b.reshape(-1).float() for b in self.buffers]) if self.buffers else None
        self.shared = like.shared if like else {**self._reduced, **self._updated()}
        row = {
            "kind": "step", "step": self.number, "rank": self.rank, "world": self.world, "warmup": False, "loss": loss,
            **local, **self.shared,
            "start_crc": None if self.number or self.sharded else self.start_crc,
            "bn_crc": None if statistics is None else crc(statistics),
            "bn_norm": None if statistics is None else float(statistics.norm()),
            "rng_crc": self.random, "rng_used": random != self.random,
            "ids_hash": None if ids is None else ids_hash(ids),
            "ids": [int(i) for i in ids] if ids is not None and keep_ids else None,
            **more,
        }  # fmt: skip
        row["record_s"] = self.spent_s + time.perf_counter() - began
        self.number, self.spent_s, self.random = self.number + 1, 0.0, random
        self._local, self._reduced, self._gradient = {}, {}, None
        return row


class LocalGradients:
    """DDP's buckets put together in the order of the parameters, before they are reduced.

    The buckets change their order after the first step, so each parameter's part is found by its name.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        sizes = [p.numel() for p in parameters]
        self.flat = torch.zeros(sum(sizes), device=parameters[0].device)
        starts = np.cumsum([0, *sizes])
        self.places = {
            id(p): slice(int(a), int(b)) for p, a, b in zip(parameters, starts, starts[1:], strict=False)
        }

    def take(self, bucket: Any) -> None:
        """Copy one bucket; DDP divides it in place later."""
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self.flat[self.places[id(parameter)]] = gradient.reshape(-1).float()

    def in_order_of(self, bucket: Any, flat: torch.Tensor) -> torch.Tensor:
        """A vector in the order of the parameters, as the bucket has it."""
        return torch.cat([flat[self.places[id(parameter)]] for parameter in bucket.parameters()])


Send = Callable[[Any, LocalGradients], "torch.futures.Future[torch.Tensor]"]


def watch(
    model: nn.Module, recorder: Recorder, send: Send, scale: Callable[[], float] = lambda: 1.0,
    touch: Callable[[Any], None] = lambda bucket: None,
) -> None:  # fmt: skip
    """Register a communication hook on a DDP model: `touch` may change the bucket, `recorder` sees the local gradient, `send`
    reduces it. Raises RuntimeError where the model has a hook already."""
    gradients = LocalGradients(recorder.parameters)

    def hook(_: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        touch(bucket)
        gradients.take(bucket)
        if bucket.is_last():
            recorder.local(gradients.flat, scale())
        return send(bucket, gradients)

    hook.__annotations__.clear()  # torch compares them with its classes, and here they are text
    model.register_comm_hook(None, hook)  # type: ignore[operator]  # DDP's method, found through nn.Module


def mean_over_ranks(bucket: Any, _: LocalGradients) -> torch.futures.Future[torch.Tensor]:
    """What DDP does without a hook."""
    buffer = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda done: done.value()[0])


class ScaleupRecorder:
    """Records a training loop of your own, for `scaleup.diagnose` and `scaleup.compare`; one process a rank.

    model: a plain, DDP or FSDP2 module. optimizer: its steps are watched by hooks. out: a new run directory that all ranks
    share. dataset_size: samples of the whole data set, which tells whether some are skipped. Under DDP it takes the
    communication hook; a model that has one keeps it, and local gradients are then not recorded. A loss that is scaled (a
    GradScaler): give `loss_scale=scaler.get_scale()`, from before `scaler.update()`, to `step`. Raises ConfigError for a folder in use, or a model without gradients.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, out: str | Path, dataset_size: int | None = None,
        batch_per_rank: int = 1, seed: int = 0,
    ) -> None:  # fmt: skip
        if not any(p.requires_grad for p in model.parameters()):
            raise ConfigError(
                "the model has no parameter that is trained; give the model that the optimizer updates"
            )
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        path = Path(out)
        if rank == 0:
            samples = dataset_size or world * batch_per_rank
            config = Config(ranks=min(world, 64), batch_per_rank=batch_per_rank, base_batch=world * batch_per_rank,
                            samples=max(16, samples), compare=False, seed=seed, epochs=1)  # fmt: skip
            create_run("scaleup", config, out=path, truth=[], expected=0)
        if dist.is_initialized():
            dist.barrier()
        self.recorder = Recorder(model, rank=rank, world=world)
        self.stream = Stream(path / f"rank-{rank}.jsonl")
        self.stream.write(
            {"kind": "header", "schema": SCHEMA, "part": "large", "rank": rank, "world": world, "own": True,
             "virtual": False, "samples": dataset_size, "parameters": len(self.recorder.before), "precision": None}
        )  # fmt: skip
        if isinstance(model, nn.parallel.DistributedDataParallel):
            try:
                watch(model, self.recorder, mean_over_ranks)
            except RuntimeError:
                self.stream.write({"kind": "note", "rank": rank, "says": "DDP has a communication hook already: local gradients are not seen"})  # fmt: skip
        self.optimizer = optimizer
        self._hooks = [optimizer.register_step_pre_hook(lambda *_: self.recorder.reduced())]

    def step(
        self, *, loss: float | torch.Tensor, ids: Sequence[int] | torch.Tensor | None = None, epoch: int | None = None,
        loss_scale: float = 1.0, tokens: Sequence[int] | None = None, losses: Sequence[float] | None = None,
    ) -> None:  # fmt: skip
        """The end of a step, after optimizer.step() and before zero_grad().

        loss: this rank's mean. ids: indices of its samples. tokens, losses: of each micro-batch of an accumulated step, the
        targets that count and their mean loss; they tell whether they were averaged rightly.
        """
        seen = bool(self.recorder._local)
        count = None if ids is None else len(ids)
        weighted = micro = None
        if tokens and losses:
            weighted = sum(t * v for t, v in zip(tokens, losses, strict=True)) / sum(tokens)
            micro = sum(losses) / len(losses)
        row = self.recorder.row(
            loss=loss.item() if isinstance(loss, torch.Tensor) else float(loss), ids=ids, keep_ids=True, part="large",
            epoch=epoch, samples=count, loss_scale=loss_scale, lr=float(self.optimizer.param_groups[0]["lr"]),
            tokens=None if tokens is None else sum(tokens), loss_by_tokens=weighted, loss_by_micro=micro,
        )  # fmt: skip
        if seen and loss_scale != 1:  # the hook saw the scaled gradient, the optimizer got the other
            row["local_norm"] /= loss_scale
            row["local_probe"] = [value / loss_scale for value in row["local_probe"]]
        self.stream.write(row)

    def close(self) -> None:
        """End the record; the optimizer is as before."""
        for hook in self._hooks:
            hook.remove()
        self.stream.close()
