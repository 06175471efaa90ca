# %% [markdown]
# # Exercises: the straggler
#
# You write the rule that names a slow rank, make it silent where nobody is to blame, count what a straggler costs, and
# decide what to do. Each is checked on a run made here, or on arithmetic, and then on jobs that you have not seen. A check
# says one line: `correct`, or what it got, what it expected and a hint.
#
# **Contents**
#
# 1. A job to work on
# 2. Exercise 2.1: own work and wait from raw records
# 3. Exercise 2.2: the culprit rule
# 4. Exercise 2.3: a rule that accuses no innocent
# 5. Exercise 2.4: the cost of a straggler, and of jitter, at n ranks
# 6. Exercise 2.5: what to do
#
# Write where it says `YOUR CODE`; leave the check cells as they are. Lesson 2 has everything you need.

# %% [markdown]
# ## A job to work on
#
# Two ranks, and one of them was given something to do that the other was not. Expect about ten seconds.

# %%
from mlsyslab import straggler
from mlsyslab.teach import checks
from mlsyslab.teach import jobs_for_checks as made_up

# %%
run = straggler.measure(straggler.preset("quick"))
records = run.records[list(made_up.COLUMNS)]
records.tail(6).round(3)

# %% [markdown]
# One row for each rank and step; seconds. `step_s` is nearly the same in both rows of a step, and it must be: the step ends for
# both when the gradients of both have been exchanged.
#
# ## Exercise 2.1: own work and wait
#
# Write `own_and_wait(records)`, which returns two tables (DataFrames) with a row for each **steady** step and a column for each rank, in
# seconds:
#
# - own work: the part of the step in which the rank did something itself, or waited for its own input,
# - wait: the part in which it waited for the others, or for the exchange.
#
# The two sum to `step_s`. Rows of the records may come in any order. `DataFrame.pivot` turns rows into such a table.


# %% tags=["2.1"]
def own_and_wait(records):
    """(own work, wait): seconds, a row a steady step, a column a rank."""
    ### BEGIN SOLUTION
    steady = records[~records["warmup"].astype(bool)]
    steady = steady.assign(own_s=steady["step_s"] - steady["sync_s"])
    own = steady.pivot(index="step", columns="rank", values="own_s")
    return own, steady.pivot(index="step", columns="rank", values="sync_s")
    ### END SOLUTION


# %% tags=["check", "2.1"]
# NBVAL_CHECK_OUTPUT
hidden = made_up.hidden_jobs("2.1", each=1)
jobs = {"your run": records} | {name: made.records for name, made in hidden.items()}
checks.check_close(
    "2.1",
    lambda: {name: own_and_wait(table) for name, table in jobs.items()},
    {name: made_up.right_tables(table) for name, table in jobs.items()},
    tolerance=1e-6,
    hint="warm-up out; the only wait for others is sync, while data wait is the rank's own trouble",
)

# %% [markdown]
# ## Exercise 2.2: the culprit rule
#
# **a)** One slow rank among four moves the mean of all, and with two ranks it *is* half of all. So a rank is compared with the
# others, without itself, and by the median. Write `against_others(table)`: the same table, but in each cell what the rank has
# more than the median of the **other** ranks in that step (negative: less).


# %% tags=["2.2a"]
def against_others(table):
    """In each step: what each rank has more than the median of the other ranks."""
    ### BEGIN SOLUTION
    return table.apply(lambda column: column - table.drop(columns=column.name).median(axis=1))
    ### END SOLUTION


# %% tags=["check", "2.2a"]
# NBVAL_CHECK_OUTPUT
hidden = made_up.hidden_jobs("2.2a", each=1)
jobs = {"your run": records} | {name: made.records for name, made in hidden.items()}
tables = {name: made_up.right_tables(table)[0] for name, table in jobs.items()}
checks.check_close(
    "2.2a",
    lambda: {name: against_others(table) for name, table in tables.items()},
    {name: made_up.right_excess(table) for name, table in tables.items()},
    tolerance=1e-6,
    hint="step by step; leave the rank itself out; the median, so that a second slow rank does not hide the first",
)

