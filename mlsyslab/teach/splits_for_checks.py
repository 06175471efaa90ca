"""What checks the parallelism exercises: counts made another way than by the formula, and learners' functions on real ranks.

    on_ranks("3.4b", [fill, reduce], "buckets")     what each of two gloo ranks got, or one sentence

A function that was written in a notebook cell cannot be sent to another process, but its text can.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlsyslab.contract import RunError
from mlsyslab.teach.checks import NotSolvedYet, WrongAnswer

RANKS = 2
HANG_S = 8.0  # after which ranks that wait for each other are told so
BYTES = {
    "params": 2,
    "grads": 2,
    "optimizer": 12,
}  # a parameter, mixed precision with Adam (Rajbhandari et al. 2020)
CUT = {
    "ddp": (),
    "zero1": ("optimizer",),
    "zero2": ("optimizer", "grads"),
    "zero3": ("optimizer", "grads", "params"),
}


# ---- counted, not computed


def state_of_rank_0(params: int, ranks: int, strategy: str) -> dict[str, int]:
    """Bytes that rank 0 holds, by giving each parameter an owner and counting what is its own."""
    owner = np.arange(params) * ranks // params
    own, everything = int((owner == 0).sum()), params
    return {what: size * (own if what in CUT[strategy] else everything) for what, size in BYTES.items()}


def ring_bytes(kind: str, size: int, ranks: int) -> int:
    """Bytes that rank 0 sends, by passing chunks around a ring until everybody has what the collective promises."""
    chunk = size // ranks
    has = [
        [{rank} for _ in range(ranks)] for rank in range(ranks)
    ]  # has[rank][chunk]: whose parts are summed in it
    sent = 0

    def turn(shift: int, step: int, *, add: bool) -> None:
        nonlocal sent
        moving = [(rank, (rank - step + shift) % ranks) for rank in range(ranks)]
        parts = [set(has[rank][at]) for rank, at in moving]
        for (rank, at), part in zip(moving, parts, strict=True):
            target = has[(rank + 1) % ranks]
            target[at] = target[at] | part if add else part
            sent += chunk if rank == 0 else 0

    if kind in ("all_reduce", "reduce_scatter"):
        for step in range(ranks - 1):
            turn(0, step, add=True)
        assert all(has[rank][(rank + 1) % ranks] == set(range(ranks)) for rank in range(ranks))
    if kind in ("all_reduce", "all_gather"):
        if kind == "all_gather":
            has = [
                [set(range(ranks)) if at == rank else set() for at in range(ranks)] for rank in range(ranks)
            ]
        for step in range(ranks - 1):
            turn(1 if kind == "all_reduce" else 0, step, add=False)
        assert all(part == set(range(ranks)) for row in has for part in row)
    return sent


def played(schedule: str, stages: int, microbatches: int) -> tuple[float, list[int]]:
    """(idle share of equal stages whose backward takes twice as long as forward, most microbatches held by each stage): by letting
    each stage take, in every unit of time, what its schedule has next and what has arrived."""
    done: list[dict[tuple[str, int], int]] = [{} for _ in range(stages)]
    todo = [_order(schedule, stages, microbatches, stage) for stage in range(stages)]
    free, now, held = [0] * stages, 0, [[0] for _ in range(stages)]
    while any(todo):
        for stage in range(stages):
            if free[stage] > now or not todo[stage]:
                continue
            op, microbatch = todo[stage][0]
            source = stage - 1 if op == "F" else stage + 1
            if 0 <= source < stages and done[source].get((op, microbatch), now + 1) > now:
                continue
            todo[stage].pop(0)
            free[stage] = now + (1 if op == "F" else 2)
            done[stage][op, microbatch] = free[stage]
            held[stage].append(held[stage][-1] + (1 if op == "F" else -1))
        now += 1
    return 1 - 3 * microbatches / max(free), [max(one) for one in held]


def _order(schedule: str, stages: int, microbatches: int, stage: int) -> list[tuple[str, int]]:
    ahead = microbatches if schedule == "gpipe" else min(stages - stage, microbatches)
    order, forward, backward = [], 0, 0
    while backward < microbatches:
        if forward < microbatches and forward - backward < ahead:
            order.append(("F", forward))
            forward += 1
        else:
            order.append(("B", backward))
            backward += 1
            ahead = ahead if schedule == "1f1b" else 0
    return order


# ---- the cases: (arguments, right answer)

ROUNDS = {
    "ddp": ("all_reduce",),
    "zero1": ("all_reduce", "all_gather"),
    "fsdp": ("all_gather", "all_gather", "reduce_scatter"),
}
BUCKET_CASES = [
    (([40, 40, 40], 100), [[0, 1], [2]]),
    (([60, 160, 32, 4, 84], 100), [[0], [1], [2, 3], [4]]),
    (([50, 50, 1], 100), [[0, 1], [2]]),
    (([], 100), []),
]
# name, peak_gb, complexity, step_s
CANDIDATES = [
    ("tensor", 18, 3.0, 0.55),
    ("DDP", 81, 0.0, 0.65),
    ("hybrid", 5, 8.0, 0.40),
    ("FSDP, checkpointing", 9, 2.5, 0.87),
    ("FSDP", 21, 1.0, 0.65),
]


def ledger_cases() -> list[tuple[tuple[int, int, str], dict[str, int]]]:
    """(parameters, ranks, strategy) and the bytes of rank 0."""
    cases = [(64_000, ranks, strategy) for ranks in (1, 2, 8, 64) for strategy in CUT]
    return [(case, state_of_rank_0(*case)) for case in cases]


def ring_cases() -> list[tuple[tuple[str, int, int], int]]:
    """(collective, bytes, ranks) and what a rank sends."""
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    return [((kind, 9600, ranks), ring_bytes(kind, 9600, ranks)) for kind in kinds for ranks in (1, 2, 4, 8)]


def step_cases() -> list[tuple[tuple[str, int, int], int]]:
    """(strategy, bytes, ranks) and what a rank sends in a step."""
    return [
        ((strategy, 9600, ranks), sum(ring_bytes(kind, 9600, ranks) for kind in kinds))
        for strategy, kinds in ROUNDS.items()
        for ranks in (2, 4, 8)
    ]


def bubble_cases() -> list[tuple[tuple[int, int], float]]:
    """(stages, microbatches) and the idle share."""
    return [((p, m), played("1f1b", p, m)[0]) for p in (1, 2, 4, 8) for m in (8, 16, 64)]


def held_cases() -> list[tuple[tuple[str, int, int, int], int]]:
    """(schedule, stages, microbatches, stage) and the most microbatches in flight."""
    sizes = [(schedule, p, m) for schedule in ("gpipe", "1f1b") for p, m in ((2, 8), (4, 2), (4, 16))]
    return [((*size, stage), played(*size)[1][stage]) for size in sizes for stage in range(size[1])]


def plan_cases() -> list[tuple[tuple[list[dict[str, Any]], float], str | None]]:
    """(plans, memory_gb) and the name to choose: with and without a hybrid that is worth its price."""
    names = ("name", "peak_gb", "complexity", "step_s")
    every = [dict(zip(names, row, strict=True)) for row in CANDIDATES]
    plain = [one for one in every if one["name"] != "hybrid"]
    answers: list[tuple[list[dict[str, Any]], float, str | None]] = [
        (every, 160, "hybrid"), (plain, 160, "DDP"), (plain, 74, "FSDP"), (plain, 10, "FSDP, checkpointing"), (every, 4, None)
    ]  # fmt: skip
    return [((plans, memory), answer) for plans, memory, answer in answers]


# ---- on real ranks


def on_ranks(name: str, functions: Sequence[Callable[..., Any]], scenario: str) -> list[dict[str, Any]]:
    """Run a scenario with the learner's functions on RANKS gloo ranks; what each rank got. Raises WrongAnswer with the rank and its
    error, or where ranks wait for each other; NotSolvedYet on a blank."""
    from mlsyslab import launch

    if any("raise NotImplementedError" in _source(name, function) for function in functions):
        raise NotSolvedYet(f"Not solved yet: exercise {name} (write the function where it says YOUR CODE)")
    sources = {function.__name__: textwrap.dedent(_source(name, function)) for function in functions}
    payload = {
        "sources": sources,
        "names": [function.__name__ for function in functions],
        "scenario": scenario,
    }
    try:
        results = launch.call(
            "mlsyslab.teach.splits_for_checks:rank_main", payload, ranks=RANKS, timeout_s=3 * HANG_S
        )
    except RunError as error:
        raise WrongAnswer(
            f"Exercise {name}: the ranks did not come to an end ({str(error).splitlines()[0][:160]})"
        ) from None
    for rank, result in enumerate(results):  # an error first: the other rank then waits for nothing
        if "error" in result:
            raise WrongAnswer(f"Exercise {name}: on rank {rank} your function raised {result['error']}")
    for rank, result in enumerate(results):
        if "hangs" in result:
            raise WrongAnswer(
                f"Exercise {name}: rank {rank} waits in a collective that the other does not call; every rank must call the same ones"
            )
    return results


def _source(name: str, function: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        raise WrongAnswer(
            f"Exercise {name}: the text of {getattr(function, '__name__', 'your function')} cannot be read; define it with `def` in a cell"
        ) from None


def rank_main(payload: dict[str, Any], out: Path) -> dict[str, Any]:
    """A rank's part: the learner's functions from their text, and the scenario."""
    del out
    import torch
    import torch.distributed as dist

    from mlsyslab.ranks import init_process_group, rank_context

    torch.set_num_threads(1)
    context = rank_context()
    init_process_group(context, timeout_s=HANG_S)
    dist.barrier()  # a rank whose function fails at once must not leave while the other still connects
    space: dict[str, Any] = {"torch": torch}
    calls: list[int] = []

    def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(tensor.numel())
        dist.all_reduce(tensor)
        return tensor

    try:
        for text in payload["sources"].values():
            exec(text, space)
        functions = [space[name] for name in payload["names"]]
        scenario = {"buckets": _buckets, "matrices": _matrices}[payload["scenario"]]
        answer = scenario(functions, all_reduce, context.rank)
    except Exception as error:
        if "imed out" in str(error) or "closed by peer" in str(error) or "reset by peer" in str(error):
            return {"hangs": True}
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"}
    return {**answer, "calls": calls}


def _buckets(functions: list[Any], all_reduce: Any, rank: int) -> dict[str, Any]:
    """Gradients of two ranks, reduced by the learner, beside the mean that one process computes of both."""
    import torch

    fill, reduce = functions
    shapes = [(3, 5), (40,), (2, 2, 2), (1,), (7, 3)]

    def gradients(of: int) -> list[torch.Tensor]:
        draw = torch.Generator().manual_seed(of)
        return [torch.randn(shape, generator=draw) for shape in shapes]

    mine = gradients(rank)
    sizes = [gradient.nbytes for gradient in mine]
    for bucket in fill(sizes, 100):
        reduce([mine[at] for at in bucket], all_reduce, RANKS)
    mean = [(a + b) / 2 for a, b in zip(gradients(0), gradients(1), strict=True)]
    worst = max(float((got - want).abs().max()) for got, want in zip(mine, mean, strict=True))
    return {"worst": worst}


def _matrices(functions: list[Any], all_reduce: Any, rank: int) -> dict[str, Any]:
    """A feed-forward whose matrices are cut over two ranks, beside the whole one under autograd."""
    import torch

    forward, input_gradient = functions
    draw = torch.Generator().manual_seed(0)
    x, a, b, grad_y = (torch.randn(shape, generator=draw) for shape in ((4, 6), (6, 8), (8, 6), (4, 6)))
    half = slice(4 * rank, 4 * rank + 4)
    y = forward(x.clone(), a[:, half], b[half], all_reduce)
    grad = input_gradient(grad_y.clone(), x.clone(), a[:, half], b[half], all_reduce)
    whole_x = x.clone().requires_grad_()
    whole = torch.relu(whole_x @ a) @ b
    whole.backward(grad_y)
    assert whole_x.grad is not None
    return {"forward": float((y - whole).abs().max()), "backward": float((grad - whole_x.grad).abs().max())}
