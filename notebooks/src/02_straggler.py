# %% [markdown]
# # Straggler: one worker is slow; which, why, and what do you do?
#
# Four ranks train in step, one of them is slow, and every dashboard shows four equal ranks. You predict what it costs, find
# the rank by a rule that needs no synchronised clocks, say why it is slow, act, and measure what came of it. At the end stands a
# spoken answer made of your own numbers.
#
# **Contents**
#
# 1. The question
# 2. What the words mean
# 3. Your prediction
# 4. The measurement, and the trap in it
# 5. Predicted beside measured
# 6. The diagnosis: who, the checks in order, other faults beside it, when to name nobody, what to do, at scale
# 7. The answer in 60 seconds, strong and weak versions, follow-ups
#
# All of it takes about three minutes of machine time; a busy machine takes longer and says so.

# %% [markdown]
# ## 1. The question
#
# *"A synchronous training job became slower overnight. Code, model and data are the same. The metrics of all workers look
# alike. You suspect that one worker is slow. What do you inspect, in which order, and what do you do?"*
#
# The interviewer listens for three things: that you compare **the worker with the others** before you look into it, that you know
# why the usual timers hide it, and that you isolate the bad machine quickly and **get the job going again** before you know everything:
# until then, one node stalls all the others. If nothing was changed in the code
# and one worker falls behind, a host or its data is the likely reason, hardly the model: all ranks run the same model.

# %% [markdown]
# ## 2. What the words mean
#
# | word | what it means here |
# |---|---|
# | **synchronous step** | all ranks exchange gradients before anybody updates weights, so nobody starts a step without the others |
# | **own work** | the part of a rank's step in which it computes, waits for its *own* input, or runs Python: the step less the wait |
# | **wait** | the part in which its gradients are ready and those of others are not; it includes the transfer itself |
# | **exposed** | what lengthens the step, because nothing else goes on meanwhile; only exposed wait is counted |
# | **culprit** and **victim** | the rank that is waited for, and the ranks that wait; the victims have the long collectives |
# | **straggler** | a culprit that stays one: the same rank, step after step |
# | **rotating** | a slowest rank that is another one from step to step, as with samples of unequal length |
# | **cordon** | take a host out of scheduling, so that no new work lands on it, and move its work away |
# | **spare** | a healthy host that stands ready to take its place |
# | **steal** | time in which a virtual machine wanted a core and the hypervisor gave it to another one |
# | **throttle** | less speed by order: of a hot chip, of a power limit, or of a quota of the container |
#
# A rank's own work and its wait are both durations on that rank's own clock. So they can be compared between machines
# whose clocks disagree, which times of day cannot.

# %% [markdown]
# ## 3. Your prediction
#
# The worked example: four ranks, about 180 ms of own work a step on each of them. On rank 2 samples are heavier: its
# loader worker, which works ahead, now needs 420 ms for a batch.
#
# How long is a step of the job? And which share of it does a *healthy* rank spend waiting? Work both out before
# you press anything: what of the loading is hidden on rank 2, and who waits for whom?

# %%
from mlsyslab import straggler
from mlsyslab.teach import lesson
from mlsyslab.teach.explore import explore

panel = explore(straggler, preset="worked_example")
panel

# %% [markdown]
# Type both numbers, press **Lock in**, then **Run**, and watch the lanes, one for each rank: first its own work in colour, then its wait,
# hatched on white. Three lanes should be mostly wait. Leave the panel's diagnosis for later. If the panel does not react, the kernel was restarted:
# run the cell above again.
#
# Without clicking (Run All, Colab) the next cell does the same: put *your* numbers in its first line. If you have already run the
# panel, it takes that run.

# %%
yours = {"step_s": 0.250, "wait_frac": 0.10}  # change both: seconds, and a share (0 to 1)
panel.join()  # a run that is still going on in the panel ends first
run = panel.run_result or panel.run(yours, wait=True)

# %% [markdown]
# ## 4. The measurement, and the trap in it
#
# Look first at what most dashboards show: how long a step takes on each rank, and how long the call of `backward()` takes,
# which under data parallelism returns when the gradients have been exchanged. One rank does more than twice the work. Which
# of the two columns will show it?

# %%
lesson.per_rank(run, {"step": ["step_s"], "backward() as called": ["backward_s", "sync_s"]})

