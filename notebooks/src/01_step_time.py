# %% [markdown]
# # Step time: training is slow, what do you check first?
#
# You predict where a training step spends its time, measure it on this machine, take the step apart, and name the
# bottleneck and the team that acts first. At the end stands a spoken answer made of your own numbers.
#
# **Contents**
#
# 1. The question
# 2. What the words mean
# 3. Your prediction
# 4. The measurement
# 5. Predicted beside measured
# 6. The diagnosis: verdict, three ways to break a step, scaling, rule of thumb, who acts first, the fix
# 7. The answer in 60 seconds, strong and weak versions, follow-ups
#
# All of it takes two to three minutes of machine time; a busy machine takes longer and says so.

# %% [markdown]
# ## 1. The question
#
# *"A training job runs at a third of the speed the team expected. The GPUs are there, the loss goes down, nothing
# crashes. What do you check first, and who do you call?"*
#
# The interviewer wants an order of checks, a number that would change your mind, and the name of whoever has to act.
# "I would look at GPU utilisation" is where most answers begin, and where many go wrong: it says *that* the device
# idles, not *why*.

# %% [markdown]
# ## 2. What the words mean
#
# A **step** is one round of: get a batch, forward, backward, exchange gradients, update the weights.
#
# | word | what it means here |
# |---|---|
# | **input pipeline** | everything until the batch is on the device: read files, decode, augment, collate, copy |
# | **compute** | forward, backward and optimizer on the device |
# | **communication** | gradients (or parameters) exchanged between devices, mostly by all-reduce |
# | **host** | Python on the CPU between those: launching kernels, logging, metrics, garbage collection |
# | **exposed** | time in which nothing else goes on, so the step gets longer by it |
# | **hidden** (overlapped) | time that passes while the device works anyway; it costs nothing until it no longer fits |
# | **data wait** | the *exposed* part of loading: the device is ready and the batch is not |
# | **exposed sync** | communication that is left when backward has finished |
# | **launch-bound** | the device finishes small kernels faster than Python can start them; it idles, yet waits for no data |
#
# The pair exposed and hidden decides the arithmetic. If loading happens ahead of time, in other processes, the step
# takes the *longer* of loading and computing. If loading happens in the training process, it takes their *sum*.

# %% [markdown]
# ## 3. Your prediction
#
# The worked example is an ordinary set-up: one rank, batches of 8 photographs, one loader process that prefetches, 37.5 ms
# of CPU to decode and augment a photograph, and 120 ms of forward and backward.
#
# How long is a step, and what share of it is data wait? Work it out on paper: what does the loader need for 8
# photographs, what does the device need, and which of them is hidden?

# %%
from mlsyslab import steptime
from mlsyslab.teach import lesson
from mlsyslab.teach.explore import explore

panel = explore(steptime, preset="worked_example")
panel

# %% [markdown]
# Type both numbers, press **Lock in**, then **Run**, and watch the bars: every bar is a step, the hatched orange part is
# data wait. Leave the panel's diagnosis for later. If the panel does not react, the kernel was restarted: run the cell
# above again.
#
# Without clicking (Run All, Colab) the next cell does the same: put *your* numbers in its first line. If you have already
# run the panel, it takes that run.

# %%
yours = {"step_s": 0.200, "data_frac": 0.30}  # change both: seconds, and a share (0 to 1)
panel.join()  # a run that is still going on in the panel ends first
run = panel.run_result or panel.run(yours, wait=True)

# %% [markdown]
# ## 4. The measurement
#
# The run is over. A run directory now holds one record for each step, in seconds. Expect the phases of a row to sum to
# `step_s`, and the first rows to be marked as warm-up.

# %%
phases = ["data_s", "h2d_s", "forward_s", "backward_s", "sync_s", "optimizer_s", "other_s"]
run.records[["step", "warmup", *phases, "step_s"]].head(7).round(3)

# %% [markdown]
# The first step is usually the longest: the loader's processes were still starting. A cold page cache looks the same.
# Both are paid once, so warm-up rows are kept but not counted.
#
# The summary is the mean over the steady steps. The mean, not the median: only means of the phases sum to the mean step.

# %%
measured = run.summary()
print(f"{run.origin} over {measured['steady_steps']} steady steps:")
for name in [*phases, "step_s"]:
    share = measured[name] / measured["step_s"]
    print(f"{name:12} {measured[name] * 1e3:6.1f} ms  {share:4.0%}")

