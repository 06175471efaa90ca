"""One model split over ranks in six ways, each in plain torch: what is built, and how a step runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from mlsyslab.labs.parallelism.config import Config, Layout, layout_of, stages
from mlsyslab.labs.parallelism.gpt import GPT, initialise, loss_of
from mlsyslab.labs.parallelism.job import Job, Mark

MOMENTUM = 0.9


def build(config: Config, device: torch.device) -> Job:
    """Build this rank's job; the process group exists. The weights are those of a single process with the same seed."""
    torch.manual_seed(config.seed)
    if config.strategy == "pp":
        return _pipeline(config, device)
    model = GPT(config.shape, checkpointing=config.checkpointing)
    initialise(model, config.shape, config.seed)
    model.to(device)
    if config.strategy in ("ddp", "zero1"):
        return _replicated(config, model, device)
    return _sharded(config, model, device)


def _mesh(device: torch.device, **axes: int) -> DeviceMesh:
    # An explicit CPU mesh: FSDP picks the GPU by itself where there is one, beside a gloo group (pytorch#132471).
    return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def _axes(mesh: DeviceMesh) -> dict[str, tuple[dist.ProcessGroup, int]]:
    names = mesh.mesh_dim_names or ()
    return {name: (mesh.get_group(name), mesh.get_local_rank(name)) for name in names}


def make_optimizer(config: Config, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of a config, in the form that makes no temporaries as large as all parameters. Those that lie on different
    meshes are groups of their own, since one kernel takes only one kind."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for p in params:
        groups.setdefault((p.device_mesh, p.placements) if isinstance(p, DTensor) else None, []).append(p)
    listed = [{"params": group} for group in groups.values()]
    kind, rest = _optimizer_of(config)
    return kind(listed, **rest)


def _optimizer_of(config: Config) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    if config.optimizer == "adamw":
        return torch.optim.AdamW, {"lr": config.lr, "fused": True}
    momentum = MOMENTUM if config.optimizer == "momentum" else 0.0
    return torch.optim.SGD, {"lr": config.lr, "momentum": momentum, "foreach": False}


def _autocast(config: Config, device: torch.device) -> Any:
    if config.precision == "mixed":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()


def _whole_step(model: nn.Module, context: Callable[[], Any]) -> Callable[..., torch.Tensor]:
    def forward_backward(tokens: torch.Tensor, targets: torch.Tensor, mark: Mark) -> torch.Tensor:
        with context():
            loss = loss_of(model(tokens), targets)
        mark("forward")
        loss.backward()
        mark("backward")
        return loss.detach()

    return forward_backward


def _replicated(config: Config, model: nn.Module, device: torch.device) -> Job:
    """DDP; with ZeRO-1 the optimizer state is shared out, whole tensors to each rank."""
    group = dist.group.WORLD
    assert group is not None
    wrapped = DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        broadcast_buffers=False,
        gradient_as_bucket_view=config.bucket_views,
    )
    if config.strategy == "zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        kind, rest = _optimizer_of(config)
        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=kind, **rest
        )
    else:
        optimizer = make_optimizer(config, model.parameters())
    return Job(
        modules=[model],
        optimizer=optimizer,
        axes={"dp": (group, dist.get_rank())},
        forward_backward=_whole_step(wrapped, lambda: _autocast(config, device)),
        layers=config.shape.layers,
    )


def _sharded(config: Config, model: GPT, device: torch.device) -> Job:
    """FSDP2, tensor parallel, or both on a two-dimensional mesh."""
    layout = layout_of(config)
    if config.strategy == "fsdp":
        mesh = _mesh(device, dp=layout.dp)
    elif config.strategy == "tp":
        mesh = _mesh(device, tp=layout.tp)
    else:
        mesh = _mesh(device, dp=layout.dp, tp=layout.tp) if not config.tp_across else _crossed(device, layout)
    if layout.tp > 1 or config.strategy == "tp":
        split_matrices(model, mesh["tp"] if mesh.ndim > 1 else mesh, config.tp_plan)
    fsdp = config.strategy != "tp"
    if fsdp:
        shard_layers(config, model, mesh["dp"] if mesh.ndim > 1 else mesh)
    return Job(
        modules=[model],
        optimizer=make_optimizer(config, model.parameters()),
        axes=_axes(mesh),
        # FSDP casts by its own policy
        forward_backward=_whole_step(
            model, contextlib.nullcontext if fsdp else lambda: _autocast(config, device)
        ),
        layers=config.shape.layers,
    )


def _crossed(device: torch.device, layout: Layout) -> DeviceMesh:
    """Neighbouring ranks, which share a node, lie on the data axis; so the tensor axis crosses nodes."""
    places = torch.arange(layout.dp * layout.tp).view(layout.tp, layout.dp).T.contiguous()
    return DeviceMesh(device.type, places, mesh_dim_names=("dp", "tp"))


