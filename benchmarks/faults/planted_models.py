"""Faults that `audit.py` plants in saved MoE models, one at a time. Tensors are found by their names."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

FAMILIES = (
    "mixtral",
    "qwen3_moe",
    "deepseek_v3",
    "gpt_oss",
    "granitemoe",
    "olmoe",
    "glm4_moe",
    "qwen3_vl_moe_text",
)
EXPERTS, LAYERS, HIDDEN, WIDTH = 8, 4, 16, 24
"""Sizes of the models. The hidden size and the experts' width tell which side of a matrix is which."""
ALL = range(EXPERTS)
LAYER = 1
"""The layer with a fault, if only one has it."""
SIZES = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERTS) | {"num_hidden_layers": LAYERS}
MATRIX = re.compile(
    r"(?:.*\.)?layers\.(?P<layer>\d+)\.(?:.*\.)?(?:experts\.(?:\d+\.)?(?=w[123]|gate|up|down)|(?=(?:in|out)put_linear))"
    r"(?P<matrix>w[123]|gate_proj|up_proj|gate_up_proj|down_proj|input_linear|output_linear)(?:\.weight)?"
)
"""Names of experts' matrices: one for each expert, or one for all."""
UP, DOWN = "w1|w3|gate|up_proj|input", "w2|down|output"
"""Matrices that have the hidden states as inputs, and as outputs."""

IN_LAYER = rf"\blayers\.{LAYER}\."
OF_EXPERTS, OF_DOWN = r".*(\bexperts\.|put_linear)", r".*(\bexperts\..*(w2|down)|output_linear)"
OF_ROUTER = r".*\b(gate|router|router\.layer)\.weight"
"""Parts of names, to be searched."""


@dataclass
class Model:
    """The tensors of a saved model."""

    family: str
    tensors: dict[str, Tensor]

    def names(self, part: str = "", layer: int | None = LAYER) -> list[str]:
        """Return the tensors of experts in a layer, or in all layers, whose matrix matches `part`."""
        found = ((name, MATRIX.fullmatch(name)) for name in sorted(self.tensors))
        return [
            name
            for name, match in found
            if match and layer in (None, int(match["layer"])) and re.search(part, match["matrix"])
        ]

    def experts(self, part: str = "", layer: int = LAYER) -> dict[str, list[Tensor]]:
        """Return by matrix a view of each expert's rows, shape (W, H) or (2W, H)."""
        found: dict[str, list[Tensor]] = defaultdict(list)
        for name in self.names(part, layer):
            value, match = self.tensors[name], MATRIX.fullmatch(name)
            assert match
            views = value if value.ndim == 3 else [value]
            found[match["matrix"]] += [view if view.shape[1] == HIDDEN else view.mT for view in views]
        return found

    def gate_and_up(self, expert: int) -> tuple[Tensor, Tensor]:
        """Return views of an expert's gate and up projection, shape (W, H) each."""
        views = [of[expert] for of in self.experts(UP).values()]
        if len(views) == 2:
            return views[0], views[1]
        if self.family == "gpt_oss":
            return views[0][::2], views[0][1::2]
        return views[0][:WIDTH], views[0][WIDTH:]

    def router(self, layer: int = LAYER) -> str:
        """Return the weight of a layer's router."""
        return next(name for name in self.tensors if re.search(rf"\blayers\.{layer}\.{OF_ROUTER}", name))


class HasTensors(Protocol):
    """A model, or adapters."""

    tensors: dict[str, Tensor]


Plant = Callable[[Model], object]
Edit = Callable[[Tensor], Tensor]


class Fault(NamedTuple):
    """A fault of a model or of adapters, and what has to find it."""

    group: str
    kind: str
    checks: str
    """Names of checks, any of which may find it."""
    plant: Callable[..., object]
    needs_base: bool = False


# --- edits ----------------------------------------------------------------------------------------------------------


def lose(pattern: str) -> Callable[[HasTensors], object]:
    def plant(of: HasTensors) -> None:
        for name in [name for name in of.tensors if re.search(pattern, name)]:
            del of.tensors[name]

    return plant


