"""The verdict in words: the sentence, the learner's answer beside it, the figures, the look-alikes, the action. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from mlsyslab.contract import Action, Diagnosis, Evidence, Range
from mlsyslab.teach.panel.words import Quantity


def compare_answer(diagnosis: Diagnosis, answer: Mapping[str, str]) -> list[tuple[str, str, str, bool]]:
    """(part, yours, the library's, whether they agree) for each part that the learner answered."""
    if diagnosis.cause == "unknown" and answer.get("cause") != "unknown":
        answer = {"cause": answer["cause"]} if "cause" in answer else {}
    said = {"cause": diagnosis.cause, "where": diagnosis.where or "nowhere", "owner": diagnosis.owner}
    names = {"cause": "cause", "where": "where", "owner": "who acts first"}
    return [(names[part], mine, said[part], mine == said[part]) for part, mine in answer.items()]


def _section(title: str, texts: Sequence[str], style: str = "") -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<h4>{escape(title)}</h4><ul class="{style}">{items}</ul>' if texts else ""


def _evidence(figures: Sequence[Evidence]) -> list[str]:
    """Figure by figure; sensors that this machine lacks share one line."""
    lines = []
    for figure in figures:
        notes = [f"points at {figure.points_at}" if figure.points_at else ""]
        notes += [f"look-alike: {figure.confused_with}" if figure.confused_with else ""]
        said = "; ".join(note for note in notes if note)
        lines += [f"{figure}{f': {said}' if said else ''}"] if figure.value is not None else []
    absent = [figure.name for figure in figures if figure.value is None]
    return [*lines, f"no sensor here for: {', '.join(absent)}"] if absent else lines


def gain_words(diagnosis: Diagnosis) -> str:
    """Every action with its promise, best first."""
    if not diagnosis.actions:
        return "Nothing to do: no action is promised to help."
    return ". Or: ".join(action_words(action) for action in diagnosis.actions)


def action_words(action: Action) -> str:
    """What to do, and what it promises."""
    gain = action.gain_frac
    name = Quantity.named(action.figure)
    step = f"a {name.label} of {name.show_range(action.step_s)}" if action.step_s else ""
    share = Quantity.named("gain_frac").show_range(gain) if gain else ""
    promises = [f"{share} of {action.of} saved" if share else "", step]
    promised = ", ".join(part for part in promises if part)
    return f"{_capital(action.says).rstrip('.')}{f' (promised: {promised})' if promised else ''}"


def verdict_html(diagnosis: Diagnosis, answer: Mapping[str, str]) -> str:
    """The sentence, the learner's answer beside it, each figure, the look-alikes, the action."""
    figures = list(diagnosis.evidence) or [e for finding in diagnosis.findings for e in finding.evidence]
    alike = [
        f"{f.cause} is easily confused with {f.confused_with}"
        + (f"; to tell: {f.next_check}" if f.next_check else "")
        for f in diagnosis.findings
        if f.confused_with
    ]
    marks = [
        f"{part}: you said {mine}; {'the library agrees' if same else f'the library says {theirs}'}"
        for part, mine, theirs, same in compare_answer(diagnosis, answer)
    ]
    return (
        f'<div class="mls-verdict"><p><b>{escape(str(diagnosis))}</b>. {escape(_capital(diagnosis.reason))}</p>'
        + _section("Your answer", marks)
        + _section("Evidence", _evidence(figures), "mls-columns")
        + _section("Look-alikes", alike)
        + _section("Action", [gain_words(diagnosis)])
        + "</div>"
    )


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def outcome_words(quantity: Quantity, *, before: float, after: float, promised: Range | None) -> str:
    """The gain that came beside the gain that was promised."""
    saved = (before - after) / before if before else 0.0
    came = f"{quantity.label} went from {quantity.show(before)} to {quantity.show(after)} ({saved:.0%} saved)"
    if promised is None:
        return f"{came}; nothing was promised"
    kept = "kept" if after in promised else "better than promised" if after < promised.low else "not kept"
    return f"{came}; promised {quantity.show_range(promised)}: {kept}"
