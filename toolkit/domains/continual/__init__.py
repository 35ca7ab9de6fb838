"""Continual learning: one task after another, and what is forgotten."""

from toolkit.callbacks.drift import CumulativeSum, DriftWatch
from toolkit.domains.continual.classification import ClassificationWithinTasks
from toolkit.domains.continual.evaluation import TaskEvaluation
from toolkit.domains.continual.ewc import Consolidation, ElasticWeights, fisher_information
from toolkit.domains.continual.replay import Remember, Replay
from toolkit.domains.continual.scores import AccuracyMatrix
from toolkit.domains.continual.streams import TaskOrder, TaskStream, permuted_stream, rotated_stream, split_stream
from toolkit.domains.continual.training import stream_task, stream_trainer, task_order

__all__ = [
    "AccuracyMatrix",
    "ClassificationWithinTasks",
    "Consolidation",
    "CumulativeSum",
    "DriftWatch",
    "ElasticWeights",
    "Remember",
    "Replay",
    "TaskEvaluation",
    "TaskOrder",
    "TaskStream",
    "fisher_information",
    "permuted_stream",
    "rotated_stream",
    "split_stream",
    "stream_task",
    "stream_trainer",
    "task_order",
]
