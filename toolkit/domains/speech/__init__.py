"""Speech: spoken words as classes or characters, with Legendre memories or attention."""

from toolkit.domains.speech.audio import LogMel
from toolkit.domains.speech.characters import Characters
from toolkit.domains.speech.ctc import CTC
from toolkit.domains.speech.decoding import Lexicon
from toolkit.domains.speech.lmu import LMU, ParallelLMU, SequenceClassifier
from toolkit.domains.speech.model import (
    AttentionEncoder,
    MemoryEncoder,
    SpeechClassifier,
    SpeechRecogniser,
    Standardise,
)
from toolkit.domains.speech.spec_augment import SpecAugment
from toolkit.domains.speech.speech import SpeechData, load_speech
from toolkit.domains.speech.transcribe import Recogniser, save_recogniser

__all__ = [
    "CTC",
    "LMU",
    "AttentionEncoder",
    "Characters",
    "Lexicon",
    "LogMel",
    "MemoryEncoder",
    "ParallelLMU",
    "Recogniser",
    "SequenceClassifier",
    "SpecAugment",
    "SpeechClassifier",
    "SpeechData",
    "SpeechRecogniser",
    "Standardise",
    "load_speech",
    "save_recogniser",
]
