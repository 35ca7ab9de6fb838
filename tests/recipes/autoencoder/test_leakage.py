"""Leakage of the class into the style, on samples where it is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autoencoder.leakage import measure_leakage, mutual_information, variance_ratio

LABELS = np.arange(2000) % 4


def test_mutual_information_by_hand():
    # Two bits, of which b is a copy in three of four cases: I = H(b) - H(b | a) = ln 2 - H(1/4).
    a, b = np.array([0, 0, 0, 0, 1, 1, 1, 1]), np.array([0, 0, 0, 1, 1, 1, 1, 0])
    flip = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert mutual_information(a, b) == pytest.approx(math.log(2) - flip)
    assert mutual_information(a, a) == pytest.approx(math.log(2))


def test_a_style_that_knows_nothing_of_the_class_leaks_nothing():
    styles = np.random.default_rng(0).normal(size=(2000, 3))
    leakage = measure_leakage(styles, LABELS, LABELS)
    assert leakage["mig"] > 0.95
    assert leakage["style_information"] < 0.05
    assert leakage["one_style_probe"] < 0.08
    assert leakage["all_styles_probe"] < 0.08
    assert leakage["style_variance"] < 0.02


def test_a_style_that_is_the_class_leaks_everything():
    styles = np.random.default_rng(0).normal(size=(2000, 3))
    styles[:, 1] = LABELS + 0.01 * styles[:, 1]
    leakage = measure_leakage(styles, LABELS, LABELS)
    assert leakage["mig"] == pytest.approx(0, abs=1e-6), "the inferred class and the style tell the same"
    assert leakage["style_information"] == pytest.approx(1, abs=1e-6)
    assert leakage["all_styles_probe"] > 0.95
    assert leakage["style_variance"] > 100


def test_the_gap_is_between_the_best_two_latent_variables():
    rng = np.random.default_rng(0)
    half = np.stack([LABELS % 2 + 0.01 * rng.normal(size=2000), rng.normal(size=2000)], 1)
    # The class has two bits; the inferred class tells both of them, the first style one.
    assert measure_leakage(half, LABELS, LABELS)["mig"] == pytest.approx(0.5, abs=0.01)


def test_the_variance_ratio_by_hand():
    # Means -1 and 1: variance 1 between; within each class -+0.5: variance 0.25.
    styles = np.array([[-1.5], [-0.5], [0.5], [1.5]])
    assert variance_ratio(styles, np.array([0, 0, 1, 1])) == pytest.approx(4)
