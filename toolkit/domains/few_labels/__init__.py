"""Classifiers of images that learn from few labels and many images without one."""

from toolkit.domains.few_labels.affine import AffineRange
from toolkit.domains.few_labels.classifier import ConvolutionalClassifier, WeightAverage
from toolkit.domains.few_labels.consistency import ConsistencyRegularization
from toolkit.domains.few_labels.views import Views

__all__ = ["AffineRange", "ConsistencyRegularization", "ConvolutionalClassifier", "Views", "WeightAverage"]