def shard_layers(config: Config, model: GPT, mesh: DeviceMesh) -> None:
    """FSDP2: each layer is a unit that is gathered when it is needed; embedding, norm and head are one more."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mixed = config.precision == "mixed"
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if mixed else None, reduce_dtype=torch.float32 if mixed else None
    )
    for block in model.layers.values():
        fully_shard(block, mesh=mesh, reshard_after_forward=config.reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=config.reshard, mp_policy=policy)


def split_matrices(model: GPT, mesh: DeviceMesh, plan: str) -> None:
    """Tensor parallelism (Shoeybi et al. 2019): q, k, v, gate and up by columns, o and down by rows, the head by columns.

    plan "plain": each column-parallel matrix all-reduces the gradient of its input for itself; "shared input": attention and
    feed-forward take it as one distributed tensor, so that the parts are summed before one all-reduce; "sharded vocabulary": the
    embedding is split as well.
    """
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    columns = {"attention.wq", "attention.wk", "attention.wv", "ffn.gate", "ffn.up"}
    for block in model.layers.values():
        each: dict[str, Any] = {name: ColwiseParallel() for name in columns}
        each |= {"attention.wo": RowwiseParallel(), "ffn.down": RowwiseParallel()}
        if plan != "plain":
            whole = (Replicate(),)
            each["attention"] = PrepareModuleInput(
                input_layouts=(*whole, None), desired_input_layouts=(*whole, None)
            )
            each["ffn"] = PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole)
        parallelize_module(block, mesh, each)
    outer: dict[str, Any] = {"head": ColwiseParallel(output_layouts=Replicate())}
    if plan == "sharded vocabulary":
        outer["embed"] = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(model, mesh, outer)


# ---- the pipeline


def _pipeline(config: Config, device: torch.device) -> Job:
    """This rank's stage under torch's GPipe or 1F1B schedule."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    layout, rank = layout_of(config), dist.get_rank()
    cut = stages(config.shape, layout)
    first = sum(cut[:rank])
    module = GPT(
        config.shape,
        layers=range(first, first + cut[rank]),
        first=rank == 0,
        last=rank == layout.pp - 1,
        checkpointing=config.checkpointing,
    )
    initialise(module, config.shape, config.seed)
    module.to(device)
    group = dist.group.WORLD
    assert group is not None
    job = Job(
        modules=[module],
        optimizer=make_optimizer(config, module.parameters()),
        axes={"pp": (group, rank)},
        forward_backward=lambda tokens, targets, mark: None,
        stage=rank,
        layers=cut[rank],
    )
    if layout.pp == 1:
        job.forward_backward = _whole_step(module, lambda: _autocast(config, device))
        return job
    stage = PipelineStage(module, rank, layout.pp, device, group=group)
    schedule: Any = (Schedule1F1B if config.schedule == "1f1b" else ScheduleGPipe)(
        stage, config.microbatches, loss_fn=loss_of
    )
    keep: Mapping[str, bool] = {} if config.keep_logits else {"return_outputs": False}

    def forward_backward(tokens: torch.Tensor, targets: torch.Tensor, mark: Mark) -> torch.Tensor | None:
        losses: list[torch.Tensor] = []
        job.ops = []
        with _autocast(config, device), _watched(stage, job.ops, mark):
            if rank == 0:
                schedule.step(tokens, **keep)
            elif rank == layout.pp - 1:
                schedule.step(target=targets, losses=losses, **keep)
            else:
                schedule.step(**keep)
        mark("backward")
        return torch.stack(losses).mean().detach() if losses else None

    job.forward_backward = forward_backward
    return job


@contextlib.contextmanager
def _watched(stage: Any, ops: list[dict[str, Any]], mark: Mark) -> Any:
    """Note when each microbatch of a stage is computed, forward ("F") and backward ("B")."""
    forward, backward = stage.forward_one_chunk, stage.backward_one_chunk

    def timed(op: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(microbatch: int, *args: Any, **kwargs: Any) -> Any:
            begin_s, cpu_s = time.monotonic(), time.thread_time()
            answer = work(microbatch, *args, **kwargs)
            ops.append(
                {
                    "op": op,
                    "microbatch": microbatch,
                    "begin_s": begin_s,
                    "end_s": time.monotonic(),
                    "cpu_s": time.thread_time() - cpu_s,
                }
            )
            if op == "F":
                mark("forward")
            return answer

        return run

    stage.forward_one_chunk, stage.backward_one_chunk = timed("F", forward), timed("B", backward)
    try:
        yield
    finally:
        stage.forward_one_chunk, stage.backward_one_chunk = forward, backward
