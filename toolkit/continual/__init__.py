"""Learning one task after another: what is remembered, what is held, what is measured."""

from toolkit.continual.classification import ClassificationWithinTasks
from toolkit.continual.drift import CumulativeSum, DriftWatch
from toolkit.continual.evaluation import TaskEvaluation
from toolkit.continual.ewc import Consolidation, ElasticWeights, fisher_information
from toolkit.continual.memory import Remember, Replay, ReplayMemory
from toolkit.continual.scores import AccuracyMatrix
from toolkit.continual.training import stream_task, stream_trainer, task_order

__all__ = [
    "AccuracyMatrix",
    "ClassificationWithinTasks",
    "Consolidation",
    "CumulativeSum",
    "DriftWatch",
    "ElasticWeights",
    "Remember",
    "Replay",
    "ReplayMemory",
    "TaskEvaluation",
    "fisher_information",
    "stream_task",
    "stream_trainer",
    "task_order",
]
