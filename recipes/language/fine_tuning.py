"""Parts of a fine-tuning run: evaluation on the old text, export, and a table of controls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

import toolkit as tk
from language.cached_run import cached_run

if TYPE_CHECKING:
    from pathlib import Path

    from finetune_moe import Config


def make_base(run: tk.Run, config: Config, old: tk.data.TextData | None, recipe: Path) -> str:
    """Return the folder of the model that `recipe`, lm_moe, trained on the text `old`, now or for an earlier run.

    `config` gives its `experts`, `top_k`, `expert_hidden_size` and `context`. A collective. Raises UserError without a
    text.
    """
    if old is None:
        raise tk.UserError(
            field="model", remedy="give a folder or Hub name, or take old_dataset=prose to train a small model on it"
        )
    flags = ["--dataset", str(config.old_dataset), "--sample-tokens", "1", "--export", "--cpu", "--tracker", "none"]
    for name in ("experts", "top_k", "expert_hidden_size", "context"):
        flags += [f"--{name.replace('_', '-')}", str(getattr(config, name))]
    preset = "debug" if config.preset == "debug" else "full"
    key = tk.data.identity_of(old.train)["sha256"]
    run.print(old.notice or f"the base is a model that lm_moe trains on {old.name}")
    return str(run.on_main_and_share(lambda: cached_run(recipe, [preset, *flags], needs="model", key=key)) / "model")


def foresee_memory(run: tk.Run, config: Config, base: str, build_optimizer: Callable[[nn.Module], Optimizer]) -> None:
    """Print the expected memory of each rank, before the model in `base` is loaded. A collective.

    Raises UserError if it exceeds the free memory, unless `config.force`. Does nothing if non-expert parameters are
    sharded.
    """
    if run.accelerator.is_fsdp2:
        return
    on_cpu = run.device.type == "cpu"
    remedy = "experts on a CPU are in the host's memory: give a folder, or leave it out"
    tk.require(not on_cpu or config.offload != "memory", "offload", config.offload, remedy)
    layout = tk.Layout(
        ep_size=run.expert_groups.ep_size,
        spare_slots=config.spare_slots,
        sequences=config.batch_size // run.world_size // run.accumulation,
        context=config.context,
        dtype=getattr(torch, config.dtype),
        quantize=config.quantize,
        offload=None if config.offload is None else "file" if on_cpu else "host",
        gradient_checkpointing=config.gradient_checkpointing,
    )
    adapt = partial(tk.peft.add_adapters, options=config)
    tk.check_memory(run, tk.data.model_folder(base), layout, adapt, build_optimizer, force=config.force)


def eval_batch_size(run: tk.Run) -> int:
    """Return the global evaluation batch size: at most a micro-batch, so that memory suffices."""
    return run.config.batch_size // run.accumulation


def evaluate_known_text(run: tk.Run, text: tk.data.TextData | None, blocks: int | None) -> list[tk.Evaluation]:
    """Evaluate the held-out part of a known text, or some of its blocks, in bits per byte, at start and at each epoch's
    end: `old_bits_per_byte_at_start`, `old_bits_per_byte`. Empty without `text`."""
    if text is None:
        return []
    run.describe(old_dataset=text.name)
    task = tk.LanguageModeling(bytes_per_token=text.bytes_per_token)
    size = eval_batch_size(run)
    return [tk.Evaluation.of(run, text.some_test(blocks), batch_size=size, name="old", task=task, at_start=True)]


def save_trained(model: nn.Module, folder: Path, options: tk.peft.AdapterOptions, tokenizer: tk.data.Tokenizer) -> None:
    """Save the trained weights in the run's `folder`: `adapter/` for unmodified PEFT, with `merge` also `merged/`; or
    `model/` without adapters. The latter two are for transformers, with the tokenizer. A collective.

    Raises UserError on every rank if a folder cannot be written.
    """
    whole = folder / ("merged" if options.lora_rank else "model")
    tk.transformers.save_pretrained(model, folder / "adapter" if options.lora_rank else whole)
    if options.merge:
        tk.peft.save_merged(model, whole)
    if options.merge or not options.lora_rank:
        tk.transformers.write_on_main(whole, tokenizer.save_pretrained)


def compare(
    run: tk.Run,
    config: Config,
    results: Mapping[str, Any],
    main: Callable[[Config], Mapping[str, Any]],
    controls: Sequence[Callable[[Config], Config]],
) -> list[dict[str, Any]]:
    """Return a row for the model before training, for this run, and for each of `controls`, which changes `config`.

    A control is a run of `main` in `controls/NAME` of this run's folder. Finished controls are reused, stopped controls
    are resumed. A collective.
    """
    rows = [_row("nothing", 0, results, "_at_start"), _row(results["trained"], results["trained_parameters"], results)]
    for change in controls:
        folder = run.folder / "controls" / change.__name__
        done = run.on_main_and_share(partial(tk.results_of, folder))
        if done is None or (config.extend and done["steps"] != results["steps"]):
            control = change(config).replace(run_dir=folder, resume="auto", resume_from=None, tracker="none")
            run.print(f"\ncontrol: {change.__name__}")
            done = dict(main(control.replace(extend=done is not None)))
        rows.append(_row(done["trained"], done["trained_parameters"], done))
    return rows


def _row(trained: str, parameters: int, results: Mapping[str, Any], when: str = "") -> dict[str, Any]:
    row = {"trained": trained, "parameters": parameters, "new text": results[f"test_bits_per_byte{when}"]}
    old = results.get(f"old_bits_per_byte{when}")
    return row if old is None else row | {"old text": old}
