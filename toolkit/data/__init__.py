"""What a run trains on: tables of tensors, and the order in which their rows are used."""

from toolkit.data.batches import BatchOrder, EvalBatches, TrainBatches
from toolkit.data.blanking import BlankPixels
from toolkit.data.images import ImageData, load_images
from toolkit.data.streams import TaskOrder, TaskStream, permuted_stream, rotated_stream, split_stream
from toolkit.data.table import TensorTable
from toolkit.data.text import TextData, load_text

__all__ = [
    "BatchOrder",
    "BlankPixels",
    "EvalBatches",
    "ImageData",
    "TaskOrder",
    "TaskStream",
    "TensorTable",
    "TextData",
    "TrainBatches",
    "load_images",
    "load_text",
    "permuted_stream",
    "rotated_stream",
    "split_stream",
]
