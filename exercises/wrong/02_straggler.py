"""Typical wrong answers to the straggler exercises."""

from exercises.wrong import Wrong

STEADY = 'steady = records[~records["warmup"].astype(bool)]'
OWN = 'steady["step_s"] - steady["sync_s"]'
WORST = "works.idxmax() if works.idxmax() == waits.idxmin() else None"

WRONG = [
    Wrong(exercise="2.1", old=STEADY, new="steady = records", why="warm-up included"),
    Wrong(exercise="2.1", old=OWN, new='steady["step_s"]', why="the step, which is the same on all ranks"),
    Wrong(
        exercise="2.1",
        old=OWN,
        new='steady["step_s"] - steady["sync_s"] - steady["data_s"]',
        why="the wait for its own input is taken for a wait for the others",
    ),
    Wrong(
        exercise="2.1",
        old=OWN,
        new='steady["forward_s"] + steady["backward_s"]',
        why="the device's work alone, without input, optimizer and host",
    ),
    Wrong(
        exercise="2.1",
        old='columns="rank", values="sync_s"',
        new='columns="rank", values="data_s"',
        why="data wait instead of the wait for the others",
    ),
    Wrong(
        exercise="2.2a",
        old="column - table.drop(columns=column.name).median(axis=1)",
        new="column - table.median(axis=1)",
        why="the rank itself is among those it is compared with",
    ),
    Wrong(
        exercise="2.2a",
        old=".median(axis=1)",
        new=".mean(axis=1)",
        why="the mean of the others, which one more slow rank moves",
    ),
    Wrong(
        exercise="2.2a",
        old=".median(axis=1)",
        new=".median().median()",
        why="the others over all steps, instead of in the same step",
    ),
    Wrong(
        exercise="2.2b",
        old=WORST,
        new="against_others(wait).median().idxmax()",
        why="the longest collective: a victim",
    ),
    Wrong(
        exercise="2.2b",
        old=WORST,
        new="(own + wait).median().idxmax()",
        why="the longest step, which is everybody's",
    ),
    Wrong(exercise="2.2b", old=WORST, new="works.idxmax()", why="most own work alone, whoever waits"),
    Wrong(
        exercise="2.2b",
        old=WORST,
        new="own.std().idxmax()",
        why="the most restless rank instead of the slowest",
    ),
    Wrong(
        exercise="2.3",
        source="def straggler_of(records):\n    return culprit(*own_and_wait(records))",
        why="always names somebody",
    ),
    Wrong(
        exercise="2.3",
        source=(
            "def straggler_of(records):\n"
            "    steady = records[~records['warmup'].astype(bool)]\n"
            "    backward_s = steady.groupby('rank')['backward_s'].mean()\n"
            "    others_s = backward_s.median()\n"
            "    return backward_s.idxmin() if backward_s.min() < 0.8 * others_s else None"
        ),
        why="least backward: works where a profiler's backward includes the wait, and not for a fault in backward",
    ),
    Wrong(
        exercise="2.3",
        source=(
            "def straggler_of(records):\n"
            "    own, wait = own_and_wait(records)\n"
            "    mean_s = own.mean()\n"
            "    return mean_s.idxmax() if len(own) >= 5 and mean_s.max() > 1.1 * mean_s.median() else None"
        ),
        why="the mean: one long step accuses, and of two ranks the slow one moves what it is compared with",
    ),
    Wrong(exercise="2.3", old="len(own) < 5", new="len(own) < 1", why="a verdict from four steps"),
    Wrong(exercise="2.3", old="0.7 * len(own)", new="0.2 * len(own)", why="accuses a rank of a rotation"),
    Wrong(exercise="2.3", old="0.1 * others_s", new="0.0 * others_s", why="accuses two ranks' trifle"),
    Wrong(exercise="2.3", old="0.1 * others_s", new="1.5 * others_s", why="waits for a catastrophe"),
    Wrong(exercise="2.4a", old="ranks * lost_s", new="lost_s", why="counts one rank, where all of them wait"),
    Wrong(
        exercise="2.4a",
        old="ranks * lost_s",
        new="ranks * lost_s / 2",
        why="takes half of the ranks to be hit",
    ),
    Wrong(
        exercise="2.4a", old="lost_s / slow_s", new="lost_s / healthy_s", why="a share of the healthy step"
    ),
    Wrong(
        exercise="2.4a",
        old="lost_s / slow_s",
        new="lost_s / slow_s / ranks",
        why="one of n ranks is slow, so it costs an n-th: true only of ranks that do not wait",
    ),
    Wrong(
        exercise="2.4b",
        old="sigma_s * NormalDist",
        new="0 * sigma_s * NormalDist",
        why="jitter averages out: not in a maximum",
    ),
    Wrong(
        exercise="2.4b",
        source="import math\n\ndef jitter(ranks, sigma_s):\n    return sigma_s * math.sqrt(2 * math.log(ranks))",
        why="the upper bound instead of the expectation: 10 % too much even at 16,384",
    ),
    Wrong(
        exercise="2.4b",
        source="def jitter(ranks, sigma_s):\n    return 3 * sigma_s",
        why="three sigma, whatever the number of ranks",
    ),
    Wrong(
        exercise="2.4b",
        source="def jitter(ranks, sigma_s):\n    return sigma_s * ranks**0.5",
        why="the spread of a sum instead of a maximum",
    ),
    Wrong(
        exercise="2.5",
        old=">= 0.8",
        new=">= max([0.5, *shares.values()])",
        why="the largest cause, though it explains half",
    ),
    Wrong(exercise="2.5", old=">= 0.8", new="> 0.8", why="at least 80 %, not more than"),
    Wrong(
        exercise="2.5",
        old="excess_s * steps_left > restart_s",
        new="True",
        why="cordons whatever it costs",
    ),
    Wrong(
        exercise="2.5",
        old="excess_s * steps_left > restart_s",
        new="excess_s > restart_s",
        why="the seconds of one step against a restart",
    ),
    Wrong(
        exercise="2.5",
        old='if kind != "rank":',
        new='if kind in ("few steps", "healthy"):',
        why="cordons a host though nobody was named",
    ),
]
