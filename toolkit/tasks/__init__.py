"""Tasks: how a batch becomes a loss."""

from toolkit.tasks.classification import Classification
from toolkit.tasks.ctc import CTC
from toolkit.tasks.decoding import Lexicon
from toolkit.tasks.language_modeling import LanguageModeling
from toolkit.tasks.relaxed_bound import RelaxedBound
from toolkit.tasks.semi_supervised import LabelledOnly, SemiSupervised
from toolkit.tasks.voting import VotedClassification, class_weights

__all__ = [
    "CTC",
    "Classification",
    "LabelledOnly",
    "LanguageModeling",
    "Lexicon",
    "RelaxedBound",
    "SemiSupervised",
    "VotedClassification",
    "class_weights",
]
