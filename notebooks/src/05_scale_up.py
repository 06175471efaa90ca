# %% [markdown]
# # Scale-up: it trains worse with more workers; is it the optimiser or the system?
#
# The same network is trained on one worker and on eight, for real, and it gets worse. A larger batch is a harder optimisation problem;
# a distributed run can also compute something else than you think. The curves look alike. You predict, measure, and separate the
# two with one experiment: the same global batch on one worker.
#
# **Contents**
#
# 1. The question
# 2. What the words mean
# 3. Your prediction
# 4. The measurement: three curves
# 5. The optimiser: rate, warm-up, and two limits that are easily confused
# 6. The system: samples, gradients, numbers, statistics
# 7. The clinic: three blind runs
# 8. The answer in 60 seconds, strong and weak versions, follow-ups
#
# All of it takes about two minutes of machine time; a busy machine takes longer.

# %% [markdown]
# ## 1. The question
#
# *"Training converges worse when you scale from one worker to eight. How do you find out why?"*
#
# The interviewer listens for the **split into two buckets**: true optimisation issues (the problem is harder at a larger batch) and
# distributed-systems issues (the parallel run is not the training that you think it is). Then for the **experiment that separates
# them**, and only then for causes. The bucket says who acts: whoever tunes the optimiser, or whoever owns the distributed stack.
#
# ## 2. What the words mean
#
# | word | what it means here |
# |---|---|
# | **global batch** | samples of all workers in a step: 8 workers with 256 each are 2048 |
# | **small run** | one worker, batch 256, the learning rate that was tuned for it |
# | **control** | one worker at the *large* run's global batch: the same optimisation, no distributed system |
# | **linear rule** | a batch k times as large takes a learning rate k times as large (for SGD; for Adam often its square root) |
# | **warm-up** | the rate climbs to its peak over the first epochs |
# | **sharpness** | the largest eigenvalue of the loss' Hessian; above 2 (1 + momentum) / rate, descent runs away |
# | **noise scale, critical batch** | the batch beyond which gradients are so exact that a larger one hardly saves steps |
# | **sample hash** | a fingerprint of the samples of a step: who saw what, and was it seen once? |
# | **gradient norm** | its length, as each worker computed it and as the optimizer gets it |
# | **gate** | the difference below which two runs are equal: 1e-5 on the gradient norm in float32, over 20 steps |

# %% [markdown]
# ## 3. Your prediction
#
# The worked example: 8 workers × 256 = 2048. The rate was scaled by the linear rule, as one reads everywhere, and there is no warm-up. Two numbers: by
# what factor does the *first* gradient norm differ from that of one worker with the same 2048 samples? And how many points of test accuracy
# are lost against the small run?

# %%
from dataclasses import replace

from mlsyslab import scaleup
from mlsyslab.teach import lesson
from mlsyslab.teach.explore import explore

panel = explore(scaleup, preset="worked_example")
panel

# %% [markdown]
# Type both numbers, press **Lock in**, then **Run**. Three curves grow: first the small run, then the control, then eight ranks. Leave
# the panel's diagnosis for later. If the panel does not react, the kernel was restarted: run the cell above again.
#
# Without clicking (Run All, Colab) the next cell does the same: put *your* numbers in its first line.

# %%
yours = {"norm_ratio": 1.0, "acc_gap_frac": 0.10}  # change both
panel.join()  # a run that is still going on in the panel ends first
run = panel.run_result or panel.run(yours, wait=True)

# %% [markdown]
# ## 4. The measurement: three curves

# %%
lesson.show(scaleup.plot(run, scaleup.predict(run.config)))

# %% [markdown]
# On the right is the experiment that answers the question. In the first steps the gradient norm of eight ranks differs from that
# of *one* worker at the same batch by less than the gate: it is the same training, and one worker diverges in the same way. No network,
# sampler or precision can be at fault. Later the points climb, bit by bit: unstable training amplifies rounding, so compare *early*. A fault comes at once.

# %%
lesson.compare(scaleup.predict(run.config), run, panel.round.yours)

