"""Leakage of the class into the style, on samples with known leakage."""

import math

import numpy as np
import pytest

from autoencoder.leakage import measure_leakage, mutual_information, variance_ratio

LABELS = np.arange(2000) % 4


def test_mutual_information_equals_closed_form():
    # Two bits, of which b copies a in three of four cases: I = H(b) - H(b | a) = ln 2 - H(1/4).
    a, b = np.array([0, 0, 0, 0, 1, 1, 1, 1]), np.array([0, 0, 0, 1, 1, 1, 1, 0])
    flip = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert mutual_information(a, b) == pytest.approx(math.log(2) - flip)
    assert mutual_information(a, a) == pytest.approx(math.log(2))


def test_independent_style_has_no_leakage():
    styles = np.random.default_rng(0).normal(size=(2000, 3))
    leakage = measure_leakage(styles, LABELS, LABELS)
    assert leakage["mig"] > 0.95
    limits = {"style_information": 0.05, "one_style_probe": 0.08, "all_styles_probe": 0.08, "style_variance": 0.02}
    for name, limit in limits.items():
        assert leakage[name] < limit, name


def test_style_equal_to_class_has_full_leakage():
    styles = np.random.default_rng(0).normal(size=(2000, 3))
    styles[:, 1] = LABELS + 0.01 * styles[:, 1]
    leakage = measure_leakage(styles, LABELS, LABELS)
    assert leakage["mig"] == pytest.approx(0, abs=1e-6), "inferred class and style have equal information"
    assert leakage["style_information"] == pytest.approx(1, abs=1e-6)
    assert leakage["all_styles_probe"] > 0.95
    assert leakage["style_variance"] > 100


def test_mig_is_gap_between_best_two_latent_variables():
    rng = np.random.default_rng(0)
    half = np.stack([LABELS % 2 + 0.01 * rng.normal(size=2000), rng.normal(size=2000)], 1)
    # The class has two bits; the inferred class has both, the first style has one.
    assert measure_leakage(half, LABELS, LABELS)["mig"] == pytest.approx(0.5, abs=0.01)


def test_variance_ratio_equals_closed_form():
    # Means -1 and 1 have variance 1; samples deviate by 0.5 from the mean of their class, with variance 0.25.
    styles = np.array([[-1.5], [-0.5], [0.5], [1.5]])
    assert variance_ratio(styles, np.array([0, 0, 1, 1])) == pytest.approx(4)
