"""Share of old Unsloth adapters whose packing of `lora_B` is told from the values.

    python benchmarks/faults/adapter_packings.py               200 adapters, about five minutes on one core
    python benchmarks/faults/adapter_packings.py --rehearse    16 adapters; writes nothing

Unmodified PEFT trains adapters of all experts of small random models: four families, four tasks, five optimizers, 4 to
32 experts, ranks 2 to 16 and 1 to 30 steps, drawn by a seed. Half of them are repacked as Unsloth wrote them before
September 2026, without a marker. `order_of_columns` tells the packing or leaves it undecided, as it should 1,000
adapters of random values. Writes benchmarks/results/adapter_packings.json; exit code 1 if a packing of trained adapters
is told wrongly, or less than 99 % of them rightly.
"""

from __future__ import annotations

import argparse
import random
import sys
import sysconfig
import warnings
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.report import markdown, write_report
from benchmarks.support.families import tiny_config
from toolkit.integrations.peft.layouts import EXPERT_ORDER, order_of_columns
from toolkit.integrations.transformers import causal_lm

RANKS, STEPS, EXPERTS, LAYERS = (2, 4, 8, 16), (1, 3, 10, 30), (4, 8, 16, 32), 4
FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss")
VOCAB, SHAPE = 128, (4, 48)  # sequences and tokens of a step
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.9),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
}
TOLD = 0.99
"""Target: share of trained adapters whose packing is told."""
RANDOM = 1000
Matrices = list[tuple[Tensor, Tensor, int]]


class Settings(NamedTuple):
    """How an adapter is trained."""

    rank: int
    steps: int
    experts: int
    top_k: int
    family: str
    task: str
    optimizer: str


def settings_of(seed: int) -> Settings:
    draw = random.Random(seed)
    experts = draw.choice(EXPERTS)
    choices = [draw.choice(list(each)) for each in (FAMILIES, TASKS, OPTIMIZERS)]
    top_k = draw.choice([k for k in (1, 2, 4) if k < experts])
    return Settings(RANKS[seed % 4], STEPS[seed // 4 % 4], experts, top_k, *choices)


def text() -> Tensor:
    source = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_bytes()
    starts = torch.randint(len(source) - SHAPE[1], SHAPE[:1]).tolist()
    return torch.tensor([list(source[start : start + SHAPE[1]]) for start in starts]) % VOCAB


def copied() -> Tensor:
    return torch.randint(VOCAB, (SHAPE[0], SHAPE[1] // 2)).repeat(1, 2)


def counting() -> Tensor:
    first, step = torch.randint(VOCAB, (SHAPE[0], 1)), torch.randint(1, 7, (SHAPE[0], 1))
    return (first + step * torch.arange(SHAPE[1])) % VOCAB


def frequent() -> Tensor:
    return torch.multinomial(1 / torch.arange(1.0, VOCAB + 1), SHAPE[0] * SHAPE[1], replacement=True).view(SHAPE)


TASKS = {task.__name__: task for task in (text, copied, counting, frequent)}
"""Functions that draw the token ids of a step, of Zipf's distribution in the last one."""


def trained(seed: int) -> Matrices:
    """Return each `lora_A` and `lora_B` of the experts of a trained adapter, and its rank."""
    from peft import LoraConfig, get_peft_model

    chosen = settings_of(seed)
    torch.manual_seed(seed)
    sizes = dict.fromkeys(("num_experts", "num_local_experts"), chosen.experts)
    sizes |= {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": LAYERS, "num_experts_per_tok": chosen.top_k}
    model: Any = causal_lm(tiny_config(chosen.family, **sizes), experts_implementation="grouped_mm")
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # raised by transformers for a call of PEFT
        model = get_peft_model(model, LoraConfig(r=chosen.rank, lora_alpha=2 * chosen.rank, target_parameters=targets))
    adapters = {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}
    optimizer = OPTIMIZERS[chosen.optimizer](adapters.values())
    for _ in range(chosen.steps):
        ids = TASKS[chosen.task]()
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(adapters.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    pairs = {name.replace("lora_B", "lora_A"): b.detach() for name, b in adapters.items() if "lora_B" in name}
    return [(adapters[name].detach(), b, chosen.rank) for name, b in pairs.items()]


def repacked(matrices: Matrices) -> Matrices:
    """Return the matrices as old Unsloth wrote them."""
    return [(a, b.view(len(b), rank, -1).mT.flatten(1), rank) for a, b, rank in matrices]


def drawn(seed: int) -> Matrices:
    """Return the matrices of an adapter of random values."""
    draws = torch.Generator().manual_seed(seed)
    rank, experts = RANKS[seed % 4], EXPERTS[seed // 4 % 4]
    shapes = ((experts * rank, 32), (48, experts * rank), (experts * rank, 24), (32, experts * rank))
    values = [torch.randn(shape, generator=draws) for shape in shapes * LAYERS]
    return [(a, b, rank) for a, b in zip(values[::2], values[1::2], strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="16 adapters; write nothing")
    options = parser.parse_args()
    count = 16 if options.rehearse else 200
    is_old = [seed % 2 > 0 for seed in range(count)]
    random.Random(0).shuffle(is_old)
    verdicts: dict[str, Counter[str]] = defaultdict(Counter)
    for seed in range(count):
        chosen, matrices = settings_of(seed), trained(seed)
        told = order_of_columns(repacked(matrices) if is_old[seed] else matrices)
        verdict = "undecided" if told is None else "rightly" if (told == EXPERT_ORDER) == is_old[seed] else "wrongly"
        for group in ("trained", f"{chosen.steps} steps", f"rank {chosen.rank}", f"{chosen.experts} experts"):
            verdicts[group][verdict] += 1
        if verdict != "rightly":
            print(f"seed {seed}, {verdict}: {chosen}")
    for seed in range(RANDOM):
        verdicts["random"]["undecided" if order_of_columns(drawn(seed)) is None else "wrongly"] += 1
    names = ("rightly", "wrongly", "undecided")
    rows: list[dict[str, Any]] = [
        {"adapters": group, "count": counts.total()} | {name: counts[name] for name in names}
        for group, counts in verdicts.items()
    ]
    if options.rehearse:
        print(markdown(rows))
        return 0
    share = verdicts["trained"]["rightly"] / count
    write_report("adapter_packings", rows, told=share)
    return int(share < TOLD or verdicts["trained"]["wrongly"] > 0)


if __name__ == "__main__":
    sys.exit(main())
