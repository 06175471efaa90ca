# %% [markdown]
# # Exercises: step time
#
# You write the four things that an answer to "training is slow" rests on. Each is checked on a run made here, or on the
# machine's arithmetic, and then on runs that you have not seen. A check says one line: `correct`, or what it got, what
# it expected and a hint.
#
# **Contents**
#
# 1. A run to work on
# 2. Exercise 1.1: the breakdown from raw records
# 3. Exercise 1.2: the share of data wait, also when it comes in bursts
# 4. Exercise 1.3: the prefetch model, and the gain of more workers
# 5. Exercise 1.4: a diagnosis rule that does not accuse the innocent
#
# Write where it says `YOUR CODE`; leave the check cells as they are. Lesson 1 has everything you need.

# %% [markdown]
# ## A run to work on
#
# One rank, one prefetching loader worker, and a device that needs less time than the loader. Expect a few seconds.

# %%
from dataclasses import replace

from mlsyslab import steptime
from mlsyslab.teach import checks
from mlsyslab.teach import records_for_checks as made_up

# %%
config = replace(steptime.preset("quick"), ranks=1, batch_size=8, steps=12, compute_s=0.040)
run = steptime.measure(config)
shown = ["step", "warmup", "data_s", "forward_s", "backward_s", "sync_s", "step_s"]
run.records[shown].round(3)

# %% [markdown]
# One row for each rank and step; seconds. `warmup` marks the first steps. Their data wait differs from that of the later
# ones: the worker was starting, or had batches ready from before the first step. Neither is the steady state.
#
# ## Exercise 1.1: the breakdown
#
# Write `mean_phases(records)`: a dict with the mean seconds of each phase in `PHASES` and of `step_s`, over all ranks and
# all **steady** steps. The phases of each record sum to its step; choose a mean for which that stays true.

# %% tags=["1.1"]
PHASES = ["data_s", "h2d_s", "forward_s", "backward_s", "sync_s", "optimizer_s", "other_s"]


def mean_phases(records):
    """Name of the phase -> mean seconds over the steady steps; step_s as well."""
    ### BEGIN SOLUTION
    counted = records[~records["warmup"].astype(bool)]
    return counted[[*PHASES, "step_s"]].mean().to_dict()
    ### END SOLUTION


# %% tags=["check", "1.1"]
# NBVAL_CHECK_OUTPUT
hidden = made_up.hidden_runs("1.1", each=1)
tables = {"your run": run.records} | {name: made.records for name, made in hidden.items()}
checks.check_close(
    "1.1",
    lambda: {name: mean_phases(records) for name, records in tables.items()},
    {name: made_up.right_phases(records) for name, records in tables.items()},
    tolerance=1e-6,
    hint="leave warm-up out, keep every rank, and take the mean: medians of the phases do not sum to the step",
)

# %% [markdown]
# ## Exercise 1.2: the share of data wait
#
# Write `data_wait(records)`, which returns two numbers between 0 and 1:
#
# - the share of the job's steady time that was data wait,
# - the share of steady steps (rows) that waited: whose own `data_s` is more than a tenth of their own `step_s`.
#
# Some hidden runs wait rarely but long. Records also have `load_wall_s`, the time that a worker needed for the batch;
# most of it is hidden behind the device.


# %% tags=["1.2"]
def data_wait(records):
    """(share of the time that is exposed data wait, share of the steps that waited)"""
    ### BEGIN SOLUTION
    counted = records[~records["warmup"].astype(bool)]
    waited = counted["data_s"] > 0.1 * counted["step_s"]
    return counted["data_s"].sum() / counted["step_s"].sum(), waited.mean()
    ### END SOLUTION


# %% tags=["check", "1.2"]
# NBVAL_CHECK_OUTPUT
hidden = made_up.hidden_runs("1.2")
tables = {"your run": run.records} | {name: made.records for name, made in hidden.items()}
checks.check_close(
    "1.2",
    lambda: {name: data_wait(records) for name, records in tables.items()},
    {name: made_up.right_waits(records) for name, records in tables.items()},
    tolerance=1e-4,
    hint="all the waiting over all the time (long steps weigh more), warm-up left out; a burst has median 0",
)

# %% [markdown]
# When the first number is large and the second small, waits come in bursts: look for what happens every so often, such as a
# shard that is opened or a cache that is flushed.
#
# ## Exercise 1.3: the prefetch model
#
# **a)** Write `step_time`, the seconds of a steady step. `cost_s` is the CPU time of one sample, `device_s` what the
# device needs for a batch that is already there. Worker processes load ahead while the device computes; with `workers`
# 0 there is nobody to load ahead, and the training process loads the batch itself. A worker keeps one core busy, and
# `cores` is how many cores the loader may use; the device uses none of them.


