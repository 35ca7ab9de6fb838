"""A word that is none of an argument's choices is refused in one sentence, by functions and by options alike; so is a
size that cannot be."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import toolkit as tk
from toolkit.experts.parallel.groups import ExpertGroups

FUNCTIONS: list[tuple[str, Callable[..., Any]]] = [
    ("placement", partial(tk.experts.make_moe, 8, 4, 4, 2)),
    ("activation", partial(tk.experts.make_moe, 8, 4, 4, 2)),
    ("recompute", partial(tk.experts.make_moe, 8, 4, 4, 2)),
    ("placement", partial(tk.experts.shard_experts, tk.experts.make_moe(8, 4, 4, 2), ExpertGroups())),
    ("exchange", partial(tk.experts.make_expert_groups, 1)),
]


@pytest.mark.parametrize(("name", "call"), FUNCTIONS)
def test_a_function_takes_one_of_its_words(name: str, call: Callable[..., Any]) -> None:
    with pytest.raises(tk.UserError, match=rf"^{name}='spiral': take one of \w+(, \w+)+\.$"):
        call(**{name: "spiral"})


LAYER = {"dim": 8, "hidden_dim": 4, "num_experts": 4, "top_k": 2}


@pytest.mark.parametrize(
    ("name", "value", "call"),
    [
        *((name, 0, partial(tk.experts.make_moe, **LAYER)) for name in ("dim", "hidden_dim", "num_experts")),
        ("dim", 8.0, partial(tk.experts.make_moe, **LAYER)),
        ("spare_slots", -1, partial(tk.experts.make_moe, **LAYER)),
    ],
)
def test_a_size_is_an_integer_that_can_be(name: str, value: Any, call: Callable[..., Any]) -> None:
    least = 0 if name == "spare_slots" else 1
    with pytest.raises(tk.UserError, match=rf"^{name}={value!r}: take an integer of {least} or more\.$"):
        call(**{name: value})