# %% [markdown]
# **The first trap:** the step is equally long everywhere, and must be: nobody starts the next one alone. **The second:**
# the longest `backward()` belongs to the *innocent*. They sit in it and wait. Who sorts ranks by the length of their collectives, as
# many tools do, accuses the victims. A second reading of equal steps would be that nothing is wrong with any single
# rank; this column cannot tell the two apart.
#
# Now the same steps, split into own work and wait:

# %%
lesson.per_rank(run, {"own work": ["own_s"], "wait": ["sync_s"], "data wait, in own work": ["data_s"]})

# %% [markdown]
# One rank has the **most own work and the least wait**: the others wait for it, and it waits for nobody. What it still waits
# is the transfer itself, which nobody avoids. The last column says already where its time goes.
#
# ### The perfect disguise
#
# Here the loader gave the culprit away: data wait is a phase of its own. Suppose instead that one rank is slow in
# *backward*, where the others wait as well. Before you run on: which of the columns below will differ between the ranks?

# %%
disguised = straggler.measure(straggler.preset("equalised"))
timers = {name: [f"{name}_s"] for name in ("data", "forward", "optimizer")}
backward = {"backward() as called": ["backward_s", "sync_s"]}
lesson.per_rank(disguised, {"step": ["step_s"], **timers, **backward})

# %% [markdown]
# None of them, beyond some noise. Every timer that you know says that these four ranks are alike. Own work and wait:

# %%
lesson.per_rank(disguised, {"own work": ["own_s"], "wait": ["sync_s"]})

# %% [markdown]
# No timer around a phase had shown it: data, forward and optimizer are innocent, and `backward()` lasts equally long on all, once for working and
# three times for waiting. Only a mark at the last gradient, *between* computing and waiting, un-equalises the ranks. A
# timer without that mark calls this job healthy. The figure shows the same: on the left every lane ends alike, and only the border
# between own work and wait moves; on the right each rank's own work, step by step.

# %%
lesson.show(straggler.plot(disguised))

# %% [markdown]
# ## 5. Predicted beside measured
#
# The library predicts the worked example from its configuration. The middle column is your number, where you gave one.

# %%
prediction = straggler.predict(run.config)
lesson.compare(prediction, run, panel.round.yours)

# %% [markdown]
# Where does it come from? Loading is done ahead, so rank 2 takes the *longer* of loading (420 ms) and its own step (180 ms). The job takes
# what its slowest rank takes, plus the exchange: a little over 420 ms, on all four. A healthy rank is done after 180 ms and waits
# for the rest: 58 % of the step. If you said 180 + 420, you forgot that loading is hidden behind the step; if you took
# the mean of the ranks (240 ms), you thought of a job that does not wait.
#
# Why can the measurement differ? The predictor says when it is wrong:

# %%
for sentence in prediction.assumptions:
    print("-", sentence)

# %% [markdown]
# Four ranks on a few cores take turns with everything that is not paced, and other programs take theirs. Own work then grows
# on *every* rank. The comparison between the ranks survives that, the milliseconds do not.

# %% [markdown]
# ## 6. The diagnosis
#
# ### Your own first
#
# Why is it slow, on which rank, and who acts first? Choose in the panel and press **Check**, or complete the sentence: *"the
# cause is ..., on rank ..., and ... acts first, because ..."*. Then run on.
#
# ### Who: the rule
#
# > The culprit is the rank with the **most own work and the least wait**, each against the **median of the other ranks in the same
# > step**, by more than the job's own noise, in most of at least five steps.
#
# Every part of it has its reason. *In the same step*: what hits all ranks at once accuses nobody. *Of the others*: of two ranks, the slow
# one is half of the mean. *The median*: a second slow rank must not hide the first. *And the least wait*: a timer that counts
# what runs beside the step shows much own work, but nobody waits for it. *In most steps*: some rank is last in every step.
#
# How much would the job gain if a rank were like the others? Replay the recorded steps with that rank's own work set
# to the others' median. Expect one large number and three near zero.

# %%
from mlsyslab.labs.straggler.blame import replay_gain, rounds

steady = run.records[~run.records["warmup"].astype(bool)]
seen = rounds(steady)
for rank in seen.ranks:
    gain = replay_gain(seen.own, seen.wait, [rank])
    print(f"rank {rank} like the others: the job would save {gain:.0%} of its time")

