"""From symptoms to causes: the bugs that explain a difference between one process and several.

`RULES` is a table: the quantity whose check fails, a further condition, and the finding. Quantities are in causal
order: weights, outputs, gradients, updates. So the first rule that applies at the earliest step names the cause, and
its consequences are not reported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from toolkit.doctor.compare import GRADIENT_FLOOR, Check, Comparison, Key, apart
from toolkit.doctor.record import GIVEN, SEEN

Facts = dict[str, Any]
"""Values for the words in braces in a rule's symptom and cause."""


@dataclass(frozen=True)
class Finding:
    """A diagnosis."""

    name: str
    """A few words, the same for the same cause."""
    symptom: str
    cause: str
    remedy: str


@dataclass(frozen=True)
class Rule:
    """A row of the table. Words in braces are facts: fields of the quantity's check, and the result of `when`."""

    quantity: str
    name: str
    symptom: str
    cause: str
    remedy: str
    when: Callable[[Comparison, Check], Facts | None] = lambda _, __: {}
    """Function that returns the facts, or None if not applicable."""

    def finding(self, c: Comparison) -> Finding | None:
        """Return the finding, or None if this rule does not apply."""
        check = c[self.quantity]
        facts = self.when(c, check)
        if facts is None:
            return None
        facts = {**vars(check), **facts}
        return Finding(self.name, self.symptom.format(**facts), self.cause.format(**facts), self.remedy)


def diagnose(comparison: Comparison) -> list[Finding]:
    """Return findings that explain the differences, likeliest cause first."""
    failed = [quantity for quantity in QUANTITIES if not comparison[quantity].ok]
    independent = [finding for quantity in failed if quantity not in CHAIN for finding in _first(comparison, quantity)]
    differing = [quantity for quantity in failed if quantity in CHAIN]
    explained = independent and independent[0].name in (REDECIDED, LOST)
    if not differing or explained:
        return independent
    return [*_first(comparison, min(differing, key=lambda quantity: comparison[quantity].step)), *independent]


def _first(comparison: Comparison, quantity: str) -> list[Finding]:
    """Return the finding of the first rule for `quantity` that applies, if any."""
    found = (rule.finding(comparison) for rule in RULES if rule.quantity == quantity)
    return [finding for finding in found if finding is not None][:1]


# --- findings that need no comparison of two runs ------------------------------------------------------------------

REDECIDED, LOST = "router decides otherwise under recomputation", "micro-batch lost"
RATE = "learning rate depends on the world"


recomputed_otherwise = partial(
    Finding,
    REDECIDED,
    cause="the recomputation in the backward pass has other shapes: tokens went to other experts",
    remedy="replay the first decision: use toolkit.experts.layer.recompute.checkpoint, or keep the router outside",
)
"""The finding for a script that fails in activation checkpointing, in several processes only, by its symptom."""
out_of_step = partial(
    Finding,
    "ranks out of step",
    cause="a rank skips a step, has fewer batches, or calls an operation between ranks that the others do not",
    remedy="decide on all ranks together (reduce the decision first), and give all of them the same number of batches",
)
"""The finding for a deadlock of ranks, by its symptom."""
unrepeatable = partial(
    Finding,
    "not repeatable",
    cause="something is drawn without a seed, or depends on time",
    remedy="call accelerate.utils.set_seed first; until then other differences mean nothing",
)
"""The finding for a script that is not deterministic in one process, by its symptom."""


# --- conditions of rules -------------------------------------------------------------------------------------------


def _in_saving(applies: Callable[[Comparison, Check], bool]) -> Callable[[Comparison, Check], Facts | None]:
    # Only one of replicas that differ is saved.
    return lambda c, check: {} if c["replicas on ranks"].ok and applies(c, check) else None


def _equal_samples(c: Comparison, check: Check) -> Facts | None:
    samples = [record.steps[check.step - 1].samples for record in c.many.records]
    return {"world": len(samples)} if len(samples) > 1 and all(s == samples[0] for s in samples) else None


def _in_module(
    applies: Callable[[Comparison, str, str], bool], prefixes: tuple[str, ...] = ("",)
) -> Callable[[Comparison, Check], Facts | None]:
    """Find the first module, of those with `prefixes`, whose recorded values differ at the check's step, if `applies`
    (comparison, name, type) to it."""

    def when(c: Comparison, check: Check) -> Facts | None:
        for name, kind in c.one.first.modules.items():
            one, many = (run.outputs(check.step - 1, name) for run in (c.one, c.many))
            shared = one.keys() & many.keys() if name.startswith(prefixes) else ()
            if any(apart(many[s], one[s]) > max(c.tolerance, check.limit, 1e-5) for s in shared):
                found = {"values": name if name.startswith(GIVEN) else f"output of {name or 'the model'}", "kind": kind}
                return found if applies(c, name, kind) else None
        return None

    return when


