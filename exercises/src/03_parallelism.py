# %% [markdown]
# # Exercises: parallelism
#
# You write the ledger of every way of sharding, count what a rank sends, find the bubble of a pipeline, build two of the splits on
# real ranks, and choose a plan. A check says one line: `correct`, or what it got, what it expected and a hint. The checks count by
# another way than the formula: they give parameters owners, pass chunks around a ring, and play schedules event by event.
#
# **Contents**
#
# 1. Exercise 3.1: the ledger of DDP and ZeRO-1, 2, 3
# 2. Exercise 3.2: what a rank sends
# 3. Exercise 3.3: the pipeline's bubble, and what it holds
# 4. Exercise 3.4: a bucketed all-reduce, on two real ranks
# 5. Exercise 3.5: a column-parallel and a row-parallel matrix, on two real ranks
# 6. Exercise 3.6: which plan
#
# Write where it says `YOUR CODE`; leave the check cells as they are. Lesson 3 has everything you need.

# %%
from mlsyslab.teach import checks
from mlsyslab.teach import splits_for_checks as counted

# %% [markdown]
# ## Exercise 3.1: the ledger
#
# Mixed precision with Adam keeps, for each parameter, 2 bytes of weight, 2 of gradient, and 12 of optimizer state (a float32 weight and two
# averages). Which of the three is cut over the ranks?
#
# | | parameters | gradients | optimizer state |
# |---|---|---|---|
# | `ddp` | whole | whole | whole |
# | `zero1` | whole | whole | cut |
# | `zero2` | whole | cut | cut |
# | `zero3` (FSDP) | cut | cut | cut |
#
# Write `ledger(params, ranks, strategy)`: bytes on one rank, as `{"params": ..., "grads": ..., "optimizer": ...}`.


# %% tags=["3.1"]
def ledger(params, ranks, strategy):
    """Bytes of model state on one rank, by what it is."""
    ### BEGIN SOLUTION
    whole = {"params": 2 * params, "grads": 2 * params, "optimizer": 12 * params}
    cut = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}[strategy]
    order = ["optimizer", "grads", "params"]
    return {what: size / (ranks if what in order[:cut] else 1) for what, size in whole.items()}
    ### END SOLUTION


# %% tags=["check", "3.1"]
# NBVAL_CHECK_OUTPUT
hint = "each stage cuts one more thing, the optimizer's first, since it is the largest"
checks.check_cases("3.1", ledger, counted.ledger_cases(), tolerance=1e-6, hint=hint)

# %% [markdown]
# The ZeRO paper draws it for 7.5 billion parameters on 64 devices. Do your numbers agree with its figure 1 (120, 31.4, 16.6 and 1.9 GB)?

# %%
for strategy in counted.CUT:
    try:
        gigabytes = sum(ledger(7.5e9, 64, strategy).values()) / 1e9
        print(f"{strategy}: {gigabytes:.1f} GB")
    except NotImplementedError:
        print(f"{strategy}: not written yet")

# %% [markdown]
# The first step already saves three quarters, since the optimizer's state is 12 of the 16 bytes; the last one divides everything. Why would
# anybody stop at ZeRO-1? Because gathering parameters costs communication, which comes next.
#
# ## Exercise 3.2: what a rank sends
#
# On a ring of n ranks an all-gather of `size` bytes (the whole) lets each rank pass on n - 1 of n parts. A reduce-scatter sends as
# much. An all-reduce is one after the other. Write `sent(kind, size, ranks)` for `"all_gather"`, `"reduce_scatter"` and `"all_reduce"`.


# %% tags=["3.2a"]
def sent(kind, size, ranks):
    """Bytes that one rank sends."""
    ### BEGIN SOLUTION
    once = size * (ranks - 1) / ranks
    return 2 * once if kind == "all_reduce" else once
    ### END SOLUTION


# %% tags=["check", "3.2a"]
# NBVAL_CHECK_OUTPUT
hint = "a rank sends one part in each turn, and there are n - 1 turns; an all-reduce has two rounds of them"
checks.check_cases("3.2a", sent, counted.ring_cases(), tolerance=1e-6, hint=hint)

# %% [markdown]
# A training step sends: under **DDP** an all-reduce of the gradients; under **FSDP** the parameters are gathered for forward, gathered again for backward,
# and the gradients are reduce-scattered; **ZeRO-1 as torch does it** all-reduces the gradients, and then each rank broadcasts the parameters that it
# updated, which costs as much as an all-gather. Write `step_bytes(strategy, size, ranks)` with the function from above; parameters and gradients are `size`
# bytes each.


