from tests.integrations.transformers.test_families import MOVED, PLACED, difference