def _unfrozen(c: Comparison, check: Check) -> Facts | None:
    late = c.many.unfrozen(check.step - 1)
    differing = _differing(c, check)
    return {} if differing and all(name in late for name, _ in differing) else None


def _unequal_gradients(c: Comparison, check: Check) -> Facts | None:
    unequal = c.many.unequal_gradients(check.step - 1)
    return {"parameter": unequal[0]} if unequal else None


def _scaled(
    applies: Callable[[float, int], bool] = lambda _, __: True,
) -> Callable[[Comparison, Check], Facts | None]:
    """Test that one factor explains all differing gradients, and `applies` (factor, ranks)."""

    def when(c: Comparison, check: Check) -> Facts | None:
        differing = _differing(c, check)
        # A factor explains a difference if it is further from 1 than the tolerated residual.
        unexplained = max(1e-3, 10 * c.tolerance)
        straight = all(rest < unexplained < abs(ratio - 1) for ratio, rest in differing.values())
        ratios = [ratio for ratio, _ in differing.values()]
        if not (straight and ratios and max(ratios) - min(ratios) < 1e-2 * max(ratios)):
            return None
        ratio, world = sum(ratios) / len(ratios), len(c.many.records)
        which = "experts" if all(name in c.split for name, _ in differing) else "parameters"
        facts = {"ratio": ratio, "world": world, "count": len(ratios), "which": which}
        return facts if applies(ratio, world) else None

    return when


def _differing(c: Comparison, check: Check) -> dict[Key, tuple[float, float]]:
    """Return, for each differing gradient, its least-squares ratio to one process, and the residual."""
    one, many = (run.tensors(check.step - 1, "gradient", c.split) for run in (c.one, c.many))
    total = torch.stack([tensor.double().norm() for tensor in one.values()]).norm().item()
    found = {}
    for key in one.keys() & many.keys():
        truth = one[key].double().flatten()
        value = many[key].double().flatten()
        if truth.shape == value.shape and truth.any() and apart(value, truth, GRADIENT_FLOOR * total) > check.limit:
            ratio = float(truth @ value / (truth @ truth))
            found[key] = ratio, apart(value, ratio * truth)
    return found


def _moved(c: Comparison, check: Check) -> Facts | None:
    return {} if c.many.has_moved(check.step) else None


def _moved_with_weights(c: Comparison, check: Check) -> Facts | None:
    weights = c["weights"]
    return vars(weights) if weights.step == check.step and c.many.has_moved(check.step) else None


def _norms(c: Comparison, check: Check) -> Facts:
    norms = c.many.norms(check.step - 1)
    return {"each": ", ".join(f"{norm:.6g}" for norm in norms), "one": c.one.norms(check.step - 1)[0]}


# --- the table -----------------------------------------------------------------------------------------------------

FORWARD = [
    Rule(
        "expert counts",
        "batch statistics of one rank",
        "at step {step}, with equal weights and samples, the runs differ in the {values} ({kind})",
        "batch normalisation sees the samples of its own rank only",
        "use torch.nn.SyncBatchNorm, or a norm that works sample by sample",
        _in_module(lambda _, __, kind: "BatchNorm" in kind),
    ),
    Rule(
        "expert counts",
        "routing depends on the batch of the rank",
        "at step {step}, with equal weights, samples and hidden states, the runs differ in the {values} ({kind})",
        "the router reads other tokens of the rank (a maximum, a mean, a position, a capacity), or draws noise",
        "route each token by its own hidden states, or reduce over all ranks what it depends on",
        _in_module(lambda _, name, __: not name.startswith(GIVEN[0]), GIVEN),
    ),
    Rule(
        "expert counts",
        "wrong inverse permutation",
        "at step {step}, with equal weights and samples, the runs differ in the {values} ({kind})",
        "rows came back from the experts in another order than they were sent, or with others' weights",
        "undo every permutation of dispatch with its inverse, in reverse order",
        _in_module(lambda c, name, _: name in c.one.first.steps[0].counts),
    ),
    Rule(
        "expert counts",
        "forward depends on the rank",
        "at step {step}, with equal weights and samples, the runs differ in the {values} ({kind})",
        "random draws, or an operation over the samples of one rank",
        "make the output of a sample depend on that sample only",
        _in_module(lambda *_: True),
    ),
]
"""Usual causes of different outputs, by type of module; for expert counts, the balance loss, the loss and gradients."""
UNSYNCHRONISED = Rule(
    "replicas on ranks",
    "unsynchronised replica",
    "after step {step}, the ranks have different {place}",
    "replicas on several ranks are updated from different gradients, or not refreshed from their owner",
    "make a toolkit.experts.ExpertSync of the model and its optimizer",
)
LOST_IN_MOVE = Rule(
    "weights",
    "weights lost in a move",
    "after step {step}, in which experts moved, {place} differs by {worst:.1e}",
    "a row was not sent, or written under another id",
    "move experts with toolkit.experts.moving.migrate",
    _moved,
)