# %% tags=["3.2b"]
def step_bytes(strategy, size, ranks):
    """Bytes that one rank sends in a step of "ddp", "zero1" or "fsdp"."""
    ### BEGIN SOLUTION
    gather, reduce = sent("all_gather", size, ranks), sent("all_reduce", size, ranks)
    scatter = sent("reduce_scatter", size, ranks)
    return {"ddp": reduce, "zero1": reduce + gather, "fsdp": 2 * gather + scatter}[strategy]
    ### END SOLUTION


# %% tags=["check", "3.2b"]
# NBVAL_CHECK_OUTPUT
hint = "list the collectives of each, in the order of the step"
checks.check_cases("3.2b", step_bytes, counted.step_cases(), tolerance=1e-6, hint=hint)

# %% [markdown]
# FSDP and torch's ZeRO-1 send the same, 1.5 times DDP's bytes; so whoever pays for ZeRO-1 can have all of FSDP's memory for it. (On CPU tensors FSDP sends
# twice DDP's bytes: the backend gloo makes an all-reduce of each reduce-scatter. A measurement that disagrees with the formula may be right.)
#
# ## Exercise 3.3: the pipeline
#
# p equal stages, m microbatches. Forward fills the pipeline, backward empties it. **a)** Which share of the time is a stage idle? Write
# `bubble(stages, microbatches)`.


# %% tags=["3.3a"]
def bubble(stages, microbatches):
    """Idle share of a stage, 0..1."""
    ### BEGIN SOLUTION
    return (stages - 1) / (microbatches + stages - 1)
    ### END SOLUTION


# %% tags=["check", "3.3a"]
# NBVAL_CHECK_OUTPUT
hint = "a step lasts as long as m + p - 1 microbatches, of which a stage computes m"
checks.check_cases("3.3a", bubble, counted.bubble_cases(), tolerance=1e-6, hint=hint)

# %% [markdown]
# **b)** How many microbatches' activations does a stage hold at most? GPipe computes all forwards first. 1F1B lets a stage run ahead only as far as there
# are stages behind it, itself included. Write `held(schedule, stages, microbatches, stage)`; the first stage is 0.


# %% tags=["3.3b"]
def held(schedule, stages, microbatches, stage):
    """Most microbatches in flight on a stage, under "gpipe" or "1f1b"."""
    ### BEGIN SOLUTION
    return microbatches if schedule == "gpipe" else min(stages - stage, microbatches)
    ### END SOLUTION


# %% tags=["check", "3.3b"]
# NBVAL_CHECK_OUTPUT
hint = "the first stage waits longest for its first backward; few microbatches are a bound too"
checks.check_cases("3.3b", held, counted.held_cases(), hint=hint)

# %% [markdown]
# More microbatches shrink the bubble under both schedules, but under GPipe they also fill the memory. That is why 1F1B is used, although its bubble is
# the same. The first stage holds most: stages with equal layers do not have equal memory.
#
# ## Exercise 3.4: a bucketed all-reduce
#
# DDP does not send each gradient alone, since every message costs a latency, and not all in one, since nothing could then be sent while
# backward goes on. It fills buckets. **a)** Write `fill_buckets(sizes, limit)`: lists of indices, in order; a bucket takes the next gradient as long as
# their bytes stay within `limit`, and a gradient larger than that has a bucket of its own.


# %% tags=["3.4a"]
def fill_buckets(sizes, limit):
    """Indices of the gradients in each bucket, in order."""
    ### BEGIN SOLUTION
    buckets = []
    for at, size in enumerate(sizes):
        if not buckets or sum(sizes[i] for i in buckets[-1]) + size > limit:
            buckets.append([])
        buckets[-1].append(at)
    return buckets
    ### END SOLUTION


# %% tags=["check", "3.4a"]
# NBVAL_CHECK_OUTPUT
hint = "open a new bucket before the one that would overflow, never an empty one"
checks.check_cases("3.4a", fill_buckets, counted.BUCKET_CASES, hint=hint)

# %% [markdown]
# **b)** Write `reduce_bucket(gradients, all_reduce, world)`: it gets the tensors of one bucket, packs them into one flat tensor, calls `all_reduce` on it
# **once** (it sums over the ranks, in place), and writes the **mean** back into each gradient. `torch` is there; `torch.cat`, `flatten`,
# `split`, `view_as` and `copy_` are what you need.


