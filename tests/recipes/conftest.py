"""Recipes load data sets: their tests have a cache of their own, as those of `tests/data`."""

from tests.data.conftest import cache  # noqa: F401
