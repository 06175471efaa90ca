"""Typical wrong answers to the serving exercises."""

from exercises.wrong import Wrong

START = "max(free, arrivals[done], min(full, arrivals[done] + max_wait_s))"

WRONG = [
    Wrong(
        exercise="4.1",
        old=START,
        new="max(free, arrivals[done] + max_wait_s)",
        why="waits on after the batch is full",
    ),
    Wrong(
        exercise="4.1",
        old=START,
        new="max(free, arrivals[done], min(full, max(free, arrivals[done]) + max_wait_s))",
        why="the wait counts from when the replica is free, not from the oldest arrival",
    ),
    Wrong(
        exercise="4.1",
        old=START,
        new="max(free, arrivals[done])",
        why="never waits for company",
    ),
    Wrong(
        exercise="4.1",
        old="rows = sum(time <= start for time in arrivals[done : done + max_batch])",
        new="rows = sum(time <= min(start, arrivals[done] + max_wait_s) for time in arrivals[done : done + max_batch])",
        why="early binding: fixed by the clock while the replica works",
    ),
    Wrong(
        exercise="4.1",
        old="arrivals[done : done + max_batch])",
        new="arrivals[done:])",
        why="no bound on the batch",
    ),
    Wrong(exercise="4.2", old='ok["intended_s"]', new='ok["sent_s"]', why="from the send: coordinated omission"),
    Wrong(exercise="4.2", old="/ len(steady)", new="/ len(ok)", why="what was refused counts as not asked"),
    Wrong(
        exercise="4.2",
        old='ok = steady[steady["outcome"] == "ok"]',
        new="ok = steady",
        why="refusals are fast answers",
    ),
    Wrong(
        exercise="4.2",
        old='steady = records[~records["warmup"].astype(bool)]',
        new="steady = records",
        why="warm-up included",
    ),
    Wrong(
        exercise="4.2",
        old="np.quantile(total_s, p / 100)",
        new="total_s.mean() + {50: 0, 95: 1.645, 99: 2.326}[p] * total_s.std()",
        why="percentiles of a normal distribution",
    ),
    Wrong(exercise="4.3", old="queued // max_batch", new="queued", why="one request at a time, as if nothing were batched"),
    Wrong(exercise="4.3", old=" / replicas", new="", why="one replica does all the work"),
    Wrong(exercise="4.3", old="before_s + batch_s > time_left_s", new="before_s > time_left_s", why="its own batch takes no time"),
    Wrong(exercise="4.3", old="queued >= max_queue", new="queued > max_queue", why="one more than there is room for"),
    Wrong(exercise="4.3", old="left_s + queued", new="queued", why="the batch that runs now is forgotten"),
    Wrong(exercise="4.4a", old=" + queued", new="", why="sees only arrivals, never the backlog"),
    Wrong(exercise="4.4a", old="rate / 0.7", new="rate", why="plans for 100 % utilisation"),
    Wrong(exercise="4.4a", old="max(floor, min(ceiling, wanted))", new="min(ceiling, wanted)", why="scale-to-zero"),
    Wrong(exercise="4.4a", old="math.ceil(", new="round(", why="rounds the load down"),
    Wrong(exercise="4.4b", old="max(recent) < have", new="recent[-1] < have", why="down as fast as up: it flaps"),
    Wrong(exercise="4.4b", old="have - 1 if", new="max(recent) if", why="down to the need at once"),
    Wrong(exercise="4.4b", old="not queued and ", new="", why="takes capacity away while requests wait"),
    Wrong(exercise="4.4b", old="return recent[-1]\n", new="return have + 1\n", why="up one at a time, through a burst"),
    Wrong(exercise="4.5", old='["cost_replica_s", "p95_s"]', new='["p95_s", "cost_replica_s"]', why="the fastest, at any price"),
    Wrong(exercise="4.5", old=' & (table["rejected_frac"] == 0)', new="", why="a good p95 for those that were let in"),
    Wrong(
        exercise="4.5",
        old="    if good.empty:\n        return None\n",
        new="    if good.empty:\n        good = table\n",
        why="names something though nothing meets the target",
    ),
]  # fmt: skip
