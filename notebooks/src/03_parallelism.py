# %% [markdown]
# # Parallelism: the model does not fit; how do you split it over eight devices?
#
# A real transformer is trained on ranks that may only take so much memory. Whole, it does not fit. You write down what its training
# holds, byte by byte, predict what each way of splitting leaves on a device and sends over the wire, measure both, and defend the
# simplest way that fits. At the end stands a spoken answer made of your own numbers.
#
# **Contents**
#
# 1. The question
# 2. What the words mean
# 3. Your prediction
# 4. The measurement: it does not fit, and then it does
# 5. Predicted beside measured, strategy by strategy
# 6. The diagnosis: what each split pays, the surprises, the pipeline's bubble, the wrong axis
# 7. The decision as a conversation, at this size and at 405 billion parameters
# 8. The answer in 60 seconds, strong and weak versions, follow-ups
#
# All of it takes about three minutes of machine time; a busy machine takes longer.

# %% [markdown]
# ## 1. The question
#
# *"You have eight GPUs and a model whose training does not quite fit on one of them. How do you split the work?"*
#
# The interviewer listens for three things: that you know **what fills the memory** before you split it, that you reach for the
# **simplest split that fits** and not for the most impressive, and that you can say what it **costs in communication**. Every choice here trades
# simplicity against communication against memory.
#
# ## 2. What the words mean
#
# | word | what it means here |
# |---|---|
# | **model state** | parameters, gradients and optimizer state: in float32 with Adam 4 + 4 + 8 = 16 bytes a parameter, whatever the batch |
# | **activations** | what forward keeps for backward: grows with the batch and the sequence, not with the optimizer |
# | **transients** | what lives for a moment: logits and the loss's temporaries, a gathered layer, buckets that are being sent |
# | **peak** | the most that is live at one instant; the peak must fit, not the state |
# | **data parallel (DDP)** | every device holds everything and takes a part of the batch; gradients are all-reduced |
# | **ZeRO-1** | as DDP, but each device keeps the optimizer state of its own part only |
# | **fully sharded (FSDP, ZeRO-3)** | parameters, gradients and optimizer state are all cut; a layer is gathered just before it is used |
# | **tensor parallel** | each matrix is cut; every layer needs the others' results, in forward and in backward |
# | **pipeline parallel** | each device has some of the layers; the batch is cut into microbatches that pass through |
# | **bubble** | the time in which a pipeline's stage has nothing to do, at the start and the end of each step |
# | **checkpointing** | forget a layer's activations and compute them again in backward: about a third more work for much less memory |
# | **all-reduce, all-gather, reduce-scatter** | everybody gets the sum; everybody gets all parts; everybody gets its part of the sum |

# %% [markdown]
# ## 3. Your prediction
#
# The worked example: a GPT of 17.3 million parameters, float32, Adam; eight ranks, each of which may take 250 MB for tensors. One
# device would need 16 × 17.3 = 277 MB for the state alone, so it *almost* fits. Split by FSDP over all eight, what is the peak of a rank?
# And how many bytes does a rank send in a step?
#
# Work it out before you press anything: the state shrinks to an eighth; what does not? Each layer is gathered twice (for forward and
# for backward) and its gradient is reduce-scattered once.

# %%
from dataclasses import replace

from mlsyslab import parallelism
from mlsyslab.teach import lesson
from mlsyslab.teach.explore import explore

panel = explore(parallelism, preset="worked_example")
panel

# %% [markdown]
# Type both numbers, press **Lock in**, then **Run**. The bars show what each rank holds while it trains. Leave the panel's
# diagnosis for later. If the panel does not react, the kernel was restarted: run the cell above again.
#
# Without clicking (Run All, Colab) the next cell does the same: put *your* numbers in its first line.

# %%
yours = {"peak_bytes": 100e6, "comm_bytes": 100e6}  # change both
panel.join()  # a run that is still going on in the panel ends first
run = panel.run_result or panel.run(yours, wait=True)

