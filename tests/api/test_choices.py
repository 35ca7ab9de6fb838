"""Checks of arguments."""

from functools import partial
from typing import Any

import pytest

import toolkit as tk
from toolkit.experts.parallel.groups import ExpertGroups

make_moe = partial(tk.experts.make_moe, dim=8, hidden_dim=4, num_experts=4, top_k=2)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        *((name, make_moe) for name in ("placement", "activation", "recompute")),
        ("placement", partial(tk.experts.shard_experts, make_moe(), ExpertGroups())),
        ("exchange", partial(tk.experts.make_expert_groups, 1)),
    ],
)
def test_unknown_choice_raises(name: str, call: Any) -> None:
    with pytest.raises(tk.UserError, match=rf"^{name}='spiral': take one of \w+(, \w+)+\.$"):
        call(**{name: "spiral"})


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [("dim", 0, 1), ("hidden_dim", 0, 1), ("num_experts", 0, 1), ("dim", 8.0, 1), ("spare_slots", -1, 0)],
)
def test_invalid_size_raises(name: str, value: Any, least: int) -> None:
    with pytest.raises(tk.UserError, match=rf"^{name}={value!r}: take an integer of {least} or more\.$"):
        make_moe(**{name: value})
