"""The shapes that annotations give are checked while tests run: a wrongly shaped call fails, and says which shape."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError

from activity.voting import vote
from speech.legendre import LegendreMemory
from tests import modules_with_shapes
from toolkit.experts.layer.dispatcher import LocalDispatcher
from toolkit.experts.layer.grouped_experts import GroupedExperts
from toolkit.experts.layer.grouped_mm import grouped_mm
from toolkit.experts.layer.losses import load_balancing_share
from toolkit.experts.layer.moe_layer import make_moe
from toolkit.experts.layer.router import Routing, TopKRouter
from toolkit.experts.placement.placement import contiguous
from toolkit.train.models.mlp import Pixels
from toolkit.train.task import Loss
from toolkit.train.tasks.classification import correct

X_TD, IDS_TK = torch.zeros(3, 8), torch.zeros(3, 2, dtype=torch.int64)
WEIGHTS_TK, PROBS_TE = torch.ones(3, 2), torch.ones(3, 4)

WRONG: dict[str, Callable[[], Any]] = {
    "a router gets sequences": lambda: TopKRouter(8, 4, 2)(X_TD[None]),
    "more ids than weights": lambda: Routing(IDS_TK, WEIGHTS_TK[:, :1], PROBS_TE, PROBS_TE),
    "float ids": lambda: Routing(IDS_TK.float(), WEIGHTS_TK, PROBS_TE, PROBS_TE),
    "ids of other tokens": lambda: LocalDispatcher(contiguous(4, 1)).dispatch(X_TD[:2], IDS_TK, WEIGHTS_TK),
    "rows of one dimension": lambda: GroupedExperts(8, 4, expert_ids=[0])(X_TD[0], torch.tensor([8])),
    "counts of other slots": lambda: grouped_mm(X_TD, torch.zeros(2, 8, 4), torch.tensor([1, 1, 1])),
    "integers into a layer": lambda: make_moe(8, 4, 4, 2)(X_TD.long()),
    "fractions of other experts": lambda: load_balancing_share(PROBS_TE, torch.ones(5), 3, 4),
    "labels of other samples": lambda: correct(PROBS_TE, torch.zeros(2, dtype=torch.int64)),
    "a loss per sample": lambda: Loss(torch.zeros(3), 3),
    "views of one example": lambda: vote(PROBS_TE),
    "a signal without channels": lambda: LegendreMemory(4, 8.0)(torch.zeros(2, 5)),
    "images as floats": lambda: Pixels(0.5, 0.5)(torch.zeros(3, 28, 28)),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrongly_shaped_call_fails_and_names_the_shape(case: str):
    with pytest.raises(TypeCheckError, match=r"Parameter annotations: .*\[Tensor, '"):
        WRONG[case]()


def test_the_modules_that_annotate_shapes_are_those_that_are_checked():
    checked = {name for name in modules_with_shapes() if name in sys.modules and "jaxtyping" in vars(sys.modules[name])}
    assert checked == {name for name in modules_with_shapes() if name in sys.modules}
    assert {"toolkit.experts.layer.router", "toolkit.experts.layer.dispatcher", "toolkit.train.task"} <= checked