# %% tags=["1.3a"]
def step_time(batch, cost_s, workers, device_s, cores):
    """Seconds of a steady step."""
    ### BEGIN SOLUTION
    if workers == 0:
        return batch * cost_s + device_s
    load_s = batch * cost_s / min(workers, cores)
    return max(load_s, device_s)
    ### END SOLUTION


# %% tags=["check", "1.3a"]
# NBVAL_CHECK_OUTPUT
mine = (config.batch_size, config.input_cost_s, config.workers, config.compute_s, 2)
checks.check_cases(
    "1.3a",
    step_time,
    [(mine, 0.096), *made_up.loader_cases("1.3a")],
    tolerance=1e-6,
    hint="loading ahead hides behind the device, or the device behind it; more workers than cores take turns",
)

# %% [markdown]
# The first case is the run above. The measured step stands below. What is longer than your model's number is work that
# the model leaves out, or other programs on the cores.

# %%
step_ms = run.summary()["step_s"] * 1e3
print(f"measured here: {step_ms:.0f} ms a step; the model of this run says 96 ms")

# %% [markdown]
# **b)** Write `gain_of_doubling`: the share of the step (0 to 1) that is saved when the workers, at least one, become
# twice as many. Two things cap it, and both are in your model already.


# %% tags=["1.3b"]
def gain_of_doubling(batch, cost_s, workers, device_s, cores):
    """Share of the step that twice as many workers save, 0..1."""
    ### BEGIN SOLUTION
    before_s = step_time(batch, cost_s, workers, device_s, cores)
    after_s = step_time(batch, cost_s, 2 * workers, device_s, cores)
    return 1 - after_s / before_s
    ### END SOLUTION


# %% tags=["check", "1.3b"]
# NBVAL_CHECK_OUTPUT
checks.check_cases(
    "1.3b",
    gain_of_doubling,
    made_up.gain_cases("1.3b"),
    tolerance=1e-6,
    hint="(before - after) / before; no step is shorter than the device's, no loader uses more cores than there are",
)

# %% [markdown]
# ## Exercise 1.4: a diagnosis
#
# Write `diagnose(records, util_frac)`, which returns one word:
#
# | word | when |
# |---|---|
# | `unknown` | fewer than 5 steady steps were recorded |
# | `input` | the rank that waits most for data does so for more than a tenth of the mean step |
# | `communication` | sync that *no* rank escapes is more than a tenth of the mean step |
# | `host` | the rank with most time in `other_s` spends more than a tenth of the mean step there |
# | `host` | nothing of the above, but the device is used less than half of the time |
# | `compute` | nothing of the above: the device is the limit, as in a healthy job |
#
# Where several of the three shares exceed a tenth, the largest is the cause. `util_frac` is the device's utilisation (0
# to 1), or None where there is no sensor. Two traps: all-reduce makes every rank wait for the slowest, so a rank that is
# starved (or slow) shows up as sync on the *others*; and an idle device is not yet a data wait.


# %% tags=["1.4"]
def diagnose(records, util_frac=None):
    """One of: unknown, input, communication, host, compute."""
    ### BEGIN SOLUTION
    counted = records[~records["warmup"].astype(bool)]
    if counted["step"].nunique() < 5:
        return "unknown"
    worst = counted.groupby("rank")[["data_s", "other_s"]].mean().max()
    wire_s = counted.groupby("step")["sync_s"].min().mean()
    waits = {"input": worst["data_s"], "host": worst["other_s"], "communication": wire_s}
    cause = max(waits, key=waits.get)
    idle = util_frac is not None and util_frac < 0.5
    return cause if waits[cause] > 0.1 * counted["step_s"].mean() else "host" if idle else "compute"
    ### END SOLUTION


# %% tags=["check", "1.4"]
# NBVAL_CHECK_OUTPUT
hidden = made_up.hidden_runs("1.4")
checks.check(
    "1.4",
    lambda: (
        {"your run": diagnose(run.records)}
        | {name: diagnose(made.records, made.util_frac) for name, made in hidden.items()}
    ),
    {"your run": run.truth[0]["cause"]} | {name: made.cause for name, made in hidden.items()},
    hint="in this order: enough steps? the worst rank's waits, the sync nobody escapes, and only then utilisation",
)

# %% [markdown]
# Your rule has now met a healthy job, bursts, a starved rank, a slow rank, a slow network, slow logging, a launch-bound
# device and a run that is too short to say. It still believes its records: it cannot see that another program had the cores, and it
# says "compute" of every device that is busy, well used or not. The library's own rules (`steptime.RULES`) look at
# both. Which evidence would you add first?