# %% [markdown]
# That is a what-if on measured steps, the method of Lin et al. (2025, "Understanding Stragglers in Large Model Training Using
# What-if Analysis"), not a measurement. It is the upper bound for whatever is done about that rank. It is also a
# cross-check: were there two slow ranks, mending *either* would save little, and only both together much.

# %% [markdown]
# ### Why: the checks in order
#
# Only now look into the accused host, and always with a healthy one beside it. A figure of one host alone says little.
#
# | check | what to read | points at | looks like it |
# |---|---|---|---|
# | **1. device** | utilisation, memory bandwidth in use, clocks | model code or the device, if this rank's device is busier or slower than the others' | a *victim's* device idles in the collective, or spins in it and reads 100 % |
# | **2. input** | data wait of the rank, its loader's CPU and reading time, throughput of the local disk | input: heavier samples, slow storage, starved workers | a noisy neighbour that keeps the loader from its core |
# | **3. CPU** | steal, run-queue wait, throttle counters and clocks, who else runs there | the host: neighbours, heat, quota, hypervisor | too many threads of the job itself; a blocking call |
# | **4. network** | errors, drops, retransmits of that link; collectives split into transfer (the *least* wait of any rank) and wait (the rest) | the link, if the transfer itself is long | waiting for a slow rank, which at least one rank does not do |
# | **5. logs** | kernel and container log: ECC and Xid errors, link resets, retries, OOM kills, throttling of the control group | failing hardware, a container at its limit | old messages: read the time stamps |
#
# The order goes from cheap and frequent to slow and rare. What does the run say? `–` means that this machine has no such
# sensor, which is not zero.

# %%
verdict = straggler.diagnose(run)
lesson.checked(verdict)

# %% [markdown]
# Read the rows of own work and wait first, then look for the row that *differs on the slow rank*. An excess is what the slow rank
# has more than the others; a small or negative one clears its check. Disk reads of zero mean that the files were in memory:
# this loader is slow for another reason than its disk.
#
# ### The verdict
#
# A cause is named only if one check explains at least 80 % of the excess. Otherwise the rank is named, the cause is `unknown`, and the
# verdict says which check would separate the candidates. That is enough to act: who is slow matters more than why.

# %%
# NBVAL_CHECK_OUTPUT
print("cause:", verdict.cause, "| where:", verdict.where, "| acts first:", verdict.owner)

# %%
print(verdict)
print(verdict.reason)

# %% [markdown]
# So this is the input path, not the model. On a quiet machine most ranks need about 180 ms and this one 420, of which some 250 wait
# for input. Its forward and backward are as long as everybody's. The loader's CPU time is what is large, hence
# heavier samples and not the disk; a loader that others keep from its core would need more wall time, but not more CPU.

# %%
lesson.show(straggler.plot(run, prediction))

# %% [markdown]
# The lanes end alike, and the hatched wait fills up what a rank does not need. The dashed bar is the predicted step, with its range. Own work that
# varies on the right has two readings: a fault that comes and goes, or a machine that others use.

# %% [markdown]
# ### Break it in other ways
#
# A rule is worth something if it comes out differently when something else is wrong. Six short runs: a host that is
# throttled, one with noisy neighbours, a slow link, long samples that fall on another rank in each step, and a healthy job.
# The sixth is the disguised one from above.

# %%
from dataclasses import replace

from mlsyslab import ConfigError

broken = {"backward": disguised}
for name in ("throttled", "contention"):
    try:
        broken[name] = straggler.measure(straggler.preset(name))
    except ConfigError as error:  # a fault that cannot be had here is refused in one sentence
        print(f"{name} is left out: {error}")

# %%
for name in ("slow_link", "rotating", "healthy"):
    broken[name] = straggler.measure(straggler.preset(name))

# %% [markdown]
# Before you look: in which of the six may a rank be named, and in which is it wrong to name one?

# %%
for name, one in broken.items():
    print(f"{name:11}-> {straggler.diagnose(one)}")

# %% [markdown]
# On a quiet machine each line says what was broken and where. On a busy one a verdict may be `unknown`, with its reason; the library
# abstains rather than accuse. What it must never do is name another rank than the injected one, or any rank where none was
# touched. The next cell checks just that.