# %% tags=["3.4b"]
def reduce_bucket(gradients, all_reduce, world):
    """Replace each gradient by its mean over the ranks, with one collective."""
    ### BEGIN SOLUTION
    flat = torch.cat([gradient.flatten() for gradient in gradients])  # noqa: F821  the ranks have torch
    all_reduce(flat)
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient) / world)
    ### END SOLUTION


# %% tags=["check", "3.4b"]
# NBVAL_CHECK_OUTPUT
got = counted.on_ranks("3.4b", [fill_buckets, reduce_bucket], "buckets")
seen = [(rank["worst"] < 1e-6, len(rank["calls"])) for rank in got]
hint = "on each rank: (equal to the mean that one process computes, number of collectives)"
checks.check("3.4b", seen, [(True, 4)] * 2, hint=hint)

# %% [markdown]
# Two real processes have just exchanged gradients through your function. Each rank called the same collectives in the same order, as it must: had one
# rank skipped one, the other would have waited for it until a timeout.
#
# ## Exercise 3.5: matrices cut in two
#
# A feed-forward `y = relu(x A) B`. Rank r has half of A's **columns** and the matching half of B's **rows**. Then relu needs no exchange, since each
# rank has whole columns of the hidden layer, and the two partial results of B only have to be summed. Write both directions; `all_reduce(t)`
# sums in place.
#
# **Where is the one all-reduce of each direction?** In `forward` at the row-parallel matrix's output. In backward, `input_gradient(grad_y, x, a, b,
# all_reduce)`, the gradient of x has a part from each half of A.


# %% tags=["3.5"]
def forward(x, a, b, all_reduce):
    """y [batch, width] from x [batch, width], this rank's columns a [width, hidden / 2] and rows b [hidden / 2, width]."""
    ### BEGIN SOLUTION
    return all_reduce(torch.relu(x @ a) @ b)  # noqa: F821  the ranks have torch
    ### END SOLUTION


def input_gradient(grad_y, x, a, b, all_reduce):
    """The gradient of x, given that of y (whole on every rank)."""
    ### BEGIN SOLUTION
    return all_reduce(((grad_y @ b.T) * (x @ a > 0)) @ a.T)
    ### END SOLUTION


# %% tags=["check", "3.5"]
# NBVAL_CHECK_OUTPUT
got = counted.on_ranks("3.5", [forward, input_gradient], "matrices")
seen = [(rank["forward"] < 1e-5, rank["backward"] < 1e-5, len(rank["calls"])) for rank in got]
hint = "on each rank: (forward right, gradient right, collectives in all)"
checks.check("3.5", seen, [(True, True, 2)] * 2, hint=hint)

# %% [markdown]
# One all-reduce forward and one backward for this block, one each for attention: the four a layer of tensor parallelism. Had A been cut by rows, relu would have
# needed the sum first: an exchange more. And the weights' own gradients need none: each rank has all that its part depends on.
#
# ## Exercise 3.6: which plan
#
# Candidates come as dictionaries: `name`, `peak_gb`, `complexity` (smaller is simpler), `step_s`. Write `choose(plans, memory_gb)`: the name of the
# **simplest** plan that fits, unless a more complex one that fits is at least 1.4 times as fast as it; then the simplest of those. `None` if nothing fits.


# %% tags=["3.6"]
def choose(plans, memory_gb):
    """The name of the plan to take, or None."""
    ### BEGIN SOLUTION
    fits = sorted((p for p in plans if p["peak_gb"] <= memory_gb), key=lambda p: p["complexity"])
    if not fits:
        return None
    faster = [p for p in fits if p["step_s"] * 1.4 <= fits[0]["step_s"]]
    return (faster or fits)[0]["name"]
    ### END SOLUTION


# %% tags=["check", "3.6"]
# NBVAL_CHECK_OUTPUT
hint = "what does not fit is out; then simplicity; then speed, if it is worth a change of the code"
checks.check_cases("3.6", choose, counted.plan_cases(), hint=hint)

# %% [markdown]
# The third case is the worked example: 74 GB, a model whose training needs 81 whole. Sharding comes first, since it is simple, and nothing else is
# enough faster to pay for its complexity. In the first case a hybrid is 1.6 times as fast, and then it is worth its price.
