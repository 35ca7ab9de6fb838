"""What happens between the lines of the training loop; the hooks are drawn in `base`."""

from toolkit.callbacks.base import Callback
from toolkit.callbacks.batch_mask import BatchMask, reference_mask
from toolkit.callbacks.checkpointing import Checkpointing
from toolkit.callbacks.early_stopping import EarlyStopping
from toolkit.callbacks.evaluation import Evaluation
from toolkit.callbacks.preemption import Preemption
from toolkit.callbacks.progress import Progress
from toolkit.callbacks.style_leakage import StyleLeakage
from toolkit.callbacks.throughput import BarrierWait, Throughput

__all__ = [
    "BarrierWait",
    "BatchMask",
    "Callback",
    "Checkpointing",
    "EarlyStopping",
    "Evaluation",
    "Preemption",
    "Progress",
    "StyleLeakage",
    "Throughput",
    "reference_mask",
]
