"""Text as characters for CTC; spaces are characters too."""

from __future__ import annotations

import itertools
import re
import string
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import toolkit as tk

ENGLISH = f" '{string.ascii_uppercase}"


@dataclass(frozen=True)
class Characters:
    """A vocabulary of single characters; the blank of CTC comes last."""

    vocabulary: str = ENGLISH

    def __post_init__(self) -> None:
        if not self.vocabulary or len(set(self.vocabulary)) < len(self.vocabulary):
            raise tk.UserError(f"vocabulary {self.vocabulary!r}: take every character once.")

    def __len__(self) -> int:
        """Outputs of a model: the characters and the blank."""
        return len(self.vocabulary) + 1

    @property
    def blank(self) -> int:
        return len(self.vocabulary)

    @property
    def space(self) -> int:
        """Id of the space. Raises ValueError if there is none."""
        return self.vocabulary.index(" ")

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {character: i for i, character in enumerate(self.vocabulary)}

    def normalise(self, text: str) -> str:
        """Convert to a transcript: upper case, without accents, one space between words."""
        plain = unicodedata.normalize("NFKD", text.replace("\u2019", "'").upper())
        return " ".join("".join(c for c in plain if not unicodedata.combining(c)).split())

    def encode(self, text: str) -> list[int]:
        """Return character ids of a normalised text. Raises UserError for characters not in the vocabulary."""
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            raise tk.UserError(
                f"{text!r} has the character {error.args[0]!r}, which is not in the vocabulary {self.vocabulary!r}: "
                "use a larger vocabulary, or leave the utterance out."
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.vocabulary[i] for i in ids)

    def unknown(self, text: str) -> set[str]:
        """Return characters of `text` not in `vocabulary`."""
        return set(text) - set(self.vocabulary)


def min_frames(target: Sequence[object]) -> int:
    """Return the steps that CTC needs for `target`: one per id, and a blank between equal neighbours."""
    return len(target) + sum(a == b for a, b in itertools.pairwise(target))


def without_tags(text: str) -> str:
    """Remove GigaSpeech's tags of punctuation and noise, such as <COMMA> and <SIL>."""
    return " ".join(re.sub(r"<[A-Z]+>", " ", text).split())
