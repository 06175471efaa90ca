"""Faults from public reports, as small DDP programs of their own: what a practitioner would write, with a ScaleupRecorder."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from mlsyslab import launch

SAMPLES, BATCH = 64, 8


def _job(
    out: Path, *, unused: bool = False, batchnorm: bool = False, find_unused: bool = False
) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch import nn

    from mlsyslab.labs.scaleup.recorder import ScaleupRecorder

    torch.set_num_threads(1)
    if not dist.is_initialized():
        launch.init_process_group(launch.rank_context(), timeout_s=30)
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), *([nn.BatchNorm1d(8)] if batchnorm else []), nn.ReLU(), nn.Linear(8, 1)]
    model = nn.Sequential(*layers)
    if unused:
        model.register_parameter("spare", nn.Parameter(torch.zeros(3)))
    network = nn.parallel.DistributedDataParallel(model, find_unused_parameters=find_unused)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    recorder = ScaleupRecorder(
        network, optimizer, out=out / "run", dataset_size=SAMPLES, batch_per_rank=BATCH
    )
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 4, generator=generator)
    return {"torch": torch, "dist": dist, "model": model, "network": network, "optimizer": optimizer,
            "recorder": recorder, "x": x, "y": x.sum(1, keepdim=True)}  # fmt: skip


def _loop(job: dict[str, Any], forward: Any, *, epochs: int = 3, set_epoch: bool = True) -> None:
    """The usual loop. `forward(x)` is what each program does differently."""
    torch = job["torch"]
    data = torch.utils.data.TensorDataset(torch.arange(SAMPLES), job["x"], job["y"])
    sampler = torch.utils.data.DistributedSampler(data, shuffle=True)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=sampler, generator=torch.Generator())
    for epoch in range(epochs):
        if set_epoch:
            sampler.set_epoch(epoch)
        for ids, x, y in loader:
            loss = ((forward(x) - y) ** 2).mean()
            loss.backward()
            job["optimizer"].step()
            job["recorder"].step(loss=loss, ids=ids, epoch=epoch)
            job["optimizer"].zero_grad()
    job["recorder"].close()
    job["dist"].barrier()


def healthy(config: dict[str, Any], out: Path) -> None:
    job = _job(out)
    _loop(job, job["network"])


def scaled_loss(config: dict[str, Any], out: Path) -> None:
    """A GradScaler multiplies the loss; gradients are unscaled before the optimizer gets them."""
    job = _job(out)
    torch, optimizer = job["torch"], job["optimizer"]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(12):
        ids = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(step))[: 2 * BATCH]
        mine = ids[BATCH * job["dist"].get_rank() :][:BATCH]
        loss = ((job["network"](job["x"][mine]) - job["y"][mine]) ** 2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        job["recorder"].step(loss=loss, ids=mine, epoch=step, loss_scale=scaler.get_scale())
        scaler.update()
        optimizer.zero_grad()
    job["recorder"].close()
    job["dist"].barrier()


def set_epoch_never_called(config: dict[str, Any], out: Path) -> None:
    """pytorch#31771"""
    job = _job(out)
    _loop(job, job["network"], set_epoch=False)


def wrapped_module_called(config: dict[str, Any], out: Path) -> None:
    """k2-fsa/icefall#226: the method of the wrapped module, not of the wrapper."""
    job = _job(out)
    _loop(job, job["network"].module)


def converted_after_wrapping(config: dict[str, Any], out: Path) -> None:
    """pytorch#104336: the hooks sit on the old parameters."""
    job = _job(out)
    job["network"].double().float()
    _loop(job, job["network"])


def forward_inside_no_sync(config: dict[str, Any], out: Path) -> None:
    """The converse of speechbrain#1802: the flag is read in forward."""
    job = _job(out)

    def forward(x: Any) -> Any:
        with job["network"].no_sync():
            return job["network"](x)

    _loop(job, forward)


def unused_parameter(config: dict[str, Any], out: Path) -> None:
    """pytorch#128949: a parameter that no rank uses keeps its bucket from being reduced; the error comes a step later."""
    job = _job(out, unused=True)
    rank, spare = job["dist"].get_rank(), job["model"].spare

    def forward(x: Any) -> Any:
        return job["network"](x) + (spare.sum() * 0 if rank not in config.get("unused_on", (0, 1)) else 0)

    with contextlib.suppress(RuntimeError):  # "Expected to have finished reduction in the prior iteration"
        _loop(job, forward)


def no_sync_with_unused(config: dict[str, Any], out: Path) -> None:
    """pytorch#69031, mended upstream: an early micro-batch without synchronisation, and a search for unused parameters."""
    job = _job(out, find_unused=True)

    def forward(x: Any) -> Any:
        with job["network"].no_sync():
            (job["network"](x).sum() * 0).backward()
        return job["network"](x)

    _loop(job, forward)


def batchnorm_of_few(config: dict[str, Any], out: Path) -> None:
    """pytorch#49794, a job with BatchNorm."""
    job = _job(out, batchnorm=True)
    _loop(job, job["network"])


def own_hook(config: dict[str, Any], out: Path) -> dict[str, Any]:
    """A model that has a communication hook already keeps it."""
    job = _job(out)  # the recorder's own hook
    job["recorder"].close()
    from mlsyslab.labs.scaleup.recorder import ScaleupRecorder

    job["recorder"] = ScaleupRecorder(
        job["network"], job["optimizer"], out=out / "second", dataset_size=SAMPLES
    )
    _loop(job, job["network"])
    return {}


def sharded(config: dict[str, Any], out: Path) -> dict[str, float]:
    """FSDP2: rows hold the norm of the whole gradient, although each rank has a part."""
    import torch
    from torch.distributed.fsdp import fully_shard

    from mlsyslab.labs.scaleup.recorder import ScaleupRecorder

    torch.set_num_threads(1)
    launch.init_process_group(launch.rank_context(), timeout_s=30)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    loss = (model(x) ** 2).mean()
    whole = torch.autograd.grad(loss, list(model.parameters()))
    norm = float(torch.cat([g.reshape(-1) for g in whole]).norm())
    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    recorder = ScaleupRecorder(model, optimizer, out=out / "run", dataset_size=16, batch_per_rank=8)
    rank = torch.distributed.get_rank()
    for epoch in range(3):
        order = (
            torch.randperm(16, generator=torch.Generator().manual_seed(epoch)) if epoch else torch.arange(16)
        )
        ids = order[8 * rank : 8 * rank + 8]
        loss = (model(x[ids]) ** 2).mean()
        loss.backward()
        optimizer.step()
        recorder.step(loss=loss, ids=ids, epoch=epoch)
        optimizer.zero_grad()
    recorder.close()
    return {"norm": norm}
