# %% [markdown]
# # Start here: five questions about machine-learning systems
#
# Interviewers for ML-infrastructure jobs ask questions such as "training is slow: what do you check first?".
# Reading the answer is easy; knowing it is not. Here you commit a number, measure it on the machine in front of you,
# see how far you were off, name the cause yourself, and only then read the verdict.
#
# **Contents**
#
# 1. What you need
# 2. This machine, and what its figures bound
# 3. The five questions, and which of them are built
# 4. How a lesson goes
# 5. When something goes wrong
#
# This notebook takes under a minute. It starts no experiment.

# %% [markdown]
# ## 1. What you need
#
# If you came here with `make lab`, everything is installed: go on. On Colab or another hosted notebook, clone the
# repository and open this file from the clone; then take the `#` off the next line and run it once. Hosted front ends
# that do not show a running experiment live, Colab among them, wait for its end and then show the result.

# %%
# On Colab, from inside the clone:
# # %pip install -q -e "..[notebooks]"

# %% [markdown]
# ## 2. This machine, and what its figures bound
#
# The first table says what the labs found: cores that you may really use (not only those that exist), memory, a GPU
# or none. Expect the last row to name what the experiments will run on. Where a row has a remedy, something will be
# slower or noisier than it has to be.

# %%
from mlsyslab.teach import lesson

lesson.machine()

# %% [markdown]
# Without a GPU the training step is *paced*: forward and backward wait as long as an accelerator would take, and leave
# the cores alone. Loading, decoding and all-reduce stay real work. Every result that was paced says so. A row "load"
# with a remedy has a second reading besides a busy neighbour: a kernel of yours that is still at work.
#
# The second table is the probe: a few seconds of real matrix products, copies, all-reduce, JPEG decoding and disk
# reads. It is kept for a week, so it may be quick. Expect a median with the 10th and 90th percentile beside it.

# %%
lesson.probe_figures()

# %% [markdown]
# Each figure is a **floor**: no step here can be faster than the work in it divided by the rate. If percentiles lie far
# apart, the machine was shared while it was probed; the other explanation is a clock that was still rising. `mlsyslab
# doctor --refresh` in a terminal measures again.
#
# A floor turns into a prediction at once. Before you run the next cell: how long does one loader worker need here for a
# batch of 8 photographs, in milliseconds? Multiply the row "JPEG decode" by 8.

# %%
from mlsyslab import hardware

batch_s = 8 * hardware.probe()["jpeg_decode_s"]
print(f"8 photographs, 1 worker: at least {batch_s * 1e3:.0f} ms")
print(f"8 photographs, 2 workers: at least {batch_s / 2 * 1e3:.0f} ms")

# %% [markdown]
# That is a number from arithmetic on a measured rate, not a measurement of a loader. A real loader also reads, augments
# and sends the batch to another process. Lesson 1 shows by how much it differs.
#
# ## 3. The five questions, and which of them are built
#
# **1. Step time (built).** *Training is slow: what do you check first?* You take one step apart into waiting for data,
# computing, and exchanging gradients, and find out which team acts first. The worked example is a step of 300 ms of
# which 180 ms are spent waiting for data.
#
# **2. Straggler (built).** *One worker is slow: which, why, and what do you do?* In synchronous training one slow
# rank slows all of them, and every rank's step looks the same. You find it, say why it is slow, and take its host out. The
# worked example has most ranks at 180 ms and one at 420 ms, 250 ms of it input wait.
#
# **3. Parallelism (built).** *The model does not fit: how do you split it over eight devices?* Data, tensor,
# pipeline and sharded parallelism trade simplicity against communication against memory. The worked example is a
# model that almost fits one device, where sharding comes first.
#
# **4. Serving (built).** *Traffic comes in bursts and the 95th percentile has a target: design the service.*
# Batching, warm replicas, autoscaling, admission. The worked example is a batcher that waits at most 5 ms for at
# most 8 requests, at 60 % of what one replica can do.
#
# **5. Scale-up (built).** *Convergence gets worse with more workers: why?* Either the optimisation problem has
# changed or the distributed system computes something else. The worked example is 8 workers with 256 samples each, a global batch
# of 2048, beside one worker that takes the same 2048.
#
# The next cell lists what this version really has, so that this text cannot promise more than the library holds.

# %%
from mlsyslab import parallelism, scaleup, serving, steptime, straggler

print("built: steptime, with the presets", ", ".join(steptime.PRESETS))
print("built: straggler, with the presets", ", ".join(straggler.PRESETS))
print("built: parallelism, with the presets", ", ".join(parallelism.PRESETS))
print("built: serving, with the presets", ", ".join(serving.PRESETS))
print("built: scaleup, with the presets", ", ".join(scaleup.PRESETS))

# %% [markdown]
# A preset is a configuration with a known bottleneck. What makes it slow is real work or a real limit, so the true cause
# is known and your diagnosis can be marked.
#
# ## 4. How a lesson goes
#
# 1. **Predict.** Type your numbers into the panel and lock them in. A wrong number teaches more than none.
# 2. **Measure.** Press Run; processes, files and gradients are real.
# 3. **Diagnose.** Say the cause, the place, and who acts first.
# 4. **Only then** comes the verdict, with its evidence and its look-alikes, and an action whose promise is measured.
#
# | you want to | do this |
# |---|---|
# | start | `make lab` opens JupyterLab at this notebook |
# | learn the first question | open [01_step_time.ipynb](01_step_time.ipynb) |
# | learn the second question | open [02_straggler.ipynb](02_straggler.ipynb) |
# | learn the third question | open [03_parallelism.ipynb](03_parallelism.ipynb) |
# | learn the fourth question | open [04_serving.ipynb](04_serving.ipynb) |
# | learn the fifth question | open [05_scale_up.ipynb](05_scale_up.ipynb) |
# | check that you can do it alone | open the exercises to [step time](../exercises/01_step_time.ipynb), the [straggler](../exercises/02_straggler.ipynb), [parallelism](../exercises/03_parallelism.ipynb), [serving](../exercises/04_serving.ipynb) and [scale-up](../exercises/05_scale_up.ipynb); one way to solve them is in the [solutions](../solutions/) |
# | run an experiment without Jupyter | `mlsyslab steptime --preset worked_example`, or `mlsyslab straggler`, `mlsyslab parallelism`, `mlsyslab serving` or `mlsyslab scaleup` with a preset |
# | see what is wrong with the machine | `mlsyslab doctor` |
# | run every test | `make test` |
#
# ## 5. When something goes wrong
#
# - **The panel does not react.** After a kernel restart the old panel stays on the screen, dead. Run its cell again.
# - **"queue: waiting".** Another experiment holds the device. Two at once would spoil each other's times, so they take turns.
# - **The verdict is `unknown`.** It says why: too few steps, or others used the cores. Run again when it is quiet.
# - **Run All.** Every notebook runs from top to bottom without a click; cells that measure then wait for their result.
# - **Your times differ from those saved in a notebook.** They should: the saved ones were recorded on a 2-core cloud
#   machine that others used too. Compare shares and causes, not milliseconds.