# %% [markdown]
# One phase should stand out, and forward and backward should hold most of the rest. If another phase is large as well,
# somebody else was using the cores while this ran; section 6 has two rows that show it.

# %% [markdown]
# ## 5. Predicted beside measured
#
# The library predicts the same run from its configuration and the machine's probe, with a range instead of a point. The
# middle column is your number, where you gave one.

# %%
prediction = steptime.predict(run.config)
lesson.compare(prediction, run, panel.round.yours)

# %% [markdown]
# Where does the prediction come from? One worker needs `8 × 37.5 ms = 300 ms` a batch. The device needs 120 ms, hidden
# behind loading. So the step should take 300 ms, of which `300 − 120 = 180 ms` is data wait: 60 %. If you added instead
# (420 ms), you forgot prefetching; if you guessed 120 ms, you took loading to be free.
#
# Why can the measurement differ? The predictor says under which assumptions it is wrong:

# %%
for sentence in prediction.assumptions:
    print("-", sentence)

# %% [markdown]
# A measured step above the range mostly means that other programs used the cores: decoding then takes longer, and
# all of that is wait. Another explanation is that the probe itself was taken at a better moment than the run.

# %% [markdown]
# ## 6. The diagnosis
#
# ### Your own first
#
# What limits this run, where, and who acts first? Choose in the panel and press **Check**, or complete the next line in
# your head: *"the cause is ..., on ..., and ... acts first, because ..."*. Then run on.

# %% [markdown]
# ### The verdict
#
# Expect one word for the cause. The kind, in brackets further below, may depend on the machine: with idle cores it is
# "too few workers", without them "per-sample CPU cost".

# %%
# NBVAL_CHECK_OUTPUT
verdict = steptime.diagnose(run)
print("cause:", verdict.cause, "| acts first:", verdict.owner)

# %%
print(verdict)
print(verdict.reason)
lesson.show(steptime.plot(run, prediction))

# %% [markdown]
# On a busy machine the sentence may add "it became so at step ...": then only the later steps were judged, and its share
# differs from that in the figure. On the left every step, warm-up pale; on the right the mean steady step (solid) beside the prediction (dashed, with its
# range). Steps that vary a lot have two readings: bursts in the input path, or a machine that others use.

# %% [markdown]
# ### Break it three ways
#
# A breakdown is only convincing if it comes out differently when something else is wrong. Three short runs, each broken
# on purpose: files that trickle from slow storage, a model that wastes its time on unfused elementwise work, and two
# ranks with large gradients.

# %%
from dataclasses import replace

fast = replace(steptime.preset("quick"), ranks=1, steps=12, input_cost_s=0.0)
broken = {"input": steptime.measure(replace(fast, storage_mb_per_s=1.5))}

# %%
for name in ("compute", "communication"):
    config = replace(steptime.preset(f"{name}_bound"), steps=12)
    broken[name] = steptime.measure(config)

# %% [markdown]
# Before you look: which row of the table would tell the three apart if you could ask for one row only? And which of them
# do you expect to be useless?

# %%
lesson.side_by_side({"worked example": run, **broken}, steptime)

# %% [markdown]
# Read it in this order.
#
# 1. **The breakdown** (data wait, compute, exposed communication, between the phases). The largest share outside compute
#    names the suspect. This is the row to ask for.
# 2. **The loader's side.** Both `worked example` and `input` wait for data, but for different reasons. In the worked
#    example a loader worker uses most of a core: decoding is the cost. With slow storage it uses almost none: it waits
#    for bytes. More workers help the first, if there are idle cores, and hardly the second.
# 3. **Device utilisation and memory.** `–` means that there is no such sensor here (no GPU), not zero. With a GPU, both
#    the waiting and the communicating run can show low use; that is why this row alone decides nothing.
# 4. **Disk and network.** Ranks of one machine talk inside it, so `network` stays at zero and `network inside this machine`
#    shows the gradients; between machines it would be the other way round. Disk reads far below the probe's figure say
#    that the disk itself is not the limit; the files may also be in memory already. Where a quota sits above the disk, as
#    in `input` here, `files read` stays just below the quota, and no disk figure tells you.
# 5. **Who else was there.** `steps on an overloaded host` and `loader worker waiting for a core` qualify all other
#    rows. If a loader worker waited for a core most of the time, decoding looks expensive although it is not: free the
#    core first, then judge.

