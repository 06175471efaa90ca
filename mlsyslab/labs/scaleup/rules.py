"""The procedure: one question after the other, each an evidence; it stops at the first thing that is wrong. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mlsyslab.contract import Finding, Rule
from mlsyslab.labs.scaleup.against import lone_norms, normalisation, own_gradients, same_curve
from mlsyslab.labs.scaleup.answers import Answer
from mlsyslab.labs.scaleup.config import SYSTEM
from mlsyslab.labs.scaleup.evidence import Facts
from mlsyslab.labs.scaleup.integrity import (
    another_order,
    own_random_numbers,
    same_gradient,
    same_start,
    same_weights,
    samples_once,
)
from mlsyslab.labs.scaleup.optimiser import (
    critical_batch,
    enough_samples,
    rate_scaled,
    schedule_by_samples,
    stable,
)
from mlsyslab.labs.scaleup.reduction import (
    by_tokens,
    coarse_reduction,
    finite_values,
    mean_of_ranks,
    small_gradients,
    small_updates,
)

OWNER: Mapping[str, str] = {
    **dict.fromkeys(("samples duplicated", "samples skipped", "set_epoch forgotten"), "storage/data"),
    **dict.fromkeys(("gradient missing", "gradient stale"), "networking"),
    **dict.fromkeys(("corrupted rank", "parameters diverge"), "host operations"),
}


def owner_of(cause: str) -> str:
    """Who acts first."""
    if cause in ("healthy", "unknown"):
        return "nobody"
    return OWNER.get(cause, "model code" if cause in SYSTEM else "optimisation")


@dataclass(frozen=True)
class Question:
    """One step of the procedure."""

    name: str
    checks: str
    why: str
    confused_with: str
    next_check: str
    ask: Callable[[Facts], Answer]


QUESTIONS = (
    Question("samples seen once", "sample ids of an epoch, over all ranks", "a duplicate is a smaller batch in disguise, a gap is less data", "padding", "compare the epoch's length with the data set's", samples_once),
    Question("another order each epoch", "fingerprints of the samples of each step", "the same batches again and again are less random", "data in a fixed order on purpose", "print the first ids of two epochs", another_order),
    Question("own random numbers", "the state of each rank's generator", "the same augmentation on all ranks is less data", "generators that nobody uses", "print a random number on each rank", own_random_numbers),
    Question("same initial weights", "checksums before the first step", "ranks that start apart never meet", "seeds that DDP's broadcast makes harmless", "compare rank 0's weights with the others'", same_start),
    Question("same gradient after reduction", "projections of what each optimizer gets", "what is not reduced is trained alone", "shards of FSDP", "print one layer's gradient on all ranks", same_gradient),
    Question("same weights", "checksums after each step", "equal gradients and other weights: the optimizer differs", "gradients that differed before", "compare the optimizers' states", same_weights),
    Question("finite values", "non-finite gradients, before and after reduction", "a format that overflows ruins a sane loss", "divergence", "look whether loss and norm climbed first", finite_values),
    Question("small gradients survive", "zeros among the first gradients", "what is rounded to zero is not learned", "dead units", "raise the loss scale and count again", small_gradients),
    Question("small updates survive", "weights that an update did not change", "bfloat16 keeps three digits", "a tiny learning rate", "keep float32 copies and run again", small_updates),
    Question("precision of the reduction", "whether reduced gradients fit bfloat16", "sums over many ranks lose digits", "float16, scaled", "reduce in float32 once and compare norms", coarse_reduction),
    Question("reduced is the mean of the ranks'", "projections before and after reduction", "names the rank whose part is missing, late or scaled", "clipping between the two", "gather the gradients and add them up", mean_of_ranks),
    Question("mean over tokens", "tokens and losses of the micro-batches", "means of means weigh short samples more", "equal lengths", "divide the summed loss by all tokens", by_tokens),
    Question("own gradient of each rank", "the control's gradient of the same samples", "names the rank that computes something else", "weights that differ since earlier", "let another rank compute the same batch", own_gradients),
    Question("norms of the ranks", "each rank's own norm against the others'", "without a control a factor still shows", "a shard with harder samples", "train a control", lone_norms),
    Question("normalisation", "BatchNorm of each rank against that of the whole batch", "few samples are poor statistics", "buffers that differ, which is normal", "GroupNorm, or synchronised BatchNorm", normalisation),
    Question("same curve at the same global batch", "the control's gradient norms, 20 steps", "the test of the whole system", "random draws", "the same in float64", same_curve),
    Question("schedule by samples", "learning rates of both runs after the same samples", "a schedule in steps is another one at another batch", "a changed schedule", "plot the rate over samples", schedule_by_samples),
    Question("as many samples", "samples seen by both runs", "fewer samples learn less", "fewer steps of larger batches", "count epochs", enough_samples),
    Question("stable", "sharpness against 2 (1 + momentum) / lr", "above it the loss climbs, whatever the noise", "the critical batch", "measure the sharpness after some gentle steps", stable),
    Question("rate scaled with the batch", "learning rates and batches of both runs", "fewer steps have to be longer", "the critical batch", "try the linear rule with warm-up", rate_scaled),
    Question("batch below the critical one", "the gradient noise scale", "beyond it steps are no longer saved", "a rate that could grow", "train longer, or at a smaller batch", critical_batch),
)  # fmt: skip


def finding_of(question: Question, answer: Answer) -> Finding | None:
    """The finding behind an answer that found something."""
    if not answer.cause:
        return None
    return Finding(
        rule=question.name, cause=answer.cause, says=answer.says, evidence=(answer.figure,),
        confused_with=answer.figure.confused_with or question.confused_with,
        next_check=answer.experiment or question.next_check, weight_frac=1.0,
    )  # fmt: skip


def _rule(question: Question) -> Rule[Facts]:
    return Rule(
        name=question.name, checks=question.checks, why=question.why, confused_with=question.confused_with,
        next_check=question.next_check, test=lambda facts: finding_of(question, question.ask(facts)),
    )  # fmt: skip


RULES: tuple[Rule[Facts], ...] = tuple(_rule(question) for question in QUESTIONS)
