# %% [markdown]
# # Serving: bursty traffic and a p95 target; design it
#
# A real service on this machine answers a real stream of requests, one that does not wait for it. You predict its tail latency,
# measure it, break the design in six ways, name each cause, and find out for yourself what a batch wait of 5 ms buys. At the end
# stands a spoken answer made of your own numbers.
#
# **Contents**
#
# 1. The question
# 2. What the words mean
# 3. Your prediction
# 4. The measurement
# 5. Predicted beside measured
# 6. The diagnosis: the wait, the batch, the tester that lies, overload, bursts and cold starts, who is urgent, the whole design
# 7. The answer in 60 seconds, strong and weak versions, follow-ups
#
# All of it takes about four minutes of machine time; a busy machine takes longer and says so.

# %% [markdown]
# ## 1. The question
#
# *"We serve a model behind an API. Traffic comes in bursts, and 95 % of the answers must be there within a fixed time. Design the
# serving side."*
#
# The interviewer listens for three things: that you see **queueing**, not computing, as what breaks a tail; that every part you name has
# a **number** (how large a batch, how long a wait, how many warm replicas, which queue bound); and that you say what happens when all of it
# is not enough: whom do you refuse, and how soon?

# %% [markdown]
# ## 2. What the words mean
#
# | word | what it means here |
# |---|---|
# | **gateway** | the front that takes requests, knows which replicas are healthy, and decides |
# | **replica** | a process that holds the model; *warm*: ready before the request comes; *cold*: it must first start and load |
# | **dynamic batching** | requests that came separately run together, because n rows take far less than n times one row |
# | **max batch, max wait** | at most so many rows together, and the oldest held back at most so long for company |
# | **late binding** | a batch is fixed when a replica takes it; *early*: by a timer, while the replicas are still at work |
# | **saturation** | the rate above which a queue grows without end: replicas × max batch ÷ seconds of a full batch |
# | **admission control** | to refuse at the door what cannot be answered in time (429), so that the rest can be |
# | **p95** | 95 % of the answers took at most this long; a promise about almost everybody, not about the mean |
# | **open loop** | requests are sent when the schedule says so; *closed loop*: a client sends when it has its last answer |
# | **goodput** | answers within the target, as a share of everything that was asked |
#
# The latency of a request is held back + queued + computed, and only the last of the three is the model's.

# %% [markdown]
# ## 3. Your prediction
#
# The worked example: one warm replica, batches of at most 8 rows, a wait of at most 5 ms, and requests at 60 % of what the replica
# can do at most. The model here is a small transformer; this is how long it takes, alone, for a batch of n rows:

# %%
from dataclasses import replace

from mlsyslab import serving
from mlsyslab.contract import format_value
from mlsyslab.teach import lesson
from mlsyslab.teach.explore import explore

curve = serving.service_curve(serving.PRESETS["worked_example"])
config = serving.preset("worked_example")  # its rate follows from the curve
for rows in (1, 2, 4, 8):
    print(f"{rows} rows: {curve[rows] * 1e3:.2f} ms, {rows / curve[rows]:5.0f} rows/s (measured)")

# %% [markdown]
# Eight rows together take far less than eight times one row: that is the whole case for batching. How long do half of the answers
# take, and how long 95 % of them? Decide with the numbers above: what does a request wait for before it is computed?

# %%
panel = explore(serving, preset="worked_example")
panel

# %% [markdown]
# Type both numbers, press **Lock in**, then **Run**. Each dot is a request, at the moment at which it *should* have arrived. If the panel does not
# react, the kernel was restarted: run the cell above again.
#
# Without clicking (Run All, Colab) the next cell does the same: put *your* numbers in its first line. If you have already run the
# panel, it takes that run.

# %%
yours = {"p50_s": 0.008, "p95_s": 0.015}  # change both: seconds
panel.join()  # a run that is still going on in the panel ends first
run = panel.run_result or panel.run(yours, wait=True)

