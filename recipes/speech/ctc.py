"""Connectionist temporal classification of `batch["input"]` into the characters `batch["target"]`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import toolkit as tk
from speech.decoding import Lexicon, beam_search, best_path

if TYPE_CHECKING:
    from jaxtyping import Float, Int


MOST_TRANSCRIPTS = 50


class CTC:
    """The loss in nats per utterance (Graves et al. 2006, ICML, eq. 8), and word and character error rates.

    `decode` turns ids into text. An evaluation takes the best path, or with `beam_size` a beam of prefixes, which a
    `lexicon` may restrict to its words. Errors and words are added up over all utterances and ranks before they are
    divided. `transcripts` has the first pairs of reference and transcript that this rank evaluated.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        blank: int,
        beam_size: int | None = None,
        lexicon: Lexicon | None = None,
    ):
        self.decode, self.blank, self.beam_size, self.lexicon = decode, blank, beam_size, lexicon
        self.transcripts: list[tuple[str, str]] = []
        try:
            import jiwer  # noqa: F401
        except ImportError:
            raise tk.UserError("Word errors are counted by jiwer, which is missing: pip install jiwer.") from None

    def count(self, batch: tk.Batch) -> int:
        return len(batch["target"])

    def loss(self, model: nn.Module, batch: tk.Batch) -> tk.Loss:
        log_probs, steps = model(batch["input"], batch["input_length"])
        # A target that does not fit into its steps makes this infinite, and is not to be passed over in silence.
        return tk.Loss(self._negative_log_likelihood(log_probs, steps, batch), len(batch["target"]))

    def evaluate(self, model: nn.Module, batch: tk.Batch) -> tk.Loss:
        log_probs, steps = model(batch["input"], batch["input_length"])
        nats = self._negative_log_likelihood(log_probs, steps, batch)
        said = [
            self.decode(row[:length].tolist())
            for row, length in zip(batch["target"].cpu(), batch["target_length"].tolist(), strict=True)
        ]
        heard = [self.decode(ids) for ids in self.recognise(log_probs, steps)]
        self.transcripts = [*self.transcripts, *zip(said, heard, strict=True)][:MOST_TRANSCRIPTS]
        sums = {name: torch.tensor(float(n), device=nats.device) for name, n in count_errors(said, heard).items()}
        return tk.Loss(nats, len(said), sums=sums)

    def recognise(self, log_probs: Float[Tensor, "B T V"], steps: Int[Tensor, " B"]) -> list[list[int]]:
        """The ids of each utterance."""
        if self.beam_size is None:
            return best_path(log_probs, steps, self.blank)
        return [
            beam_search(row[:length], self.blank, self.beam_size, self.lexicon)[0]
            for row, length in zip(log_probs, steps.tolist(), strict=True)
        ]

    def summarise(self, means: Mapping[str, Any]) -> dict[str, Any]:
        """Compute error rates from mean errors, words and characters per utterance."""
        return {
            "loss": means["loss"],
            "wer": means["word_errors"] / means["words"],
            "cer": means["character_errors"] / means["characters"],
            "sentence_accuracy": means["correct"],
        }

    def _negative_log_likelihood(self, log_probs: Tensor, steps: Tensor, batch: tk.Batch) -> Tensor:
        if len(log_probs) == 0:
            return log_probs.sum()
        return F.ctc_loss(
            log_probs.transpose(0, 1),
            batch["target"],
            steps,
            batch["target_length"],
            blank=self.blank,
            reduction="sum",
        )


def count_errors(said: Sequence[str], heard: Sequence[str]) -> dict[str, int]:
    """Count substitutions, deletions and insertions of words and characters, and words and characters of the
    references."""
    import jiwer

    counts = dict.fromkeys(("word_errors", "words", "character_errors", "characters", "correct"), 0)
    if not said:
        return counts
    by_word = jiwer.process_words(list(said), list(heard))
    by_character = jiwer.process_characters(list(said), list(heard))
    for errors, total, result in (("word_errors", "words", by_word), ("character_errors", "characters", by_character)):
        counts[errors] = result.substitutions + result.deletions + result.insertions
        counts[total] = result.substitutions + result.deletions + result.hits
    # By words, as jiwer counts: a space after the last one is no error.
    counts["correct"] = sum(a.split() == b.split() for a, b in zip(said, heard, strict=True))
    return counts
