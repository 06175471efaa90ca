"""One part of the experiment: a small run, its control, or the large run, by ranks that are processes or replicas."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mlsyslab.labs.scaleup.config import Config, learning_rate
from mlsyslab.labs.scaleup.data import Batch, Tensors, batches
from mlsyslab.labs.scaleup.inject import Wire, summed
from mlsyslab.labs.scaleup.nets import build, evaluate, loss_sum, sharpness
from mlsyslab.labs.scaleup.recorder import LocalGradients, Recorder, flattened, watch

KEPT_EPOCHS = 3  # of which every sample's id is written down; later ones keep their fingerprint
SHARP_STEPS = (0, 8, 24, 64, 160, 400)  # of the small run, at which its sharpness is measured
SHARP_SAMPLES = 2048
AUTOCAST = {"fp16": torch.float16, "bf16": torch.bfloat16}

Write = Callable[[dict[str, Any]], None]


class Replica:
    """The model, the optimizer and the data of one rank. Replicas of a control share model and optimizer."""

    def __init__(
        self, config: Config, rank: int, data: Tensors, device: torch.device, like: Replica | None = None
    ) -> None:
        self.config, self.rank, self.device = config, rank, device
        self.stream = batches(data, config, rank, config.ranks)
        self.wire = Wire(config, rank, config.ranks)
        self.random = (
            torch.Generator()
            .manual_seed(config.seed + (0 if config.cause == "seed shared by all ranks" else 1 + rank))
            .get_state()
        )
        self.scaler: Any = None
        self.model: nn.Module
        self.optimizer: torch.optim.Optimizer
        if like is not None:
            self.model, self.optimizer, self.scaler = like.model, like.optimizer, like.scaler
            return
        own = config.cause == "ranks start with different weights" or config.init_seeds == "per rank"
        self.model = build(config, config.seed + (rank if own else 0)).to(device)
        if config.cause == "bf16 weights":
            self.model.bfloat16()
        optimizers: dict[str, Callable[[], torch.optim.Optimizer]] = {
            "sgd": lambda: torch.optim.SGD(self.model.parameters(), lr=config.lr, momentum=0.9),
            "adamw": lambda: torch.optim.AdamW(self.model.parameters(), lr=config.lr),
        }
        self.optimizer = optimizers[config.optimizer]()
        if config.precision == "fp16" and not config.loss_scale:
            self.scaler = torch.amp.GradScaler(device.type)

    def random_state(self) -> torch.Tensor:
        """The state of the generator that this rank augments with."""
        return self.random

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before backward."""
        return float(self.scaler.get_scale()) if self.scaler else self.config.loss_scale or 1.0

    def learn(
        self, batch: Batch, whole: int, network: nn.Module | None = None
    ) -> tuple[float, list[int], list[float]]:
        """Forward and backward over the micro-batches of one step: the loss that it learned from, and each micro-batch's targets and
        mean loss. whole: the targets of all ranks' batches. Gradients are such that their mean over the ranks is that of the
        mean over all targets."""
        config = self.config
        wrong = config.cause == "accumulation averaged per micro-batch"
        x, y = batch.x.to(self.device), batch.y.to(self.device)
        if config.augment:
            torch.set_rng_state(self.random)
            x = x + config.augment * torch.randn(x.shape).to(self.device)
        if config.cause == "bf16 weights" and x.is_floating_point():
            x = x.bfloat16()
        network = network or self.model
        factor = self.wire.loss_factor()
        tokens, losses = [], []
        used = 0.0
        pieces = list(zip(x.chunk(config.accumulate), y.chunk(config.accumulate), strict=True))
        for at, (inputs, targets) in enumerate(pieces):
            quiet = at < len(pieces) - 1 and isinstance(network, nn.parallel.DistributedDataParallel)
            with network.no_sync() if quiet else contextlib.nullcontext():  # type: ignore[operator]  # DDP's
                with torch.autocast(
                    self.device.type, AUTOCAST.get(config.precision), enabled=config.precision in AUTOCAST
                ):
                    total = loss_sum(network(inputs), targets)
                count = int((targets != -100).sum())
                share = total / (count * len(pieces)) if wrong else total * config.ranks / whole
                share = share * factor
                used += share.item()
                (self.scaler.scale(share) if self.scaler else share * self.loss_scale).backward()
            tokens.append(count)
            losses.append(total.item() / count)
        if config.augment:
            self.random = torch.get_rng_state()
        return used, tokens, losses

    def update(self, step: int) -> None:
        """The optimizer's step, at this step's learning rate; static loss scales are taken out first."""
        if self.wire.leaves_out(step):
            return
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()

    def unscale(self, step: int) -> None:
        """Set the learning rate, and divide the gradients by the loss scale."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, step)
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        elif self.config.loss_scale and self.config.precision == "fp16":
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= self.config.loss_scale


class Part:
    """One training run of the experiment, by all its ranks that live in this process."""

    def __init__(
        self, name: str, config: Config, data: tuple[Tensors, Tensors], write: Write, device: torch.device, *,
        rank: int | None = None,
    ) -> None:  # fmt: skip
        """rank: this process' rank where ranks are processes, None where they are replicas of one process."""
        self.name, self.config, self.write, self.device = name, config, write, device
        train, test = data
        self.train = train
        self.test = (test.x.to(device), test.y.to(device))
        if rank is None:
            shared = name != "large"  # one worker: its ranks are the parts of one batch
            first = Replica(config, 0, train, device)
            others = [
                Replica(config, r, train, device, first if shared else None) for r in range(1, config.ranks)
            ]
            self.replicas = [first, *others]
            if not shared and config.cause != "ranks start with different weights":
                for other in others:  # what DDP does when it is made
                    other.model.load_state_dict(first.model.state_dict())
        else:
            self.replicas = [Replica(config, rank, train, device)]
        self.network = self._wrap() if rank is not None and config.ranks > 1 else None
        self.recorders = [
            Recorder(r.model, rank=r.rank, world=config.ranks, random=r.random_state) for r in self.replicas
        ]
        self.step = 0
        if self.network is not None and config.cause != "gradients not synchronised":
            replica, recorder = self.replicas[0], self.recorders[0]
            watch(self.network, recorder, self._send, lambda: replica.loss_scale, self._touch)

    def _wrap(self) -> nn.Module:
        """DDP with all gradients in one bucket, so that the hook sees them together."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return nn.parallel.DistributedDataParallel(
                self.replicas[0].model,
                bucket_cap_mb=1 << 10,
                init_sync=self.config.cause != "ranks start with different weights",
            )

    def _touch(self, bucket: Any) -> None:
        self.replicas[0].wire.corrupt(bucket.buffer(), self.step)

    def _send(self, bucket: Any, gradients: LocalGradients) -> torch.futures.Future[torch.Tensor]:
        """Reduce the one bucket over the processes, with what is wrong in between. It is sent in the order of the parameters,
        since DDP changes the bucket's order after the first step, and a stale gradient is of the step before."""
        dtype = bucket.buffer().dtype
        work = dist.all_reduce(self.replicas[0].wire.contribution(gradients.flat), async_op=True)
        return work.get_future().then(lambda done: gradients.in_order_of(bucket, done.value()[0]).to(dtype))

    def run(self) -> None:
        """All steps; an evaluation by rank 0 at the end of each epoch."""
        config = self.config
        for step in range(config.steps):
            self.step = step
            if self.name == "base" and step in SHARP_STEPS:
                self._sharpness(step)
            self._step(step)
            if self.replicas[0].rank == 0 and (
                (step + 1) % config.epoch_steps == 0 or step + 1 == config.steps
            ):
                loss, accuracy = evaluate(self.replicas[0].model, *self._test_set())
                epoch = step // config.epoch_steps
                self.write({"kind": "val", "part": self.name, "rank": 0, "step": step, "epoch": epoch,
                            "val_loss": loss, "val_acc_frac": accuracy})  # fmt: skip

    def _test_set(self) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = self.test
        return (x.bfloat16() if self.config.cause == "bf16 weights" and x.is_floating_point() else x), y

    def _sharpness(self, step: int) -> None:
        x, y = self.train.x[:SHARP_SAMPLES].to(self.device), self.train.y[:SHARP_SAMPLES].to(self.device)
        value = sharpness(self.replicas[0].model, x, y)
        self.write({"kind": "sharpness", "part": self.name, "rank": 0, "step": step, "value": value})

    def _step(self, step: int) -> None:
        began = time.perf_counter()
        config = self.config
        own = [next(replica.stream) for replica in self.replicas]
        whole = self._whole([batch.weight() for batch in own])
        done = []
        sent: list[torch.Tensor] = []
        total: torch.Tensor | None = None
        for replica, recorder, batch in zip(self.replicas, self.recorders, own, strict=True):
            replica.optimizer.zero_grad()
            bypass = config.cause == "gradients not synchronised"
            done.append(replica.learn(batch, whole, None if bypass else self.network))
            if self.network is None:
                flat = flattened([p.grad for p in recorder.parameters], recorder.parameters)
                replica.wire.corrupt(flat, step)
                recorder.local(flat, replica.loss_scale)
                sent.append(flat if bypass else replica.wire.contribution(flat))
        if self.network is None:
            total = None if config.cause == "gradients not synchronised" else summed(sent)
        used = [replica.loss_scale for replica in self.replicas]
        seen: set[int] = set()
        for at, (replica, recorder) in enumerate(zip(self.replicas, self.recorders, strict=True)):
            if id(replica.model) in seen:  # the parts of one worker's batch
                continue
            seen.add(id(replica.model))
            if self.network is None:
                _put(recorder.parameters, sent[at] if total is None else total)
            replica.unscale(step)
            recorder.reduced(self.recorders[0] if total is not None and at else None)
            replica.update(step)
        self._write(step, own, done, used, time.perf_counter() - began)

    def _whole(self, counts: list[int]) -> int:
        """Targets of all ranks in this step; samples are as many everywhere, tokens are not."""
        if len(self.replicas) == self.config.ranks:
            return sum(counts)
        if self.config.task == "digits":
            return counts[0] * self.config.ranks
        total = torch.tensor(counts, device=self.device)
        dist.all_reduce(total)
        return int(total.item())

    def _write(
        self, step: int, own: list[Batch], done: list[tuple[float, list[int], list[float]]], used: list[float],
        step_s: float,
    ) -> None:  # fmt: skip
        config = self.config
        epoch = step // config.epoch_steps
        shared = len({id(replica.model) for replica in self.replicas}) < len(self.replicas)
        for replica, recorder, batch, (loss, tokens, losses), scale in zip(
            self.replicas, self.recorders, own, done, used, strict=True
        ):
            weighted = sum(t * v for t, v in zip(tokens, losses, strict=True)) / sum(tokens)
            row = recorder.row(
                loss=loss, ids=batch.ids, like=self.recorders[0] if shared and replica.rank else None, keep_ids=self.name == "large" and epoch < KEPT_EPOCHS, part=self.name, epoch=epoch,
                samples=len(batch.ids), tokens=sum(tokens), lr=float(replica.optimizer.param_groups[0]["lr"]),
                loss_scale=scale, loss_by_tokens=weighted, loss_by_micro=sum(losses) / len(losses),
            )  # fmt: skip
            self.write({**row, "step_s": step_s})


def _put(parameters: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """Give each parameter its part of a flat gradient."""
    at = 0
    for parameter in parameters:
        part = flat[at : at + parameter.numel()].reshape(parameter.shape).to(parameter.dtype)
        if parameter.grad is None:
            parameter.grad = part.clone()
        else:
            parameter.grad.copy_(part)
        at += parameter.numel()