# %% [markdown]
# ### Your own diagnosis first
#
# Choose in the panel and press **Check**, then run on.

# %%
# NBVAL_CHECK_OUTPUT
verdict = scaleup.diagnose(run)
print("cause:", verdict.cause, "| bucket:", verdict.kind, "| acts first:", verdict.owner)

# %%
print(verdict.reason)

# %% [markdown]
# ## 5. The optimiser
#
# ### What warm-up is for
#
# The linear rule assumes that steps are short against the curvature. At the start they are not: here is the sharpness along the *small* run,
# with the limits of both rates.

# %%
lesson.show(scaleup.sharpness_plot(run))

# %% [markdown]
# At the first step the network is far too sharp for the large rate, and fine for the small one. A few gentle steps make it flat enough. So the
# verdict's action is a warm-up, and it promises the small run's loss, within what seeds do. Does it come?

# %%
fix = scaleup.mitigate(run)
print(fix)
print(scaleup.diagnose(fix.after))
print(scaleup.diagnose(fix.after).reason)

# %% [markdown]
# ### The case in which warm-up does not help
#
# Eight workers × 1024, still the linear rule, warm-up of five epochs. And a network with torch's own small initial weights, which is flat at first
# and becomes sharp *later*, when the warm-up is over. What do you expect of each?

# %%
for name in ("too_high", "warmup_useless"):
    other = scaleup.measure(scaleup.preset(name))
    found = scaleup.diagnose(other)
    print(f"{name}: {found.cause}\n    {found.reason}")

# %% [markdown]
# ### The other limit: noise
#
# Now a rate that *is* stable, at a batch of 8192. Nothing diverges, and still it ends worse:

# %%
critical = scaleup.measure(scaleup.preset("critical_batch"))
found = scaleup.diagnose(critical)
print(found)
print(found.reason)

# %% [markdown]
# Two different limits. **Curvature** says how long a step may be: beyond it training diverges, and the rate must fall. **Noise** says how many
# samples a step is worth: beyond the critical batch, gradients are exact already, and what counts is the number of steps. The noise scale comes for
# free, from the ranks' own norms and the norm of their mean; take it as an order of magnitude. The sharpness does not predict it, nor the other way round.
#
# What does such a noise scale say about other batches? Steps to the same loss are 1 + critical / batch times the least (McCandlish 2018); predicted, as multiples:

# %%
critical_batch = critical.summary()["noise_batch"]
for batch in (64, 256, 2048, 8192):
    how = {"critical_batch": critical_batch, "least_steps": 1.0}
    samples = scaleup.samples_needed(batch, **how) / scaleup.samples_needed(1, **how)
    print(
        f"batch {batch:5}: {scaleup.steps_needed(batch, **how):5.2f} x the least steps, {samples:5.2f} x the samples of batch 1"
    )

# %% [markdown]
# Eight times the batch saves many steps at first, and nearly none in the end, while each costs eight times the samples: that is what "beyond the critical batch" means.
#
# Published runs show both ends of the same curve (ResNet-50 on ImageNet, linear rule with warm-up; README of dm-haiku's example):

# %%
for batch, accuracy in scaleup.RESNET50_TOP1.items():
    print(f"batch {batch:6}: {accuracy} % top-1")
for source, says in scaleup.PUBLISHED:
    print(f"- {source}: {says}")

# %% [markdown]
# Three more mistakes belong to this bucket, since one worker makes them as well: a rate that was not scaled at all, a schedule that counts *steps*
# (eight times fewer, so it never ends), and a run that sees fewer samples. Another reading of "worse at scale" is simply: fewer updates.

# %%
for cause in ("learning rate not scaled", "schedule counted in steps", "too few steps"):
    found = scaleup.diagnose(scaleup.measure(scaleup.config_for(cause, engine="virtual")))
    print(f"{found.cause}: {found.reason}")

# %% [markdown]
# ## 6. The system
#
# Now the global batch stays 256, on four workers instead of one. Nothing about the optimisation has changed, so every difference is a fault. Before
# you run each cell: which sign will show it?
#
# ### Data: is every sample seen once?

