"""What a synchronous job of many ranks loses to a slow rank, to jitter and to failures: on paper, and simulated. Pure.

The three grow differently with the number of ranks n. One slow rank costs the same seconds a step whatever n is (less the
jitter that it hides), and n times as many rank-seconds. Random jitter costs the expected maximum of n, about the square
root of 2 ln n. Failures come n times as often. Each figure is there twice: from a closed form that fits on paper, and
from a seeded simulation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlsyslab.contract import ConfigError, Origin, Range
from mlsyslab.labs.straggler.scale import (
    BLOM_ERROR_FRAC,
    daly_every_s,
    expected_later,
    expected_max,
    goodput_frac,
    spread_of_max,
)
from mlsyslab.options import check_options, option

Array = NDArray[np.float64]

# 419 unexpected interruptions in 54 days on 16,384 GPUs (Llama Team 2024, "The Llama 3 Herd of Models").
RANK_MTBF_S = 54 * 86_400 * 16_384 / 419
FAILURES = 20_000  # failures that are simulated, whatever the rate
FLAT_FRAC = 0.005  # intervals whose goodput is so near the best one are as good
TRIED = np.geomspace(1 / 32, 32, 121)  # checkpoint intervals to try, as multiples of Daly's
CHUNK = 2**22  # numbers drawn at a time: 32 MB
MOST_DRAWS = 2**30


@dataclass(frozen=True, kw_only=True)
class Job:
    """A synchronous job at scale: its healthy step, its jitter, its slow ranks, its failures and checkpoints."""

    ranks: int = option(16_384, "ranks of the job", low=1, high=1_000_000)
    steps: int = option(200, "steps to simulate", low=2, high=1_000_000)
    base_s: float = option(
        0.180, "mean own work of a healthy rank in a step", unit="s", low=1e-6, high=3600.0
    )
    jitter_frac: float = option(
        0.02, "standard deviation of a rank's own work over its mean; more would make steps negative", low=0.0, high=0.2
    )  # fmt: skip
    slow_ranks: int = option(1, "ranks that are slow in each step", low=0, high=1_000_000)
    slow_factor: float = option(
        420 / 180, "own work of a slow rank over a healthy one's", low=1.0, high=1000.0
    )
    mtbf_s: float = option(
        RANK_MTBF_S, "mean time between the failures of one rank", unit="s", low=1.0, high=1e12
    )
    checkpoint_every_s: float = option(
        0.0, "training time between two checkpoints; 0 takes the best", unit="s", low=0.0, high=1e9
    )  # fmt: skip
    checkpoint_s: float = option(30.0, "time that a checkpoint stops the job", unit="s", low=0.001, high=1e6)
    restart_s: float = option(
        300.0, "time from a failure to the first step of the job that replaces it", unit="s", low=0.0, high=1e6
    )  # fmt: skip
    seed: int = option(0, "seed of the jitter and of the failures", low=0, high=2**31 - 1)

    def __post_init__(self) -> None:
        check_options(self)
        if self.slow_ranks > self.ranks:
            raise ConfigError(
                f"slow_ranks={self.slow_ranks} is more than ranks={self.ranks}; lower it or raise ranks"
            )
        if self.ranks * self.steps > MOST_DRAWS:
            raise ConfigError(
                f"ranks={self.ranks} times steps={self.steps} is more than {MOST_DRAWS} draws; lower steps"
            )

    @property
    def slow(self) -> tuple[int, ...]:
        """The slow ranks, spread evenly: half of ranks for one of them."""
        return tuple(self.ranks * (2 * k + 1) // (2 * self.slow_ranks) for k in range(self.slow_ranks))

    @property
    def job_mtbf_s(self) -> float:
        """Seconds between the failures of the job, mtbf_s / ranks: one rank's failure stops all, failures independent."""
        return self.mtbf_s / self.ranks

    @property
    def best_every_s(self) -> float:
        """The checkpoint interval that Daly's estimate calls the best, seconds."""
        return daly_every_s(self.checkpoint_s, self.job_mtbf_s)

    @property
    def every_s(self) -> float:
        """The checkpoint interval that holds: the given one, or the best."""
        return self.checkpoint_every_s or self.best_every_s


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What `job` loses. predicted: closed forms, the range is what their approximations may be off by. simulated: the
    range is a 95 % confidence interval, but for best_every_s. The same keys in both:

    healthy_step_s, step_s: mean step without and with the slow ranks. jitter_s: healthy_step_s - base_s. slow_s: what
    the slow ranks cost, step_s - healthy_step_s, and lost_rank_s: that times ranks, rank-seconds a step.
    efficiency_frac: base_s / step_s. job_mtbf_s: time between failures of the job. best_every_s: the best training
    time between two checkpoints (simulated: the range holds the tried intervals within half a percent of its goodput,
    and is not-a-number where none keeps anything).
    goodput_frac: share of the wall time that is kept training, checkpoints, restarts and lost work taken off, with
    checkpoints every job.every_s. useful_frac: efficiency_frac × goodput_frac.
    """

    job: Job
    predicted: Mapping[str, Range]
    simulated: Mapping[str, Range]
    assumptions: tuple[str, ...] = (
        "Jitter is normal and independent. Real jitter has a heavier tail, and then costs more; what all ranks share costs less.",
        "Failures are independent, memoryless and seen at once. A switch or a power feed takes many ranks down together.",
        "A slow rank is slow in every step, and nothing hides it: no asynchrony, no backup rank.",
    )
    origin: Origin = "simulated"

    def __str__(self) -> str:
        job, v = self.job, {name: value.expected for name, value in self.simulated.items()}
        slow = f"{job.slow_ranks} slow rank{'s' * (job.slow_ranks != 1)}"
        return (
            f"simulated, {job.ranks} ranks: step {job.base_s * 1e3:.1f} ms, +{v['jitter_s'] * 1e3:.1f} ms by jitter, "
            f"+{v['slow_s'] * 1e3:.1f} ms by {slow} ({v['lost_rank_s']:.1f} rank-seconds a step); a failure every "
            f"{_duration(v['job_mtbf_s'])}, a checkpoint every {_duration(job.every_s)}, "
            f"goodput {v['goodput_frac']:.1%}; useful {v['useful_frac']:.1%}"
        )


def simulate(
    *,
    ranks: int = Job.ranks,
    steps: int = Job.steps,
    base_s: float = Job.base_s,
    jitter_frac: float = Job.jitter_frac,
    slow_ranks: int = Job.slow_ranks,
    slow_factor: float = Job.slow_factor,
    mtbf_s: float = Job.mtbf_s,
    checkpoint_every_s: float = Job.checkpoint_every_s,
    checkpoint_s: float = Job.checkpoint_s,
    restart_s: float = Job.restart_s,
    seed: int = Job.seed,
) -> Simulation:
    """What a job of that many ranks loses; the arguments are the fields of Job. Raises ConfigError on a bad one.

    Takes time in proportion to ranks × steps (about 0.1 s for 16,384 × 200) and at most about 100 MB.
    """
    job = Job(
        ranks=ranks,
        steps=steps,
        base_s=base_s,
        jitter_frac=jitter_frac,
        slow_ranks=slow_ranks,
        slow_factor=slow_factor,
        mtbf_s=mtbf_s,
        checkpoint_every_s=checkpoint_every_s,
        checkpoint_s=checkpoint_s,
        restart_s=restart_s,
        seed=seed,
    )
    rng = np.random.default_rng(seed)
    return Simulation(
        job=job,
        predicted=_whole(job, {**_steps_on_paper(job), **_failures_on_paper(job)}),
        simulated=_whole(job, {**_simulated_steps(job, rng), **_simulated_failures(job, rng)}),
    )


def records(job: Job, *, transfer_s: float = 0.010) -> tuple[Array, Array]:
    """(own, wait), [steps, ranks] seconds each, as `blame` takes them: every step ends with the slowest rank and a
    transfer of `transfer_s` that nobody avoids. The slow ranks are `job.slow`. 16 bytes a rank and step."""
    (own,) = _own(job, np.random.default_rng(job.seed), job.steps)
    own[:, list(job.slow)] *= job.slow_factor
    return own, own.max(1)[:, None] - own + transfer_s


# ---- closed forms
def _steps_on_paper(job: Job) -> dict[str, Range]:
    sigma_s, others = job.base_s * job.jitter_frac, job.ranks - job.slow_ranks
    late_s = sigma_s * expected_max(job.ranks)
    healthy_s = Range(*(job.base_s + late_s * (1 + off) for off in (-BLOM_ERROR_FRAC, 0, BLOM_ERROR_FRAC)))
    if not job.slow_ranks:
        return {"healthy_step_s": healthy_s, "step_s": healthy_s, "slow_s": Range(0.0, 0.0, 0.0)}
    slower = job.slow_factor
    slow_late_s = slower * sigma_s * expected_max(job.slow_ranks)
    step_s = slower * job.base_s + slow_late_s
    if others:
        its_spread_s = slower * sigma_s * spread_of_max(job.slow_ranks)
        first_s = job.base_s + sigma_s * expected_max(others)
        step_s = expected_later(step_s, its_spread_s, first_s, sigma_s * spread_of_max(others))
    off_s = BLOM_ERROR_FRAC * max(late_s, slow_late_s)
    slow_s = step_s - healthy_s.expected
    return {
        "healthy_step_s": healthy_s,
        "step_s": Range(step_s - off_s, step_s, step_s + off_s),
        "slow_s": Range(max(0.0, slow_s - 2 * off_s), slow_s, slow_s + 2 * off_s),
    }


def _failures_on_paper(job: Job) -> dict[str, Range]:
    goodput = goodput_frac(
        job.every_s, job_mtbf_s=job.job_mtbf_s, checkpoint_s=job.checkpoint_s, restart_s=job.restart_s
    )
    exact = {"job_mtbf_s": job.job_mtbf_s, "best_every_s": job.best_every_s, "goodput_frac": goodput}
    return {name: Range(value, value, value) for name, value in exact.items()}


# ---- simulation
def _own(job: Job, rng: np.random.Generator, rows: int) -> Iterator[Array]:
    """Own work of healthy ranks, `rows` steps at a time; the same numbers whatever `rows` is."""
    for first in range(0, job.steps, rows):
        own = rng.standard_normal((min(rows, job.steps - first), job.ranks))
        own *= job.jitter_frac * job.base_s
        own += job.base_s
        yield np.maximum(own, 0.0, out=own)


def _simulated_steps(job: Job, rng: np.random.Generator) -> dict[str, Range]:
    healthy, with_slow = [], []
    for own in _own(job, rng, max(1, CHUNK // job.ranks)):
        healthy.append(own.max(1))
        own[:, list(job.slow)] *= job.slow_factor
        with_slow.append(own.max(1))
    healthy_s, step_s = np.concatenate(healthy), np.concatenate(with_slow)
    return {
        "healthy_step_s": _mean(healthy_s),
        "step_s": _mean(step_s),
        "slow_s": _mean(step_s - healthy_s),
    }


def _mean(values: Array) -> Range:
    """The mean with its 95 % confidence interval."""
    middle, half = float(values.mean()), 1.96 * float(values.std(ddof=1)) / math.sqrt(len(values))
    return Range(middle - half, middle, middle + half)


def _simulated_failures(job: Job, rng: np.random.Generator) -> dict[str, Range]:
    """Every rank fails at its own random times; between two failures of the job there is a restart, then whole
    segments of training and checkpoint, and what was begun after the last one is lost."""
    horizon_s = FAILURES * job.job_mtbf_s
    fails = int(rng.poisson(horizon_s / job.mtbf_s, job.ranks).sum())
    gaps_s = np.diff(np.sort(rng.random(fails))) * horizon_s

    def kept_s(every_s: float) -> Array:
        segments = np.maximum(gaps_s - job.restart_s, 0) // (every_s + job.checkpoint_s)
        return np.asarray(every_s * segments)

    tried_s = job.best_every_s * TRIED
    tried = np.array([kept_s(every_s).sum() for every_s in tried_s])
    flat_s = tried_s[tried >= (1 - FLAT_FRAC) * tried.max()]
    best_s = Range(float(flat_s[0]), float(tried_s[tried.argmax()]), float(flat_s[-1]))
    kept = kept_s(job.every_s)
    goodput = float(kept.sum() / gaps_s.sum())
    off = _mean((kept - goodput * gaps_s) / gaps_s.mean())  # the delta method for a ratio of means
    return {
        "job_mtbf_s": _mean(gaps_s),
        "best_every_s": best_s if tried.any() else Range(math.nan, math.nan, math.nan),
        "goodput_frac": Range(max(0.0, goodput + off.low), goodput, goodput + off.high),
    }


def _duration(seconds: float) -> str:
    """Seconds in the unit that people would say them in."""
    for unit, size_s in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size_s:
            return f"{seconds / size_s:.1f} {unit}"
    return f"{seconds:.1f} s"


def _whole(job: Job, parts: Mapping[str, Range]) -> dict[str, Range]:
    """The parts, and what follows from them."""
    step_s, goodput = parts["step_s"], parts["goodput_frac"]
    efficiency = Range(*(job.base_s / value for value in reversed(step_s)))
    return {
        **parts,
        "jitter_s": Range(*(value - job.base_s for value in parts["healthy_step_s"])),
        "lost_rank_s": Range(*(value * job.ranks for value in parts["slow_s"])),
        "efficiency_frac": efficiency,
        "useful_frac": Range(*(a * b for a, b in zip(efficiency, goodput, strict=True))),
    }