# %% [markdown]
# **b)** Write `culprit(own, wait)`: the rank with the **most own work and the least wait**, both against the others, both as the
# median over the steps. If these are two different ranks, return `None`: then the figures contradict each other, and one of the
# timers counts something that does not hold the job up.


# %% tags=["2.2b"]
def culprit(own, wait):
    """The rank that holds the job up; None where own work and wait point at different ranks."""
    ### BEGIN SOLUTION
    works = against_others(own).median()
    waits = against_others(wait).median()
    return works.idxmax() if works.idxmax() == waits.idxmin() else None
    ### END SOLUTION


# %% tags=["check", "2.2b"]
# NBVAL_CHECK_OUTPUT
hidden = made_up.hidden_jobs("2.2b", *made_up.GUILTY, "counted twice")
checks.check(
    "2.2b",
    lambda: {name: culprit(*made_up.right_tables(made.records)) for name, made in hidden.items()},
    {name: made.culprit for name, made in hidden.items()},
    hint="the longest collective is a victim's: who waits least was waited for, if it also works most",
)

# %% [markdown]
# ## Exercise 2.3: a rule that accuses no innocent
#
# Your rule so far always finds somebody, also in a healthy job: some rank is always last. Write `straggler_of(records)`, which
# returns a rank or `None`. It names a rank if all of this holds:
#
# 1. at least 5 steady steps were recorded,
# 2. in at least 70 % of the steady steps this rank has, in that step, the most own work **and** the least wait,
# 3. the median over the steps of what it works more than the median of the others exceeds 10 % of that median of the
#    others (also as a median over the steps).
#
# It will meet a healthy job, two ranks of which one is 4 % slower, a slowest rank that changes, a single long step, a
# slow start, and a fault in backward alone. Use what you have written above.


# %% tags=["2.3"]
def straggler_of(records):
    """The rank that holds the job up, None where nobody does."""
    ### BEGIN SOLUTION
    own, wait = own_and_wait(records)
    last = own.idxmax(axis=1)
    last = last[last == wait.idxmin(axis=1)]
    if len(own) < 5 or last.empty:
        return None
    rank, others_s = last.mode()[0], own.drop(columns=last.mode()[0]).median(axis=1)
    often = (last == rank).sum() >= 0.7 * len(own)
    more_s = (own[rank] - others_s).median()
    return rank if often and more_s > 0.1 * others_s.median() else None
    ### END SOLUTION


# %% tags=["check", "2.3"]
# NBVAL_CHECK_OUTPUT
hidden = made_up.hidden_jobs("2.3", each=3)
jobs = {"your run": records} | {name: made.records for name, made in hidden.items()}
checks.check(
    "2.3",
    lambda: {name: straggler_of(table) for name, table in jobs.items()},
    {name: made_up.right_straggler(table) for name, table in jobs.items()},
    hint="enough steps? the same rank last in most of them? by more than a trifle? Only then name it",
)

# %% [markdown]
# The next cell applies your rule to the run above and shows what had been injected there. On a machine that others use, a rule
# may stay silent where it should speak; it should not name the wrong rank.

# %%
from contextlib import suppress

with suppress(NotImplementedError):
    print("your rule:", straggler_of(records), "| injected on rank", run.truth[0]["rank"])

# %% [markdown]
# ## Exercise 2.4: the cost at n ranks
#
# **a)** In a job of `ranks` synchronous ranks, healthy ranks take `healthy_s` a step, and one takes `slow_s`. Write `cost`, which returns two
# numbers:
#
# - the rank-seconds that the whole job loses in a step (all its ranks, the slow one included, are occupied longer than they had to be),
# - the share of the job's time that is lost (0 to 1).


# %% tags=["2.4a"]
def cost(ranks, healthy_s, slow_s):
    """(rank-seconds lost a step, share of the job's time lost)"""
    ### BEGIN SOLUTION
    lost_s = slow_s - healthy_s
    return ranks * lost_s, lost_s / slow_s
    ### END SOLUTION