# %%
# NBVAL_CHECK_OUTPUT
faults = ("samples duplicated", "set_epoch forgotten")
runs = {cause: scaleup.measure(scaleup.config_for(cause)) for cause in faults}
for cause, one in runs.items():
    print(f"{cause}: called {scaleup.diagnose(one).cause}")

# %%
for one in runs.values():
    print(f"{scaleup.diagnose(one).reason}\n    {one.summary()['acc_gap_frac']:+.1%} accuracy lost")

# %% [markdown]
# Without a distributed sampler all ranks draw the same: a batch of 64 in disguise. Without `set_epoch` each epoch repeats the first
# one's order. The loss hardly tells; the ids do at once.
#
# ### Gradients: do all ranks contribute, and what?
#
# One rank's part gets lost in the all-reduce. The procedure goes question by question and stops at the first thing that is wrong:

# %%
missing = scaleup.measure(scaleup.config_for("gradient missing"))
for question, figure, wrong in scaleup.walk(missing):
    print(f"{'WRONG' if wrong else 'ok':5}  {question:34} {figure}")
print(scaleup.diagnose(missing).reason)

# %% [markdown]
# How can it name the rank? Each rank projects its gradient onto random directions, before the reduction and after it. The projection of the mean must be
# the mean of the projections; what is missing equals one rank's part. The same numbers tell a part that is late, scaled or summed.
#
# Two faults that the loss does not show. Which optimizer hides a gradient that is four times too large, and why?

# %%
for name in ("sum_helps", "sum_adamw"):
    one = scaleup.measure(scaleup.preset(name))
    mine = one.summary()
    print(
        f"{name}: {scaleup.diagnose(one).cause}; gradient norm x{mine['norm_ratio']:.2f}, "
        f"accuracy {mine['acc_gap_frac']:+.1%} lost"
    )

# %% [markdown]
# With SGD the sum *helped*, since the rate was small: a fault that improves the loss is still a fault, and it will bite at another number of
# workers. AdamW divides by the gradient's size, so the curve is the same to many digits. Judge by norms, not by the loss.
#
# ### Numbers, statistics, accumulation

# %%
rest = ("fp16 underflow", "bf16 weights", "batchnorm statistics", "accumulation averaged per micro-batch")
for cause in rest:
    found = scaleup.diagnose(scaleup.measure(scaleup.config_for(cause, engine="virtual")))
    print(f"{found.cause}: {found.reason}")

# %% [markdown]
# And three differences that are **harmless**, which a good engineer does not hunt: other seeds before DDP broadcasts rank 0's weights, a reduction
# in float16 that is scaled well, and sums in another order.

# %%
for name in ("healthy_init", "healthy_fp16", "healthy"):
    one = scaleup.measure(scaleup.preset(name))
    found = scaleup.diagnose(one)
    print(
        f"{name}: {found.cause}; norms within {one.summary()['norm_gap']:.0e}",
        *(f.says for f in found.findings),
    )

# %% [markdown]
# One more separation from the field: if a run is fine on one machine and degrades only when messages **cross nodes**, suspect communication. The same ranks in
# one process (`engine="virtual"`) send no message at all, and give the same figures to rounding; a fault that only processes have is in what they send.
#
# ### Look-alikes
#
# Every question with what it is confused with:

# %%
lesson.rules(scaleup)

# %% [markdown]
# ## 7. The clinic: three blind runs
#
# Three runs that are trained now; one is the optimiser's fault, one the system's, one is healthy, in an order that is drawn. All three changed something.

# %%
import random

ward = [
    scaleup.config_for("learning rate not scaled", engine="virtual"),
    scaleup.config_for(random.choice(["gradient stale", "samples duplicated", "bf16 reduction"])),
    replace(scaleup.preset("healthy"), wire="fp16"),
]
random.shuffle(ward)
patients = dict(zip("ABC", map(scaleup.measure, ward), strict=True))

# %%
lesson.show(scaleup.clinic_plot(patients))

# %%
lesson.side_by_side(patients, scaleup)

