"""Healthy models that look like broken ones, for alarms of `toolkit audit`. Each edits a saved model of a family."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import checkpoint as dcp

from benchmarks.faults.planted_models import EXPERTS, LAYERS, Edit, Model

Odd = Callable[[Model, dict[str, Any]], object]
"""Edits the tensors and the configuration of a model."""
Write = Callable[[Path, Mapping[str, Tensor]], object]
"""Writes the tensors of a model in a form of its own."""
WEIGHTS = "model.safetensors"


def edit(change: Edit, part: str = "", layers: range = range(LAYERS), experts: range = range(EXPERTS)) -> Odd:
    """Change matrices of experts, shape (W, H) or (2W, H)."""

    def plant(model: Model, _: object) -> None:
        for layer in layers:
            for of in model.experts(part, layer).values():
                for expert in experts:
                    of[expert].copy_(change(of[expert]))

    return plant


def edit_tensors(change: Edit, name: str) -> Odd:
    """Change the tensors whose names match."""

    def plant(model: Model, _: object) -> None:
        model.tensors |= {key: change(value) for key, value in model.tensors.items() if re.search(name, key)}

    return plant


def settings(**fields: Any) -> Odd:
    return lambda _, config: config.update(fields)


def together(*odds: Odd) -> Odd:
    return lambda model, config: [odd(model, config) for odd in odds]


def repeat_experts(group: int) -> Odd:
    """Make each `group` experts and their router rows equal, as after upcycling."""

    def plant(model: Model, _: object) -> None:
        for layer in range(LAYERS):
            for of in model.experts("", layer).values():
                for expert in range(EXPERTS):
                    of[expert].copy_(of[expert // group * group])
            router = model.tensors[model.router(layer)]
            router.copy_(router[::group].repeat_interleave(group, 0))

    return plant


def keep(count: int, layers: range) -> Odd:
    """Keep the first experts of some layers, and their router rows."""

    def plant(model: Model, _: object) -> None:
        for layer in layers:
            for name in model.names("", layer):
                number = re.search(r"\.experts\.(\d+)\.", name)
                if number is None:
                    model.tensors[name] = model.tensors[name][:count].clone()
                elif int(number[1]) >= count:
                    del model.tensors[name]
            router = model.router(layer)
            model.tensors[router] = model.tensors[router][:count].clone()

    return plant


def rename(pattern: str, by: str) -> Odd:
    def plant(model: Model, _: object) -> None:
        model.tensors = {re.sub(pattern, by, name): value for name, value in model.tensors.items()}

    return plant


def add(name: str, value: Tensor) -> Odd:
    return lambda model, _: model.tensors.update({name: value})


def with_last_layer_as_mtp(model: Model, _: object) -> None:
    """Begin multi-token prediction as a copy of the last layer."""
    last = f"model.layers.{LAYERS - 1}."
    copies = {name.replace(last, "mtp.layers.0."): value.clone() for name, value in model.tensors.items()}
    model.tensors |= {name: value for name, value in copies.items() if name.startswith("mtp.")}


def tie(model: Model, config: dict[str, Any]) -> None:
    config["tie_word_embeddings"] = True
    model.tensors["lm_head.weight"] = model.tensors["model.embed_tokens.weight"].clone()


def tie_without_head(model: Model, config: dict[str, Any]) -> None:
    config["tie_word_embeddings"] = True
    del model.tensors["lm_head.weight"]


def pad_vocabulary(model: Model, config: dict[str, Any]) -> None:
    config["vocab_size"] += 3
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        model.tensors[name] = torch.nn.functional.pad(model.tensors[name], (0, 0, 0, 3))


def sparse(x: Tensor) -> Tensor:
    return x * (torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) > 0.2)


def noisy(x: Tensor) -> Tensor:
    return x + 1e-2 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))


UPCYCLED = repeat_experts(EXPERTS)
"""All experts of a layer equal."""
ODD: dict[str, Odd] = {
    "upcycled": UPCYCLED,
    "upcycled by virtual groups": repeat_experts(4),
    "upcycled, then trained a little": together(
        UPCYCLED, edit(lambda x: x + 1e-3 * torch.randn_like(x)), edit_tensors(noisy, r"gate\.weight")
    ),
    "experts pruned": together(keep(6, range(LAYERS)), settings(num_experts=6, num_local_experts=6)),
    "experts pruned by layer": keep(6, range(1, 3)),
    "multi-token prediction as the last layer": with_last_layer_as_mtp,
    "tied output layer": tie,
    "tied and not saved output layer": tie_without_head,
    "padded vocabulary": pad_vocabulary,
    "bfloat16 with routers in float32": edit_tensors(Tensor.bfloat16, r"^(?!.*(gate|router)\.weight)"),
    "float16": edit_tensors(Tensor.half, ""),
    "float64": edit_tensors(Tensor.double, ""),
    "norms in float32": edit_tensors(Tensor.bfloat16, "^(?!.*norm)"),
    "rotary buffers of old versions": add("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(2)),
    "one expert eight times larger": edit(lambda x: 8 * x, experts=range(1)),
    "one expert eight times smaller": edit(lambda x: x / 8, experts=range(1)),
    "small first layer": edit(lambda x: x / 40, layers=range(1)),
    "large last layer": edit(lambda x: 40 * x, layers=range(LAYERS - 1, LAYERS)),
    "a fifth of the weights zero": edit(sparse),
    "down projections begin small": edit(lambda x: 1e-2 * x, "down"),
    "ternary experts": edit(lambda x: x.sign() * (x.abs() > 0.5 * x.std()) * x.std()),
    "experts on a coarse grid": edit(lambda x: (8 * x).round() / 8),
    "heavy tails": edit(lambda x: x * x.abs() / x.std()),
    "large router": edit_tensors(lambda x: 30 * x, r"gate\.weight"),
    "small router": edit_tensors(lambda x: x / 30, r"gate\.weight"),
    "constant norms": edit_tensors(torch.ones_like, "norm"),
    "norms of zero, for weights plus 1": edit_tensors(torch.zeros_like, "layernorm"),
    "unknown settings": settings(custom={"a": [1]}, transformers_version="9.9.9"),
    "settings of an auxiliary loss": settings(output_router_logits=True, router_aux_loss_coef=0.0),
}
"""Healthy models by kind."""


def in_files(count: int) -> Write:
    """Write shards with an index."""

    def write(folder: Path, tensors: Mapping[str, Tensor]) -> None:
        entries: dict[str, str] = {}
        for number in range(count):
            file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            part = {name: tensors[name] for name in sorted(tensors)[number::count]}
            save_file(part, folder / file)
            entries |= dict.fromkeys(part, file)
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": entries}))

    return write


def in_cache(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a link, as in the Hub's cache."""
    save_file(dict(tensors), folder / "blob")
    (folder / WEIGHTS).symlink_to(folder / "blob")


FORMS: dict[str, Write] = {
    "seven files": in_files(7),
    "more files than tensors": in_files(400),
    "a link": in_cache,
    "pytorch_model.bin": lambda folder, tensors: torch.save(dict(tensors), folder / "pytorch_model.bin"),
    "torch.distributed.checkpoint": lambda folder, tensors: dcp.save(
        {"model": dict(tensors)}, checkpoint_id=folder, no_dist=True
    ),
}
"""Healthy models by the form of their files."""