# %% [markdown]
# ## 4. The measurement: it does not fit, and then it does
#
# First the simplest thing, on the same cap: every rank holds everything. The cap is real: the kernel refuses a rank more memory. What
# will fail first: parameters, gradients, or something else? Decide, then run.

# %%
whole = parallelism.measure(parallelism.preset("too_big"))
verdict = parallelism.diagnose(whole)
print(verdict)
print(verdict.reason)

# %% [markdown]
# The first forward and backward went well. The step that failed is the optimizer's: Adam's two averages are made in the *first* step, so
# a model that survives a forward and a backward can still not fit. That is why "it ran one batch" proves nothing. Another reading of a
# failure at that place would be a leak: then it would come some steps later, at a random place. The tensors do not quite reach the cap,
# since the kernel counts all that a process allocates: buffers of the network, Python's own objects.
#
# Now the sharded run of above, rank by rank:

# %%
lesson.show(parallelism.plot(run, parallelism.predict(run.config)))

# %% [markdown]
# The state is an eighth on every rank. What did not shrink by eight are the activations of a rank's own sequence and the layer that is
# gathered at the moment: that is why memory falls by less than the number of devices, and hardly at all once
# the state is small.

# %% [markdown]
# ## 5. Predicted beside measured, strategy by strategy
#
# The middle column is your number, where you gave one.

# %%
prediction = parallelism.predict(run.config)
lesson.compare(prediction, run, panel.round.yours)

# %% [markdown]
# The closed form counts tensors, so memory and bytes agree closely on every machine. Time does not: eight ranks share the cores of
# one machine here, so a step says nothing about the speed-up that eight devices would give. When is the prediction wrong?

# %%
for sentence in prediction.assumptions:
    print("-", sentence)

# %% [markdown]
# Now one model of 4.1 million parameters, split in five ways over two ranks. Before you run it, write down for each: which of the three
# parts of the state is halved, and does the rank send more or less than DDP?

# %%
names = ("ddp", "zero1", "sharded", "tensor", "pipeline")
splits = {name: parallelism.measure(parallelism.preset(name)) for name in names}
lesson.show(parallelism.ledger_plot(splits))

# %%
# NBVAL_CHECK_OUTPUT
base = splits["ddp"].summary()
for name, one in splits.items():
    now = one.summary()
    parts = [
        now[f"{part}_bytes"] / base[f"{part}_bytes"] for part in ("params", "grads", "optimizer", "comm")
    ]
    print(
        f"{name:9} params x{parts[0]:.2f}  grads x{parts[1]:.2f}  optimizer x{parts[2]:.2f}  sent x{parts[3]:.2f}"
    )

# %% [markdown]
# Read it line by line. **ZeRO-1** halves the optimizer state only, and torch's sends *half as much again* as DDP: after the all-reduce each rank
# broadcasts the parameters that it has updated. The paper's version sends as much as DDP, because it reduce-scatters first.
# **Sharded** halves all three; its bytes here are larger than the textbook's 1.5 times, since gloo, which carries CPU
# tensors, makes a reduce-scatter out of an all-reduce. **Tensor** leaves what is not split (here the embedding) whole. **Pipeline** sends least of
# all: only activations, at the borders of its stages.
#
# ### Where the bytes go
#
# A rank's collectives in one step, counted as they were issued:

# %%
lesson.sent({name: splits[name] for name in ("ddp", "zero1", "sharded", "tensor", "pipeline")})

# %% [markdown]
# Now the surprises of the table. Does each row have its reason?
#
# - **ZeRO-1's broadcasts**: one for each of 75 tensors, each from the rank that updated it; many small messages beside two large ones.
# - **33 all-reduces** under tensor parallelism: four a layer and one for the head. Written the obvious way, each of q, k, v, gate and up would
#   reduce the gradient of the input that they share, and there would be seven a layer:

# %%
plain = parallelism.measure(replace(parallelism.preset("tensor"), tp_plan="plain"))
vocabulary = parallelism.measure(replace(parallelism.preset("tensor"), tp_plan="sharded vocabulary"))
for one in (splits["zero1"], plain, vocabulary):
    for finding in parallelism.diagnose(one).findings:
        print(f"{finding.says}\n    remedy: {finding.next_check}")

