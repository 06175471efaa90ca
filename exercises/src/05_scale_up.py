# %% [markdown]
# # Exercises: scale-up
#
# You write the rule by which a learning rate grows, find faults in the data from sample ids alone, estimate the gradient noise scale, mend gradient
# accumulation, and put it together as the procedure that tells the optimiser from the system. The checks run training on this machine
# where they need it (some seconds), and count in another way than the formula does.
#
# **Contents**
#
# 1. Exercise 5.1: the learning rate of a larger batch, and its limit
# 2. Exercise 5.2: what sample ids tell
# 3. Exercise 5.3: the gradient noise scale
# 4. Exercise 5.4: accumulation over unequal token counts
# 5. Exercise 5.5: optimiser or system?
#
# Write where it says `YOUR CODE`; leave the check cells as they are. Lesson 5 has everything you need.

# %%
from mlsyslab.teach import checks
from mlsyslab.teach import curves_for_checks as counted

# %% [markdown]
# ## Exercise 5.1: the rule and its limit
#
# **a)** The batch is `growth` times as large. Write the linear rule with warm-up: in step 0 the rate is still the small run's, then it climbs by equal
# amounts, and from step `climb` on it is `growth` times the small run's. With `climb=0` there is no warm-up.


# %% tags=["5.1a"]
def learning_rate(step, lr, growth, climb):
    """The learning rate of a step."""
    ### BEGIN SOLUTION
    if step >= climb:
        return growth * lr
    return lr + (growth - 1) * lr * step / climb
    ### END SOLUTION


# %% tags=["check", "5.1a"]
# NBVAL_CHECK_OUTPUT
hint = "the small run's rate plus a share of what is to be added"
checks.check_cases("5.1a", learning_rate, counted.rate_cases(), tolerance=1e-6, hint=hint)

# %% [markdown]
# **b)** Gradient descent with momentum runs away where the curvature is too large for the rate. Write `limit(lr, momentum)`: the largest
# curvature (Hessian eigenvalue) at which it is stable. The check lets it run and finds the border by bisection.


# %% tags=["5.1b"]
def limit(lr, momentum):
    """The largest stable curvature."""
    ### BEGIN SOLUTION
    return 2 * (1 + momentum) / lr
    ### END SOLUTION


# %% tags=["check", "5.1b"]
# NBVAL_CHECK_OUTPUT
hint = "without momentum it is 2 / lr; momentum makes it larger, since it brakes what swings"
checks.check_cases("5.1b", limit, counted.limit_cases(), tolerance=0.01, hint=hint)

# %% [markdown]
# Eight times the rate is an eighth of the limit. A network whose sharpness is between the two trains well small and diverges large, and no
# system is at fault. That is what warm-up is for: the first gentle steps make it flatter.
#
# ## Exercise 5.2: what sample ids tell
#
# **a)** Write `repeated(ranks)`: `ranks` holds, for one step, a list of sample ids from each rank. Which share of all of them had been
# drawn already, by any rank?


# %% tags=["5.2a"]
def repeated(ranks):
    """Share of a step's samples that are there more than once, 0..1."""
    ### BEGIN SOLUTION
    ids = [index for rank in ranks for index in rank]
    return 1 - len(set(ids)) / len(ids)
    ### END SOLUTION


# %% tags=["check", "5.2a"]
# NBVAL_CHECK_OUTPUT
hint = "put the ranks' ids together, and count how many are different"
checks.check_cases("5.2a", repeated, counted.repeated_cases(), tolerance=1e-6, hint=hint)

# %% [markdown]
# Four ranks without a distributed sampler draw the same: three quarters of the step are repetitions, and the batch is in truth a quarter of what
# you think. The loss of such a run looks almost normal.
#
# **b)** Write `data_fault(epochs, size)`: `epochs[e][s][r]` are ids of epoch e, step s, rank r; `size` is the size of the data set. Say
# `"samples duplicated"` (a step repeats samples), `"set_epoch forgotten"` (the second epoch's steps hold the same samples as the first's),
# `"samples skipped"` (an epoch leaves out a part of the data set), or `"healthy"`; the first that applies.


# %% tags=["5.2b"]
def data_fault(epochs, size):
    """What is wrong with the data."""
    ### BEGIN SOLUTION
    if repeated(epochs[0][0]) > 0:
        return "samples duplicated"
    if sorted(epochs[0][0][0]) == sorted(epochs[1][0][0]):
        return "set_epoch forgotten"
    for epoch in epochs:
        if len({index for step in epoch for rank in step for index in rank}) < size:
            return "samples skipped"
    return "healthy"
    ### END SOLUTION


# %% tags=["check", "5.2b"]
# NBVAL_CHECK_OUTPUT
hint = "look within a step, then at the same step of both epochs, then at whole epochs"
checks.check_cases("5.2b", data_fault, counted.data_cases(), hint=hint)

# %% [markdown]
# Those were four real runs. None of the last two changes the loss enough to be seen; ids see them at once. (A sampler that pads its last shard repeats
# a few samples rightly: a tool must not accuse that.)
#
# ## Exercise 5.3: the gradient noise scale
#
# The squared norm of a gradient over a batch B is, on average, `|G|² + tr / B`: the true gradient and the noise of the samples. You have it at two
# batches at once: each rank's own gradient (`small` samples) and their mean (`big` samples). Solve for both unknowns. Average the squares over steps
# and ranks *first*: one step alone is useless. Write `noise(local, whole, small, big)`, which returns `(tr, |G|²)`; `local[step][rank]` and
# `whole[step]` are norms (not squared).


