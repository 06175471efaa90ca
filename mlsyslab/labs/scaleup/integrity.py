"""The questions that one run answers about its data and its ranks. Pure."""

from __future__ import annotations

import numpy as np

from mlsyslab.contract import Evidence
from mlsyslab.labs.scaleup.answers import (
    DUPLICATE_FRAC,
    GATE_STEPS,
    PROBE_FRAC,
    SEED_CAUSE,
    Answer,
    minority,
    place_of,
)
from mlsyslab.labs.scaleup.evidence import Facts


def samples_once(facts: Facts) -> Answer:
    """Duplicates and gaps in the first epoch, of which every id was written down."""
    part = facts.large
    first = [s for s in range(part.steps) if part.epochs[s] == 0 and part.ids(s, part.ranks[0]) is not None]
    drawn: list[int] = []
    halfway = twice = 0
    for at, step in enumerate(first):
        for rank in part.ranks:
            drawn += part.ids(step, rank) or []
        if at <= len(first) // 2:
            halfway = len(drawn)
            twice = halfway - len(set(drawn))
    repeated = len(drawn) - len(set(drawn))
    value = repeated / len(drawn) if drawn else None
    figure = Evidence(name="samples drawn more than once in an epoch", value=value, unit="frac", points_at="samples duplicated",
                      confused_with="a sampler that pads the last shard: fewer than one a rank")  # fmt: skip
    if not drawn:
        return Answer(figure)
    if twice > max(DUPLICATE_FRAC * halfway, len(part.ranks)):
        says = f"{twice} of the first {halfway} samples had been drawn before in the same epoch: the ranks do not share the data out"
        return Answer(figure, "samples duplicated", None, says)
    return _skipped(facts, figure)


def _skipped(facts: Facts, figure: Evidence) -> Answer:
    """Ranks that draw other samples than their share of the control, or an epoch in which whole batches are missing."""
    part, control = facts.large, facts.control
    if control is not None and control.ranks == part.ranks and control.batch == part.batch:
        many = min(part.steps, control.steps)
        other = part.get("ids_hash")[:many] != control.get("ids_hash")[:many]
        other &= np.isfinite(part.get("ids_hash")[:many])
        share = other.mean(axis=0)
        strayed = [r for r, frac in zip(part.ranks, share, strict=True) if frac > 0.1]
        if strayed and len(strayed) < len(part.ranks):
            begin = int(np.argmax(other[:, part.ranks.index(strayed[0])]))
            says = (
                f"rank {strayed[0]} draws other samples than its share from step {begin} on: its shard is shorter, so it begins "
                "epochs early, and what it has not drawn is skipped"
            )
            return Answer(figure, "samples skipped", place_of(strayed), says)
    size = part.header.get("samples")
    later = [e for e in sorted(set(part.epochs.tolist()))[:3] if (part.epochs == e).sum() > 1]
    for epoch in later:
        steps = [s for s in range(part.steps) if part.epochs[s] == epoch]
        drawn = {i for s in steps for r in part.ranks for i in (part.ids(s, r) or [])}
        whole = bool(drawn) and steps[-1] + 1 < part.steps  # an epoch that was seen to its end
        if size and whole and size - len(drawn) > part.batch:
            says = f"{size - len(drawn)} of {size} samples were not drawn in epoch {epoch}, more than a batch"
            return Answer(figure, "samples skipped", None, says)
    return Answer(figure)


def another_order(facts: Facts) -> Answer:
    """Whether the second epoch's steps hold the first epoch's samples."""
    part = facts.large
    hashes, epochs = part.get("ids_hash"), part.epochs
    first, second = (np.flatnonzero(epochs == e) for e in (0, 1))
    many = min(len(first), len(second))
    name = "steps of the second epoch that repeat the first"
    if not many or many * len(part.ranks) < 2 or not np.isfinite(hashes[first[:many]]).all():
        return Answer(Evidence(name=name, value=None, unit="frac", points_at="set_epoch forgotten"))
    same = float((hashes[first[:many]] == hashes[second[:many]]).all(axis=1).mean())
    figure = Evidence(name=name, value=same, unit="frac", points_at="set_epoch forgotten",
                      confused_with="data that is not shuffled on purpose")  # fmt: skip
    if same < 0.5:
        return Answer(figure)
    says = f"{same:.0%} of the second epoch's steps hold exactly the samples of the first epoch's: the order does not change"
    return Answer(figure, "set_epoch forgotten", None, says)