# %%
# NBVAL_CHECK_OUTPUT
accused = {}
for name, one in broken.items():
    injected = one.truth[0]["rank"] if one.truth else None
    found = straggler.diagnose(one).where
    if found not in (None, f"rank {injected}"):
        accused[name] = found
print("innocents named:", accused or "none")

# %% [markdown]
# The evidence of all runs, a column each. Before you read it: which three rows would you ask for, if you could have only three?

# %%
lesson.side_by_side({"slow input": run, **broken}, straggler)

# %% [markdown]
# How to tell them apart, row by row:
#
# 1. **Own work and wait.** With `slow input`, `backward`, `throttled` and `contention` one rank works most and waits least. With `slow_link`
#    *everybody* waits and nobody works more: the least wait, the transfer, is what grew. With `rotating` all ranks have the same mean.
# 2. **Data wait** has an excess only where the loader is late. A rank whose backward is slow has none.
# 3. **Run-queue wait** is large under `contention`: the thread was ready and had no core; the neighbour's name stands below it. A
#    neighbour alone proves nothing: here all ranks share one machine, and only one of them waits for a core. (`backward` may show some
#    as well, since its extra work is real and wants a core.) Under `throttled` it is small: the rank neither ran nor queued, it
#    was *held*. Telemetry then finds it stopped.
# 4. **The link check** sends one message a rank, each in its turn. All-reduce cannot say whose link is slow, since everybody waits
#    alike; one message at a time can.
# 5. **What a pause looks like:** the excess stands in few steps, between the phases (garbage collection, a checkpoint written by one rank). Try
#    `pauses` in the panel.
#
# A throttled device (a GPU at lower clocks) shows up as *every* phase longer by the same factor; bad code would
# lengthen one. Without such a device here, that one stays on paper.

# %%
lesson.show(straggler.plot(broken["rotating"]))

# %% [markdown]
# In each step somebody is late, and the mean hides it: all ranks work equally much in the end. Cordoning the rank that was last most often
# would cost a restart and change nothing. Rotation can also be several hosts that pause in turn (garbage collection, log rotation); own work that
# follows the *length of the samples* decides for the data.

# %% [markdown]
# ### When nobody must be named
#
# | what you see | what it is | instead of a cordon |
# |---|---|---|
# | the slowest rank changes from step to step | **rotating**: unequal batches | sort, bucket or pack samples; same tokens for each rank |
# | all ranks became slower at the same time | **shared**: file system, network, last release | look for what they share, and for what changed then |
# | all ranks of one pipeline stage are slow, equally | **stage**: an uneven partition | move layers; no machine is at fault |
# | one step, or four | **too few steps** | measure longer; a single long step accuses nobody |
# | most ranks waited for cores | **overloaded host** | quieten it, measure again |
# | differences within the noise | **healthy** | nothing |
#
# Few steps are quickly had: the first four of the run above, in which the culprit is as slow as ever.

# %%
# NBVAL_CHECK_OUTPUT
from mlsyslab.labs.straggler.blame import blame

for steps in (4, len(seen.own)):
    found = blame(seen.own[:steps], seen.wait[:steps])
    print("4 steps:" if steps == 4 else "all steps:", found.kind, found.ranks)

# %% [markdown]
# ### Look-alikes
#
# Each rule of the library says what it looks at, with what it is confused, and which further check tells them apart.

# %%
lesson.rules(straggler)

# %% [markdown]
# ### What to do, and what it promises
#
# | what was found | first action | why |
# |---|---|---|
# | a host that is clearly abnormal (throttled, contended, failing) | **cordon it, put a spare in its place**, resume from the last checkpoint | the job goes on now; the host is examined without anybody waiting |
# | a starved input, decoding too dear | **less preprocessing** on that host; decode in advance | no restart of the job |
# | the same files again and again, or slow storage | a **local cache** | reads and decoding are paid once |
# | loader workers that others keep from their cores | **less contention**: fewer or pinned workers, move the neighbour | the cores are there |
# | a slow link | take the host out, or replace cable and card | everybody waits for each of its messages |
#
# The verdict lists actions with the gain that the replay promises:

