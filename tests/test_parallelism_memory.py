"""Counting storages and collectives, and a cap on memory: against independent counts, in a process of its own where it must be."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mlsyslab.labs.parallelism.collectives import Meter
from mlsyslab.labs.parallelism.gpt import GPT, batch_of, corpus, initialise, loss_of
from mlsyslab.labs.parallelism.memory import Storages, is_out_of_memory
from mlsyslab.labs.parallelism.shapes import TRAINED

MODEL = TRAINED["1M"]


@pytest.fixture
def alone(tmp_path: Any) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def metered(work: Any, storages: Storages | None = None) -> tuple[Storages, list[dict[str, Any]]]:
    found = storages or Storages()
    meter = Meter(found, {})
    with meter:
        kept = work()
        found.mark("end")
    del kept
    return found, meter.take()


class TestStorages:
    def test_a_tensor_counts_while_it_lives_and_its_views_do_not(self) -> None:
        storages, _ = metered(lambda: [torch.zeros(1000), torch.zeros(10, 10).t()])
        assert storages.moments["end"]["total"] == 4000 + 400
        assert storages.total_bytes == 0

    def test_the_peak_is_what_was_live_at_once(self) -> None:
        def work() -> torch.Tensor:
            first = torch.zeros(1000)
            second = torch.zeros(500) + first.sum()
            del first
            return second

        storages, _ = metered(work)
        assert 4000 + 2 * 2000 <= storages.peak["total"] <= 4000 + 2 * 2000 + 8
        assert storages.moments["end"]["total"] == 2000

    def test_roles_are_the_models_and_its_optimizers(self) -> None:
        model = nn.Linear(10, 10, bias=False)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        storages = Storages()

        def work() -> None:
            storages.adopt([model], optimizer)
            model(torch.ones(1, 10)).sum().backward()
            optimizer.step()

        metered(work, storages)
        end = storages.moments["end"]
        assert (end["params"], end["grads"]) == (400, 400)
        assert end["optimizer"] == pytest.approx(800, abs=8)  # and a step count

    def test_what_forward_keeps_is_what_autograd_saved(self) -> None:
        """Against torch's own hooks: every storage that a saved tensor looks into, once, parameters and inputs aside."""
        model = GPT(MODEL)
        initialise(model, MODEL, 0)
        tokens, targets = batch_of(0, MODEL, 2, 0)
        saved: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        storages = Storages()
        storages.adopt([model], None)
        storages.inputs(tokens, targets)
        with Meter(storages, {}), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = loss_of(model(tokens), targets)
            storages.mark("forward")
        own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers(), tokens, targets)}
        kept = sum(size for key, size in saved.items() if key not in own)
        rotary = model.rotary.untyped_storage().nbytes()
        assert storages.moments["forward"]["other"] - rotary == pytest.approx(
            kept + loss.numel() * 4, rel=0.002
        )

    def test_a_storage_that_is_resized_counts_as_it_is(self) -> None:
        """FSDP frees gathered parameters so."""

        def work() -> torch.Tensor:
            tensor = torch.zeros(1000)
            tensor.untyped_storage().resize_(0)
            return tensor

        storages, _ = metered(work)
        assert storages.moments["end"]["total"] == 0
        assert storages.peak["total"] == 4000

    def test_an_error_inside_leaves_no_mode_behind(self) -> None:
        before = torch.UntypedStorage.resize_
        with pytest.raises(ValueError, match="on purpose"):
            metered(lambda: (_ for _ in ()).throw(ValueError("on purpose")))
        assert torch.UntypedStorage.resize_ is before
        assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


class TestCollectives:
    def test_each_is_counted_with_its_bytes(self, alone: None) -> None:
        tensor, whole = torch.zeros(100), torch.zeros(100)

        def work() -> None:
            dist.all_reduce(tensor)
            dist.all_reduce(tensor)
            dist.broadcast(tensor, src=0)
            dist.all_gather_into_tensor(whole, tensor)
            dist.reduce_scatter_tensor(tensor, whole)
            dist.barrier()

        _, rows = metered(work)
        assert {row["kind"]: (row["count"], row["bytes"]) for row in rows} == {
            "all_reduce": (2, 800),
            "broadcast": (1, 400),
            "all_gather": (1, 400),
            "reduce_scatter": (1, 400),
        }

    def test_what_was_taken_is_not_counted_again(self, alone: None) -> None:
        meter = Meter(Storages(), {})
        with meter:
            dist.all_reduce(torch.zeros(1))
        assert len(meter.take()) == 1
        assert meter.take() == []

    def test_an_axis_is_told_by_its_group(self, alone: None) -> None:
        group = dist.new_group([0])
        meter = Meter(Storages(), {group.group_name: "tp"})
        with meter:
            dist.all_reduce(torch.zeros(1), group=group)
            dist.all_reduce(torch.zeros(1))
        assert {row["axis"] for row in meter.take()} == {"tp", "world"}


