"""The checks of the parallelism lab, each a rule: what it looks at, its look-alike, the next check. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mlsyslab.contract import Evidence, Finding, Rule, format_value
from mlsyslab.labs.parallelism.config import STATE_BYTES, Config, layout_of, stages
from mlsyslab.labs.parallelism.evidence import Facts, link_seconds
from mlsyslab.labs.parallelism.ledger import largest
from mlsyslab.labs.parallelism.predict import BUBBLE_FRAC, COMMUNICATION_FRAC, LINK_FRAC, UNEVEN
from mlsyslab.labs.parallelism.schedule import bubble_frac
from mlsyslab.labs.parallelism.traffic import FP32, comm_bytes, traffic

OWNER: Mapping[str, str] = {
    "memory": "model code",
    "communication": "networking",
    "bubble": "model code",
    "imbalance": "model code",
    "placement": "host operations",
    "healthy": "nobody",
    "unknown": "nobody",
}
WORSE = 1.5  # a placement is wrong when the link has so many times as much to carry as in the other one


def out_of_memory_term(facts: Facts) -> str:
    """What memory ran out for: the term that was being made."""
    oom = facts.oom or {}
    wanted, phase = oom.get("wanted_bytes") or 0, str(oom.get("phase", ""))
    logits = FP32 * facts.layout.micro_batch * facts.layout.seq * facts.config.shape.vocab
    if phase in ("forward", "backward") and wanted and 0.9 * logits <= wanted <= 1.1 * logits:
        return "logits"
    return {"building the model": "params", "forward": "activations", "optimizer": "optimizer"}.get(
        phase, "grads"
    )


def _memory(facts: Facts) -> Finding | None:
    oom = facts.oom
    if oom is None:
        return None
    config, live, cap = facts.config, oom["live"], oom.get("cap_bytes")
    term, wanted = out_of_memory_term(facts), oom.get("wanted_bytes")
    state = (2 * FP32 + STATE_BYTES[config.optimizer]) * config.shape.params
    whole = largest(config.shape, facts.layout)
    words = {"params": "parameters", "grads": "gradients", "optimizer": "optimizer's state"}
    more = "" if wanted is None else f" {format_value(float(wanted), 'bytes')} more"
    capped = "the device's memory" if cap is None else f"a cap of {format_value(float(cap), 'bytes')}"
    says = (
        f"rank {oom['rank']} was refused{more} for the {words.get(term, term)} under {capped}, with "
        f"{format_value(float(live['total']), 'bytes')} live; the whole step needs {format_value(whole.peak_bytes, 'bytes')}, predicted, of which {format_value(whole.state_bytes, 'bytes')} are model state"
    )
    return Finding(
        rule="memory",
        cause="memory",
        says=says,
        weight_frac=1.0,
        evidence=(
            *(Evidence(name=f"live: {role}", value=float(size), unit="bytes", points_at="memory") for role, size in live.items() if role != "total" and size),
            Evidence(name="model state of the whole model", value=state, unit="bytes", origin="predicted"),
            *(Evidence(name=f"the peak's {name}", value=size, unit="bytes", origin="predicted") for name, size in whole.peak.items() if size),
        ),
        confused_with="a leak, which fails some steps later and at a random place; or a fragmented allocator",
        next_check="compare the terms: model state does not depend on the batch, activations and logits do",
    )  # fmt: skip


def _placement(facts: Facts) -> Finding | None:
    config = facts.config
    if not facts.link_s or config.strategy != "fsdp+tp" or not facts.step_s:
        return None
    now_s = sum(facts.link_s.values())
    other = replace(config, tp_across=not config.tp_across)
    then_s = sum(link_seconds(other, traffic(config.shape, facts.layout), facts.backend).values())
    if now_s < WORSE * then_s or now_s < LINK_FRAC * facts.step_s:
        return None
    axis = max(facts.link_s, key=lambda name: facts.link_s[name])
    return Finding(
        rule="placement",
        cause="placement",
        says=f"the {axis} axis crosses the link between the nodes, which needs {now_s * 1e3:.0f} ms a step for it; with the axes "
        f"exchanged it would need {then_s * 1e3:.0f}",
        weight_frac=min(1.0, now_s / facts.step_s),
        evidence=(
            *(Evidence(name=f"link, {name} axis", value=value, unit="s", origin="predicted", points_at="placement") for name, value in facts.link_s.items()),
            Evidence(name="link, axes exchanged", value=then_s, unit="s", origin="predicted"),
            Evidence(name="step", value=facts.step_s, unit="s"),
        ),
        confused_with="a link that is too slow for either placement",
        next_check="exchange the axes: if the step stays as long, it is the link itself",
    )  # fmt: skip


def _stages(facts: Facts) -> Finding | None:
    if not facts.stage_s:
        return None
    mean = sum(facts.stage_s) / len(facts.stage_s)
    worst = max(range(len(facts.stage_s)), key=lambda stage: facts.stage_s[stage])
    if facts.stage_s[worst] < UNEVEN * mean:
        return None
    cut = stages(facts.config.shape, facts.layout)
    return Finding(
        rule="stages",
        cause="imbalance",
        says=f"stage {worst} computes {facts.stage_s[worst] * 1e3:.0f} ms a step, {facts.stage_s[worst] / mean:.1f} times the mean of "
        f"all; it has {cut[worst]} of {sum(cut)} layers, and every other stage waits for it",
        weight_frac=1 - mean / facts.stage_s[worst],
        evidence=tuple(
            Evidence(name=f"CPU time of stage {stage}", value=value, unit="s", points_at="imbalance")
            for stage, value in enumerate(facts.stage_s)
        ),
        confused_with="a slow machine: then the same layers take longer there than elsewhere",
        next_check="divide by the layers: equal seconds a layer mean an uneven split, unequal ones a slow rank",
    )


def _bubble(facts: Facts) -> Finding | None:
    if facts.replay is None or facts.replay.bubble_frac < BUBBLE_FRAC:
        return None
    formula = bubble_frac(facts.layout.pp, facts.layout.microbatches)
    return Finding(
        rule="bubble",
        cause="bubble",
        says=f"with {facts.layout.microbatches} microbatches over {facts.layout.pp} stages a stage has nothing to do during "
        f"{facts.replay.bubble_frac:.0%} of the step; equal stages would give {formula:.0%}",
        weight_frac=facts.replay.bubble_frac,
        evidence=(
            Evidence(name="idle share, schedule replayed with measured microbatches", value=facts.replay.bubble_frac, unit="frac", origin="simulated", points_at="bubble"),
            Evidence(name="(p - 1) / (m + p - 1)", value=formula, unit="frac", origin="predicted"),
        ),
        confused_with="unequal stages, which make idle time that more microbatches do not mend",
        next_check="double the microbatches: a bubble shrinks, an imbalance stays",
    )  # fmt: skip


def _communication(facts: Facts) -> Finding | None:
    share, link = facts.transfer_frac, sum(facts.link_s.values())
    slow_link = facts.step_s is not None and link > COMMUNICATION_FRAC * facts.step_s
    if facts.layout.pp > 1 or share is None or facts.step_s is None:
        return None
    if not slow_link and (facts.crowded or share < COMMUNICATION_FRAC):
        return None
    sent = max(comm_bytes(rows, facts.backend) for rows in facts.sent.values()) if facts.sent else None
    return Finding(
        rule="communication",
        cause="communication",
        says=f"even the rank that waits least waits {share:.0%} of the step, while {format_value(sent, 'bytes')} are sent",
        weight_frac=share,
        evidence=(
            Evidence(name="least wait of a rank", value=share * facts.step_s, unit="s", points_at="communication", confused_with="waiting for another rank"),
            Evidence(name="sent by a rank in a step", value=sent, unit="bytes"),
            *(Evidence(name=f"link, {name} axis", value=value, unit="s", origin="predicted") for name, value in facts.link_s.items()),
        ),
        confused_with="one slow rank: then it waits for nobody itself",
        next_check="double the batch: weights and gradients that are sent stay as many, activations double",
    )  # fmt: skip


RULES: tuple[Rule[Facts], ...] = (
    Rule(name="memory", checks="what was live when memory was refused, and what was wanted", why="the peak must fit, not the state",
         confused_with="a leak", next_check="which term grows with the batch", test=_memory),
    Rule(name="placement", checks="which axis of the mesh crosses the slow link", why="an axis that sends in every layer must not wait for it",
         confused_with="a link too slow for any placement", next_check="exchange the axes", test=_placement),
    Rule(name="stages", checks="CPU time of each pipeline stage", why="a pipeline is as fast as its slowest stage",
         confused_with="a slow machine", next_check="seconds a layer", test=_stages),
    Rule(name="bubble", checks="idle share of the schedule, replayed with measured microbatches", why="a pipeline fills and drains in every step",
         confused_with="unequal stages", next_check="double the microbatches", test=_bubble),
    Rule(name="communication", checks="the least wait of any rank, where ranks have cores of their own", why="what remains when nobody waits for anybody is transfer",
         confused_with="a slow rank", next_check="double the batch", test=_communication),
)  # fmt: skip


def surprises(facts: Facts) -> tuple[Finding, ...]:
    """What a split does besides what it is chosen for, where this run shows it; with the remedy in `next_check`."""
    config, found = facts.config, []

    def note(rule: str, says: str, evidence: tuple[Evidence, ...], remedy: str) -> None:
        found.append(Finding(rule=rule, cause="healthy", says=says, evidence=evidence, next_check=remedy))

    sent = max((comm_bytes(rows, facts.backend) for rows in facts.sent.values()), default=0.0)
    if config.strategy == "zero1" and sent:
        ddp = comm_bytes(traffic(config.shape, layout_of(replace(config, strategy="ddp"))), facts.backend)
        note("ZeRO-1 sends more than DDP", f"ZeRO-1 sends {sent / ddp:.2g} times what DDP does: it all-reduces gradients, then broadcasts each updated parameter",
             (Evidence(name="sent", value=sent, unit="bytes"), Evidence(name="DDP would send", value=ddp, unit="bytes", origin="predicted")),
             "reduce-scatter the gradients instead (FSDP with reshard off)")  # fmt: skip
    held = max(facts.memory.values(), key=lambda of: of["peak_bytes"], default={})
    state = sum(held.get(name, 0.0) for name in ("params_bytes", "grads_bytes", "optimizer_bytes"))
    if config.strategy == "fsdp" and held and held["peak_bytes"] > 3 * state:
        twice = largest(
            config.shape, replace(facts.layout, dp=2 * facts.layout.dp, batch=2 * facts.layout.batch)
        ).peak_bytes
        note("more ranks will hardly help", f"model state is {state / held['peak_bytes']:.0%} of the peak; with twice the ranks and sequences it would still be {format_value(twice, 'bytes')}",
             (Evidence(name="peak", value=held["peak_bytes"], unit="bytes"), Evidence(name="peak with twice the ranks", value=twice, unit="bytes", origin="predicted")),
             "checkpointing, shorter sequences, or fewer of them a rank: activations do not shrink with the ranks")  # fmt: skip
    if facts.layout.tp > 1 and config.tp_plan == "plain":
        counts = next(
            (
                row.count
                for rows in facts.sent.values()
                for row in rows
                if (row.axis, row.kind) == ("tp", "all_reduce")
            ),
            0,
        )
        fewer = next(
            row.count
            for row in traffic(config.shape, replace(facts.layout, tp_plan="shared input"))
            if row.kind == "all_reduce" and row.axis == "tp"
        )
        note("an all-reduce for each matrix", f"{counts} all-reduces a step, where {fewer} would do: q, k, v, gate and up each reduce the gradient of the same input",
             (Evidence(name="all-reduces a step", value=float(counts)),), "tp_plan='shared input'")  # fmt: skip
    if facts.layout.tp > 1 and config.tp_plan == "sharded vocabulary" and config.strategy == "tp":
        whole, part = FP32 * config.shape.vocab_params, FP32 * config.shape.vocab_params / facts.layout.tp
        note("the embedding's gradient is whole", f"the embedding is split to {format_value(part, 'bytes')} a rank, but its gradient comes back whole, {format_value(whole, 'bytes')}",
             (Evidence(name="gradients of the largest rank", value=max((m["grads_bytes"] for m in facts.memory.values()), default=None), unit="bytes"),),
             "FSDP on top cuts it again")  # fmt: skip
    if facts.layout.pp > 1 and config.keep_logits:
        size = FP32 * config.batch * facts.layout.seq * config.shape.vocab
        note("the last stage keeps its logits", f"the last stage holds the logits of all microbatches to the end of the step, {format_value(float(size), 'bytes')}",
             (Evidence(name="logits", value=float(size), unit="bytes", origin="predicted"),), "keep_logits=False")  # fmt: skip
    if facts.layout.pp > 1 and config.clip_norm and config.clip == "local":
        note("each stage clips by its own norm", "each stage scales its gradients by the norm of its own part: the stages' updates are scaled differently",
             (), "clip='global': sum the squared norms over the stages first")  # fmt: skip
    return tuple(found)


def next_simpler(config: Config) -> list[Config]:
    """Other splits over the same ranks, the simplest first."""
    ladder: list[dict[str, object]] = [
        {"strategy": "ddp"}, {"strategy": "zero1"}, {"strategy": "fsdp"},
        {"strategy": "ddp", "checkpointing": True}, {"strategy": "fsdp", "checkpointing": True},
        {"strategy": "tp"}, {"strategy": "pp", "microbatches": config.ranks}, {"strategy": "tp", "checkpointing": True},
    ]  # fmt: skip
    found = []
    for change in ladder:
        try:
            found.append(replace(config, **{"checkpointing": False, "stage_split": (), **change}))  # type: ignore[arg-type]  # values of several fields
        except ValueError:  # this model cannot be split so
            continue
    return [one for one in found if one != config]
