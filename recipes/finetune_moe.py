"""Fine-tunes a pretrained MoE model on new text, with adapters of experts that are sharded over all processes.

python recipes/finetune_moe.py                   a Shakespeare model learns Python, with a table: 3 minutes on a CPU
python recipes/finetune_moe.py own --model FOLDER --dataset chats.jsonl --context 1024 --merge
python recipes/finetune_moe.py own --model FOLDER --data-dir TEXTS --num-processes 4 --replan.planner swap
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import PositiveInt

import toolkit as tk

if TYPE_CHECKING:
    import torch
    from torch import nn


class Config(tk.ExpertRunConfig, tk.peft.AdapterOptions):
    """The settings of a run; fields shared with other recipes are inherited."""

    model: str | None = None
    """Folder or Hub name of an MoE model. Default: one of --experts, trained by lm_moe on --old-dataset and cached."""
    tokenizer: str | None = None
    """bytes, or a folder or Hub name; none: the model's own."""
    old_dataset: str | None = None
    """Text that the model knows, evaluated before and after to see what it forgets; none: not looked at."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the model's weights; adapters are float32."""
    quantize: Literal["4bit"] | None = None
    """Keep the experts' frozen matrices in four bits each: 4bit; none: in --dtype."""
    context: PositiveInt = 128
    """Tokens in a block of text."""
    offload: Literal["memory"] | Path | None = None
    """Keep frozen experts of a GPU in the host's memory, or of any device in files of a folder; none: on the device."""
    gradient_checkpointing: bool = False
    """Activation checkpointing of the blocks: less memory, more time."""
    force: bool = False
    """Try also where a process is expected to take more memory than is free."""
    assistant_only_loss: bool = False
    """Take the loss over the assistant's tokens of conversations only."""
    eval_blocks: PositiveInt | None = None
    """Blocks of each held-out text to evaluate, spread evenly over it; none: all."""
    compare: bool = False
    """Also train adapters of attention alone, and all weights, for as many steps, and add a table to the summary."""

    def check_together(self) -> None:
        super().check_together()
        remedy = "experts in four bits are frozen: leave merge=True, compare=True and lora_rank=0 out"
        packs = self.quantize is not None and (self.merge or self.compare or self.lora_rank == 0)
        tk.require(not packs, "quantize", self.quantize, remedy)
        remedy = "with lora_rank=0 no expert is frozen: leave it out"
        tk.require(self.offload is None or self.lora_rank > 0, "offload", self.offload, remedy)


def full() -> Config:
    """The published table: Shakespeare learns Python's standard library, in three ways."""
    return Config(
        dataset="stdlib",
        old_dataset="prose",
        eval_blocks=1024,
        compare=True,
        max_steps=300,
        batch_size=32,
        schedule=tk.ScheduleOptions(warmup_steps=20),
        log_every=20,
        lr=2e-2,
        expert_hidden_size=64,
        balance_weight=0.0,
    )


def debug() -> Config:
    """Seconds: adapters of a tiny base."""
    small = full().replace(experts=4, expert_hidden_size=16, context=32, lora_rank=2, eval_blocks=128)
    return small.replace(old_dataset="reference", compare=False, max_steps=20, lr=1e-2, log_every=5)


def own() -> Config:
    """Your own --model and --dataset: adapters, no table."""
    alone = full().replace(dataset="auto", old_dataset=None, eval_blocks=None, max_steps=None)
    return alone.replace(compare=False, lr=1e-3)


def attention(config: Config) -> Config:
    """The control: adapters of attention only. The rates of controls, and of `full`, were chosen on validation text."""
    return config.replace(lora_experts=False, lr=4e-2)


def weights(config: Config) -> Config:
    """The control: all weights."""
    return config.replace(lora_rank=0, freeze_router=False, merge=False, offload=None, lr=4e-2)


def build_model(config: Config, base: str, vocab_size: int) -> nn.Module:
    """The base with its adapters."""
    import torch

    kernel, dtype = tk.transformers.use_toolkit_kernel(), getattr(torch, config.dtype)
    with tk.transformers.experts_in_files(quantize=config.quantize, offload=config.offload):
        plain = tk.transformers.causal_lm(
            tk.data.model_folder(base), dtype=dtype, vocab_size=vocab_size, experts_implementation=kernel
        )
    if config.gradient_checkpointing:
        tk.transformers.recompute_blocks(plain)
    return tk.peft.add_adapters(plain, config, seed=config.seed)


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """Return `--optimizer.kind`, or any other optimizer of the model's parameters."""
    return tk.build_optimizer(model, config)


def main(config: Config) -> dict[str, Any]:
    from language import fine_tuning

    with tk.start_run("finetune_moe", config) as run:
        if config.model is not None:
            run.on_main_and_share(partial(tk.data.model_folder, config.model))
        tokenizer = config.tokenizer or config.model or "bytes"
        load = partial(
            tk.load_text,
            tokenizer=tokenizer,
            block_size=config.context,
            batch_size=config.batch_size,
            on_main=run.on_main_and_share,
        )
        answers, validates = config.assistant_only_loss, config.validates
        data = load(config.dataset, config.data_dir, assistant_only_loss=answers, validation=validates)
        old = load(config.old_dataset, None) if config.old_dataset else None
        run.describe(dataset=data.name, dataset_notice=data.notice, trained=config.trained)
        base = config.model or fine_tuning.make_base(run, config, old, Path(__file__).with_name("lm_moe.py"))
        fine_tuning.foresee_memory(run, config, base, partial(build_optimizer, config))
        model = build_model(config, base, data.tokenizer.vocab_size)
        run.describe(trained_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad))
        tk.experts.shard_experts(
            model, run.expert_groups, spare_slots=config.spare_slots, placement=config.initial_placement
        )
        optimizer = build_optimizer(config, model)
        routers = tk.transformers.watch_routers(model)
        penalty = tk.experts.RouterPenalty(routers, balance_weight=config.balance_weight, z_weight=config.z_weight)
        task = tk.LanguageModeling(bytes_per_token=data.bytes_per_token, penalty=penalty)
        blocks = config.eval_blocks

        def save(trainer: tk.Trainer) -> None:
            fine_tuning.save_trained(model, run.folder, config, data.tokenizer)
            if config.compare:
                same = config.replace(model=base, tokenizer=tokenizer, compare=False)
                rows = fine_tuning.compare(run, same, run.facts | trainer.results, main, [attention, weights])
                run.describe(comparison=rows)

        return tk.fit(
            run,
            task,
            model,
            optimizer,
            tk.Splits(data.train, data.some_test(blocks), data.some_validation(blocks)),
            callbacks=fine_tuning.evaluate_known_text(run, old, blocks),
            eval_at_start=True,
            eval_batch_size=fine_tuning.eval_batch_size(run),
            at_end=save,
        )


PRESETS = {"full": full, "debug": debug, "own": own}

if __name__ == "__main__":
    tk.run_recipe(main, PRESETS, __doc__)
