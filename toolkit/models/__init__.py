"""Models: single-device code, one family per file."""

from toolkit.models.lmu import LMU, ParallelLMU, SequenceClassifier
from toolkit.models.mlp import MLP, Pixels, ResidualClassifier
from toolkit.models.relaxed_vae import RelaxedVAE
from toolkit.models.speech import AttentionEncoder, MemoryEncoder, SpeechClassifier, SpeechRecogniser, Standardise
from toolkit.models.vae import SemiSupervisedVAE
from toolkit.models.windows import WindowClassifier, WindowEncoder, load_encoder, view_channels

__all__ = [
    "LMU",
    "MLP",
    "AttentionEncoder",
    "MemoryEncoder",
    "ParallelLMU",
    "Pixels",
    "RelaxedVAE",
    "ResidualClassifier",
    "SemiSupervisedVAE",
    "SequenceClassifier",
    "SpeechClassifier",
    "SpeechRecogniser",
    "Standardise",
    "WindowClassifier",
    "WindowEncoder",
    "load_encoder",
    "view_channels",
]
