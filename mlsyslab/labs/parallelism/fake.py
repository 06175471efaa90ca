"""A model that fits nowhere here, under FSDP at any world size, without hardware: torch's own fake tensors and fake process group.

A second opinion on the ledger, from torch's real FSDP and autograd code: only the numbers in the tensors are missing. Runs in a
process of its own (`cross_check`), since the fake process group is the process' only one.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from mlsyslab.contract import ConfigError
from mlsyslab.labs.parallelism.config import Config, Layout
from mlsyslab.labs.parallelism.shapes import Model

FEW, MORE = 4, 8  # layers that are run; memory is linear in them


def cross_check(model: Model, layout: Layout, *, timeout_s: float = 300.0) -> dict[str, float]:
    """Bytes of one rank in its second step, extrapolated from FEW and MORE layers: state_bytes and peak_bytes.

    For FSDP layouts (dp ranks, no tensor or pipeline axis) of float32 or mixed precision. On the CPU, so norms keep what eager norms
    keep; compare with `ledger(model, layout)`. Raises ConfigError for another layout, RunError where torch cannot do it.
    """
    if layout.shard != "fsdp" or layout.tp > 1 or layout.pp > 1:
        raise ConfigError(
            f"shard={layout.shard!r}, tp={layout.tp}, pp={layout.pp} is not FSDP alone; choose shard='fsdp', tp=1, pp=1"
        )
    from mlsyslab import launch

    few, more = (
        launch.call(
            "mlsyslab.labs.parallelism.fake:rank_main",
            {
                "model": dataclasses.asdict(dataclasses.replace(model, layers=layers)),
                "layout": dataclasses.asdict(layout),
            },
            timeout_s=timeout_s,
        )[0]
        for layers in (FEW, MORE)
    )
    each = {name: (more[name] - few[name]) / (MORE - FEW) for name in few}
    return {name: few[name] + (model.layers - FEW) * each[name] for name in few}


def rank_main(payload: dict[str, Any], out: Path) -> dict[str, float]:
    """Two steps of one rank of the fake world; the second one's figures."""
    del out
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    from mlsyslab.labs.parallelism.collectives import Meter
    from mlsyslab.labs.parallelism.gpt import GPT, loss_of
    from mlsyslab.labs.parallelism.memory import Storages
    from mlsyslab.labs.parallelism.split import make_optimizer, shard_layers

    model, layout = Model(**payload["model"]), Layout(**{**payload["layout"], "split": ()})
    config = Config(
        strategy="fsdp", precision=layout.precision, optimizer=layout.optimizer, reshard=layout.reshard
    )
    dist.init_process_group("fake", rank=0, world_size=layout.dp, store=FakeStore())
    mesh = init_device_mesh(
        "cpu", (layout.dp,), mesh_dim_names=("dp",)
    )  # inside the mode it would need real data
    storages = Storages()
    with FakeTensorMode():
        whole = GPT(model, checkpointing=layout.checkpointing)
        shard_layers(config, whole, mesh)
        optimizer = make_optimizer(config, whole.parameters())
        batch = (layout.micro_batch, model.seq)
        tokens, targets = (torch.zeros(batch, dtype=torch.long) for _ in range(2))
        for _ in range(2):
            storages.reset()
            storages.adopt([whole], optimizer)
            storages.inputs(tokens, targets)
            with Meter(storages, {}):
                loss_of(whole(tokens), targets).backward()
                optimizer.step()
                storages.mark("optimizer")
                optimizer.zero_grad()
    state = storages.moments["optimizer"]
    return {
        "state_bytes": float(state["params"] + state["grads"] + state["optimizer"]),
        "peak_bytes": float(storages.peak["total"]),
    }