# %% [markdown]
# Decide: for each, the bucket, and if it is the system, the cause. Write it down. The first question is always the same: *does the lower picture begin inside the
# green band?* If not, it may still be harmless: 16-bit numbers have a wider band, about 1e-3. Then go down the table and stop at the first figure that is
# not what it should be.

# %%
for name, one in patients.items():
    found = scaleup.diagnose(one)
    truth = one.truth[0]["cause"] if one.truth else "healthy"
    print(f"{name}: {found}\n    injected: {truth}")

# %% [markdown]
# In your own job three lines make such a record; then `scaleup.diagnose(small, large)` and `scaleup.compare(small, large)` read two of them:
#
# ```python
# recorder = scaleup.ScaleupRecorder(model, optimizer, out="runs/mine", dataset_size=len(dataset))
# ...                                       # after optimizer.step(), before zero_grad()
# recorder.step(loss=loss, ids=ids)         # the indices of this rank's samples
# ```

# %% [markdown]
# ## 8. The answer in 60 seconds
#
# The next cell says it with *your* numbers. Read it aloud once, then close the notebook and say it again.

# %%
mine, after = run.summary(), fix.after.summary()
print(f"""First I split it: is the problem harder, or is the run not the training I think it is?
I train one worker at the same global batch, {mine["global_batch"]}, with the same seed and samples, and compare gradient norms.
They agree within {mine["norm_gap"]:.0e}, so the system is cleared: sampler, reduction, precision, statistics.
It is the optimiser: the rate went to {mine["peak_lr"]:.2f}, where the limit on the sharpness is {mine["sharpness_limit"]:.0f}, and it starts at {mine["sharpness"]:.0f}.
Five epochs of warm-up bring the accuracy from {mine["val_acc_frac"]:.0%} to {after["val_acc_frac"]:.0%}; the small run has {mine["small_acc_frac"]:.0%}.
Had the norms differed, I would have asked: each sample once? same weights? mean of all gradients? finite?""")

# %% [markdown]
# ### What strong and weak answers sound like
#
# | | |
# |---|---|
# | **weak** | "Large batches generalise worse." A belief; and it names no experiment. |
# | **weak** | "I would tune the learning rate." Perhaps; but if a rank sends zeros you tune around a fault. |
# | **weak** | "The loss curve looks normal, so the system is fine." AdamW hides a gradient that is N times too large. |
# | **better** | "I scale the rate linearly and use warm-up, and check the sampler." Right things, without the test that separates them. |
# | **strong** | "Two buckets. One worker at the same global batch, same seed: if its curve equals the large run's within rounding, it is the optimiser: rate, warm-up, schedule in samples, and I compare sharpness with the limit and the batch with the noise scale. If not, the system: sample hashes, initial weights, norms before and after the reduction, non-finite values, BatchNorm; the first check that fails names the rank." |
#
# ### Follow-up questions
#
# 1. The loss is the same to six digits, and the gradient norms differ by exactly 8. What happened, and which optimizer is it?
# 2. With 8 workers the validation accuracy differs by 0.1 points from that of 1, although training is equal. Why?
# 3. Your ranks' BatchNorm buffers differ. Is that the fault?
# 4. Gradient accumulation over 16 micro-batches is worse than the real batch. What do you look at first?
# 5. Warm-up does not help. Which number do you measure?
# 6. Twice the workers do not halve the steps. Which number tells whether they ever will?
# 7. A NaN appears in step 3 of a float16 run, and in step 300 of another. Same cause?
#
# Hints: 1 a sum instead of a mean, and Adam; 2 the sampler repeats samples to make shards equal, and a metric counts them; 3 no, plain DDP leaves them so; 4 whether
# means of unequal token counts were averaged; 5 the sharpness after the warm-up against 2 (1 + momentum) / rate; 6 the gradient noise scale; 7 no: overflow of
# the format from a sane loss, against divergence in which loss and norm climb first.
#
# Next: [the exercises](../exercises/05_scale_up.ipynb), where you write the rule, the checks and the procedure.