# %%
for name, one in broken.items():
    found = steptime.diagnose(one)
    print(f"{name:14} -> {found}")

# %% [markdown]
# On a quiet machine each line names what was broken. On a busy one a verdict may be `unknown`: the library abstains
# rather than accuse the wrong team. What it must never do is name another cause, and that is what the next cell checks.

# %%
# NBVAL_CHECK_OUTPUT
for name, one in broken.items():
    cause = steptime.diagnose(one).cause
    fair = cause in (name, "unknown")
    print(name, "was broken,", "nothing else was blamed" if fair else f"{cause} was blamed")

# %%
lesson.show(steptime.plot(broken["communication"]))

# %% [markdown]
# Two bars for each step, one a rank. The hatched pink part is exposed sync: backward has finished and gradients are still
# being exchanged. If only *one* of two ranks had it, it would not be the network: that rank would be waiting for
# the other, which is the question of the straggler lab.

# %% [markdown]
# ### Scaling: does the step get longer with more ranks?
#
# Each rank keeps its batch, so with perfect scaling the step stays the same and the throughput doubles with the ranks.
# The predictor uses a ring all-reduce: `2 (n − 1) / n` of the gradient bytes through the slowest link. Expect a jump from
# one rank to two, where communication begins, and then a slower rise, unless the ranks run out of cores.

# %%
growing = replace(steptime.preset("scaling"), steps=9, warmup=3)
alone = {n: steptime.predict(replace(growing, ranks=n, scaling=())) for n in growing.scaling}
grown = steptime.measure(growing)

# %%
from mlsyslab.labs.steptime.breakdown import breakdown

for ranks, expected in alone.items():
    low, _, high = (value * 1e3 for value in expected.values["step_s"])
    found = breakdown(grown.records, ranks)
    print(f"{ranks} rank(s): predicted {low:.0f} to {high:.0f} ms,", end=" ")
    print(f"measured {found.step_s * 1e3:.0f}, exposed sync {found.phases_s['sync_s'] * 1e3:.0f}")

# %% [markdown]
# A step that rises with the ranks **together with** its exposed sync is communication. If the step rises and sync does
# not, the ranks compete for something else: cores, memory bandwidth, the disk. With 4 ranks on 2 cores that is what you
# should suspect first, and it is the reason why a laptop cannot settle how a cluster scales.

# %% [markdown]
# ### The rule of thumb, and when it fails
#
# **Low device utilisation usually points to data or host. High utilisation with slow scaling usually points to
# synchronisation or the network.** A good start. It fails when:
#
# - **Launch- or host-bound.** Utilisation is low and data wait is zero: kernels are too small, or Python is busy between
#   the phases. More loader workers do nothing. Double the batch: if the step hardly lengthens, it was launch-bound.
# - **Hidden loading.** A host timer around `next()` shows a large share, but the device was still busy with the
#   previous step. Only the exposed part counts; measure it on the device's stream.
# - **Bursty waits.** Every tenth step waits for a second and the median wait is 0. Give the mean, the 95th percentile
#   and the share of steps that waited.
# - **First steps.** Start-up of workers, compilation and cold caches make any short run look input-bound.
# - **High utilisation that is not work.** A collective that spins keeps the device "busy" while it waits for a peer. So
#   does a storm of tiny kernels.
#
# One of these you can see here without a GPU: a run whose Python between the steps is slow.

# %%
host = steptime.measure(replace(steptime.preset("host_bound"), steps=12))
print(steptime.diagnose(host))
shares = host.summary()
print(f"data wait {shares['data_frac']:.0%}, between the phases {shares['other_frac']:.0%}")

# %% [markdown]
# Its device idles much as that of an input-bound run does, while data wait is near zero. Whoever went by utilisation alone
# would have asked the storage team for faster disks.

# %% [markdown]
# ### Look-alikes
#
# Each rule of the library says what it looks at, with what it is confused, and which further check tells them apart.

# %%
lesson.rules(steptime)

