"""What a run trains on: tables of tensors, and the order in which their rows are used."""

from toolkit.data.activity import ActivityData, load_activity
from toolkit.data.audio import LogMel
from toolkit.data.batches import BatchOrder, EvalBatches, TrainBatches
from toolkit.data.blanking import BlankPixels
from toolkit.data.characters import Characters
from toolkit.data.images import ImageData, load_images
from toolkit.data.labels import FewLabels, balanced_rows, with_noise
from toolkit.data.ragged import BucketedOrder, RaggedColumn, RaggedTable
from toolkit.data.spec_augment import SpecAugment
from toolkit.data.speech import SpeechData, load_speech
from toolkit.data.streams import TaskOrder, TaskStream, permuted_stream, rotated_stream, split_stream
from toolkit.data.table import TensorTable
from toolkit.data.text import TextData, load_text

__all__ = [
    "ActivityData",
    "BatchOrder",
    "BlankPixels",
    "BucketedOrder",
    "Characters",
    "EvalBatches",
    "FewLabels",
    "ImageData",
    "LogMel",
    "RaggedColumn",
    "RaggedTable",
    "SpecAugment",
    "SpeechData",
    "TaskOrder",
    "TaskStream",
    "TensorTable",
    "TextData",
    "TrainBatches",
    "balanced_rows",
    "load_activity",
    "load_images",
    "load_speech",
    "load_text",
    "permuted_stream",
    "rotated_stream",
    "split_stream",
    "with_noise",
]