def own_random_numbers(facts: Facts) -> Answer:
    """Whether ranks that draw random numbers draw the same ones."""
    part = facts.large
    name = "steps in which all ranks draw the same random numbers"
    if len(part.ranks) == 1 or not part.draws:
        return Answer(
            Evidence(
                name=name, value=None if len(part.ranks) == 1 else 0.0, unit="frac", points_at=SEED_CAUSE
            )
        )
    states = part.get("rng_crc")
    alike = float((states == states[:, :1]).all(axis=1).mean())
    figure = Evidence(name=name, value=alike, unit="frac", points_at=SEED_CAUSE,
                      confused_with="random numbers that nothing uses")  # fmt: skip
    if alike < 0.5:
        return Answer(figure)
    says = "all ranks' generators are in the same state, and their steps draw from them: augmentation and dropout are alike"
    return Answer(figure, SEED_CAUSE, None, says)


def same_start(facts: Facts) -> Answer:
    """Whether all ranks hold the same weights before the first step."""
    part = facts.large
    crcs = part.get("start_crc")[0]
    name = "different initial weights among the ranks"
    if not np.isfinite(crcs).all():
        return Answer(Evidence(name=name, value=None))
    kinds = len(set(crcs.tolist()))
    figure = Evidence(name=name, value=float(kinds - 1), points_at="ranks start with different weights",
                      confused_with="seeds that differ under DDP, which broadcasts rank 0's weights")  # fmt: skip
    if kinds == 1:
        return Answer(figure)
    says = f"before the first step the {len(part.ranks)} ranks hold {kinds} different sets of weights"
    return Answer(figure, "ranks start with different weights", minority(part, crcs.tolist()), says)


def same_gradient(facts: Facts) -> Answer:
    """Whether the optimizers of all ranks get the same gradient."""
    part = facts.large
    if len(part.ranks) == 1:
        return Answer(Evidence(name="ranks' gradients apart after the reduction, relative", value=None))
    apart = part.spread("probe")
    value = float(apart[: 2 * GATE_STEPS].max(initial=0.0))
    figure = Evidence(name="ranks' gradients apart after the reduction, relative", value=value,
                      points_at="gradients not synchronised", confused_with="shards of FSDP, which differ rightly")  # fmt: skip
    if value < PROBE_FRAC or not np.isfinite(part.get("param_crc")).any():
        return Answer(figure)
    at = int(np.argmax(apart > PROBE_FRAC))
    bad = [r for i, r in enumerate(part.ranks) if np.linalg.norm(part.get("probe")[at, i] - np.median(part.get("probe")[at], axis=0)) > PROBE_FRAC * np.linalg.norm(part.get("probe")[at, i])]  # fmt: skip
    says = f"from step {at} on the ranks' optimizers get different gradients: they are not reduced, or not all of them"
    return Answer(figure, "gradients not synchronised", place_of(bad) if len(part.ranks) > 2 else None, says)


def same_weights(facts: Facts) -> Answer:
    """Whether all ranks hold the same weights after each step; the rank that does not."""
    part = facts.large
    crcs = part.get("param_crc")
    name = "steps after which the ranks' weights differ"
    if part.alone:
        step, rank = part.alone[0]
        figure = Evidence(name=name, value=1.0, unit="frac", points_at="parameters diverge")
        says = (
            f"rank {rank} made step {step} with its own gradient alone, while the others waited for it in the reduction: a parameter "
            "that it did not use kept its gradients from being sent"
        )
        return Answer(figure, "parameters diverge", f"rank {rank}", says)
    if len(part.ranks) == 1 or not np.isfinite(crcs).all():
        return Answer(Evidence(name=name, value=None, unit="frac"))
    differ = (crcs != crcs[:, :1]).any(axis=1)
    figure = Evidence(name=name, value=float(differ.mean()), unit="frac", points_at="parameters diverge",
                      confused_with="gradients that differ already")  # fmt: skip
    if not differ.any():
        return Answer(figure)
    at = int(np.argmax(differ))
    still = [r for r, moved in zip(part.ranks, part.get("update_frac")[at], strict=True) if moved == 0]
    where = place_of(still) or minority(part, crcs[at].tolist())
    if where is None and facts.control is not None and at < facts.control.steps:
        off = np.abs(part.get("param_norm")[at + 1 :][:1] - facts.control.get("param_norm")[at + 1 :][:1, :1])
        where = f"rank {part.ranks[int(np.argmax(off[0]))]}" if off.size and off.max() > 0 else None
    says = f"gradients agree, and still the weights differ after step {at}{f': {where} did not make the step' if still else ''}"
    return Answer(figure, "parameters diverge", where, says)
