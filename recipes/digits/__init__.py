"""Classifiers of images that learn from few labels and many images without one."""

from digits.affine import AffineRange
from digits.classifier import ConvolutionalClassifier, WeightAverage
from digits.consistency import ConsistencyRegularization
from digits.views import Views

__all__ = ["AffineRange", "ConsistencyRegularization", "ConvolutionalClassifier", "Views", "WeightAverage"]