RULES = [
    # Faults that a rank sees locally, and losses on save.
    Rule(
        "one routing decision",
        REDECIDED,
        "the forward that activation checkpointing repeats sent tokens elsewhere in {place}",
        "the router draws or reads something that has changed since the first forward (noise, a bias, a counter)",
        "replay the first decision: keep the router outside of the recomputed part, or draw with a preserved seed",
    ),
    Rule(
        "all micro-batches",
        LOST,
        "the gradients of one micro-batch were gone when that of the next began, with no update between them: {place}",
        "gradients are set to zero, or written over, between micro-batches",
        "set them to zero only after the optimizer's step, and let backward add to them",
    ),
    Rule(
        "buffers of ranks",
        "buffer overwritten by broadcast",
        "before a forward pass, ranks lost their changes of {place}",
        "DDP broadcasts rank 0's buffers before each forward",
        "keep counts of a rank in a plain attribute, or reduce them over the ranks first",
    ),
    Rule(
        "parameters in an optimizer",
        "parameter outside the optimizer",
        "no optimizer holds {place}, so it never moves",
        "the optimizer was made before the parameter, or from a part of the model",
        "make the optimizer last, from model.parameters(), or set requires_grad to False",
    ),
    Rule(
        "balance loss in the backward",
        "balance loss without effect",
        "the backward did not reach the {place} that the model returns",
        "it is not part of the loss, or the function that injects its gradient is not part of the graph",
        "add it to the loss, and use the tensor that an autograd function returns",
    ),
    Rule(
        "order of epochs",
        "every epoch in the same order",
        "a {place} went through its data again in the order of the epoch before",
        "the sampler draws its order from the number of the epoch, and was not told that it has changed",
        "call sampler.set_epoch(epoch) before each epoch, or let Accelerate prepare the data loader",
    ),
    Rule(
        "save and load",
        "saving fails",
        "{place}",
        "saving or loading raised an error",
        "see the error",
        _in_saving(lambda c, _: any(record.save_error for record in c.many.records)),
    ),
    Rule(
        "save and load",
        "expert lost on save",
        "after saving and loading, not as before: {place}",
        "only rank 0's rows were written, or rows were loaded by position and not by id",
        "save with Trainer.save, ExpertParallel.save or toolkit.checkpoint.checkpoint, which write rows by their ids",
        _in_saving(lambda _, check: "expert" in check.place),
    ),
    Rule(
        "save and load",
        "state lost on save",
        "after saving and loading, not as before: {place}",
        "not everything was written, or not from all ranks",
        "save with Trainer.save, ExpertParallel.save or toolkit.checkpoint.checkpoint, which write rows by their ids",
        _in_saving(lambda *_: True),
    ),
    # Differences between one process and several.
    Rule(
        "initial weights",
        "initial weights differ",
        "before the first step, {place} differs by {worst:.1e}",
        "weights were drawn in an order, or from a seed, that depends on the number of processes",
        "call accelerate.utils.set_seed before the model is made, and draw each expert from a seed of its own id",
    ),
    Rule(
        "samples",
        "ranks see the same samples",
        "at step {step} all {world} ranks were given the same samples",
        "data are not divided over the ranks: each takes the whole global batch, or draws it from the same seed",
        "let Accelerate prepare the data loader, or use a DistributedSampler",
        _equal_samples,
    ),
    Rule(
        "samples",
        "data order changed",
        "step {step} saw other samples ({place}; {worst:.0%} of them are in one run only)",
        "the order, or how it is cut into batches, depends on the rank or on the number of processes",
        "shuffle from a seed that all ranks share, and let the global batch stay the same size",
    ),
    *FORWARD,
    Rule(
        "expert counts",
        "tokens counted wrongly",
        "at step {step} the experts of {place} were sent other numbers of tokens, from equal inputs",
        "the router decides differently, tokens are dropped, or a forward was counted twice",
        "route by the token only, and count each forward pass once",
    ),
    *(replace(rule, quantity="balance loss") for rule in FORWARD),
    Rule(
        "balance loss",
        "rank-local balance loss",
        "at step {step} the balance loss differs by {worst:.1e}, the counts of experts do not",
        "each rank multiplies the loads and probabilities of its own tokens, and the products have another mean",
        "sum the counts over all ranks before the product, as toolkit.experts.layer.losses.RouterPenalty does",
    ),
    *(replace(rule, quantity="loss") for rule in FORWARD),
    Rule(
        "loss",
        "loss normalised by rank",
        "at step {step} the loss differs by {worst:.1e}, but the model's output does not",
        "each rank divides by its own count of samples or tokens, and these are not equal",
        "divide the sum of all ranks' losses by the count over all ranks",
    ),
    *(replace(rule, quantity="gradients") for rule in FORWARD),
    Rule(
        "gradients",
        "parameter unfrozen after prepare",
        "at step {step} the gradient of {place} differs by {worst:.1e}; it was frozen at first",
        "DDP registers the parameters that are trainable when it wraps the model",
        "unfreeze parameters before the model is prepared, with a learning rate of 0 until they are trained",
        _unfrozen,
    ),
    replace(
        UNSYNCHRONISED,
        quantity="gradients",
        symptom="at step {step} the gradient of {parameter} is not the same on all ranks",
        when=_unequal_gradients,
    ),
    Rule(
        "gradients",
        "gradients W times too large",
        "at step {step} gradients of {count} {which} are {ratio:.4g} times too large",
        "they were summed over {world} ranks and not divided by that number",
        "divide by the number of processes, as toolkit.experts.ExpertSync does",
        _scaled(lambda ratio, world: abs(ratio / world - 1) < 1e-2),
    ),
    Rule(
        "gradients",
        "gradients too small",
        "at step {step} gradients of {count} {which} are scaled by {ratio:.4g}",
        "they were divided twice, or lack the contributions of other ranks' batches",
        "add up the contributions of all ranks, then divide once by the number of processes",
        _scaled(lambda ratio, _: ratio < 1),
    ),
    Rule(
        "gradients",
        "gradients scaled",
        "at step {step} gradients of {count} {which} are scaled by {ratio:.4g}",
        "the loss, or its gradient, has a factor that depends on the number of processes",
        "divide once, by the number of processes or by the count of samples over all ranks",
        _scaled(),
    ),
    Rule(
        "gradients",
        "wrong gradients",
        "at step {step} the gradient of {place} differs by {worst:.1e}",
        "the backward pass of {parameter} lacks or misplaces contributions of other ranks",
        "let every operation between ranks have its transpose in the backward",
        lambda _, check: {"parameter": check.place.partition(" of expert")[0]},
    ),
    Rule(
        "gradient norm",
        "local clip norm",
        "at step {step} gradients are equal, and clipping found norms of {each}, but one process found {one:.6g}",
        "each rank clips by the norm of the gradients it has, without the experts of the others",
        "clip with clip of toolkit.experts.ExpertSync, or after ExpertParallel.prepare with Accelerate's",
        _norms,
    ),
    Rule(
        "learning rate",
        RATE,
        "at step {step} it differs by {worst:.1e}",
        "the rate was scaled by the number of processes, or the schedule made a step for each of them",
        "set the rate for the global batch, and step the schedule once a step",
    ),
    UNSYNCHRONISED,
    replace(LOST_IN_MOVE, quantity="optimizer state", when=_moved_with_weights),
    Rule(
        "optimizer state",
        "stale optimizer row after a move",
        "after step {step}, {place} differs by {worst:.1e}, and in that step experts moved",
        "the weights of an expert moved and its optimizer rows stayed, so another expert's are used",
        "move experts with toolkit.experts.moving.migrate, and give it the optimizer",
        _moved,
    ),
    Rule(
        "optimizer state",
        "optimizer state differs",
        "after step {step}, {place} differs by {worst:.1e}",
        "the optimizer saw other gradients than the averaged and clipped ones",
        "change gradients before the optimizer's step, on all ranks alike",
    ),
    LOST_IN_MOVE,
    Rule(
        "weights",
        "wrong update",
        "after step {step}, {place} differs by {worst:.1e}, from equal gradients and rates",
        "the optimizer updates other rows, or with other settings, than in one process",
        "give every parameter to one optimizer, with the same settings on all ranks",
    ),
]
"""The table, in causal order; of the rules for one quantity the first that applies counts."""
QUANTITIES = tuple(dict.fromkeys(rule.quantity for rule in RULES))
CHAIN = tuple(quantity for quantity in QUANTITIES if quantity not in SEEN and quantity != "save and load")
"""Quantities by which two runs are compared: a difference in one makes all later ones differ."""
