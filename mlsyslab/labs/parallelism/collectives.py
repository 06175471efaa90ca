"""The collectives of a step as they are issued: which, on which axis, how many, how many bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mlsyslab.labs.parallelism.memory import Storages

# The operator -> (kind, which of its arguments has the bytes, or "out" for what it returns). A gather is counted by what comes
# out of it and a reduce-scatter by what goes in: the whole, of which each rank has a part.
KINDS: Mapping[str, tuple[str, int | str]] = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::allreduce_coalesced_": ("all_reduce", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::allgather_": ("all_gather", 0),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::send": ("send", 0),
    "c10d::recv_": ("recv", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_reduce_": ("all_reduce", 0),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", "out"),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", "out"),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
    "_c10d_functional::broadcast": ("broadcast", 0),
}


class Meter(TorchDispatchMode):
    """Counts this rank's storages and collectives while it is entered; one mode for both, since each costs at every operator.

    axes: name of a process group -> the axis that it is ("dp", "tp", "pp").
    """

    def __init__(self, storages: Storages, axes: Mapping[str, str]) -> None:
        super().__init__()
        self.storages, self.axes = storages, dict(axes)
        self.counts: Counter[tuple[str, str]] = Counter()
        self.sizes: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> Any:
        resize, storages = torch.UntypedStorage.resize_, self.storages

        def resized(storage: Any, size: int) -> Any:
            answer = resize(storage, size)
            storages.resized(storage)
            return answer

        self._resize = resize
        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]  # FSDP frees by it, past every operator
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]  # as it was
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, torch.distributed.tensor.DTensor) for kind in types):
            return NotImplemented  # its local operators come through here themselves
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self._collective(func, args, out)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.storages.add(tensor)
        return out

    def _collective(self, func: Any, args: Any, out: Any) -> None:
        found = KINDS.get(func._schema.name)
        if found is None:
            return
        kind, which = found
        carrier = out if which == "out" else args[which]
        size = sum(t.numel() * t.element_size() for t in tree_leaves(carrier) if isinstance(t, torch.Tensor))
        axis = self.axes.get(_group_name(args), "world")
        self.counts[axis, kind] += 1
        self.sizes[axis, kind] += size

    def take(self) -> list[dict[str, Any]]:
        """What was issued since the last call: [{"axis", "kind", "count", "bytes"}], bytes of all `count` together."""
        rows = [
            {"axis": axis, "kind": kind, "count": count, "bytes": self.sizes[axis, kind]}
            for (axis, kind), count in sorted(self.counts.items())
        ]
        self.counts.clear()
        self.sizes.clear()
        return rows


def _group_name(args: Any) -> str:
    """Of the process group among an operator's arguments: a name, or the group itself in a box."""
    for item in args:
        if isinstance(item, torch.ScriptObject):
            try:
                return str(ProcessGroup.unbox(item).group_name)
            except RuntimeError:  # another object in a box, such as the reduction
                continue
    return next((item for item in reversed(args) if isinstance(item, str) and not item.isalpha()), "")