def rename(pattern: str, by: str) -> Callable[[HasTensors], object]:
    def plant(of: HasTensors) -> None:
        of.tensors = {re.sub(pattern, by, name): value for name, value in of.tensors.items()}

    return plant


def change(edit: Edit, part: str = "", experts: Iterable[int] = (3,)) -> Plant:
    """Change the values of experts' matrices, shape (W, H) or (2W, H)."""

    def plant(model: Model) -> None:
        for views in model.experts(part).values():
            for expert in experts:
                views[expert].copy_(edit(views[expert].clone()))

    return plant


def reshape(edit: Edit) -> Plant:
    """Change the tensors of all experts."""

    def plant(model: Model) -> None:
        for name in model.names(layer=None):
            model.tensors[name] = edit(model.tensors[name]).clone()

    return plant


def copy(sources: dict[int, int], layers: Iterable[int] = (LAYER,), from_layer: int | None = None) -> Plant:
    """Overwrite experts with others: `sources` by expert, of the same or of another layer."""

    def plant(model: Model) -> None:
        for layer in layers:
            theirs = model.experts(layer=layer if from_layer is None else from_layer).values()
            for ours, other in zip(model.experts(layer=layer).values(), theirs, strict=True):
                values = {expert: other[source].clone() for expert, source in sources.items()}
                for expert, value in values.items():
                    ours[expert].copy_(value)

    return plant


def swap(part: str = "") -> Plant:
    def plant(model: Model) -> None:
        for views in model.experts(part).values():
            first = views[1].clone()
            views[1].copy_(views[4])
            views[4].copy_(first)

    return plant


def exchange_gate_and_up(model: Model) -> None:
    for expert in ALL:
        gate, up = model.gate_and_up(expert)
        values = gate.clone(), up.clone()
        up.copy_(values[0])
        gate.copy_(values[1])


def repack_gate_and_up(model: Model) -> None:
    """Alternate the rows of gate and up, or write them one after the other if the family alternates them."""
    for expert in ALL:
        gate, up = model.gate_and_up(expert)
        if model.family == "gpt_oss":
            both = torch.cat((gate, up))
            values = both[::2], both[1::2]
        else:
            both = torch.stack((gate, up), 1).flatten(0, 1)
            values = both[:WIDTH], both[WIDTH:]
        gate.copy_(values[0])
        up.copy_(values[1])


def keep_experts(count: int, layers: Iterable[int]) -> Plant:
    def plant(model: Model) -> None:
        for name in [name for layer in layers for name in model.names(layer=layer)]:
            number = re.search(r"experts\.(\d+)\.", name)
            if number is None:
                model.tensors[name] = model.tensors[name][:count].clone()
            elif int(number[1]) >= count:
                del model.tensors[name]

    return plant


def add_expert(model: Model) -> None:
    for name in model.names():
        value = model.tensors[name]
        if value.ndim == 3:
            model.tensors[name] = torch.cat([value, value[:1].flip(1)])
        elif ".experts.7." in name:
            model.tensors[name.replace(".experts.7.", ".experts.8.")] = value.flip(0).clone()


def change_router(edit: Edit) -> Plant:
    def plant(model: Model) -> None:
        name = model.router()
        model.tensors[name] = edit(model.tensors[name].clone())

    return plant


def zero_router_bias(model: Model) -> None:
    for name, value in model.tensors.items():
        if re.search(IN_LAYER + r".*\b(gate\.e_score_correction_bias|router\.bias)", name):
            model.tensors[name] = torch.zeros_like(value)


def router_of_other_layer(model: Model) -> None:
    model.tensors[model.router()] = model.tensors[model.router(2)].clone()


def empty(names: Callable[[Model], Iterable[str]]) -> Plant:
    def plant(model: Model) -> None:
        for name in names(model):
            model.tensors[name] = torch.empty(0)

    return plant


def other_type(model: Model) -> None:
    """Give one expert another type, if experts are separate tensors."""
    for name in model.names():
        if ".experts.2." in name:
            model.tensors[name] = model.tensors[name].half()


