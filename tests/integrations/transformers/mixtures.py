from tests.integrations.transformers.families import (
    TINY_EXPERTS as EXPERTS,
    VOCAB,
    build,
    outputs,
    moe_families as families,
    supports_float64 as computes_in_float64,
)
