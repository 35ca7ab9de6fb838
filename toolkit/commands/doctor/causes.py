"""From symptoms to causes: what a difference between one process and several means for the script.

A rule looks at a `Comparison` and returns a `Finding` or nothing. Rules are in causal order: weights come before
outputs, those before gradients, those before updates. So the first that applies at the earliest step names the cause,
and what follows from it is not named.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from toolkit.commands.doctor.compare import GRADIENT_FLOOR, Comparison, apart
from toolkit.commands.doctor.evidence import Key
from toolkit.commands.doctor.finding import LOST, OVERWRITTEN, REDECIDED, SEEN, Finding

Rule = Callable[[Comparison], Finding | None]


def diagnose(comparison: Comparison) -> list[Finding]:
    """What explains the differences, likeliest cause first; empty where there are none."""
    independent = [finding for rule in INDEPENDENT if (finding := rule(comparison))]
    differing = [quantity for quantity in CHAIN if not comparison[quantity].ok]
    explained = independent and independent[0].name in (OVERWRITTEN, REDECIDED, LOST)
    if not differing or explained:
        return independent
    return [CHAIN[min(differing, key=lambda quantity: comparison[quantity].step)](comparison), *independent]


# --- faults that are found without comparing the two runs ----------------------------------------------------------


def _seen(quantity: str, c: Comparison) -> Finding | None:
    _, name, symptom, cause, remedy = SEEN[quantity]
    return None if c[quantity].ok else Finding(name, symptom.format(c[quantity].where), cause, remedy)


def _save(c: Comparison) -> Finding | None:
    check = c["save and load"]
    if check.ok or not c["replicas on ranks"].ok:  # of replicas that differ only one is saved
        return None
    if any(record.save_error for record in c.many.records):
        return Finding("saving fails", check.where, "saving or loading raised an error", "see the error")
    expert = "expert" in check.where
    return Finding(
        "expert lost on save" if expert else "state lost on save",
        f"after saving and loading, not as before: {check.where}",
        "only rank 0's rows were written, or rows were loaded by position and not by id"
        if expert
        else "not everything was written, or not from all ranks",
        "save with Trainer.save, ExpertParallel.save or toolkit.checkpoint.checkpoint, which write rows by their ids",
    )


INDEPENDENT: list[Rule] = [*(functools.partial(_seen, quantity) for quantity in SEEN), _save]


# --- faults that are recognised by what differs first --------------------------------------------------------------


def _initial(c: Comparison) -> Finding:
    check = c["initial weights"]
    return Finding(
        "initial weights differ",
        f"before the first step, {check.where} differs by {check.worst:.1e}",
        "weights were drawn in an order, or from a seed, that depends on the number of processes",
        "call accelerate.utils.set_seed before the model is made, and draw each expert from a seed of its own id",
    )


def _samples(c: Comparison) -> Finding:
    check = c["samples"]
    if len(c.many.records) > 1 and c.many.have_equal_samples(check.step - 1):
        return Finding(
            "ranks see the same samples",
            f"at step {check.step} all {len(c.many.records)} ranks were given the same samples",
            "data are not divided over the ranks: each takes the whole global batch, or draws it from the same seed",
            "let Accelerate prepare the data loader, or use a DistributedSampler",
        )
    return Finding(
        "data order changed",
        f"step {check.step} saw other samples ({check.where}; {check.worst:.0%} of them are in one run only)",
        "the order, or how it is cut into batches, depends on the rank or on the number of processes",
        "shuffle from a seed that all ranks share, and let the global batch stay the same size",
    )


def _counts(c: Comparison) -> Finding:
    check = c["expert counts"]
    return _forward(c, check.step) or Finding(
        "tokens counted wrongly",
        f"at step {check.step} the experts of {check.where} were sent other numbers of tokens, from equal inputs",
        "the router decides differently, tokens are dropped, or a forward was counted twice",
        "route by the token alone, and count each forward once",
    )


def _balance(c: Comparison) -> Finding:
    check = c["balance loss"]
    return Finding(
        "rank-local balance loss",
        f"at step {check.step} the balance loss differs by {check.worst:.1e}, the counts of experts do not",
        "each rank multiplies the loads and probabilities of its own tokens, and the mean of those is another loss",
        "sum the counts over all ranks before the product, as toolkit.experts.layer.losses.RouterPenalty does",
    )


def _loss(c: Comparison) -> Finding:
    check = c["loss"]
    return _forward(c, check.step) or Finding(
        "loss normalised by rank",
        f"at step {check.step} the loss differs by {check.worst:.1e}, what the model returns does not",
        "each rank divides by its own count of samples or tokens, and these are not equal",
        "divide the sum of all ranks' losses by the count over all ranks",
    )


def _forward(c: Comparison, step: int) -> Finding | None:
    """The first module whose output differs at the first step, and what usually causes that in such a module."""
    if step != 1:
        return None
    for name, kind in c.one.first.modules:
        one = c.one.outputs(name)
        many = c.many.outputs(name)
        shared = one.keys() & many.keys()
        if not any(apart(many[s], one[s]) > max(c.tolerance, 1e-5) for s in shared):
            continue
        symptom = f"with equal weights and samples, {name or 'the model'} ({kind}) returns something else"
        if "BatchNorm" in kind:
            return Finding(
                "batch statistics of one rank",
                symptom,
                "batch normalisation sees the samples of its own rank only",
                "use torch.nn.SyncBatchNorm, or a norm that works sample by sample",
            )
        if name in c.one.first.steps[0].counts:
            return Finding(
                "wrong inverse permutation",
                symptom,
                "rows came back from the experts in another order than they were sent, or with others' weights",
                "undo every permutation of dispatch with its inverse, in reverse order",
            )
        return Finding(
            "forward depends on the rank",
            symptom,
            "random draws, or an operation over the samples of one rank",
            "make the output for a sample depend on that sample alone",
        )
    return None


def _gradients(c: Comparison) -> Finding:
    check = c["gradients"]
    world = len(c.many.records)
    step = check.step - 1
    ratios = _ratios(c, step)
    differing = {key: ratio for key, (ratio, rest, distance) in ratios.items() if distance > check.limit}
    late = c.many.unfrozen(step)
    if differing and all(name in late for name, _ in differing):
        return Finding(
            "parameter unfrozen after prepare",
            f"at step {check.step} the gradient of {check.where} differs by {check.worst:.1e}; it was frozen at first",
            "what averages gradients over ranks looks at the model once, and takes up what is trainable then",
            "unfreeze parameters before the model is prepared, and keep those that are to wait at a rate of 0",
        )
    if unequal := c.many.unequal_gradients(step):
        return _unsynchronised(f"at step {check.step} the gradient of {unequal[0]} is not the same on all ranks")
    # A factor explains what differs where it is further from 1 than what it leaves unexplained may be.
    unexplained = max(1e-3, 10 * c.tolerance)
    straight = all(ratios[key][1] < unexplained < abs(ratio - 1) for key, ratio in differing.items())
    which = "experts" if all(name in c.split for name, _ in differing) else "parameters"
    symptom = f"at step {check.step} the gradient of {check.where} differs by {check.worst:.1e}"
    if straight and differing and max(differing.values()) - min(differing.values()) < 1e-2 * max(differing.values()):
        ratio = sum(differing.values()) / len(differing)
        symptom = (
            f"at step {check.step} gradients of {len(differing)} {which} are {ratio:.4g} times what they should be"
        )
        if abs(ratio / world - 1) < 1e-2:
            return Finding(
                "gradients W times too large",
                symptom,
                f"they were summed over {world} ranks and not divided by that number",
                "divide by the number of processes: toolkit.experts.parallel.gradients.average_owned_gradients",
            )
        if ratio < 1:
            return Finding(
                "gradients too small",
                symptom,
                "they were divided twice, or lack what other ranks' batches contribute",
                "add up the contributions of all ranks, then divide once by the number of processes",
            )
        return Finding(
            "gradients scaled",
            symptom,
            "the loss, or its gradient, is multiplied by what depends on the number of processes",
            "divide once, by the number of processes or by the count of samples over all ranks",
        )
    return Finding(
        "wrong gradients",
        symptom,
        f"the backward of {check.where.partition(' of expert')[0]} misses or misplaces what other ranks contribute",
        "let every operation between ranks have its transpose in the backward",
    )


def _ratios(c: Comparison, step: int) -> dict[Key, tuple[float, float, float]]:
    """For each gradient: its least-squares ratio to that of one process, the distance beside it, and the distance."""
    one = c.one.tensors(step, "gradient", c.split)
    many = c.many.tensors(step, "gradient", c.split)
    total = torch.stack([tensor.double().norm() for tensor in one.values()]).norm().item()
    ratios = {}
    for key in one.keys() & many.keys():
        truth = one[key].double().flatten()
        value = many[key].double().flatten()
        if truth.shape == value.shape and truth.any():
            ratio = float(truth @ value / (truth @ truth))
            ratios[key] = ratio, apart(value, ratio * truth), apart(value, truth, GRADIENT_FLOOR * total)
    return ratios


def _norm(c: Comparison) -> Finding:
    check = c["gradient norm"]
    norms = c.many.norms(check.step - 1)
    each = ", ".join(f"{norm:.6g}" for norm in norms)
    return Finding(
        "local clip norm",
        f"at step {check.step} gradients are equal, and clipping found norms of {each} where one process found "
        f"{c.one.norms(check.step - 1)[0]:.6g}",
        "each rank clips by the norm of the gradients it has, without the experts of the others",
        "clip with toolkit.experts.parallel.gradients.clip_grad_norm_, or after ExpertParallel.prepare with Accelerate's",
    )


def _rates(c: Comparison) -> Finding:
    return Finding(
        "learning rate depends on the world",
        f"at step {c['learning rate'].step} it differs by {c['learning rate'].worst:.1e}",
        "the rate was scaled by the number of processes, or the schedule made a step for each of them",
        "set the rate for the global batch, and step the schedule once a step",
    )


def _unsynchronised(symptom: str) -> Finding:
    return Finding(
        "unsynchronised replica",
        symptom,
        "replicas on several ranks are updated from different gradients, or not refreshed from their owner",
        "call average_owned_gradients before the update and refresh_replicas after it, of toolkit.experts.parallel.gradients",
    )


def _replicas(c: Comparison) -> Finding:
    check = c["replicas on ranks"]
    return _unsynchronised(f"after step {check.step}, the ranks have different {check.where}")


def _weights(c: Comparison) -> Finding:
    check = c["weights"]
    if c.many.has_moved(check.step):
        return _lost_in_move(c)
    return Finding(
        "wrong update",
        f"after step {check.step}, {check.where} differs by {check.worst:.1e}, from equal gradients and rates",
        "the optimizer updates other rows, or with other settings, than in one process",
        "give every parameter to one optimizer, with the same settings on all ranks",
    )


def _lost_in_move(c: Comparison) -> Finding:
    check = c["weights"]
    return Finding(
        "weights lost in a move",
        f"after step {check.step}, in which experts moved, {check.where} differs by {check.worst:.1e}",
        "a row was not sent, or written under another id",
        "move experts with toolkit.experts.moving.migrate",
    )


def _state(c: Comparison) -> Finding:
    check = c["optimizer state"]
    symptom = f"after step {check.step}, {check.where} differs by {check.worst:.1e}"
    if c.many.has_moved(check.step):
        if c["weights"].step == check.step:
            return _lost_in_move(c)
        return Finding(
            "stale optimizer row after a move",
            f"{symptom}, and in that step experts moved",
            "the weights of an expert moved and its optimizer rows stayed, so another expert's are used",
            "move experts with toolkit.experts.moving.migrate, and give it the optimizer",
        )
    return Finding(
        "optimizer state differs",
        symptom,
        "the optimizer saw other gradients than those that were averaged and clipped",
        "change gradients before the optimizer's step, on all ranks alike",
    )


CHAIN: dict[str, Callable[[Comparison], Finding]] = {
    "initial weights": _initial,
    "samples": _samples,
    "expert counts": _counts,
    "balance loss": _balance,
    "loss": _loss,
    "gradients": _gradients,
    "gradient norm": _norm,
    "learning rate": _rates,
    "replicas on ranks": _replicas,
    "optimizer state": _state,
    "weights": _weights,
}
