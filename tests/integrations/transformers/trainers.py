"""Runs of transformers' Trainer and TRL's trainers with sharded experts, on generated data."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from benchmarks.support.families import VOCAB, tokens
from benchmarks.support.precision import in_float64
from tests.parity.models import Float64
from toolkit.integrations.transformers import expert_trainer

STEPS, SAMPLES = 3, 8


def tokenizer() -> Any:
    """Return a tokenizer of the words w3 to w63."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{number}": number for number in range(3, VOCAB)}
    model = Tokenizer(models.WordLevel(words, unk_token="w3"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def dataset(kind: str, number: int = 96) -> Any:
    from datasets import Dataset

    ids = [tokens(row, 1)[0].tolist() for row in range(number)]
    if kind == "Trainer":
        return Dataset.from_dict({"input_ids": ids, "labels": ids})
    if kind == "GRPOTrainer":
        return Dataset.from_dict({"prompt": ["w5 w9 w7", "w11", "w3 w3 w8 w20", "w50 w4"] * (number // 4)})
    ids = [row[: (12, 5, 9)[place % 3]] for place, row in enumerate(ids)]  # unequal, so that batches are padded
    masks = [[int(place >= len(row) // 2) for place in range(len(row))] for row in ids]
    return Dataset.from_dict({"input_ids": ids, "completion_mask": masks})


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def settings_of_run(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": SAMPLES // world(),
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def make(kind: str, folder: Path, model: Any, *, options: dict[str, Any] | None = None, **given: Any) -> Any:
    """Return a trainer of `kind` under `expert_trainer` with `options`, or unmodified if they are None.

    Values in `given` are for its configuration if that has such a field, or for the trainer.
    """
    import transformers
    import trl

    library = transformers if kind == "Trainer" else trl
    trainer = getattr(library, kind)
    config = getattr(library, "TrainingArguments" if kind == "Trainer" else kind.replace("Trainer", "Config"))
    if options is not None:
        trainer = expert_trainer(trainer, **options)
    settings = settings_of_run(folder) | {"use_cpu": True, "max_grad_norm": 0.03, "save_only_model": True, "seed": 0}
    settings["per_device_train_batch_size"] //= given.get("gradient_accumulation_steps", 1)
    more: dict[str, Any] = {"train_dataset": dataset(kind)}
    if "eval_strategy" in given:
        more["eval_dataset"] = more["train_dataset"].select(range(SAMPLES))
    if kind != "Trainer":
        settings |= {"router_aux_loss_coef": 0.0, "bf16": False}
        more["processing_class"] = tokenizer()
    if kind == "GRPOTrainer":
        settings |= {"num_generations": 2, "max_completion_length": 6}
        more["reward_funcs"] = [unique_words]
    for name, value in given.items():
        (settings if name in config.__dataclass_fields__ else more)[name] = value
    made = trainer(model, args=config(**settings), **more)
    made.remove_callback(transformers.PrinterCallback)
    return made


def usage(line: dict[str, float]) -> dict[str, float]:
    """Return the metrics of expert load of a log step."""
    known = ["load_entropy", "max_load_over_mean", "min_load_over_mean", "max_violation"]
    return {name: value for name, value in line.items() if name.removeprefix("moe/") in known}


def unique_words(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(completion.split()))) for completion in completions]


@contextmanager
def quiet_float64() -> Iterator[None]:
    """Extend `in_float64` to TRL's loss, which names the float32 of its sums."""
    from datasets import disable_progress_bars
    from transformers.utils import logging
    from trl.kernels import chunked_logprob

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()
    with in_float64(), mock.patch.object(chunked_logprob, "torch", Float64()):
        yield
