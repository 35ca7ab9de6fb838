"""A small transformers language model (Qwen3-MoE or Mixtral), with its experts sharded over all processes.

python recipes/lm_moe.py                                       Shakespeare byte by byte, a minute on a CPU
python recipes/lm_moe.py --num-processes 4 --replan.planner swap      experts move between processes while training
python recipes/lm_moe.py --data-dir FOLDER --tokenizer gpt2    any text, any tokenizer
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import PositiveInt

import toolkit as tk
from language import Architecture

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel


class Config(tk.ExpertRunConfig):
    """The settings of a run; fields shared with other recipes are inherited."""

    architecture: Architecture = "qwen3_moe"
    """Family of a model from scratch, or with --experts 0 of its dense counterpart, Qwen3 or Mistral."""
    model: str | None = None
    """Start from the weights in this folder, or of this name on the Hub; they decide the model's sizes."""
    tokenizer: str = "bytes"
    """bytes, or a folder or Hub name."""
    context: PositiveInt = 128
    """Tokens in a block of text."""
    dim: PositiveInt = 32
    """Width of the residual stream."""
    layers: PositiveInt = 2
    """Blocks of attention and experts."""
    heads: PositiveInt = 2
    """Attention heads; two of an even number share their keys and values."""
    sample_tokens: PositiveInt = 100
    """Length of the samples at the end, which continue held-out text."""
    export: bool = True
    """Write ordinary weights of transformers, the tokenizer and a model card to model/ in the run's folder."""

    def check_together(self) -> None:
        super().check_together()
        fits = self.context > self.sample_tokens
        tk.require(fits, "context", self.context, f"take more than sample_tokens={self.sample_tokens}")


def full() -> Config:
    """The published run: two epochs of tinyshakespeare."""
    return Config(
        experts=8,
        top_k=2,
        expert_hidden_size=64,
        balance_weight=0.01,
        epochs=2,
        batch_size=32,
        lr=2e-2,
        schedule=tk.ScheduleOptions(warmup_steps=50),
        log_every=20,
    )


def debug() -> Config:
    """Seconds: a tiny model on a little of the standard library's sources."""
    small = full().replace(dim=16, experts=4, expert_hidden_size=16, context=32, sample_tokens=16)
    return small.replace(max_steps=20, lr=1e-2, log_every=5, dataset="stdlib", export=False)


def larger() -> Config:
    """About three minutes on two cores: 1.8 million parameters, of which a token uses a third."""
    return full().replace(dim=128, layers=4, heads=4, expert_hidden_size=128, batch_size=10, lr=3e-3)


def dense(mixture: Config | None = None) -> Config:
    """The baseline: a dense model with the number of active parameters of the MoE model (full), router included."""
    mixture = mixture or full()
    router = -(-mixture.experts // 3)  # hidden units have three rows of weights, experts one of the router's
    return mixture.replace(experts=0, top_k=1, expert_hidden_size=mixture.top_k * mixture.expert_hidden_size + router)


def build_model(config: Config, vocab_size: int) -> PreTrainedModel:
    """From saved weights, or from scratch."""
    from language.small_models import language_model_config

    sizes = ("dim", "layers", "heads", "experts", "top_k", "expert_hidden_size", "context")
    source = (
        tk.data.model_folder(config.model)
        if config.model
        else language_model_config(
            config.architecture, vocab_size=vocab_size, **{name: getattr(config, name) for name in sizes}
        )
    )
    return tk.transformers.causal_lm(
        source, vocab_size=vocab_size, experts_implementation=tk.transformers.use_toolkit_kernel()
    )


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """Return `--optimizer.kind`, or any other optimizer of the model's parameters."""
    return tk.build_optimizer(model, config)


def main(config: Config) -> dict[str, Any]:
    from language.model_card import export_language_model
    from language.small_models import describe_language_model, sample_tokens

    with tk.start_run("lm_moe", config) as run:
        data = tk.load_text(
            config.dataset,
            config.data_dir,
            tokenizer=config.tokenizer,
            block_size=config.context,
            batch_size=config.batch_size,
            validation=config.validates,
            on_main=run.on_main_and_share,
        )
        if config.model:
            run.on_main_and_share(partial(tk.data.model_folder, config.model))  # one rank asks the Hub
        model = build_model(config, data.tokenizer.vocab_size)
        run.describe(dataset=data.name, dataset_notice=data.notice, **describe_language_model(model))
        if config.experts:
            tk.experts.shard_experts(
                model, run.expert_groups, spare_slots=config.spare_slots, placement=config.initial_placement
            )
        optimizer = build_optimizer(config, model)
        routers = tk.transformers.watch_routers(model) if config.experts else []
        penalty = tk.experts.RouterPenalty(routers, balance_weight=config.balance_weight, z_weight=config.z_weight)
        task = tk.LanguageModeling(bytes_per_token=data.bytes_per_token, penalty=penalty)

        def write_samples(trainer: tk.Trainer) -> None:
            prompts = data.prompts(3, config.context - config.sample_tokens)
            ids = sample_tokens(model, prompts, length=config.sample_tokens, seed=config.seed)
            samples = [data.tokenizer.decode(row) for row in ids.tolist()]
            run.print("\n\n".join(["", *samples]))
            if config.export:
                facts = config.model_dump() | run.facts | trainer.results
                folder = run.folder / "model"
                export_language_model(model, folder, tokenizer=data.tokenizer, facts=facts, samples=samples)

        size = 4 * config.batch_size
        return tk.fit(run, task, model, optimizer, data, eval_batch_size=size, at_end=write_samples)


PRESETS = {"full": full, "larger": larger, "debug": debug, "dense": dense}

if __name__ == "__main__":
    tk.run_recipe(main, PRESETS, __doc__)