# %%
for action in verdict.actions:
    gain = action.gain_frac
    print(f"{action.name}: saves {gain.low:.0%} to {gain.high:.0%} of the step (predicted)")

# %% [markdown]
# Which one would you take? All that bring the rank back to the others promise the same: the step cannot get shorter than that of the
# second-slowest rank. So take the cheapest, and that is the one without a restart. Now do it, and measure:

# %%
fix = straggler.mitigate(run)
print(fix)

# %% [markdown]
# If less came than was promised, other programs were busier the second time, or the next-slowest rank is near. If more came, the *first* run was
# the disturbed one. Had the input not been the cause, nothing would have come: an action is also the last test of a diagnosis.
#
# ### Cordon and replace, in one job
#
# For a sick host the remedy is to take it out. In production that is one continuous job: a detector watches the records while the job trains,
# names a rank, the host of that rank is cordoned, an elastic launcher lets a spare join, and all ranks resume from the last
# complete checkpoint, with the sampler at the same place, so that no sample is skipped or seen twice. It costs the steps since that
# checkpoint and the restart; it pays off when the seconds saved a step, times the steps that are left, exceed that.
#
# The detector is short: it keeps the last eight steps and names a rank that exceeded the others in all but one of them. Fed with the
# records of the run above, as they would have come in, it speaks at this step:

# %%
watch = straggler.Detector(run.config.ranks)
named = next(filter(None, map(watch.feed, run.records.to_dict("records"))), None)
print(f"rank {named.rank} named after step {named.step}" if named else "nobody was named")

# %% [markdown]
# Warm-up (4 steps) is not judged, so this is as early as eight steps allow. A shorter window would be faster and would accuse healthy ranks
# more often; that is the trade-off of every alarm.
#
# Now the same for real, on two hosts and a spare, each played by an elastic launcher of its own (`torchrun` without the command
# line). The first host is throttled. Expect a verdict some ten steps in, a gap of seconds without training, a few steps done again, and
# a shorter step afterwards.

# %%
recovery = straggler.recover(replace(straggler.preset("throttled"), ranks=2, steps=40))
print(recovery)

# %%
for attempt, hosts in enumerate(recovery.hosts, 1):
    first = (0, *recovery.resumed_steps)[attempt - 1]
    print(f"attempt {attempt}, from step {first} on: ranks on", ", ".join(hosts))
saved_s = (recovery.step_before_s or 0) - (recovery.step_after_s or 0)
if saved_s > 0:
    print(f"the gap is earned back after {recovery.down_s / saved_s:.0f} steps")

# %% [markdown]
# The new ranks read a checkpoint that every rank had finished writing; one that was half written when the host went is never loaded. That last
# line is the decision itself: with more steps left than that, cordon; with fewer, let it run. If less came than was promised, other programs
# used the cores in the second half, or the machine was busy with restarting. And should the step be as long as before *on the spare*, the fault was never the
# host's: it went with the rank, as its data do.

# %% [markdown]
# ### At scale
#
# One slow rank among four is a nuisance. How does its cost grow with the number of ranks: not at all, with the logarithm, in proportion? And that
# of ordinary jitter? Decide before you run the next cell; it takes this run's own work, and simulates.

# %%
measured = run.summary()
mine = {"base_s": measured["own_s"], "slow_factor": measured["slow_own_s"] / measured["own_s"]}
for ranks in (8, 512, 16_384):
    job = straggler.simulate(ranks=ranks, **mine)
    cost = {name: value.expected for name, value in job.simulated.items()}
    print(f"{ranks:6} ranks, simulated: jitter adds {cost['jitter_s'] * 1e3:3.0f} ms a step,", end=" ")
    print(f"the slow rank {cost['slow_s'] * 1e3:.0f} ms = {cost['lost_rank_s']:6.0f} rank-seconds")

# %% [markdown]
# The seconds a step stay nearly the same, and even fall a little, since behind a slow rank nobody notices the others' jitter; what is
# lost is that times *all* ranks. Jitter grows with the expected maximum of n
# numbers, about the square root of 2 ln n: slowly, but it is never zero, and it is why the step of a large healthy job is longer than
# the mean rank's. Failures grow fastest: n times as many ranks fail n times as often. The whole account of the largest job:

