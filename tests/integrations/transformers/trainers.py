"""Runs of transformers' Trainer and of TRL's trainers with spread experts, on data that are made here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.integrations.transformers.families import VOCAB, tokens
from tests.support.equality import in_float64
from toolkit.integrations.transformers.expert_trainer import expert_trainer

STEPS, SAMPLES = 3, 8
ALL = ("Trainer", "SFTTrainer", "GRPOTrainer")


def tokenizer() -> Any:
    """Of words w3 to w63."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{number}": number for number in range(3, VOCAB)}
    whole = Tokenizer(models.WordLevel(words, unk_token="w3"))
    whole.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=whole, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def sequences(number: int = 96) -> dict[str, list[list[int]]]:
    """Of 12, 5 or 9 tokens, so that batches are padded; the second half of each is the completion."""
    ids = [tokens(row, 1)[0, : (12, 5, 9)[row % 3]].tolist() for row in range(number)]
    return {
        "input_ids": ids,
        "completion_mask": [[int(place >= len(row) // 2) for place in range(len(row))] for row in ids],
    }


def adapters() -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=3,
        lora_alpha=12,
        target_modules=["q_proj", "v_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        init_lora_weights=False,
    )


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def make(kind: str, folder: Path, model: Any, *, spread: dict[str, Any] | None = None, **given: Any) -> Any:
    """A trainer of `kind`, with spread experts unless `spread`, the options of `expert_trainer`, is None.

    Of `given`, what its configuration does not know is the trainer's.
    """
    import transformers
    import trl
    from datasets import Dataset

    library = transformers if kind == "Trainer" else trl
    trainer = getattr(library, kind)
    config = getattr(library, "TrainingArguments" if kind == "Trainer" else kind.replace("Trainer", "Config"))
    if spread is not None:
        trainer = expert_trainer(trainer, **spread)
    columns: dict[str, Any] = sequences()
    if kind == "Trainer":
        ids = [tokens(row, 1)[0].tolist() for row in range(96)]
        columns = {"input_ids": ids, "labels": ids}
    elif kind == "GRPOTrainer":
        columns = {"prompt": ["w5 w9 w7", "w11", "w3 w3 w8 w20", "w50 w4"] * 24}
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": SAMPLES // world() // given.get("gradient_accumulation_steps", 1),
        "learning_rate": 1e-2,
        "max_grad_norm": 0.03,
        "logging_steps": 1,
        "save_strategy": "no",
        "save_only_model": True,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 0,
    }
    more: dict[str, Any] = {"train_dataset": Dataset.from_dict(columns)}
    if "eval_strategy" in given:
        more["eval_dataset"] = more["train_dataset"].select(range(SAMPLES))
    if kind != "Trainer":
        settings |= {"router_aux_loss_coef": 0.0, "bf16": False}
        more["processing_class"] = tokenizer()
    if kind == "GRPOTrainer":
        settings |= {"num_generations": 2, "max_completion_length": 6}
        more["reward_funcs"] = [different_words]
    for name, value in given.items():
        (settings if name in config.__dataclass_fields__ else more)[name] = value
    made = trainer(model, args=config(**settings), **more)
    made.remove_callback(transformers.PrinterCallback)
    return made


def usage_by_hand(loads: Sequence[Sequence[float]]) -> dict[str, float]:
    """What a line of Trainer's logs says of the load of each layer's experts."""
    shares = [[load / sum(layer) for load in layer] for layer in loads]
    entropies = [sum(-share * math.log(share, len(layer)) for share in layer if share) for layer in shares]
    return {
        "expert_usage/normalized_entropy_mean": sum(entropies) / len(entropies),
        "expert_usage/normalized_entropy_min": min(entropies),
        "expert_usage/max_share_mean": sum(map(max, shares)) / len(shares),
        "expert_usage/max_share_max": max(map(max, shares)),
        "expert_usage/active_fraction_mean": sum(sum(map(bool, layer)) / len(layer) for layer in shares) / len(shares),
    }


def usage_of(line: dict[str, float]) -> dict[str, float]:
    """What a line of Trainer's logs has that Trainer and TRL do not write."""
    return {name: value for name, value in line.items() if name.startswith(("expert_usage/", "moe/"))}


def different_words(completions: list[str], **_: Any) -> list[float]:
    """A reward."""
    return [float(len(set(completion.split()))) for completion in completions]


@contextmanager
def quiet_float64() -> Iterator[None]:
    """`in_float64`, for TRL's loss as well, which names the float32 of its sums."""
    from datasets import disable_progress_bars
    from transformers.utils import logging
    from trl.kernels import chunked_logprob

    class Wider:
        float32 = torch.float64

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()
    with in_float64(), mock.patch.object(chunked_logprob, "torch", Wider()):
        yield
