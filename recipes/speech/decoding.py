"""From the outputs of CTC to labels: the best path, and a beam of prefixes, of any words or of a list of them.

Letters: B batch, T steps, V labels, one of which is the blank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Labels = tuple[int, ...]


class Lexicon:
    """The words that are allowed, with one `space` between any two."""

    def __init__(self, words: Iterable[Sequence[int]], space: int):
        self.words = {tuple(word) for word in words}
        self.space = space
        self._next: dict[Labels, set[int]] = {(): set()}
        for word in self.words:
            for length, label in enumerate(word):
                self._next.setdefault(word[:length], set()).add(label)
            self._next.setdefault(word, set()).add(space)

    def last_word(self, labels: Labels) -> Labels:
        """Return the last word's labels."""
        return labels[len(labels) - labels[::-1].index(self.space) :] if self.space in labels else labels

    def next(self, labels: Labels) -> set[int]:
        """Return allowed labels."""
        return self._next[self.last_word(labels)]

    def has(self, labels: Labels) -> bool:
        """Whether `labels` are words of the list, one space between any two."""
        while self.space in labels:
            end = labels.index(self.space)
            if labels[:end] not in self.words:
                return False
            labels = labels[end + 1 :]
        return labels in self.words


def best_path(log_probs: Float[Tensor, "B T V"], steps: Int[Tensor, " B"], blank: int) -> list[list[int]]:
    """Return the best label per step of (B, T, V), repetitions merged, blanks removed."""
    ids = log_probs.argmax(-1)
    repeated = F.pad(ids[:, 1:] == ids[:, :-1], (1, 0))
    within = torch.arange(ids.shape[1], device=ids.device) < steps[:, None]
    kept = within & (ids != blank) & ~repeated
    return [row[keep].tolist() for row, keep in zip(ids.cpu(), kept.cpu(), strict=True)]


def log_probability(log_probs: Float[Tensor, "T V"], labels: Sequence[int], blank: int) -> float:
    """Return log p(`labels`) given (T, V), summed over all alignments."""
    target = torch.tensor([list(labels)], dtype=torch.long)
    lengths = torch.tensor([len(log_probs)]), torch.tensor([len(labels)])
    return -F.ctc_loss(log_probs[:, None].cpu(), target, *lengths, blank=blank, reduction="sum").item()


def beam_search(
    log_probs: Float[Tensor, "T V"], blank: int, beam_size: int, lexicon: Lexicon | None = None
) -> tuple[list[int], float]:
    """Find the most probable labels for (T, V) in a beam of prefixes, with their log-probability.

    Alignments of the same prefix are one entry, whose probability is their sum (Graves and Jaitly 2014, ICML,
    algorithm 1, without a language model). The best path is a candidate too, so the result is never less probable,
    unless a `lexicon` lacks one of its words. The empty text is always allowed.
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
            add(prefix, either + step[blank], ends_label + step[prefix[-1]] if prefix else -math.inf, grown)
            for label in lexicon.next(prefix) if lexicon else range(len(step)):
                if label != blank:  # a label repeats only after a blank
                    before = ends_blank if prefix and label == prefix[-1] else either
                    add((*prefix, label), -math.inf, before + step[label], grown)
        best = sorted(grown.items(), key=lambda entry: _log_add(*entry[1]), reverse=True)[:beam_size]
        beam = dict(best)
    path = best_path(log_probs[None], torch.tensor([len(log_probs)]), blank)[0]
    # Scored again, because a beam loses alignments of the prefixes that it drops.
    found = {labels for labels in {(), *beam, tuple(path)} if lexicon is None or not labels or lexicon.has(labels)}
    scored = {labels: log_probability(log_probs, labels, blank) for labels in found}
    labels = max(scored, key=lambda labels: (scored[labels], labels))
    return list(labels), scored[labels]


def _log_add(a: float, b: float) -> float:
    low, high = (a, b) if a < b else (b, a)
    return high if low == -math.inf else high + math.log1p(math.exp(low - high))