# %% [markdown]
# FSDP sends *weights*: the same bytes whatever the batch. Tensor parallelism sends *activations*, in every layer, twice forward and twice
# backward, and nothing can be computed meanwhile: it wants the fastest link there is, inside one machine.

# %% [markdown]
# ## 6. The diagnosis
#
# ### Your own first
#
# The run of the panel: is anything wrong with it? Choose in the panel and press **Check**, then run on.

# %%
found = parallelism.diagnose(run)
print(found, found.reason, sep="\n")

# %% [markdown]
# ### The pipeline's bubble
#
# Two stages, two microbatches. Stage 1 waits for the first microbatch, stage 0 for the last gradient. The textbook says
# (p - 1) / (m + p - 1) of the time: a third. And with eight microbatches?

# %%
bubble = parallelism.measure(parallelism.preset("bubble"))
lesson.show(parallelism.pipeline_plot(bubble))

# %% [markdown]
# Each box is a microbatch that was really computed, at its measured time. Boxes of unequal length have another
# explanation than the schedule: ranks that share cores take turns. That is why the bubble is also replayed with each stage's own CPU seconds:

# %%
found = parallelism.diagnose(bubble)
print(found, found.reason, sep="\n")
fix = parallelism.mitigate(bubble)
print(fix)

# %% [markdown]
# More microbatches shrink the bubble, and cost: each is a smaller, less efficient multiply, and a GPipe schedule holds the activations of *all* of
# them. 1F1B holds at most as many as there are stages. What a schedule cannot mend is a stage that has more to do:

# %%
uneven = parallelism.measure(parallelism.preset("unbalanced"))
found = parallelism.diagnose(uneven)
print(found, found.reason, sep="\n")

# %% [markdown]
# ### The wrong axis on the slow link
#
# Four ranks on two nodes, with a slow link between the nodes; the mesh is two by two. Which axis belongs inside a node: the one that sends weights
# once a step, or the one that sends activations four times a layer?

# %%
from mlsyslab import ConfigError, RunError

crossed = None
try:
    crossed = parallelism.measure(parallelism.preset("slow_axis"))
    found = parallelism.diagnose(crossed)
    print(found, found.reason, sep="\n")
except (ConfigError, RunError) as error:  # no network namespaces here: said in one sentence
    print(error)

# %% [markdown]
# Two more traps of a pipeline, both silent. The last stage of torch's schedule keeps the *logits* of every microbatch until the step ends, unless it is
# told not to; and clipping the gradient by `clip_grad_norm_` uses each stage's *own* norm, so that stages are scaled differently:

# %%
short = replace(parallelism.preset("pipeline"), microbatches=8, clip_norm=1.0)
for change in ({"keep_logits": True}, {"clip": "local"}):
    for finding in parallelism.diagnose(parallelism.measure(replace(short, **change))).findings:
        print(f"{finding.says}\n    remedy: {finding.next_check}")

# %% [markdown]
# Back to the mesh. The link was slowed by the kernel's traffic control between two network namespaces. The same bytes cross it in either placement of *some*
# axis; what differs is how often somebody waits for them.
#
# ### Look-alikes
#
# Every rule with what it is confused with:

# %%
lesson.rules(parallelism)

# %% [markdown]
# ### Act: the next simplest plan
#
# The run that did not fit has a remedy that its verdict names. Apply it and compare what was promised with what came:

# %%
remedy = parallelism.mitigate(whole)
print(remedy)

# %% [markdown]
# The promise is the closed form's, the result was measured. If the next plan had not fitted either, the verdict of *that* run would name the next
# one: sharding, then checkpointing, then a split of the model itself.

# %% [markdown]
# ## 7. The decision as a conversation
#
# *"Eight devices. The model almost fits one."* The planner tries every mesh, keeps what fits, and ranks by simplicity first:

# %%
model, cluster = parallelism.PLANS["worked_example"]
plans = parallelism.plan(model, cluster)
lesson.show(parallelism.plans_plot(plans[:6]))
print(plans[0].says)