# %% tags=["check", "2.4a"]
# NBVAL_CHECK_OUTPUT
checks.check_cases(
    "2.4a",
    cost,
    [((4, 0.180, 0.420), (0.96, 4 / 7)), *made_up.cost_cases("2.4a")],
    tolerance=1e-6,
    hint="everybody's step is as long as the slowest rank's; the share is of the time that the step takes now",
)

# %% [markdown]
# The share does not depend on the number of ranks, the rank-seconds do. That is why the same slow machine is a nuisance in a job of
# 8 and a reason to be called at night in one of 16,384.
#
# **b)** Without any fault, own work scatters. If it does so independently and normally with standard deviation `sigma_s`, the
# slowest of n ranks is later than the mean by `sigma_s` times the expected maximum of n standard normal numbers. That is nearly
# the quantile of the normal distribution at `(n - 3/8) / (n + 1/4)`. Write `jitter`, the seconds that it adds to every step.
# `statistics.NormalDist().inv_cdf(p)` is that quantile.

# %%
from statistics import NormalDist


# %% tags=["2.4b"]
def jitter(ranks, sigma_s):
    """Seconds by which the slowest of so many equal ranks is later than the mean."""
    ### BEGIN SOLUTION
    return sigma_s * NormalDist().inv_cdf((ranks - 3 / 8) / (ranks + 1 / 4))
    ### END SOLUTION


# %% tags=["check", "2.4b"]
# NBVAL_CHECK_OUTPUT
checks.check_cases(
    "2.4b",
    jitter,
    made_up.jitter_cases("2.4b"),
    tolerance=0.02,
    hint="it grows with the number of ranks, but slowly: about as the root of 2 ln n, and less than that",
)

# %% [markdown]
# Beside a simulation that really draws the numbers, at 2 % of jitter on a step of 180 ms:

# %%
for ranks in (8, 128, 16_384):
    drawn = straggler.simulate(ranks=ranks, jitter_frac=0.02, slow_ranks=0).simulated["jitter_s"]
    with suppress(NotImplementedError):
        print(f"{ranks:6} ranks: yours {jitter(ranks, 0.0036) * 1e3:.1f} ms,", end=" ")
    print(f"simulated {drawn.low * 1e3:.1f} to {drawn.high * 1e3:.1f} ms")

# %% [markdown]
# ## Exercise 2.5: what to do
#
# Write `choose`, which returns one action as text. `kind` says what was found; `shares` maps a cause to the share of the excess that it explains
# (0 to 1; what was not seen is not in it); `excess_s` is what the slow rank costs a step; `steps_left` is how long the job will run;
# `restart_s` is what it costs to cordon the host, bring in a spare and resume, lost steps included.
#
# | action | when |
# |---|---|
# | the words in `NOBODY[kind]` | no rank is named |
# | `mend the input` | a rank is named and at least 80 % of its excess is `input`; that needs no restart |
# | `cordon and replace` | a rank is named, whatever the cause, and the time to be saved is more than the restart costs |
# | `let it run` | a rank is named, and a restart costs more than it would save |

# %%
NOBODY = made_up.NOBODY
NOBODY


# %% tags=["2.5"]
def choose(kind, shares, excess_s, steps_left, restart_s):
    """What to do, in the words of the table."""
    ### BEGIN SOLUTION
    if kind != "rank":
        return NOBODY[kind]
    if shares.get("input", 0.0) >= 0.8:
        return "mend the input"
    return "cordon and replace" if excess_s * steps_left > restart_s else "let it run"
    ### END SOLUTION


# %% tags=["check", "2.5"]
# NBVAL_CHECK_OUTPUT
checks.check_cases(
    "2.5",
    choose,
    made_up.action_cases(),
    hint="is anybody named? then: is it clearly its input? then: seconds a step times the steps left, against the restart",
)

# %% [markdown]
# The cause need not be known to cordon a host: it can be searched for when the job runs again, on a machine that nobody waits for. What
# must be known is *who*, and that took the first three exercises. Your `choose` believes in one straggler and an idle spare. What
# would you change for a cluster in which there is no spare, and for a job in which a second rank is slow as well?