# %% tags=["5.3"]
def noise(local, whole, small, big):
    """(trace of the covariance, squared norm of the true gradient)."""
    ### BEGIN SOLUTION
    squares = [norm**2 for step in local for norm in step]
    at_small = sum(squares) / len(squares)
    at_big = sum(norm**2 for norm in whole) / len(whole)
    trace = (at_small - at_big) / (1 / small - 1 / big)
    return trace, at_small - trace / small
    ### END SOLUTION


# %% tags=["check", "5.3"]
# NBVAL_CHECK_OUTPUT
hint = "two equations: at_small = square + trace / small, at_big = square + trace / big"
checks.check_cases("5.3", noise, counted.noise_cases(), tolerance=1e-6, hint=hint)

# %% [markdown]
# Their ratio is the noise scale, in samples: below it a larger batch saves steps, above it hardly. It costs a job nothing, since every rank has
# its own gradient anyway.
#
# ## Exercise 5.4: accumulation over unequal token counts
#
# Sentences differ in length. The loss should be the mean over *all tokens of the step*. **a)** Each micro-batch has its summed loss.
# By what factor must it be multiplied before `backward()`, so that after DDP's **mean over the ranks** the gradient is right? Write
# `factor(tokens)`; `tokens[rank]` lists the token counts of the rank's micro-batches.


# %% tags=["5.4a"]
def factor(tokens):
    """What each micro-batch's summed loss is multiplied by."""
    ### BEGIN SOLUTION
    return len(tokens) / sum(sum(rank) for rank in tokens)
    ### END SOLUTION


# %% tags=["check", "5.4a"]
# NBVAL_CHECK_OUTPUT
hint = "divide by the tokens of all ranks; DDP divides once more, by the number of ranks"
checks.check_cases("5.4a", factor, counted.factor_cases(), tolerance=1e-6, hint=hint)

# %% [markdown]
# **b)** The usual mistake takes each micro-batch's *mean* and then the mean of the means. Write `bias(losses, tokens)`: by how much that is off, as a
# share of the right loss (negative if it is too small). `losses` are the micro-batches' mean losses.


# %% tags=["5.4b"]
def bias(losses, tokens):
    """(mean of means - right) / right."""
    ### BEGIN SOLUTION
    right = sum(loss * count for loss, count in zip(losses, tokens, strict=True)) / sum(tokens)
    return (sum(losses) / len(losses) - right) / right
    ### END SOLUTION


# %% tags=["check", "5.4b"]
# NBVAL_CHECK_OUTPUT
hint = "the right loss weighs each mean by its tokens"
checks.check_cases("5.4b", bias, counted.bias_cases(), tolerance=1e-6, hint=hint)

# %% [markdown]
# The second case has equal losses: no bias at all, although the counts differ by ten. A test on equal lengths, or with equal losses, cannot find
# this bug.
#
# ## Exercise 5.5: optimiser or system?
#
# Now the procedure. A run's vital signs come as a dictionary; relative differences below `1e-5` are rounding.
#
# | sign | what it is |
# |---|---|
# | `repeated` | share of an epoch's samples that are drawn more than once |
# | `same_order` | share of the second epoch's steps with the first one's samples |
# | `start_differs` | ranks' initial weights: 0 if all are the same |
# | `ranks_apart` | difference of the ranks' gradients *after* the reduction |
# | `reduced_off` | difference of the reduced gradient from the mean of the ranks' |
# | `control_gap` | difference of the gradient norm from one worker at the same global batch |
# | `worse` | 1 if it ended worse than the small run |
#
# Write `verdict(signs, ranks)`: the **first** of `CAUSES` that holds, else `"healthy"`. For a sum, `reduced_off` is `ranks - 1`, since the sum is that much
# more than the mean; any other difference there is a gradient that is missing. `"system"` means that only the control differs, `"optimiser"` that all
# agree and it ended worse.

# %%
CAUSES = [
    "samples duplicated",
    "set_epoch forgotten",
    "ranks start with different weights",
    "gradients not synchronised",
    "sum instead of mean",
    "gradient missing",
    "system",
    "optimiser",
]


# %% tags=["5.5"]
def verdict(signs, ranks=4):
    """The first of CAUSES that holds, or "healthy"."""
    ### BEGIN SOLUTION
    data = [signs["repeated"] > 0.02, signs["same_order"] > 0.5]
    state = [signs["start_differs"] > 0, signs["ranks_apart"] > 1e-5]
    summed = abs(signs["reduced_off"] - (ranks - 1)) < 0.01
    rest = [signs[name] > 1e-5 for name in ("reduced_off", "control_gap", "worse")]
    wrong = [*data, *state, summed, *rest]
    return next((cause for cause, holds in zip(CAUSES, wrong, strict=True) if holds), "healthy")
    ### END SOLUTION


# %% tags=["check", "5.5"]
# NBVAL_CHECK_OUTPUT
hint = "go down the table, and stop at the first thing that is wrong"
checks.check_cases("5.5", verdict, counted.blind_cases(), hint=hint)

# %% [markdown]
# Why the order? Ranks that start apart also have other gradients and another curve: the later signs are consequences. And why is the optimiser last?
# Because it is what remains when the system is cleared, and only the control, one worker at the same global batch, can clear it.
