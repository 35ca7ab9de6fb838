"""Speech: spoken words as classes or characters, with Legendre memories or attention."""

from speech.audio import LogMel
from speech.characters import Characters
from speech.ctc import CTC
from speech.decoding import Lexicon
from speech.lmu import LMU, ParallelLMU, SequenceClassifier
from speech.model import (
    AttentionEncoder,
    MemoryEncoder,
    SpeechClassifier,
    SpeechRecogniser,
    Standardise,
)
from speech.spec_augment import SpecAugment
from speech.speech import SpeechData, load_speech
from speech.transcribe import Recogniser, save_recogniser

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
