"""Layers under `torch.compile`. This file runs itself in a process without shape checks, which would break graphs."""

import warnings
from typing import Any

import torch
from torch import Tensor

from tests.support.forked_python import run_forked
from toolkit.experts.layer.grouped_mm import grouped_mm
from toolkit.experts.layer.moe_layer import make_moe
from toolkit.experts.layer.router_options import RouterOptions

LAYERS: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float32, {"activation": "relu"}),
    (torch.bfloat16, {"activation": "swiglu", "router": RouterOptions(balance="bias")}),
]


def compare_layers() -> None:
    for dtype, settings in LAYERS:
        torch.compiler.reset()
        torch.manual_seed(0)
        layer = make_moe(8, 16, 4, 2, **settings).to(dtype)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        for tokens in (6, 9):
            x_TD = torch.randn(tokens, 8, dtype=dtype, requires_grad=True)
            found, expected = (outputs_and_gradients(module, x_TD, layer) for module in (compiled, layer))
            torch.testing.assert_close(found, expected, msg=lambda text: f"{dtype}, {settings}: {text}")  # noqa: B023


def outputs_and_gradients(module: Any, x_TD: Tensor, layer: torch.nn.Module) -> list[Tensor]:
    y_TD = module(x_TD)
    return [y_TD, *torch.autograd.grad(y_TD.square().sum(), [x_TD, *layer.parameters()])]


def square_of_product(x_ND: Tensor, weight_SDF: Tensor, rows_per_slot: Tensor) -> Tensor:
    return grouped_mm(x_ND, weight_SDF, rows_per_slot).square()


def compare_products() -> None:
    rows_per_slot = torch.tensor([2, 0, 5])
    compiled = torch.compile(square_of_product, backend="aot_eager", fullgraph=True)
    # Rows of three numbers are padded.
    for dtype, width in ((torch.float32, 3), (torch.float16, 3), (torch.bfloat16, 3), (torch.bfloat16, 8)):
        x_ND = torch.randn(7, width, dtype=dtype, requires_grad=True)
        weight_SDF = torch.randn(3, width, 8, dtype=dtype, requires_grad=True)
        for needed in ([x_ND, weight_SDF], [x_ND], [weight_SDF]):
            found, expected = (
                torch.autograd.grad(product(x_ND, weight_SDF, rows_per_slot).sum(), needed)
                for product in (compiled, square_of_product)
            )
            torch.testing.assert_close(found, expected)


def test_compiled_layer_is_one_graph_with_equal_outputs_and_gradients() -> None:
    done = run_forked(__file__)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    # torch.compile instantiates each autograd function that it traces, and reads gradients of tensors.
    warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
    compare_layers()
    compare_products()
