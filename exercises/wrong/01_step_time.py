"""Typical wrong answers to the step-time exercises."""

from exercises.wrong import Wrong

STEADY = 'counted = records[~records["warmup"].astype(bool)]'

WRONG = [
    Wrong(exercise="1.1", old=STEADY, new="counted = records", why="warm-up included"),
    Wrong(exercise="1.1", old=".mean()", new=".median()", why="the median instead of the mean"),
    Wrong(exercise="1.1", old=".mean()", new=".sum()", why="the sum over the steps instead of the mean"),
    Wrong(
        exercise="1.1",
        old=STEADY,
        new=STEADY + '; counted = counted[counted["rank"] == 0]',
        why="only rank 0 is looked at",
    ),
    Wrong(exercise="1.2", old=STEADY, new="counted = records", why="warm-up included"),
    Wrong(
        exercise="1.2",
        old='counted["data_s"].sum() / counted["step_s"].sum()',
        new='counted["data_s"].median() / counted["step_s"].median()',
        why="the median, which does not see bursts",
    ),
    Wrong(
        exercise="1.2",
        old='counted["data_s"].sum() / counted["step_s"].sum()',
        new='(counted["data_s"] / counted["step_s"]).mean()',
        why="the mean of the shares: a long step weighs no more than a short one",
    ),
    Wrong(
        exercise="1.2",
        old='counted["data_s"].sum()',
        new='counted["load_wall_s"].sum()',
        why="hidden loading counted as data wait",
    ),
    Wrong(
        exercise="1.2",
        old='counted["data_s"] > 0.1',
        new='counted["data_s"] > 0.0',
        why="every step has some microseconds of wait",
    ),
    Wrong(
        exercise="1.3a",
        old="max(load_s, device_s)",
        new="load_s + device_s",
        why="forgets that loading goes on while the device computes",
    ),
    Wrong(
        exercise="1.3a",
        old="min(workers, cores)",
        new="workers",
        why="divides by workers that have no core",
    ),
    Wrong(
        exercise="1.3a",
        old="return batch * cost_s + device_s",
        new="return max(batch * cost_s, device_s)",
        why="without prefetch nothing is hidden",
    ),
    Wrong(
        exercise="1.3a",
        old="batch * cost_s / min",
        new="cost_s / min",
        why="the cost of one sample, not of a batch",
    ),
    Wrong(
        exercise="1.3b",
        old="1 - after_s / before_s",
        new="before_s / after_s",
        why="a speed-up instead of a share saved",
    ),
    Wrong(
        exercise="1.3b",
        old="1 - after_s / before_s",
        new="1 / 2",
        why="takes twice the workers to halve every step",
    ),
    Wrong(
        exercise="1.3b",
        old="before_s = step_time",
        new="cores = 2 * workers\n    before_s = step_time",
        why="forgets that the cores are limited",
    ),
    Wrong(
        exercise="1.3b",
        old="1 - after_s / before_s",
        new="before_s - after_s",
        why="seconds instead of a share",
    ),
    Wrong(
        exercise="1.4",
        old='counted.groupby("step")["sync_s"].min().mean()',
        new='counted["sync_s"].mean()',
        why="blames the network for ranks that wait for a slow one",
    ),
    Wrong(
        exercise="1.4",
        old='counted.groupby("rank")[["data_s", "other_s"]].mean().max()',
        new='counted[["data_s", "other_s"]].mean()\n    counted = counted.assign(sync_s=counted["sync_s"].mean())',
        why="averages every phase over the ranks: the sync of three outweighs the wait of the one that is starved",
    ),
    Wrong(
        exercise="1.4",
        old='counted.groupby("rank")[["data_s", "other_s"]].mean().max()',
        new='counted[["data_s", "other_s"]].median()',
        why="the median over all ranks sees neither bursts nor one starved rank",
    ),
    Wrong(
        exercise="1.4",
        old="cause = max(waits, key=waits.get)",
        new='cause = "input" if (util_frac or 1) < 0.6 else max(waits, key=waits.get)\n    waits[cause] = 1e9 if (util_frac or 1) < 0.6 else waits[cause]',
        why="takes every idle device to be waiting for data",
    ),
    Wrong(exercise="1.4", old=".nunique() < 5", new=".nunique() < 1", why="a verdict from three steps"),
    Wrong(
        exercise="1.4",
        old="0.1 * counted",
        new="0.0 * counted",
        why="accuses a healthy job of its largest trifle",
    ),
]
