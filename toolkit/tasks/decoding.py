"""From the outputs of CTC to labels: the best path, and a beam of prefixes.

Letters: B batch, T steps, V labels, one of which is the blank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

Labels = tuple[int, ...]


def best_path(log_probs: Tensor, steps: Tensor, blank: int) -> list[list[int]]:
    """The most probable label of each step of (B, T, V), repetitions merged, blanks left out."""
    ids = log_probs.argmax(-1)
    repeated = F.pad(ids[:, 1:] == ids[:, :-1], (1, 0))
    within = torch.arange(ids.shape[1], device=ids.device) < steps[:, None]
    kept = within & (ids != blank) & ~repeated
    return [row[keep].tolist() for row, keep in zip(ids.cpu(), kept.cpu(), strict=True)]


def log_probability(log_probs: Tensor, labels: Sequence[int], blank: int) -> float:
    """The log-probability of `labels` given (T, V), summed over all alignments."""
    target = torch.tensor([list(labels)], dtype=torch.long)
    lengths = torch.tensor([len(log_probs)]), torch.tensor([len(labels)])
    return -F.ctc_loss(log_probs[:, None].cpu(), target, *lengths, blank=blank, reduction="sum").item()


def beam_search(log_probs: Tensor, blank: int, beam_size: int) -> tuple[list[int], float]:
    """The most probable labels for (T, V) among those that a beam of prefixes finds, with their log-probability.

    Alignments of the same prefix are one entry, whose probability is their sum (Graves and Jaitly 2014, ICML,
    algorithm 1, without a language model). The best path is a candidate too, so the answer is never less probable.
    """
    log_probs = log_probs.detach().cpu()
    # Prefix -> log-probability of its alignments that end in a blank, and of those that do not.
    beam: dict[Labels, tuple[float, float]] = {(): (0.0, -math.inf)}
    for step in log_probs.tolist():
        grown: dict[Labels, tuple[float, float]] = {}

        def add(prefix: Labels, ends_blank: float, ends_label: float, into: dict[Labels, tuple[float, float]]) -> None:
            before = into.get(prefix, (-math.inf, -math.inf))
            into[prefix] = (_log_add(before[0], ends_blank), _log_add(before[1], ends_label))

        for prefix, (ends_blank, ends_label) in beam.items():
            either = _log_add(ends_blank, ends_label)
            for label, value in enumerate(step):
                if label == blank:
                    add(prefix, either + value, -math.inf, grown)
                elif prefix and label == prefix[-1]:  # goes on, or comes anew after a blank
                    add(prefix, -math.inf, ends_label + value, grown)
                    add((*prefix, label), -math.inf, ends_blank + value, grown)
                else:
                    add((*prefix, label), -math.inf, either + value, grown)
        best = sorted(grown.items(), key=lambda entry: _log_add(*entry[1]), reverse=True)[:beam_size]
        beam = dict(best)
    path = best_path(log_probs[None], torch.tensor([len(log_probs)]), blank)[0]
    # Scored anew, because a beam forgets alignments of prefixes that it dropped on the way.
    scored = {labels: log_probability(log_probs, labels, blank) for labels in {*beam, tuple(path)}}
    labels = max(scored, key=lambda labels: (scored[labels], labels))
    return list(labels), scored[labels]


def _log_add(a: float, b: float) -> float:
    low, high = (a, b) if a < b else (b, a)
    return high if low == -math.inf else high + math.log1p(math.exp(low - high))
