"""The cache of `tests/data`, for tests that load datasets."""

from tests.data.conftest import cache  # noqa: F401
