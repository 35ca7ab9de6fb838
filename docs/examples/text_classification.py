"""Which text is a passage from? An ordinary AutoModel of transformers, BERT from scratch or any encoder's weights.

python docs/examples/text_classification.py                              no download, a minute on a CPU
python docs/examples/text_classification.py debug --num-processes 2 --cpu
python docs/examples/text_classification.py --model google-bert/bert-base-uncased --lr 2e-5
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import PositiveInt
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, BertConfig

import toolkit as tk
from toolkit.data import model_folder

TEXTS = ("prose", "reference", "stdlib")
"""Shakespeare where $TOOLKIT_DATA_DIR or --data-dir has it; Python's language reference; its standard library."""


class Config(tk.RunConfig):
    model: str | None = None
    """Folder or Hub name of an encoder; none: a small BERT from scratch."""
    tokenizer: str | None = None
    """bytes, or a folder or Hub name; none: the model's own, bytes from scratch."""
    context: PositiveInt = 64
    """Tokens of a passage."""


def full() -> Config:
    """One epoch of passages of 64 bytes."""
    return Config(epochs=1, batch_size=32, lr=1e-3, schedule=tk.ScheduleOptions(warmup_steps=20), log_every=50)


def debug() -> Config:
    """Seconds: a few steps on shorter passages."""
    return full().replace(context=32, max_steps=40, log_every=10)


class Classifier(nn.Module):
    """Logits of a model of transformers, which returns them in an object."""

    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: Tensor) -> Tensor:
        return self.encoder(input_ids=ids).logits


def load_passages(config: Config, run: tk.Run) -> tuple[tk.TensorTable, tk.TensorTable, list[str], Any]:
    """Training and held-out passages with equally many of each text, the names of the texts, and the tokenizer."""
    tokenizer = config.tokenizer or config.model or "bytes"
    how: Any = {"block_size": config.context, "batch_size": config.batch_size, "on_main": run.on_main_and_share}
    folders = {"prose": config.data_dir}
    found = [tk.load_text(name, folders.get(name), tokenizer=tokenizer, **how) for name in TEXTS]
    texts = {text.name: text for text in found}  # without Shakespeare two of them are the same
    columns: list[dict[str, Tensor]] = []
    for part in ("train", "test"):
        tables = [text.train if part == "train" else text.some_test(len(text.test)) for text in texts.values()]
        count = min(map(len, tables))
        rows = [table.columns["tokens"][torch.arange(count) * len(table) // count] for table in tables]
        passages = torch.cat(rows)[:, : config.context].long()
        columns.append({"input": passages, "label": torch.arange(len(tables)).repeat_interleave(count)})
    train, test = (tk.TensorTable(**column) for column in columns)
    return train, test, list(texts), found[0].tokenizer


def build_model(config: Config, labels: list[str], vocab_size: int) -> Classifier:
    """From the weights of --model, or from scratch."""
    if config.model:
        folder = model_folder(config.model)
        return Classifier(AutoModelForSequenceClassification.from_pretrained(folder, num_labels=len(labels)))
    size: Any = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    size |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # one epoch: it sees no passage twice
    bert = BertConfig(
        vocab_size=vocab_size, max_position_embeddings=config.context, id2label=dict(enumerate(labels)), **size
    )
    return Classifier(AutoModelForSequenceClassification.from_config(bert))


def main(config: Config) -> dict[str, Any]:
    with tk.start_run("text_classification", config) as run:
        train, test, names, tokenizer = load_passages(config, run)
        run.describe(dataset=" / ".join(names))
        model = build_model(config, names, tokenizer.vocab_size)
        optimizer = tk.build_optimizer(model, config)

        def save(_: tk.Trainer) -> None:
            tk.transformers.save_pretrained(model.encoder, run.folder / "model")
            if run.is_main:
                tokenizer.save_pretrained(run.folder / "model")

        return tk.fit(run, tk.Classification(), model, optimizer, tk.Splits(train, test), at_end=save)


PRESETS = {"full": full, "debug": debug}

if __name__ == "__main__":
    tk.run_recipe(main, PRESETS, __doc__)
