"""Continual learning: one task after another, and what is forgotten."""

from continual.classification import ClassificationWithinTasks
from continual.evaluation import TaskEvaluation
from continual.ewc import Consolidation, ElasticWeights, fisher_information
from continual.scores import AccuracyMatrix
from continual.streams import TaskOrder, TaskStream, permuted_stream, rotated_stream, split_stream
from continual.training import stream_task, task_order
from toolkit.experts.dynamic.coverage import CumulativeSum
from toolkit.train.callbacks.drift import DriftWatch
from toolkit.train.callbacks.remember import Remember, Replay

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
    "task_order",
]
