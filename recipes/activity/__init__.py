"""Activity recognition from motion sensors."""

from activity.activity import ActivityData, load_activity
from activity.confusion import ConfusionPicture
from activity.model import WindowClassifier, WindowEncoder, load_encoder, view_channels
from activity.voting import VotedClassification, class_weights

__all__ = [
    "ActivityData",
    "ConfusionPicture",
    "VotedClassification",
    "WindowClassifier",
    "WindowEncoder",
    "class_weights",
    "load_activity",
    "load_encoder",
    "view_channels",
]