# %% [markdown]
# Every number here is predicted. Now the interviewer turns a knob. Answer before you run each cell.
#
# *"The devices have twice the memory."*

# %%
print(parallelism.ask(model, cluster, memory_bytes=2 * cluster.memory_bytes))

# %% [markdown]
# *"Sequences are eight times as long."* What grows, and which remedy comes before a more complex split?

# %%
print(parallelism.ask(model, cluster, seq=8 * model.seq))

# %% [markdown]
# *"Seventy billion parameters, sixty-four devices."*

# %%
for name in ("70B on 64", "405B on 16384"):
    best = parallelism.plan(*parallelism.PLANS[name])[0]
    print(f"{name}: {best.says}")

# %% [markdown]
# And which number would change your mind? Break points, found by bisection:

# %%
for sentence in parallelism.what_changes(model, cluster):
    print("-", sentence)

# %% [markdown]
# ## 8. The answer in 60 seconds
#
# The next cell says it with *your* numbers. Read it aloud once, then close the notebook and say it again.

# %%
mine, idle = run.summary(), bubble.summary()["bubble_frac"]
mb = {name: (mine[name] or 0) / 1e6 for name in mine if name.endswith("_bytes")}
print(f"""First what fills the memory: weights, gradients, Adam: 16 bytes a parameter, then activations.
Whole, ours needs 277 MB of state under a cap of 250, and failed at: {verdict.kind}. It almost fits, so I shard:
FSDP over {mine["ranks"]} leaves {277 / mine["ranks"]:.0f} MB of state on each, peaks at {mb["peak_bytes"]:.0f} MB, sends {mb["comm_bytes"]:.0f} MB.
The code stays data parallel. I cut matrices only if one is too large or the batch too small, inside a node;
deep models with large activations I checkpoint first, then pipeline: idle {idle:.0%} at 2 microbatches.
Simplicity, communication, memory: I pay in that order.""")

# %% [markdown]
# ### What strong and weak answers sound like
#
# | | |
# |---|---|
# | **weak** | "I use tensor, pipeline and data parallelism together." Why three, when one fits? |
# | **weak** | "The model has 7B parameters, so 14 GB in half precision; it fits." Gradients, Adam and activations are missing: 16 bytes a parameter and more. |
# | **weak** | "FSDP over twice the devices halves the memory." The state halves; activations, gathered layers and logits do not. |
# | **better** | "I shard with FSDP, and use tensor parallelism if a layer does not fit." Right, without a number. |
# | **strong** | "State is 16 bytes a parameter: 277 MB of 250. Sharded over 8 that is 35 MB, and a gathered layer and the activations of one sequence come on top. It sends about 1.5 times DDP's bytes, hidden behind compute on this link. If activations dominate, I checkpoint first, for a third more compute. Tensor parallelism only inside a node, since it sends four all-reduces a layer that nothing hides; a pipeline across nodes, with at least four times as many microbatches as stages." |
#
# ### Follow-up questions
#
# 1. FSDP runs on 8 and on 16 devices, and memory hardly falls. Why?
# 2. Which step of training fails first when Adam does not fit?
# 3. Why is clipping by `clip_grad_norm_` wrong under a pipeline?
# 4. Three matrices (q, k, v) are column-parallel. How many all-reduces does a layer need in backward, and when are there six?
# 5. The vocabulary is 128,000 and the batch is small. Which term of the ledger surprises you?
# 6. Stages of a pipeline are equal in layers, and the last is slow. Why?
# 7. ZeRO-1 in torch sends 1.5 times DDP's bytes. Where do they come from, and how would you save them?
#
# Hints: 1 activations and gathered layers do not shrink; 2 the optimizer's first step; 3 each stage clips by its own norm; 4 the input of the three
# is one tensor: one all-reduce if its gradient is summed before, three if each matrix does it for itself; 5 the logits and the float32 copies of
# the loss; 6 the head and the loss; 7 it broadcasts updated parameters after a full all-reduce: reduce-scatter instead.
#
# Next: [the exercises](../exercises/03_parallelism.ipynb), where you write the ledger, count the bytes and build two of the splits.