# %%
print(job)
for name in ("jitter_s", "slow_s", "goodput_frac"):
    paper, drawn = job.predicted[name], job.simulated[name]
    print(f"{name:13} paper {paper.expected:.4f}, simulated {drawn.low:.4f} to {drawn.high:.4f}")

# %% [markdown]
# "Simulated" comes from drawn random numbers, "paper" from closed forms; where the two disagree, one of them has a bug. Neither knows your
# cluster: real jitter has a heavier tail, and real failures come in groups (a switch, a power feed).
#
# Can the culprit still be found among 16,384? Two durations a rank and step are enough; here are 200 steps of a made-up job.

# %%
# NBVAL_CHECK_OUTPUT
from mlsyslab.labs.straggler.simulate import Job, records

large = Job(ranks=16_384)
print("named", blame(*records(large)).ranks, "injected", large.slow)

# %% [markdown]
# ## 7. The answer in 60 seconds
#
# The next cell says it with the numbers that *you* measured. Read it aloud once, then close the notebook and say it again in
# your own words.

# %%
own, slow, step = (measured[name] * 1e3 for name in ("own_s", "slow_own_s", "step_s"))
data = 1e3 * seen.phases["data_s"].mean(0).max()
print(f"""I compare the ranks by own work and wait, since all steps look alike: {step:.0f} ms.
The others work {own:.0f} ms and wait {measured["wait_frac"]:.0%} of a step. {verdict.where} works {slow:.0f} ms, waits least.
Then its host beside a healthy one: device, loader and disk, CPU steal, throttling, neighbours,
network errors and collectives, kernel and container logs. {data:.0f} of its {slow:.0f} ms wait for input,
its compute is normal: {verdict.cause}, not the model; {verdict.owner} acts first.
{fix.action.name} saved {fix.came_frac:.0%}. A sick host I would cordon at once: a spare resumes from
the checkpoint, I examine it later. Were another rank last each step, I would name nobody.""")

# %% [markdown]
# ### What strong and weak answers sound like
#
# | | |
# |---|---|
# | **weak** | "I look for the worker with the longest step." All have the same. |
# | **weak** | "The worker with the longest all-reduce has a bad network card." It is a victim; the culprit has the shortest. |
# | **weak** | "I log in to the slow node and look at nvidia-smi." Which node, and compared with what? |
# | **better** | "I compare data wait, compute and communication per rank and look at the outlier." Finds input; a slow backward stays equalised. |
# | **strong** | "Own work against wait, per rank, over 20 steps: rank 2 works 420 ms where the others work 180 and waits least. 250 ms of it are data wait, its compute is like everybody's, so it is the input path. Replaying it at the median promises 55 to 60 % of the step. I cache its samples; had it been the host, I would cordon it, since every minute costs four ranks' time, 16,384 on the big job. If the slowest rank changed from step to step, I would name nobody and look at the batches." |
#
# A strong answer has five parts: the comparison that finds *who*, the checks in order with a healthy host beside it, one cause that explains most of
# the excess, an action that keeps the job moving with a bound on its gain, and the case in which nobody is named.
#
# ### Follow-up questions
#
# 1. Every rank reports 420 ms a step. How do you find the slow one without synchronised clocks?
# 2. The rank with the longest all-reduce was replaced, and nothing changed. Why?
# 3. There are two ranks only. Against which median do you compare?
# 4. All ranks wait long in all-reduce, and none works more than the others. What is it, and whose?
# 5. A rank has 20 % more own work, but does not wait less than the others. What do you suspect?
# 6. You cordon the host, a spare joins, and the same rank number is slow again. What now?
# 7. A restart costs 10 minutes and the rank costs 5 ms a step; 60,000 steps are left. Do you cordon it?
# 8. Twelve of 16,384 ranks are slow, all in one pipeline stage. Machines or model?
#
# Hints: 1 own work and wait are durations; 2 it was a victim; 3 against the other one, and the faster of the two is the norm; 4 the transfer: a link,
# measured one by one; 5 its timer; 6 it follows the rank: its data shard, or its share of the model; 7 5 ms × 60,000 = 300 s, less than 600 s, so let it run; 8 if it is the whole
# stage, the partition, else those machines.
#
# Next: [the exercises](../exercises/02_straggler.ipynb), where you write the rule, make it survive innocent jobs, and count the cost.