def halve_attention(model: Model) -> None:
    for name, value in model.tensors.items():
        if re.search(rf"layers\.{LAYER}\..*o_proj\.weight", name):
            model.tensors[name] = value[: len(value) // 2].clone()


def fill(rows: slice, columns: slice, value: float) -> Edit:
    def edit(x: Tensor) -> Tensor:
        x[rows, columns] = value
        return x

    return edit


def redraw(x: Tensor) -> Tensor:
    return torch.randn_like(x) * x.std()


def clip(x: Tensor) -> Tensor:
    limit = float(x.std()) / 4
    return x.clamp(-limit, limit)


def random_bytes(x: Tensor) -> Tensor:
    return torch.randint(256, (x.numel() * 4,), dtype=torch.uint8).view(torch.float32).view(x.shape).nan_to_num()


def shuffle(x: Tensor) -> Tensor:
    return x[torch.randperm(len(x))]


WHOLE = slice(None)
HALF_ROWS, HALF_COLUMNS = slice(WIDTH // 2), slice(HIDDEN // 2)
QUARTER_ROWS, QUARTER_COLUMNS = slice(WIDTH // 4, WIDTH // 2), slice(HIDDEN // 4, HIDDEN // 2)

MISSING, ROUTERS, VALUES, ORDER, COPIES = (
    "missing layers, tensors, experts, ZeRO-3 placeholders",
    "zero, repeated, permuted and initialized routers",
    "zeros, constants, saturation, NaN, norms",
    "reordered, interleaved, cut and initialized experts",
    "copies, types, wrapper prefixes",
)

FAULTS = [
    Fault(MISSING, "experts of a layer", "missing experts", lose(IN_LAYER + OF_EXPERTS)),
    Fault(MISSING, "a layer", "missing", lose(IN_LAYER)),
    Fault(MISSING, "the first layer", "missing", lose(r"\blayers\.0\.")),
    Fault(MISSING, "the last layer", "missing", lose(r"\blayers\.3\.")),
    Fault(MISSING, "the last half of the layers", "missing", lose(r"\blayers\.[23]\.")),
    Fault(MISSING, "down projections of a layer", "missing experts", lose(IN_LAYER + OF_DOWN)),
    Fault(MISSING, "all down projections", "missing", lose(OF_DOWN)),
    Fault(MISSING, "all gate projections", "missing", lose(r"\bexperts\..*(w1|gate)|input_linear")),
    Fault(MISSING, "an expert", "experts", keep_experts(7, [LAYER])),
    Fault(MISSING, "experts of other ranks", "experts", keep_experts(4, range(LAYERS))),
    Fault(MISSING, "a place for an additional expert", "experts", add_expert),
    Fault(MISSING, "a router", "missing", lose(IN_LAYER + OF_ROUTER)),
    Fault(MISSING, "all routers", "missing", lose(OF_ROUTER)),
    Fault(MISSING, "attention of a layer", "missing", lose(IN_LAYER + r"self_attn\.")),
    Fault(MISSING, "a norm of a layer", "missing", lose(IN_LAYER + "input_layernorm")),
    Fault(MISSING, "the last norm", "missing", lose(r"^(model\.)?norm\.")),
    Fault(MISSING, "the embedding", "missing", lose("embed_tokens")),
    Fault(MISSING, "values of all tensors", "missing", empty(lambda model: list(model.tensors))),
    Fault(MISSING, "values of a layer's experts", "missing", empty(lambda model: model.names())),
    Fault(ROUTERS, "router of zeros", "router", change_router(torch.zeros_like)),
    Fault(ROUTERS, "router with a row of zeros", "router", change_router(fill(slice(2, 3), WHOLE, 0))),
    Fault(ROUTERS, "router with a repeated row", "router", change_router(lambda x: x[[0, 1, 2, 3, 4, 2, 6, 7]])),
    Fault(ROUTERS, "router for half of the experts", "router types", change_router(lambda x: x[:4].clone())),
    Fault(ROUTERS, "router with a half twice", "router", change_router(lambda x: x[:4].repeat(2, 1))),
    Fault(ROUTERS, "router of another layer", "router", router_of_other_layer, needs_base=True),
    Fault(ROUTERS, "router in another order", "router", change_router(lambda x: x.roll(1, 0)), needs_base=True),
    Fault(ROUTERS, "initialized router", "router", change_router(redraw), needs_base=True),
    Fault(ROUTERS, "router bias of zeros", "values", zero_router_bias, needs_base=True),
    Fault(VALUES, "router times 100", "scale router", change_router(lambda x: x * 100), needs_base=True),
    Fault(VALUES, "expert times 1e-6", "scale", change(lambda x: x * 1e-6, DOWN)),
    Fault(VALUES, "expert times 1e4", "scale", change(lambda x: x * 1e4, UP)),
    Fault(VALUES, "expert times 3", "scale", change(lambda x: x * 3), needs_base=True),
    Fault(VALUES, "experts of a layer times 1e-6", "scale", change(lambda x: x * 1e-6, UP, ALL)),
    Fault(VALUES, "experts of a layer times 1e4", "scale", change(lambda x: x * 1e4, DOWN, ALL)),
    Fault(VALUES, "experts of a layer times 4", "scale", change(lambda x: x * 4, DOWN, ALL), needs_base=True),
    Fault(VALUES, "expert of a constant", "values", change(lambda x: torch.full_like(x, 0.02), UP)),
    Fault(VALUES, "saturated expert", "values", change(clip, DOWN)),
    Fault(VALUES, "expert of zeros", "values", change(torch.zeros_like)),
    Fault(VALUES, "all experts of zeros", "values", change(torch.zeros_like, DOWN, ALL), needs_base=True),
    Fault(VALUES, "half of an expert's rows zero", "values", change(fill(HALF_ROWS, WHOLE, 0), UP)),
    Fault(VALUES, "half of an expert's columns zero", "values", change(fill(WHOLE, HALF_COLUMNS, 0), DOWN)),
    Fault(VALUES, "a quarter of all rows zero", "values", change(fill(QUARTER_ROWS, WHOLE, 0), DOWN, ALL)),
    Fault(VALUES, "a quarter of all columns zero", "values", change(fill(WHOLE, QUARTER_COLUMNS, 0), UP, ALL)),
    Fault(VALUES, "uninitialized memory", "scale values", change(random_bytes, DOWN)),
    Fault(VALUES, "NaN", "values", change(fill(slice(1, 2), WHOLE, torch.nan), UP)),
    Fault(VALUES, "infinity", "values", change(fill(slice(1, 2), WHOLE, torch.inf), DOWN)),
    Fault(ORDER, "experts swapped", "order", swap(), needs_base=True),
    Fault(ORDER, "down projections swapped", "order", swap(DOWN), needs_base=True),
    Fault(ORDER, "gate projections swapped", "order", swap("w1|gate|input"), needs_base=True),
    Fault(ORDER, "gate and up exchanged", "halves order", exchange_gate_and_up, needs_base=True),
    Fault(ORDER, "gate and up interleaved", "order", repack_gate_and_up, needs_base=True),
    Fault(ORDER, "hidden units permuted", "order", change(shuffle, experts=ALL), needs_base=True),
    Fault(ORDER, "initialized experts", "order", change(redraw, experts=ALL), needs_base=True),
    Fault(ORDER, "an initialized expert", "order", change(redraw), needs_base=True),
    Fault(ORDER, "rows of one rank", "base types", reshape(lambda x: x.chunk(2, -2)[0]), needs_base=True),
    Fault(ORDER, "columns of one rank", "base types", reshape(lambda x: x.chunk(2, -1)[0]), needs_base=True),
    Fault(ORDER, "inputs and outputs exchanged", "base types", reshape(lambda x: x.mT), needs_base=True),
    Fault(COPIES, "repeated expert", "repeats", copy({5: 2})),
    Fault(COPIES, "shard written twice", "repeats", copy({4: 0, 5: 1, 6: 2, 7: 3}, range(LAYERS))),
    Fault(COPIES, "experts of another layer", "repeats", copy({e: e for e in ALL}, from_layer=0)),
    Fault(COPIES, "an expert of another type", "types", other_type),
    Fault(COPIES, "attention of one rank", "types", halve_attention),
    Fault(COPIES, "prefix module.", "files", rename("^", "module.")),
    Fault(COPIES, "prefix _orig_mod.", "files", rename("^", "_orig_mod.")),
    Fault(COPIES, "_fsdp_wrapped_module. in names", "files", rename(r"(\blayers\.\d+\.)", r"\1_fsdp_wrapped_module.")),
]