CAPPED = """
import resource, torch
from mlsyslab.labs.parallelism.memory import cap_memory, is_out_of_memory
lift = cap_memory(64_000_000, torch.device("cpu"))
kept = torch.zeros(10_000_000 // 4)
try:
    torch.zeros(100_000_000 // 4)
except RuntimeError as error:
    assert is_out_of_memory(error), error
else:
    raise SystemExit("the cap was not felt")
lift()
torch.zeros(100_000_000 // 4)
print("capped and lifted")
"""

RESIDENT = """
import torch
from mlsyslab.labs.parallelism.memory import Storages, resident_bytes, return_freed_memory
from mlsyslab.labs.parallelism.collectives import Meter
from mlsyslab.labs.parallelism.gpt import GPT, batch_of, initialise, loss_of
from mlsyslab.labs.parallelism.shapes import TRAINED
torch.set_num_threads(1)
return_freed_memory()
model_, storages, losses, seen = TRAINED["17M"], Storages(), [], []
with Meter(storages, {}):
    model = GPT(model_)
    initialise(model, model_, 0)
    tokens, targets = batch_of(0, model_, 2, 0)
    for _ in range(3):  # the first makes what libraries keep for themselves
        losses.append(loss_of(model(tokens), targets))
        seen.append((resident_bytes(), storages.total_bytes))
print((seen[2][0] - seen[1][0]) / (seen[2][1] - seen[1][1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own limit and figures are Linux's")
class TestTheKernel:
    def run(self, code: str) -> str:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def test_a_cap_is_felt_and_lifted(self) -> None:
        assert "capped and lifted" in self.run(CAPPED)

    def test_counted_storages_are_what_the_kernel_sees(self) -> None:
        """Anonymous memory grows by what was counted, once the C library gives back what is freed."""
        assert float(self.run(RESIDENT)) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(("error", "is_one"), [(MemoryError(), True), (RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True), (RuntimeError("Connection closed by peer"), False)])  # fmt: skip
def test_what_is_an_out_of_memory(error: Exception, is_one: bool) -> None:
    assert is_out_of_memory(error) is is_one


class TestModel:
    def test_a_stage_has_the_weights_that_it_has_in_the_whole(self) -> None:
        whole, stage = GPT(MODEL), GPT(MODEL, layers=range(2, 4), first=False, last=True)
        initialise(whole, MODEL, 3)
        initialise(stage, MODEL, 3)
        of_whole = dict(whole.named_parameters())
        assert all(torch.equal(p, of_whole[name]) for name, p in stage.named_parameters())
        assert len(dict(stage.named_parameters())) == 2 * 9 + 2

    def test_stages_in_a_row_are_the_whole(self) -> None:
        whole = GPT(MODEL)
        first, last = GPT(MODEL, layers=range(1), last=False), GPT(MODEL, layers=range(1, 4), first=False)
        for module in (whole, first, last):
            initialise(module, MODEL, 0)
        tokens, _ = batch_of(0, MODEL, 2, 0)
        assert torch.allclose(last(first(tokens)), whole(tokens), atol=1e-6)

    def test_attention_looks_back_only(self) -> None:
        model = GPT(MODEL)
        initialise(model, MODEL, 0)
        tokens, _ = batch_of(0, MODEL, 1, 0)
        changed = tokens.clone()
        changed[0, -1] = (changed[0, -1] + 1) % MODEL.vocab
        assert torch.equal(model(tokens)[0, :-1], model(changed)[0, :-1])

    def test_the_text_is_the_same_everywhere_and_another_in_each_step(self) -> None:
        assert torch.equal(batch_of(3, MODEL, 4, 1)[0], batch_of(3, MODEL, 4, 1)[0])
        assert not torch.equal(batch_of(3, MODEL, 4, 1)[0], batch_of(4, MODEL, 4, 1)[0])
        tokens, targets = batch_of(0, MODEL, 2, 0)
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
        assert int(tokens.max()) < MODEL.vocab
        assert len(corpus()) > 100_000
