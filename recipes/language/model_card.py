"""Files that accompany exported weights: the tokenizer, and a README.md that describes the model."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

import toolkit as tk
from language.small_models import TEMPERATURE

CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- toolkit
- {model_type}
---

# {model_type} on {dataset}

A small {model_type} language model{experts}, {origin} with toolkit {version}. It was made to study training,
and knows nothing but {dataset}: do not rely on what it writes.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("this folder")
tokenizer = AutoTokenizer.from_pretrained("this folder")
```

| | |
|---|---|
| parameters | {parameters:,}, of which a token uses {active_parameters:,} |
| tokens | {tokenizer}; blocks of {context} |
| trained on | {tokens:,} tokens of {dataset}, in {steps:,} steps |
| held-out text | {test_bits_per_byte:.4f} bits per byte; perplexity {perplexity:.3f} per token |
| optimizer | AdamW, learning rate {lr:g}, {batch_size} blocks a step, seed {seed} |

The held-out text is apart from what it was trained on, and is read in blocks, each without what came before it.

How it continues held-out text, whose first {prompt_tokens} tokens it was given, at temperature {temperature}:

{samples}
"""


def export_language_model(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    tokenizer: tk.data.Tokenizer,
    facts: Mapping[str, Any],
    samples: Sequence[str],
) -> None:
    """Write weights for `from_pretrained`, the tokenizer, and a model card of `facts`, the fields of `CARD`. A
    collective. Raises UserError on every rank if the folder cannot be written."""

    def write(new: Path) -> None:
        tokenizer.save_pretrained(new)
        (new / "README.md").write_text(model_card(facts, samples), encoding="utf-8")

    tk.transformers.save_pretrained(model, folder)
    tk.transformers.write_on_main(folder, write)


def model_card(facts: Mapping[str, Any], samples: Sequence[str]) -> str:
    """The card, as Markdown."""
    experts = f", an MoE model of {facts['experts']} experts per layer of which a token uses {facts['top_k']}"
    quoted = ("\n".join(f"    {line}".rstrip() for line in text.splitlines()) for text in samples)
    return CARD.format_map(
        {
            **facts,
            "version": tk.__version__,
            "perplexity": math.exp(facts["test_loss"]),
            "tokens": facts["samples"] * facts["context"],
            "experts": experts if facts["experts"] else "",
            "origin": f"trained on from {facts['model']}" if facts["model"] else "trained from scratch",
            "prompt_tokens": facts["context"] - facts["sample_tokens"],
            "temperature": TEMPERATURE,
            "samples": "\n\n---\n\n".join(quoted),
        }
    )
