"""Activity recognition from motion sensors."""

from toolkit.domains.activity.activity import ActivityData, load_activity
from toolkit.domains.activity.confusion import ConfusionPicture
from toolkit.domains.activity.model import WindowClassifier, WindowEncoder, load_encoder, view_channels
from toolkit.domains.activity.voting import VotedClassification, class_weights

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
