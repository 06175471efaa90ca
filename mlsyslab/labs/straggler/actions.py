"""What to do about a slow rank, and the gain that each action promises on the run's own numbers. Pure."""

from __future__ import annotations

from mlsyslab.contract import Action, Finding, Range
from mlsyslab.labs.straggler.evidence import Facts, Loader

BELOW, ABOVE = 0.20, 0.15  # of a promised gain; the next bottleneck is near more often than not
HEAVY = 1.5  # a loader figure that is so many times the others' is what is wrong with it


def kind_of(chosen: Finding, facts: Facts) -> str:
    """What kind of the cause it is."""
    if chosen.rule == "data loader":
        load = facts.load or Loader()
        if facts.phases_s.get("h2d_s", 0.0) > facts.phases_s.get("data_s", 0.0):
            return "transfer"
        if load.read > max(HEAVY, load.cpu) and load.read_frac > 0.5:
            return "storage"
        return "heavier samples" if load.cpu > HEAVY else "starved workers"
    if chosen.rule == "the rank's own work":
        top = max(("forward_s", "backward_s", "optimizer_s"), key=lambda name: facts.phases_s.get(name, 0.0))
        return top.removesuffix("_s")
    return {
        "neighbours": "contention",
        "throttling": "throttled",
        "host work between phases": "pause",
        "network": "slow link",
        "start": "late start",
    }[chosen.rule]


def _promise(facts: Facts, saved_s: float) -> tuple[Range, Range]:
    """Step and gain when `saved_s` of each slow step's excess goes away; never more than replaying it promises."""
    most = facts.blame.gain_frac
    share = min(1.0, saved_s / facts.excess_s) if facts.excess_s > 0 else 0.0
    gain = Range.around(most * share, BELOW, ABOVE)
    gain = Range(gain.low, gain.expected, min(gain.high, 1.0))
    return Range(*(facts.step_s * (1 - value) for value in reversed(gain))), gain


def actions_for(cause: str, kind: str, facts: Facts) -> tuple[Action, ...]:
    """What to do, best first; the host is cordoned where the fault is the host's, mended where it is the input's."""

    def action(name: str, says: str, relief: str, saved_s: float) -> Action:
        step_s, gain = _promise(facts, saved_s)
        return Action(name=name, says=says, change={"relief": relief}, step_s=step_s, gain_frac=gain)

    if not facts.named:
        return _without_a_rank(cause, facts)
    cordon = action(
        "cordon and replace",
        f"cordon the host of rank {facts.named[0]}, put a spare in its place and resume from the last checkpoint",
        "spare host",
        facts.excess_s,
    )
    wait_s = facts.phases_s.get("data_s", 0.0)
    cache = action("cache", "keep its decoded samples on its host", "cache", wait_s)
    # Loading sets the pace of a starved rank: its batch takes as long as its whole round.
    lighter = action(
        "less preprocessing",
        "halve the work on a sample on that host",
        "less preprocessing",
        min(wait_s, (facts.rest_s + wait_s) / 2),
    )
    quieter = action("less contention", "halve what contends with it", "less contention", facts.excess_s / 2)
    if cause == "input":
        return {
            "heavier samples": (cache, lighter, cordon),
            "storage": (cache, cordon),
            "starved workers": (cache, quieter, cordon),
        }.get(kind, (cordon,))
    if cause == "host" and kind in ("contention", "throttled"):
        return cordon, quieter
    if cause == "stage":
        return (
            Action(
                name="move layers",
                says="move layers from the slow stage to the others; no machine is at fault",
            ),
        )
    return (cordon,)


def _without_a_rank(cause: str, facts: Facts) -> tuple[Action, ...]:
    says = {
        "imbalance": "give each rank batches of equal length: sort, bucket or pack the samples; cordon nobody",
        "shared": "look for what all ranks share: file system, network, the last change of the code; cordon nobody",
        "startup": "nothing now; start the job when all hosts are ready, or shorten that host's start",
        "communication": "replace the cable or the card of that host, or take the host out",
    }
    name = {"communication": "cordon and replace"}.get(cause, "no cordon")
    if cause not in says:
        return ()
    change = {"relief": "spare host"} if cause == "communication" else {}
    gain = Range.around(min(1.0, facts.link_adds_s / facts.step_s), BELOW, ABOVE) if change else None
    step_s = Range(*(facts.step_s * (1 - value) for value in reversed(gain))) if gain else None
    return (Action(name=name, says=says[cause], change=change, step_s=step_s, gain_frac=gain),)
