"""Calls with tensors of other shapes than annotated raise while tests run."""

import sys

import pytest
import torch
from jaxtyping import TypeCheckError

from activity.voting import vote
from tests import modules_with_shapes
from toolkit.experts.layer.dispatcher import LocalDispatcher
from toolkit.experts.layer.grouped_mm import grouped_mm
from toolkit.experts.layer.router import Routing, TopKRouter
from toolkit.experts.placement.placement import contiguous
from toolkit.train.models.mlp import Pixels
from toolkit.train.task import Loss

X_TD, IDS_TK = torch.zeros(3, 8), torch.zeros(3, 2, dtype=torch.int64)
WEIGHTS_TK, PROBS_TE = torch.ones(3, 2), torch.ones(3, 4)
WRONG = {
    "sequences in a router": lambda: TopKRouter(8, 4, 2)(X_TD[None]),
    "more ids than weights": lambda: Routing(IDS_TK, WEIGHTS_TK[:, :1], PROBS_TE, PROBS_TE),
    "float ids": lambda: Routing(IDS_TK.float(), WEIGHTS_TK, PROBS_TE, PROBS_TE),
    "fewer tokens than ids": lambda: LocalDispatcher(contiguous(4, 1)).dispatch(X_TD[:2], IDS_TK, WEIGHTS_TK),
    "more counts than slots": lambda: grouped_mm(X_TD, torch.zeros(2, 8, 4), torch.tensor([1, 1, 1])),
    "a loss per sample": lambda: Loss(torch.zeros(3), 3),
    "a recipe function": lambda: vote(PROBS_TE),
    "float images": lambda: Pixels(0.5, 0.5)(torch.zeros(3, 28, 28)),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_shape_raises_with_the_annotation(case: str):
    with pytest.raises(TypeCheckError, match=r"Parameter annotations: .*\[Tensor, '"):
        WRONG[case]()


def test_all_modules_with_shape_annotations_are_checked():
    imported = {name for name in modules_with_shapes() if name in sys.modules}
    assert {name for name in imported if "jaxtyping" in vars(sys.modules[name])} == imported
    assert {"toolkit.experts.layer.router", "toolkit.experts.layer.dispatcher", "toolkit.train.task"} <= imported