# %% [markdown]
# The last column is the useful one in an interview: naming the check that would prove you wrong.
#
# ### Who acts first
#
# | where the time goes | who acts first | what they do first |
# |---|---|---|
# | data wait, workers busy | data, with storage | more workers if cores are idle; else cache decoded samples or make a sample cheaper |
# | data wait, workers idle | storage | fewer, larger files; a local cache; the throughput that was paid for |
# | compute | model code | profile one step; fuse, lower precision, better shapes |
# | exposed communication | networking, with model code | overlap, larger buckets, fewer bytes; then links and topology |
# | between the phases | model code | log less often, compile, move metrics off the training thread |

# %% [markdown]
# ### Fix it: what was promised, what came
#
# The verdict offers actions with a promised gain, computed from this run's own numbers. Which would you take? Before
# measuring, ask what becomes the next bottleneck once data wait is gone: that caps the gain.

# %%
for action in verdict.actions:
    gain = action.gain_frac
    print(f"{action.name}: saves {gain.low:.0%} to {gain.high:.0%} of the step (predicted)")

# %%
fix = steptime.mitigate(run)
print(fix)

# %% [markdown]
# If less came than was promised, the next bottleneck was nearer than the arithmetic assumed; or the machine was busier the
# second time. If more came, the *first* run was the disturbed one.
#
# And what would the other remedies have bought? These are predictions from the configuration, not measurements.

# %%
lesson.futures(steptime.what_if(run.config))

# %% [markdown]
# A device twice as fast saves nothing while the input sets the pace: the device would only wait longer. That one
# line is often worth the whole answer. On the other hand "2x loader workers" presumes a free core for the second worker;
# where there is none, two workers take turns.

# %% [markdown]
# ## 7. The answer in 60 seconds
#
# The next cell says it with the numbers that *you* measured. Read it aloud once, then close the notebook and say it
# again in your own words.

# %%
before_ms, after_ms = (one.summary()["step_s"] * 1e3 for one in (run, fix.after))
print(f"""I would first measure where a training step spends its time: input, compute, sync.
Here a step takes {before_ms:.0f} ms, and the device waits for data {measured["data_frac"]:.0%} of it:
it is {verdict.cause}-bound. Next I look at the loader workers' CPU, at disk throughput and at the
device: busy workers mean costly decoding, idle ones slow storage. Were compute fast and
the step longer with more ranks, I would look at exposed sync. Low use proves neither.
So {verdict.owner} acts first ({fix.action.name}): {before_ms:.0f} ms became {after_ms:.0f} ms.
What would change my mind: replaying one cached batch without the step getting shorter.""")

# %% [markdown]
# ### What strong and weak answers sound like
#
# | | |
# |---|---|
# | **weak** | "Utilisation is low, so I would add loader workers." It skips the breakdown, and a launch-bound job has low utilisation too. |
# | **weak** | "I would profile everything with the PyTorch profiler." No order, no number that decides, no owner. |
# | **better** | "I split the step into data wait, compute and sync, and look at the largest." An order; still no check and no gain. |
# | **strong** | "180 of 300 ms is exposed data wait, so the device idles 60 % of the time. Workers are at full CPU, the disk is quiet: decoding. The data team caches decoded samples; the step cannot get below the 120 ms of compute, so I promise at most 60 %. If a replayed batch does not shorten the step, I am wrong." |
#
# A strong answer has five parts: the measurement, the share, the evidence for the kind, who acts with what bound on the
# gain, and the observation that would refute it.
#
# ### Follow-up questions
#
# 1. The median data wait is zero and the mean is a third of the step. What is going on, and what do you plot?
# 2. You double the loader workers and nothing changes. Name three reasons.
# 3. Utilisation is 98 % and eight GPUs are only three times as fast as one. Where do you look?
# 4. The loader's `next()` takes 80 ms of a 200 ms step in your host timer. Is the job input-bound?
# 5. All ranks report the same step time, one of them waits for data. Which phase shows it, on which ranks?
# 6. After your fix the job is compute-bound. When do you stop?
#
# Hints: 1 bursts; 2 no free core, storage, data wait was not the limit; 3 exposed sync, then links; 4 not if the device was
# busy meanwhile; 5 data wait on that rank, sync on all others; 6 when compute runs near the measured roof, or when the
# next gain costs more than the hours it saves.
#
# Next: [the exercises](../exercises/01_step_time.ipynb), where you write the breakdown, the prefetch model and the
# diagnosis yourself.