# %% [markdown]
# ## 4. The measurement
#
# Where did the time of an answer go? Before you look: which of the three parts is the largest for the *median* request, and which for the slowest?

# %%
measured = run.summary()
parts = {"batch_wait_s": "held back", "queue_s": "queued", "service_s": "computed"}
answers = run.records[(run.records["outcome"] == "ok") & ~run.records["warmup"].astype(bool)]
slowest = answers.nlargest(max(1, len(answers) // 20), "total_s")
for name, words in parts.items():
    print(
        f"{words:10} {answers[name].mean() * 1e3:5.1f} ms, in the slowest 5 %: {slowest[name].mean() * 1e3:5.1f} ms"
    )

# %% [markdown]
# The model's own part is nearly the same for the slow ones; what makes a tail is waiting. Two kinds: *held back* is the batcher's choice and has an
# upper bound that you set; *queued* is what happens when the replica is busy, and has none, unless somebody refuses.
#
# A p95 needs more requests than a mean: to know it within a quarter of its distance takes about 2,000 of them, a p99 about 10,000.

# %%
lesson.show(serving.plot(run))

# %% [markdown]
# ## 5. Predicted beside measured
#
# The library simulates the same policies, event by event, with the curve from above.

# %%
prediction = serving.predict(config, {"curve_s": [curve[rows] for rows in sorted(curve)]})
lesson.compare(prediction, run, panel.round.yours)

# %% [markdown]
# In the figure, the dashed bars are the prediction with its range.

# %%
lesson.show(serving.plot(run, prediction))

# %% [markdown]
# Three closed forms to keep in mind, each good enough for a whiteboard:
#
# - saturation = replicas × max batch ÷ s(max batch). Below 80 % of it a queue is a ripple, near 100 % it is the sea.
# - in the system at any moment: arrivals a second × seconds in the system (Little). Measured above: rate × mean latency.
# - a request is held at most *max wait*, plus at most what runs at that moment, plus the full batches before it.
#
# When is it wrong? The predictor says so itself:

# %%
for sentence in prediction.assumptions:
    print("-", sentence)

# %% [markdown]
# ## 6. The diagnosis
#
# ### Your own first
#
# Is this service healthy for its target? Choose in the panel and press **Check**, or say one sentence: *"the cause is ..., because ..."*.

# %%
verdict = serving.diagnose(run)
print(verdict)
print(verdict.reason)

# %% [markdown]
# ### What does the wait buy?
#
# "Wait up to 5 ms" stands in every blog post. Here are your own curves: simulated as lines, and three points measured on the real service.
# Before you run it: at which wait is p95 lowest?

# %%
seconds = [curve[rows] for rows in sorted(curve)]
waits = (0.0, 0.001, 0.002, 0.005, 0.010, 0.020)
simulated = [(w * 1e3, serving.simulate(replace(config, max_wait_s=w), seconds).summary()) for w in waits]
real = [(w * 1e3, serving.measure(replace(config, max_wait_s=w)).summary()) for w in (0.0, 0.010)]
points = sorted([*real, (config.max_wait_s * 1e3, measured)], key=lambda point: point[0])
lesson.show(serving.curve_plot("max wait, ms", {"simulated": simulated, "measured": points}))

# %% [markdown]
# With late binding the lowest latency is at a wait of **zero**: while the replica works, requests collect anyway. What the wait buys is on the
# right: larger batches, hence fewer of them for the same answers, hence less work for the accelerator. That is money, or room for a neighbour on
# the same device. So "5 ms" is a price that you pay in latency, and it is bounded: nobody is held longer.
#
# Where does the rule of thumb come from? From servers that bind *early*: a timer closes the batch while the replica is still busy.
# With a short wait such a server forms tiny batches for ever. Its limit, by the formula (arrivals × mean batch time < mean batch rows):

# %%
import numpy as np

from mlsyslab.labs.serving import queueing

limit = queueing.saturation_per_s(np.array(seconds))
for wait_ms in (1, 2, 5, 10):
    kept = queueing.early_limit_per_s(wait_ms / 1e3, np.array(seconds))
    print(f"early binding, wait {wait_ms:2} ms: keeps up to {kept / limit:.0%} of saturation (predicted)")

# %%
short = replace(config, binding="early", max_wait_s=0.001)
for name, one in {"late": replace(short, binding="late"), "early": short}.items():
    got = serving.measure(one).summary()
    print(
        f"{name:5} binding, wait 1 ms: p95 {format_value(got['p95_s'], 's')}, {format_value(got['mean_batch_rows'], 'rows')} a batch (measured)"
    )

# %% [markdown]
# ### What does the batch buy?
#
# The same requests, one at a time. What happens to p95 when 60 % of the batched limit is more than the limit of single requests?

# %%
single = serving.measure(replace(config, max_batch=1))
print(serving.diagnose(single))
lesson.show(serving.plot(single))

# %% [markdown]
# Batching raised what this replica can do at all. Too much of it hurts: a batch of 64 that takes longer than the target cannot be in time for anybody.
#
# ### The tester that lies
#
# The replica is stopped for one second in the middle of the run. First an open-loop test, then a closed-loop one, like most load tools: a few
# clients that send when they have their last answer. Same service, same stall. Which p99 do you believe?

# %%
stall = replace(config, stall_at_s=3.0, stall_s=1.0, admission=False)
for name, one in {"open loop": stall, "8 closed-loop clients": replace(stall, clients=8)}.items():
    got = serving.measure(one).summary()
    p50, p99 = (format_value(got[key], "s") for key in ("p50_s", "p99_s"))
    print(f"{name:22} p50 {p50}, p99 {p99} (measured)")

# %% [markdown]
# During the stall the closed-loop clients simply did not ask: at most eight requests met it, out of hundreds that *should* have. This is **coordinated
# omission**. Users do not coordinate with your outage. From here on: open loop, and latency from the intended arrival.
#
# ### Overload, with and without a door
#
# Requests at 1.3 times saturation. Without admission control everybody is let in. What will p95 be after six seconds, and after sixty? Then with
# a door that lets 64 rows wait, and with one for 32.

# %%
flood = serving.preset("collapse")
doors = {f"{rows} rows": replace(flood, admission=True, max_queue=rows) for rows in (64, 32)}
floods = {name: serving.measure(one) for name, one in {"everybody": flood, **doors}.items()}
for name, after in floods.items():
    got = after.summary()
    shares = f"good {got['goodput_frac']:4.0%}, refused {got['rejected_frac']:4.0%}"
    print(f"{name:10} p95 {format_value(got['p95_s'], 's')}, {shares} ->", serving.diagnose(after).cause)

# %%
# NBVAL_CHECK_OUTPUT
cause = serving.diagnose(floods["everybody"]).cause
abstains = cause in ("unknown", "tester-bound")  # on a machine that others keep too busy to tell
print("everybody let in:", "no admission control" if abstains else cause)

# %% [markdown]
# The queue grows by 0.3 of saturation every second: latency is not a number any more, it is a slope. With a door about a quarter is refused at once (429, with
# the time to come back). Are the others in time? That depends on how many may wait: 64 rows are eight full batches, and who stands last
# waits for all of them. So the bound of the queue follows from the target: (target − own batch − the one that runs) ÷ seconds of a batch, times
# its rows. A refusal after ten seconds would have been the same refusal, ten seconds later.
#
# ### Bursts, warm capacity, cold starts
#
# The mean rate is harmless, but it comes in bursts of five times as much. One warm replica; then one with an autoscaler that starts more when the queue grows,
# from nothing: interpreter, torch, model. Then three warm ones. So that three replicas do not share your cores, the model is *paced* here: it
# waits as long as a device of its own would compute. Which of the three meets the target?

# %%
burst = replace(serving.preset("burst"), paced=True)
kinds = {
    "1 warm": burst,
    "1 warm, cold starts": replace(burst, autoscale=True, cold=True, ceiling=3),
    "3 warm": replace(burst, replicas=3),
}

# %%
for name, one in kinds.items():
    after = serving.measure(one)
    got = after.summary()
    cost = f"{got['replica_s']:2.0f} replica-seconds ->"
    p95 = format_value(got["p95_s"], "s")
    print(f"{name:20} p95 {p95}, good {got['goodput_frac']:4.0%}, {cost}", end=" ")
    print(serving.diagnose(after).cause)

# %% [markdown]
# A cold start lasts seconds, a burst is over by then: a replica that is started *because of* a burst helps the next one. So there is a **floor** of warm
# replicas, sized for the burst, and the autoscaler is for the hour, not for the second: up at once, down slowly. Scale-to-zero saves the
# quiet hours' money and makes the first user of the morning wait for torch. Three warm replicas cost three times as much as one, for the same
# requests: that is the price of the target.
#
# What does a day cost at the size of 20 replicas, with five minutes in the evening in which three times as many come? A start takes 30 s. Simulated second by second, as
# a fluid, with the same autoscaler:

# %%
surge = {"surge_at_s": 18 * 3600.0, "surge_s": 300.0, "surge_factor": 3.0}
size = {"rate_per_s": 20 * limit, "capacity_per_s": limit, "batch_s": seconds[-1], "ceiling": 100}
for floor in (0, 45, 90):
    print(f"floor {floor}: {serving.day(**size, **surge, slo_s=config.slo_p95_s, floor=floor)}")

# %% [markdown]
# The floor that the surge needs costs far more than the whole day did without one, and what it buys is a few answers in a thousand. Whether that
# is worth it depends on what was promised: a p95 does not notice them, those users do. Most would take a floor in between, and refuse the rest of the
# surge.

# %% [markdown]
# ### Who is urgent
#
# A tenth of the requests is urgent, at a load near saturation. They overtake the others, but not for ever: one level of priority is worth 100 ms of
# waiting, so nobody starves.

# %%
crowded = replace(config, rate_per_s=0.9 * limit, urgent_frac=0.1, max_wait_s=0.0)
mixed = serving.measure(crowded).records
mixed = mixed[(mixed["outcome"] == "ok") & ~mixed["warmup"].astype(bool)]
for priority, rows in mixed.groupby("priority"):
    print(
        f"priority {priority}: {len(rows):5} answers, p95 {rows['total_s'].quantile(0.95) * 1e3:6.1f} ms (measured)"
    )

# %% [markdown]
# ### The whole design, chosen and verified
#
# The cheapest configuration that meets a target, by simulation, and then measured. The rule: first what meets the target without refusing, then the price in
# replica-seconds.

# %%
advice = serving.recommend(config.slo_p95_s, config, seconds)
print(advice)
if advice.config is None:
    print("There is nothing to verify on this machine: no configuration kept the target in the simulation.")
else:
    p95_s = serving.measure(advice.config).summary()["p95_s"]
    print(f"measured: p95 {format_value(p95_s, 's')} for a target of {config.slo_p95_s * 1e3:.0f} ms")

# %% [markdown]
# Now you: a burst, a target, and a budget. Set batch, wait, replicas, queue and floor in the panel until the verdict is `healthy`, with as few replica-seconds
# as you can. The panel is the same as above, with another preset.

# %%
game = explore(serving, preset="burst")
game

# %% [markdown]
# | part | its number here | why |
# |---|---|---|
# | gateway | routes to healthy replicas only; retries a dead one's requests once | a crash must not be a client's problem |
# | batcher | at most 8 rows, wait at most 5 ms (or 0) | the bound of the wait is the bound of what it can cost |
# | admission | a queue bound, and no request that would be late | above saturation somebody is refused: soon is better |
# | autoscaler | on queue, utilisation and recent p95; up at once, down slowly | latency reacts last, the queue first |
# | warm floor | what a burst needs beyond the mean | a cold start is longer than a burst |
# | priorities | urgent first, with ageing | a bound for both sides |
#
# More batching lowers the cost of an answer and raises its latency; warm capacity does the opposite. The target decides how much of each.

# %% [markdown]
# ## 7. The answer in 60 seconds
#
# The next cell says it with the numbers that *you* measured. Read it aloud once, then close the notebook and say it again in
# your own words.

# %%
p50, p95 = (format_value(measured[name], "s") for name in ("p50_s", "p95_s"))
print(f"""I size it by saturation: a replica does {limit:.0f} rows a second in batches of {config.max_batch}, {1 / curve[1]:.0f} one by one.
A gateway sends requests to warm replicas; a batcher takes what is there when one is free, at most
{config.max_batch} rows, held back at most {config.max_wait_s * 1e3:.0f} ms, so that its cost is bounded. Measured at 60 % load:
p50 {p50}, p95 {p95} for a target of {config.slo_p95_s * 1e3:.0f} ms. The queue has a bound, and what would be late is refused at once.
I keep a warm floor for bursts, since a cold start is longer than a burst, and scale on the queue:
up at once, down slowly, never to zero. Urgent requests overtake, with ageing.
I test it open loop, from the intended arrival; a closed-loop tool hides the very stalls I fear.""")

# %% [markdown]
# ### What strong and weak answers sound like
#
# | | |
# |---|---|
# | **weak** | "Kubernetes with autoscaling on GPU utilisation." Utilisation is high when all is well, and the burst is over before the pod is up. |
# | **weak** | "We batch 64 requests for efficiency." And the target? |
# | **better** | "Dynamic batching with a short wait, a few warm replicas, autoscaling on queue depth." Parts without numbers. |
# | **strong** | "A replica saturates at 8 ÷ s(8). I run it at 60 to 70 % of that, so p95 is a few batch times. The batch is fixed when a replica is free; the wait costs at most 5 ms and buys fewer batches, so I set it to zero if latency is what I lack and raise it if money is. A queue of 64 rows is the most that can still be answered in time; beyond it I refuse with 429. Bursts are four times the mean for a second, a cold start takes five: so the floor is sized for the burst. I scale up on backlog at once, down by one every few minutes. And I have measured it open loop." |
#
# ### Follow-up questions
#
# 1. p95 is bad, utilisation is 40 %. What do you look at?
# 2. Your batches have a mean of 1.2 rows at high load. How can that be, and who is to blame?
# 3. The load test reports a mean of 86 ms, although the service stood still for half of the time. Why?
# 4. A colleague removes the queue bound "because refusing is rude". What will the graph of latency look like?
# 5. The autoscaler goes up and down every minute. Which two numbers do you change?
# 6. One client sends 8 rows at a time, the others 1. Whose tail suffers, and what bounds it?
# 7. A replica dies with a batch on it. What do its clients see, and why only once?
# 8. When is scale-to-zero right?
#
# Hints: 1 the wait, and bursts: means hide both; 2 a sequential client, or an early binder with a short wait; 3 a closed loop asks less when answers are slow;
# 4 a straight line upwards for as long as arrivals exceed saturation; 5 how long it waits before going down, and the utilisation that it aims at; 6 the small
# ones behind a large one: at most one more batch, if batches are capped in rows; 7 a longer answer, since the request is retried elsewhere once: twice would
# double the load of a request that kills replicas; 8 where the first answer of the day may take a cold start.
#
# Next: [the exercises](../exercises/04_serving.ipynb), where you write the batcher, the door, the autoscaler, and the yardstick.
